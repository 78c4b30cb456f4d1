// Backward: blocks that live through a group of rows. While a row is worked on, the next ones are
// on their way into a ring in shared memory; grad_weight and grad_bias gather in registers.
#pragma once

#include "parameters.cuh"
#include "partial_sums.cuh"
#include "row_statistics.cuh"

namespace fusednorm::cuda {

/// A row's sums need all its threads. Where no cluster can hold them, a first launch leaves the
/// warps' sums in memory, and a second one applies them.
enum class Phase { kWhole, kSums, kApply };

/// Where the gradient of a row goes: add_residual.cuh has another one.
template <class T>
struct GradInputStore {
  using Args = BackwardArgs;
  using grad_t = T;  // of grad_input
};

/// What grad_input and grad_weight need to know of a row.
template <class acc_t>
struct BackwardRow {
  acc_t mean, rstd, minus_shift_rstd, mean_g, minus_projection;
  int exponent;  // of a scaled row: grad_input is multiplied by 2^-exponent
};

__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 2) {
    wait_copies<1>();
  } else if (stages == 3) {
    wait_copies<2>();
  } else {
    wait_copies<3>();
  }
}

/// The saved statistics of an extreme row over- or underflowed, or their products would: they are
/// taken again from the scaled row. Each block reads the whole row: this is rare.
template <class T, int kColumns>
__device__ __forceinline__ void extreme_row(const Source& source, Group& group,
                                            const BackwardArgs& args, BackwardRow<acc_of<T>>* row) {
  using acc_t = acc_of<T>;
  Group block = within_block(group);
  LoopRow<T, kColumns, false, 1> data;
  const int64_t per_pass = static_cast<int64_t>(block.threads) * kColumns;
  data.fetch(source, args.cols, block, static_cast<int>((args.cols + per_pass - 1) / per_pass),
             nullptr);
  const int exponent = scaling_exponent<acc_t>(data, block, args.params);
  if (exponent != 0) {
    data.rescale(exponent);
    const auto statistics =
        row_statistics<acc_t>(args.centered, data, block, args.cols, scaled(args.params, exponent));
    if (!args.centered || statistics.variance != 0) {  // a constant row is right as it is
      row->mean = statistics.mean;
      row->rstd = statistics.rstd;
      row->exponent = exponent;
    }
  }
  group.turn = block.turn;
  if (group.cluster > 1) cluster_barrier();  // before others write to this block's exchange memory
}

template <class T, class G, int kUnits, Phase kPhase, class Store>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    row_norm_backward(const typename Store::Args args) {
  using acc_t = acc_of<T>;
  using grad_t = typename Store::grad_t;
  constexpr bool kSplits = std::is_same_v<typename Store::Args, AddBackwardArgs>;
  constexpr int kWidest = sizeof(T) > sizeof(G) ? sizeof(T) : sizeof(G);
  constexpr int kColumns = kBackwardUnitBytes / kWidest;
  constexpr int kX = kColumns * sizeof(T), kG = kColumns * sizeof(G);  // bytes of a unit
  constexpr acc_t kRounding = sizeof(acc_t) == 8 ? 0x1p-52 : 0x1p-23;  // of 1 / rstd
  const int rank = args.cluster > 1 ? static_cast<int>(cluster_rank())
                                    : static_cast<int>(blockIdx.x) % args.blocks_per_row;
  const int64_t group_index = static_cast<int64_t>(blockIdx.x) / args.blocks_per_row;
  const int in_block = static_cast<int>(threadIdx.x);
  const int block_threads = args.threads_per_row / args.blocks_per_row;  // of one row
  const int slot = in_block / block_threads, in_row = in_block - slot * block_threads;
  Group group = make_group(args.threads_per_row, block_threads, in_row, rank, slot,
                           args.rows_per_block, args.cluster, sizeof(acc_t), shared_memory());
  char* const weights = group.memory;
  char* const ring = weights + block_threads * kUnits * kColumns * static_cast<int>(sizeof(acc_t));
  if (args.cluster > 1) cluster_barrier();  // the others have started, and their memory is there

  const int cols = static_cast<int>(args.cols);
  const auto column = [&](int k) { return (k * group.threads + group.thread) * kColumns; };

  // The weight, in the accumulation type with the offset: in shared memory, one copy for all slots.
  // (Registers hold grad_weight and grad_bias; with the weight beside them kernels spilled.)
  // A unit's chunks lie apart, so that neighbouring lanes read neighbouring ones.
  constexpr int kEach = kColumns * sizeof(acc_t) < 16 ? kColumns : 16 / sizeof(acc_t);
  const auto weight_place = [&](int k, int j) {
    const int chunk = (k * kColumns + j) / kEach * block_threads + in_row;
    return reinterpret_cast<acc_t*>(weights) + chunk * kEach;
  };
  if (args.weight.data != nullptr && slot == 0) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      acc_t w[kColumns];
      ParameterUnit<kColumns, acc_t> parameter;
      parameter.fetch(args.weight, column(k), cols - column(k));
      parameter.values(args.weight, w);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) w[j] += static_cast<acc_t>(args.weight_offset);
