// Rows in memory: elements to numbers and back, and accesses as wide as the machine has them for
// any length and any alignment.
//
// A unit is what one thread moves at once: kColumns consecutive columns, a chunk of kBytes. Which
// columns make a unit depends on the column alone. Where the row does not start on a chunk, the two
// aligned chunks that cover the unit are loaded and shifted together; a store gets the columns it
// lacks from the neighbouring lane. Nothing outside the tensor is touched: a chunk that crosses its
// begin or end goes element by element.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "device.cuh"
#include "maths/row_norm.h"
#include "row_norm_launch.h"

namespace fusednorm::cuda {

// ---- Elements ----

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

// ---- Loads ----

/// The aligned chunk at `p`; zeros where it lies outside of the tensor.
template <int kElement, int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_cover(const char* p, const Source& source) {
  if (p >= source.begin && p + kBytes <= source.end) return load_global<kBytes>(p);
  Chunk<kBytes> chunk = {};
#pragma unroll
  for (int j = 0; j < kBytes / kElement; ++j) {
    const char* const q = p + j * kElement;
    if (q < source.begin || q + kElement > source.end) continue;
    const Chunk<kElement> e = load_global<kElement>(q);
    if constexpr (kElement == 2) {
      chunk.word[j / 2] |= static_cast<uint32_t>(e.half) << (16 * (j % 2));
    } else {
#pragma unroll
      for (int i = 0; i < kElement / 4; ++i) chunk.word[j * (kElement / 4) + i] = e.word[i];
    }
  }
  return chunk;
}

/// The bytes by which `p` lies past a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ int head_of(const char* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kBytes);
}

/// Where row `row` starts, in elements from the tensor's data. With more than one dimension the
/// host sees to it that rows count in 32 bits: 64-bit divisions took 17 registers.
__device__ __forceinline__ int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (layout.dims == 1) return row * layout.strides[0];
  uint32_t rest = static_cast<uint32_t>(row);
  int64_t offset = 0;
#pragma unroll
  for (int d = kMaxRowDims - 1; d > 0; --d) {
    if (d >= layout.dims) continue;
    const uint32_t size = static_cast<uint32_t>(layout.sizes[d]);
    offset += rest % size * layout.strides[d];
    rest /= size;
  }
  return offset + rest * layout.strides[0];
}

/// The unit at `p`, of which `left` > 0 columns belong to the row; zeros for the others.
template <int kElement, int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_unit(const char* p, int64_t left,
                                                   const Source& source) {
  const int head = head_of<kBytes>(p);
  const auto low = load_cover<kElement, kBytes>(p - head, source);
  if (head == 0) return first_elements<kElement>(low, left);
  Chunk<kBytes> high = {};
  if (left * kElement > kBytes - head) {
    high = load_cover<kElement, kBytes>(p - head + kBytes, source);
  }
  return first_elements<kElement>(window<kElement, kBytes>(low, high, head), left);
}

// ---- Copies into shared memory ----

/// 16 bytes are the most that one instruction copies.
template <int kBytes>
__device__ __forceinline__ void copy_chunk(char* to, const char* from) {
  constexpr int kEach = kBytes < 16 ? kBytes : 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += kEach) copy_async<kEach>(to + i, from + i);
}

template <int kElement, int kBytes>
__device__ __forceinline__ void copy_cover(char* to, const char* p, const Source& source) {
  if (p >= source.begin && p + kBytes <= source.end) {
    copy_chunk<kBytes>(to, p);
  } else {
    store_shared<kBytes>(to, load_cover<kElement, kBytes>(p, source));
  }
}

/// Stages the units of `width` neighbouring lanes in `segment`, one chunk more than lanes: each
/// lane copies the chunk that its unit starts in, the last lane also the next one.
template <int kElement, int kBytes>
__device__ __forceinline__ void copy_unit(char* segment, int lane, int width, const char* p,
                                          int64_t left, const Source& source) {
  if (source.exact) {
    if (left > 0) copy_chunk<kBytes>(segment + lane * kBytes, p);
    return;
  }
  const int head = head_of<kBytes>(p);
  if (left * kElement + head > 0) {
    copy_cover<kElement, kBytes>(segment + lane * kBytes, p - head, source);
  }
  if (lane == width - 1 && head > 0 && left * kElement + head > kBytes) {
    copy_cover<kElement, kBytes>(segment + width * kBytes, p - head + kBytes, source);
  }
}

/// What copy_unit staged, after the copies have arrived and the lanes have met. `head`: head_of its
/// place in the tensor.
template <int kElement, int kBytes>
__device__ __forceinline__ Chunk<kBytes> staged_unit(const char* segment, int lane, int head,
                                                     int64_t left, bool exact) {
  const char* const place = segment + lane * kBytes;
  if (left <= 0) return {};
  const auto low = load_shared<kBytes>(place);
  if (exact) return low;
  if (head == 0) return first_elements<kElement>(low, left);
  Chunk<kBytes> high = {};
  if (left * kElement + head > kBytes) high = load_shared<kBytes>(place + kBytes);
  return first_elements<kElement>(window<kElement, kBytes>(low, high, head), left);
}

// ---- Stores ----

/// Stores the lanes' units of a row where units do not start on chunks: a chunk is put together
/// from two lanes' units. `p` is the place of the lane's own unit, `left` the columns of the row
/// from it on (0 or less: none). All lanes of the warp call together.
template <int kElement, int kBytes>
__device__ __forceinline__ void store_shifted(char* p, const Chunk<kBytes>& unit, int64_t left,
                                              int lane, int width) {
  constexpr int kColumns = kBytes / kElement;
  Chunk<kBytes> before;
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    before.word[i] = __shfl_up_sync(0xffffffffu, unit.word[i], 1, width);
  }
  const int head = head_of<kBytes>(p);
  const Chunk<kBytes> chunk =
      head == 0 ? unit : window<kElement, kBytes>(before, unit, kBytes - head);
  const int borrowed = head / kElement;  // columns of the lane before
  if (left + borrowed >= kColumns && (lane > 0 || head == 0)) {
    store_global<kBytes>(p - head, chunk);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j - borrowed < left && (lane > 0 || j >= borrowed)) {
        store_global<kElement>(p - head + j * kElement, element_of<kElement>(chunk, j));
      }
    }
  }
  if (lane == width - 1 && head > 0) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j >= kColumns - borrowed && j < left) {
        store_global<kElement>(p + j * kElement, element_of<kElement>(unit, j));
      }
    }
  }
}

/// The lane's unit of a row, to its place `p`. All lanes of the warp call together.
template <int kElement, int kBytes>
__device__ __forceinline__ void store_unit(char* p, const Chunk<kBytes>& unit, int64_t left,
                                           bool exact, int lane, int width) {
  if (exact) {
    if (left > 0) store_global<kBytes>(p, unit);
  } else {
    store_shifted<kElement>(p, unit, left, lane, width);
  }
}

// ---- Weight and bias ----

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
