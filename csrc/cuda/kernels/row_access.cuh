// Rows in memory: accesses as wide as the machine has them for
// any length and any alignment.
//
// A unit is what one thread moves at once: kColumns consecutive columns, a chunk of kBytes. Which
// columns make a unit depends on the column alone. Where the row does not start on a chunk, the two
// aligned chunks that cover the unit are loaded and shifted together; a store gets the columns it
// lacks from the neighbouring lane. Nothing outside the tensor is touched: a chunk that crosses its
// begin or end goes element by element.
#pragma once

#include "elements.cuh"
#include "row_norm_launch.h"

namespace fusednorm::cuda {

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

}  // namespace fusednorm::cuda
