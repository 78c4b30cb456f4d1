// How a shape is laid out on the GPU: pure functions, tested on the host.
//
// A row's columns are dealt in units of `unit_bytes` of its widest tensor. Unit u belongs to thread
// u % threads_per_row, and is the (u / threads_per_row)-th of that thread. This assignment follows
// from the row length, the dtypes and, in forward, the architecture (32-byte accesses; whole warps
// in each block of a cluster), never from the number of rows or from where a row lies; so do the
// sums, taken warp by warp in a fixed order. In backward it is the same on every architecture:
// whether the warps sit in one block, a cluster or two launches changes no bit. (But of extreme
// rows, whose statistics each block takes again by itself.)
#pragma once

#include <cstdint>

#include "maths/row_norm.h"

namespace fusednorm::cuda {

constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}
constexpr int accumulation_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
/// The smallest power of two that is at least `a`.
constexpr int64_t power_of_two(int64_t a) {
  int64_t p = 1;
  while (p < a) p *= 2;
  return p;
}

/// What an architecture (80, 90, 100, 120, ...) offers; what is not known is taken as the least.
struct Architecture {
  int shared_per_sm, shared_per_block, threads_per_sm, registers_per_sm, max_cluster, unit_bytes;
};
constexpr Architecture architecture(int arch) {
  const bool large = arch == 80 || arch == 87;
  const bool datacenter = arch >= 90 && arch < 120;  // 90, 100, 103, 110
  return {
      large        ? 164 * 1024
      : datacenter ? 228 * 1024
                   : 100 * 1024,
      large        ? 163 * 1024
      : datacenter ? 227 * 1024
                   : 99 * 1024,
      large || datacenter ? 2048 : 1536,
      65536,
      // 8 is what every device with clusters grants; 16 is asked for, and may be refused.
      datacenter   ? 16
      : arch >= 90 ? 8
                   : 1,
      arch >= 100 ? 32 : 16,
  };
}

// ---- Forward ----

/// Where a row stays between the passes over it.
enum class Residence { kRegisters, kShared, kStreaming };

struct ForwardPlan {
  Residence residence;
  int unit_bytes;       // of the wider of input and output
  int columns;          // in a unit
  int units;            // of a thread; of kShared and kStreaming: the length of its loop
  int threads_per_row;  // in all blocks of the cluster
  int rows_per_block;
  int threads;  // of a block
  int cluster;  // blocks that share a row
  int shared_bytes;
  int max_registers;    // a thread, by the kernel's launch bounds
  int bytes_in_flight;  // per SM: loads that are outstanding together
};

constexpr int kReducedValues = 3;  // of one all_reduce at most

/// Bytes of the buffer in which the warps of one row exchange sums; twice, to be used in turn.
/// `threads`: those of the row in the block, or in the cluster.
constexpr int exchange_bytes(int threads, int acc_size) {
  const int warps = threads / 32;
  return warps > 1 ? static_cast<int>(round_up(2 * kReducedValues * warps * acc_size, 16)) : 0;
}

/// Launch bounds of the forward kernels by the bytes a thread holds: enough blocks for 32 KB in
/// flight on an SM from rows of 1 KB on, and no more than leave the registers that are needed.
constexpr int forward_max_threads(int bytes) {
  return bytes == 64 ? 256 : bytes == 128 ? 512 : 128;
}
constexpr int forward_min_blocks(int bytes, int acc_size) {
  return bytes <= 16   ? (acc_size == 8 ? 8 : 10)
         : bytes == 32 ? 8
         : bytes == 48 ? 7
         : bytes == 64 ? 3
         : bytes == 96 ? 4
                       : 1;
}
/// Likewise of sums, with twice the bytes in flight: three blocks of 64 bytes a thread spilled, and
/// ten of 16 bytes (nine have 36 KB in flight).
constexpr int add_forward_min_blocks(int bytes, int acc_size) {
  if (bytes <= 16 && acc_size == 4) return 9;
  return bytes == 64 ? 2 : forward_min_blocks(bytes, acc_size);
}
constexpr int kLoopThreads = 512;  // of the kShared and kStreaming kernels

