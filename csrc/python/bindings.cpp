// The Python module _C: the fast entry into the dispatcher, what is declared in C++ and read in
// Python, and build information.
#include <ATen/Version.h>
#include <torch/version.h>

#include "fusednorm.h"
#include "python/fast_entry.h"
#include "python/module.h"

#define FN_STRING_(x) #x
#define FN_STRING(x) FN_STRING_(x)

namespace fusednorm::python {
namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = FN_STRING(FUSEDNORM_VERSION);
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
#if defined(FUSEDNORM_WITH_CUDA)
  info["cuda"] = FN_STRING(FUSEDNORM_CUDA_VERSION);
  info["cuda_architectures"] = FN_STRING(FUSEDNORM_CUDA_ARCHITECTURES);
#else
  info["cuda"] = pybind11::none();
  info["cuda_architectures"] = pybind11::none();
#endif
  info["torch_cpu_capability"] = at::get_cpu_capability();
  info["cpu_kernels"] = cpu_kernels();
  const CacheSizes caches = cache_sizes();
  info["caches"] = pybind11::dict(pybind11::arg("l1") = caches.l1, pybind11::arg("l2") = caches.l2,
                                  pybind11::arg("last_level") = caches.last_level,
                                  pybind11::arg("source") = caches.source);
  return info;
}

// ---- Declarations ----

/// The options of a norm, in order: (name, default, choices, sentence) of each.
template <class... Options>
pybind11::list options_of(List<Options...>) {
  pybind11::list options;
  const auto append = [&](auto option) {
    using Option = decltype(option);
    pybind11::list choices;
    for (const auto choice : Option::allowed.choices) {
      if (!choice.empty()) choices.append(choice);
    }
    options.append(pybind11::make_tuple(Option::name, Option::fallback, pybind11::tuple(choices),
                                        Option::sentence));
  };
  (append(Options{}), ...);
  return options;
}

/// What each tensor argument's shape is, beside that of the rows.
pybind11::dict tensor_arguments() {
  pybind11::dict shapes;
#define FN_APPEND(name_, presence, shape_, dtype_, gradient_)           \
  shapes[#name_] = arg::name_::shape == Shape::kParameter ? "parameter" \
                   : arg::name_::shape == Shape::kLeading ? "leading"   \
                                                          : "rows";
  FN_TENSORS(FN_APPEND)
#undef FN_APPEND
  return shapes;
}

// ---- Fast entries ----

template <class Op>
PyMethodDef fast(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fast_method<Op>)),
          METH_FASTCALL | METH_KEYWORDS, nullptr};
}

/// scale_norm's schema is its own: (input, g, eps).
PyObject* scale_norm_method(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "fusednorm._C.scale_norm: expected 3 arguments, got ", count);
  if (at::impl::torch_function_mode_enabled()) Py_RETURN_NONE;
  try {
    const Tensor &input = tensor_of(args[0]), &g = tensor_of(args[1]);
    const double eps = Value<double>().from(args[2]);
    const auto call = [&] {
      pybind11::gil_scoped_release no_gil;
      return scale_norm(input, g, eps);
    };
    return wrap(call());
  } catch (const NotFast&) {
    Py_RETURN_NONE;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef fast_methods[] = {
    fast<Operator<LayerNorm, Form::kOutput>>("layer_norm"),
    fast<Operator<LayerNorm, Form::kAdd>>("add_layer_norm"),
    fast<Operator<RmsNorm, Form::kOutput>>("rms_norm"),
    fast<Operator<RmsNorm, Form::kAdd>>("add_rms_norm"),
    fast<Operator<GroupNorm, Form::kOutput>>("group_norm"),
    {"scale_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(scale_norm_method)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace fusednorm::python

PYBIND11_MODULE(_C, m) {
  namespace python = fusednorm::python;
  m.def("build_info", &python::build_info);
  m.attr("layer_norm_options") = python::options_of(fusednorm::LayerNormOptionList{});
  m.attr("rms_norm_options") = python::options_of(fusednorm::RmsNormOptionList{});
  m.attr("tensor_arguments") = python::tensor_arguments();
  python::add_explain(m);
  if (PyModule_AddFunctions(m.ptr(), python::fast_methods) != 0) {
    throw pybind11::error_already_set();
  }
}
