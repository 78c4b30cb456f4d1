// The Meta key: shapes and dtypes of what the operators return, by the same checks. Included by
// ops.cpp.
#pragma once

#include <ATen/ops/empty.h>

#include "operators/checks.h"

namespace fusednorm {

struct MetaBackend {
  static Tensor output(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in) {
    checks::check_forward(norm, in);
    return like(in.input, in.input.sym_sizes(), in.input.scalar_type());
  }

  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    checks::check_forward(norm, in, out_dtype);
    return {like(in.input, in.input.sym_sizes(), out_dtype.value_or(in.input.scalar_type())),
            norm.centered ? statistic(in) : Tensor(), statistic(in)};
  }

  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    checks::check_backward(norm, in);
    return gradients(in);
  }

  static TwoTensors add(c10::DispatchKeySet, const Norm& norm, const AddInputs& in) {
    checks::check_add(norm, in);
    return {like(in.input, in.input.sym_sizes(), in.input.scalar_type()),
            like(in.input, in.input.sym_sizes(), in.residual.scalar_type())};
  }

  static Tensor add_in_place(c10::DispatchKeySet, const Norm& norm, const AddInputs& in) {
    checks::check_add_in_place(norm, in);
    return like(in.input, in.input.sym_sizes(), in.input.scalar_type());
  }

  static FourTensors add_forward(c10::DispatchKeySet, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    checks::check_add(norm, in, out_dtype);
    const ForwardInputs of_norm = in.of(in.residual);
    return {like(in.input, in.input.sym_sizes(), out_dtype.value_or(in.input.scalar_type())),
            like(in.input, in.input.sym_sizes(), in.residual.scalar_type()),
            norm.centered ? statistic(of_norm) : Tensor(), statistic(of_norm)};
  }

  static FourTensors add_backward(c10::DispatchKeySet, const Norm& norm,
                                  const AddBackwardInputs& in) {
    checks::check_add_backward(norm, in);
    const auto shape = in.residual_out.sym_sizes();
    auto [none, grad_weight, grad_bias] = gradients(in.of_norm());
    return {
        in.output_mask[0] ? like(in.residual_out, shape, in.input_dtype) : Tensor(),
        in.output_mask[1] ? like(in.residual_out, shape, in.residual_out.scalar_type()) : Tensor(),
        std::move(grad_weight), std::move(grad_bias)};
  }

 private:
  static Tensor like(const Tensor& input, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    return at::empty_symint(shape, input.options().dtype(dtype));
  }
  static Tensor statistic(const ForwardInputs& in) {
    return like(in.input, checks::leading_shape(in.input, in.normalized_shape),
                accumulation_dtype(in.input.scalar_type()));
  }
  static ThreeTensors gradients(const BackwardInputs& in) {
    const auto shape = in.normalized_shape;
    const auto& mask = in.output_mask;
    return {mask[0] ? like(in.input, in.input.sym_sizes(), in.input.scalar_type()) : Tensor(),
            mask[1] ? like(in.input, shape, checks::grad_weight_dtype(in)) : Tensor(),
            mask[2] ? like(in.input, shape, checks::grad_bias_dtype(in)) : Tensor()};
  }
};

}  // namespace fusednorm
