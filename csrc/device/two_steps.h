// The fused residual operators in two steps, the sum and then the norm: for a device, or a pair of
// dtypes, without a kernel that does both.
#pragma once

#include <ATen/Functions.h>

#include "operators/checks.h"
#include "tensor_rows.h"

namespace fusednorm {

/// Device gives, besides what DeviceBackend asks for:
///   add(in, residual_out): the sum alone
///   backward_rows_wide(norm, in): backward_rows with a grad_output in the wider accumulation type,
///     and grad_input not rounded from that
///   split(gradient, normalized_dims, grad_residual_out, alpha, grad_input, grad_residual): in the
///     dtype of `gradient`, the wider accumulation type, g = gradient + grad_residual_out (absent:
///     0); grad_input = g and grad_residual = alpha * g where they are wanted, each rounded once
template <class Device>
struct TwoSteps {
  static void forward(const Norm& norm, const AddInputs& in, const Tensor& output,
                      const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
    Device::add(in, residual_out);
    const auto dtype = residual_out.scalar_type(), acc_dtype = accumulation_dtype(dtype);
    if (output.scalar_type() == dtype || output.scalar_type() == acc_dtype) {
      return Device::forward_rows(norm, in.of(residual_out), output, mean, rstd);
    }
    // The kernels round to the dtype they read, or to none.
    const Tensor wide = Device::empty(output.sizes(), acc_dtype, output);
    Device::forward_rows(norm, in.of(residual_out), wide, mean, rstd);
    if (output.scalar_type() == at::kDouble) {
      output.copy_(wide);  // exact
    } else {
      Device::split(wide, in.normalized_shape.size(), {}, 1, output, Tensor());
    }
  }

  static FourTensors backward(const Norm& norm, const AddBackwardInputs& in) {
    const auto dtype = in.residual_out.scalar_type(), grad_dtype = in.grad_output.scalar_type();
    const bool adds = in.grad_residual_out.has_value() && in.grad_residual_out->defined();
    const bool one_gradient = in.output_mask[0] != in.output_mask[1] &&
                              (in.output_mask[0] ? in.input_dtype == dtype : in.alpha == 1);
    const bool served = grad_dtype == dtype || grad_dtype == accumulation_dtype(dtype);
    if (served && (!in.wants_sum() || (!adds && one_gradient))) {
      auto [sum, grad_weight, grad_bias] = Device::backward_rows(norm, in.of_norm());
      return {in.output_mask[0] ? sum : Tensor(), in.output_mask[1] ? sum : Tensor(),
              std::move(grad_weight), std::move(grad_bias)};
    }
    // The gradient of the sum stays in the wider accumulation type until all of it is there.
    const bool any_double = dtype == at::kDouble || in.input_dtype == at::kDouble;
    const auto wide_dtype = any_double ? at::kDouble : at::kFloat;
    Norm wide_norm = norm;
    wide_norm.eps = norm.params(accumulation_dtype(dtype)).eps;  // that of residual_out, when None
    const Tensor grad_output = in.grad_output.to(wide_dtype);
    const Tensor mean = in.mean.defined() ? in.mean.to(wide_dtype) : in.mean;
    const Tensor rstd = in.rstd.to(wide_dtype);
    auto [sum, grad_weight, grad_bias] = Device::backward_rows_wide(
        wide_norm, {grad_output, in.residual_out, in.normalized_shape, mean, rstd, in.weight,
                    in.bias, in.of_norm().output_mask});
    Tensor grad_input, grad_residual;
    if (in.output_mask[0]) grad_input = Device::empty(sum.sizes(), in.input_dtype, sum);
    if (in.output_mask[1]) grad_residual = Device::empty(sum.sizes(), dtype, sum);
    if (in.wants_sum()) {
      Device::split(sum, in.normalized_shape.size(), in.grad_residual_out, in.alpha, grad_input,
                    grad_residual);
    }
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight),
            std::move(grad_bias)};
  }
};

}  // namespace fusednorm
