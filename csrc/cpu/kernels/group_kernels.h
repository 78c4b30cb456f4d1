// The torch-free interface of the CPU kernels of GroupNorm. row_kernels.h has that of the row
// norms.
//
// A group of one sample is a row of row_norm.h: `group_channels * spatial` elements, normalized
// together; weight and bias belong to channels.
#pragma once

#include <cstdint>

#include "maths/row_norm.h"

namespace fusednorm::cpu {

/// Runs loops on the caller's threads, so that kernels need know no thread library.
struct Parallel {
  using Body = void (*)(void* context, int64_t begin, int64_t end);
  int threads = 1;
  /// body(context, begin, end) for [0, count) in parts of at least `grain`; one part, here, when
  /// called by a body.
  void (*run)(int64_t count, int64_t grain, Body body, void* context) = nullptr;
};

/// Dense memory: [samples, groups, group_channels, spatial], or with channels_last
/// [samples, spatial, groups, group_channels]. No size is 0.
struct GroupShape {
  int64_t samples = 0, groups = 0, group_channels = 0, spatial = 0;
  bool channels_last = false;

  int64_t channels() const { return groups * group_channels; }
  int64_t cols() const { return group_channels * spatial; }
  int64_t sample_size() const { return groups * group_channels * spatial; }
};

struct GroupForwardArgs {
  GroupShape shape;
  const void* input = nullptr;
  void* output = nullptr;        // laid out as the input
  void* mean = nullptr;          // accumulation type, [samples, groups]; null: not wanted
  void* rstd = nullptr;          // likewise
  const void* weight = nullptr;  // accumulation type, one a channel; null: 1, and then no bias
  const void* bias = nullptr;    // likewise; not null where there is a weight
  NormParams params;
  bool past_caches = false;  // the caches hold less than input and output
};

struct GroupBackwardArgs {
  GroupShape shape;
  const void* grad_output = nullptr;  // laid out as the input, of its dtype
  const void* input = nullptr;
  const void* mean = nullptr;    // accumulation type, [samples, groups]
  const void* rstd = nullptr;    // likewise
  const void* weight = nullptr;  // accumulation type, one a channel; null: 1
  void* grad_input = nullptr;    // laid out as the input; null: not wanted
  void* grad_weight = nullptr;   // one a channel; null: not wanted
  void* grad_bias = nullptr;     // likewise
  DType grad_weight_dtype = DType::kFloat32, grad_bias_dtype = DType::kFloat32;
  NormParams params;
  bool past_caches = false;  // as in GroupForwardArgs
};

using GroupForwardKernel = void (*)(const GroupForwardArgs&, const Parallel&);
using GroupBackwardKernel = void (*)(const GroupBackwardArgs&, const Parallel&);

struct GroupKernelTable {
  GroupForwardKernel forward[kNumDTypes];
  GroupBackwardKernel backward[kNumDTypes];
};

}  // namespace fusednorm::cpu
