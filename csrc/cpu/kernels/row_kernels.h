// The torch-free interface of the CPU kernels: plain pointers, sizes, an enum of dtypes.
//
// One source, row_kernels.cpp, is compiled once for each instruction set; kernel_table.cpp picks
// one of the tables at run time.
#pragma once

#include <cstdint>

#include "../../row_norm.h"
#include "../../rows.h"
#include "group_kernels.h"

namespace fusednorm::cpu {

struct ForwardArgs {
  RowLayout input;
  void* output = nullptr;        // contiguous, of the input's dtype
  void* mean = nullptr;          // accumulation type, one a row; null: not wanted
  void* rstd = nullptr;          // likewise
  const void* weight = nullptr;  // accumulation type, weight offset included; null: 1
  const void* bias = nullptr;    // accumulation type; null: 0. Needs a weight.
  int64_t cols = 0;
  NormParams params;
  /// What x_hat is rounded to before the product with the weight ("llama" casting mode); kFloat64
  /// and kFloat32: to nothing.
  DType round_x_hat = DType::kFloat64;
};

struct BackwardArgs {
  RowLayout grad_output;  // of the input's dtype
  RowLayout input;
  const void* mean = nullptr;    // contiguous, accumulation type; RMSNorm: null
  const void* rstd = nullptr;    // contiguous, accumulation type
  const void* weight = nullptr;  // accumulation type, weight offset included; never null
  void* grad_input = nullptr;    // contiguous, of the input's dtype; null: not wanted
  int64_t cols = 0;
  NormParams params;
  DType round_x_hat = DType::kFloat64;  // for grad_weight only
};

/// Normalizes rows [row_begin, row_end).
using ForwardKernel = void (*)(const ForwardArgs&, int64_t row_begin, int64_t row_end);

/// grad_input of rows [row_begin, row_end), and the sums over these rows added to grad_weight and
/// grad_bias (cols elements of the accumulation type each; null: not wanted).
using BackwardKernel = void (*)(const BackwardArgs&, int64_t row_begin, int64_t row_end,
                                void* grad_weight, void* grad_bias);

/// out[i] = (accumulation type) in[i] + offset, for a weight or bias of any dtype.
using ConvertKernel = void (*)(DType from, const void* in, double offset, void* out, int64_t count);

/// out[c] = sum over p of partials[p * stride + c], summed in double in the order of p, for columns
/// [col_begin, col_end), rounded once to `to`.
using ReduceKernel = void (*)(const void* partials, int64_t count, int64_t stride, DType to,
                              void* out, int64_t col_begin, int64_t col_end);

struct KernelTable {
  const char* name;
  ForwardKernel layer_norm_forward[kNumDTypes];
  ForwardKernel rms_norm_forward[kNumDTypes];
  BackwardKernel layer_norm_backward[kNumDTypes];
  BackwardKernel rms_norm_backward[kNumDTypes];
  ConvertKernel convert[2];  // to fp64, to fp32
  ReduceKernel reduce[2];    // from fp64, from fp32
  GroupKernelTable group_norm;
};

constexpr int kMaxTables = 4;

/// Every table this machine can run, the widest first; returns their number. The last is portable.
int runnable_tables(const KernelTable* (&tables)[kMaxTables]);

/// The widest table this machine can run that `capability` allows ("AVX512", "AVX2", anything else:
/// portable), as at::get_cpu_capability() spells it.
const KernelTable& kernel_table(const char* capability);

}  // namespace fusednorm::cpu
