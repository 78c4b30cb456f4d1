// The workers of one row, and sums over them that every worker has. The order of the additions is
// fixed: lanes in a butterfly, then warps by their number.
#pragma once

#include "device.cuh"
#include "launch_config.h"

namespace fusednorm::cuda {

/// A thread's place among the threads of its row.
struct Group {
  int threads;         // of the row
  int thread;          // this one
  int block_threads;   // of the row in this block
  int slot, slots;     // which of the block's rows
  int width, lane;     // lanes of this warp that share the row
  unsigned mask;       // lanes that arrive together: all, but where slots go different ways
  int warps;           // of the row; 1 where it has a warp or less
  int exchange_width;  // the lanes that read the warps' sums: a power of two, 32 at most
  int cluster;         // blocks that share the row through distributed shared memory
  char* exchange;      // exchange_bytes for this row
  char* memory;        // the block's shared memory beyond the exchange of all its rows
  int half;            // values in one half of `exchange`
  int turn;            // 0, 1: the half that comes next
};

/// `thread`: among the row's threads in this block, which is `rank` of those that share the row.
/// `slots` above 1 only where the rows of a block go different ways: each then has a named barrier.
__device__ __forceinline__ Group make_group(int threads_per_row, int block_threads, int thread,
                                            int rank, int slot, int slots, int cluster,
                                            int acc_size, char* shared) {
  Group g;
  g.threads = threads_per_row;
  g.block_threads = block_threads;
  g.slots = slots;
  g.slot = slot;
  g.thread = rank * block_threads + thread;
  g.width = threads_per_row < 32 ? threads_per_row : 32;
  g.lane = thread & (g.width - 1);
  g.mask = 0xffffffffu;
  g.warps = threads_per_row < 64 ? 1 : threads_per_row >> 5;
  g.exchange_width = 1;
  while (g.exchange_width < g.warps && g.exchange_width < 32) g.exchange_width *= 2;
  g.cluster = cluster;
  // Of the row in the cluster, or in this block: where its blocks are no cluster, they exchange
  // nothing through shared memory.
  const int exchanging = cluster > 1 ? threads_per_row : block_threads;
  const int bytes = exchange_bytes(exchanging, acc_size);
  g.exchange = shared + slot * bytes;
  g.memory = shared + slots * bytes;
  g.half = kReducedValues * (exchanging >> 5);
  g.turn = 0;
  return g;
}

/// The lanes of the row, for where those of other rows in the warp are elsewhere. (Shuffles with a
/// mask that is not a constant take five times the instructions.)
__device__ __forceinline__ unsigned lanes_of(const Group& group) {
  const int first = static_cast<int>(threadIdx.x & 31) & ~(group.width - 1);
  return group.width == 32 ? 0xffffffffu : ((1u << group.width) - 1) << first;
}

/// The same threads without those of other blocks: for work that each block does for itself, where
/// other rows may be elsewhere.
__device__ __forceinline__ Group within_block(const Group& group) {
  Group g = group;
  g.threads = g.block_threads;
  g.thread = group.thread % g.block_threads;
  g.warps = g.threads < 64 ? 1 : g.threads >> 5;
  g.cluster = 1;
  g.mask = lanes_of(group);
  return g;
}

struct Sum {
  template <class acc_t>
  static FN_HOST_DEVICE acc_t of(acc_t a, acc_t b) {
    return a + b;
  }
};
struct Max {  // of magnitudes; passes over NaN
  template <class acc_t>
  static FN_HOST_DEVICE acc_t of(acc_t a, acc_t b) {
    return a > b ? a : b;
  }
};

template <class Op, int kCount, class acc_t>
__device__ __forceinline__ void reduce_lanes(unsigned mask, int width, acc_t (&v)[kCount]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (step < width) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = Op::of(v[i], __shfl_xor_sync(mask, v[i], step));
    }
  }
}

template <class acc_t>
FN_HOST_DEVICE Chunk<sizeof(acc_t)> chunk_of(acc_t v) {
  Chunk<sizeof(acc_t)> chunk;
  memcpy(&chunk, &v, sizeof(acc_t));
  return chunk;
}
template <class acc_t>
FN_HOST_DEVICE acc_t value_of(const Chunk<sizeof(acc_t)>& chunk) {
  acc_t v;
  memcpy(&v, &chunk, sizeof(acc_t));
  return v;
}

/// The warps' values [kCount][warps], read by `load`, in every lane. All lanes of the warp call.
template <class Op, int kCount, class acc_t, class Load>
__device__ __forceinline__ void reduce_warps(const Group& group, acc_t (&v)[kCount], Load load) {
  const int lane = group.lane & (group.exchange_width - 1);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = lane < group.warps ? load(i * group.warps + lane) : acc_t(0);
    for (int w = lane + 32; w < group.warps; w += 32) {
      v[i] = Op::of(v[i], load(i * group.warps + w));
    }
  }
  reduce_lanes<Op>(0xffffffffu, group.exchange_width, v);
}

/// Every thread of the row gets the sums (or maxima) of all. One barrier: the halves of the
/// exchange memory take turns, and before one comes round again everybody has passed the other's
/// barrier.
template <class Op, int kCount, class acc_t>
__device__ __forceinline__ void all_reduce(Group& group, acc_t (&v)[kCount]) {
  static_assert(kCount <= kReducedValues);
  reduce_lanes<Op>(group.mask, group.width, v);
  if (group.warps == 1) return;
  acc_t* const buffer = reinterpret_cast<acc_t*>(group.exchange) + group.turn * group.half;
  group.turn ^= 1;
  acc_t* const mine = buffer + (group.thread >> 5);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto chunk = chunk_of(v[i]);
    if (group.cluster > 1) {
      if (group.lane < group.cluster) {
        store_shared_of<sizeof(acc_t)>(static_cast<unsigned>(group.lane), mine + i * group.warps,
                                       chunk);
      }
    } else if (group.lane == 0) {
      store_shared<sizeof(acc_t)>(mine + i * group.warps, chunk);
    }
  }
  if (group.cluster > 1) {
    cluster_barrier();
  } else if (group.slots == 1) {
    __syncthreads();
  } else {
    named_barrier(1 + group.slot, group.block_threads);
  }
  reduce_warps<Op>(group, v,
                   [&](int i) { return value_of<acc_t>(load_shared<sizeof(acc_t)>(buffer + i)); });
}

}  // namespace fusednorm::cuda
