// The operators' signatures, translated once: every dispatch key implements three functions of a
// Norm.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "maths/row_norm.h"

namespace fusednorm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

inline bool present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// What is normalized how: an operator's arguments apart from its tensors.
struct Norm {
  const char* op;  // as error messages name it
  bool centered;   // LayerNorm; else RMSNorm
  std::optional<double> eps;
  double weight_offset = 0;
  bool eps_outside = false;
  bool unbiased = false;
  std::string_view casting_mode = "default";
  bool clamp = false;  // ScaleNorm: see row_norm.h

  bool llama() const { return casting_mode == "llama"; }
  /// eps=None is the machine epsilon of the accumulation type (as in torch 2.15).
  NormParams params(at::ScalarType acc_dtype) const {
    const double machine_epsilon = acc_dtype == at::kDouble ? 0x1p-52 : 0x1p-23;
    return {eps.value_or(machine_epsilon), eps_outside, unbiased ? 1 : 0, clamp};
  }
};

/// Statistics and sums of fp64 are kept in fp64, of everything else in fp32.
inline at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

struct ForwardInputs {
  const Tensor& input;
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
};

struct BackwardInputs {
  const Tensor& grad_output;
  const Tensor& input;
  c10::SymIntArrayRef normalized_shape;
  const Tensor& mean;  // undefined for RMSNorm
  const Tensor& rstd;
  const OptionalTensor& weight;
  const OptionalTensor& bias;  // for the dtype of its gradient
  std::array<bool, 3> output_mask;
};

// Calls into the dispatcher; with a key set, a redispatch to it.
using Keys = std::optional<c10::DispatchKeySet>;
Tensor dispatch_output(const Norm&, const ForwardInputs&, Keys = {});
ThreeTensors dispatch_forward(const Norm&, const ForwardInputs&, std::optional<at::ScalarType>,
                              Keys = {});
ThreeTensors dispatch_backward(const Norm&, const BackwardInputs&, Keys = {});

/// From the schemas' signatures to Backend::output, Backend::forward and Backend::backward.
template <class Backend>
struct Operators {
  using Dtype = std::optional<at::ScalarType>;
  using Shape = c10::SymIntArrayRef;

  static Tensor layer_norm(c10::DispatchKeySet keys, const Tensor& input, Shape shape,
                           const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                           double weight_offset, bool eps_outside, bool unbiased) {
    return Backend::output(keys, {"layer_norm", true, eps, weight_offset, eps_outside, unbiased},
                           {input, shape, weight, bias});
  }
  static Tensor rms_norm(c10::DispatchKeySet keys, const Tensor& input, Shape shape,
                         const OptionalTensor& weight, std::optional<double> eps,
                         double weight_offset, std::string_view casting_mode) {
    return Backend::output(keys,
                           {"rms_norm", false, eps, weight_offset, false, false, casting_mode},
                           {input, shape, weight, std::nullopt});
  }
  static ThreeTensors layer_norm_forward(c10::DispatchKeySet keys, const Tensor& input, Shape shape,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         double eps, double weight_offset, bool eps_outside,
                                         bool unbiased, Dtype out_dtype) {
    return Backend::forward(keys, {"layer_norm", true, eps, weight_offset, eps_outside, unbiased},
                            {input, shape, weight, bias}, out_dtype);
  }
  static std::tuple<Tensor, Tensor> rms_norm_forward(c10::DispatchKeySet keys, const Tensor& input,
                                                     Shape shape, const OptionalTensor& weight,
                                                     std::optional<double> eps,
                                                     double weight_offset,
                                                     std::string_view casting_mode,
                                                     Dtype out_dtype) {
    return forward_without_mean(keys,
                                {"rms_norm", false, eps, weight_offset, false, false, casting_mode},
                                {input, shape, weight, std::nullopt}, out_dtype);
  }
  static ThreeTensors layer_norm_backward(c10::DispatchKeySet keys, const Tensor& grad_output,
                                          const Tensor& input, Shape shape, const Tensor& mean,
                                          const Tensor& rstd, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps,
                                          std::array<bool, 3> output_mask, double weight_offset,
                                          bool eps_outside, bool unbiased) {
    return Backend::backward(
        keys, {"layer_norm_backward", true, eps, weight_offset, eps_outside, unbiased},
        {grad_output, input, shape, mean, rstd, weight, bias, output_mask});
  }
  static std::tuple<Tensor, Tensor> rms_norm_backward(
      c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& input, Shape shape,
      const Tensor& rstd, const OptionalTensor& weight, std::optional<double> eps,
      std::array<bool, 2> output_mask, double weight_offset, std::string_view casting_mode) {
    return backward_without_mean(
        keys, {"rms_norm_backward", false, eps, weight_offset, false, false, casting_mode},
        grad_output, input, shape, rstd, weight, output_mask);
  }

