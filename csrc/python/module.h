// The parts of the Python module _C.
#pragma once

#include <pybind11/pybind11.h>

namespace fusednorm::python {

void add_explain(pybind11::module_& m);

}  // namespace fusednorm::python
