// Forward: a row's statistics, then its output, from registers, shared memory or global memory.
#pragma once

#include "parameters.cuh"
#include "row_statistics.cuh"

namespace fusednorm::cuda {

/// Kernels for 16-byte and 32-byte units are both compiled for every architecture, one of them
/// empty.
template <int kUnitBytes>
constexpr bool runs_here() {
#if defined(__CUDA_ARCH__)
  return kUnitBytes == (__CUDA_ARCH__ >= 1000 ? 32 : 16);
#else
  return true;
#endif
}

/// x_hat * (weight + offset) + bias, each where it is there. Both are on their way before either is
/// needed. (Fetched a unit ahead they took 32 registers more, and kernels spilled.)
template <int kColumns, class acc_t>
__device__ __forceinline__ void apply_parameters(const ForwardArgs& args, int64_t col, int64_t left,
                                                 acc_t (&v)[kColumns]) {
  ParameterUnit<kColumns, acc_t> weight, bias;
  weight.fetch(args.weight, col, left);
  bias.fetch(args.bias, col, left);
  acc_t w[kColumns], b[kColumns];
  if (args.weight.data != nullptr) {
    weight.values(args.weight, w);
    if (args.has_offset) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) w[j] += static_cast<acc_t>(args.weight_offset);
    }
  }
  if (args.bias.data != nullptr) {
    bias.values(args.bias, b);
    if (args.weight.data != nullptr) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = Math::mul_add(v[j], w[j], b[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] += b[j];
    }
  } else if (args.weight.data != nullptr) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) v[j] *= w[j];
  }
}

template <class T, class Out, int kUnitBytes, class Row, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_norm_forward(const typename Row::Args args) {
  if constexpr (runs_here<kUnitBytes>()) {
    using acc_t = acc_of<T>;
    constexpr int kColumns = Row::kColumns, kOut = sizeof(Out);
    // Rows of up to 32 threads share warps; longer ones have the block to themselves.
    const unsigned in_block = threadIdx.x;
    const int slot = args.threads_per_row <= 32 ? in_block >> args.log2_threads : 0;
    const int block_threads = args.threads_per_row >> args.log2_cluster;
    const int rank = args.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    Group group = make_group(args.threads_per_row, block_threads, in_block - slot * block_threads,
                             rank, slot, 1, args.cluster, sizeof(acc_t), shared_memory());

    const int64_t row =
        static_cast<int64_t>(blockIdx.x >> args.log2_cluster) * args.rows_per_block + slot;
    const bool active = row < args.rows;
    const int cols = active ? static_cast<int>(args.cols) : 0;
    constexpr bool kAdds = std::is_same_v<typename Row::Args, AddForwardArgs>;
    Row data;
    if constexpr (kAdds) {
      data.fetch(args, active ? row : 0, cols, group);
    } else {
      Source source = args.source;
      source.data = static_cast<const char*>(args.input.data) +
                    (active ? row_offset(args.input, row) : 0) * static_cast<int>(sizeof(T));
      data.fetch(source, cols, group, args.units, group.memory);
    }
    if (args.cluster > 1) cluster_barrier();  // the others have started, and their memory is there

    RowStatistics<acc_t> statistics =
        row_statistics<acc_t>(args.centered, data, group, cols, args.params);
    int exponent = 0;
    acc_t saved_rstd = statistics.rstd;
    if (statistics.extreme && active) {
      group.mask = lanes_of(group);  // other rows of the warp go on
      exponent = scaling_exponent<acc_t>(data, group, args.params);
      if (exponent != 0) {
        data.rescale(exponent);
        statistics =
            row_statistics<acc_t>(args.centered, data, group, cols, scaled(args.params, exponent));
      }
      saved_rstd = power_of_two_times(statistics.rstd, -exponent);
      if (args.centered && statistics.variance == 0) {
        // A constant row: x - mean is 0 at any scale, and rstd a matter of eps alone; not 0 times
        // infinity where that is beyond acc_t.
        saved_rstd = reciprocal_deviation(acc_t(0), args.params);
        if (std::isinf(saved_rstd) && args.params.eps > 0) {
          saved_rstd = static_cast<acc_t>(Range<acc_t>::kHuge);
        }
        statistics.rstd = saved_rstd;
        statistics.minus_shift_rstd = 0;
      }
    }
    if (active && group.thread == 0) {
      if (args.mean != nullptr) {
        store_global<sizeof(acc_t)>(static_cast<acc_t*>(args.mean) + row,
                                    chunk_of(power_of_two_times(statistics.mean, exponent)));
      }
      if (args.rstd != nullptr) {
        store_global<sizeof(acc_t)>(static_cast<acc_t*>(args.rstd) + row, chunk_of(saved_rstd));
      }
    }

    char* const output = static_cast<char*>(args.output) + (active ? row : 0) * args.cols * kOut;
    if constexpr (kAdds) data.last_pass();
    data.for_units([&](int col, auto load) {
      const int left = cols - col;
      Chunk<kColumns* kOut> unit = {};
      if (left > 0) {
        acc_t v[kColumns];
        load(v);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          v[j] = normalize<LayerNormStatistics, Math>(v[j], statistics.mean, statistics.rstd,
                                                      statistics.minus_shift_rstd);
        }
        if (args.round_x_hat) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) v[j] = round_trip<T>(v[j]);
        }
        apply_parameters(args, col, left, v);
        unit = pack<Out, kColumns>(v);
      }
      store_unit<kOut>(output + static_cast<int64_t>(col) * kOut, unit, left, args.output_exact,
                       group.lane, group.width);
    });
  }
}

}  // namespace fusednorm::cuda
