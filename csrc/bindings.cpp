// The Python module _C: the fast entry into the dispatcher, and build information.
//
// torch.ops spends about 2 us of a small call on parsing boxed arguments. This entry spends 0.1 us,
// and hands over to the same dispatcher. It answers None where only torch.ops is right (tensor
// subclasses,
// __torch_function__ modes), and functional.py takes that road.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/Version.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include "fusednorm.h"

#define FN_STRING_(x) #x
#define FN_STRING(x) FN_STRING_(x)

namespace {

using at::Tensor;

/// What the fast entry cannot take: torch.ops does.
struct NotFast {};

const Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_CheckExact(object)) throw NotFast();
  return THPVariable_Unpack(object);
}

std::optional<Tensor> optional_tensor_of(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return tensor_of(object);
}

double double_of(PyObject* object) {
  if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) throw NotFast();
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw python_error();
  return value;
}

bool bool_of(PyObject* object) {
  if (!PyBool_Check(object)) throw NotFast();
  return object == Py_True;
}

c10::SmallVector<int64_t, 4> shape_of(PyObject* object) {
  const bool is_list = PyList_Check(object);
  if (!is_list && !PyTuple_Check(object)) throw NotFast();
  c10::SmallVector<int64_t, 4> shape;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(object, i);
    if (!PyLong_CheckExact(item)) throw NotFast();
    const int64_t value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    shape.push_back(value);
  }
  return shape;
}

template <class F>
PyObject* fast_call(PyObject* const* args, Py_ssize_t count, Py_ssize_t expected, F f) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == expected, "fusednorm._C: expected ", expected, " arguments, got ",
                   count);
  if (at::impl::torch_function_mode_enabled()) Py_RETURN_NONE;
  try {
    return THPVariable_Wrap(f(args));
  } catch (const NotFast&) {
    Py_RETURN_NONE;
  }
  END_HANDLE_TH_ERRORS
}

// (input, normalized_shape, weight, bias, eps, weight_offset, eps_outside, unbiased)
PyObject* layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 8, [](PyObject* const* a) {
    const Tensor& input = tensor_of(a[0]);
    const auto shape = shape_of(a[1]);
    const auto weight = optional_tensor_of(a[2]), bias = optional_tensor_of(a[3]);
    const double eps = double_of(a[4]);
    const fusednorm::LayerNormOptions options{double_of(a[5]), bool_of(a[6]), bool_of(a[7])};
    pybind11::gil_scoped_release no_gil;
    return fusednorm::layer_norm(input, shape, weight, bias, eps, options);
  });
}

// (input, normalized_shape, weight, eps or None, weight_offset, casting_mode)
PyObject* rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 6, [](PyObject* const* a) {
    const Tensor& input = tensor_of(a[0]);
    const auto shape = shape_of(a[1]);
    const auto weight = optional_tensor_of(a[2]);
    const std::optional<double> eps =
        a[3] == Py_None ? std::nullopt : std::optional<double>(double_of(a[3]));
    if (!PyUnicode_Check(a[5])) throw NotFast();
    const char* casting_mode = PyUnicode_AsUTF8(a[5]);
    if (casting_mode == nullptr) throw python_error();
    const fusednorm::RmsNormOptions options{double_of(a[4]), casting_mode};
    pybind11::gil_scoped_release no_gil;
    return fusednorm::rms_norm(input, shape, weight, eps, options);
  });
}

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
  info["cpu_kernels"] = fusednorm::cpu_kernels();
  return info;
}

PyMethodDef kFastMethods[] = {
    {"layer_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(layer_norm)),
     METH_FASTCALL, nullptr},
    {"rms_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(rms_norm)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  if (PyModule_AddFunctions(m.ptr(), kFastMethods) != 0) throw pybind11::error_already_set();
}
