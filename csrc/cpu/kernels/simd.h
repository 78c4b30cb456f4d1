#pragma once

// Vectors of the accumulation type, and the loads and stores that convert to and from the four
// dtypes.
//
// Included by row_kernels.cpp only, inside the namespace of one instruction set, so that no
// function compiled for AVX-512 can be merged by the linker with one of another file. The
// arithmetic operators are the compiler's own (vector_size); what needs an instruction of its own
// is below. Contraction is off
// (-ffp-contract=off): only mul_add fuses, so a row has the same bits in a block of rows and alone.

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

#if defined(FUSEDNORM_AVX512)
constexpr int kVectorBytes = 64;
#elif defined(FUSEDNORM_AVX2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

using f32v = float __attribute__((vector_size(kVectorBytes)));
using f64v = double __attribute__((vector_size(kVectorBytes)));
using u32v = uint32_t __attribute__((vector_size(kVectorBytes)));
using u16v = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

// What a dtype accumulates in, and the vector of that.
template <class T>
struct Accumulation {
  using type = float;
  using vector = f32v;
};
template <>
struct Accumulation<double> {
  using type = double;
  using vector = f64v;
};
template <class T>
using acc_of = typename Accumulation<T>::type;
template <class T>
using vector_of = typename Accumulation<T>::vector;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(acc_of<T>));

#define FN_INLINE inline __attribute__((always_inline))
#define FN_LAMBDA_INLINE __attribute__((always_inline))

template <class V>
struct Broadcast;
template <>
struct Broadcast<f32v> {
  static FN_INLINE f32v of(float a) { return a - f32v{}; }
};
template <>
struct Broadcast<f64v> {
  static FN_INLINE f64v of(double a) { return a - f64v{}; }
};

// fp32 <-> 16 bits for one value. Round to nearest, ties to even; a NaN stays a (quiet) NaN.

FN_INLINE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
FN_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

FN_INLINE float to_float(bfloat16 a) { return bits_to_float(static_cast<uint32_t>(a.bits) << 16); }

FN_INLINE float to_float(float16 a) {
  const uint32_t sign = static_cast<uint32_t>(a.bits & 0x8000u) << 16;
  const uint32_t magnitude = a.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // 2^112 moves the exponent from fp16's bias to fp32's; subnormals come out right.
  const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(scaled));
}

FN_INLINE void from_float(float a, bfloat16* out) {
  const uint32_t bits = float_to_bits(a);
  out->bits = a != a ? static_cast<uint16_t>(bits >> 16 | 0x40u)
                     : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

FN_INLINE void from_float(float a, float16* out) {
  const uint32_t bits = float_to_bits(a);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = sign | 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520: rounds to infinity
    out->bits = sign | 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, the sum rounds it to 2^-24
    out->bits =
        sign | static_cast<uint16_t>(float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u);
  } else {
    out->bits = sign | static_cast<uint16_t>(
                           (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
  }
}

#if defined(FUSEDNORM_AVX512)

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

#else  // AVX2 and portable

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
FN_INLINE f32v widen(u16v a, float16) {
  f32v result{};
  for (int i = 0; i < kLanes<float>; ++i) result[i] = to_float(float16{a[i]});
  return result;
}
FN_INLINE u16v narrow(f32v a, float16) {
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

// Partial vectors go through the stack, element by element: nothing is read or written beyond n.
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

FN_INLINE f32v load(const float* p) { return load_full<f32v>(p); }
FN_INLINE f32v load(const float* p, int n) { return load_raw<float, f32v>(p, n); }
FN_INLINE f64v load(const double* p) { return load_full<f64v>(p); }
FN_INLINE f64v load(const double* p, int n) { return load_raw<double, f64v>(p, n); }
FN_INLINE void store(float* p, f32v a) { __builtin_memcpy(p, &a, sizeof(a)); }
FN_INLINE void store(float* p, f32v a, int n) { store_raw(p, a, n); }
FN_INLINE void store(double* p, f64v a) { __builtin_memcpy(p, &a, sizeof(a)); }
FN_INLINE void store(double* p, f64v a, int n) { store_raw(p, a, n); }
template <class T>
FN_INLINE f32v load(const T* p) {
  return widen(load_full<u16v>(p), T{});
}
template <class T>
FN_INLINE f32v load(const T* p, int n) {
  return widen(load_raw<T, u16v>(p, n), T{});
}
template <class T>
FN_INLINE void store(T* p, f32v a) {
  const u16v bits = narrow(a, T{});
  __builtin_memcpy(p, &bits, sizeof(bits));
}
template <class T>
FN_INLINE void store(T* p, f32v a, int n) {
  store_raw(p, narrow(a, T{}), n);
}
template <class T>
FN_INLINE f32v round_to(f32v a) {
  return widen(narrow(a, T{}), T{});
}

#endif

/// What row_norm.h asks of an arithmetic.
struct VectorMath {
  template <class V>
  static FN_INLINE V mul_add(V a, V b, V c) {
    return FUSEDNORM_ISA::mul_add(a, b, c);
  }
};
