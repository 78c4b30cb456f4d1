#pragma once

// Forward: two sweeps over a row, sums about a pivot, then the output. Included by row_kernels.cpp.

/// How x_hat is rounded before the product with the weight: not at all, or to a 16-bit type.
struct RoundNone {
  template <class V>
  static FN_INLINE V round(V a) {
    return a;
  }
};
template <class T>
struct RoundTo {
  static FN_INLINE f32v round(f32v a) { return round_to<T>(a); }
  static FN_INLINE f32x2 round(f32x2 a) { return round_to_bfloat16(a); }
};

/// Calls f with the rounding that `dtype` asks for; only what can occur with elements of type T.
template <class T, class F>
FN_INLINE void with_rounding(DType dtype, F f) {
  if constexpr (!__is_same(T, double)) {
    if constexpr (!__is_same(T, float16)) {
      if (dtype == DType::kBFloat16) return f(RoundTo<bfloat16>{});
    }
    if constexpr (!__is_same(T, bfloat16) && !__is_same(T, paired_bfloat16)) {
      if (dtype == DType::kFloat16) return f(RoundTo<float16>{});
    }
  }
  f(RoundNone{});
}

// The affine step, read once per column for all rows of a block.

template <class T>
struct WeightAndBias {
  const parameter_of<T>*weight, *bias;
  struct Gain {
    vector_of<T> weight, bias;
    FN_INLINE vector_of<T> of(vector_of<T> x_hat) const { return mul_add(x_hat, weight, bias); }
  };
  template <class Columns>
  FN_INLINE Gain at(int64_t i, Columns part) const {
    return {load(weight + i, part), load(bias + i, part)};
  }
};
template <class T, class Rounding>
struct WeightOnly {
  const parameter_of<T>* weight;
  struct Gain {
    vector_of<T> weight;
    FN_INLINE vector_of<T> of(vector_of<T> x_hat) const { return Rounding::round(x_hat) * weight; }
  };
  template <class Columns>
  FN_INLINE Gain at(int64_t i, Columns part) const {
    return {load(weight + i, part)};
  }
};
template <class T, class Rounding>
struct NoWeight {
  FN_INLINE vector_of<T> of(vector_of<T> x_hat) const { return Rounding::round(x_hat); }
  template <class Columns>
  FN_INLINE NoWeight at(int64_t, Columns) const {
    return {};
  }
};

// Four rows to a sweep: weight and bias are read once for the four, and what one row waits for (its
// sums, the root) is hidden behind the others (256 x 768 bf16: 5.9 us a MB, 4.8 so).
constexpr int kBlockRows = 4;

/// The rows that come after those at hand, to be read into cache early; null: not.
template <class T>
struct NextRows {
  const T* data[kBlockRows] = {};

  bool any() const { return data[0] != nullptr; }
  void read(int64_t begin, int64_t end) const {
    if (!any()) return;
    constexpr int64_t kLine = kCacheLine / sizeof(T);
    for (int64_t i = begin; i < end; i += kLine) {
      for (int r = 0; r < kBlockRows; ++r) __builtin_prefetch(data[r] + i);
    }
  }
};

/// for_columns, before each strip of which the same columns of the next rows are asked for. Asking
/// in the sweep's own loop, or only testing whether to ask, cost 8 % where everything is in cache.
template <class T, class Next, class Body>
FN_INLINE void for_columns_with_next(int64_t begin, int64_t end, const Next& next, Body body) {
  constexpr int64_t kStrip = 256;
  const int64_t strip = next.any() ? kStrip : end - begin;
  for (int64_t i = begin; i < end; i += strip) {
    const int64_t to = i + strip < end ? i + strip : end;
    next.read(i, to);
    for_columns<T>(i, to, body);
  }
}

