#pragma once

// Vectors of the accumulation type, and the loads and stores that convert to and from the four
// dtypes.
//
// Included by kernels.h only, inside the namespace of one instruction set, so that no
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
