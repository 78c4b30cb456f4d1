// ScaleNorm on every key: g, one number for all columns, handed to the rows' kernels as their
// weight.
#include <ATen/Functions.h>

#include "operators/checks.h"
#include "operators/operators.h"

namespace fusednorm {
namespace {

/// Autograd's own expand sums g's gradient over the columns; in fp64, since ATen's fp32 sum of
/// 32768 numbers and more has other bits for other numbers of threads.
Tensor scale_norm_by_rows(const Tensor& input, const Tensor& g, double eps) {
  const Norm norm{"scale_norm", NormKind::kScaleRows, eps};
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
  const OptionalTensor weight = g.to(at::kDouble).reshape({1}).expand_symint({cols});
  Call call{norm, Form::kOutput};
  call.input = &input;
  call.normalized_shape = cols;
  call.weight = &weight;
  return dispatch_outputs(call).output;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, CompositeImplicitAutograd, m) {
  m.impl("scale_norm", TORCH_FN(scale_norm_by_rows));
}
// For nested tensors, which the other one does not reach: the checks refuse them.
TORCH_LIBRARY_IMPL(fusednorm, CompositeImplicitAutogradNestedTensor, m) {
  m.impl("scale_norm", TORCH_FN(scale_norm_by_rows));
}
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {  // else vmap loops over the batch
  m.impl("scale_norm", TORCH_FN(scale_norm_by_rows));
}

}  // namespace fusednorm
