// Where a row stays between the passes over it: registers, shared memory or global memory.
//
// Each kind gives for_units(f): f(column, load) for each of the thread's units, in the same order
// in each pass; load(v) gives its values, 0 for columns beyond the row (after rescale: times
// 2^-exponent). add_residual.cuh has those that are sums.
#pragma once

#include "all_reduce.cuh"
#include "row_access.cuh"

namespace fusednorm::cuda {

struct AllColumns {
  static constexpr bool has(int) { return true; }
};
struct SomeColumns {
  int count;
  FN_HOST_DEVICE bool has(int j) const { return j < count; }
};

/// f(how many of a unit's columns exist), apart for the usual case that all do; not called for
/// none.
template <int kColumns, class F>
__device__ __forceinline__ void with_columns(int64_t left, F f) {
  if (left >= kColumns) {
    f(AllColumns{});
  } else if (left > 0) {
    f(SomeColumns{static_cast<int>(left)});
  }
}

template <class T, int kColumns_, int kUnits>
struct RegisterRow {
  using Args = ForwardArgs;
  static constexpr int kColumns = kColumns_, kBytes = kColumns * static_cast<int>(sizeof(T));
  Chunk<kBytes> raw[kUnits];
  int cols, first, stride;

  __device__ __forceinline__ void fetch(const Source& source, int row_cols, const Group& group, int,
                                        char*) {
    cols = row_cols, first = group.thread * kColumns;
    stride = group.threads * kColumns;
    const char* const p = source.data + static_cast<int64_t>(first) * static_cast<int>(sizeof(T));
    if (source.exact) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        raw[k] = {};
        if (first + k * stride < cols) raw[k] = load_global<kBytes>(p + k * stride * sizeof(T));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const int left = cols - first - k * stride;
        raw[k] = {};
        if (left > 0)
          raw[k] = load_unit<sizeof(T), kBytes>(p + k * stride * sizeof(T), left, source);
      }
    }
  }

  __device__ __forceinline__ int column(int k) const { return first + k * stride; }

  template <class F>
  __device__ __forceinline__ void for_units(F f) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      forget(raw[k]);
      f(column(k), [&](acc_of<T>* v) { unpack<T, kColumns>(raw[k], v); });
    }
  }

  __device__ __forceinline__ void rescale(int exponent) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      acc_of<T> v[kColumns];
      unpack<T, kColumns>(raw[k], v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = std::ldexp(v[j], -exponent);
      raw[k] = pack<T, kColumns>(v);
    }
  }
};

/// Shared and global memory hold the row as it is; it is scaled as it is read.
/// kTogether units are on their way at once (of fp64 half as many: four spilled).
template <class T, int kColumns_, bool kShared, int kTogether = kShared || sizeof(T) == 8 ? 2 : 4>
struct LoopRow {
  using Args = ForwardArgs;
  static constexpr int kColumns = kColumns_, kBytes = kColumns * static_cast<int>(sizeof(T));
  Source source;
  int cols, units, thread, threads, block_threads, lane, exponent;
  char* shared;

  __device__ __forceinline__ int column(int k) const { return (k * threads + thread) * kColumns; }
  __device__ __forceinline__ const char* place(int col) const {
    return source.data + static_cast<int64_t>(col) * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ char* segment(int k) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return shared + (k * (block_threads / 32) + warp) * (33 * kBytes);
  }

  __device__ __forceinline__ void fetch(const Source& from, int row_cols, const Group& group,
                                        int units_, char* memory) {
    source = from, cols = row_cols, units = units_, thread = group.thread, threads = group.threads;
    block_threads = group.block_threads, lane = group.lane, exponent = 0, shared = memory;
    if constexpr (kShared) {
      for (int k = 0; k < units; ++k) {
        const int col = column(k);
        copy_unit<sizeof(T), kBytes>(segment(k), lane, 32, place(col), cols - col, source);
      }
      commit_copies();
      wait_copies<0>();
      __syncwarp();
    }
  }

  template <class F>
  __device__ __forceinline__ void for_units(F f) {
    for (int first = 0; first < units; first += kTogether) {
      Chunk<kBytes> raw[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int col = column(first + i), left = cols - col;
        raw[i] = {};
        if constexpr (kShared) {
          raw[i] = staged_unit<sizeof(T), kBytes>(segment(first + i), lane,
                                                  head_of<kBytes>(place(col)), left, source.exact);
        } else if (source.exact) {
          // From somewhere in any case: no branch between the loads.
          const auto loaded = load_global<kBytes>(place(left > 0 ? col : 0));
          if (left > 0) raw[i] = loaded;
        } else if (left > 0) {
          raw[i] = load_unit<sizeof(T), kBytes>(place(col), left, source);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= units) break;  // the same for all threads
        f(column(first + i), [&](acc_of<T>* v) {
          unpack<T, kColumns>(raw[i], v);
          if (exponent != 0) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) v[j] = std::ldexp(v[j], -exponent);
          }
        });
      }
    }
  }

  __device__ __forceinline__ void rescale(int by) { exponent = by; }
};

}  // namespace fusednorm::cuda
