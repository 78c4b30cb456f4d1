// Every check of what a user passes, for all devices and all routes. A message reads
//     fusednorm::OPERATOR: ARGUMENT: expected WHAT, got WHAT
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "ops.h"

namespace fusednorm::checks {

inline bool same_shape(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sym_eq(b[i]).expect_true(__FILE__, __LINE__)) return false;
  }
  return true;
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

/// A dense tensor of one of the four dtypes.
inline void check_tensor(const Norm& norm, const char* argument, const Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "fusednorm::", norm.op, ": ", argument,
              ": expected a tensor, got none");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), "fusednorm::", norm.op, ": ",
              argument, ": expected a dense (strided) tensor, got ",
              tensor.is_nested() ? c10::str("a nested tensor") : c10::str(tensor.layout()));
  TORCH_CHECK(is_supported(tensor.scalar_type()), "fusednorm::", norm.op, ": ", argument,
              ": expected dtype float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

/// A dense tensor beside the input: on its device, of the shape given.
inline void check_beside(const Norm& norm, const char* argument, const Tensor& tensor,
                         const Tensor& input, c10::SymIntArrayRef shape, const char* shape_name) {
  check_tensor(norm, argument, tensor);
  TORCH_CHECK(tensor.device() == input.device(), "fusednorm::", norm.op, ": ", argument,
              ": expected on the input's device ", input.device(), ", got ", tensor.device());
  TORCH_CHECK(same_shape(tensor.sym_sizes(), shape), "fusednorm::", norm.op, ": ", argument,
              ": expected shape ", shape, " (", shape_name, "), got ", tensor.sym_sizes());
}

/// Of the input's dtype, or fp32 beside a 16-bit input.
inline void check_wider(const Norm& norm, const char* argument, at::ScalarType dtype,
                        at::ScalarType input_dtype) {
  TORCH_CHECK(dtype == input_dtype || (dtype == at::kFloat && input_dtype != at::kDouble),
              "fusednorm::", norm.op, ": ", argument, ": expected the input's dtype ", input_dtype,
              input_dtype == at::kDouble ? "" : " or Float", ", got ", dtype);
}

inline c10::SymIntArrayRef leading_shape(const Tensor& input,
                                         c10::SymIntArrayRef normalized_shape) {
  return input.sym_sizes().slice(0, input.dim() - normalized_shape.size());
}

/// What forward and backward share: the numbers, the input, normalized_shape, weight and bias.
inline void check_norm(const Norm& norm, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias) {
  check_tensor(norm, "input", input);
  TORCH_CHECK(!normalized_shape.empty(), "fusednorm::", norm.op,
              ": normalized_shape: expected at least one dimension, got ", normalized_shape);
  const auto sizes = input.sym_sizes();
  const bool fits =
      sizes.size() >= normalized_shape.size() &&
      same_shape(sizes.slice(sizes.size() - normalized_shape.size()), normalized_shape);
  TORCH_CHECK(fits, "fusednorm::", norm.op, ": input: expected shape [*, ",
              c10::Join(", ", normalized_shape), "] (normalized_shape = ", normalized_shape,
              "), got ", sizes);
  if (weight.has_value() && weight->defined()) {
    check_beside(norm, "weight", *weight, input, normalized_shape, "normalized_shape");
  }
  if (bias.has_value() && bias->defined()) {
    check_beside(norm, "bias", *bias, input, normalized_shape, "normalized_shape");
  }
  TORCH_CHECK(!norm.eps.has_value() || std::isfinite(*norm.eps), "fusednorm::", norm.op,
              ": eps: expected a finite number, got ", *norm.eps);
  TORCH_CHECK(std::isfinite(norm.weight_offset), "fusednorm::", norm.op,
              ": weight_offset: expected a finite number, got ", norm.weight_offset);
  TORCH_CHECK(norm.casting_mode == "default" || norm.llama(), "fusednorm::", norm.op,
              ": casting_mode: expected \"default\" or \"llama\", got \"", norm.casting_mode, "\"");
  if (norm.unbiased) {
    c10::SymInt cols = 1;
    for (const auto& size : normalized_shape) cols *= size;
    TORCH_CHECK(cols != 1, "fusednorm::", norm.op,
                ": unbiased: expected rows of at least 2 elements, got normalized_shape ",
                normalized_shape, ": N - 1 is 0");
  }
}

inline void check_forward(const Norm& norm, const ForwardInputs& in,
                          std::optional<at::ScalarType> out_dtype = {}) {
  check_norm(norm, in.input, in.normalized_shape, in.weight, in.bias);
  if (out_dtype) check_wider(norm, "out_dtype", *out_dtype, in.input.scalar_type());
}

inline void check_backward(const Norm& norm, const BackwardInputs& in) {
  check_norm(norm, in.input, in.normalized_shape, in.weight, in.bias);
  check_beside(norm, "grad_output", in.grad_output, in.input, in.input.sym_sizes(),
               "the input's shape");
  check_wider(norm, "grad_output", in.grad_output.scalar_type(), in.input.scalar_type());
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const auto check_statistic = [&](const char* argument, const Tensor& statistic) {
    check_beside(norm, argument, statistic, in.input, leading_shape(in.input, in.normalized_shape),
                 "the leading dimensions");
    TORCH_CHECK(statistic.scalar_type() == acc_dtype, "fusednorm::", norm.op, ": ", argument,
                ": expected dtype ", acc_dtype, ", got ", statistic.scalar_type());
  };
  if (norm.centered) check_statistic("mean", in.mean);
  check_statistic("rstd", in.rstd);
}

// The dtypes of the gradients: of what they belong to; where that is absent, the weight's or
// input's.
inline at::ScalarType grad_weight_dtype(const BackwardInputs& in) {
  return in.weight.has_value() && in.weight->defined() ? in.weight->scalar_type()
                                                       : in.input.scalar_type();
}
inline at::ScalarType grad_bias_dtype(const BackwardInputs& in) {
  return in.bias.has_value() && in.bias->defined() ? in.bias->scalar_type() : grad_weight_dtype(in);
}

}  // namespace fusednorm::checks
