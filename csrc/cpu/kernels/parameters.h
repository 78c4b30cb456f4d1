#pragma once

// Weights in the accumulation type, and the last reduction of their gradients.
// Included by kernels.h.

/// `count` parameters as rows of type Row take them.
template <class Row, class T>
void convert_from(const void* in, double offset, void* out, int64_t count) {
  using acc_t = acc_of<Row>;
  const T* from = static_cast<const T*>(in);
  auto* to = static_cast<parameter_of<Row>*>(out);
  int64_t done = 0;
  if constexpr (kParameterStep<Row> != 1) {  // the last step's columns that do not exist
    if (count > 0) store(to + (count - 1) / kLanes<Row> * kLanes<Row>, vector_of<Row>{});
  }
  if constexpr (!__is_same(acc_t, acc_of<T>)) {
    // fp64 to fp32: the sum is rounded once.
  } else if constexpr (__is_same(vector_of<Row>, vector_of<T>)) {
    const auto offset_v = Broadcast<vector_of<T>>::of(static_cast<acc_t>(offset));
    for_columns<T>(count, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      store(to + i, load(from + i, part) + offset_v, part);
    });
    done = count;
  } else {
    const auto offset_v = Broadcast<vector_of<Row>>::of(static_cast<acc_t>(offset));
    for (; done + kLanes<Row> <= count; done += kLanes<Row>) {
      store(to + done, split_pairs(load(from + done), load(from + done + kLanes<T>)) + offset_v);
    }
  }
  for (; done < count; ++done) {
    to[parameter_slot<Row>(done)] = {static_cast<acc_t>(element(from + done) + offset)};
  }
}

template <class Row>
void convert(DType from, const void* in, double offset, void* out, int64_t count) {
  switch (from) {
    case DType::kFloat64:
      return convert_from<Row, double>(in, offset, out, count);
    case DType::kFloat32:
      return convert_from<Row, float>(in, offset, out, count);
    case DType::kBFloat16:
      if constexpr (kParameterStep<Row> != 1) {
        return convert_from<Row, Row>(in, offset, out, count);
      } else {
        return convert_from<Row, bfloat16>(in, offset, out, count);
      }
    case DType::kFloat16:
      return convert_from<Row, float16>(in, offset, out, count);
  }
}

/// fp32 rounded to odd, from which rounding to 16 bits gives what rounding the double once does.
/// Without branches, so that a loop over it is made of vectors.
FN_INLINE float rounded_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double error = value - static_cast<double>(nearest);  // NaN where there is nothing to mend
  const uint32_t bits = float_to_bits(nearest);
  const uint32_t inexact = static_cast<uint32_t>(error < 0 || error > 0);
  const uint32_t even = ~bits & 1u;
  // Towards the value: one down in magnitude where nearest lies beyond it.
  const uint32_t beyond = static_cast<uint32_t>((error < 0) != (bits >> 31 == 1u));
  const uint32_t finite = static_cast<uint32_t>((bits & 0x7f800000u) != 0x7f800000u);
  return bits_to_float(bits + (inexact & even & finite) * (1u - 2u * beyond));
}

constexpr int64_t kReduceStrip = 64;  // columns summed together: 512 bytes of doubles

/// The same for a strip of sums (one by one: 5 ns each, as much as a backward of 1 x 4096 takes).
FN_INLINE void round_to_odd(const double (&sums)[kReduceStrip], float (&out)[kReduceStrip]) {
#if defined(FUSEDNORM_AVX512)
  for (int64_t k = 0; k < kReduceStrip; k += 8) {
    const __m512d sum = _mm512_loadu_pd(sums + k);
    const __m256 cut = _mm512_cvt_roundpd_ps(sum, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), sum, _CMP_NEQ_OQ);
    const __m256i bits = _mm256_castps_si256(cut);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k),
                        _mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
  }
#else
  for (int64_t k = 0; k < kReduceStrip; ++k) out[k] = rounded_to_odd(sums[k]);
#endif
}

FN_INLINE void put(double value, double* out) { *out = value; }
FN_INLINE void put(double value, float* out) { *out = static_cast<float>(value); }
template <class T>
FN_INLINE void put(double value, T* out) {
  from_float(rounded_to_odd(value), out);
}

/// The sums of a strip's slots, in double.
template <class acc_t>
FN_INLINE void sum_partials(const acc_t* from, int64_t count, int64_t stride, int64_t slots,
                            double (&sums)[kReduceStrip]) {
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t k = 0; k < slots; ++k) sums[k] += from[p * stride + k];
  }
}

/// `width` sums in slots, rounded to T: pairs as they lie, else put in the columns' order first.
template <class Row, class T>
FN_INLINE void store_sums(T* to, const float* sums, int64_t width) {
  if constexpr (__is_same(Row, paired_bfloat16) && __is_same(T, bfloat16)) {
    auto* pairs = reinterpret_cast<paired_bfloat16*>(to);
    for_columns<Row>(width, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      store(pairs + i, load(reinterpret_cast<const paired_float*>(sums + i), part), part);
    });
  } else {
    float in_order[kReduceStrip];
    if constexpr (kParameterStep<Row> != 1) {
      for (int64_t k = 0; k < width; ++k) in_order[k] = sums[parameter_slot<Row>(k)];
      sums = in_order;
    }
    for_columns<T>(width, [&](int64_t i, auto part)
                              FN_LAMBDA_INLINE { store(to + i, load(sums + i, part), part); });
  }
}

template <class Row, class T>
void reduce_to(const void* partials, int64_t count, int64_t stride, void* out, int64_t col_begin,
               int64_t col_end) {
  static_assert(kReduceStrip % kParameterStep<Row> == 0);
  using acc_t = acc_of<Row>;
  const auto* from = static_cast<const acc_t*>(partials);
  for (int64_t c = col_begin; c < col_end; c += kReduceStrip) {
    const int64_t width = col_end - c < kReduceStrip ? col_end - c : kReduceStrip;
    const int64_t slots = width + (-width & (kParameterStep<Row> - 1));
    T* const to = static_cast<T*>(out) + c;
    if constexpr (__is_same(acc_t, float) && !__is_same(T, double)) {
      if (count == 1) {  // nothing to add
        store_sums<Row>(to, from + c, width);
        continue;
      }
    }
    double sums[kReduceStrip] = {};
    sum_partials(from + c, count, stride, slots, sums);
    if constexpr (__is_same(T, double)) {
      for (int64_t k = 0; k < width; ++k) to[k] = sums[parameter_slot<Row>(k)];
    } else {
      float rounded[kReduceStrip];
      if constexpr (__is_same(T, float)) {
        for (int64_t k = 0; k < kReduceStrip; ++k) rounded[k] = static_cast<float>(sums[k]);
      } else {
        round_to_odd(sums, rounded);
      }
      store_sums<Row>(to, rounded, width);
    }
  }
}

template <class Row>
void reduce(const void* partials, int64_t count, int64_t stride, DType to, void* out,
            int64_t col_begin, int64_t col_end) {
  switch (to) {
    case DType::kFloat64:
      return reduce_to<Row, double>(partials, count, stride, out, col_begin, col_end);
    case DType::kFloat32:
      return reduce_to<Row, float>(partials, count, stride, out, col_begin, col_end);
    case DType::kBFloat16:
      return reduce_to<Row, bfloat16>(partials, count, stride, out, col_begin, col_end);
    case DType::kFloat16:
      return reduce_to<Row, float16>(partials, count, stride, out, col_begin, col_end);
  }
}
