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

/// The rows that come after those at hand, to be read into cache early; null: not. (8192 x 4096
/// bf16 forward: 6.3 ms without this and Touch, 4.9 with; 16384 x 768 bf16 backward: 3.8 and 2.2.)
template <class T, int kRows>
struct NextRows {
  const T* data[kRows] = {};

  FN_INLINE bool any() const { return data[0] != nullptr; }
  FN_INLINE void read(int64_t begin, int64_t end) const {
    constexpr int64_t kLine = kCacheLine / sizeof(T);
    for (int64_t i = begin; i < end; i += kLine) {
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(data[r] + i);
    }
  }
};

/// Rows of two tensors, both asked for early.
template <class T, class R, int kRows>
struct NextPairs {
  NextRows<T, kRows> first;
  NextRows<R, kRows> second;

  FN_INLINE bool any() const { return first.any(); }
  FN_INLINE void read(int64_t begin, int64_t end) const {
    first.read(begin, end);
    second.read(begin, end);
  }
};

/// for_columns, before each strip of which the same columns of the next rows are asked for. Asking
/// in the sweep's own loop, or only testing whether to ask, cost 8 % where everything is in cache.
template <class T, class Next, class Body>
FN_INLINE void for_columns_with_next(int64_t begin, int64_t end, const Next& next, Body body) {
  constexpr int64_t kStrip = 2 * kLanes<T>;
  int64_t i = begin;
  if (next.any()) {
    for (; i + kStrip <= end; i += kStrip) {
      next.read(i, i + kStrip);
      body(i, Full{});
      body(i + kLanes<T>, Full{});
    }
  }
  for_columns<T>(i, end, body);
}

