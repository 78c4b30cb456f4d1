#pragma once

// Pairs of vectors: the even and the odd columns of bf16 rows. Included by kernels.h.

FN_INLINE f32x2 mul_add(f32x2 a, f32x2 b, f32x2 c) {
  return {mul_add(a.even, b.even, c.even), mul_add(a.odd, b.odd, c.odd)};
}
FN_INLINE float sum_lanes(f32x2 a) { return sum_lanes(a.even + a.odd); }

/// A bf16 is the upper half of an fp32: the odd columns stand there already.
FN_INLINE f32x2 widen_pairs(u32v a) { return {(f32v)(a << 16), (f32v)(a & 0xffff0000u)}; }

/// The fp32 whose upper half is `a` rounded to bf16; the lower half is anything.
FN_INLINE u32v rounded_bits(f32v a) {
  const u32v bits = (u32v)a, nan = (u32v)(a != a);
  return (nan & (bits | 0x400000u)) | (~nan & (bits + 0x7fffu + (bits >> 16 & 1u)));
}
FN_INLINE u32v narrow_pairs(f32x2 a) {
#if defined(__AVX512BF16__)
  // The instruction flushes subnormals to zero; integer rounding keeps them.
  const __mmask16 subnormal =
      _mm512_fpclass_ps_mask((__m512)a.even, 0x20) | _mm512_fpclass_ps_mask((__m512)a.odd, 0x20);
  if (__builtin_expect(subnormal == 0, 1)) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (u32v)_mm512_permutexvar_epi16(
        _mm512_load_si512(kInterleave),
        (__m512i)_mm512_cvtne2ps_pbh((__m512)a.odd, (__m512)a.even));
  }
#endif
  return (rounded_bits(a.even) >> 16) | (rounded_bits(a.odd) & 0xffff0000u);
}

#if defined(FUSEDNORM_AVX512)
FN_INLINE u32v load_words(const void* p) { return (u32v)_mm512_loadu_si512(p); }
FN_INLINE u32v load_words(const void* p, int n) {
  return (u32v)_mm512_maskz_loadu_epi16(_bzhi_u32(0xffffffffu, n), p);
}
FN_INLINE void store_words(void* p, u32v a) { _mm512_storeu_si512(p, (__m512i)a); }
FN_INLINE void store_words(void* p, u32v a, int n) {
  _mm512_mask_storeu_epi16(p, _bzhi_u32(0xffffffffu, n), (__m512i)a);
}
/// Natural order to pairs: columns 2 n and 2 n + 1 of the two vectors.
FN_INLINE f32x2 split_pairs(f32v low, f32v high) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return {(f32v)_mm512_permutex2var_ps((__m512)low, even, (__m512)high),
          (f32v)_mm512_permutex2var_ps((__m512)low, odd, (__m512)high)};
}
#else
FN_INLINE u32v load_words(const void* p) { return load_full<u32v>(p); }
FN_INLINE void store_words(void* p, u32v a) { __builtin_memcpy(p, &a, sizeof(a)); }
#if defined(FUSEDNORM_AVX2)
FN_INLINE u32v load_words(const void* p, int n) { return (u32v)load_halves(p, n); }
FN_INLINE void store_words(void* p, u32v a, int n) { store_halves(p, (__m256i)a, n); }
#else
FN_INLINE u32v load_words(const void* p, int n) {
  return load_raw<uint16_t, u32v>(static_cast<const uint16_t*>(p), n);
}
FN_INLINE void store_words(void* p, u32v a, int n) { store_raw(static_cast<uint16_t*>(p), a, n); }
#endif
FN_INLINE f32x2 split_pairs(f32v low, f32v high) {
  f32x2 result{};
  constexpr int kHalf = kLanes<float> / 2;
  for (int i = 0; i < kHalf; ++i) {
    result.even[i] = low[2 * i];
    result.odd[i] = low[2 * i + 1];
    result.even[kHalf + i] = high[2 * i];
    result.odd[kHalf + i] = high[2 * i + 1];
  }
  return result;
}
#endif

FN_INLINE f32x2 load(const paired_bfloat16* p) { return widen_pairs(load_words(p)); }
FN_INLINE f32x2 load(const paired_bfloat16* p, int n) { return widen_pairs(load_words(p, n)); }
FN_INLINE void store(paired_bfloat16* p, f32x2 a) { store_words(p, narrow_pairs(a)); }
FN_INLINE void store(paired_bfloat16* p, f32x2 a, int n) { store_words(p, narrow_pairs(a), n); }

// Parameters of paired rows come in whole steps.
FN_INLINE f32x2 load(const paired_float* p) {
  const float* values = &p->value;
  return {load(values), load(values + kLanes<float>)};
}
FN_INLINE f32x2 load(const paired_float* p, int) { return load(p); }
FN_INLINE void store(paired_float* p, f32x2 a) {
  store(&p->value, a.even);
  store(&p->value + kLanes<float>, a.odd);
}
FN_INLINE void store(paired_float* p, f32x2 a, int) { store(p, a); }

/// bf16 rounding of values in a register.
FN_INLINE f32x2 round_to_bfloat16(f32x2 a) { return widen_pairs(narrow_pairs(a)); }

/// What row_norm.h asks of an arithmetic.
struct VectorMath {
  template <class V>
  static FN_INLINE V mul_add(V a, V b, V c) {
    return FUSEDNORM_ISA::mul_add(a, b, c);
  }
};
