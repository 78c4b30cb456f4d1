// The public C++ functions (fusednorm.h).
#include <ATen/core/dispatch/Dispatcher.h>

#include "fusednorm.h"
#include "operators/operators.h"

namespace fusednorm {
namespace {

using RowShape = at::IntArrayRef;

/// An operator names itself: no name is given here.
Call call_of(Form form, double eps, const LayerNormOptions& options) {
  Call call{{"", NormKind::kLayerNorm, eps}, form};
  set_options(options, &call.norm);
  return call;
}
Call call_of(Form form, std::optional<double> eps, const RmsNormOptions& options) {
  Call call{{"", NormKind::kRmsNorm, eps}, form};
  set_options(options, &call.norm);
  return call;
}

/// What every forward is given. The tensors are the caller's.
Call with(Call call, const Tensor& input, RowShape shape, const OptionalTensor& weight,
          const OptionalTensor& bias = Optional::none) {
  call.input = &input;
  call.normalized_shape = c10::fromIntArrayRefSlow(shape);
  call.weight = &weight;
  call.bias = &bias;
  return call;
}
Call with_residual(Call call, const Tensor& residual, double alpha) {
  call.residual = &residual;
  call.alpha = alpha;
  return call;
}
Call with_gradient(Call call, const Tensor& grad_output, const Tensor& rstd, Wanted wanted) {
  call.grad_output = &grad_output;
  call.rstd = &rstd;
  call.wanted = wanted;
  return call;
}

std::tuple<Tensor, Tensor> output_and_sum(const Call& call) {
  Outputs made = dispatch_outputs(call);
  return {std::move(made.output), std::move(made.residual_out)};
}

}  // namespace

Tensor layer_norm(const Tensor& input, RowShape shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps, const LayerNormOptions& options) {
  return dispatch_outputs(with(call_of(Form::kOutput, eps, options), input, shape, weight, bias))
      .output;
}

Tensor rms_norm(const Tensor& input, RowShape shape, const OptionalTensor& weight,
                std::optional<double> eps, const RmsNormOptions& options,
                const OptionalTensor& bias) {
  return dispatch_outputs(with(call_of(Form::kOutput, eps, options), input, shape, weight, bias))
      .output;
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  return dispatch_outputs(with({{"", NormKind::kGroupNorm, eps, num_groups}, Form::kOutput}, input,
                               {}, weight, bias))
      .output;
}

Tensor scale_norm(const Tensor& input, const Tensor& g, double eps) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("fusednorm::scale_norm", "")
                                 .typed<Tensor(const Tensor&, const Tensor&, double)>();
  return handle.call(input, g, eps);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& input, RowShape shape,
                                                      const OptionalTensor& weight,
                                                      const OptionalTensor& bias, double eps,
                                                      const LayerNormOptions& options,
                                                      std::optional<at::ScalarType> out_dtype) {
  Call call = with(call_of(Form::kForward, eps, options), input, shape, weight, bias);
  call.out_dtype = out_dtype;
  Outputs made = dispatch_outputs(call);
  return {std::move(made.output), std::move(made.mean), std::move(made.rstd)};
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& input, RowShape shape,
                                            const OptionalTensor& weight, std::optional<double> eps,
                                            const RmsNormOptions& options,
                                            std::optional<at::ScalarType> out_dtype,
                                            const OptionalTensor& bias) {
  Call call = with(call_of(Form::kForward, eps, options), input, shape, weight, bias);
  call.out_dtype = out_dtype;
  Outputs made = dispatch_outputs(call);
  return {std::move(made.output), std::move(made.rstd)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, RowShape shape, const Tensor& mean,
    const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
    std::array<bool, 3> mask, const LayerNormOptions& options) {
  Call call =
      with_gradient(with(call_of(Form::kBackward, eps, options), input, shape, weight, bias),
                    grad_output, rstd, {mask[0], false, mask[1], mask[2]});
  call.mean = &mean;
  Gradients made = dispatch_gradients(call);
  return {std::move(made.input), std::move(made.weight), std::move(made.bias)};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_output, const Tensor& input, RowShape shape, const Tensor& rstd,
    const OptionalTensor& weight, std::optional<double> eps, std::array<bool, 3> mask,
    const RmsNormOptions& options, const OptionalTensor& bias) {
  Gradients made = dispatch_gradients(
      with_gradient(with(call_of(Form::kBackward, eps, options), input, shape, weight, bias),
                    grad_output, rstd, {mask[0], false, mask[1], mask[2]}));
  return {std::move(made.input), std::move(made.weight), std::move(made.bias)};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          RowShape shape, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps, double alpha,
                                          const LayerNormOptions& options) {
  return output_and_sum(with_residual(
      with(call_of(Form::kAdd, eps, options), input, shape, weight, bias), residual, alpha));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, RowShape shape,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        double alpha, const RmsNormOptions& options,
                                        const OptionalTensor& bias) {
  return output_and_sum(with_residual(
      with(call_of(Form::kAdd, eps, options), input, shape, weight, bias), residual, alpha));
}

Tensor add_layer_norm_(const Tensor& input, const Tensor& residual, RowShape shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                       double alpha, const LayerNormOptions& options) {
  return dispatch_outputs(with_residual(with(call_of(Form::kAddInPlace, eps, options), input, shape,
                                             weight, bias),
                                        residual, alpha))
      .output;
}

Tensor add_rms_norm_(const Tensor& input, const Tensor& residual, RowShape shape,
                     const OptionalTensor& weight, std::optional<double> eps, double alpha,
                     const RmsNormOptions& options, const OptionalTensor& bias) {
  return dispatch_outputs(with_residual(with(call_of(Form::kAddInPlace, eps, options), input, shape,
                                             weight, bias),
                                        residual, alpha))
      .output;
}

}  // namespace fusednorm