constexpr int registers_for(int max_threads, int min_blocks, const Architecture& a) {
  const int registers = a.registers_per_sm / (max_threads * min_blocks) / 8 * 8;
  return registers > 255 ? 255 : registers;
}

/// As cuda_occupancy.h has it: registers go to warps in units of 256, from a quarter of the SM
/// each. (Barriers limit too, to 64 or 24 an SM: a kernel that names one at run time claims 16.
/// Only backward does, and it is alone on an SM.)
constexpr int blocks_per_sm(int threads, int registers, int shared_bytes, const Architecture& a) {
  const int warps = static_cast<int>(ceil_div(threads, 32));
  const int of_a_warp = static_cast<int>(round_up(registers, 8)) * 32;
  int blocks = a.threads_per_sm / threads;
  const int by_registers = a.registers_per_sm / 4 / of_a_warp * 4 / warps;
  const int by_shared = a.shared_per_sm / (shared_bytes + 1024);  // 1 KB a block is the system's
  if (blocks > by_registers) blocks = by_registers;
  if (blocks > by_shared) blocks = by_shared;
  return blocks > 32 ? 32 : blocks;
}

/// The shared memory of a warp's units: one chunk more than lanes, for a row that does not start on
/// a chunk.
constexpr int segment_bytes(int threads, int width, int chunk_bytes) {
  return threads / width * (width + 1) * chunk_bytes;
}

/// By the row length, the dtypes and the architecture alone. Rows of up to 32 units: lanes of a
/// warp, several rows to a warp. Up to 4 KB: a warp. Up to 32 KB: a block. Then a cluster of as
/// many blocks as keep 32 KB each, or 64 KB in the largest cluster; a block of 64 KB where there
/// are none. Then shared memory. Then the row is read again for each pass.
constexpr ForwardPlan forward_plan(int64_t cols, DType in, DType out, const Architecture& a) {
  const int widest = size_of(in) > size_of(out) ? size_of(in) : size_of(out);
  const int acc_size = accumulation_size(in);
  ForwardPlan plan = {};
  plan.unit_bytes = a.unit_bytes;
  plan.columns = a.unit_bytes / widest;
  plan.cluster = plan.rows_per_block = 1;
  const int64_t units = ceil_div(cols > 0 ? cols : 1, plan.columns);
  const int most = 128 / a.unit_bytes;  // units of a thread: 128 bytes in registers
  const int64_t bytes = units * a.unit_bytes;
  int held = a.unit_bytes;  // bytes of a thread
  plan.residence = Residence::kRegisters;
  if (units <= 32 * most) {  // up to one warp a row
    const int needed = static_cast<int>(ceil_div(units, 32));
    plan.units = needed <= 4 ? needed : needed <= 6 ? 6 : 8;
    plan.threads_per_row = units <= 32 ? static_cast<int>(power_of_two(units)) : 32;
    plan.threads = 128;
    plan.rows_per_block = plan.threads / plan.threads_per_row;
    held = plan.units * a.unit_bytes;
  } else if (bytes <= 16 * 1024) {
    held = 64;
  } else if (bytes <= 64 * 1024 * a.max_cluster) {
    held = 128;
    while (plan.cluster < a.max_cluster && bytes > 32 * 1024 * plan.cluster) plan.cluster *= 2;
  } else {
    plan.cluster = a.max_cluster;
    plan.residence = Residence::kShared;
  }
  if (plan.threads == 0 && plan.residence == Residence::kRegisters) {
    plan.units = held / a.unit_bytes;
    plan.threads_per_row =
        static_cast<int>(round_up(ceil_div(units, plan.units), 32 * plan.cluster));
    plan.threads = plan.threads_per_row / plan.cluster;
  }
  if (plan.residence != Residence::kRegisters) {
    plan.threads = kLoopThreads;
    plan.threads_per_row = kLoopThreads * plan.cluster;
    plan.units = static_cast<int>(ceil_div(units, plan.threads_per_row));
  }
  plan.shared_bytes = exchange_bytes(plan.threads_per_row, acc_size);
  int in_flight = held * size_of(in) / widest;  // of a thread
  if (plan.residence == Residence::kShared) {
    const int chunk = plan.columns * size_of(in);
    const int64_t row = static_cast<int64_t>(plan.units) * segment_bytes(kLoopThreads, 32, chunk);
    if (row + plan.shared_bytes <= a.shared_per_block) {
      plan.shared_bytes += static_cast<int>(row);
      in_flight = plan.units * chunk;
    } else {
      plan.residence = Residence::kStreaming;
      in_flight = 4 * chunk;  // the loop is unrolled four times
    }
  }
  const bool loops = plan.residence != Residence::kRegisters;
  const int max_threads = loops ? kLoopThreads : forward_max_threads(held);
  plan.max_registers =
      registers_for(max_threads, loops ? 1 : forward_min_blocks(held, acc_size), a);
  plan.bytes_in_flight = in_flight * plan.threads *
                         blocks_per_sm(plan.threads, plan.max_registers, plan.shared_bytes, a);
  return plan;
}

