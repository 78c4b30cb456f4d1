#pragma once

// Vectors of 32 bytes (AVX2) or 16 (portable). Included by kernels.h.

#if defined(FUSEDNORM_AVX2)

FN_INLINE f32v mul_add(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps(a, b, c); }
FN_INLINE f64v mul_add(f64v a, f64v b, f64v c) { return (f64v)_mm256_fmadd_pd(a, b, c); }
FN_INLINE float sum_lanes(f32v a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FN_INLINE double sum_lanes(f64v a) {
  const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
FN_INLINE f32v widen(u16v a, float16) { return (f32v)_mm256_cvtph_ps((__m128i)a); }
FN_INLINE u16v narrow(f32v a, float16) {
  return (u16v)_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#else

FN_INLINE f32v mul_add(f32v a, f32v b, f32v c) { return a * b + c; }
FN_INLINE f64v mul_add(f64v a, f64v b, f64v c) { return a * b + c; }
FN_INLINE float sum_lanes(f32v a) { return (a[0] + a[2]) + (a[1] + a[3]); }
FN_INLINE double sum_lanes(f64v a) { return a[0] + a[1]; }
[[gnu::noinline]] inline f32v widen(u16v a, float16) {
  f32v result{};
  for (int i = 0; i < kLanes<float>; ++i) result[i] = to_float(float16{a[i]});
  return result;
}
[[gnu::noinline]] inline u16v narrow(f32v a, float16) {
  u16v result{};
  for (int i = 0; i < kLanes<float>; ++i) {
    float16 half;
    from_float(a[i], &half);
    result[i] = half.bits;
  }
  return result;
}

#endif

FN_INLINE f32v widen(u16v a, bfloat16) { return (f32v)(__builtin_convertvector(a, u32v) << 16); }
FN_INLINE u16v narrow(f32v a, bfloat16) {
  const u32v bits = (u32v)a;
  const u32v rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const u32v nan = (u32v)(a != a);
  const u32v chosen = (nan & (bits | 0x400000u)) | (~nan & rounded);
  return __builtin_convertvector(chosen >> 16, u16v);
}

// Partial vectors go through the stack, element by element, unless the machine has masks: nothing
// is read or written beyond n.
template <class S, class V>
FN_INLINE V load_raw(const S* p, int n) {
  S lanes[sizeof(V) / sizeof(S)] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  V result;
  __builtin_memcpy(&result, lanes, sizeof(V));
  return result;
}
template <class S, class V>
FN_INLINE void store_raw(S* p, V a, int n) {
  S lanes[sizeof(V) / sizeof(S)];
  __builtin_memcpy(lanes, &a, sizeof(V));
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
template <class V, class S>
FN_INLINE V load_full(const S* p) {
  V result;
  __builtin_memcpy(&result, p, sizeof(V));
  return result;
}

#if defined(FUSEDNORM_AVX2)
FN_INLINE __m256i first_words(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FN_INLINE __m256i first_quads(int n) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
FN_INLINE f32v load(const float* p, int n) { return _mm256_maskload_ps(p, first_words(n)); }
FN_INLINE f64v load(const double* p, int n) { return _mm256_maskload_pd(p, first_quads(n)); }
FN_INLINE void store(float* p, f32v a, int n) { _mm256_maskstore_ps(p, first_words(n), a); }
FN_INLINE void store(double* p, f64v a, int n) { _mm256_maskstore_pd(p, first_quads(n), a); }
#else
FN_INLINE f32v load(const float* p, int n) { return load_raw<float, f32v>(p, n); }
FN_INLINE f64v load(const double* p, int n) { return load_raw<double, f64v>(p, n); }
FN_INLINE void store(float* p, f32v a, int n) { store_raw(p, a, n); }
FN_INLINE void store(double* p, f64v a, int n) { store_raw(p, a, n); }
#endif
FN_INLINE f32v load(const float* p) { return load_full<f32v>(p); }
FN_INLINE f64v load(const double* p) { return load_full<f64v>(p); }
FN_INLINE void store(float* p, f32v a) { __builtin_memcpy(p, &a, sizeof(a)); }
FN_INLINE void store(double* p, f64v a) { __builtin_memcpy(p, &a, sizeof(a)); }
template <class T>
FN_INLINE f32v load(const T* p) {
  return widen(load_full<u16v>(p), T{});
}
#if defined(FUSEDNORM_AVX2)
// n elements of 16 bits: pairs of them by mask, and the odd one by itself (4096 x 33 bf16: 236 us
// by way of the stack).
FN_INLINE __m256i load_halves(const void* p, int n) {
  const __m256i pairs = _mm256_maskload_epi32(static_cast<const int*>(p), first_words(n / 2));
  if (n % 2 == 0) return pairs;
  const __m256i last = _mm256_set1_epi32(static_cast<const uint16_t*>(p)[n - 1]);
  const __m256i there =
      _mm256_cmpeq_epi32(_mm256_set1_epi32(n / 2), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_or_si256(pairs, _mm256_and_si256(last, there));
}
FN_INLINE void store_halves(void* p, __m256i a, int n) {
  _mm256_maskstore_epi32(static_cast<int*>(p), first_words(n / 2), a);
  if (n % 2 == 0) return;
  const __m256i last = _mm256_permutevar8x32_epi32(a, _mm256_set1_epi32(n / 2));
  static_cast<uint16_t*>(p)[n - 1] = static_cast<uint16_t>(_mm256_cvtsi256_si32(last));
}
#endif

template <class T>
FN_INLINE f32v load(const T* p, int n) {
#if defined(FUSEDNORM_AVX2)
  return widen((u16v)_mm256_castsi256_si128(load_halves(p, n)), T{});
#else
  return widen(load_raw<T, u16v>(p, n), T{});
#endif
}
template <class T>
FN_INLINE void store(T* p, f32v a) {
  const u16v bits = narrow(a, T{});
  __builtin_memcpy(p, &bits, sizeof(bits));
}
template <class T>
FN_INLINE void store(T* p, f32v a, int n) {
#if defined(FUSEDNORM_AVX2)
  store_halves(p, _mm256_castsi128_si256((__m128i)narrow(a, T{})), n);
#else
  store_raw(p, narrow(a, T{}), n);
#endif
}
template <class T>
FN_INLINE f32v round_to(f32v a) {
  return widen(narrow(a, T{}), T{});
}
