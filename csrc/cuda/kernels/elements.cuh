// Elements to numbers and back, and parts of chunks.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "device.cuh"
#include "maths/row_norm.h"

namespace fusednorm::cuda {

template <class T>
struct AccumulationOf {
  using type = float;
};
template <>
struct AccumulationOf<double> {
  using type = double;
};
template <class T>
using acc_of = typename AccumulationOf<T>::type;

struct Math {
  static FN_HOST_DEVICE float mul_add(float a, float b, float c) { return std::fma(a, b, c); }
  static FN_HOST_DEVICE double mul_add(double a, double b, double c) { return std::fma(a, b, c); }
};

template <class To, class From>
FN_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

template <class T, int kColumns>
FN_HOST_DEVICE void unpack(const Chunk<kColumns * sizeof(T)>& chunk, acc_of<T>* v) {
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint64_t bits = chunk.word[2 * j] | static_cast<uint64_t>(chunk.word[2 * j + 1]) << 32;
      v[j] = bits_as<double>(bits);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) v[j] = bits_as<float>(chunk.word[j]);
  } else if constexpr (kColumns == 1) {
    v[0] = static_cast<float>(bits_as<T>(chunk.half));
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint32_t word = chunk.word[j / 2];
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        v[j] = bits_as<float>(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
      } else {
        v[j] = __half2float(bits_as<__half>(static_cast<uint16_t>(word >> (16 * (j % 2)))));
      }
    }
  }
}

template <class T>
FN_HOST_DEVICE T rounded(acc_of<T> v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return v;
  }
}

template <class T>
FN_HOST_DEVICE acc_of<T> round_trip(acc_of<T> v) {
  return static_cast<acc_of<T>>(rounded<T>(v));
}

template <class T, int kColumns>
FN_HOST_DEVICE Chunk<kColumns * sizeof(T)> pack(const acc_of<T>* v) {
  Chunk<kColumns * sizeof(T)> chunk;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const auto bits = bits_as<uint64_t>(v[j]);
      chunk.word[2 * j] = static_cast<uint32_t>(bits);
      chunk.word[2 * j + 1] = static_cast<uint32_t>(bits >> 32);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) chunk.word[j] = bits_as<uint32_t>(v[j]);
  } else if constexpr (kColumns == 1) {
    chunk.half = bits_as<uint16_t>(rounded<T>(v[0]));
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {  // two at once: one instruction
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        chunk.word[j / 2] = bits_as<uint32_t>(__floats2bfloat162_rn(v[j], v[j + 1]));
      } else {
        chunk.word[j / 2] = bits_as<uint32_t>(__floats2half2_rn(v[j], v[j + 1]));
      }
    }
  }
  return chunk;
}

/// Element j of a chunk.
template <int kElement, int kBytes>
FN_HOST_DEVICE Chunk<kElement> element_of(const Chunk<kBytes>& chunk, int j) {
  Chunk<kElement> e;
  if constexpr (kElement == kBytes) {
    e = chunk;
  } else if constexpr (kElement == 2) {
    e.half = static_cast<uint16_t>(chunk.word[j / 2] >> (16 * (j % 2)));
  } else {
#pragma unroll
    for (int i = 0; i < kElement / 4; ++i) e.word[i] = chunk.word[j * (kElement / 4) + i];
  }
  return e;
}

/// Bytes [offset, offset + kBytes) of two chunks end to end; offset < kBytes, a multiple of
/// kElement.
template <int kElement, int kBytes>
FN_HOST_DEVICE Chunk<kBytes> window(const Chunk<kBytes>& low, const Chunk<kBytes>& high,
                                    int offset) {
  constexpr int kWords = kBytes / 4;
  uint32_t word[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) word[i] = low.word[i], word[kWords + i] = high.word[i];
#pragma unroll
  for (int step = kWords / 2; step > 0; step /= 2) {
    if (offset / 4 & step) {
#pragma unroll
      for (int i = 0; i < 2 * kWords - step; ++i) word[i] = word[i + step];
    }
  }
  if (kElement == 2 && offset % 4 != 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = word[i] >> 16 | word[i + 1] << 16;
  }
  Chunk<kBytes> result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) result.word[i] = word[i];
  return result;
}

/// The first `left` elements, and zeros.
template <int kElement, int kBytes>
FN_HOST_DEVICE Chunk<kBytes> first_elements(Chunk<kBytes> chunk, int64_t left) {
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    if constexpr (kElement == 2) {
      if (left <= 2 * i + 1) chunk.word[i] = left == 2 * i + 1 ? chunk.word[i] & 0xffffu : 0;
    } else {
      if (left <= i / (kElement / 4)) chunk.word[i] = 0;
    }
  }
  return chunk;
}

}  // namespace fusednorm::cuda
