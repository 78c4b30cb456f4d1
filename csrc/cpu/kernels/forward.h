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
};

/// Calls f with the rounding that `dtype` asks for; only what can occur with elements of type T.
template <class T, class F>
FN_INLINE void with_rounding(DType dtype, F f) {
  if constexpr (!__is_same(T, double)) {
    if constexpr (!__is_same(T, float16)) {
      if (dtype == DType::kBFloat16) return f(RoundTo<bfloat16>{});
    }
    if constexpr (!__is_same(T, bfloat16)) {
      if (dtype == DType::kFloat16) return f(RoundTo<float16>{});
    }
  }
  f(RoundNone{});
}

template <class Statistics, class In, class Out>
FN_INLINE void store_row(const ForwardArgs& args, const In* x,
                         const RowStatistics<acc_of<Out>>& row, Out* y) {
  using acc_t = acc_of<Out>;
  using V = vector_of<Out>;
  const V mean = Broadcast<V>::of(row.mean), rstd = Broadcast<V>::of(row.rstd);
  const V minus_shift_rstd = Broadcast<V>::of(row.minus_shift_rstd);
  const acc_t* weight = static_cast<const acc_t*>(args.weight);
  const acc_t* bias = static_cast<const acc_t*>(args.bias);
  const auto x_hat = [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    return normalize<Statistics, VectorMath>(load(x + i, part), mean, rstd, minus_shift_rstd);
  };
  if (bias != nullptr) {
    for_columns<Out>(args.cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      store(y + i, mul_add(x_hat(i, part), load(weight + i, part), load(bias + i, part)), part);
    });
  } else if (weight != nullptr) {
    with_rounding<Out>(args.round_x_hat, [&](auto rounding) FN_LAMBDA_INLINE {
      for_columns<Out>(args.cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
        store(y + i, rounding.round(x_hat(i, part)) * load(weight + i, part), part);
      });
    });
  } else {
    with_rounding<Out>(args.round_x_hat, [&](auto rounding) FN_LAMBDA_INLINE {
      for_columns<Out>(args.cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
        store(y + i, rounding.round(x_hat(i, part)), part);
      });
    });
  }
}

template <class Statistics, class T>
void forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  using acc_t = acc_of<T>;
  for (int64_t r = row_begin; r < row_end; ++r) {
    const T* x = static_cast<const T*>(args.input.data) + args.input.offset(r);
    T* y = static_cast<T*>(args.output) + r * args.cols;
    RowStatistics<acc_t> row;
    ScaledRow<acc_t> scaled;
    if (__builtin_expect(row_statistics<Statistics>(x, args.cols, args.params, &row), 1) ||
        !scaled_row<Statistics>(x, args.cols, args.params, &scaled)) {
      store_row<Statistics>(args, x, row, y);
    } else {
      store_row<Statistics>(args, scaled.x, scaled.statistics, y);
      row.mean = scaled.mean();
      row.rstd = scaled.rstd();
    }
    if (args.mean != nullptr) static_cast<acc_t*>(args.mean)[r] = row.mean;
    if (args.rstd != nullptr) static_cast<acc_t*>(args.rstd)[r] = row.rstd;
  }
}
