// GroupNorm's operators, as ops.h has the row norms': every dispatch key implements three
// functions.
//
// A row of row_norm.h is one group of one sample: channels [g * C / G, (g + 1) * C / G) of the
// input [N, C, *] at all its positions. `normalized_shape` of the inputs is empty and not read.
#pragma once

#include <torch/library.h>

#include "ops.h"

namespace fusednorm {

struct GroupNorm {
  Norm norm;
  int64_t num_groups;

  GroupNorm(const char* op, int64_t groups, double eps)
      : norm{op, /*centered=*/true, eps}, num_groups(groups) {}
};

// Every check of what a user passes, for all devices and all routes, as in checks.h.
void check_forward(const GroupNorm&, const ForwardInputs&);
void check_backward(const GroupNorm&, const BackwardInputs&);

/// From the schemas' signatures to Backend::output, Backend::forward and Backend::backward.
template <class Backend>
struct GroupOperators {
  static Tensor group_norm(c10::DispatchKeySet keys, const Tensor& input, int64_t num_groups,
                           const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
    return Backend::output(keys, {"group_norm", num_groups, eps}, {input, {}, weight, bias});
  }
  static ThreeTensors group_norm_forward(c10::DispatchKeySet keys, const Tensor& input,
                                         int64_t num_groups, const OptionalTensor& weight,
                                         const OptionalTensor& bias, double eps) {
    return Backend::forward(keys, {"group_norm", num_groups, eps}, {input, {}, weight, bias});
  }
  static ThreeTensors group_norm_backward(c10::DispatchKeySet keys, const Tensor& grad_output,
                                          const Tensor& input, int64_t num_groups,
                                          const Tensor& mean, const Tensor& rstd,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, std::array<bool, 3> output_mask) {
    return Backend::backward(keys, {"group_norm_backward", num_groups, eps},
                             {grad_output, input, {}, mean, rstd, weight, bias, output_mask});
  }

  static void register_on(torch::Library& library) {
    library.impl("group_norm", TORCH_FN(group_norm));
    library.impl("group_norm_forward", TORCH_FN(group_norm_forward));
    library.impl("group_norm_backward", TORCH_FN(group_norm_backward));
  }
};

}  // namespace fusednorm
