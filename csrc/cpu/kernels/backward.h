#pragma once

// Backward: two sweeps over a block of rows, the row sums, then grad_input while grad_weight and
// grad_bias gather the block. Where rows are few and long and there are threads for their columns,
// all rows' sums come first, and each thread then takes its columns of all rows: the same additions
// in the same order. Included by row_kernels.cpp.

/// What grad_input and grad_weight need to know of a row.
template <class acc_t>
struct BackwardRow {
  acc_t mean, rstd, minus_shift_rstd, mean_g, minus_projection;
  acc_t scale[2];  // of a scaled row: grad_input is multiplied by both
};

template <class Statistics, bool kInput, class In, class T>
[[gnu::noinline]] void backward_row(const In* x, const T* grad_output,
                                    const parameter_of<T>* weight, int64_t cols, acc_of<T> mean,
                                    acc_of<T> rstd, const NormParams& params, const Touch& touch,
                                    BackwardRow<acc_of<T>>* result) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  constexpr double kUnit = __is_same(acc_t, double) ? 0x1p-53 : 0x1p-24;
  acc_t minus_shift_rstd = 0, mean_g = 0, minus_projection = 0;
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
        sums, touch);
    const double shift = sums[0] / count;
    minus_shift_rstd = static_cast<acc_t>(-shift);
    mean_g = static_cast<acc_t>(sums[1] / count);
    minus_projection = static_cast<acc_t>(
        -projection_of(sums[2] - shift * sums[1], double{rstd}, kUnit, count, params));
  } else if constexpr (Statistics::kCentered) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          acc[0] = acc[0] + keep((load(x + i, part) - mean_v) * rstd_v, part);
        },
        sums);
    minus_shift_rstd = static_cast<acc_t>(-sums[0] / count);
  } else if constexpr (kInput) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          const V g = load(grad_output + i, part) * load(weight + i, part);
          acc[0] = mul_add(g, load(x + i, part) * rstd_v, acc[0]);
        },
        sums, touch);
    minus_projection =
        static_cast<acc_t>(-projection_of(sums[0], double{rstd}, kUnit, count, params));
  }
  // Number by number: a copy of the whole, read again as a vector, would wait for its parts.
  result->mean = mean;
  result->rstd = rstd;
  result->minus_shift_rstd = minus_shift_rstd;
  result->mean_g = mean_g;
  result->minus_projection = minus_projection;
  result->scale[0] = result->scale[1] = 1;
}

/// Where the gradient of a row goes: to grad_input.
template <class T>
struct GradInputStore {
  T* grad_input;

  static FN_INLINE GradInputStore of(const BackwardArgs& args, int64_t r) {
    return {static_cast<T*>(args.grad_input) + r * args.cols};
  }
  static FN_INLINE bool may_stream(const BackwardArgs& args) {
    return rows_may_stream(static_cast<T*>(args.grad_input), args.cols);
  }
  FN_INLINE Touch touch() const { return {reinterpret_cast<char*>(grad_input), sizeof(T)}; }
  template <class Columns>
  FN_INLINE void put(int64_t i, vector_of<T> d, Columns part, bool past_caches) const {
    write(grad_input + i, d, part, past_caches);
  }
};

/// grad_residual_out is added to it first (null: 0); then it goes to grad_input, and times alpha to
/// grad_residual (null: not wanted).
template <class T, class R>
struct SplitStore {
  const R* grad_residual_out;
  T* grad_input;
  R* grad_residual;
  acc_of<R> alpha;

  static FN_INLINE SplitStore of(const BackwardArgs& args, int64_t r) {
    const SplitArgs& split = *args.split;
    const auto* other = static_cast<const R*>(split.grad_residual_out.data);
    auto* dx = static_cast<T*>(args.grad_input);
    auto* dr = static_cast<R*>(split.grad_residual);
    return {other != nullptr ? other + split.grad_residual_out.offset(r) : nullptr,
            dx != nullptr ? dx + r * args.cols : nullptr,
            dr != nullptr ? dr + r * args.cols : nullptr, static_cast<acc_of<R>>(split.alpha)};
  }
  static FN_INLINE bool may_stream(const BackwardArgs& args) {
    return rows_may_stream(static_cast<T*>(args.grad_input), args.cols) &&
           rows_may_stream(static_cast<R*>(args.split->grad_residual), args.cols);
  }
  FN_INLINE Touch touch() const {
    if (grad_input == nullptr) return {reinterpret_cast<char*>(grad_residual), sizeof(R)};
    return {reinterpret_cast<char*>(grad_input), sizeof(T)};
  }
  template <class Columns>
  FN_INLINE void put(int64_t i, vector_of<T> d, Columns part, bool past_caches) const {
    if (grad_residual_out != nullptr) d = d + load(grad_residual_out + i, part);
    if (grad_input != nullptr) write(grad_input + i, d, part, past_caches);
    if (grad_residual != nullptr) {
      write(grad_residual + i, Broadcast<vector_of<R>>::of(alpha) * d, part, past_caches);
    }
  }
};

