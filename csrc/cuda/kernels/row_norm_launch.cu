// From a plan to the kernel compiled for it. Built once for each pair of dtypes:
// FUSEDNORM_IN and FUSEDNORM_OTHER (of output or grad_output) name them.
//
// Kernels of a pair and an architecture: forward 6 register kernels, or 4 of twice the unit, + 2
// loop kernels, backward 2 + 2 of two launches, one that reduces: 13 or 11. Of the residual add
// forward 6 or 4, + 1 loop, backward 3, and where its dtypes differ one that takes the sums of two
// launches: 10 or 8, or 11 or 9.
// With 6 pairs 140 or 116, and 66 or 90 empty ones, of the other unit size.
// Both norms are one kernel: two for each took 91 s in place of 65 for bf16.
#include "add_residual.cuh"
#include "row_norm_backward.cuh"
#include "row_norm_forward.cuh"
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

/// How rows come to the kernel: as they lie in memory, or (by these arguments) as sums.
template <class Args, class T, class Out, int kColumns>
struct Rows {
  template <int kUnits>
  using Registers = RegisterRow<T, kColumns, kUnits>;
  template <bool kShared>
  using Loops = LoopRow<T, kColumns, kShared>;
};
template <class T, class Out, int kColumns>
struct Rows<AddForwardArgs, T, Out, kColumns> {
  template <int kUnits>
  using Registers = AddRegisterRow<T, Out, kColumns, kUnits>;
  template <bool>
  using Loops = AddLoopRow<T, Out, kColumns>;
};

template <class T, class Out, int kUnitBytes>
constexpr int kColumnsOf = kUnitBytes / (sizeof(T) > sizeof(Out) ? sizeof(T) : sizeof(Out));

template <class T, class Out, int kUnitBytes, bool kShared, class Args>
LaunchResult forward_in_loops(const Args& args, const LaunchShape& shape, CUstream_st* stream) {
  using Row = typename Rows<Args, T, Out, kColumnsOf<T, Out, kUnitBytes>>::template Loops<kShared>;
  return launch(row_norm_forward<T, Out, kUnitBytes, Row, kLoopThreads, 1>, args, shape, stream);
}

template <class T, class Out, int kUnitBytes, int kUnits, class Args>
LaunchResult forward_in_registers(const Args& args, const LaunchShape& shape, CUstream_st* stream) {
  using Row =
      typename Rows<Args, T, Out, kColumnsOf<T, Out, kUnitBytes>>::template Registers<kUnits>;
  constexpr int kHeld = kUnits * kUnitBytes;
  constexpr bool kAdds = std::is_same_v<Args, AddForwardArgs>;
  constexpr int kBlocks = kAdds ? add_forward_min_blocks(kHeld, sizeof(acc_of<T>))
                                : forward_min_blocks(kHeld, sizeof(acc_of<T>));
  if constexpr (kAdds && kHeld == 128) {
    if (!sums_are_exact(args)) {
      return forward_in_loops<T, Out, kUnitBytes, false>(args, shape, stream);
    }
  }
  return launch(row_norm_forward<T, Out, kUnitBytes, Row, forward_max_threads(kHeld), kBlocks>,
                args, shape, stream);
}

template <class T, class Out, int kUnitBytes, class Args>
LaunchResult forward(const ForwardPlan& plan, const Args& args, CUstream_st* stream) {
  // Fits a grid's 2^31 - 1: a row with a block of its own has over 4 KB.
  const int64_t blocks = ceil_div(args.rows, plan.rows_per_block) * plan.cluster;
  LaunchShape shape = {"row_norm_forward (registers)", static_cast<unsigned>(blocks),
                       static_cast<unsigned>(plan.threads), static_cast<unsigned>(plan.cluster),
                       static_cast<unsigned>(plan.shared_bytes)};
  if (plan.residence == Residence::kShared) {
    shape.kernel = "row_norm_forward (shared memory)";
    return forward_in_loops<T, Out, kUnitBytes, true>(args, shape, stream);
  }
  if (plan.residence == Residence::kStreaming) {
    shape.kernel = "row_norm_forward (streaming)";
    return forward_in_loops<T, Out, kUnitBytes, false>(args, shape, stream);
  }
  switch (plan.units) {
    case 1:
      return forward_in_registers<T, Out, kUnitBytes, 1>(args, shape, stream);
    case 2:
      return forward_in_registers<T, Out, kUnitBytes, 2>(args, shape, stream);
    case 3:
      return forward_in_registers<T, Out, kUnitBytes, 3>(args, shape, stream);
    case 4:
      return forward_in_registers<T, Out, kUnitBytes, 4>(args, shape, stream);
    case 6:
      if constexpr (kUnitBytes == 16) {
        return forward_in_registers<T, Out, kUnitBytes, 6>(args, shape, stream);
      }
      break;
    default:
      if constexpr (kUnitBytes == 16) {
        return forward_in_registers<T, Out, kUnitBytes, 8>(args, shape, stream);
      }
  }
  return {static_cast<int>(cudaErrorInvalidValue), shape};
}

template <class T, class Out, class Args>
LaunchResult forward_of_units(const ForwardPlan& plan, const Args& args, CUstream_st* stream) {
  return plan.unit_bytes == 32 ? forward<T, Out, 32>(plan, args, stream)
                               : forward<T, Out, 16>(plan, args, stream);
}

