#pragma once

// Weights in the accumulation type, and the last reduction of their gradients.
// Included by row_kernels.cpp.

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

FN_INLINE void put(double value, double* out) { *out = value; }
FN_INLINE void put(double value, float* out) { *out = static_cast<float>(value); }
/// To 16 bits by way of fp32 rounded to odd, so that rounding twice gives what rounding once does.
template <class T>
FN_INLINE void put(double value, T* out) {
  float nearest = static_cast<float>(value);
  uint32_t bits = float_to_bits(nearest);
  if (static_cast<double>(nearest) != value && nearest - nearest == 0 && (bits & 1u) == 0) {
    const bool away = __builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(value);
    bits = away ? bits - 1 : bits + 1;
  }
  from_float(bits_to_float(bits), out);
}

template <class Row, class T>
void reduce_to(const void* partials, int64_t count, int64_t stride, void* out, int64_t col_begin,
               int64_t col_end) {
  constexpr int64_t kStrip = 64;  // columns summed together: 512 bytes of doubles
  static_assert(kStrip % kParameterStep<Row> == 0);
  const auto* from = static_cast<const acc_of<Row>*>(partials);
  for (int64_t c = col_begin; c < col_end; c += kStrip) {
    const int64_t width = col_end - c < kStrip ? col_end - c : kStrip;
    const int64_t slots = width + (-width & (kParameterStep<Row> - 1));
    double sums[kStrip] = {};
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t k = 0; k < slots; ++k) sums[k] += from[p * stride + c + k];
    }
    for (int64_t k = 0; k < width; ++k) {
      put(sums[parameter_slot<Row>(k)], static_cast<T*>(out) + c + k);
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
