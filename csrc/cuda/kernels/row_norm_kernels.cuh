// Forward: a row's statistics, then its output, from registers, shared memory or global memory.
#pragma once

#include "all_reduce.cuh"
#include "row_access.cuh"

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

// ---- Where a row stays ----
// Each gives for_units(f): f(column, load) for each of the thread's units, in the same order in
// each pass; load(v) gives its values, 0 for columns beyond the row (after rescale: times
// 2^-exponent). add_residual.cuh has those that are sums.

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

// ---- Statistics ----

template <class acc_t>
struct RowStatistics {
  acc_t mean;  // 0 for RMSNorm
  acc_t rstd;
  acc_t minus_shift_rstd;  // see row_norm.h
  acc_t variance;
  bool extreme;  // squares over- or underflowed, or the row is not finite
};

constexpr int kAccumulators = 4;  // independent chains of additions of a thread

template <class acc_t>
__device__ __forceinline__ acc_t sum_of(const acc_t (&a)[kAccumulators]) {
  return (a[0] + a[1]) + (a[2] + a[3]);
}

/// Two passes: the mean; then the deviations from it and their squares. The mean of the deviations
/// is what the first mean is off by: it takes its share out of the variance and mends the mean, so
/// that of a constant row nothing is left.
template <class acc_t, class Row>
__device__ __forceinline__ RowStatistics<acc_t> row_statistics(bool centered, Row& row,
                                                               Group& group, int cols,
                                                               const NormParams& params) {
  constexpr int kColumns = Row::kColumns;
  const acc_t count = static_cast<acc_t>(cols);
  RowStatistics<acc_t> result = {};
  acc_t squares;
  if (centered) {
    acc_t sum[kAccumulators] = {};
    row.for_units([&](int64_t, auto load) {
      acc_t v[kColumns];
      load(v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[j % kAccumulators] += v[j];
    });
    acc_t total[1] = {sum_of(sum)};
    all_reduce<Sum>(group, total);
    result.mean = total[0] / count;
    acc_t deviation[kAccumulators] = {}, square[kAccumulators] = {};
    row.for_units([&](int col, auto load) {
      acc_t v[kColumns];
      load(v);
      with_columns<kColumns>(cols - col, [&](auto columns) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const acc_t d = columns.has(j) ? v[j] - result.mean : 0;
          deviation[j % kAccumulators] += d;
          square[j % kAccumulators] = Math::mul_add(d, d, square[j % kAccumulators]);
        }
      });
    });
    acc_t sums[2] = {sum_of(deviation), sum_of(square)};
    all_reduce<Sum>(group, sums);
    const acc_t shift = sums[0] / count, first = result.mean;
    squares = Math::mul_add(-sums[0], shift, sums[1]);
    if (squares < 0) squares = 0;
    result.mean = first + shift;
    result.minus_shift_rstd = -((first - result.mean) + shift);  // times rstd below
    result.extreme = !(sums[1] <= static_cast<acc_t>(Range<acc_t>::kHuge));
  } else {
    acc_t square[kAccumulators] = {};
    row.for_units([&](int64_t, auto load) {
      acc_t v[kColumns];
      load(v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        square[j % kAccumulators] = Math::mul_add(v[j], v[j], square[j % kAccumulators]);
      }
    });
    acc_t sums[1] = {sum_of(square)};
    all_reduce<Sum>(group, sums);
    squares = sums[0];
    result.extreme = !(squares <= static_cast<acc_t>(Range<acc_t>::kHuge));
  }
  result.variance = variance_of(squares, count, params);
  result.rstd = reciprocal_deviation(result.variance, params);
  // Of RMSNorm -0: added to a product, it changes no bit, not even the sign of a 0.
  result.minus_shift_rstd = centered ? result.minus_shift_rstd * result.rstd : acc_t(-0.0);
  result.extreme |=
      !(variance_floor(result.variance, params) >= static_cast<acc_t>(Range<acc_t>::kTiny));
  return result;
}

/// The exponent that brings an extreme row's values, and eps with them, below 1; 0 where that would
/// not help: a row with an infinity, or of zeros with eps 0. NaN stays NaN at any scale.
template <class acc_t, class Row>
__device__ __forceinline__ int scaling_exponent(Row& row, Group& group, const NormParams& params) {
  const acc_t eps = std::fabs(static_cast<acc_t>(params.eps));
  acc_t largest[1] = {params.eps_scales_as_x() ? eps : std::sqrt(eps)};
  row.for_units([&](int64_t, auto load) {
    acc_t v[Row::kColumns];
    load(v);
#pragma unroll
    for (int j = 0; j < Row::kColumns; ++j)
      largest[0] = Max::of(acc_t(std::fabs(v[j])), largest[0]);
  });
  all_reduce<Max>(group, largest);
  if (largest[0] == 0 || std::isinf(largest[0])) return 0;
  return std::ilogb(largest[0]) + 1;
}

template <class acc_t>
FN_HOST_DEVICE acc_t power_of_two_times(acc_t value, int exponent) {
  return exponent == 0 ? value : std::ldexp(value, exponent);
}

FN_HOST_DEVICE NormParams scaled(NormParams params, int exponent) {
  params.eps = std::ldexp(params.eps, (params.eps_scales_as_x() ? -1 : -2) * exponent);
  return params;
}

// ---- Forward ----

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

// ---- The sums over groups of rows, added up ----

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
