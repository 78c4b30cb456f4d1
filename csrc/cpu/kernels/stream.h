#pragma once

// Stores that go past the caches: an output that no cache would keep is then not read first.
// Included by kernels.h.

/// `p` on a multiple of the bytes stored.
FN_INLINE void stream(float* p, f32v a) {
#if defined(FUSEDNORM_AVX512)
  _mm512_stream_ps(p, (__m512)a);
#elif defined(FUSEDNORM_AVX2)
  _mm256_stream_ps(p, a);
#else
  store(p, a);
#endif
}
FN_INLINE void stream(double* p, f64v a) {
#if defined(FUSEDNORM_AVX512)
  _mm512_stream_pd(p, (__m512d)a);
#elif defined(FUSEDNORM_AVX2)
  _mm256_stream_pd(p, a);
#else
  store(p, a);
#endif
}
template <class T>
FN_INLINE void stream(T* p, f32v a) {
#if defined(FUSEDNORM_AVX512)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(a, T{}));
#elif defined(FUSEDNORM_AVX2)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)narrow(a, T{}));
#else
  store(p, a);
#endif
}

FN_INLINE void stream(paired_bfloat16* p, f32x2 a) {
#if defined(FUSEDNORM_AVX512)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)narrow_pairs(a));
#elif defined(FUSEDNORM_AVX2)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)narrow_pairs(a));
#else
  store(p, a);
#endif
}

/// After the last of them, before another thread may read.
FN_INLINE void end_streaming() {
#if defined(FUSEDNORM_AVX512) || defined(FUSEDNORM_AVX2)
  _mm_sfence();
#endif
}

template <class T>
FN_INLINE void write(T* p, vector_of<T> a, Full, bool past_caches) {
  if (past_caches) {
    stream(p, a);
  } else {
    store(p, a);
  }
}
template <class T>
FN_INLINE void write(T* p, vector_of<T> a, Part part, bool) {
  store(p, a, part);
}

template <class T>
FN_INLINE bool may_stream(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (kLanes<T> * sizeof(T)) == 0;
}

/// Whether rows of `cols` that follow each other from `p` on (null: there are none) can be
/// streamed.
template <class T>
FN_INLINE bool rows_may_stream(const T* p, int64_t cols) {
  return may_stream(p) && cols % kLanes<T> == 0;
}

// Shorter runs than this end too often inside a line, which then is read after all, and written
// twice: runs of 49 took 2.5 times as long in fp32, and 9 times in bf16.
constexpr int64_t kLeastStreamed = 2048;  // bytes

/// out[i] = value(i, part) for all columns.
template <class T, class Value>
FN_INLINE void write_columns(T* out, int64_t cols, bool past_caches, Value value) {
  int64_t i = 0;
  if (past_caches && cols * static_cast<int64_t>(sizeof(T)) >= kLeastStreamed) {
    while (i < cols && i < kLanes<T> && !may_stream(out + i)) ++i;
    if (i > 0) {
      const Part head{static_cast<int>(i)};
      store(out, value(0, head), head);
    }
    for (; i + kLanes<T> <= cols; i += kLanes<T>) stream(out + i, value(i, Full{}));
  } else {
    for (; i + kLanes<T> <= cols; i += kLanes<T>) store(out + i, value(i, Full{}), Full{});
  }
  if (i < cols) {
    const Part tail{static_cast<int>(cols - i)};
    store(out + i, value(i, tail), tail);
  }
}
