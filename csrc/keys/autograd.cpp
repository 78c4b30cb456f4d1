// The Autograd key: a hand-written node around the forward operators; ATen arithmetic
// (composites.h) for what the kernels do not compute (tangents, derivatives of backward) and inside
// vmap.
//
// Not torch::autograd::Function: torch.func refuses it, it has no jvp, and it costs 13 % of a small
// forward + backward. Both `_forward` and `_backward` have their own Autograd kernel, since
// functorch levels re-enter autograd on the inner operator: without it, hessians were silently
// wrong.
#include "backward_node.h"
#include "composites.h"

namespace fusednorm {
namespace {

// ---- The node ----

/// What makes a fused residual operator of a norm.
struct Add {
  double alpha;
  at::ScalarType input_dtype, residual_dtype;

  /// One tensor is the gradient of both addends.
  bool shares_gradient() const { return alpha == 1 && input_dtype == residual_dtype; }
};

/// Which gradients are wanted: of input, residual (of a fused residual operator), weight and bias.
using Mask = std::array<bool, 4>;

/// What a backward needs to know apart from tensors. It returns what the node has edges for: four
/// gradients with `add`, and without it three.
struct BackwardConstants {
  Norm norm;
  std::optional<at::ScalarType> bias_dtype;
  std::optional<Add> add;

  BackwardConstants(const Norm& n, const ForwardInputs& in, std::optional<Add> a)
      : norm(n), add(a) {
    norm.op = add ? (norm.centered ? "add_layer_norm_backward" : "add_rms_norm_backward")
                  : (norm.centered ? "layer_norm_backward"
                     : norm.clamp  ? "_scale_rows_backward"
                                   : "rms_norm_backward");
    // The caller's string may go away.
    norm.casting_mode = norm.llama() ? "llama" : "default";
    if (present(in.bias)) bias_dtype = in.bias->scalar_type();
  }

  std::string name() const {
    const std::string of_norm = norm.centered ? "LayerNormBackward"
                                : norm.clamp  ? "ScaleRowsBackward"
                                              : "RmsNormBackward";
    return add ? "Add" + of_norm : of_norm;
  }
  bool rows_are_output() const { return add.has_value(); }

  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    args.collect(norm.centered);
    args.collect(norm.eps.has_value());
    args.collect(norm.eps.value_or(0));
    args.collect(norm.weight_offset);
    args.collect(norm.eps_outside);
    args.collect(norm.unbiased);
    args.collect(norm.llama());
    args.collect(norm.clamp);
    args.collect(bias_dtype.value_or(at::ScalarType::Undefined));
    args.collect(add.has_value());
    const Add of_none{0, at::ScalarType::Undefined, at::ScalarType::Undefined};
    args.collect(add.value_or(of_none).alpha);
    args.collect(add.value_or(of_none).input_dtype);
    args.collect(add.value_or(of_none).residual_dtype);
  }

  Mask mask_of(const std::vector<bool>& wanted) const {
    if (add) return {wanted[0], wanted[1], wanted[2], wanted[3]};
    return {wanted[0], false, wanted[1], wanted[2]};
  }

  /// `rows` is what was normalized: the input, or the sum.
  variable_list gradients(const variable_list& grads, const Tensor& rows,
                          c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight,
                          const std::vector<bool>& wanted) const {
    const Mask mask = mask_of(wanted);
    OptionalTensor bias;
    if (mask[3] && bias_dtype != (weight.defined() ? weight : rows).scalar_type()) {
      // Only its dtype is read: one element, expanded.
      bias = at::empty({1}, rows.options().dtype(*bias_dtype)).expand_symint(normalized_shape);
    }
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    if (!add) {
      auto [grad_input, grad_weight, grad_bias] =
          dispatch_backward(norm, {grads[0],
                                   rows,
                                   normalized_shape,
                                   mean,
                                   rstd,
                                   optional(weight),
                                   bias,
                                   {mask[0], mask[2], mask[3]}});
      return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
    }
    const bool shared = add->shares_gradient();
    auto [grad_input, grad_residual, grad_weight, grad_bias] = dispatch_add_backward(
        norm, {grads[0],
               optional(grads[1]),
               rows,
               normalized_shape,
               mean,
               rstd,
               optional(weight),
               bias,
               add->input_dtype,
               {mask[0] || (shared && mask[1]), mask[1] && !shared, mask[2], mask[3]},
               add->alpha});
    if (shared && mask[1]) grad_residual = grad_input;
    if (!mask[0]) grad_input = Tensor();
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight),
            std::move(grad_bias)};
  }

  /// The output was not used: the gradient of the sum, if any, is its own. A copy of it, since what
  /// autograd hands out must not be what the caller handed in.
  variable_list without_grad_output(const variable_list& grads,
                                    const std::vector<bool>& wanted) const {
    if (!add) return variable_list(3);
    const Mask mask = mask_of(wanted);
    variable_list result(4);
    if (!grads[1].defined()) return result;
    const auto copy_to = [&](at::ScalarType dtype) {
      return grads[1].to(dtype, /*non_blocking=*/false, /*copy=*/true,
                         at::MemoryFormat::Contiguous);
    };
    if (mask[0]) result[0] = copy_to(add->input_dtype);
    if (mask[1]) {
      if (add->alpha != 1) {
        result[1] = (grads[1] * add->alpha).contiguous();
      } else {
        result[1] = mask[0] && add->shares_gradient() ? result[0] : copy_to(add->residual_dtype);
      }
    }
    return result;
  }
};

