#pragma once

// Loads: how a row comes to the first sweep over it. Included by kernels.h.

/// a * b + c rounded once, on every machine: mul_add is fused only where that is one instruction.
template <class V>
FN_INLINE V fused_mul_add(V a, V b, V c) {
#if defined(FUSEDNORM_AVX512) || defined(FUSEDNORM_AVX2)
  return mul_add(a, b, c);
#else
  if constexpr (__is_same(V, f32x2)) {
    return {fused_mul_add(a.even, b.even, c.even), fused_mul_add(a.odd, b.odd, c.odd)};
  } else {
    constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0]));
    for (int i = 0; i < kCount; ++i) {
      if constexpr (__is_same(V, f64v)) {
        c[i] = __builtin_fma(a[i], b[i], c[i]);
      } else {
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
      }
    }
    return c;
  }
#endif
}

/// Values as they are once stored as elements of type T.
template <class T, class V>
FN_INLINE V as_stored(V a) {
  if constexpr (__is_same(T, float) || __is_same(T, double)) {
    return a;
  } else if constexpr (__is_same(T, paired_bfloat16)) {
    return round_to_bfloat16(a);
  } else {
    return round_to<T>(a);
  }
}

/// A row as it lies in memory.
template <class T>
struct DirectLoad {
  using stored_t = T;
  const T* stored;

  FN_INLINE DirectLoad after() const { return *this; }
  template <class Columns>
  FN_INLINE vector_of<T> value(int64_t i, Columns part) const {
    return load(stored + i, part);
  }
  template <class Columns>
  FN_INLINE vector_of<T> read(int64_t i, Columns part) const {
    return load(stored + i, part);
  }
};

/// alpha * residual + input, stored while it is read for the first time; `after` that it is read
/// where it was stored, which may be where the residual was.
template <class T, class R>
struct AddResidualLoad {
  using stored_t = R;
  const T* input;
  const R* residual;
  R* stored;
  acc_of<R> alpha;

  FN_INLINE DirectLoad<R> after() const { return {stored}; }
  template <class Columns>
  FN_INLINE vector_of<R> sum(int64_t i, Columns part) const {
    return fused_mul_add(Broadcast<vector_of<R>>::of(alpha), load(residual + i, part),
                         load(input + i, part));
  }
  template <class Columns>
  FN_INLINE vector_of<R> value(int64_t i, Columns part) const {
    return as_stored<R>(sum(i, part));
  }
  template <class Columns>
  FN_INLINE vector_of<R> read(int64_t i, Columns part) const {
    const vector_of<R> s = sum(i, part);
    store(stored + i, s, part);
    return as_stored<R>(s);
  }
};
