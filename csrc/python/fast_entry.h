// The fast entry into the dispatcher: from Python's arguments to a Call, by the operator's own list
// of arguments.
//
// torch.ops spends about 2 us of a small call on parsing boxed arguments. This entry spends 0.1 us,
// and hands over to the same dispatcher. It answers None where only torch.ops is right (tensor
// subclasses, __torch_function__ modes), and functional.py takes that road.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "operators/operators.h"

namespace fusednorm::python {

/// What the fast entry cannot take: torch.ops does.
struct NotFast {};

// ---- Values: what Python gave, for as long as the call lives ----

template <class Passed>
struct Value;

inline const Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_CheckExact(object)) throw NotFast();
  return THPVariable_Unpack(object);
}
template <>
struct Value<const Tensor&> {
  const Tensor* held = nullptr;
  const Tensor& from(PyObject* object) { return *(held = &tensor_of(object)); }
};
template <>
struct Value<const OptionalTensor&> {
  OptionalTensor held;
  const OptionalTensor& from(PyObject* object) {
    if (object != Py_None) held = tensor_of(object);
    return held;
  }
};
template <>
struct Value<double> {
  double from(PyObject* object) {
    if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) throw NotFast();
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw python_error();
    return value;
  }
};
template <>
struct Value<std::optional<double>> {
  std::optional<double> from(PyObject* object) {
    return object == Py_None ? std::nullopt : std::optional<double>(Value<double>().from(object));
  }
};
template <>
struct Value<bool> {
  bool from(PyObject* object) {
    if (!PyBool_Check(object)) throw NotFast();
    return object == Py_True;
  }
};
template <>
struct Value<int64_t> {
  int64_t from(PyObject* object) {
    if (!PyLong_CheckExact(object)) throw NotFast();
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }
};
template <>
struct Value<std::string_view> {
  std::string_view from(PyObject* object) {
    if (!PyUnicode_Check(object)) throw NotFast();
    const char* const text = PyUnicode_AsUTF8(object);
    if (text == nullptr) throw python_error();
    return text;
  }
};
template <>
struct Value<c10::SymIntArrayRef> {
  c10::SmallVector<int64_t, 4> held;
  c10::SymIntArrayRef from(PyObject* object) {
    if (!PyList_Check(object) && !PyTuple_Check(object)) throw NotFast();
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    for (Py_ssize_t i = 0; i < size; ++i) {
      held.push_back(Value<int64_t>().from(PySequence_Fast_GET_ITEM(object, i)));
    }
    return c10::fromIntArrayRefSlow(held);
  }
};

// ---- Calls ----

template <class... Items>
constexpr size_t size_of(List<Items...>) {
  return sizeof...(Items);
}

/// The argument's place in the list, or its size.
template <class... Arguments>
size_t place_of([[maybe_unused]] PyObject* name, List<Arguments...>) {
  size_t place = 0;
  const bool found =
      ((PyUnicode_CompareWithASCIIString(name, Arguments::name.data()) == 0 || (++place, false)) ||
       ...);
  static_cast<void>(found);
  return place;
}

template <class Op, class... Arguments>
Outputs outputs(PyObject* const* values, List<Arguments...>) {
  std::tuple<Value<typename Arguments::Passed>...> held;
  Call call = Op::call();
  [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
    (((values[kPlaces] != nullptr)
          ? Arguments::put(&call, std::get<kPlaces>(held).from(values[kPlaces]))
          : void()),
     ...);
  }
  (std::index_sequence_for<Arguments...>{});
  pybind11::gil_scoped_release no_gil;
  return dispatch_outputs(call);
}

inline PyObject* wrap(Tensor output) { return THPVariable_Wrap(std::move(output)); }
inline PyObject* wrap(std::tuple<Tensor, Tensor> outputs) {
  pybind11::tuple pair(2);
  pair[0] = pybind11::reinterpret_steal<pybind11::object>(wrap(std::get<0>(std::move(outputs))));
  pair[1] = pybind11::reinterpret_steal<pybind11::object>(wrap(std::get<1>(std::move(outputs))));
  return pair.release().ptr();
}

/// A method of _C: positional arguments in the schema's order, of which keyword-only ones may be
/// left out, or given by name.
template <class Op>
PyObject* fast_method(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  constexpr typename Op::Arguments kArguments;
  constexpr size_t kSize = size_of(kArguments);
  constexpr auto kRequired = static_cast<Py_ssize_t>(size_of(typename Op::Positional{}));
  TORCH_CHECK_TYPE(count >= kRequired && count <= static_cast<Py_ssize_t>(kSize), "fusednorm._C.",
                   Op::name(), ": expected ", kRequired, " to ", kSize,
                   " positional arguments, got ", count);
  PyObject* values[kSize] = {};
  for (Py_ssize_t i = 0; i < count; ++i) values[i] = args[i];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    const size_t place = static_cast<size_t>(kRequired) + place_of(name, typename Op::Keywords{});
    TORCH_CHECK_TYPE(place < kSize && values[place] == nullptr, Op::name(),
                     "() got an unexpected keyword argument '", PyUnicode_AsUTF8(name), "'");
    values[place] = args[count + i];
  }
  if (at::impl::torch_function_mode_enabled()) Py_RETURN_NONE;
  try {
    return wrap(pack(outputs<Op>(values, kArguments), typename Op::Returns{}));
  } catch (const NotFast&) {
    Py_RETURN_NONE;
  }
  END_HANDLE_TH_ERRORS
}

}  // namespace fusednorm::python
