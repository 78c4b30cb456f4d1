// GroupNorm as LayerNorm of the groups as rows, then ATen for weight and bias: inside vmap, for
// tangents and derivatives of backward, and as the CUDA key.
//
// Differentiable to any order, since layer_norm and its backward are. As the CUDA key they cost
// one write and one read of the normalized rows in fp32 more than a kernel of its own would
// (forward 12 bytes an fp32 element in place of 8), and in channels last a copy on each side.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "keys/composites.h"
#include "operators/checks.h"

namespace fusednorm {
namespace {

/// [N, G, C / G * positions], channels first whatever the memory format.
Tensor groups_of(const Norm& norm, const Tensor& tensor) {
  c10::SymInt cols = tensor.sym_size(1) / norm.num_groups;
  for (int64_t d = 2; d < tensor.dim(); ++d) cols *= tensor.sym_size(d);
  return tensor.reshape_symint({tensor.sym_size(0), norm.num_groups, cols});
}

/// `tensor`, laid out as the input. By turning dimensions: vmap takes no memory format but the
/// contiguous one.
Tensor in_format_of(const Tensor& input, const Tensor& tensor) {
  if (input.suggest_memory_format() == at::MemoryFormat::Contiguous) return tensor.contiguous();
  return tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}

at::ScalarType wide(const Tensor& input) { return accumulation_dtype(input.scalar_type()); }

Tensor per_channel(const Tensor& parameter, const Tensor& input) {
  std::vector<c10::SymInt> shape(input.dim(), 1);
  shape[1] = input.sym_size(1);
  return parameter.to(wide(input)).reshape_symint(shape);
}

/// LayerNorm of rows, with this norm's eps.
Call of_rows(const Norm& norm, Form form, const Tensor& rows, const c10::SymInt& cols) {
  Call call{{"layer_norm", NormKind::kLayerNorm, norm.eps}, form};
  call.input = &rows;
  call.normalized_shape = cols;
  return call;
}

/// x_hat of the input's shape as the output, in the accumulation type, with mean and rstd.
Outputs normalized(const Norm& norm, const Tensor& input) {
  const Tensor rows = groups_of(norm, input);
  const auto cols = rows.sym_size(2);
  Call call = of_rows(norm, Form::kForward, rows, cols);
  call.out_dtype = wide(input);
  Outputs made = dispatch_outputs(call);
  made.output = made.output.reshape_symint(input.sym_sizes());
  return made;
}

}  // namespace

Outputs GroupComposites::outputs(Keys, const Call& call) {
  checks::check(call);
  const Tensor& input = *call.input;
  Outputs made = normalized(call.norm, input);
  Tensor& output = made.output;
  if (present(*call.weight)) output = output * per_channel(**call.weight, input);
  if (present(*call.bias)) output = output + per_channel(**call.bias, input);
  output = in_format_of(input, output.to(input.scalar_type()));
  return made;
}

Gradients GroupComposites::gradients(Keys, const Call& call) {
  checks::check(call);
  const Tensor& input = *call.input;
  const Tensor grad_output = call.grad_output->to(wide(input));
  Gradients made;
  if (call.wanted.input) {
    Tensor g = grad_output;
    if (present(*call.weight)) g = g * per_channel(**call.weight, input);
    const Tensor rows = groups_of(call.norm, input), grad_rows = groups_of(call.norm, g);
    const auto cols = rows.sym_size(2);
    Call rows_call = of_rows(call.norm, Form::kBackward, rows, cols);
    rows_call.grad_output = &grad_rows;
    rows_call.mean = call.mean;
    rows_call.rstd = call.rstd;
    rows_call.wanted.input = true;
    const Tensor grad_input = dispatch_gradients(rows_call).input;
    made.input = in_format_of(input, grad_input.reshape_symint(input.sym_sizes()));
  }
  const auto per_channel_sum = [&](const Tensor& values, at::ScalarType dtype) {
    std::vector<int64_t> dims{0};
    for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
    return values.sum(dims).to(dtype);
  };
  if (call.wanted.weight) {
    const Tensor x_hat = normalized(call.norm, input).output;
    made.weight = per_channel_sum(grad_output * x_hat, checks::grad_weight_dtype(call));
  }
  if (call.wanted.bias) {
    made.bias = per_channel_sum(grad_output, checks::grad_bias_dtype(call));
  }
  return made;
}

TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  register_norms<GroupComposites, GroupNorm>(m);
}
#if defined(FUSEDNORM_WITH_CUDA)
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { register_norms<GroupComposites, GroupNorm>(m); }
#endif

}  // namespace fusednorm
