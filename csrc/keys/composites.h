// The formulas of row_norm.h in ATen arithmetic, differentiable to any order: for tangents, for
// derivatives of backward, and inside vmap. Included by autograd.cpp.
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "operators/checks.h"

namespace fusednorm {

/// They compute in fp64: their speed matters little, and a large mean or an extreme row, for which
/// the kernels take care in fp32, then needs none.
constexpr at::ScalarType kComposite = at::kDouble;

struct NormalizedRows {
  Tensor x_hat, rstd;
  Tensor deviation;           // sqrt(variance), with eps_outside only
  Tensor clamped;             // which rows are, with clamp only
  std::vector<int64_t> dims;  // the normalized dimensions
  c10::SymInt divisor;        // N - ddof, or 1 with clamp
};

inline NormalizedRows normalize_rows(const Norm& norm, const Tensor& input,
                                     size_t normalized_dims) {
  NormalizedRows rows;
  c10::SymInt cols = 1;
  for (size_t i = 1; i <= normalized_dims; ++i) {
    rows.dims.push_back(-static_cast<int64_t>(i));
    cols *= input.sym_size(-static_cast<int64_t>(i));
  }
  const NormParams params = norm.params(accumulation_dtype(input.scalar_type()));
  rows.divisor = params.clamp ? c10::SymInt(1) : cols - params.ddof;
  Tensor x = input.to(kComposite);
  if (norm.centered) {
    x = x - x.mean(rows.dims, /*keepdim=*/true);
    x = x - x.mean(rows.dims, /*keepdim=*/true);  // what the first mean's rounding left
  }
  const Tensor variance = (x * x).sum(rows.dims, /*keepdim=*/true) / rows.divisor;
  if (params.clamp) {
    rows.clamped = variance.detach().sqrt() <= params.eps;  // as the kernels' backward has it
    rows.rstd =
        variance.masked_fill(rows.clamped, 1).rsqrt().masked_fill(rows.clamped, 1 / params.eps);
  } else if (params.eps_outside) {
    // At 0 the derivative of the root is taken as 0: the root of 1 is differentiated there instead.
    const Tensor zero = variance == 0;
    rows.deviation = variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0);
    rows.rstd = (rows.deviation + params.eps).reciprocal();
  } else {
    rows.rstd = (variance + params.eps).rsqrt();
  }
  rows.x_hat = x * rows.rstd;
  return rows;
}

inline Tensor gain_of(const Norm& norm, const Tensor& weight) {
  return weight.to(kComposite) + norm.weight_offset;
}

inline Tensor round_x_hat(const Norm& norm, const Tensor& x_hat, const Tensor& input) {
  return norm.llama() ? x_hat.to(input.scalar_type()).to(x_hat.scalar_type()) : x_hat;
}

/// (output, mean, rstd), of checked arguments.
inline ThreeTensors composite_norm(const Norm& norm, const ForwardInputs& in,
                                   at::ScalarType out_dtype) {
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const auto rows = normalize_rows(norm, in.input, in.normalized_shape.size());
  Tensor output = round_x_hat(norm, rows.x_hat, in.input);
  if (present(in.weight)) output = output * gain_of(norm, *in.weight);
  if (present(in.bias)) output = output + in.bias->to(kComposite);
  const auto shape = checks::leading_shape(in.input, in.normalized_shape);
  Tensor mean;
  if (norm.centered) mean = in.input.detach().to(kComposite).mean(rows.dims).to(acc_dtype);
  return {output.to(out_dtype).contiguous(), mean,
          rows.rstd.detach().reshape_symint(shape).to(acc_dtype)};
}

