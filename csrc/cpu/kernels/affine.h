#pragma once

// What x_hat is rounded to, and the affine step, read once per column for all rows of a block.
// Included by kernels.h.

/// Whether x_hat is rounded ("llama" casting mode) to anything that rows of type T can ask for.
template <class T>
FN_INLINE bool rounds(DType dtype) {
  if constexpr (__is_same(T, double)) return false;
  if constexpr (__is_same(T, float)) return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  return dtype == (__is_same(T, float16) ? DType::kFloat16 : DType::kBFloat16);
}

struct RoundNone {
  template <class V>
  FN_INLINE V round(V a) const {
    return a;
  }
};

/// To what `dtype` says, known when called: one kernel in place of one for each.
template <class T>
struct RoundAny {
  DType dtype;
  FN_INLINE vector_of<T> round(vector_of<T> a) const {
    if constexpr (__is_same(T, paired_bfloat16)) {
      if (dtype == DType::kBFloat16) a = round_to_bfloat16(a);
    } else if constexpr (!__is_same(T, double)) {
      if constexpr (!__is_same(T, float16)) {
        if (dtype == DType::kBFloat16) a = round_to<bfloat16>(a);
      }
      if constexpr (!__is_same(T, bfloat16)) {
        if (dtype == DType::kFloat16) a = round_to<float16>(a);
      }
    }
    return a;
  }
};

template <class T>
struct WeightAndBias {
  const parameter_of<T>*weight, *bias;
  struct Gain {
    vector_of<T> weight, bias;
    FN_INLINE vector_of<T> of(vector_of<T> x_hat) const { return mul_add(x_hat, weight, bias); }
  };
  template <class Columns>
  FN_INLINE Gain at(int64_t i, Columns part) const {
    return {load(weight + i, part), load(bias + i, part)};
  }
};
template <class T>
struct WeightOnly {
  const parameter_of<T>* weight;
  struct Gain {
    vector_of<T> weight;
    FN_INLINE vector_of<T> of(vector_of<T> x_hat) const { return x_hat * weight; }
  };
  template <class Columns>
  FN_INLINE Gain at(int64_t i, Columns part) const {
    return {load(weight + i, part)};
  }
};
/// All the rest: x_hat rounded, or no weight. An absent weight is 1 and an absent bias -0, which
/// change no bit, not even a zero's sign.
template <class T>
struct AnyAffine {
  const parameter_of<T>*weight, *bias;  // null: absent
  RoundAny<T> rounding;
  struct Gain {
    vector_of<T> weight, bias;
    RoundAny<T> rounding;
    FN_INLINE vector_of<T> of(vector_of<T> x_hat) const {
      return mul_add(rounding.round(x_hat), weight, bias);
    }
  };
  template <class Columns>
  FN_INLINE Gain at(int64_t i, Columns part) const {
    Gain gain{Broadcast<vector_of<T>>::of(1), Broadcast<vector_of<T>>::of(-acc_of<T>(0)), rounding};
    if (weight != nullptr) gain.weight = load(weight + i, part);
    if (bias != nullptr) gain.bias = load(bias + i, part);
    return gain;
  }
};
