#pragma once

// Forward: two sweeps over a row, sums about a pivot, then the output. Included by forward.cpp and
// add.cpp.

/// The outputs of kRows rows, by one way of the affine step.
template <class Statistics, int kRows, class In, class Out, class Next, class Affine>
FN_INLINE void store_rows_by(const Affine& affine, int64_t cols, const In* const (&x)[kRows],
                             const RowStatistics<acc_of<Out>> (&rows)[kRows],
                             Out* const (&y)[kRows], const Next& next) {
  using V = vector_of<Out>;
  for_columns_with_next<Out>(0, cols, next, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    const auto gain = affine.at(i, part);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V x_hat = normalize<Statistics, VectorMath>(
          load(x[r] + i, part), Broadcast<V>::of(rows[r].mean), Broadcast<V>::of(rows[r].rstd),
          Broadcast<V>::of(rows[r].minus_shift_rstd));
      store(y[r] + i, gain.of(x_hat), part);
    }
  });
}

template <class T>
FN_INLINE AnyAffine<T> any_affine(const ForwardArgs& args) {
  return {static_cast<const parameter_of<T>*>(args.weight),
          static_cast<const parameter_of<T>*>(args.bias),
          {args.round_x_hat}};
}

template <class Statistics, int kRows, class In, class Out, class Next>
FN_INLINE void store_rows(const ForwardArgs& args, const In* const (&x)[kRows],
                          const RowStatistics<acc_of<Out>> (&rows)[kRows], Out* const (&y)[kRows],
                          const Next& next) {
  const auto* weight = static_cast<const parameter_of<Out>*>(args.weight);
  const auto* bias = static_cast<const parameter_of<Out>*>(args.bias);
  if (weight == nullptr || rounds<Out>(args.round_x_hat)) {
    store_rows_by<Statistics>(any_affine<Out>(args), args.cols, x, rows, y, next);
  } else if (bias != nullptr) {
    store_rows_by<Statistics>(WeightAndBias<Out>{weight, bias}, args.cols, x, rows, y, next);
  } else {
    store_rows_by<Statistics>(WeightOnly<Out>{weight}, args.cols, x, rows, y, next);
  }
}

/// A row that was scaled: rare, and so by the one way that does for all.
template <class Statistics, class R, class T>
[[gnu::noinline, gnu::cold]] void store_scaled_row(const ForwardArgs& args,
                                                   const ScaledRow<R>& scaled, T* output) {
  const parameter_of<R>* const x[1] = {scaled.x};
  const RowStatistics<acc_of<T>> statistics[1] = {scaled.statistics};
  T* const y[1] = {output};
  store_rows_by<Statistics>(any_affine<T>(args), args.cols, x, statistics, y, NoNextRows{});
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

/// Whether weight and bias, read again for each row, would drive the rows out of the first cache.
template <class T>
FN_INLINE bool parameters_crowd(const ForwardArgs& args) {
  const int parameters = (args.weight != nullptr) + (args.bias != nullptr);
  return args.cols * parameters * static_cast<int64_t>(sizeof(acc_of<T>)) > args.crowding_bytes;
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
  using NextRow = decltype(next(Count<1>{}, 0));
  const auto one_row = [&](int64_t r, const auto& row, const Touch& touch, const NextRow& next)
      __attribute__((noinline)) {
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
      store_scaled_row<Statistics>(args, scaled, y[0]);
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
        one_row(r + k, source.row(r + k).after(), Touch{}, NextRow{});
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
    for (; r < row_end; ++r) one_row(r, source.row(r), Touch{}, NextRow{});
    return;
  }
  if constexpr (Statistics::kCentered) {
    if (parameters_crowd<T>(args)) {
      for (; r + kBlockRows <= row_end; r += kBlockRows) four_rows(r, Yes{});
    }
  }
  for (; r < row_end; ++r) one_row(r, source.row(r), touch(output(r)), next(Count<1>{}, r));
}