/// The gradients as differentiable functions of grad_output, input and weight; that of the input
/// not rounded yet. The statistics are computed anew: the saved ones are constants, with which
/// second derivatives would be wrong.
inline ThreeTensors composite_gradients(const Norm& norm, const BackwardInputs& in) {
  const auto rows = normalize_rows(norm, in.input, in.normalized_shape.size());
  const Tensor grad_output = in.grad_output.to(kComposite);
  Tensor grad_input, grad_weight, grad_bias;
  if (in.output_mask[0]) {
    const Tensor g = present(in.weight) ? grad_output * gain_of(norm, *in.weight) : grad_output;
    Tensor projection = (g * rows.x_hat).sum(rows.dims, /*keepdim=*/true) / rows.divisor;
    if (norm.eps_outside) {
      const Tensor zero = rows.deviation == 0;
      projection =
          (projection / (rows.deviation.masked_fill(zero, 1) * rows.rstd)).masked_fill(zero, 0);
    }
    if (norm.clamp) projection = projection.masked_fill(rows.clamped, 0);
    grad_input = g - rows.x_hat * projection;
    if (norm.centered) grad_input = grad_input - g.mean(rows.dims, /*keepdim=*/true);
    grad_input = grad_input * rows.rstd;
  }
  const auto over_rows = [&](const Tensor& values, at::ScalarType dtype) {
    std::vector<int64_t> leading;
    for (int64_t d = 0; d < in.input.dim() - static_cast<int64_t>(rows.dims.size()); ++d) {
      leading.push_back(d);
    }
    // A copy in any case: a single row's grad_bias must not be grad_output itself.
    return (leading.empty() ? values : values.sum(leading))
        .to(dtype, /*non_blocking=*/false, /*copy=*/true)
        .contiguous();
  };
  if (in.output_mask[1]) {
    grad_weight = over_rows(grad_output * round_x_hat(norm, rows.x_hat, in.input),
                            checks::grad_weight_dtype(in));
  }
  if (in.output_mask[2]) grad_bias = over_rows(grad_output, checks::grad_bias_dtype(in));
  return {grad_input, grad_weight, grad_bias};
}

struct CompositeBackend {
  static Tensor output(c10::DispatchKeySet keys, const Norm& norm, const ForwardInputs& in) {
    return std::get<0>(forward(keys, norm, in, std::nullopt));
  }

  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    checks::check_forward(norm, in, out_dtype);
    return composite_norm(norm, in, out_dtype.value_or(in.input.scalar_type()));
  }

  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    checks::check_backward(norm, in);
    auto gradients = composite_gradients(norm, in);
    Tensor& grad_input = std::get<0>(gradients);
    if (grad_input.defined()) grad_input = grad_input.to(in.input.scalar_type()).contiguous();
    return gradients;
  }

  static TwoTensors add(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    auto [output, residual_out, mean, rstd] = add_forward(keys, norm, in, std::nullopt);
    return {std::move(output), std::move(residual_out)};
  }

  static Tensor add_in_place(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    checks::check_add_in_place(norm, in);
    auto [output, residual_out] = add(keys, norm, in);
    in.residual.copy_(residual_out);
    return output;
  }

  static FourTensors add_forward(c10::DispatchKeySet, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    checks::check_add(norm, in, out_dtype);
    const Tensor sum = in.residual.to(kComposite) * in.alpha + in.input.to(kComposite);
    Tensor residual_out = sum.to(in.residual.scalar_type()).contiguous();
    auto [output, mean, rstd] =
        composite_norm(norm, in.of(residual_out), out_dtype.value_or(in.input.scalar_type()));
    return {std::move(output), std::move(residual_out), std::move(mean), std::move(rstd)};
  }

  static FourTensors add_backward(c10::DispatchKeySet, const Norm& norm,
                                  const AddBackwardInputs& in) {
    checks::check_add_backward(norm, in);
    auto [sum, grad_weight, grad_bias] = composite_gradients(norm, in.of_norm());
    if (sum.defined() && present(in.grad_residual_out)) {
      sum = sum + in.grad_residual_out->to(kComposite);
    }
    Tensor grad_input, grad_residual;
    if (in.output_mask[0]) grad_input = sum.to(in.input_dtype).contiguous();
    // The product is a copy in any case: two outputs of an operator must not be one tensor.
    if (in.output_mask[1]) {
      grad_residual = (sum * in.alpha).to(in.residual_out.scalar_type()).contiguous();
    }
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight),
            std::move(grad_bias)};
  }
};

}  // namespace fusednorm
