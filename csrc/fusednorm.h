// fusednorm: fused LayerNorm and RMSNorm for PyTorch. The C++ interface.
//
// Every function has autograd and goes through the dispatcher, so it serves each device and torch
// transform alike. A program that loads libfusednorm.so without this header reaches the same
// operators as torch.ops.fusednorm.*.
//
// Common to all:
//   input             [*, normalized_shape...], fp64, fp32, bf16 or fp16, any strides
//   normalized_shape  the trailing dimensions that make a row; N elements together
//   weight, bias      of shape normalized_shape, each of any of the four dtypes; absent: 1 and 0
//   eps               any finite number
// The output is contiguous and of the input's shape and dtype. Statistics and sums are kept in fp32
// (fp64 for fp64). A wrong shape, dtype, device or layout throws c10::Error, which names the
// operator, the argument, what was expected and what was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "operators/options.h"
#include "operators/visibility.h"

namespace fusednorm {

// LayerNormOptions and RmsNormOptions, what they mean and what they default to:
// operators/options.h.

/// y = (x - mean) / sqrt(variance + eps) * weight + bias, over each row (Ba et al. 2016), as
/// torch::layer_norm.
FUSEDNORM_API at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                    const std::optional<at::Tensor>& weight = {},
                                    const std::optional<at::Tensor>& bias = {}, double eps = 1e-5,
                                    const LayerNormOptions& options = {});

/// y = x / sqrt(mean(x^2) + eps) * weight + bias, over each row (Zhang and Sennrich 2019), as
/// torch::rms_norm. eps absent: the machine epsilon of the accumulation type.
FUSEDNORM_API at::Tensor rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                  const std::optional<at::Tensor>& weight = {},
                                  std::optional<double> eps = {},
                                  const RmsNormOptions& options = {},
                                  const std::optional<at::Tensor>& bias = {});

/// GroupNorm (Wu and He 2018): LayerNorm of the channels of one group at all positions, over each
/// sample of the input [N, C, *]; weight and bias of shape [C]. As torch::group_norm, whose memory
/// format (channels last) it keeps.
FUSEDNORM_API at::Tensor group_norm(const at::Tensor& input, int64_t num_groups,
                                    const std::optional<at::Tensor>& weight = {},
                                    const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

/// ScaleNorm (Nguyen and Salazar 2019): y = g * x / max(|x|, eps), |x| the Euclidean norm over the
/// last dimension; g a tensor of one element, eps above 0. Where |x| < eps the gradient is that of
/// g * x / eps.
FUSEDNORM_API at::Tensor scale_norm(const at::Tensor& input, const at::Tensor& g,
                                    double eps = 1e-5);

/// layer_norm together with what backward needs: (output, mean, rstd); mean and rstd have the
/// leading dimensions' shape, are fp32 (fp64 for fp64) and carry no gradient. out_dtype: the
/// input's, or fp32 for 16-bit inputs.
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = {}, const std::optional<at::Tensor>& bias = {},
    double eps = 1e-5, const LayerNormOptions& options = {},
    std::optional<at::ScalarType> out_dtype = {});

/// rms_norm together with what backward needs: (output, rstd).
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor& input, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = {}, std::optional<double> eps = {},
    const RmsNormOptions& options = {}, std::optional<at::ScalarType> out_dtype = {},
    const std::optional<at::Tensor>& bias = {});

/// (grad_input, grad_weight, grad_bias); what output_mask leaves out is undefined. `bias` is read
/// for its dtype only. The gradients have the dtype of what they belong to.
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, std::array<bool, 3> output_mask,
    const LayerNormOptions& options = {});

/// (grad_input, grad_weight, grad_bias), as layer_norm_backward.
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& rstd, const std::optional<at::Tensor>& weight, std::optional<double> eps,
    std::array<bool, 3> output_mask, const RmsNormOptions& options = {},
    const std::optional<at::Tensor>& bias = {});

// ---- The fused residual add: residual_out = alpha * residual + input, output = norm of it ----
//
// The sum is one fused multiply-add in the wider accumulation type, rounded once to the residual's
// dtype; output is the norm of residual_out as stored, in the input's dtype. The residual has the
// input's shape and any of the four dtypes: an fp32 stream may run beside a bf16 input. eps absent:
// the machine epsilon of what the residual accumulates in.

/// (output, residual_out), with layer_norm as the norm.
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& input, const at::Tensor& residual, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = {}, const std::optional<at::Tensor>& bias = {},
    double eps = 1e-5, double alpha = 1.0, const LayerNormOptions& options = {});

/// (output, residual_out), with rms_norm as the norm.
FUSEDNORM_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& input, const at::Tensor& residual, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = {}, std::optional<double> eps = {},
    double alpha = 1.0, const RmsNormOptions& options = {},
    const std::optional<at::Tensor>& bias = {});

/// add_layer_norm for inference: residual_out is written over `residual`. Refused where autograd
/// would record it, and for a residual whose elements share memory (expanded).
FUSEDNORM_API at::Tensor add_layer_norm_(const at::Tensor& input, const at::Tensor& residual,
                                         at::IntArrayRef normalized_shape,
                                         const std::optional<at::Tensor>& weight = {},
                                         const std::optional<at::Tensor>& bias = {},
                                         double eps = 1e-5, double alpha = 1.0,
                                         const LayerNormOptions& options = {});

/// add_rms_norm for inference, as add_layer_norm_.
FUSEDNORM_API at::Tensor add_rms_norm_(const at::Tensor& input, const at::Tensor& residual,
                                       at::IntArrayRef normalized_shape,
                                       const std::optional<at::Tensor>& weight = {},
                                       std::optional<double> eps = {}, double alpha = 1.0,
                                       const RmsNormOptions& options = {},
                                       const std::optional<at::Tensor>& bias = {});

/// The CPU kernels in use: "avx512bf16", "avx512", "avx2" or "portable". Chosen once, by what the
/// machine has and the environment variable ATEN_CPU_CAPABILITY allows.
FUSEDNORM_API const char* cpu_kernels();

}  // namespace fusednorm
