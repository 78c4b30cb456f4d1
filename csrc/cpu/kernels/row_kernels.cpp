// The CPU kernels: one source, compiled once for each instruction set (FUSEDNORM_ISA names it).
//
// Forward makes two sweeps over a row: sums about a pivot, then the output. Backward makes two
// sweeps over a block of rows: the row sums, then grad_input while grad_weight and grad_bias gather
// the block. Which accumulator an element goes to depends on its column and the row's length alone.
//
// Nothing inline from the standard library may be emitted here: the linker would be free to use the
// AVX-512 copy of it in the rest of the program (tests/check_symbols.sh looks for such symbols).
#include "row_kernels.h"

#if defined(FUSEDNORM_AVX512) || defined(FUSEDNORM_AVX2)
#include <immintrin.h>
#endif

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

#include "simd.h"

// ---- Walking over the columns of a row ---------------------------------------------------------

struct Full {};
struct Part {
  int count;
};

template <class T>
FN_INLINE vector_of<T> load(const T* p, Full) {
  return load(p);
}
template <class T>
FN_INLINE vector_of<T> load(const T* p, Part part) {
  return load(p, part.count);
}
template <class T>
FN_INLINE void store(T* p, vector_of<T> a, Full) {
  store(p, a);
}
template <class T>
FN_INLINE void store(T* p, vector_of<T> a, Part part) {
  store(p, a, part.count);
}

template <class V>
FN_INLINE V keep(V a, Full) {
  return a;
}
/// Zero in the lanes beyond the part.
template <class V>
FN_INLINE V keep(V a, Part part) {
  V kept{};
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0]));
  for (int i = 0; i < kCount; ++i) kept[i] = i < part.count ? a[i] : 0;
  return kept;
}
#if defined(FUSEDNORM_AVX512)
template <>
FN_INLINE f32v keep(f32v a, Part part) {
  return (f32v)_mm512_maskz_mov_ps(first(part.count), (__m512)a);
}
template <>
FN_INLINE f64v keep(f64v a, Part part) {
  return (f64v)_mm512_maskz_mov_pd(static_cast<__mmask8>(first(part.count)), (__m512d)a);
}
#endif

template <class T, class Body>
FN_INLINE void for_columns(int64_t cols, Body body) {
  int64_t i = 0;
  for (; i + kLanes<T> <= cols; i += kLanes<T>) body(i, Full{});
  if (i < cols) body(i, Part{static_cast<int>(cols - i)});
}

// A block is 16 additions to each of 4 accumulators (1024 fp32 columns with AVX-512), and blocks
// are merged pairwise: the rounding of a sum is that of about 20 + log2(blocks) additions at any
// length.
constexpr int kUnroll = 4;
constexpr int kBlockVectors = 16 * kUnroll;

/// kSums sums over columns [begin, end); body(column, part, accumulators) adds one vector to each.
template <class T, int kSums, class Body>
FN_INLINE void block_sums(int64_t begin, int64_t end, Body body, vector_of<T> (&total)[kSums]) {
  vector_of<T> acc[kUnroll][kSums] = {};
  int64_t i = begin;
  for (; i + kUnroll * kLanes<T> <= end; i += kUnroll * kLanes<T>) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) body(i + u * kLanes<T>, Full{}, acc[u]);
  }
  for (; i + kLanes<T> <= end; i += kLanes<T>) body(i, Full{}, acc[0]);
  if (i < end) body(i, Part{static_cast<int>(end - i)}, acc[0]);
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k) total[k] = (acc[0][k] + acc[1][k]) + (acc[2][k] + acc[3][k]);
}

template <class T, int kSums, class Body>
FN_INLINE void row_sums(int64_t cols, Body body, double (&sums)[kSums]) {
  constexpr int64_t kBlock = kBlockVectors * kLanes<T>;
  vector_of<T> total[kSums];
  if (cols <= kBlock) {
    block_sums<T>(0, cols, body, total);
  } else {
    PairwiseSum<vector_of<T>> blocks[kSums];
    for (int64_t begin = 0; begin < cols; begin += kBlock) {
      block_sums<T>(begin, begin + kBlock < cols ? begin + kBlock : cols, body, total);
      for (int k = 0; k < kSums; ++k) blocks[k].add(total[k]);
    }
    for (int k = 0; k < kSums; ++k) total[k] = blocks[k].total();
  }
  for (int k = 0; k < kSums; ++k) sums[k] = sum_lanes(total[k]);
}

// ---- Statistics of one row
// -----------------------------------------------------------------------

template <class acc_t>
struct RowStatistics {
  acc_t mean;  // 0 for RMSNorm
  acc_t rstd;
  acc_t minus_shift_rstd;  // see row_norm.h
};

// Below kTiny the squares' own underflow would show in the sum; above kHuge a sum has overflowed.
template <class acc_t>
struct Range {
  static constexpr double kTiny = 1e-30, kHuge = 3.4e38;
};
template <>
struct Range<double> {
  static constexpr double kTiny = 1e-280, kHuge = 1.7e308;
};

