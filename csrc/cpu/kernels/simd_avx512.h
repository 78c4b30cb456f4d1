#pragma once

// Vectors of 64 bytes. Included by kernels.h, in place of simd_vectors.h.

FN_INLINE f32v mul_add(f32v a, f32v b, f32v c) {
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
FN_INLINE f64v mul_add(f64v a, f64v b, f64v c) {
  return (f64v)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
FN_INLINE float sum_lanes(f32v a) { return _mm512_reduce_add_ps((__m512)a); }
FN_INLINE double sum_lanes(f64v a) { return _mm512_reduce_add_pd((__m512d)a); }

FN_INLINE __mmask16 first(int count) { return static_cast<__mmask16>(_bzhi_u32(0xffffu, count)); }

FN_INLINE f32v widen(__m256i a, bfloat16) {
  return (f32v)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
FN_INLINE f32v widen(__m256i a, float16) { return (f32v)_mm512_cvtph_ps(a); }

FN_INLINE __m256i narrow(f32v a, bfloat16) {
#if defined(__AVX512BF16__)
  // The instruction flushes subnormals to zero; integer rounding keeps them. Two micro-ops to test.
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)a, 0x20) == 0, 1)) {
    return (__m256i)_mm512_cvtneps_pbh((__m512)a);
  }
#endif
  const __m512i bits = _mm512_castps_si512((__m512)a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
}
FN_INLINE __m256i narrow(f32v a, float16) {
  return _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FN_INLINE f32v load(const float* p) { return (f32v)_mm512_loadu_ps(p); }
FN_INLINE f32v load(const float* p, int n) { return (f32v)_mm512_maskz_loadu_ps(first(n), p); }
FN_INLINE f64v load(const double* p) { return (f64v)_mm512_loadu_pd(p); }
FN_INLINE f64v load(const double* p, int n) {
  return (f64v)_mm512_maskz_loadu_pd(static_cast<__mmask8>(first(n)), p);
}
FN_INLINE void store(float* p, f32v a) { _mm512_storeu_ps(p, (__m512)a); }
FN_INLINE void store(float* p, f32v a, int n) { _mm512_mask_storeu_ps(p, first(n), (__m512)a); }
FN_INLINE void store(double* p, f64v a) { _mm512_storeu_pd(p, (__m512d)a); }
FN_INLINE void store(double* p, f64v a, int n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first(n)), (__m512d)a);
}
template <class T>
FN_INLINE f32v load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
FN_INLINE f32v load(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}
template <class T>
FN_INLINE void store(T* p, f32v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a, T{}));
}
template <class T>
FN_INLINE void store(T* p, f32v a, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(a, T{}));
}
template <class T>
FN_INLINE f32v round_to(f32v a) {
  return widen(narrow(a, T{}), T{});
}
