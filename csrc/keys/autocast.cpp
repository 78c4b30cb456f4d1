// The AutocastCUDA key: under autocast the norms give fp32, as torch 2.15's do, on any torch.
//
// torch casts the input to fp32 first, a pass over memory of its own, and keeps that copy for
// backward. Here the kernel reads 16 bits and writes fp32: the same numbers, and the 16-bit input
// is what is kept. Weight and bias need no cast: kernels take any dtype.

#include "operators/add_ops.h"

namespace fusednorm {
namespace {

struct AutocastBackend {
  static bool narrow(const Tensor& input) {
    return input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  }

  static Tensor output(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return narrow(in.input) ? std::get<0>(dispatch_forward(norm, in, at::kFloat))
                            : dispatch_output(norm, in);
  }

  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!out_dtype && narrow(in.input)) out_dtype = at::kFloat;
    return dispatch_forward(norm, in, out_dtype);
  }

  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_backward(norm, in);
  }

  static TwoTensors add(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    auto [output, residual_out, mean, rstd] = add_forward(keys, norm, in, std::nullopt);
    return {std::move(output), std::move(residual_out)};
  }

  /// The residual stream keeps its dtype; the output is fp32.
  static FourTensors add_forward(c10::DispatchKeySet, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!out_dtype && narrow(in.input)) out_dtype = at::kFloat;
    return dispatch_add_forward(norm, in, out_dtype);
  }

  /// No output dtype here: the input is widened first, which gives the same numbers.
  static Tensor add_in_place(c10::DispatchKeySet, const Norm& norm, const AddInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!narrow(in.input)) return dispatch_add_in_place(norm, in);
    const Tensor input = in.input.to(at::kFloat);
    return dispatch_add_in_place(
        norm, {input, in.residual, in.normalized_shape, in.weight, in.bias, in.alpha});
  }

  static FourTensors add_backward(c10::DispatchKeySet, const Norm& norm,
                                  const AddBackwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_add_backward(norm, in);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, AutocastCUDA, m) { register_operators<AutocastBackend>(m); }

}  // namespace fusednorm
