// The formulas of row_norm.h in ATen arithmetic.
#include "keys/composites.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "operators/checks.h"

namespace fusednorm {
namespace {

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

NormalizedRows normalize_rows(const Norm& norm, const Tensor& input, size_t normalized_dims) {
  NormalizedRows rows;
  c10::SymInt cols = 1;
  for (size_t i = 1; i <= normalized_dims; ++i) {
    rows.dims.push_back(-static_cast<int64_t>(i));
    cols *= input.sym_size(-static_cast<int64_t>(i));
  }
  const NormParams params = norm.params(accumulation_dtype(input.scalar_type()));
  rows.divisor = params.clamp ? c10::SymInt(1) : cols - params.ddof;
  Tensor x = input.to(kComposite);
  if (norm.centered()) {
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

Tensor gain_of(const Norm& norm, const Tensor& weight) {
  return weight.to(kComposite) + norm.weight_offset;
}

Tensor round_x_hat(const Norm& norm, const Tensor& x_hat, const Tensor& input) {
  return norm.llama() ? x_hat.to(input.scalar_type()).to(x_hat.scalar_type()) : x_hat;
}

/// Of checked arguments, the norm alone.
Outputs norm_of(const Call& call, at::ScalarType out_dtype) {
  const Norm& norm = call.norm;
  const Tensor& input = *call.input;
  const auto acc_dtype = accumulation_dtype(input.scalar_type());
  const auto rows = normalize_rows(norm, input, call.normalized_shape.size());
  Tensor output = round_x_hat(norm, rows.x_hat, input);
  if (present(*call.weight)) output = output * gain_of(norm, **call.weight);
  if (present(*call.bias)) output = output + (*call.bias)->to(kComposite);
  Outputs made;
  if (norm.centered()) made.mean = input.detach().to(kComposite).mean(rows.dims).to(acc_dtype);
  made.output = output.to(out_dtype).contiguous();
  made.rstd = rows.rstd.detach().reshape_symint(checks::leading_shape(call)).to(acc_dtype);
  return made;
}

/// As differentiable functions of grad_output, input and weight; that of the input not rounded yet.
/// The statistics are computed anew: the saved ones are constants, with which second derivatives
/// would be wrong.
Gradients gradients_of(const Call& call) {
  const Norm& norm = call.norm;
  const Tensor& input = *call.input;
  const auto rows = normalize_rows(norm, input, call.normalized_shape.size());
  const Tensor grad_output = call.grad_output->to(kComposite);
  Gradients made;
  if (call.wanted.input) {
    const Tensor g =
        present(*call.weight) ? grad_output * gain_of(norm, **call.weight) : grad_output;
    Tensor projection = (g * rows.x_hat).sum(rows.dims, /*keepdim=*/true) / rows.divisor;
    if (norm.eps_outside) {
      const Tensor zero = rows.deviation == 0;
      projection =
          (projection / (rows.deviation.masked_fill(zero, 1) * rows.rstd)).masked_fill(zero, 0);
    }
    if (norm.clamp()) projection = projection.masked_fill(rows.clamped, 0);
    made.input = g - rows.x_hat * projection;
    if (norm.centered()) made.input = made.input - g.mean(rows.dims, /*keepdim=*/true);
    made.input = made.input * rows.rstd;
  }
  const auto over_rows = [&](const Tensor& values, at::ScalarType dtype) {
    std::vector<int64_t> leading;
    for (int64_t d = 0; d < input.dim() - static_cast<int64_t>(rows.dims.size()); ++d) {
      leading.push_back(d);
    }
    // A copy in any case: a single row's grad_bias must not be grad_output itself.
    return (leading.empty() ? values : values.sum(leading))
        .to(dtype, /*non_blocking=*/false, /*copy=*/true)
        .contiguous();
  };
  if (call.wanted.weight) {
    made.weight = over_rows(grad_output * round_x_hat(norm, rows.x_hat, input),
                            checks::grad_weight_dtype(call));
  }
  if (call.wanted.bias) made.bias = over_rows(grad_output, checks::grad_bias_dtype(call));
  return made;
}

}  // namespace

Outputs RowComposites::outputs(Keys, const Call& call) {
  checks::check(call);
  const auto dtype = call.out_dtype.value_or(call.input->scalar_type());
  if (!adds_residual(call.form)) return norm_of(call, dtype);
  if (call.form == Form::kAddInPlace) checks::check_writable(call);
  const Tensor sum = call.residual->to(kComposite) * call.alpha + call.input->to(kComposite);
  const Tensor residual_out = sum.to(call.residual->scalar_type()).contiguous();
  Outputs made = norm_of(call.of_sum(residual_out), dtype);
  made.residual_out = residual_out;
  if (call.form == Form::kAddInPlace) call.residual->copy_(residual_out);
  return made;
}

Gradients RowComposites::gradients(Keys, const Call& call) {
  checks::check(call);
  const bool of_sum = call.form == Form::kAddBackward;
  Gradients made = gradients_of(of_sum ? call.of_sum(*call.residual_out) : call);
  if (!of_sum) {
    if (made.input.defined()) made.input = made.input.to(call.input->scalar_type()).contiguous();
    return made;
  }
  Tensor sum = made.input;
  made.input = Tensor();
  if (sum.defined() && present(*call.grad_residual_out)) {
    sum = sum + (*call.grad_residual_out)->to(kComposite);
  }
  if (call.wanted.input) made.input = sum.to(call.input_dtype).contiguous();
  // The product is a copy in any case: two outputs of an operator must not be one tensor.
  if (call.wanted.residual) {
    made.residual = (sum * call.alpha).to(call.residual_out->scalar_type()).contiguous();
  }
  return made;
}

TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  register_norms<RowComposites, LayerNorm, RmsNorm, ScaleRows>(m);
}

}  // namespace fusednorm
