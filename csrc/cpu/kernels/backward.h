#pragma once

// Backward: two sweeps over a block of rows, the row sums, then grad_input while grad_weight and
// grad_bias gather the block. Included by row_kernels.cpp.

/// What grad_input and grad_weight need to know of a row.
template <class acc_t>
struct BackwardRow {
  acc_t mean, rstd, minus_shift_rstd, mean_g, minus_projection;
  acc_t scale[2];  // of a scaled row: grad_input is multiplied by both
};

template <class Statistics, bool kInput, class In, class T>
FN_INLINE BackwardRow<acc_of<T>> backward_row(const In* x, const T* grad_output,
                                              const acc_of<T>* weight, int64_t cols, acc_of<T> mean,
                                              acc_of<T> rstd, const NormParams& params) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  constexpr double kUnit = __is_same(acc_t, double) ? 0x1p-53 : 0x1p-24;
  BackwardRow<acc_t> row{mean, rstd, 0, 0, 0, {1, 1}};
  const V mean_v = Broadcast<V>::of(mean), rstd_v = Broadcast<V>::of(rstd);
  const double count = static_cast<double>(cols);
  if constexpr (Statistics::kCentered && kInput) {
    double sums[3];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[3]) FN_LAMBDA_INLINE {
          const V t = keep((load(x + i, part) - mean_v) * rstd_v, part);
          const V g = load(grad_output + i, part) * load(weight + i, part);
          acc[0] = acc[0] + t;
          acc[1] = acc[1] + g;
          acc[2] = mul_add(g, t, acc[2]);
        },
        sums);
    const double shift = sums[0] / count;
    row.minus_shift_rstd = static_cast<acc_t>(-shift);
    row.mean_g = static_cast<acc_t>(sums[1] / count);
    row.minus_projection = static_cast<acc_t>(
        -projection_of(sums[2] - shift * sums[1], double{rstd}, kUnit, count, params));
  } else if constexpr (Statistics::kCentered) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          acc[0] = acc[0] + keep((load(x + i, part) - mean_v) * rstd_v, part);
        },
        sums);
    row.minus_shift_rstd = static_cast<acc_t>(-sums[0] / count);
  } else if constexpr (kInput) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          const V g = load(grad_output + i, part) * load(weight + i, part);
          acc[0] = mul_add(g, load(x + i, part) * rstd_v, acc[0]);
        },
        sums);
    row.minus_projection =
        static_cast<acc_t>(-projection_of(sums[0], double{rstd}, kUnit, count, params));
  }
  return row;
}

/// grad_input of kRows rows; grad_weight and grad_bias take the rows in order, one addition each.
template <class Statistics, bool kInput, bool kWeight, bool kBias, int kRows, class Rounding,
          class In, class T>
FN_INLINE void backward_apply(const In* const (&x)[kRows], const T* const (&grad_output)[kRows],
                              T* const (&dx)[kRows], const BackwardRow<acc_of<T>> (&rows)[kRows],
                              const acc_of<T>* weight, int64_t cols, acc_of<T>* grad_weight,
                              acc_of<T>* grad_bias) {
  using V = vector_of<T>;
  // Scaled rows come alone; an ordinary one that comes alone is multiplied by 1, which is exact.
  constexpr bool kScaled = kRows == 1;
  for_columns<T>(cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    V w{}, dw{}, db{};
    if constexpr (kInput) w = load(weight + i, part);
    if constexpr (kWeight) dw = load(grad_weight + i, part);
    if constexpr (kBias) db = load(grad_bias + i, part);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto& row = rows[r];
      const V g = load(grad_output[r] + i, part);
      const V x_hat = normalize<Statistics, VectorMath>(
          load(x[r] + i, part), Broadcast<V>::of(row.mean), Broadcast<V>::of(row.rstd),
          Broadcast<V>::of(row.minus_shift_rstd));
      if constexpr (kInput) {
        V d = grad_input<Statistics, VectorMath>(g * w, x_hat, Broadcast<V>::of(row.mean_g),
                                                 Broadcast<V>::of(row.minus_projection),
                                                 Broadcast<V>::of(row.rstd));
        if constexpr (kScaled) {
          d = d * Broadcast<V>::of(row.scale[0]) * Broadcast<V>::of(row.scale[1]);
        }
        store(dx[r] + i, d, part);
      }
      if constexpr (kWeight) dw = mul_add(g, Rounding::round(x_hat), dw);
      if constexpr (kBias) db = db + g;
    }
    if constexpr (kWeight) store(grad_weight + i, dw, part);
    if constexpr (kBias) store(grad_bias + i, db, part);
  });
}

// Four rows to a sweep: grad_weight and grad_bias are read and written once for the four.
constexpr int kBlockRows = 4;