#pragma unroll
      for (int j = 0; j < kColumns; j += kEach) {
        store_shared<kEach * sizeof(acc_t)>(weight_place(k, j), pack<acc_t, kEach>(w + j));
      }
    }
  }
  __syncthreads();
  const auto times_weight = [&](int k, acc_t(&g)[kColumns]) {
    if (args.weight.data == nullptr) return;
#pragma unroll
    for (int j = 0; j < kColumns; j += kEach) {
      acc_t w[kEach];
      unpack<acc_t, kEach>(load_shared<kEach * sizeof(acc_t)>(weight_place(k, j)), w);
#pragma unroll
      for (int i = 0; i < kEach; ++i) g[j + i] *= w[i];
    }
  };
  const acc_t per_column = 1 / static_cast<acc_t>(cols);
  acc_t grad_weight[kUnits][kColumns] = {}, grad_bias[kUnits][kColumns] = {};

  // ---- The ring ----
  const int segments = static_cast<int>(blockDim.x) / group.width;
  const int segment = in_block / group.width;
  const int stage_bytes = kUnits * segments * (group.width + 1) * (kX + kG);
  const auto place = [&](int stage, int k, int bytes) {
    return ring + stage * stage_bytes + (k * segments + segment) * (group.width + 1) * bytes;
  };
  const auto grad_place = [&](int stage, int k) {
    return place(stage, k, kG) + kUnits * segments * (group.width + 1) * kX;
  };
  const int64_t row_step = args.groups * args.rows_per_block;
  const auto input_of = [&](int64_t row) {
    return static_cast<const char*>(args.input.data) +
           row_offset(args.input, row) * static_cast<int>(sizeof(T));
  };
  const auto grad_output_of = [&](int64_t row) {
    return static_cast<const char*>(args.grad_output.data) +
           row_offset(args.grad_output, row) * static_cast<int>(sizeof(G));
  };
  // grad_residual_out is read where it is added: a ring of three tensors would not fit into 99 KB,
  // and a row held ahead made kernels spill. It is brought as far as L2 ahead.
  const auto more_of = [&](int64_t row, int col) -> const char* {
    if constexpr (kSplits) {
      return static_cast<const char*>(args.grad_residual_out.data) +
             (row_offset(args.grad_residual_out, row) + col) * int{sizeof(T)};
    }
    return nullptr;
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < args.rows) {
      const char *const x = input_of(row), *const g = grad_output_of(row);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const int col = column(k), left = cols - col;
        copy_unit<sizeof(T), kX>(place(stage, k, kX), group.lane, group.width,
                                 x + static_cast<int64_t>(col) * static_cast<int>(sizeof(T)), left,
                                 args.input_source);
        copy_unit<sizeof(G), kG>(grad_place(stage, k), group.lane, group.width,
                                 g + static_cast<int64_t>(col) * static_cast<int>(sizeof(G)), left,
                                 args.grad_output_source);
        if constexpr (kSplits) {
          if (args.grad_residual_out.data != nullptr && left > 0) prefetch(more_of(row, col));
        }
      }
    }
    commit_copies();
  };
  const auto statistic = [&](const void* from, int64_t row) {
    return from != nullptr && row < args.rows
               ? value_of<acc_t>(load_global<sizeof(acc_t)>(static_cast<const acc_t*>(from) + row))
               : acc_t(0);
  };

  int64_t row_index = group_index * args.rows_per_block + group.slot;
  for (int s = 0; s + 1 < args.stages; ++s) fetch(row_index + s * row_step, s);
  acc_t next_mean = statistic(args.mean, row_index), next_rstd = statistic(args.rstd, row_index);
  int stage = 0, next_stage = args.stages - 1;

  // The block's slots take equally many steps: the warps stay together.
  for (; row_index - group.slot < args.rows; row_index += row_step) {
    const bool active = row_index < args.rows;
    const int row_cols = active ? cols : 0;
    fetch(row_index + (args.stages - 1) * row_step, next_stage);
    next_stage = next_stage + 1 == args.stages ? 0 : next_stage + 1;
    BackwardRow<acc_t> row = {next_mean, next_rstd, acc_t(-0.0), 0, 0, 0};
    next_mean = statistic(args.mean, row_index + row_step);
    next_rstd = statistic(args.rstd, row_index + row_step);

    // Out of the ring.
    Chunk<kX> x_raw[kUnits];
    Chunk<kG> g_raw[kUnits];
    int x_head = 0, g_head = 0;  // units lie a multiple of their bytes apart: one head for all
    if (!args.input_source.exact && active) x_head = head_of<kX>(input_of(row_index));
    if (!args.grad_output_source.exact && active) g_head = head_of<kG>(grad_output_of(row_index));
    wait_for_oldest(args.stages);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int left = row_cols - column(k);
      x_raw[k] = staged_unit<sizeof(T), kX>(place(stage, k, kX), group.lane, x_head, left,
                                            args.input_source.exact);
      g_raw[k] = staged_unit<sizeof(G), kG>(grad_place(stage, k), group.lane, g_head, left,
                                            args.grad_output_source.exact);
    }
    __syncwarp();  // before the place is filled again
    stage = stage + 1 == args.stages ? 0 : stage + 1;

    const bool ordinary = row.rstd >= static_cast<acc_t>(Range<acc_t>::kTiny) &&
                          row.rstd <= static_cast<acc_t>(1 / Range<acc_t>::kTiny);
    if (!ordinary && active) {
      Source source = args.input_source;
      source.data = input_of(row_index);
      extreme_row<T, kColumns>(source, group, args, &row);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        acc_t x[kColumns];
        unpack<T, kColumns>(x_raw[k], x);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) x[j] = std::ldexp(x[j], -row.exponent);
        x_raw[k] = pack<T, kColumns>(x);
      }
    }

    // The row's sums: LayerNorm of t, g and g * t with t = (x - mean) * rstd, RMSNorm of g * x_hat.
    acc_t sums[3] = {};
    if constexpr (kPhase != Phase::kApply) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        with_columns<kColumns>(row_cols - column(k), [&](auto columns) {
          acc_t x[kColumns], g[kColumns];
          unpack<T, kColumns>(x_raw[k], x);
          unpack<G, kColumns>(g_raw[k], g);
          times_weight(k, g);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const acc_t gw = columns.has(j) ? g[j] : 0;
            const acc_t t = columns.has(j) ? (x[j] - row.mean) * row.rstd : 0;
            sums[0] += t;  // of RMSNorm not used, nor is the next
            sums[1] += gw;
            sums[2] = Math::mul_add(gw, t, sums[2]);
          }
        });
      }
    }
    acc_t* const row_sums = static_cast<acc_t*>(args.row_sums) + row_index * 3 * group.warps;
    if constexpr (kPhase == Phase::kSums) {
      reduce_lanes<Sum>(0xffffffffu, group.width, sums);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (active && group.lane == 0) {
          store_global<sizeof(acc_t)>(row_sums + i * group.warps + (group.thread >> 5),
                                      chunk_of(sums[i]));
        }
      }
      continue;
    } else if constexpr (kPhase == Phase::kApply) {
      reduce_warps<Sum>(group, sums, [&](int i) {
        return value_of<acc_t>(load_global<sizeof(acc_t)>(row_sums + i));
      });
    } else {
      all_reduce<Sum>(group, sums);
    }
    if (args.centered) {
      const acc_t shift = sums[0] * per_column;
      row.minus_shift_rstd = -shift;
      row.mean_g = sums[1] * per_column;
      sums[2] = Math::mul_add(-shift, sums[1], sums[2]);
    }
    row.minus_projection =
        -projection_of(sums[2], row.rstd, kRounding, static_cast<acc_t>(cols),
                       row.exponent == 0 ? args.params : scaled(args.params, row.exponent));

    // Apply.
    const int64_t first = (active ? row_index : 0) * args.cols;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      Chunk<kColumns * sizeof(grad_t)> unit = {};
      Chunk<kX> residual_unit = {};
      const int left = row_cols - column(k);
      Chunk<kX> more_raw = {};
      if constexpr (kSplits) {
        if (args.grad_residual_out.data != nullptr && left > 0) {
          const char* const p = more_of(row_index, column(k));
          more_raw = args.grad_residual_out_source.exact
                         ? load_global<kX>(p)
                         : load_unit<sizeof(T), kX>(p, left, args.grad_residual_out_source);
        }
      }
      if (left > 0) {
        acc_t x[kColumns], g[kColumns];
        forget(x_raw[k]);
        forget(g_raw[k]);
        unpack<T, kColumns>(x_raw[k], x);
        unpack<G, kColumns>(g_raw[k], g);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          x[j] =
              normalize<LayerNormStatistics, Math>(x[j], row.mean, row.rstd, row.minus_shift_rstd);
          // Columns beyond the row gather what is never stored.
          grad_weight[k][j] =
              Math::mul_add(g[j], args.round_x_hat ? round_trip<T>(x[j]) : x[j], grad_weight[k][j]);
          grad_bias[k][j] += g[j];
        }
        times_weight(k, g);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          g[j] = grad_input<LayerNormStatistics, Math>(g[j], x[j], row.mean_g, row.minus_projection,
                                                       row.rstd);
        }
        if (row.exponent != 0) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) g[j] = std::ldexp(g[j], -row.exponent);
        }
        if constexpr (kSplits) {
          acc_t more[kColumns];
          unpack<T, kColumns>(more_raw, more);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) g[j] += more[j];
        }
        unit = pack<grad_t, kColumns>(g);
        if constexpr (kSplits) {
          const acc_t alpha = static_cast<acc_t>(args.alpha);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) g[j] *= alpha;
          residual_unit = pack<T, kColumns>(g);
        }
      }
      const int64_t at = first + column(k);
      if (args.grad_input != nullptr) {
        store_unit<sizeof(grad_t)>(static_cast<char*>(args.grad_input) + at * int{sizeof(grad_t)},
                                   unit, left, args.grad_input_exact, group.lane, group.width);
      }
      if constexpr (kSplits) {
        if (args.grad_residual != nullptr) {
          store_unit<sizeof(T)>(static_cast<char*>(args.grad_residual) + at * int{sizeof(T)},
                                residual_unit, left, args.grad_residual_exact, group.lane,
                                group.width);
        }
      }
    }
  }

  wait_copies<0>();
  if constexpr (kPhase == Phase::kSums) return;
  if (args.partials == nullptr) return;
  __syncthreads();  // the ring is empty
  const int64_t stride = partial_stride(args.cols);
  acc_t* partial = static_cast<acc_t*>(args.partials) +
                   group_index * (args.grad_weight + args.grad_bias) * stride;
  if (args.grad_weight) {
    store_partial(grad_weight, group, partial, cols, ring);
    partial += stride;
  }
  if (args.grad_bias) store_partial(grad_bias, group, partial, cols, ring);
}

}  // namespace fusednorm::cuda
