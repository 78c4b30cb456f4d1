// The Autograd key: a hand-written node around the forward operators (backward_node.h); ATen
// arithmetic (composites.h) for what the kernels do not compute: tangents, and derivatives of
// backward.
//
// Not torch::autograd::Function: torch.func refuses it, it has no jvp, and it costs 13 % of a small
// forward + backward. Both `_forward` and `_backward` have their own Autograd kernel, since
// functorch levels re-enter autograd on the inner operator: without it, hessians were silently
// wrong.
#include "keys/backward_node.h"
#include "keys/composites.h"

namespace fusednorm {
namespace {

/// f(name, tensor), for each tensor of a call that derivatives can go through.
template <class F>
void each_differentiable(const Call& call, const F& f) {
  const bool backward = is_backward(call.form);
  const auto visit = [&](std::string_view name, Gradient gradient, const Tensor& tensor) {
    if (!tensor.defined() || gradient == Gradient::kNone) return;
    if (backward && gradient == Gradient::kLinear) return;
    f(name, tensor);
  };
  const auto tensor_of = [](const auto* given) -> const Tensor& {
    if constexpr (std::is_same_v<decltype(given), const Tensor*>) {
      return *given;
    } else {
      return present(*given) ? **given : Required::none;
    }
  };
#define FN_VISIT(name_, presence, shape, dtype, gradient_) \
  visit(arg::name_::name, Gradient::gradient_, tensor_of(call.name_));
  FN_TENSORS(FN_VISIT)
#undef FN_VISIT
}

bool has_tangent(const Call& call) {
  bool any = false;
  each_differentiable(call, [&](std::string_view, const Tensor& tensor) {
    any = any || torch::autograd::isFwGradDefined(tensor);
  });
  return any;
}

bool requires_grad(const Call& call) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = false;
  each_differentiable(
      call, [&](std::string_view, const Tensor& tensor) { any = any || tensor.requires_grad(); });
  return any;
}

struct Autograd {
  static Keys below(Keys keys) { return keys & c10::after_autograd_keyset; }
  static bool grouped(const Call& call) { return call.norm.kind == NormKind::kGroupNorm; }

  static Outputs outputs(Keys keys, const Call& call) {
    if (call.form == Form::kAddInPlace) return in_place(keys, call);
    const bool tangent = has_tangent(call);
    if (tangent || requires_grad(call)) {
      if (!keeps_statistics(call.form)) {
        Call kept = call;
        kept.form = adds_residual(call.form) ? Form::kAddForward : Form::kForward;
        return dispatch_outputs(kept, keys);
      }
      if (!tangent) return recorded(keys, call);
      return grouped(call) ? GroupComposites::outputs(keys, call)
                           : RowComposites::outputs(keys, call);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_outputs(call, below(keys));
  }

  static Gradients gradients(Keys keys, const Call& call) {
    if (has_tangent(call) || requires_grad(call)) {
      return grouped(call) ? GroupComposites::gradients(keys, call)
                           : RowComposites::gradients(keys, call);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_gradients(call, below(keys));
  }

 private:
  static Outputs recorded(Keys keys, const Call& call) {
    using torch::autograd::collect_next_edges;
    const bool adds = adds_residual(call.form);
    const auto node = make_node(
        call, adds ? collect_next_edges(*call.input, *call.residual, *call.weight, *call.bias)
                   : collect_next_edges(*call.input, *call.weight, *call.bias));
    Outputs made = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_outputs(call, below(keys));
    }();
    if (adds) {
      torch::autograd::set_history(variable_list{made.output, made.residual_out}, node);
    } else {
      torch::autograd::set_history(made.output, node);
    }
    node->save_results(made);
    return made;
  }

  /// For inference: autograd would need the residual as it was.
  static Outputs in_place(Keys keys, const Call& call) {
    each_differentiable(call, [&](std::string_view argument, const Tensor& tensor) {
      const bool tangent = torch::autograd::isFwGradDefined(tensor);
      TORCH_CHECK(!tangent && !torch::autograd::compute_requires_grad(tensor),
                  "fusednorm::", call.norm.op, ": ", argument,
                  ": expected no gradient to be asked for (the residual is updated in place, for "
                  "inference), got a tensor ",
                  tangent ? "with a tangent" : "that requires grad", ": use ",
                  std::string_view(call.norm.op).substr(0, std::strlen(call.norm.op) - 1),
                  ", or torch.no_grad()");
    });
    at::AutoDispatchBelowAutograd guard;
    return dispatch_outputs(call, below(keys));
  }
};

/// The ADInplaceOrView key, for the operators that write: what was saved of the residual before is
/// known to have changed.
struct InPlace {
  static Outputs outputs(Keys keys, const Call& call) {
    Outputs made = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_outputs(call, keys & c10::after_ADInplaceOrView_keyset);
    }();
    torch::autograd::impl::bump_version(*call.residual);
    return made;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, Autograd, m) {
  register_norms<Autograd, LayerNorm, RmsNorm, ScaleRows, GroupNorm>(m);
}
TORCH_LIBRARY_IMPL(fusednorm, ADInplaceOrView, m) {
  register_operator<InPlace, Operator<LayerNorm, Form::kAddInPlace>>(m);
  register_operator<InPlace, Operator<RmsNorm, Form::kAddInPlace>>(m);
}

}  // namespace fusednorm
