// The maths of a row norm, written once: torch-free, for the host's vectors and for CUDA threads.
//
// A row x of N elements is normalized to
//     x_hat = (x - mean) * rstd          LayerNorm (mean and biased variance of the row)
//     x_hat = x * rstd                   RMSNorm   (the same with the mean taken as 0)
//     y     = x_hat * weight + bias
// where rstd = 1 / sqrt(variance + eps), or 1 / (sqrt(variance) + eps) with eps_outside
// ("annotated" LayerNorm), and variance = (centred sum of squares) / (N - ddof).
//
// With clamp (ScaleNorm, a variant of RMSNorm) variance is the sum of squares itself and
// rstd = 1 / max(sqrt(variance), eps), so that x_hat = x / max(norm of x, eps).
//
// Backward, with g = grad_output * weight:
//     grad_input  = rstd * (g - mean(g) - x_hat * projection)     (RMSNorm: without mean(g))
//     grad_weight = sum over rows of grad_output * x_hat,  grad_bias = sum over rows of grad_output
//     projection  = sum(g * x_hat) / (N - ddof), times (s + eps) / s with eps outside; s =
//     sqrt(variance)
//     with clamp: projection = sum(g * x_hat), and 0 where rstd is 1 / eps
//
// Two means. An fp32 mean of a row that lies 1e6 standard deviations from 0 is off by up to half an
// ulp, 0.03 standard deviations. So the rows carry `mean` (rounded, saved for backward) and
// `shift`, the mean of x - mean: x - mean is exact there, and x_hat = (x - mean) * rstd - shift *
// rstd costs one fused multiply-add, the same as the multiplication it replaces.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FN_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(FUSEDNORM_SIMT)
#define FN_HOST_DEVICE inline  // see tests/simt/simt.h
#else
#define FN_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fusednorm {

enum class DType : int { kFloat64, kFloat32, kBFloat16, kFloat16 };
constexpr int kNumDTypes = 4;

/// Which statistics a norm takes of its row.
struct LayerNormStatistics {
  static constexpr bool kCentered = true;
};
struct RmsNormStatistics {
  static constexpr bool kCentered = false;
};

/// What turns a sum of squares into rstd. `eps` may be any finite number; with clamp, above 0.
struct NormParams {
  double eps = 1e-5;
  bool eps_outside = false;
  int ddof = 0;  // 1: unbiased variance, divides by N - 1
  bool clamp = false;

  /// eps stands beside sqrt(variance), and scales as x does; else beside variance, as x squared.
  FN_HOST_DEVICE bool eps_scales_as_x() const { return eps_outside || clamp; }
};

/// Beyond these a row's squares under- or overflow, and the row is taken scaled by a power of two.
template <class acc_t>
struct Range {
  static constexpr double kTiny = 1e-30, kHuge = 3.4e38;
};
template <>
struct Range<double> {
  static constexpr double kTiny = 1e-280, kHuge = 1.7e308;
};

// The row-level scalars, a handful of operations per row. real is double on the host; on the device
// it is the accumulation type, since every thread forms them and many a GPU has few fp64 units.

template <class real>
FN_HOST_DEVICE real variance_of(real sum_squares, real cols, const NormParams& params) {
  return params.clamp ? sum_squares : sum_squares / (cols - static_cast<real>(params.ddof));
}

template <class real>
FN_HOST_DEVICE real reciprocal_deviation(real variance, const NormParams& params) {
  const real eps = static_cast<real>(params.eps), one = 1;
  if (params.clamp) {
    const real deviation = std::sqrt(variance);
    return one / (deviation < eps ? eps : deviation);  // NaN stays NaN
  }
  return params.eps_outside ? one / (std::sqrt(variance) + eps) : one / std::sqrt(variance + eps);
}

/// What the square root is taken of, at least: the measure of a tiny row.
template <class real>
FN_HOST_DEVICE real variance_floor(real variance, const NormParams& params) {
  const real eps = static_cast<real>(params.eps);
  if (params.clamp) return variance < eps * eps ? eps * eps : variance;
  return variance + (params.eps_outside ? eps * eps : eps);
}

/// The coefficient of x_hat in grad_input. `rstd` is the saved one, rounded to `unit` (2^-24 for
/// fp32): where s is below that rounding of s + eps, it is taken as that large. The term it divides
/// is then smaller than rounding itself, and 0 for a constant row (the derivative of sqrt at 0 is
/// taken as 0). With clamp, an rstd within that rounding of 1 / eps is a clamped row's.
template <class real>
FN_HOST_DEVICE real projection_of(real sum_g_x_hat, real rstd, real unit, real cols,
                                  const NormParams& params) {
  if (params.clamp) {
    const bool clamped = rstd * static_cast<real>(params.eps) >= real(1) - 2 * unit;
    return clamped ? real(0) : sum_g_x_hat;
  }
  real projection = sum_g_x_hat / (cols - static_cast<real>(params.ddof));
  if (params.eps_outside) {
    const real deviation = real(1) / rstd - static_cast<real>(params.eps);
    const real rounding = unit / std::fabs(rstd);
    projection /= (deviation > rounding ? deviation : rounding) * rstd;
  }
  return projection;
}

// The element-level maths; value_t is a vector register on the host, one number on the device.
// Math::mul_add(a, b, c) is a * b + c, fused where the machine has it.

template <class Statistics, class Math, class value_t>
FN_HOST_DEVICE value_t normalize(value_t x, value_t mean, value_t rstd, value_t minus_shift_rstd) {
  if constexpr (Statistics::kCentered) {
    return Math::mul_add(x - mean, rstd, minus_shift_rstd);
  } else {
    return x * rstd;
  }
}

template <class Statistics, class Math, class value_t>
FN_HOST_DEVICE value_t grad_input(value_t g, value_t x_hat, value_t mean_g,
                                  value_t minus_projection, value_t rstd) {
  value_t d = Math::mul_add(x_hat, minus_projection, g);
  if constexpr (Statistics::kCentered) d = d - mean_g;
  return d * rstd;
}

}  // namespace fusednorm
