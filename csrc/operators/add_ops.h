// The fused residual operators, as ops.h has the plain ones:
//     residual_out = alpha * residual + input,  output = norm of residual_out
// Every dispatch key implements four functions of a Norm.
#pragma once

#include "ops.h"

namespace fusednorm {

using TwoTensors = std::tuple<Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct AddInputs {
  const Tensor& input;
  const Tensor& residual;
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double alpha;

  /// Those of the norm, once the sum is there.
  ForwardInputs of(const Tensor& residual_out) const {
    return {residual_out, normalized_shape, weight, bias};
  }
};

struct AddBackwardInputs {
  const Tensor& grad_output;
  const OptionalTensor& grad_residual_out;  // absent: residual_out was not used
  const Tensor& residual_out;
  c10::SymIntArrayRef normalized_shape;
  const Tensor& mean;  // undefined for RMSNorm
  const Tensor& rstd;
  const OptionalTensor& weight;
  const OptionalTensor& bias;  // for the dtype of its gradient
  at::ScalarType input_dtype;
  std::array<bool, 4> output_mask;  // input, residual, weight, bias
  double alpha;

  bool wants_sum() const { return output_mask[0] || output_mask[1]; }
  /// Those of the norm's own backward.
  BackwardInputs of_norm() const {
    return {grad_output,
            residual_out,
            normalized_shape,
            mean,
            rstd,
            weight,
            bias,
            {wants_sum(), output_mask[2], output_mask[3]}};
  }
};

// Calls into the dispatcher, as in ops.h.
TwoTensors dispatch_add(const Norm&, const AddInputs&, Keys = {});       // output, residual_out
Tensor dispatch_add_in_place(const Norm&, const AddInputs&, Keys = {});  // output
FourTensors dispatch_add_forward(const Norm&, const AddInputs&,          // output, residual_out,
                                 std::optional<at::ScalarType>, Keys = {});  // mean, rstd
FourTensors dispatch_add_backward(const Norm&, const AddBackwardInputs&, Keys = {});

/// From the schemas' signatures to Backend::add, add_in_place, add_forward and add_backward.
template <class Backend>
struct AddOperators {
  using Dtype = std::optional<at::ScalarType>;
  using Shape = c10::SymIntArrayRef;

