#pragma once

// Walking over the columns of a row: whole vectors from column 0, then one part.
// Included by kernels.h.

struct Full {};
struct Part {
  int count;
};

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

/// A number that the compiler knows.
template <int kValue>
struct Count {
  static constexpr int value = kValue;
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
// Zero in the lanes beyond the part.
#if defined(FUSEDNORM_AVX512)
FN_INLINE f32v keep(f32v a, Part part) {
  return (f32v)_mm512_maskz_mov_ps(first(part.count), (__m512)a);
}
FN_INLINE f64v keep(f64v a, Part part) {
  return (f64v)_mm512_maskz_mov_pd(static_cast<__mmask8>(first(part.count)), (__m512d)a);
}
#elif defined(FUSEDNORM_AVX2)
FN_INLINE f32v keep(f32v a, Part part) {
  return _mm256_and_ps(a, _mm256_castsi256_ps(first_words(part.count)));
}
FN_INLINE f64v keep(f64v a, Part part) {
  return _mm256_and_pd(a, _mm256_castsi256_pd(first_quads(part.count)));
}
#else
template <class V>
FN_INLINE V keep(V a, Part part) {
  V kept{};
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0]));
  for (int i = 0; i < kCount; ++i) kept[i] = i < part.count ? a[i] : 0;
  return kept;
}
#endif
FN_INLINE f32x2 keep(f32x2 a, Part part) {
  return {keep(a.even, Part{(part.count + 1) / 2}), keep(a.odd, Part{part.count / 2})};
}

template <class T, class Body>
FN_INLINE void for_columns(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kLanes<T> <= end; i += kLanes<T>) body(i, Full{});
  if (i < end) body(i, Part{static_cast<int>(end - i)});
}
template <class T, class Body>
FN_INLINE void for_columns(int64_t cols, Body body) {
  for_columns<T>(0, cols, body);
}

/// The sum of vectors, merged pairwise: the error grows with the logarithm of their number.
template <class V>
class PairwiseSum {
 public:
  FN_INLINE void add(V value) {
    for (uint64_t c = count_++; c & 1; c >>= 1) value = levels_[--top_] + value;
    levels_[top_++] = value;
  }
  FN_INLINE V total() const {
    V sum = levels_[top_ - 1];
    for (int i = top_ - 2; i >= 0; --i) sum = levels_[i] + sum;
    return sum;
  }

 private:
  V levels_[48];
  int top_ = 0;
  uint64_t count_ = 0;
};

constexpr int64_t kCacheLine = 64;  // bytes

/// Memory that is about to be written, asked for while something else is read; null: nothing. Only
/// where the caches do not hold it, else it costs (32 x 65536 bf16 forward: 2.0 of a copy, 2.9 so).
struct Touch {
  char* data = nullptr;
  int element_size = 0;

  FN_INLINE bool any() const { return data != nullptr; }
  FN_INLINE void columns(int64_t begin, int64_t count) const {
    char* const from = data + begin * element_size;
    for (int64_t i = 0; i < count * element_size; i += kCacheLine) __builtin_prefetch(from + i, 1);
  }
};

// A block is 16 additions to each of 4 accumulators of one vector, or 2 of a pair (1024 fp32
// columns with AVX-512), and blocks are merged pairwise: the rounding of a sum is that of about 20
// + log2(blocks) additions at any length.
template <class T>
constexpr int kUnroll = __is_same(vector_of<T>, f32x2) ? 2 : 4;
constexpr int kBlockSteps = 16;

/// kSums sums over columns [begin, end); body(column, part, accumulators) adds one vector to each.
template <class T, int kSums, class Body>
FN_INLINE void block_sums(int64_t begin, int64_t end, Body body, const Touch& touch,
                          vector_of<T> (&total)[kSums]) {
  constexpr int64_t kStep = kUnroll<T> * kLanes<T>;
  vector_of<T> acc[kUnroll<T>][kSums] = {};
  int64_t i = begin;
  const auto steps = [&](auto before) FN_LAMBDA_INLINE {
    for (; i + kStep <= end; i += kStep) {
      before(i);
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll<T>; ++u) body(i + u * kLanes<T>, Full{}, acc[u]);
    }
  };
  if (touch.any()) {
    steps([&](int64_t column) FN_LAMBDA_INLINE { touch.columns(column, kStep); });
  } else {
    steps([](int64_t) FN_LAMBDA_INLINE {});
  }
  for (; i + kLanes<T> <= end; i += kLanes<T>) body(i, Full{}, acc[0]);
  if (i < end) body(i, Part{static_cast<int>(end - i)}, acc[0]);
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k) {
    total[k] = acc[0][k] + acc[1][k];
    if constexpr (kUnroll<T> == 4) total[k] = total[k] + (acc[2][k] + acc[3][k]);
  }
}

template <class T, int kSums, class Body>
FN_INLINE void row_sums(int64_t cols, Body body, double (&sums)[kSums], const Touch& touch = {}) {
  constexpr int64_t kStep = kUnroll<T> * kLanes<T>, kBlock = kBlockSteps * kStep;
  if (cols < kStep) {  // the other accumulators would stay empty
    vector_of<T> acc[kSums] = {};
    for_columns<T>(cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE { body(i, part, acc); });
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) sums[k] = sum_lanes(acc[k]);
    return;
  }
  vector_of<T> total[kSums];
  if (cols <= kBlock) {
    block_sums<T>(0, cols, body, touch, total);
  } else {
    PairwiseSum<vector_of<T>> blocks[kSums];
    for (int64_t begin = 0; begin < cols; begin += kBlock) {
      block_sums<T>(begin, begin + kBlock < cols ? begin + kBlock : cols, body, touch, total);
#pragma GCC unroll 4
      for (int k = 0; k < kSums; ++k) blocks[k].add(total[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) total[k] = blocks[k].total();
  }
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k) sums[k] = sum_lanes(total[k]);
}
