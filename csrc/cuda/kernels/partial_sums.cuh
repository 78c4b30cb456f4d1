// The sums over groups of rows, for grad_weight and grad_bias: stored by backward, then added up.
#pragma once

#include "all_reduce.cuh"
#include "row_access.cuh"

namespace fusednorm::cuda {

/// Adds the slots' sums and writes them as the group's.
template <int kUnits, int kColumns, class acc_t>
__device__ __forceinline__ void store_partial(acc_t (&v)[kUnits][kColumns], const Group& group,
                                              acc_t* partial, int64_t cols, char* memory) {
  constexpr int kEach = 16 / sizeof(acc_t) < kColumns ? 16 / sizeof(acc_t) : kColumns;
  if (group.slots == 1) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int64_t col = static_cast<int64_t>(k * group.threads + group.thread) * kColumns;
      if (col >= cols) continue;
#pragma unroll
      for (int j = 0; j < kColumns; j += kEach) {
        store_global<kEach * sizeof(acc_t)>(partial + col + j, pack<acc_t, kEach>(v[k] + j));
      }
    }
    return;
  }
  const int columns = group.threads * kUnits * kColumns;
  int contributors = group.slots, contributor = group.slot;
  if (group.width < 32) {  // first the slots of a warp
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (step >= group.width) {
#pragma unroll
        for (int k = 0; k < kUnits; ++k) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) v[k][j] += __shfl_xor_sync(0xffffffffu, v[k][j], step);
        }
      }
    }
    contributors = static_cast<int>(blockDim.x) / 32;
    contributor = static_cast<int>(threadIdx.x) / 32;
  }
  acc_t* const sums = reinterpret_cast<acc_t*>(memory);
  if (group.width == 32 || static_cast<int>(threadIdx.x) % 32 < group.width) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int col = (k * group.threads + group.thread) * kColumns;
#pragma unroll
      for (int j = 0; j < kColumns; j += kEach) {
        store_shared<kEach * sizeof(acc_t)>(sums + contributor * columns + col + j,
                                            pack<acc_t, kEach>(v[k] + j));
      }
    }
  }
  __syncthreads();
  for (int col = static_cast<int>(threadIdx.x); col < cols; col += static_cast<int>(blockDim.x)) {
    acc_t sum = 0;
    for (int c = 0; c < contributors; ++c) {
      sum += value_of<acc_t>(load_shared<sizeof(acc_t)>(sums + c * columns + col));
    }
    store_global<sizeof(acc_t)>(partial + col, chunk_of(sum));
  }
  __syncthreads();  // the memory is used again
}

constexpr int kReduceColumns = 32, kReduceLines = 16;

/// A block adds 32 columns of one gradient: 16 threads each take every 16th group, then their sums
/// are added in order.
template <class acc_t>
__global__ void __launch_bounds__(kReduceColumns* kReduceLines)
    reduce_partials(const ReduceArgs args) {
  const int parameter = static_cast<int>(blockIdx.x) % args.parameters;
  const int64_t first = static_cast<int64_t>(blockIdx.x) / args.parameters * kReduceColumns;
  const int lane = static_cast<int>(threadIdx.x) % kReduceColumns;
  const int line = static_cast<int>(threadIdx.x) / kReduceColumns;
  const int64_t col = first + lane;
  const acc_t* const partials =
      static_cast<const acc_t*>(args.partials) + parameter * args.stride + col;
  const int64_t stride = args.parameters * args.stride;
  acc_t sum = 0;
  if (col < args.cols) {
#pragma unroll 16  // on their way together
    for (int64_t g = line; g < args.groups; g += kReduceLines) {
      sum += value_of<acc_t>(load_global<sizeof(acc_t)>(partials + g * stride));
    }
  }
  acc_t* const sums = reinterpret_cast<acc_t*>(shared_memory());
  store_shared<sizeof(acc_t)>(sums + threadIdx.x, chunk_of(sum));
  __syncthreads();
  if (line > 0 || col >= args.cols) return;
#pragma unroll
  for (int i = 1; i < kReduceLines; ++i) {
    sum += value_of<acc_t>(load_shared<sizeof(acc_t)>(sums + i * kReduceColumns + lane));
  }
  // Chosen, not indexed: an index into the arguments would copy them to local memory.
  char* const gradient = static_cast<char*>(parameter == 0 ? args.gradients[0] : args.gradients[1]);
  const float narrow = static_cast<float>(sum);
  switch (parameter == 0 ? args.dtypes[0] : args.dtypes[1]) {
    case DType::kFloat64:
      return store_global<8>(gradient + col * 8, chunk_of(static_cast<double>(sum)));
    case DType::kFloat32:
      return store_global<4>(gradient + col * 4, chunk_of(narrow));
    case DType::kBFloat16:
      return store_global<2>(gradient + col * 2, pack<__nv_bfloat16, 1>(&narrow));
    case DType::kFloat16:
      return store_global<2>(gradient + col * 2, pack<__half, 1>(&narrow));
  }
}

}  // namespace fusednorm::cuda
