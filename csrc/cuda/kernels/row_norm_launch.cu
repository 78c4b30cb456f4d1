// From a plan to the kernel compiled for it. Built once for each pair of dtypes:
// FUSEDNORM_IN and FUSEDNORM_OTHER (of output or grad_output) name them.
//
// Kernels of a pair and an architecture: forward 2 norms x (6 register kernels, or 4 of twice the
// unit, + 2 loop kernels), backward 2 norms x (2 + 2 of two launches), one that reduces: 25 or 21.
// With 6 pairs 150 or 126, and 72 or 96 empty ones, of the other unit size.
#include "row_norm_backward.cuh"
#include "row_norm_kernels.cuh"
#include "row_norm_launch.h"

namespace fusednorm::cuda {
namespace {

template <DType kDType>
struct TypeOf;
template <>
struct TypeOf<DType::kFloat64> {
  using type = double;
};
template <>
struct TypeOf<DType::kFloat32> {
  using type = float;
};
template <>
struct TypeOf<DType::kBFloat16> {
  using type = __nv_bfloat16;
};
template <>
struct TypeOf<DType::kFloat16> {
  using type = __half;
};

template <class Args>
LaunchResult launch(void (*kernel)(Args), const Args& args, const LaunchShape& shape,
                    CUstream_st* stream) {
  return {static_cast<int>(launch_kernel(kernel, args, shape, stream)), shape};
}

template <class Statistics, class T, class Out, int kUnitBytes, int kUnits>
LaunchResult forward_in_registers(const ForwardArgs& args, const LaunchShape& shape,
                                  CUstream_st* stream) {
  constexpr int kColumns = kUnitBytes / (sizeof(T) > sizeof(Out) ? sizeof(T) : sizeof(Out));
  constexpr int kHeld = kUnits * kUnitBytes;
  return launch(
      row_norm_forward<Statistics, T, Out, kUnitBytes, RegisterRow<T, kColumns, kUnits>,
                       forward_max_threads(kHeld), forward_min_blocks(kHeld, sizeof(acc_of<T>))>,
      args, shape, stream);
}

template <class Statistics, class T, class Out, int kUnitBytes, bool kShared>
LaunchResult forward_in_loops(const ForwardArgs& args, const LaunchShape& shape,
                              CUstream_st* stream) {
  constexpr int kColumns = kUnitBytes / (sizeof(T) > sizeof(Out) ? sizeof(T) : sizeof(Out));
  return launch(row_norm_forward<Statistics, T, Out, kUnitBytes, LoopRow<T, kColumns, kShared>,
                                 kLoopThreads, 1>,
                args, shape, stream);
}

template <class Statistics, class T, class Out, int kUnitBytes>
LaunchResult forward(const ForwardPlan& plan, const ForwardArgs& args, CUstream_st* stream) {
  // Fits a grid's 2^31 - 1: a row with a block of its own has over 4 KB.
  const int64_t blocks = ceil_div(args.rows, plan.rows_per_block) * plan.cluster;
  LaunchShape shape = {"row_norm_forward (registers)", static_cast<unsigned>(blocks),
                       static_cast<unsigned>(plan.threads), static_cast<unsigned>(plan.cluster),
                       static_cast<unsigned>(plan.shared_bytes)};
  if (plan.residence == Residence::kShared) {
    shape.kernel = "row_norm_forward (shared memory)";
    return forward_in_loops<Statistics, T, Out, kUnitBytes, true>(args, shape, stream);
  }
  if (plan.residence == Residence::kStreaming) {
    shape.kernel = "row_norm_forward (streaming)";
    return forward_in_loops<Statistics, T, Out, kUnitBytes, false>(args, shape, stream);
  }
  switch (plan.units) {
    case 1:
      return forward_in_registers<Statistics, T, Out, kUnitBytes, 1>(args, shape, stream);
    case 2:
      return forward_in_registers<Statistics, T, Out, kUnitBytes, 2>(args, shape, stream);
    case 3:
      return forward_in_registers<Statistics, T, Out, kUnitBytes, 3>(args, shape, stream);
    case 4:
      return forward_in_registers<Statistics, T, Out, kUnitBytes, 4>(args, shape, stream);
    case 6:
      if constexpr (kUnitBytes == 16) {
        return forward_in_registers<Statistics, T, Out, kUnitBytes, 6>(args, shape, stream);
      }
      break;
    default:
      if constexpr (kUnitBytes == 16) {
        return forward_in_registers<Statistics, T, Out, kUnitBytes, 8>(args, shape, stream);
      }
  }
  return {static_cast<int>(cudaErrorInvalidValue), shape};
}

template <class Statistics, class T, class G, int kUnits, Phase kPhase>
LaunchResult backward_in(const BackwardArgs& args, LaunchShape shape, CUstream_st* stream) {
  shape.kernel = kPhase == Phase::kWhole  ? "row_norm_backward"
                 : kPhase == Phase::kSums ? "row_norm_backward (sums)"
                                          : "row_norm_backward (apply)";
  return launch(row_norm_backward<Statistics, T, G, kUnits, kPhase>, args, shape, stream);
}

template <class Statistics, class T, class G>
LaunchResult backward(const BackwardPlan& plan, const BackwardArgs& args, CUstream_st* stream) {
  const LaunchShape shape = {"", static_cast<unsigned>(plan.groups * plan.blocks_per_row),
                             static_cast<unsigned>(plan.threads),
                             static_cast<unsigned>(plan.cluster),
                             static_cast<unsigned>(plan.shared_bytes)};
  if (plan.cluster < plan.blocks_per_row) {
    const LaunchResult sums =
        backward_in<Statistics, T, G, kBackwardUnits, Phase::kSums>(args, shape, stream);
    if (sums.error != 0) return sums;
    return backward_in<Statistics, T, G, kBackwardUnits, Phase::kApply>(args, shape, stream);
  }
  return plan.units == 1
             ? backward_in<Statistics, T, G, 1, Phase::kWhole>(args, shape, stream)
             : backward_in<Statistics, T, G, kBackwardUnits, Phase::kWhole>(args, shape, stream);
}

}  // namespace

template <DType kIn, DType kOut>
LaunchResult launch_forward(bool centered, const ForwardPlan& plan, const ForwardArgs& args,
                            CUstream_st* stream) {
  using T = typename TypeOf<kIn>::type;
  using Out = typename TypeOf<kOut>::type;
  if (plan.unit_bytes == 32) {
    return centered ? forward<LayerNormStatistics, T, Out, 32>(plan, args, stream)
                    : forward<RmsNormStatistics, T, Out, 32>(plan, args, stream);
  }
  return centered ? forward<LayerNormStatistics, T, Out, 16>(plan, args, stream)
                  : forward<RmsNormStatistics, T, Out, 16>(plan, args, stream);
}

template <DType kIn, DType kGrad>
LaunchResult launch_backward(bool centered, const BackwardPlan& plan, const BackwardArgs& args,
                             const ReduceArgs& reduce, CUstream_st* stream) {
  using T = typename TypeOf<kIn>::type;
  using G = typename TypeOf<kGrad>::type;
  LaunchResult result = {};
  if (args.rows > 0) {
    result = centered ? backward<LayerNormStatistics, T, G>(plan, args, stream)
                      : backward<RmsNormStatistics, T, G>(plan, args, stream);
  }
  if (reduce.parameters == 0 || result.error != 0) return result;
  constexpr int kThreads = kReduceColumns * kReduceLines;
  const LaunchShape shape = {
      "reduce_partials",
      static_cast<unsigned>(ceil_div(reduce.cols, kReduceColumns) * reduce.parameters), kThreads, 1,
      static_cast<unsigned>(kThreads * sizeof(acc_of<T>))};
  return launch(reduce_partials<acc_of<T>>, reduce, shape, stream);
}

template <DType kIn, DType kOther>
bool grants_cluster(int blocks) {
  using T = typename TypeOf<kIn>::type;
  using G = typename TypeOf<kOther>::type;
  const auto plan = backward_plan(1, 1 << 24, kIn, kOther, true, architecture(90));
  return max_clusters(row_norm_backward<LayerNormStatistics, T, G, kBackwardUnits, Phase::kWhole>,
                      {"", static_cast<unsigned>(blocks), kBackwardThreads,
                       static_cast<unsigned>(blocks), static_cast<unsigned>(plan.shared_bytes)}) >
         0;
}

template bool grants_cluster<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(int);
template LaunchResult launch_forward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    bool, const ForwardPlan&, const ForwardArgs&, CUstream_st*);
template LaunchResult launch_backward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    bool, const BackwardPlan&, const BackwardArgs&, const ReduceArgs&, CUstream_st*);

}  // namespace fusednorm::cuda