template <class T, class G, class Store, int kUnits, Phase kPhase>
LaunchResult backward_in(const typename Store::Args& args, LaunchShape shape, CUstream_st* stream) {
  shape.kernel = kPhase == Phase::kWhole  ? "row_norm_backward"
                 : kPhase == Phase::kSums ? "row_norm_backward (sums)"
                                          : "row_norm_backward (apply)";
  return launch(row_norm_backward<T, G, kUnits, kPhase, Store>, args, shape, stream);
}

template <class T, class G, class Store>
LaunchResult backward(const BackwardPlan& plan, const typename Store::Args& args,
                      CUstream_st* stream) {
  const LaunchShape shape = {"", static_cast<unsigned>(plan.groups * plan.blocks_per_row),
                             static_cast<unsigned>(plan.threads),
                             static_cast<unsigned>(plan.cluster),
                             static_cast<unsigned>(plan.shared_bytes)};
  constexpr int kUnits = kBackwardUnits;
  if (plan.cluster < plan.blocks_per_row) {
    const LaunchResult sums =  // which store nothing
        backward_in<T, G, GradInputStore<T>, kUnits, Phase::kSums>(args, shape, stream);
    if (sums.error != 0) return sums;
    return backward_in<T, G, Store, kUnits, Phase::kApply>(args, shape, stream);
  }
  return plan.units == 1 ? backward_in<T, G, Store, 1, Phase::kWhole>(args, shape, stream)
                         : backward_in<T, G, Store, kUnits, Phase::kWhole>(args, shape, stream);
}

/// The gradient of the rows, then `reduce`.
template <class T, class G, class Store>
LaunchResult backward_and_reduce(const BackwardPlan& plan, const typename Store::Args& args,
                                 const ReduceArgs& reduce, CUstream_st* stream) {
  LaunchResult result = {};
  if (args.rows > 0) {
    result = backward<T, G, Store>(plan, args, stream);
  }
  if (reduce.parameters == 0 || result.error != 0) return result;
  constexpr int kThreads = kReduceColumns * kReduceLines;
  const LaunchShape shape = {
      "reduce_partials",
      static_cast<unsigned>(ceil_div(reduce.cols, kReduceColumns) * reduce.parameters), kThreads, 1,
      static_cast<unsigned>(kThreads * sizeof(acc_of<T>))};
  return launch(reduce_partials<acc_of<T>>, reduce, shape, stream);
}

}  // namespace

template <DType kIn, DType kOut>
LaunchResult launch_forward(const ForwardPlan& plan, const ForwardArgs& args, CUstream_st* stream) {
  return forward_of_units<typename TypeOf<kIn>::type, typename TypeOf<kOut>::type>(plan, args,
                                                                                   stream);
}

template <DType kIn, DType kResidual>
LaunchResult launch_add_forward(const ForwardPlan& plan, const AddForwardArgs& args,
                                CUstream_st* stream) {
  return forward_of_units<typename TypeOf<kResidual>::type, typename TypeOf<kIn>::type>(plan, args,
                                                                                        stream);
}

template <DType kIn, DType kGrad>
LaunchResult launch_backward(const BackwardPlan& plan, const BackwardArgs& args,
                             const ReduceArgs& reduce, CUstream_st* stream) {
  using T = typename TypeOf<kIn>::type;
  using G = typename TypeOf<kGrad>::type;
  return backward_and_reduce<T, G, GradInputStore<T>>(plan, args, reduce, stream);
}

template <DType kIn, DType kResidual>
LaunchResult launch_add_backward(const BackwardPlan& plan, const AddBackwardArgs& args,
                                 const ReduceArgs& reduce, CUstream_st* stream) {
  using T = typename TypeOf<kResidual>::type;
  using G = typename TypeOf<kIn>::type;
  return backward_and_reduce<T, G, SplitStore<G>>(plan, args, reduce, stream);
}

template <DType kIn, DType kOther>
bool grants_cluster(int blocks) {
  using T = typename TypeOf<kIn>::type;
  using G = typename TypeOf<kOther>::type;
  const auto plan = backward_plan(1, 1 << 24, kIn, kOther, true, architecture(90));
  return max_clusters(row_norm_backward<T, G, kBackwardUnits, Phase::kWhole, GradInputStore<T>>,
                      {"", static_cast<unsigned>(blocks), kBackwardThreads,
                       static_cast<unsigned>(blocks), static_cast<unsigned>(plan.shared_bytes)}) >
         0;
}

template bool grants_cluster<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(int);
template LaunchResult launch_forward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    const ForwardPlan&, const ForwardArgs&, CUstream_st*);
template LaunchResult launch_add_forward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    const ForwardPlan&, const AddForwardArgs&, CUstream_st*);
template LaunchResult launch_backward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    const BackwardPlan&, const BackwardArgs&, const ReduceArgs&, CUstream_st*);
template LaunchResult launch_add_backward<DType::FUSEDNORM_IN, DType::FUSEDNORM_OTHER>(
    const BackwardPlan&, const AddBackwardArgs&, const ReduceArgs&, CUstream_st*);

}  // namespace fusednorm::cuda
