#pragma once

// Walking over the columns of a row: whole vectors from column 0, then one part.
// Included by row_kernels.cpp.

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