/// Some rows of a call: what the sweep over their columns needs.
template <int kRows, class In, class T, class Store>
struct RowBlock {
  const In* x[kRows];
  const T* grad_output[kRows];
  Store out[kRows];
  BackwardRow<acc_of<T>> rows[kRows];
};

/// The sums of grad_weight and grad_bias over rows, for columns from column 0 on; `first`: nothing
/// has been added yet, and what stands there is not read.
template <class T>
struct ParameterSums {
  parameter_of<T>*grad_weight, *grad_bias;
  bool first;
};

/// Whether there are sweeps that stream: where one sum is wanted without the other, it is not worth
/// a loop more.
template <class Statistics, bool kInput, bool kWeight, bool kBias>
constexpr bool kStreams = kInput && (kWeight == kBias || !Statistics::kCentered);

/// grad_input of kRows rows for columns [begin, end), begin a multiple of kLanes; the sums take the
/// rows in order, one addition each. past_caches: rows of grad_input lie on whole vectors and are
/// streamed.
template <class Statistics, bool kInput, bool kWeight, bool kBias, int kRows, class Rounding,
          class In, class T, class Store>
[[gnu::noinline]] void backward_apply(const RowBlock<kRows, In, T, Store>& block,
                                      const parameter_of<T>* weight, int64_t begin, int64_t end,
                                      const ParameterSums<T>& sums, bool past_caches,
                                      const NextPairs<In, T, kRows>& next) {
  using V = vector_of<T>;
  // Scaled rows come alone; an ordinary one that comes alone is multiplied by 1, which is exact.
  constexpr bool kScaled = kRows == 1;
  // Taken out of the block first: a store to grad_input might change what is reached by a
  // reference.
  const In* x[kRows];
  const T* grad_output[kRows];
  Store out[kRows];
  V mean[kRows], rstd[kRows], minus_shift_rstd[kRows], mean_g[kRows], minus_projection[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    x[r] = block.x[r];
    grad_output[r] = block.grad_output[r];
    out[r] = block.out[r];
    mean[r] = Broadcast<V>::of(block.rows[r].mean);
    rstd[r] = Broadcast<V>::of(block.rows[r].rstd);
    minus_shift_rstd[r] = Broadcast<V>::of(block.rows[r].minus_shift_rstd);
    mean_g[r] = Broadcast<V>::of(block.rows[r].mean_g);
    minus_projection[r] = Broadcast<V>::of(block.rows[r].minus_projection);
  }
  const V scale0 = Broadcast<V>::of(block.rows[0].scale[0]);
  const V scale1 = Broadcast<V>::of(block.rows[0].scale[1]);
  parameter_of<T>* const grad_weight = sums.grad_weight;
  parameter_of<T>* const grad_bias = sums.grad_bias;
  const bool first = sums.first;
  const auto columns = [&](auto past) FN_LAMBDA_INLINE {
    for_columns_with_next<T>(begin, end, next, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      V w{}, dw{}, db{};
      if constexpr (kInput) w = load(weight + i, part);
      if constexpr (kWeight) {
        if (!first) dw = load(grad_weight + i, part);
      }
      if constexpr (kBias) {
        if (!first) db = load(grad_bias + i, part);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V g = load(grad_output[r] + i, part);
        const V x_hat = normalize<Statistics, VectorMath>(load(x[r] + i, part), mean[r], rstd[r],
                                                          minus_shift_rstd[r]);
        if constexpr (kInput) {
          V d = grad_input<Statistics, VectorMath>(g * w, x_hat, mean_g[r], minus_projection[r],
                                                   rstd[r]);
          if constexpr (kScaled) d = d * scale0 * scale1;
          out[r].put(i, d, part, past.value);
        }
        if constexpr (kWeight) dw = mul_add(g, Rounding::round(x_hat), dw);
        if constexpr (kBias) db = db + g;
      }
      if constexpr (kWeight) store(grad_weight + i, dw, part);
      if constexpr (kBias) store(grad_bias + i, db, part);
    });
  };
  if constexpr (kStreams<Statistics, kInput, kWeight, kBias> && kRows > 1) {
    with_flag(past_caches, columns);
  } else {
    columns(No{});
  }
}

/// The rows of a call, and the sweeps over them. In: the input's elements; T: grad_output's.
template <class Statistics, bool kInput, bool kWeight, bool kBias, class Rounding, class In,
          class T, class Store>
