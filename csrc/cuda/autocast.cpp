// The AutocastCUDA key: under autocast both norms give fp32, as torch 2.15's do, on any torch.
//
// torch casts the input to fp32 first, a pass over memory of its own, and keeps that copy for
// backward. Here the kernel reads 16 bits and writes fp32: the same numbers, and the 16-bit input
// is what is kept. Weight and bias need no cast: kernels take any dtype.

#include "../ops.h"

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
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, AutocastCUDA, m) { Operators<AutocastBackend>::register_on(m); }

}  // namespace fusednorm