/// The outputs of kRows rows.
template <class Statistics, int kRows, class In, class Out, class Next>
FN_INLINE void store_rows(const ForwardArgs& args, const In* const (&x)[kRows],
                          const RowStatistics<acc_of<Out>> (&rows)[kRows], Out* const (&y)[kRows],
                          const Next& next) {
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

/// Rows as they are given.
template <class T>
struct InputRows {
  using stored_t = T;
  const ForwardArgs& args;

  FN_INLINE DirectLoad<T> row(int64_t r) const {
    return {static_cast<const T*>(args.input.data) + args.input.offset(r)};
  }
  template <int kRows>
  FN_INLINE NextRows<T, kRows> next(int64_t r) const {
    NextRows<T, kRows> rows;
    for (int k = 0; k < kRows; ++k) rows.data[k] = row(r + k).stored;
    return rows;
  }
};

/// Rows of input and residual, to be added.
template <class T, class R>
struct SumRows {
  using stored_t = R;
  const ForwardArgs& args;

  FN_INLINE AddResidualLoad<T, R> row(int64_t r) const {
    const AddArgs& add = *args.add;
    return {static_cast<const T*>(args.input.data) + args.input.offset(r),
            static_cast<const R*>(add.residual.data) + add.residual.offset(r),
            static_cast<R*>(add.residual_out) + add.residual_out_rows.offset(r),
            static_cast<acc_of<R>>(add.alpha)};
  }
  template <int kRows>
  FN_INLINE NextPairs<T, R, kRows> next(int64_t r) const {
    NextPairs<T, R, kRows> rows;
    for (int k = 0; k < kRows; ++k) {
      rows.first.data[k] = row(r + k).input;
      rows.second.data[k] = row(r + k).residual;
    }
    return rows;
  }
};

/// Nothing is asked for early.
struct NoNextRows {
  FN_INLINE bool any() const { return false; }
  FN_INLINE void read(int64_t, int64_t) const {}
};

/// Whether weight and bias, read again for each row, would drive the rows out of the first cache.
template <class T>
FN_INLINE bool parameters_crowd(const ForwardArgs& args) {
  constexpr int64_t kHalfOfCache = 24 << 10;
  const int parameters = (args.weight != nullptr) + (args.bias != nullptr);
  return args.cols * parameters * static_cast<int64_t>(sizeof(acc_of<T>)) > kHalfOfCache;
}

/// In blocks of four rows; beyond the caches row by row, since memory likes few streams (4096 x
/// 1024 fp32: 0.58 ms, in blocks 1.00), unless the parameters are many (8192 x 4096 bf16 LayerNorm:
/// 5.2 ms, in blocks 4.6).
template <class Statistics, class T, class Rows>
void forward_rows(const ForwardArgs& args, const Rows& source, int64_t row_begin, int64_t row_end) {
  using R = typename Rows::stored_t;
  using acc_t = acc_of<T>;
  const auto output = [&](int64_t r)
                          FN_LAMBDA_INLINE { return static_cast<T*>(args.output) + r * args.cols; };
  const auto save = [&](int64_t r, acc_t mean, acc_t rstd) FN_LAMBDA_INLINE {
    if (args.mean != nullptr) static_cast<acc_t*>(args.mean)[r] = mean;
    if (args.rstd != nullptr) static_cast<acc_t*>(args.rstd)[r] = rstd;
  };
  const auto touch = [](T* y) FN_LAMBDA_INLINE {
    return Touch{reinterpret_cast<char*>(y), sizeof(T)};
  };
  const auto next = [&](auto count, int64_t r) FN_LAMBDA_INLINE {
    constexpr int kRows = count.value;
    decltype(source.template next<kRows>(r)) rows;
    if (r + 2 * kRows <= row_end) rows = source.template next<kRows>(r + kRows);
    return rows;
  };
  const auto one_row = [&](int64_t r, const auto& row, const Touch& touch, const auto& next) {
    const R* const x[1] = {row.stored};
    T* const y[1] = {output(r)};
    RowStatistics<acc_t> statistics[1];
    ScaledRow<R> scaled;
    if (__builtin_expect(
            row_statistics<Statistics>(row, args.cols, args.params, &statistics[0], touch), 1) ||
        !scaled_row<Statistics>(x[0], args.cols, args.params, &scaled)) {
      store_rows<Statistics, 1>(args, x, statistics, y, next);
      save(r, statistics[0].mean, statistics[0].rstd);
    } else {
      const parameter_of<R>* const scaled_x[1] = {scaled.x};
      const RowStatistics<acc_t> scaled_statistics[1] = {scaled.statistics};
      store_rows<Statistics, 1>(args, scaled_x, scaled_statistics, y, NoNextRows{});
      save(r, scaled.mean(), scaled.rstd());
    }
  };

  // `early`: Yes or No, whether the outputs and the next rows are asked for.
  const auto four_rows = [&](int64_t r, auto early) FN_LAMBDA_INLINE {
    const R* x[kBlockRows];
    T* y[kBlockRows];
    RowStatistics<acc_t> statistics[kBlockRows];
    bool ordinary = true;
    for (int k = 0; k < kBlockRows; ++k) {
      const auto row = source.row(r + k);
      x[k] = row.stored;
      y[k] = output(r + k);
      ordinary &= row_statistics<Statistics>(row, args.cols, args.params, &statistics[k],
                                             early.value ? touch(y[k]) : Touch{});
    }
    if (__builtin_expect(!ordinary, 0)) {
      for (int k = 0; k < kBlockRows; ++k) {
        one_row(r + k, source.row(r + k).after(), Touch{}, NoNextRows{});
      }
      return;
    }
    if constexpr (early.value) {
      store_rows<Statistics, kBlockRows>(args, x, statistics, y, next(Count<kBlockRows>{}, r));
    } else {
      store_rows<Statistics, kBlockRows>(args, x, statistics, y, NoNextRows{});
    }
    for (int k = 0; k < kBlockRows; ++k) save(r + k, statistics[k].mean, statistics[k].rstd);
  };

  int64_t r = row_begin;
  if (!args.ask_early) {
    for (; r + kBlockRows <= row_end; r += kBlockRows) four_rows(r, No{});
    for (; r < row_end; ++r) one_row(r, source.row(r), Touch{}, NoNextRows{});
    return;
  }
  if constexpr (Statistics::kCentered) {
    if (parameters_crowd<T>(args)) {
      for (; r + kBlockRows <= row_end; r += kBlockRows) four_rows(r, Yes{});
    }
  }
  for (; r < row_end; ++r) one_row(r, source.row(r), touch(output(r)), next(Count<1>{}, r));
}

template <class Statistics, class T>
void forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  forward_rows<Statistics, T>(args, InputRows<T>{args}, row_begin, row_end);
}

template <class Statistics, class T, class R>
void add_forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  forward_rows<Statistics, T>(args, SumRows<T, R>{args}, row_begin, row_end);
}