  // The rows of scale_norm, which hands over g as the weight of every column.
  static Norm scale(const char* op, double eps) {
    return {op, false, eps, 0, false, false, "default", /*clamp=*/true};
  }
  static Tensor scale_rows(c10::DispatchKeySet keys, const Tensor& input, Shape shape,
                           const OptionalTensor& weight, double eps) {
    return Backend::output(keys, scale("_scale_rows", eps), {input, shape, weight, std::nullopt});
  }
  static std::tuple<Tensor, Tensor> scale_rows_forward(c10::DispatchKeySet keys,
                                                       const Tensor& input, Shape shape,
                                                       const OptionalTensor& weight, double eps,
                                                       Dtype out_dtype) {
    return forward_without_mean(keys, scale("_scale_rows", eps),
                                {input, shape, weight, std::nullopt}, out_dtype);
  }
  static std::tuple<Tensor, Tensor> scale_rows_backward(c10::DispatchKeySet keys,
                                                        const Tensor& grad_output,
                                                        const Tensor& input, Shape shape,
                                                        const Tensor& rstd,
                                                        const OptionalTensor& weight, double eps,
                                                        std::array<bool, 2> output_mask) {
    return backward_without_mean(keys, scale("_scale_rows_backward", eps), grad_output, input,
                                 shape, rstd, weight, output_mask);
  }

  static void register_on(torch::Library& library) {
    library.impl("layer_norm", TORCH_FN(layer_norm));
    library.impl("rms_norm", TORCH_FN(rms_norm));
    library.impl("layer_norm_forward", TORCH_FN(layer_norm_forward));
    library.impl("rms_norm_forward", TORCH_FN(rms_norm_forward));
    library.impl("layer_norm_backward", TORCH_FN(layer_norm_backward));
    library.impl("rms_norm_backward", TORCH_FN(rms_norm_backward));
    library.impl("_scale_rows", TORCH_FN(scale_rows));
    library.impl("_scale_rows_forward", TORCH_FN(scale_rows_forward));
    library.impl("_scale_rows_backward", TORCH_FN(scale_rows_backward));
  }

 private:
  // Of the norms that have neither a mean nor a bias.
  static std::tuple<Tensor, Tensor> forward_without_mean(c10::DispatchKeySet keys, const Norm& norm,
                                                         const ForwardInputs& in, Dtype out_dtype) {
    auto [output, mean, rstd] = Backend::forward(keys, norm, in, out_dtype);
    return {std::move(output), std::move(rstd)};
  }
  static std::tuple<Tensor, Tensor> backward_without_mean(
      c10::DispatchKeySet keys, const Norm& norm, const Tensor& grad_output, const Tensor& input,
      Shape shape, const Tensor& rstd, const OptionalTensor& weight, std::array<bool, 2> mask) {
    auto [grad_input, grad_weight, none] = Backend::backward(keys, norm,
                                                             {grad_output,
                                                              input,
                                                              shape,
                                                              Tensor(),
                                                              rstd,
                                                              weight,
                                                              std::nullopt,
                                                              {mask[0], mask[1], false}});
    return {std::move(grad_input), std::move(grad_weight)};
  }
};

}  // namespace fusednorm