struct BackwardRows {
  using acc_t = acc_of<T>;
  template <int kRows>
  using Block = RowBlock<kRows, In, T, Store>;
  const BackwardArgs& args;
  const bool past_caches =
      kStreams<Statistics, kInput, kWeight, kBias> && args.past_caches && Store::may_stream(args);

  const In* input(int64_t r) const {
    return static_cast<const In*>(args.input.data) + args.input.offset(r);
  }
  const T* grad_output(int64_t r) const {
    return static_cast<const T*>(args.grad_output.data) + args.grad_output.offset(r);
  }
  acc_t mean(int64_t r) const {
    return args.mean != nullptr ? static_cast<const acc_t*>(args.mean)[r] : acc_t(0);
  }
  acc_t rstd(int64_t r) const { return static_cast<const acc_t*>(args.rstd)[r]; }
  const parameter_of<T>* weight() const { return static_cast<const parameter_of<T>*>(args.weight); }
  /// Outside this range rstd may be subnormal or infinite, and x - mean may overflow.
  bool ordinary(int64_t r) const {
    return rstd(r) >= Range<acc_t>::kTiny && rstd(r) <= 1 / Range<acc_t>::kTiny;
  }

  FN_INLINE void terms(int64_t r, BackwardRow<acc_t>* row) const {
    Touch touch;
    if (kInput && args.ask_early && !past_caches) touch = Store::of(args, r).touch();
    backward_row<Statistics, kInput>(input(r), grad_output(r), weight(), args.cols, mean(r),
                                     rstd(r), args.params, touch, row);
  }

  template <int kRows>
  FN_INLINE void locate(int64_t r, Block<kRows>* block) const {
    for (int k = 0; k < kRows; ++k) {
      block->x[k] = input(r + k);
      block->grad_output[k] = grad_output(r + k);
      block->out[k] = Store::of(args, r + k);
    }
  }

  /// Columns [begin, end) of a block whose terms are known.
  template <int kRows, class X>
  FN_INLINE void apply(const RowBlock<kRows, X, T, Store>& block, int64_t begin, int64_t end,
                       const ParameterSums<T>& sums,
                       const NextPairs<X, T, kRows>& next = {}) const {
    backward_apply<Statistics, kInput, kWeight, kBias, kRows, Rounding>(block, weight(), begin, end,
                                                                        sums, past_caches, next);
  }

  void one_row(int64_t r, const ParameterSums<T>& sums) const {
    ScaledRow<In> scaled;
    if (ordinary(r) || !scaled_row<Statistics>(input(r), args.cols, args.params, &scaled)) {
      Block<1> block;
      locate(r, &block);
      terms(r, &block.rows[0]);
      return apply(block, 0, args.cols, sums);
    }
    RowBlock<1, parameter_of<In>, T, Store> block{
        {scaled.x}, {grad_output(r)}, {Store::of(args, r)}, {}};
    BackwardRow<acc_t>& row = block.rows[0];
    backward_row<Statistics, kInput>(block.x[0], block.grad_output[0], weight(), args.cols,
                                     scaled.statistics.mean, scaled.statistics.rstd, scaled.params,
                                     Touch{}, &row);
    const int half = scaled.exponent / 2;
    row.scale[0] = static_cast<acc_t>(__builtin_ldexp(1.0, -half));
    row.scale[1] = static_cast<acc_t>(__builtin_ldexp(1.0, half - scaled.exponent));
    apply(block, 0, args.cols, sums);
  }

  void all_columns(int64_t row_begin, int64_t row_end, ParameterSums<T> sums) const {
    int64_t r = row_begin;
    for (; r + kBlockRows <= row_end; r += kBlockRows) {
      bool all_ordinary = true;
      for (int k = 0; k < kBlockRows; ++k) all_ordinary = all_ordinary && ordinary(r + k);
      if (__builtin_expect(!all_ordinary, 0)) {
        for (int k = 0; k < kBlockRows; ++k) {
          one_row(r + k, sums);
          sums.first = false;
        }
        continue;
      }
      Block<kBlockRows> block;
      locate(r, &block);
      for (int k = 0; k < kBlockRows; ++k) terms(r + k, &block.rows[k]);
      // In fp32 the memory is busy enough as it is (16384 x 768: 5.5 ms, with this 6.2).
      NextPairs<In, T, kBlockRows> next;
      if (sizeof(In) == 2 && args.ask_early && r + 2 * kBlockRows <= row_end) {
        for (int k = 0; k < kBlockRows; ++k) {
          next.first.data[k] = input(r + kBlockRows + k);
          next.second.data[k] = grad_output(r + kBlockRows + k);
        }
      }
      apply(block, 0, args.cols, sums, next);
      sums.first = false;
    }
    for (; r < row_end; ++r) {
      one_row(r, sums);
      sums.first = false;
    }
    if (past_caches) end_streaming();
  }

