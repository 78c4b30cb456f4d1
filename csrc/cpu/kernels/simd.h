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

/// bf16 rows that are taken two vectors at a time, the even columns and the odd ones: widening is
/// then one operation on 32 bits and no shuffle. (512 x 4096 LayerNorm forward: 170 us, 130 so.)
/// Their parameters are stored in that order too, see kParameterStep.
struct paired_bfloat16 {
  uint16_t bits;
};
struct paired_float {
  float value;
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

#define FN_INLINE inline __attribute__((always_inline))
#define FN_LAMBDA_INLINE __attribute__((always_inline))

/// 2 n columns: those of even number, those of odd number.
struct f32x2 {
  f32v even, odd;
};
FN_INLINE f32x2 operator+(f32x2 a, f32x2 b) { return {a.even + b.even, a.odd + b.odd}; }
FN_INLINE f32x2 operator-(f32x2 a, f32x2 b) { return {a.even - b.even, a.odd - b.odd}; }
FN_INLINE f32x2 operator*(f32x2 a, f32x2 b) { return {a.even * b.even, a.odd * b.odd}; }
FN_INLINE f32x2 operator/(f32x2 a, f32x2 b) { return {a.even / b.even, a.odd / b.odd}; }

// What an element type accumulates in, the vector of that, and how its rows' parameters are stored.
template <class T>
struct Accumulation {
  using type = float;
  using vector = f32v;
  using parameter = float;
};
template <>
struct Accumulation<double> {
  using type = double;
  using vector = f64v;
  using parameter = double;
};
template <>
struct Accumulation<paired_bfloat16> {
  using type = float;
  using vector = f32x2;
  using parameter = paired_float;
};
template <>
struct Accumulation<paired_float> : Accumulation<paired_bfloat16> {};
template <class T>
using acc_of = typename Accumulation<T>::type;
template <class T>
using vector_of = typename Accumulation<T>::vector;
template <class T>
using parameter_of = typename Accumulation<T>::parameter;
template <class T>
constexpr int kLanes = static_cast<int>(sizeof(vector_of<T>) / sizeof(acc_of<T>));

/// Parameters of T's rows come in whole steps of so many; beyond the last column there are zeros.
template <class T>
constexpr int kParameterStep = __is_same(parameter_of<T>, paired_float) ? kLanes<T> : 1;

/// Where the parameter of a column is stored.
template <class T>
FN_INLINE int64_t parameter_slot(int64_t column) {
  if constexpr (kParameterStep<T> == 1) return column;
  const int64_t in_step = column % kLanes<T>;
  return column - in_step + in_step / 2 + (in_step % 2) * (kLanes<T> / 2);
}

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
template <>
struct Broadcast<f32x2> {
  static FN_INLINE f32x2 of(float a) { return {a - f32v{}, a - f32v{}}; }
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

// ---- Pairs ----

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
FN_INLINE u32v load_words(const void* p, int n) {
  return load_raw<uint16_t, u32v>(static_cast<const uint16_t*>(p), n);
}
FN_INLINE void store_words(void* p, u32v a) { __builtin_memcpy(p, &a, sizeof(a)); }
FN_INLINE void store_words(void* p, u32v a, int n) { store_raw(static_cast<uint16_t*>(p), a, n); }
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