template <class Statistics, bool kInput, bool kWeight, bool kBias, class Rounding, class T>
void backward_rows(const BackwardArgs& args, int64_t row_begin, int64_t row_end,
                   acc_of<T>* grad_weight, acc_of<T>* grad_bias) {
  using acc_t = acc_of<T>;
  const acc_t* weight = static_cast<const acc_t*>(args.weight);
  const auto input = [&](int64_t r) FN_LAMBDA_INLINE {
    return static_cast<const T*>(args.input.data) + args.input.offset(r);
  };
  const auto grad_output = [&](int64_t r) FN_LAMBDA_INLINE {
    return static_cast<const T*>(args.grad_output.data) + args.grad_output.offset(r);
  };
  const auto output = [&](int64_t r) FN_LAMBDA_INLINE {
    return static_cast<T*>(args.grad_input) + r * args.cols;
  };
  const auto saved_mean = [&](int64_t r) FN_LAMBDA_INLINE {
    return args.mean != nullptr ? static_cast<const acc_t*>(args.mean)[r] : acc_t(0);
  };
  const auto saved_rstd = [&](int64_t r)
                              FN_LAMBDA_INLINE { return static_cast<const acc_t*>(args.rstd)[r]; };
  // Outside this range rstd may be subnormal or infinite, and x - mean may overflow.
  const auto ordinary = [&](int64_t r) FN_LAMBDA_INLINE {
    const double rstd = saved_rstd(r);
    return rstd >= Range<acc_t>::kTiny && rstd <= 1 / Range<acc_t>::kTiny;
  };

  const auto one_row = [&](int64_t r) {
    const T* const g[1] = {grad_output(r)};
    T* const dx[1] = {output(r)};
    ScaledRow<acc_t> scaled;
    if (ordinary(r) || !scaled_row<Statistics>(input(r), args.cols, args.params, &scaled)) {
      const T* const x[1] = {input(r)};
      const BackwardRow<acc_t> rows[1] = {backward_row<Statistics, kInput>(
          x[0], g[0], weight, args.cols, saved_mean(r), saved_rstd(r), args.params)};
      backward_apply<Statistics, kInput, kWeight, kBias, 1, Rounding>(
          x, g, dx, rows, weight, args.cols, grad_weight, grad_bias);
      return;
    }
    const acc_t* const x[1] = {scaled.x};
    BackwardRow<acc_t> rows[1] = {
        backward_row<Statistics, kInput>(x[0], g[0], weight, args.cols, scaled.statistics.mean,
                                         scaled.statistics.rstd, scaled.params)};
    const int half = scaled.exponent / 2;
    rows[0].scale[0] = static_cast<acc_t>(__builtin_ldexp(1.0, -half));
    rows[0].scale[1] = static_cast<acc_t>(__builtin_ldexp(1.0, half - scaled.exponent));
    backward_apply<Statistics, kInput, kWeight, kBias, 1, Rounding>(
        x, g, dx, rows, weight, args.cols, grad_weight, grad_bias);
  };

  int64_t r = row_begin;
  for (; r + kBlockRows <= row_end; r += kBlockRows) {
    bool all_ordinary = true;
    for (int k = 0; k < kBlockRows; ++k) all_ordinary = all_ordinary && ordinary(r + k);
    if (__builtin_expect(!all_ordinary, 0)) {
      for (int k = 0; k < kBlockRows; ++k) one_row(r + k);
      continue;
    }
    const T* x[kBlockRows];
    const T* g[kBlockRows];
    T* dx[kBlockRows];
    BackwardRow<acc_t> rows[kBlockRows];
    for (int k = 0; k < kBlockRows; ++k) {
      x[k] = input(r + k);
      g[k] = grad_output(r + k);
      dx[k] = output(r + k);
      rows[k] = backward_row<Statistics, kInput>(x[k], g[k], weight, args.cols, saved_mean(r + k),
                                                 saved_rstd(r + k), args.params);
    }
    backward_apply<Statistics, kInput, kWeight, kBias, kBlockRows, Rounding>(
        x, g, dx, rows, weight, args.cols, grad_weight, grad_bias);
  }
  for (; r < row_end; ++r) one_row(r);
}

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};
/// Calls f with Yes or No: a flag of a call becomes one of the compiler's.
template <class F>
FN_INLINE void with_flag(bool flag, F f) {
  if (flag) {
    f(Yes{});
  } else {
    f(No{});
  }
}

template <class Statistics, class T>
void backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
              void* grad_bias) {
  auto* dw = static_cast<acc_of<T>*>(grad_weight);
  auto* db = static_cast<acc_of<T>*>(grad_bias);
  with_flag(args.grad_input != nullptr, [&](auto input) {
    with_flag(dw != nullptr, [&](auto weight) {
      if constexpr (Statistics::kCentered) {
        with_flag(db != nullptr, [&](auto bias) {
          if constexpr (input.value || weight.value || bias.value) {
            backward_rows<Statistics, input.value, weight.value, bias.value, RoundNone, T>(
                args, row_begin, row_end, dw, db);
          }
        });
      } else if constexpr (weight.value) {
        with_rounding<T>(args.round_x_hat, [&](auto rounding) {
          backward_rows<Statistics, input.value, true, false, decltype(rounding), T>(
              args, row_begin, row_end, dw, db);
        });
      } else if constexpr (input.value) {
        backward_rows<Statistics, true, false, false, RoundNone, T>(args, row_begin, row_end, dw,
                                                                    db);
      }
    });
  });
}