/// False where the squares over- or underflowed (or the row is not finite): see scaled_row.
///
/// LayerNorm takes one sweep about a pivot, the mean of the row's first vector. Where the mean
/// turns out more than a standard deviation from the pivot, cancellation would cost digits, and a
/// second sweep is made about the mean found.
template <class Statistics, class T>
FN_INLINE bool row_statistics(const T* x, int64_t cols, const NormParams& params,
                              RowStatistics<acc_of<T>>* result) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const double count = static_cast<double>(cols);
  double mean = 0, squares = 0, largest = 0;
  acc_t pivot = 0;
  double delta = 0;
  if constexpr (Statistics::kCentered) {
    pivot = cols >= kLanes<T> ? sum_lanes(load(x)) / static_cast<acc_t>(kLanes<T>)
                              : sum_lanes(load(x, 1));
    for (int sweep = 0; sweep < 3; ++sweep) {
      const V pivot_v = Broadcast<V>::of(pivot);
      double sums[2];
      row_sums<T>(
          cols,
          [&](int64_t i, auto part, V(&acc)[2]) FN_LAMBDA_INLINE {
            const V d = keep(load(x + i, part) - pivot_v, part);
            acc[0] = acc[0] + d;
            acc[1] = mul_add(d, d, acc[1]);
          },
          sums);
      delta = sums[0] / count;
      largest = sums[1];
      squares = sums[1] - sums[0] * delta;
      if (squares < 0) squares = 0;
      mean = pivot + delta;
      if (delta * sums[0] <= squares) break;
      if (sweep < 2) pivot = static_cast<acc_t>(mean);
    }
  } else {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          const V d = load(x + i, part);
          acc[0] = mul_add(d, d, acc[0]);
        },
        sums);
    squares = largest = sums[0];
  }
  const double variance = variance_of(squares, count, params);
  const double rstd = reciprocal_deviation(variance, params);
  result->mean = static_cast<acc_t>(mean);
  result->rstd = static_cast<acc_t>(rstd);
  const double shift = (static_cast<double>(pivot) - result->mean) + delta;
  result->minus_shift_rstd = static_cast<acc_t>(-shift * rstd);
  const double floor = variance + (params.eps_outside ? params.eps * params.eps : params.eps);
  return floor >= Range<acc_t>::kTiny && largest <= Range<acc_t>::kHuge;
}

/// A row multiplied by 2^-exponent such that its statistics neither over- nor underflow.
template <class acc_t>
struct ScaledRow {
  acc_t* x = nullptr;
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

template <class T>
double element(const T* x) {
  return sum_lanes(load(x, 1));
}

/// False for a row with a NaN or an infinity, or of zeros with eps 0: nothing to be scaled.
template <class Statistics, class T>
[[gnu::noinline, gnu::cold]] bool scaled_row(const T* x, int64_t cols, const NormParams& params,
                                             ScaledRow<acc_of<T>>* row) {
  double largest =
      params.eps_outside ? __builtin_fabs(params.eps) : __builtin_sqrt(__builtin_fabs(params.eps));
  for (int64_t i = 0; i < cols; ++i) {
    const double magnitude = __builtin_fabs(element(x + i));
    if (!(magnitude <= Range<double>::kHuge * 1.05)) return false;
    if (magnitude > largest) largest = magnitude;
  }
  if (largest == 0) return false;
  row->exponent = __builtin_ilogb(largest) + 1;
  row->params = params;
  row->params.eps = __builtin_ldexp(params.eps, (params.eps_outside ? -1 : -2) * row->exponent);
  row->x = new acc_of<T>[static_cast<unsigned long>(cols)];
  for (int64_t i = 0; i < cols; ++i) {
    row->x[i] = static_cast<acc_of<T>>(__builtin_ldexp(element(x + i), -row->exponent));
  }
  row_statistics<Statistics>(row->x, cols, row->params, &row->statistics);
  return true;
}

// ---- Forward
// ---------------------------------------------------------------------------------------

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

// ---- Backward
// --------------------------------------------------------------------------------------

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
    row.minus_projection =
        static_cast<acc_t>(-projection_of(sums[2] - shift * sums[1], rstd, count, params));
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
    row.minus_projection = static_cast<acc_t>(-projection_of(sums[0], rstd, count, params));
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
  constexpr bool kScaled = !__is_same(In, T) || kRows == 1;
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

template <class Statistics, class T>
void backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
              void* grad_bias) {
  auto* dw = static_cast<acc_of<T>*>(grad_weight);
  auto* db = static_cast<acc_of<T>*>(grad_bias);
  if constexpr (Statistics::kCentered) {
    using N = RoundNone;
    if (args.grad_input != nullptr) {
      if (dw && db)
        backward_rows<Statistics, true, true, true, N, T>(args, row_begin, row_end, dw, db);
      else if (dw)
        backward_rows<Statistics, true, true, false, N, T>(args, row_begin, row_end, dw, db);
      else if (db)
        backward_rows<Statistics, true, false, true, N, T>(args, row_begin, row_end, dw, db);
      else
        backward_rows<Statistics, true, false, false, N, T>(args, row_begin, row_end, dw, db);
    } else {
      if (dw && db)
        backward_rows<Statistics, false, true, true, N, T>(args, row_begin, row_end, dw, db);
      else if (dw)
        backward_rows<Statistics, false, true, false, N, T>(args, row_begin, row_end, dw, db);
      else
        backward_rows<Statistics, false, false, true, N, T>(args, row_begin, row_end, dw, db);
    }
  } else {
    with_rounding<T>(args.round_x_hat, [&](auto rounding) {
      using R = decltype(rounding);
      if (args.grad_input == nullptr) {
        backward_rows<Statistics, false, true, false, R, T>(args, row_begin, row_end, dw, db);
      } else if (dw) {
        backward_rows<Statistics, true, true, false, R, T>(args, row_begin, row_end, dw, db);
      } else {
        backward_rows<Statistics, true, false, false, RoundNone, T>(args, row_begin, row_end, dw,
                                                                    db);
      }
    });
  }
}