  static TwoTensors add_layer_norm(c10::DispatchKeySet keys, const Tensor& input,
                                   const Tensor& residual, Shape shape,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   double eps, double alpha, double weight_offset, bool eps_outside,
                                   bool unbiased) {
    return Backend::add(keys, {"add_layer_norm", true, eps, weight_offset, eps_outside, unbiased},
                        {input, residual, shape, weight, bias, alpha});
  }
  static TwoTensors add_rms_norm(c10::DispatchKeySet keys, const Tensor& input,
                                 const Tensor& residual, Shape shape, const OptionalTensor& weight,
                                 std::optional<double> eps, double alpha, double weight_offset,
                                 std::string_view casting_mode) {
    return Backend::add(keys,
                        {"add_rms_norm", false, eps, weight_offset, false, false, casting_mode},
                        {input, residual, shape, weight, std::nullopt, alpha});
  }
  static Tensor add_layer_norm_(c10::DispatchKeySet keys, const Tensor& input,
                                const Tensor& residual, Shape shape, const OptionalTensor& weight,
                                const OptionalTensor& bias, double eps, double alpha,
                                double weight_offset, bool eps_outside, bool unbiased) {
    return Backend::add_in_place(
        keys, {"add_layer_norm_", true, eps, weight_offset, eps_outside, unbiased},
        {input, residual, shape, weight, bias, alpha});
  }
  static Tensor add_rms_norm_(c10::DispatchKeySet keys, const Tensor& input, const Tensor& residual,
                              Shape shape, const OptionalTensor& weight, std::optional<double> eps,
                              double alpha, double weight_offset, std::string_view casting_mode) {
    return Backend::add_in_place(
        keys, {"add_rms_norm_", false, eps, weight_offset, false, false, casting_mode},
        {input, residual, shape, weight, std::nullopt, alpha});
  }
  static FourTensors add_layer_norm_forward(c10::DispatchKeySet keys, const Tensor& input,
                                            const Tensor& residual, Shape shape,
                                            const OptionalTensor& weight,
                                            const OptionalTensor& bias, double eps, double alpha,
                                            double weight_offset, bool eps_outside, bool unbiased,
                                            Dtype out_dtype) {
    return Backend::add_forward(keys,
                                {"add_layer_norm", true, eps, weight_offset, eps_outside, unbiased},
                                {input, residual, shape, weight, bias, alpha}, out_dtype);
  }
  static ThreeTensors add_rms_norm_forward(c10::DispatchKeySet keys, const Tensor& input,
                                           const Tensor& residual, Shape shape,
                                           const OptionalTensor& weight, std::optional<double> eps,
                                           double alpha, double weight_offset,
                                           std::string_view casting_mode, Dtype out_dtype) {
    auto [output, residual_out, mean, rstd] = Backend::add_forward(
        keys, {"add_rms_norm", false, eps, weight_offset, false, false, casting_mode},
        {input, residual, shape, weight, std::nullopt, alpha}, out_dtype);
    return {std::move(output), std::move(residual_out), std::move(rstd)};
  }
  static FourTensors add_layer_norm_backward(
      c10::DispatchKeySet keys, const Tensor& grad_output, const OptionalTensor& grad_residual_out,
      const Tensor& residual_out, Shape shape, const Tensor& mean, const Tensor& rstd,
      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
      at::ScalarType input_dtype, std::array<bool, 4> output_mask, double alpha,
      double weight_offset, bool eps_outside, bool unbiased) {
    return Backend::add_backward(
        keys, {"add_layer_norm_backward", true, eps, weight_offset, eps_outside, unbiased},
        {grad_output, grad_residual_out, residual_out, shape, mean, rstd, weight, bias, input_dtype,
         output_mask, alpha});
  }
  static ThreeTensors add_rms_norm_backward(c10::DispatchKeySet keys, const Tensor& grad_output,
                                            const OptionalTensor& grad_residual_out,
                                            const Tensor& residual_out, Shape shape,
                                            const Tensor& rstd, const OptionalTensor& weight,
                                            std::optional<double> eps, at::ScalarType input_dtype,
                                            std::array<bool, 3> output_mask, double alpha,
                                            double weight_offset, std::string_view casting_mode) {
    auto [grad_input, grad_residual, grad_weight, none] = Backend::add_backward(
        keys, {"add_rms_norm_backward", false, eps, weight_offset, false, false, casting_mode},
        {grad_output,
         grad_residual_out,
         residual_out,
         shape,
         Tensor(),
         rstd,
         weight,
         std::nullopt,
         input_dtype,
         {output_mask[0], output_mask[1], output_mask[2], false},
         alpha});
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight)};
  }

  static void register_on(torch::Library& library) {
    library.impl("add_layer_norm", TORCH_FN(add_layer_norm));
    library.impl("add_rms_norm", TORCH_FN(add_rms_norm));
    library.impl("add_layer_norm_", TORCH_FN(add_layer_norm_));
    library.impl("add_rms_norm_", TORCH_FN(add_rms_norm_));
    library.impl("add_layer_norm_forward", TORCH_FN(add_layer_norm_forward));
    library.impl("add_rms_norm_forward", TORCH_FN(add_rms_norm_forward));
    library.impl("add_layer_norm_backward", TORCH_FN(add_layer_norm_backward));
    library.impl("add_rms_norm_backward", TORCH_FN(add_rms_norm_backward));
  }
};

/// All operators, of both kinds.
template <class Backend>
void register_operators(torch::Library& library) {
  Operators<Backend>::register_on(library);
  AddOperators<Backend>::register_on(library);
}

}  // namespace fusednorm
