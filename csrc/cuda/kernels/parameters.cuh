// Weight and bias, of any dtype.
#pragma once

#include "elements.cuh"

namespace fusednorm::cuda {

/// The bits of kColumns columns of a parameter of any dtype: fetched early, unpacked when needed.
template <int kColumns, class acc_t>
struct ParameterUnit {
  static constexpr int kMostBytes = kColumns * (sizeof(acc_t) == 8 ? 8 : 4);
  uint32_t word[kMostBytes / 4];

  template <int kBytes>
  __device__ __forceinline__ void load_words(const char* p) {
    constexpr int kEach = kBytes < 16 ? kBytes : 16;
#pragma unroll
    for (int i = 0; i < kBytes / kEach; ++i) {
      const auto chunk = load_global<kEach>(p + i * kEach);
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j) word[i * (kEach / 4) + j] = chunk.word[j];
    }
  }

  /// Columns [col, col + kColumns), of which `left` exist; the others become 0.
  __device__ __forceinline__ void fetch(const Parameter& parameter, int64_t col, int64_t left) {
#pragma unroll
    for (int i = 0; i < kMostBytes / 4; ++i) word[i] = 0;
    if (parameter.data == nullptr || left <= 0) return;
    const char* const p = static_cast<const char*>(parameter.data) + col * parameter.element_bytes;
    if (left >= kColumns) {
      if (parameter.element_bytes == 2) {
        load_words<kColumns * 2>(p);
      } else if (sizeof(acc_t) == 4 || parameter.element_bytes == 4) {
        load_words<kColumns * 4>(p);
      } else {
        load_words<kMostBytes>(p);
      }
      return;
    }
    // The end of the row: two bytes at a time, whatever they belong to.
#pragma unroll
    for (int i = 0; i < kMostBytes / 2; ++i) {
      if (i * 2 < static_cast<int>(left) * parameter.element_bytes) {
        word[i / 2] |= static_cast<uint32_t>(load_global<2>(p + i * 2).half) << (16 * (i % 2));
      }
    }
  }

  template <class E>
  FN_HOST_DEVICE void unpack_as(acc_t (&v)[kColumns]) const {
    Chunk<kColumns * sizeof(E)> chunk;
#pragma unroll
    for (int i = 0; i < kColumns * static_cast<int>(sizeof(E)) / 4; ++i) chunk.word[i] = word[i];
    acc_of<E> some[kColumns];
    unpack<E, kColumns>(chunk, some);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) v[j] = static_cast<acc_t>(some[j]);
  }

  FN_HOST_DEVICE void values(const Parameter& parameter, acc_t (&v)[kColumns]) const {
    if (parameter.dtype == DType::kBFloat16) return unpack_as<__nv_bfloat16>(v);
    if (parameter.dtype == DType::kFloat16) return unpack_as<__half>(v);
    if constexpr (sizeof(acc_t) == 8) {
      if (parameter.dtype == DType::kFloat64) return unpack_as<double>(v);
    }
    unpack_as<float>(v);
  }
};

}  // namespace fusednorm::cuda
