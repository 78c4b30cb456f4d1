// Every check of what a user passes, for all devices and all routes. A message reads
//     fusednorm::OPERATOR: ARGUMENT: expected WHAT, got WHAT
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "add_ops.h"

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

inline void check_eps(const Norm& norm) {
  if (!norm.eps.has_value()) return;
  TORCH_CHECK(std::isfinite(*norm.eps) && (!norm.clamp || *norm.eps > 0), "fusednorm::", norm.op,
              ": eps: expected a finite number", norm.clamp ? " above 0" : "", ", got ", *norm.eps);
}

/// What forward and backward share: the numbers, the input, normalized_shape, weight and bias.
inline void check_norm(const Norm& norm, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias,
                       const char* argument = "input") {
  check_tensor(norm, argument, input);
  TORCH_CHECK(!normalized_shape.empty(), "fusednorm::", norm.op,
              ": normalized_shape: expected at least one dimension, got ", normalized_shape);
  const auto sizes = input.sym_sizes();
  const bool fits =
      sizes.size() >= normalized_shape.size() &&
      same_shape(sizes.slice(sizes.size() - normalized_shape.size()), normalized_shape);
  TORCH_CHECK(fits, "fusednorm::", norm.op, ": ", argument, ": expected shape [*, ",
              c10::Join(", ", normalized_shape), "] (normalized_shape = ", normalized_shape,
              "), got ", sizes);
  if (weight.has_value() && weight->defined()) {
    check_beside(norm, "weight", *weight, input, normalized_shape, "normalized_shape");
  }
  if (bias.has_value() && bias->defined()) {
    check_beside(norm, "bias", *bias, input, normalized_shape, "normalized_shape");
  }
  check_eps(norm);
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

/// mean and rstd of the rows of `input`.
inline void check_statistics(const Norm& norm, const BackwardInputs& in) {
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

inline void check_backward(const Norm& norm, const BackwardInputs& in) {
  check_norm(norm, in.input, in.normalized_shape, in.weight, in.bias);
  check_beside(norm, "grad_output", in.grad_output, in.input, in.input.sym_sizes(),
               "the input's shape");
  check_wider(norm, "grad_output", in.grad_output.scalar_type(), in.input.scalar_type());
  check_statistics(norm, in);
}

// ---- The fused residual operators ----

inline void check_alpha(const Norm& norm, double alpha) {
  TORCH_CHECK(std::isfinite(alpha), "fusednorm::", norm.op,
              ": alpha: expected a finite number, got ", alpha);
}

inline void check_add(const Norm& norm, const AddInputs& in,
                      std::optional<at::ScalarType> out_dtype = {}) {
  check_norm(norm, in.input, in.normalized_shape, in.weight, in.bias);
  check_beside(norm, "residual", in.residual, in.input, in.input.sym_sizes(), "the input's shape");
  check_alpha(norm, in.alpha);
  if (out_dtype) check_wider(norm, "out_dtype", *out_dtype, in.input.scalar_type());
}

inline void check_add_backward(const Norm& norm, const AddBackwardInputs& in) {
  const BackwardInputs of_norm = in.of_norm();
  const auto shape = in.residual_out.sym_sizes();
  check_norm(norm, in.residual_out, in.normalized_shape, in.weight, in.bias, "residual_out");
  TORCH_CHECK(is_supported(in.input_dtype), "fusednorm::", norm.op,
              ": input_dtype: expected float64, float32, bfloat16 or float16, got ",
              in.input_dtype);
  check_beside(norm, "grad_output", in.grad_output, in.residual_out, shape,
               "the shape of residual_out");
  check_wider(norm, "grad_output", in.grad_output.scalar_type(), in.input_dtype);
  if (in.grad_residual_out.has_value() && in.grad_residual_out->defined()) {
    check_beside(norm, "grad_residual_out", *in.grad_residual_out, in.residual_out, shape,
                 "the shape of residual_out");
    TORCH_CHECK(in.grad_residual_out->scalar_type() == in.residual_out.scalar_type(),
                "fusednorm::", norm.op, ": grad_residual_out: expected the dtype of residual_out ",
                in.residual_out.scalar_type(), ", got ", in.grad_residual_out->scalar_type());
  }
  check_alpha(norm, in.alpha);
  check_statistics(norm, of_norm);
}

/// Memory in which no two elements are one: each stride passes over what the smaller ones reach.
/// Where sizes are symbols, the run decides.
inline void check_writable(const Norm& norm, const char* argument, const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_contiguous()) return;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (sizes[d] > 1) dims.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    TORCH_CHECK(stride > reach, "fusednorm::", norm.op, ": ", argument,
                ": expected memory of its own for each element (it is written to), got shape ",
                sizes, " with strides ", strides, ": expanded or overlapping");
    reach += (size - 1) * stride;
  }
}

inline void check_add_in_place(const Norm& norm, const AddInputs& in) {
  check_add(norm, in);
  check_writable(norm, "residual", in.residual);
}

/// The memory of a strided tensor: runs of `run` bytes, whose beginnings lie multiples of `step`
/// apart (0: there is one), all within [begin, end).
struct MemoryRuns {
  int64_t begin, end, run, step = 0;

  explicit MemoryRuns(const Tensor& tensor) {
    const int64_t size = tensor.element_size();
    begin = reinterpret_cast<int64_t>(tensor.const_data_ptr());
    run = size;
    c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // stride in bytes, size
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d) * size, tensor.size(d));
    }
    std::sort(dims.begin(), dims.end());
    end = begin + run;
    for (const auto& [stride, count] : dims) {
      end += stride * (count - 1);
      if (stride == run && step == 0) {
        run *= count;
      } else {
        step = std::gcd(step, stride);
      }
    }
  }
};

/// Whether no byte of one tensor lies in the other; false too where it would take a search to tell.
inline bool lie_apart(const MemoryRuns& first, const MemoryRuns& second) {
  if (first.end <= second.begin || second.end <= first.begin) return true;
  const int64_t step = std::gcd(first.step, second.step);
  if (step == 0) return false;
  const int64_t distance = ((second.begin - first.begin) % step + step) % step;
  return distance >= first.run && step - distance >= second.run;
}

/// What is read must not lie in what is written; `input` may be the residual itself.
inline void check_apart(const Norm& norm, const AddInputs& in) {
  if (in.residual.numel() == 0) return;
  const MemoryRuns residual(in.residual);
  const auto check = [&](const char* argument, const OptionalTensor& tensor, bool may_be_same) {
    if (!tensor.has_value() || !tensor->defined() || tensor->numel() == 0) return;
    const bool same = tensor->const_data_ptr() == in.residual.const_data_ptr() &&
                      tensor->scalar_type() == in.residual.scalar_type() &&
                      tensor->sizes() == in.residual.sizes() &&
                      tensor->strides() == in.residual.strides();
    const bool apart = (same && may_be_same) || lie_apart(residual, MemoryRuns(*tensor));
    TORCH_CHECK(apart, "fusednorm::", norm.op, ": ", argument,
                ": expected memory apart from residual, which is written to, got an overlap");
  };
  check("input", in.input, true);
  check("weight", in.weight, false);
  check("bias", in.bias, false);
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
