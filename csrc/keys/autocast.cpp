// The AutocastCUDA key: under autocast the norms give fp32, as torch 2.15's do, on any torch.
//
// torch casts the input to fp32 first, a pass over memory of its own, and keeps that copy for
// backward. Here the kernel reads 16 bits and writes fp32: the same numbers, and the 16-bit input
// is what is kept. Weight and bias need no cast: kernels take any dtype.
#include "operators/operators.h"

namespace fusednorm {
namespace {

struct Autocast {
  static Outputs outputs(Keys, const Call& given) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto dtype = given.input->scalar_type();
    if (dtype != at::kHalf && dtype != at::kBFloat16) return dispatch_outputs(given);
    Call call = given;
    // The operators without an output dtype, for which there is no kernel that widens, get their
    // input widened first, which gives the same numbers. The residual stream keeps its dtype.
    if (call.norm.kind == NormKind::kGroupNorm || call.form == Form::kAddInPlace) {
      const Tensor input = given.input->to(at::kFloat);
      call.input = &input;
      return dispatch_outputs(call);
    }
    if (call.form == Form::kOutput) call.form = Form::kForward;
    if (call.form == Form::kAdd) call.form = Form::kAddForward;
    if (!call.out_dtype) call.out_dtype = at::kFloat;
    return dispatch_outputs(call);
  }

  static Gradients gradients(Keys, const Call& call) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_gradients(call);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, AutocastCUDA, m) {
  register_norms<Autocast, LayerNorm, RmsNorm, ScaleRows, GroupNorm>(m);
}

}  // namespace fusednorm