// ---- Backward ----

struct BackwardPlan {
  int unit_bytes;  // of the wider of input and grad_output
  int columns;
  int units;            // of a thread
  int threads_per_row;  // in all blocks that share a row
  int rows_per_block;   // row slots: rows that a block works on at once
  int threads;
  int blocks_per_row;
  int cluster;     // blocks_per_row where they are a cluster; 1: two launches exchange the sums
  int64_t groups;  // rows r of equal r / rows_per_block % groups are summed together
  int stages;      // rows of the ring: stages - 1 are on their way while one is worked on
  int shared_bytes;
  int max_registers;
  int bytes_in_flight;
};

/// Blocks of the grid, the most first. 1184 = 8 * 148 leaves 108, 132, 148 and 170 SMs idle for
/// 0.3, 0.3, 0 and 0.5 % of the time, if each block takes equally long; 528 for 2, 0, 11, 22;
/// 264 for 19, 0, 11, 22; 132 for 39, 0, 11, 22 %. (One block fills an SM. Where memory is the
/// limit, the busy SMs get the bandwidth of the idle ones.)
constexpr int kBackwardBlocks[] = {1184, 528, 264, 132};

constexpr int kBackwardThreads = 512;   // of a block, with 128 registers each: one block on an SM
constexpr int kBackwardUnits = 2;       // of a thread at most: 16 columns of 16-bit elements
constexpr int kBackwardUnitBytes = 16;  // what cp.async moves
constexpr int kMaxStages = 4;

/// The share of SM time lost where `blocks` equal blocks are dealt to `sms`.
constexpr double quantisation_loss(int64_t blocks, int sms) {
  return 1.0 - static_cast<double>(blocks) / static_cast<double>(ceil_div(blocks, sms) * sms);
}

/// What backward_plan puts into a block's shared memory, apart from the ring.
constexpr int backward_shared_bytes(const BackwardPlan& plan, int acc_size, int ring) {
  const int contributors = plan.threads_per_row < 32 ? kBackwardThreads / 32 : plan.rows_per_block;
  const int block_threads = plan.threads_per_row / plan.blocks_per_row;  // of one row
  const int columns = block_threads * plan.units * plan.columns;
  // The slots' sums are added where the ring was.
  const int combine = contributors > 1 ? contributors * columns * acc_size : 0;
  return exchange_bytes(plan.cluster > 1 ? plan.threads_per_row : block_threads, acc_size) *
             plan.rows_per_block +
         columns * acc_size + (ring > combine ? ring : combine);
}