// ---- Weights in the accumulation type; the last reduction
// ---------------------------------------------

template <class acc_t, class T>
void convert_from(const void* in, double offset, void* out, int64_t count) {
  const T* from = static_cast<const T*>(in);
  acc_t* to = static_cast<acc_t*>(out);
  if constexpr (__is_same(acc_t, acc_of<T>)) {
    const auto offset_v = Broadcast<vector_of<T>>::of(static_cast<acc_t>(offset));
    for_columns<T>(count, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      store(to + i, load(from + i, part) + offset_v, part);
    });
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<acc_t>(element(from + i) + offset);
  }
}

template <class acc_t>
void convert(DType from, const void* in, double offset, void* out, int64_t count) {
  switch (from) {
    case DType::kFloat64:
      return convert_from<acc_t, double>(in, offset, out, count);
    case DType::kFloat32:
      return convert_from<acc_t, float>(in, offset, out, count);
    case DType::kBFloat16:
      return convert_from<acc_t, bfloat16>(in, offset, out, count);
    case DType::kFloat16:
      return convert_from<acc_t, float16>(in, offset, out, count);
  }
}

FN_INLINE void put(double value, double* out) { *out = value; }
FN_INLINE void put(double value, float* out) { *out = static_cast<float>(value); }
/// To 16 bits by way of fp32 rounded to odd, so that rounding twice gives what rounding once does.
template <class T>
FN_INLINE void put(double value, T* out) {
  float nearest = static_cast<float>(value);
  uint32_t bits = float_to_bits(nearest);
  if (static_cast<double>(nearest) != value && nearest - nearest == 0 && (bits & 1u) == 0) {
    const bool away = __builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(value);
    bits = away ? bits - 1 : bits + 1;
  }
  from_float(bits_to_float(bits), out);
}

template <class acc_t, class T>
void reduce_to(const void* partials, int64_t count, int64_t stride, void* out, int64_t col_begin,
               int64_t col_end) {
  constexpr int64_t kStrip = 64;  // columns summed together: 512 bytes of doubles
  const acc_t* from = static_cast<const acc_t*>(partials);
  for (int64_t c = col_begin; c < col_end; c += kStrip) {
    const int64_t width = col_end - c < kStrip ? col_end - c : kStrip;
    double sums[kStrip] = {};
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t k = 0; k < width; ++k) sums[k] += from[p * stride + c + k];
    }
    for (int64_t k = 0; k < width; ++k) put(sums[k], static_cast<T*>(out) + c + k);
  }
}

template <class acc_t>
void reduce(const void* partials, int64_t count, int64_t stride, DType to, void* out,
            int64_t col_begin, int64_t col_end) {
  switch (to) {
    case DType::kFloat64:
      return reduce_to<acc_t, double>(partials, count, stride, out, col_begin, col_end);
    case DType::kFloat32:
      return reduce_to<acc_t, float>(partials, count, stride, out, col_begin, col_end);
    case DType::kBFloat16:
      return reduce_to<acc_t, bfloat16>(partials, count, stride, out, col_begin, col_end);
    case DType::kFloat16:
      return reduce_to<acc_t, float16>(partials, count, stride, out, col_begin, col_end);
  }
}

}  // namespace

#define FN_STRING_(x) #x
#define FN_STRING(x) FN_STRING_(x)
#define FN_EACH_DTYPE(kernel, Statistics)                                                \
  {                                                                                      \
    kernel<Statistics, double>, kernel<Statistics, float>, kernel<Statistics, bfloat16>, \
        kernel<Statistics, float16>                                                      \
  }

// For each instruction set: 8 forward kernels, and 4 x (7 LayerNorm + 3 to 7 RMSNorm) backward
// ones.
extern const KernelTable kTable;
const KernelTable kTable = {
    FN_STRING(FUSEDNORM_ISA),
    FN_EACH_DTYPE(forward, LayerNormStatistics),
    FN_EACH_DTYPE(forward, RmsNormStatistics),
    FN_EACH_DTYPE(backward, LayerNormStatistics),
    FN_EACH_DTYPE(backward, RmsNormStatistics),
    {convert<double>, convert<float>},
    {reduce<double>, reduce<float>},
};

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