  bool all_terms(int64_t row_begin, int64_t row_end, BackwardRow<acc_t>* rows) const {
    for (int64_t r = row_begin; r < row_end; ++r) {
      if (!ordinary(r)) return false;
      terms(r, &rows[r]);
    }
    return true;
  }

  void columns(const BackwardRow<acc_t>* rows, int64_t row_count, int64_t begin, int64_t end,
               ParameterSums<T> sums) const {
    const auto block_of = [&](auto block, int64_t r) {
      locate(r, &block);
      for (auto& row : block.rows) row = rows[r++];
      apply(block, begin, end, sums);
      sums.first = false;
    };
    int64_t r = 0;
    for (; r + kBlockRows <= row_count; r += kBlockRows) block_of(Block<kBlockRows>{}, r);
    for (; r < row_count; ++r) block_of(Block<1>{}, r);
    if (past_caches) end_streaming();
  }
};

/// Calls f with the BackwardRows of what is wanted.
template <class Statistics, class T, class F>
FN_INLINE void with_rows(const BackwardArgs& args, bool grad_weight, bool grad_bias, F f) {
  using Store = GradInputStore<T>;
  with_flag(args.grad_input != nullptr, [&](auto input) FN_LAMBDA_INLINE {
    with_flag(grad_weight, [&](auto weight) FN_LAMBDA_INLINE {
      if constexpr (Statistics::kCentered) {
        with_flag(grad_bias, [&](auto bias) FN_LAMBDA_INLINE {
          if constexpr (input.value || weight.value || bias.value) {
            f(BackwardRows<Statistics, input.value, weight.value, bias.value, RoundNone, T, T,
                           Store>{args});
          }
        });
      } else if constexpr (weight.value) {
        with_rounding<T>(args.round_x_hat, [&](auto rounding) FN_LAMBDA_INLINE {
          f(BackwardRows<Statistics, input.value, true, false, decltype(rounding), T, T, Store>{
              args});
        });
      } else if constexpr (input.value) {
        f(BackwardRows<Statistics, true, false, false, RoundNone, T, T, Store>{args});
      }
    });
  });
}

template <class T>
ParameterSums<T> parameter_sums(void* grad_weight, void* grad_bias) {
  return {static_cast<parameter_of<T>*>(grad_weight), static_cast<parameter_of<T>*>(grad_bias),
          true};
}

template <class Statistics, class T>
void backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
              void* grad_bias) {
  with_rows<Statistics, T>(args, grad_weight != nullptr, grad_bias != nullptr, [&](auto rows) {
    rows.all_columns(row_begin, row_end, parameter_sums<T>(grad_weight, grad_bias));
  });
}

/// Of the sum of input and residual; grad_weight and grad_bias both, or neither.
template <class Statistics, class T, class R>
void add_backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
                  void* grad_bias) {
  using Store = SplitStore<T, R>;
  const auto sums = parameter_sums<T>(grad_weight, grad_bias);
  with_flag(grad_weight != nullptr, [&](auto weight) FN_LAMBDA_INLINE {
    if constexpr (Statistics::kCentered || !weight.value) {
      BackwardRows<Statistics, true, weight.value, weight.value && Statistics::kCentered, RoundNone,
                   R, T, Store>{args}
          .all_columns(row_begin, row_end, sums);
    } else {
      with_rounding<R>(args.round_x_hat, [&](auto rounding) FN_LAMBDA_INLINE {
        BackwardRows<Statistics, true, true, false, decltype(rounding), R, T, Store>{args}
            .all_columns(row_begin, row_end, sums);
      });
    }
  });
}

template <class Statistics, class T>
bool backward_terms(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* terms) {
  bool ordinary = true;
  // What a row's terms are does not depend on which parameters' gradients are wanted.
  with_flag(args.grad_input != nullptr, [&](auto input) {
    const BackwardRows<Statistics, input.value, true, Statistics::kCentered, RoundNone, T, T,
                       GradInputStore<T>>
        rows{args};
    ordinary = rows.all_terms(row_begin, row_end, static_cast<BackwardRow<acc_of<T>>*>(terms));
  });
  return ordinary;
}

template <class Statistics, class T>
void backward_columns(const BackwardArgs& args, const void* terms, int64_t row_count,
                      int64_t col_begin, int64_t col_end, void* grad_weight, void* grad_bias) {
  with_rows<Statistics, T>(args, grad_weight != nullptr, grad_bias != nullptr, [&](auto rows) {
    rows.columns(static_cast<const BackwardRow<acc_of<T>>*>(terms), row_count, col_begin, col_end,
                 parameter_sums<T>(grad_weight, grad_bias));
  });
}
