// The functions of a dispatch key, for a device that has kernels: what every device does before and
// after they run.
#pragma once

#include <limits>

#include "operators/checks.h"
#include "operators/operators.h"

namespace fusednorm {

/// Statistics of rows of nothing: 0/0.
inline void fill_statistics(const Outputs& to) {
  for (const Tensor& statistic : {to.mean, to.rstd}) {
    if (statistic.defined()) statistic.fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

/// Device gives empty(sizes, dtype, like);
///   forward_rows(call, to): the norm of call.input; mean and rstd undefined: not wanted
///   backward_rows(call): its gradients
///   add_forward_rows(call, to): with the residual add; to.residual_out may be the residual
///   add_backward_rows(call).
template <class Device>
struct DeviceKey {
  static Outputs outputs(Keys, const Call& call) {
    checks::check(call);
    const Tensor& input = *call.input;
    Outputs to;
    to.output = Device::empty(input.sizes(), call.out_dtype.value_or(input.scalar_type()), input);
    const Tensor& summed = adds_residual(call.form) ? *call.residual : input;
    if (keeps_statistics(call.form)) {
      const auto leading = input.sizes().slice(0, input.dim() - call.normalized_shape.size());
      const auto dtype = accumulation_dtype(summed.scalar_type());
      if (call.norm.centered()) to.mean = Device::empty(leading, dtype, input);
      to.rstd = Device::empty(leading, dtype, input);
    }
    if (!adds_residual(call.form)) {
      Device::forward_rows(call, to);
      return to;
    }
    if (call.form == Form::kAddInPlace) {
      checks::check_writable(call);
      checks::check_apart(call);
      to.residual_out = *call.residual;
    } else {
      to.residual_out = Device::empty(input.sizes(), summed.scalar_type(), input);
    }
    Device::add_forward_rows(call, to);
    return to;
  }

  static Gradients gradients(Keys, const Call& call) {
    checks::check(call);
    const bool of_sum = call.form == Form::kAddBackward;
    // A narrower gradient (an output that was cast to 16 bits) is widened first.
    const auto dtype = of_sum ? call.input_dtype : call.input->scalar_type();
    if (!checks::is_narrower(call.grad_output->scalar_type(), dtype)) return run(call);
    Call widened = call;
    const Tensor grad_output = call.grad_output->to(dtype);
    widened.grad_output = &grad_output;
    return run(widened);
  }

 private:
  static Gradients run(const Call& call) {
    return call.form == Form::kAddBackward ? Device::add_backward_rows(call)
                                           : Device::backward_rows(call);
  }
};

}  // namespace fusednorm
