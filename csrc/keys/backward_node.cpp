#include "keys/backward_node.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace fusednorm {

BackwardConstants::BackwardConstants(const Call& call) : norm(with_own_text(call.norm)) {
  if (present(*call.bias)) bias_dtype = (*call.bias)->scalar_type();
  if (adds_residual(call.form)) {
    residual = {call.alpha, call.input->scalar_type(), call.residual->scalar_type()};
  }
}

std::string BackwardConstants::name() const {
  const char* const of_norm = norm.kind == NormKind::kLayerNorm   ? "LayerNormBackward"
                              : norm.kind == NormKind::kRmsNorm   ? "RmsNormBackward"
                              : norm.kind == NormKind::kScaleRows ? "ScaleRowsBackward"
                                                                  : "GroupNormBackward";
  return (residual ? "Add" : "") + std::string(of_norm);
}

void BackwardConstants::collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  args.collect(static_cast<int64_t>(norm.kind));
  args.collect(norm.eps.has_value());
  args.collect(norm.eps.value_or(0));
  args.collect(norm.num_groups);
  for_each(EveryOption{}, [&](auto option) {
    const auto value = norm.*decltype(option)::kept;
    if constexpr (std::is_same_v<decltype(value), const std::string_view>) {
      args.collect(std::string(value));
    } else {
      args.collect(value);
    }
  });
  args.collect(bias_dtype.value_or(at::ScalarType::Undefined));
  args.collect(residual.has_value());
  const Residual of_none{0, at::ScalarType::Undefined, at::ScalarType::Undefined};
  args.collect(residual.value_or(of_none).alpha);
  args.collect(residual.value_or(of_none).input_dtype);
  args.collect(residual.value_or(of_none).residual_dtype);
}

Wanted BackwardConstants::wanted_of(const std::vector<bool>& edges) const {
  if (residual) return {edges[0], edges[1], edges[2], edges[3]};
  return {edges[0], false, edges[1], edges[2]};
}

variable_list BackwardConstants::gradients(const variable_list& grads, const Tensor& rows,
                                           c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                                           const Tensor& rstd, const Tensor& weight,
                                           const std::vector<bool>& edges) const {
  const Wanted wanted = wanted_of(edges);
  OptionalTensor given_weight, bias, grad_residual_out;
  if (weight.defined()) given_weight = weight;
  if (wanted.bias && bias_dtype != (weight.defined() ? weight : rows).scalar_type()) {
    // Only its dtype is read: one element, expanded.
    const Tensor element = at::empty({1}, rows.options().dtype(*bias_dtype));
    bias = norm.kind == NormKind::kGroupNorm ? element.expand_symint(rows.sym_size(1))
                                             : element.expand_symint(normalized_shape);
  }
  Call call{norm, residual ? Form::kAddBackward : Form::kBackward};
  call.grad_output = &grads[0];
  call.normalized_shape = normalized_shape;
  call.mean = &mean;
  call.rstd = &rstd;
  call.weight = &given_weight;
  call.bias = &bias;
  call.wanted = wanted;
  if (!residual) {
    call.input = &rows;
    Gradients made = dispatch_gradients(call);
    return {std::move(made.input), std::move(made.weight), std::move(made.bias)};
  }
  if (grads[1].defined()) grad_residual_out = grads[1];
  call.grad_residual_out = &grad_residual_out;
  call.residual_out = &rows;
  call.input_dtype = residual->input_dtype;
  call.alpha = residual->alpha;
  const bool shared = residual->shares_gradient();
  if (shared) {
    call.wanted.input = wanted.input || wanted.residual;
    call.wanted.residual = false;
  }
  Gradients made = dispatch_gradients(call);
  if (shared && wanted.residual) made.residual = made.input;
  if (!wanted.input) made.input = Tensor();
  return {std::move(made.input), std::move(made.residual), std::move(made.weight),
          std::move(made.bias)};
}

/// A copy of it, since what autograd hands out must not be what the caller handed in.
variable_list BackwardConstants::without_grad_output(const variable_list& grads,
                                                     const std::vector<bool>& edges) const {
  if (!residual) return variable_list(3);
  const Wanted wanted = wanted_of(edges);
  variable_list result(4);
  if (!grads[1].defined()) return result;
  const auto copy_to = [&](at::ScalarType dtype) {
    return grads[1].to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  };
  if (wanted.input) result[0] = copy_to(residual->input_dtype);
  if (wanted.residual) {
    if (residual->alpha != 1) {
      result[1] = (grads[1] * residual->alpha).contiguous();
    } else {
      result[1] = wanted.input && residual->shares_gradient() ? result[0]
                                                              : copy_to(residual->residual_dtype);
    }
  }
  return result;
}

}  // namespace fusednorm
