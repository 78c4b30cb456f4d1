// The launch plans of the CUDA kernels, for explain: pure functions, in every build.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "cuda/kernels/launch_config.h"
#include "python/module.h"

namespace fusednorm::python {
namespace {

DType dtype_of(const std::string& argument, const std::string& name) {
  if (name == "float64") return DType::kFloat64;
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  TORCH_CHECK(name == "float16", "fusednorm.explain: ", argument,
              ": expected float64, float32, bfloat16 or float16, got ", name);
  return DType::kFloat16;
}

pybind11::dict explain(int64_t rows, int64_t cols, const std::string& in, const std::string& other,
                       const std::string& norm, int arch) {
  using pybind11::literals::operator""_a;
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

}  // namespace

void add_explain(pybind11::module_& m) {
  m.def("explain", &explain);
  m.def("quantisation_loss", [](int64_t blocks, int sms) {
    return blocks > 0 ? cuda::quantisation_loss(blocks, sms) : 0.0;
  });
}

}  // namespace fusednorm::python
