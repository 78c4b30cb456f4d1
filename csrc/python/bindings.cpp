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

#include "cuda/kernels/launch_config.h"
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

int64_t int_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) throw NotFast();
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

c10::SmallVector<int64_t, 4> shape_of(PyObject* object) {
  const bool is_list = PyList_Check(object);
  if (!is_list && !PyTuple_Check(object)) throw NotFast();
  c10::SmallVector<int64_t, 4> shape;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < size; ++i) {
    shape.push_back(int_of(PySequence_Fast_GET_ITEM(object, i)));
  }
  return shape;
}

PyObject* wrap(Tensor output) { return THPVariable_Wrap(std::move(output)); }
PyObject* wrap(std::tuple<Tensor, Tensor> outputs) {
  pybind11::tuple pair(2);
  pair[0] = pybind11::reinterpret_steal<pybind11::object>(wrap(std::get<0>(std::move(outputs))));
  pair[1] = pybind11::reinterpret_steal<pybind11::object>(wrap(std::get<1>(std::move(outputs))));
  return pair.release().ptr();
}

template <class F>
PyObject* fast_call(PyObject* const* args, Py_ssize_t count, Py_ssize_t expected, F f) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == expected, "fusednorm._C: expected ", expected, " arguments, got ",
                   count);
  if (at::impl::torch_function_mode_enabled()) Py_RETURN_NONE;
  try {
    return wrap(f(args));
  } catch (const NotFast&) {
    Py_RETURN_NONE;
  }
  END_HANDLE_TH_ERRORS
}

fusednorm::LayerNormOptions layer_norm_options_of(PyObject* const* a) {
  return {double_of(a[0]), bool_of(a[1]), bool_of(a[2])};
}

std::optional<double> optional_double_of(PyObject* object) {
  return object == Py_None ? std::nullopt : std::optional<double>(double_of(object));
}

fusednorm::RmsNormOptions rms_norm_options_of(PyObject* const* a) {
  if (!PyUnicode_Check(a[1])) throw NotFast();
  const char* casting_mode = PyUnicode_AsUTF8(a[1]);
  if (casting_mode == nullptr) throw python_error();
  return {double_of(a[0]), casting_mode};
}

// (input, normalized_shape, weight, bias, eps, weight_offset, eps_outside, unbiased)
PyObject* layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 8, [](PyObject* const* a) {
    const Tensor& input = tensor_of(a[0]);
    const auto shape = shape_of(a[1]);
    const auto weight = optional_tensor_of(a[2]), bias = optional_tensor_of(a[3]);
    const double eps = double_of(a[4]);
    const auto options = layer_norm_options_of(a + 5);
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
    const std::optional<double> eps = optional_double_of(a[3]);
    const auto options = rms_norm_options_of(a + 4);
    pybind11::gil_scoped_release no_gil;
    return fusednorm::rms_norm(input, shape, weight, eps, options);
  });
}

// (input, g, eps)
PyObject* scale_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 3, [](PyObject* const* a) {
    const Tensor &input = tensor_of(a[0]), &g = tensor_of(a[1]);
    const double eps = double_of(a[2]);
    pybind11::gil_scoped_release no_gil;
    return fusednorm::scale_norm(input, g, eps);
  });
}

// (input, num_groups, weight, bias, eps)
PyObject* group_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 5, [](PyObject* const* a) {
    const Tensor& input = tensor_of(a[0]);
    const int64_t num_groups = int_of(a[1]);
    const auto weight = optional_tensor_of(a[2]), bias = optional_tensor_of(a[3]);
    const double eps = double_of(a[4]);
    pybind11::gil_scoped_release no_gil;
    return fusednorm::group_norm(input, num_groups, weight, bias, eps);
  });
}

// (input, residual, normalized_shape, weight, bias, eps, alpha, weight_offset, eps_outside,
// unbiased)
PyObject* add_layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 10, [](PyObject* const* a) {
    const Tensor &input = tensor_of(a[0]), &residual = tensor_of(a[1]);
    const auto shape = shape_of(a[2]);
    const auto weight = optional_tensor_of(a[3]), bias = optional_tensor_of(a[4]);
    const double eps = double_of(a[5]), alpha = double_of(a[6]);
    const auto options = layer_norm_options_of(a + 7);
    pybind11::gil_scoped_release no_gil;
    return fusednorm::add_layer_norm(input, residual, shape, weight, bias, eps, alpha, options);
  });
}

