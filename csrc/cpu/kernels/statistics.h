#pragma once

// Statistics of one row. Included by kernels.h.

template <class acc_t>
struct RowStatistics {
  acc_t mean;  // 0 for RMSNorm
  acc_t rstd;
  acc_t minus_shift_rstd;  // see row_norm.h
};

template <class T>
FN_INLINE acc_of<T> element(const T* x) {
  return sum_lanes(load(x, 1));
}

template <class V>
FN_INLINE auto first_lane(V a) {
  return a[0];
}
FN_INLINE float first_lane(f32x2 a) { return a.even[0]; }

/// False where the squares over- or underflowed (or the row is not finite): see scaled_row.
///
/// LayerNorm takes one sweep about a pivot, the mean of the row's first vector. Where the mean
/// turns out more than a standard deviation from the pivot, cancellation would cost digits, and a
/// second sweep is made about the mean found.
template <class Statistics, class Load>
FN_INLINE bool row_statistics_here(const Load& row, int64_t cols, const NormParams& params,
                                   RowStatistics<acc_of<typename Load::stored_t>>* result,
                                   const Touch& touch) {
  using T = typename Load::stored_t;
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const double count = static_cast<double>(cols);
  double mean = 0, squares = 0, largest = 0;
  acc_t pivot = 0;
  double delta = 0;
  if constexpr (Statistics::kCentered) {
    const auto sums_about_pivot = [&](const auto& values) FN_LAMBDA_INLINE {
      const V pivot_v = Broadcast<V>::of(pivot);
      double sums[2];
      row_sums<T>(
          cols,
          [&](int64_t i, auto part, V(&acc)[2]) FN_LAMBDA_INLINE {
            const V d = keep(values.read(i, part) - pivot_v, part);
            acc[0] = acc[0] + d;
            acc[1] = mul_add(d, d, acc[1]);
          },
          sums, touch);
      delta = sums[0] / count;
      largest = sums[1];
      squares = sums[1] - sums[0] * delta;
      if (squares < 0) squares = 0;
      mean = pivot + delta;
      return delta * sums[0] <= squares;
    };
    // Divided first: a power of two divides exactly, and the sum of huge values would overflow.
    if (cols >= kLanes<T>) {
      pivot = sum_lanes(row.value(0, Full{}) / Broadcast<V>::of(kLanes<T>));
    } else {
      pivot = first_lane(row.value(0, Part{1}));
    }
    if (!sums_about_pivot(row)) {
      pivot = static_cast<acc_t>(mean);
      const auto stored = row.after();
      if (!sums_about_pivot(stored)) {
        pivot = static_cast<acc_t>(mean);
        sums_about_pivot(stored);
      }
    }
  } else {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          const V d = keep(row.read(i, part), part);
          acc[0] = mul_add(d, d, acc[0]);
        },
        sums, touch);
    squares = largest = sums[0];
  }
  const double variance = variance_of(squares, count, params);
  double rstd = reciprocal_deviation(variance, params);
  // Finite but beyond acc_t: a constant row with a tiny eps, whose x - mean is 0. Not 0 * infinity.
  if (rstd > Range<acc_t>::kHuge && rstd <= Range<double>::kHuge) rstd = Range<acc_t>::kHuge;
  result->mean = static_cast<acc_t>(mean);
  result->rstd = static_cast<acc_t>(rstd);
  const double shift = (static_cast<double>(pivot) - result->mean) + delta;
  result->minus_shift_rstd = static_cast<acc_t>(-shift * rstd);
  return variance_floor(variance, params) >= Range<acc_t>::kTiny && largest <= Range<acc_t>::kHuge;
}

/// As a function of its own for LayerNorm, where a call is small beside the rest; RMSNorm of short
/// rows would take 30 % longer so.
template <class Statistics, class Load>
[[gnu::noinline]] bool row_statistics_called(const Load& row, int64_t cols,
                                             const NormParams& params,
                                             RowStatistics<acc_of<typename Load::stored_t>>* result,
                                             const Touch& touch) {
  return row_statistics_here<Statistics>(row, cols, params, result, touch);
}
template <class Statistics, class Load>
FN_INLINE bool row_statistics(const Load& row, int64_t cols, const NormParams& params,
                              RowStatistics<acc_of<typename Load::stored_t>>* result,
                              const Touch& touch = {}) {
  if constexpr (Statistics::kCentered) {
    return row_statistics_called<Statistics>(row, cols, params, result, touch);
  } else {
    return row_statistics_here<Statistics>(row, cols, params, result, touch);
  }
}

/// A row multiplied by 2^-exponent such that its statistics neither over- nor underflow, stored
/// like the parameters of T's rows.
template <class T>
struct ScaledRow {
  using acc_t = acc_of<T>;
  parameter_of<T>* x = nullptr;
  int exponent = 0;
  NormParams params;
  RowStatistics<acc_t> statistics;

  ScaledRow() = default;
  ScaledRow(const ScaledRow&) = delete;
  ScaledRow& operator=(const ScaledRow&) = delete;
  ~ScaledRow() { delete[] x; }

  acc_t mean() const { return static_cast<acc_t>(__builtin_ldexp(statistics.mean, exponent)); }
  acc_t rstd() const { return static_cast<acc_t>(__builtin_ldexp(statistics.rstd, -exponent)); }
};

/// False for a row with a NaN or an infinity, or of zeros with eps 0: nothing to be scaled.
template <class Statistics, class T>
[[gnu::noinline, gnu::cold]] bool scaled_row(const T* x, int64_t cols, const NormParams& params,
                                             ScaledRow<T>* row) {
  const double eps = __builtin_fabs(params.eps);
  double largest = params.eps_scales_as_x() ? eps : __builtin_sqrt(eps);
  for (int64_t i = 0; i < cols; ++i) {
    const double magnitude = __builtin_fabs(double{element(x + i)});
    if (!(magnitude <= Range<double>::kHuge * 1.05)) return false;
    if (magnitude > largest) largest = magnitude;
  }
  if (largest == 0) return false;
  row->exponent = __builtin_ilogb(largest) + 1;
  row->params = params;
  row->params.eps =
      __builtin_ldexp(params.eps, (params.eps_scales_as_x() ? -1 : -2) * row->exponent);
  constexpr int64_t kStep = kParameterStep<T>;
  row->x = new parameter_of<T>[static_cast<unsigned long>((cols + kStep - 1) / kStep * kStep)]();
  for (int64_t i = 0; i < cols; ++i) {
    const double scaled = __builtin_ldexp(element(x + i), -row->exponent);
    row->x[parameter_slot<T>(i)] = {static_cast<acc_of<T>>(scaled)};
  }
  row_statistics<Statistics>(DirectLoad<parameter_of<T>>{row->x}, cols, row->params,
                             &row->statistics);
  return true;
}