/// The outputs of kRows rows.
template <class Statistics, int kRows, class In, class Out>
FN_INLINE void store_rows(const ForwardArgs& args, const In* const (&x)[kRows],
                          const RowStatistics<acc_of<Out>> (&rows)[kRows], Out* const (&y)[kRows],
                          const NextRows<In>& next) {
  using V = vector_of<Out>;
  const auto* weight = static_cast<const parameter_of<Out>*>(args.weight);
  const auto* bias = static_cast<const parameter_of<Out>*>(args.bias);
  const auto sweep = [&](auto affine) FN_LAMBDA_INLINE {
    for_columns_with_next<Out>(0, args.cols, next, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      const auto gain = affine.at(i, part);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V x_hat = normalize<Statistics, VectorMath>(
            load(x[r] + i, part), Broadcast<V>::of(rows[r].mean), Broadcast<V>::of(rows[r].rstd),
            Broadcast<V>::of(rows[r].minus_shift_rstd));
        store(y[r] + i, gain.of(x_hat), part);
      }
    });
  };
  if (bias != nullptr) {
    sweep(WeightAndBias<Out>{weight, bias});
  } else {
    with_rounding<Out>(args.round_x_hat, [&](auto rounding) FN_LAMBDA_INLINE {
      if (weight != nullptr) {
        sweep(WeightOnly<Out, decltype(rounding)>{weight});
      } else {
        sweep(NoWeight<Out, decltype(rounding)>{});
      }
    });
  }
}

template <class Statistics, class T>
void forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  using acc_t = acc_of<T>;
  const auto input = [&](int64_t r) FN_LAMBDA_INLINE {
    return static_cast<const T*>(args.input.data) + args.input.offset(r);
  };
  const auto output = [&](int64_t r)
                          FN_LAMBDA_INLINE { return static_cast<T*>(args.output) + r * args.cols; };
  const auto save = [&](int64_t r, acc_t mean, acc_t rstd) FN_LAMBDA_INLINE {
    if (args.mean != nullptr) static_cast<acc_t*>(args.mean)[r] = mean;
    if (args.rstd != nullptr) static_cast<acc_t*>(args.rstd)[r] = rstd;
  };

  const auto one_row = [&](int64_t r) {
    const T* const x[1] = {input(r)};
    T* const y[1] = {output(r)};
    RowStatistics<acc_t> row[1];
    ScaledRow<T> scaled;
    if (__builtin_expect(row_statistics<Statistics>(x[0], args.cols, args.params, &row[0]), 1) ||
        !scaled_row<Statistics>(x[0], args.cols, args.params, &scaled)) {
      store_rows<Statistics, 1>(args, x, row, y, {});
      save(r, row[0].mean, row[0].rstd);
    } else {
      const parameter_of<T>* const scaled_x[1] = {scaled.x};
      const RowStatistics<acc_t> scaled_statistics[1] = {scaled.statistics};
      store_rows<Statistics, 1>(args, scaled_x, scaled_statistics, y, {});
      save(r, scaled.mean(), scaled.rstd());
    }
  };

  int64_t r = row_begin;
  for (; r + kBlockRows <= row_end; r += kBlockRows) {
    const T* x[kBlockRows];
    T* y[kBlockRows];
    RowStatistics<acc_t> rows[kBlockRows];
    bool ordinary = true;
    for (int k = 0; k < kBlockRows; ++k) {
      x[k] = input(r + k);
      y[k] = output(r + k);
      Touch touch;
      if (args.beyond_cache) touch = {reinterpret_cast<char*>(y[k]), sizeof(T)};
      ordinary &= row_statistics<Statistics>(x[k], args.cols, args.params, &rows[k], touch);
    }
    if (__builtin_expect(!ordinary, 0)) {
      for (int k = 0; k < kBlockRows; ++k) one_row(r + k);
      continue;
    }
    NextRows<T> next;
    if (args.beyond_cache && r + 2 * kBlockRows <= row_end) {
      for (int k = 0; k < kBlockRows; ++k) next.data[k] = input(r + kBlockRows + k);
    }
    store_rows<Statistics, kBlockRows>(args, x, rows, y, next);
    for (int k = 0; k < kBlockRows; ++k) save(r + k, rows[k].mean, rows[k].rstd);
  }
  for (; r < row_end; ++r) one_row(r);
}
