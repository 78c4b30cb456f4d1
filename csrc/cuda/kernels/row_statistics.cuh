// What a norm takes of its row: two passes for LayerNorm, one for RMSNorm.
#pragma once

#include "held_rows.cuh"

namespace fusednorm::cuda {

template <class acc_t>
struct RowStatistics {
  acc_t mean;  // 0 for RMSNorm
  acc_t rstd;
  acc_t minus_shift_rstd;  // see row_norm.h
  acc_t variance;
  bool extreme;  // squares over- or underflowed, or the row is not finite
};

constexpr int kAccumulators = 4;  // independent chains of additions of a thread

template <class acc_t>
__device__ __forceinline__ acc_t sum_of(const acc_t (&a)[kAccumulators]) {
  return (a[0] + a[1]) + (a[2] + a[3]);
}

/// Two passes: the mean; then the deviations from it and their squares. The mean of the deviations
/// is what the first mean is off by: it takes its share out of the variance and mends the mean, so
/// that of a constant row nothing is left.
template <class acc_t, class Row>
__device__ __forceinline__ RowStatistics<acc_t> row_statistics(bool centered, Row& row,
                                                               Group& group, int cols,
                                                               const NormParams& params) {
  constexpr int kColumns = Row::kColumns;
  const acc_t count = static_cast<acc_t>(cols);
  RowStatistics<acc_t> result = {};
  acc_t squares;
  if (centered) {
    acc_t sum[kAccumulators] = {};
    row.for_units([&](int64_t, auto load) {
      acc_t v[kColumns];
      load(v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[j % kAccumulators] += v[j];
    });
    acc_t total[1] = {sum_of(sum)};
    all_reduce<Sum>(group, total);
    result.mean = total[0] / count;
    acc_t deviation[kAccumulators] = {}, square[kAccumulators] = {};
    row.for_units([&](int col, auto load) {
      acc_t v[kColumns];
      load(v);
      with_columns<kColumns>(cols - col, [&](auto columns) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const acc_t d = columns.has(j) ? v[j] - result.mean : 0;
          deviation[j % kAccumulators] += d;
          square[j % kAccumulators] = Math::mul_add(d, d, square[j % kAccumulators]);
        }
      });
    });
    acc_t sums[2] = {sum_of(deviation), sum_of(square)};
    all_reduce<Sum>(group, sums);
    const acc_t shift = sums[0] / count, first = result.mean;
    squares = Math::mul_add(-sums[0], shift, sums[1]);
    if (squares < 0) squares = 0;
    result.mean = first + shift;
    result.minus_shift_rstd = -((first - result.mean) + shift);  // times rstd below
    result.extreme = !(sums[1] <= static_cast<acc_t>(Range<acc_t>::kHuge));
  } else {
    acc_t square[kAccumulators] = {};
    row.for_units([&](int64_t, auto load) {
      acc_t v[kColumns];
      load(v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        square[j % kAccumulators] = Math::mul_add(v[j], v[j], square[j % kAccumulators]);
      }
    });
    acc_t sums[1] = {sum_of(square)};
    all_reduce<Sum>(group, sums);
    squares = sums[0];
    result.extreme = !(squares <= static_cast<acc_t>(Range<acc_t>::kHuge));
  }
  result.variance = variance_of(squares, count, params);
  result.rstd = reciprocal_deviation(result.variance, params);
  // Of RMSNorm -0: added to a product, it changes no bit, not even the sign of a 0.
  result.minus_shift_rstd = centered ? result.minus_shift_rstd * result.rstd : acc_t(-0.0);
  result.extreme |=
      !(variance_floor(result.variance, params) >= static_cast<acc_t>(Range<acc_t>::kTiny));
  return result;
}

/// The exponent that brings an extreme row's values, and eps with them, below 1; 0 where that would
/// not help: a row with an infinity, or of zeros with eps 0. NaN stays NaN at any scale.
template <class acc_t, class Row>
__device__ __forceinline__ int scaling_exponent(Row& row, Group& group, const NormParams& params) {
  const acc_t eps = std::fabs(static_cast<acc_t>(params.eps));
  acc_t largest[1] = {params.eps_scales_as_x() ? eps : std::sqrt(eps)};
  row.for_units([&](int64_t, auto load) {
    acc_t v[Row::kColumns];
    load(v);
#pragma unroll
    for (int j = 0; j < Row::kColumns; ++j)
      largest[0] = Max::of(acc_t(std::fabs(v[j])), largest[0]);
  });
  all_reduce<Max>(group, largest);
  if (largest[0] == 0 || std::isinf(largest[0])) return 0;
  return std::ilogb(largest[0]) + 1;
}

template <class acc_t>
FN_HOST_DEVICE acc_t power_of_two_times(acc_t value, int exponent) {
  return exponent == 0 ? value : std::ldexp(value, exponent);
}

FN_HOST_DEVICE NormParams scaled(NormParams params, int exponent) {
  params.eps = std::ldexp(params.eps, (params.eps_scales_as_x() ? -1 : -2) * exponent);
  return params;
}

}  // namespace fusednorm::cuda
