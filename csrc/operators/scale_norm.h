// ScaleNorm: g, one number for all columns, handed to the rows' kernels as their weight. Included
// by ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace fusednorm {

/// On every key. Autograd's own expand sums g's gradient over the columns; in fp64, since ATen's
/// fp32 sum of 32768 numbers and more has other bits for other numbers of threads.
inline Tensor scale_norm_by_rows(const Tensor& input, const Tensor& g, double eps) {
  Norm norm{"scale_norm", false, eps};
  norm.clamp = true;
  checks::check_tensor(norm, "input", input);
  TORCH_CHECK(input.dim() >= 1, "fusednorm::", norm.op,
              ": input: expected shape [*, N] (1 dimension at least), got ", input.sym_sizes());
  checks::check_tensor(norm, "g", g);
  TORCH_CHECK(g.device() == input.device(), "fusednorm::", norm.op,
              ": g: expected on the input's device ", input.device(), ", got ", g.device());
  TORCH_CHECK(g.sym_numel().sym_eq(1).expect_true(__FILE__, __LINE__), "fusednorm::", norm.op,
              ": g: expected a tensor of one element, got shape ", g.sym_sizes());
  checks::check_eps(norm);
  const auto cols = input.sym_size(-1);
  const Tensor weight = g.to(at::kDouble).reshape({1}).expand_symint({cols});
  return dispatch_output(norm, {input, cols, weight, std::nullopt});
}

}  // namespace fusednorm
