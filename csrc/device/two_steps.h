// The fused residual operators in two steps, the sum and then the norm: for a device, or a pair of
// dtypes, without a kernel that does both.
#pragma once

#include <ATen/Functions.h>

#include "operators/checks.h"
#include "operators/operators.h"

namespace fusednorm {

/// Device gives, besides what DeviceKey asks for:
///   add(call, residual_out): the sum alone
///   backward_rows_wide(call): backward_rows with a grad_output in the wider accumulation type,
///     and the gradient of the input not rounded from that
///   split(gradient, call, to): in the dtype of `gradient`, the wider accumulation type,
///     g = gradient + grad_residual_out (absent: 0); to.input = g and to.residual = alpha * g where
///     they are defined, each rounded once
template <class Device>
struct TwoSteps {
  static void forward(const Call& call, const Outputs& to) {
    Device::add(call, to.residual_out);
    const Call of_sum = call.of_sum(to.residual_out);
    const auto dtype = to.residual_out.scalar_type(), acc_dtype = accumulation_dtype(dtype);
    const auto out_dtype = to.output.scalar_type();
    if (out_dtype == dtype || out_dtype == acc_dtype) return Device::forward_rows(of_sum, to);
    // The kernels round to the dtype they read, or to none.
    Outputs wide = to;
    wide.output = Device::empty(to.output.sizes(), acc_dtype, to.output);
    Device::forward_rows(of_sum, wide);
    if (out_dtype == at::kDouble) {
      to.output.copy_(wide.output);  // exact
    } else {
      Call nothing_added = call;
      nothing_added.grad_residual_out = &Optional::none;
      nothing_added.alpha = 1;
      Device::split(wide.output, nothing_added, {to.output, Tensor(), Tensor(), Tensor()});
    }
  }

  static Gradients backward(const Call& call) {
    const Tensor& rows = *call.residual_out;
    const auto dtype = rows.scalar_type(), grad_dtype = call.grad_output->scalar_type();
    const bool added = present(*call.grad_residual_out);
    const bool one_gradient = call.wanted.input != call.wanted.residual &&
                              (call.wanted.input ? call.input_dtype == dtype : call.alpha == 1);
    const bool served = grad_dtype == dtype || grad_dtype == accumulation_dtype(dtype);
    Call of_sum = call.of_sum(rows);
    if (served && (!call.wants_rows() || (!added && one_gradient))) {
      Gradients made = Device::backward_rows(of_sum);
      if (call.wanted.residual) made.residual = made.input;
      if (!call.wanted.input) made.input = Tensor();
      return made;
    }
    // The gradient of the sum stays in the wider accumulation type until all of it is there.
    const bool any_double = dtype == at::kDouble || call.input_dtype == at::kDouble;
    const auto wide_dtype = any_double ? at::kDouble : at::kFloat;
    of_sum.norm.eps =
        call.norm.params(accumulation_dtype(dtype)).eps;  // that of the sum, when None
    const Tensor grad_output = call.grad_output->to(wide_dtype), rstd = call.rstd->to(wide_dtype);
    const Tensor mean = call.mean->defined() ? call.mean->to(wide_dtype) : Tensor();
    of_sum.grad_output = &grad_output;
    of_sum.rstd = &rstd;
    of_sum.mean = &mean;
    Gradients made = Device::backward_rows_wide(of_sum);
    const Tensor sum = std::move(made.input);
    made.input = Tensor();
    if (call.wanted.input) made.input = Device::empty(sum.sizes(), call.input_dtype, sum);
    if (call.wanted.residual) made.residual = Device::empty(sum.sizes(), dtype, sum);
    if (call.wants_rows()) Device::split(sum, call, made);
    return made;
  }
};

}  // namespace fusednorm