auto node_of(const Norm& norm, const ForwardInputs& in) {
  return make_node(BackwardConstants(norm, in, std::nullopt), in.normalized_shape, in.input,
                   in.weight, torch::autograd::collect_next_edges(in.input, in.weight, in.bias));
}
auto node_of(const Norm& norm, const AddInputs& in) {
  const Add add{in.alpha, in.input.scalar_type(), in.residual.scalar_type()};
  return make_node(BackwardConstants(norm, in.of(in.residual), add), in.normalized_shape, Tensor(),
                   in.weight,
                   torch::autograd::collect_next_edges(in.input, in.residual, in.weight, in.bias));
}

struct AutogradBackend {
  static c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys & c10::after_autograd_keyset;
  }

  static Tensor output(c10::DispatchKeySet keys, const Norm& norm, const ForwardInputs& in) {
    if (any_tangent(in.input, in.weight, in.bias) ||
        torch::autograd::compute_requires_grad(in.input, in.weight, in.bias)) {
      return std::get<0>(dispatch_forward(norm, in, std::nullopt, keys));
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_output(norm, in, below(keys));
  }

  static ThreeTensors forward(c10::DispatchKeySet keys, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    if (any_tangent(in.input, in.weight, in.bias)) {
      return CompositeBackend::forward(keys, norm, in, out_dtype);
    }
    const bool requires_grad = torch::autograd::compute_requires_grad(in.input, in.weight, in.bias);
    const auto node = requires_grad ? node_of(norm, in) : decltype(node_of(norm, in))();
    ThreeTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_forward(norm, in, out_dtype, below(keys));
    }();
    if (requires_grad) {
      torch::autograd::set_history(std::get<0>(result), node);
      node->save_results(Tensor(), std::get<1>(result), std::get<2>(result));
    }
    return result;
  }

  static ThreeTensors backward(c10::DispatchKeySet keys, const Norm& norm,
                               const BackwardInputs& in) {
    if (any_tangent(in.grad_output, in.input, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.input, in.weight)) {
      return CompositeBackend::backward(keys, norm, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_backward(norm, in, below(keys));
  }

  static TwoTensors add(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    if (any_tangent(in.input, in.residual, in.weight, in.bias) ||
        torch::autograd::compute_requires_grad(in.input, in.residual, in.weight, in.bias)) {
      auto [output, residual_out, mean, rstd] = dispatch_add_forward(norm, in, std::nullopt, keys);
      return {std::move(output), std::move(residual_out)};
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add(norm, in, below(keys));
  }

  static FourTensors add_forward(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    if (any_tangent(in.input, in.residual, in.weight, in.bias)) {
      return CompositeBackend::add_forward(keys, norm, in, out_dtype);
    }
    const bool requires_grad =
        torch::autograd::compute_requires_grad(in.input, in.residual, in.weight, in.bias);
    const auto node = requires_grad ? node_of(norm, in) : decltype(node_of(norm, in))();
    FourTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_add_forward(norm, in, out_dtype, below(keys));
    }();
    if (requires_grad) {
      const auto& [output, residual_out, mean, rstd] = result;
      torch::autograd::set_history(variable_list{output, residual_out}, node);
      node->save_results(residual_out, mean, rstd);
    }
    return result;
  }

  static FourTensors add_backward(c10::DispatchKeySet keys, const Norm& norm,
                                  const AddBackwardInputs& in) {
    if (any_tangent(in.grad_output, in.grad_residual_out, in.residual_out, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.grad_residual_out,
                                               in.residual_out, in.weight)) {
      return CompositeBackend::add_backward(keys, norm, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add_backward(norm, in, below(keys));
  }

  /// For inference: autograd would need the residual as it was.
  static Tensor add_in_place(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    const auto check = [&](const char* argument, const OptionalTensor& tensor) {
      if (!present(tensor)) return;
      TORCH_CHECK(!any_tangent(tensor) && !torch::autograd::compute_requires_grad(tensor),
                  "fusednorm::", norm.op, ": ", argument,
                  ": expected no gradient to be asked for (the residual is updated in place, for "
                  "inference), got a tensor ",
                  any_tangent(tensor) ? "with a tangent" : "that requires grad", ": use ",
                  norm.centered ? "add_layer_norm" : "add_rms_norm", ", or torch.no_grad()");
    };
    check("input", in.input);
    check("residual", in.residual);
    check("weight", in.weight);
    check("bias", in.bias);
    at::AutoDispatchBelowAutograd guard;
    return dispatch_add_in_place(norm, in, below(keys));
  }
};

/// The ADInplaceOrView key, for the operators that write: what was saved of the residual before is
/// known to have changed.
Tensor bump_version(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
  Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add_in_place(norm, in, keys & c10::after_ADInplaceOrView_keyset);
  }();
  torch::autograd::impl::bump_version(in.residual);
  return output;
}

struct InPlaceBackend {
  static constexpr auto add_in_place = &bump_version;
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, Autograd, m) { register_operators<AutogradBackend>(m); }
TORCH_LIBRARY_IMPL(fusednorm, ADInplaceOrView, m) {
  m.impl("add_layer_norm_", TORCH_FN(AddOperators<InPlaceBackend>::add_layer_norm_));
  m.impl("add_rms_norm_", TORCH_FN(AddOperators<InPlaceBackend>::add_rms_norm_));
}
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  register_operators<CompositeBackend>(m);
}

}  // namespace fusednorm
