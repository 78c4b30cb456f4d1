#pragma once

// Backward: two sweeps over a block of rows, the row sums, then the gradients. Where rows are few
// and long and there are threads for their columns, all rows' sums come first, and each thread then
// takes its columns of all rows: the same additions in the same order. Included by backward.cpp and
// add.cpp.

/// The rows of a call, and the sweeps over them. In: the input's elements; T: grad_output's.
template <class Statistics, bool kInput, bool kSums, class Rounding, class In, class T, class Store>
struct BackwardRows {
  using acc_t = acc_of<T>;
  template <int kRows>
  using Block = RowBlock<kRows, In, T, Store>;
  /// In fp32 the memory is busy enough as it is (16384 x 768: 5.5 ms, with this 6.2).
  static constexpr bool kNext = sizeof(In) == 2;
  const BackwardArgs& args;
  const Rounding rounding{};
  const bool past_caches = kInput && args.past_caches && Store::may_stream(args);

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
  template <int kRows, class X, class Next = NoNextRows>
  FN_INLINE void apply(const RowBlock<kRows, X, T, Store>& block, int64_t begin, int64_t end,
                       const ParameterSums<T>& sums, const Next& next = {}) const {
    backward_apply<Statistics, kInput, kSums, kRows>(block, weight(), begin, end, sums, rounding,
                                                     past_caches, next);
    if constexpr (!(kSums && Statistics::kCentered)) {
      if (sums.grad_bias != nullptr) bias_sums(block.grad_output, kRows, begin, end, sums);
    }
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
      if constexpr (kNext) {
        NextPairs<In, T, kBlockRows> next;
        if (args.ask_early && r + 2 * kBlockRows <= row_end) {
          for (int k = 0; k < kBlockRows; ++k) {
            next.first.data[k] = input(r + kBlockRows + k);
            next.second.data[k] = grad_output(r + kBlockRows + k);
          }
        }
        apply(block, 0, args.cols, sums, next);
      } else {
        apply(block, 0, args.cols, sums);
      }
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

/// LayerNorm's sweeps sum grad_bias beside grad_weight; where it is not wanted, here. Never read
/// before it is written, so memory that no sweep comes to is never touched.
template <class Statistics, class T>
struct Sums {
  ParameterSums<T> sums;
  parameter_of<T>* unwanted = nullptr;

  Sums(void* grad_weight, void* grad_bias, int64_t cols)
      : sums{static_cast<parameter_of<T>*>(grad_weight), static_cast<parameter_of<T>*>(grad_bias),
             true} {
    if (Statistics::kCentered && grad_weight != nullptr && grad_bias == nullptr) {
      const int64_t slots = (cols + kParameterStep<T> - 1) / kParameterStep<T> * kParameterStep<T>;
      sums.grad_bias = unwanted = new parameter_of<T>[static_cast<unsigned long>(slots)];
    }
  }
  Sums(const Sums&) = delete;
  Sums& operator=(const Sums&) = delete;
  ~Sums() { delete[] unwanted; }
};