// (input, residual, normalized_shape, weight, eps or None, alpha, weight_offset, casting_mode)
PyObject* add_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return fast_call(args, count, 8, [](PyObject* const* a) {
    const Tensor &input = tensor_of(a[0]), &residual = tensor_of(a[1]);
    const auto shape = shape_of(a[2]);
    const auto weight = optional_tensor_of(a[3]);
    const std::optional<double> eps = optional_double_of(a[4]);
    const double alpha = double_of(a[5]);
    const auto options = rms_norm_options_of(a + 6);
    pybind11::gil_scoped_release no_gil;
    return fusednorm::add_rms_norm(input, residual, shape, weight, eps, alpha, options);
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

// ---- The launch plans of the CUDA kernels, for explain.py: pure functions, in every build ----

fusednorm::DType dtype_of(const std::string& argument, const std::string& name) {
  if (name == "float64") return fusednorm::DType::kFloat64;
  if (name == "float32") return fusednorm::DType::kFloat32;
  if (name == "bfloat16") return fusednorm::DType::kBFloat16;
  TORCH_CHECK(name == "float16", "fusednorm.explain: ", argument,
              ": expected float64, float32, bfloat16 or float16, got ", name);
  return fusednorm::DType::kFloat16;
}

pybind11::dict explain(int64_t rows, int64_t cols, const std::string& in, const std::string& other,
                       const std::string& norm, int arch) {
  using pybind11::literals::operator""_a;
  namespace cuda = fusednorm::cuda;
  const auto in_dtype = dtype_of("dtype", in), other_dtype = dtype_of("out_dtype", other);
  TORCH_CHECK(in == other || (other == "float32" && in != "float64"),
              "fusednorm.explain: out_dtype: expected the input's dtype ", in, " or float32, got ",
              other);
  TORCH_CHECK(norm == "layer_norm" || norm == "rms_norm",
              "fusednorm.explain: norm: expected layer_norm or rms_norm, got ", norm);
  TORCH_CHECK(rows >= 0 && cols >= 1,
              "fusednorm.explain: shape: expected rows of 1 column at "
              "least, got ",
              rows, " rows of ", cols);
  const auto a = cuda::architecture(arch);
  const auto f = cuda::forward_plan(cols, in_dtype, other_dtype, a);
  const bool centered = norm == "layer_norm";
  const auto b = cuda::backward_plan(rows, cols, in_dtype, other_dtype, centered, a);
  const char* const residence = f.residence == cuda::Residence::kRegisters ? "registers"
                                : f.residence == cuda::Residence::kShared  ? "shared memory"
                                                                           : "streaming";
  const double traffic =
      static_cast<double>(rows) * (2 * cuda::size_of(in_dtype) + cuda::size_of(other_dtype));
  const double partial =
      static_cast<double>(b.groups) * 2 * (centered ? 2 : 1) * cuda::accumulation_size(in_dtype);
  return pybind11::dict(
      "forward"_a = pybind11::dict(
          "kernel"_a = residence, "unit_bytes"_a = f.unit_bytes, "columns"_a = f.columns,
          "units"_a = f.units, "threads_per_row"_a = f.threads_per_row,
          "rows_per_block"_a = f.rows_per_block, "threads"_a = f.threads, "cluster"_a = f.cluster,
          "shared_bytes"_a = f.shared_bytes, "max_registers"_a = f.max_registers,
          "blocks_per_sm"_a = cuda::blocks_per_sm(f.threads, f.max_registers, f.shared_bytes, a),
          "bytes_in_flight"_a = f.bytes_in_flight),
      "backward"_a = pybind11::dict(
          "unit_bytes"_a = b.unit_bytes, "columns"_a = b.columns, "units"_a = b.units,
          "threads_per_row"_a = b.threads_per_row, "rows_per_block"_a = b.rows_per_block,
          "threads"_a = b.threads, "blocks_per_row"_a = b.blocks_per_row, "cluster"_a = b.cluster,
          "launches"_a = b.cluster < b.blocks_per_row ? 2 : 1, "groups"_a = b.groups,
          "blocks"_a = b.groups * b.blocks_per_row, "stages"_a = b.stages,
          "shared_bytes"_a = b.shared_bytes, "max_registers"_a = b.max_registers,
          "blocks_per_sm"_a = cuda::blocks_per_sm(b.threads, b.max_registers, b.shared_bytes, a),
          "bytes_in_flight"_a = b.bytes_in_flight,
          "partial_share"_a = rows > 0 ? partial / traffic : 0.0));
}

PyMethodDef kFastMethods[] = {
    {"layer_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(layer_norm)),
     METH_FASTCALL, nullptr},
    {"rms_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(rms_norm)), METH_FASTCALL,
     nullptr},
    {"scale_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(scale_norm)),
     METH_FASTCALL, nullptr},
    {"group_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(group_norm)),
     METH_FASTCALL, nullptr},
    {"add_layer_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(add_layer_norm)),
     METH_FASTCALL, nullptr},
    {"add_rms_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(add_rms_norm)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("explain", &explain);
  m.def("quantisation_loss", [](int64_t blocks, int sms) {
    return blocks > 0 ? fusednorm::cuda::quantisation_loss(blocks, sms) : 0.0;
  });
  if (PyModule_AddFunctions(m.ptr(), kFastMethods) != 0) throw pybind11::error_already_set();
}