/// Units of a thread, threads of a row, row slots, and with them everything that the bits of a
/// row's sums depend on, follow from the row length and the dtypes; `groups` from the shape, the
/// dtypes and the norm. The architecture decides only in how many blocks the threads of a row sit
/// and how many rows are prefetched.
///
/// Up to 32 units a thread has one, then two: a row of 64 has a warp, of 512 half a block, of 1024
/// a block; then it is spread over as many blocks as it takes.
constexpr BackwardPlan backward_plan(int64_t rows, int64_t cols, DType in, DType grad,
                                     bool centered, const Architecture& a) {
  const int widest = size_of(in) > size_of(grad) ? size_of(in) : size_of(grad);
  const int acc_size = accumulation_size(in);
  BackwardPlan plan = {};
  plan.unit_bytes = kBackwardUnitBytes;
  plan.columns = plan.unit_bytes / widest;
  const int64_t units = ceil_div(cols > 0 ? cols : 1, plan.columns);
  plan.units = units <= 32 ? 1 : kBackwardUnits;
  const int64_t needed = ceil_div(units, plan.units);  // threads
  const int64_t spread = power_of_two(ceil_div(needed, kBackwardThreads));
  plan.threads_per_row =
      static_cast<int>(units <= 32     ? power_of_two(units)
                       : needed <= 256 ? round_up(needed, 32)
                                       // Divisible into twice as many blocks, for an architecture
                                       // with little shared memory.
                                       : round_up(needed, 64 * spread));
  plan.rows_per_block =
      plan.threads_per_row < kBackwardThreads ? kBackwardThreads / plan.threads_per_row : 1;
  plan.max_registers = registers_for(kBackwardThreads, 1, a);

  // One stage of the ring holds a row (of each slot) of input and of grad_output.
  const int chunks = plan.columns * (size_of(in) + size_of(grad));
  const int width = plan.threads_per_row < 32 ? plan.threads_per_row : 32;
  int stage = 0;
  for (plan.blocks_per_row = static_cast<int>(spread);; plan.blocks_per_row *= 2) {
    plan.threads = plan.threads_per_row * plan.rows_per_block / plan.blocks_per_row;
    plan.cluster = plan.blocks_per_row <= a.max_cluster ? plan.blocks_per_row : 1;
    stage = plan.units * segment_bytes(plan.threads, width, chunks);
    const bool fits = backward_shared_bytes(plan, acc_size, 2 * stage) <= a.shared_per_block;
    if (fits || plan.rows_per_block > 1 || plan.blocks_per_row > spread) break;
  }

  // Groups: as many blocks as keep the partial sums, written and read once, under 5 % of the
  // traffic of the rows, and as have 1.5 MB of it each (40 us, beside which the 2 us or so of a
  // block's start and end count little); for few rows at least two to a slot.
  const int64_t partial = 2 * acc_size * (centered ? 2 : 1);
  const int64_t row = 2 * size_of(in) + size_of(grad);
  const int64_t rows_for_5_percent = ceil_div(20 * partial, row);
  for (const int blocks : kBackwardBlocks) {
    plan.groups = blocks / spread > 0 ? blocks / spread : 1;
    const bool busy = blocks * int64_t{1500000} / row / (cols > 0 ? cols : 1) <= rows;
    if (busy && plan.groups * rows_for_5_percent <= rows) break;
  }
  const int64_t for_two_each = ceil_div(rows, 2 * plan.rows_per_block);
  if (plan.groups > for_two_each) plan.groups = for_two_each;

  // As many stages as bring 32 KB in flight.
  const int in_flight = static_cast<int>(cols * (size_of(in) + size_of(grad)) /
                                         plan.blocks_per_row * plan.rows_per_block);
  plan.stages = 2;
  while (plan.stages < kMaxStages && (plan.stages - 1) * in_flight < 32 * 1024 &&
         backward_shared_bytes(plan, acc_size, (plan.stages + 1) * stage) <= a.shared_per_block) {
    ++plan.stages;
  }
  plan.shared_bytes = backward_shared_bytes(plan, acc_size, plan.stages * stage);
  plan.bytes_in_flight = (plan.stages - 1) * in_flight *
                         blocks_per_sm(plan.threads, plan.max_registers, plan.shared_bytes, a);
  return plan;
}

/// The columns of a row of partial sums, so that each starts on a unit.
constexpr int64_t partial_stride(int64_t cols) { return round_up(cols, 8); }

}  // namespace fusednorm::cuda
