// The torch-free interface of the CPU kernels: plain pointers, sizes, an enum of dtypes.
//
// A handful of sources (kernels.h) is compiled once for each instruction set; kernel_table.cpp
// picks one of the tables at run time.
#pragma once

#include <cstdint>

#include "group_kernels.h"
#include "maths/row_norm.h"
#include "maths/rows.h"

namespace fusednorm::cpu {

struct AddArgs;
struct SplitArgs;

struct ForwardArgs {
  RowLayout input;
  void* output = nullptr;        // contiguous, of the input's dtype
  void* mean = nullptr;          // accumulation type, one a row; null: not wanted
  void* rstd = nullptr;          // likewise
  const void* weight = nullptr;  // converted, weight offset included; null: 1
  const void* bias = nullptr;    // converted; null: 0
  int64_t cols = 0;
  NormParams params;
  /// What x_hat is rounded to before the product with the weight ("llama" casting mode); kFloat64
  /// and kFloat32: to nothing.
  DType round_x_hat = DType::kFloat64;
  /// The caches hold less than input and output: worth asking for the next rows early.
  bool ask_early = false;
  /// Weight and bias of more bytes, read again for each row, would drive the rows out of the first
  /// cache: half of one of 48 KB.
  int64_t crowding_bytes = 24 << 10;
  /// The fused add's residual; its own input, dtypes and cols are not read.
  const AddArgs* add = nullptr;
};

struct BackwardArgs {
  RowLayout grad_output;  // of the input's dtype
  RowLayout input;
  const void* mean = nullptr;    // contiguous, accumulation type; RMSNorm: null
  const void* rstd = nullptr;    // contiguous, accumulation type
  const void* weight = nullptr;  // converted, weight offset included; never null
  void* grad_input = nullptr;    // contiguous, of the input's dtype; null: not wanted
  int64_t cols = 0;
  NormParams params;
  DType round_x_hat = DType::kFloat64;  // for grad_weight only
  bool ask_early = false;               // as in ForwardArgs
  /// What is written is better not kept in the caches; where it does not lie on whole vectors it
  /// is.
  bool past_caches = false;
  /// The fused add's: what is added to the gradient, and grad_residual.
  const SplitArgs* split = nullptr;
};

/// residual_out = alpha * residual + input: one fused multiply-add in the wider accumulation type,
/// rounded once to the residual's dtype. residual_out may be the residual.
struct AddArgs {
  RowLayout input, residual;
  void* residual_out = nullptr;
  RowLayout residual_out_rows;  // where its rows lie; its own data is not read
  DType input_dtype = DType::kFloat32, residual_dtype = DType::kFloat32;
  int64_t cols = 0;
  double alpha = 1;
};

/// g = gradient + grad_residual_out, in the wider accumulation type; then grad_input = g and
/// grad_residual = alpha * g, each rounded once.
struct SplitArgs {
  const void* gradient = nullptr;  // contiguous, of the wider accumulation type
  RowLayout grad_residual_out;     // of the residual's dtype; data null: 0
  void* grad_input = nullptr;      // contiguous, of the input's dtype; null: not wanted
  void* grad_residual = nullptr;   // contiguous, of the residual's dtype; null: not wanted
  DType input_dtype = DType::kFloat32, residual_dtype = DType::kFloat32;
  int64_t cols = 0;
  double alpha = 1;
};

/// Normalizes rows [row_begin, row_end).
using ForwardKernel = void (*)(const ForwardArgs&, int64_t row_begin, int64_t row_end);

/// grad_input of rows [row_begin, row_end), and the sums over these rows in grad_weight and
/// grad_bias (parameter_size elements of the accumulation type each; null: not wanted). Both norms
/// have both.
using BackwardKernel = void (*)(const BackwardArgs&, int64_t row_begin, int64_t row_end,
                                void* grad_weight, void* grad_bias);

/// The same in two steps, for threads that share columns: first what each row needs, kTermsBytes at
/// terms + row * kTermsBytes (fp64: twice that); false where a row is too extreme for it, and
/// BackwardKernel must be called. Then columns [col_begin, col_end) of rows [0, rows); col_begin a
/// multiple of 64.
using BackwardTermsKernel = bool (*)(const BackwardArgs&, int64_t row_begin, int64_t row_end,
                                     void* terms);
using BackwardColumnsKernel = void (*)(const BackwardArgs&, const void* terms, int64_t rows,
                                       int64_t col_begin, int64_t col_end, void* grad_weight,
                                       void* grad_bias);
constexpr int64_t kTermsBytes = 7 * sizeof(float);

/// A weight or bias of any dtype as the kernels take it: out = (accumulation type) in + offset, for
/// `count` columns, parameter_size elements. The order of columns there is the kernels' own.
using ConvertKernel = void (*)(DType from, const void* in, double offset, void* out, int64_t count);

/// out[c] = sum over p of the sums in partials + p * stride, summed in double in the order of p,
/// for columns [col_begin, col_end), rounded once to `to`. col_begin: a multiple of 64.
using ReduceKernel = void (*)(const void* partials, int64_t count, int64_t stride, DType to,
                              void* out, int64_t col_begin, int64_t col_end);

using AddKernel = void (*)(const AddArgs&, int64_t row_begin, int64_t row_end);
using SplitKernel = void (*)(const SplitArgs&, int64_t row_begin, int64_t row_end);

/// The fused add's pairs of dtypes, input and residual: first those of one dtype, in DType's order.
constexpr int kNumAddPairs = 6;
constexpr int kNoAddPair = -1;
inline int add_pair(DType input, DType residual) {
  if (input == residual) return static_cast<int>(input);
  if (residual != DType::kFloat32) return kNoAddPair;
  return input == DType::kBFloat16 ? 4 : input == DType::kFloat16 ? 5 : kNoAddPair;
}
/// The dtype as whose rows' parameters a pair's kernels take weight and bias.
inline DType parameter_dtype(int pair) {
  return pair < kNumDTypes ? static_cast<DType>(pair) : DType::kFloat32;
}

/// Arrays: by the dtype of the rows, or by the fused add's pair.
struct KernelTable {
  const char* name;
  ForwardKernel layer_norm_forward[kNumDTypes];
  ForwardKernel rms_norm_forward[kNumDTypes];
  BackwardKernel layer_norm_backward[kNumDTypes];
  BackwardKernel rms_norm_backward[kNumDTypes];
  BackwardTermsKernel layer_norm_backward_terms[kNumDTypes];
  BackwardTermsKernel rms_norm_backward_terms[kNumDTypes];
  BackwardColumnsKernel layer_norm_backward_columns[kNumDTypes];
  BackwardColumnsKernel rms_norm_backward_columns[kNumDTypes];
  ConvertKernel convert[kNumDTypes];
  ReduceKernel reduce[kNumDTypes];
  AddKernel add;
  SplitKernel split;
  GroupKernelTable group_norm;
  ForwardKernel add_layer_norm_forward[kNumAddPairs];
  ForwardKernel add_rms_norm_forward[kNumAddPairs];
  BackwardKernel add_layer_norm_backward[kNumAddPairs];
  BackwardKernel add_rms_norm_backward[kNumAddPairs];
  int parameter_step[kNumDTypes];  // 1: parameters are stored as they are

  int64_t parameter_size(DType dtype, int64_t cols) const {
    const int64_t step = parameter_step[static_cast<int>(dtype)];
    return (cols + step - 1) / step * step;
  }
};

constexpr int kMaxTables = 4;

/// Every table this machine can run, the widest first; returns their number. The last is portable.
int runnable_tables(const KernelTable* (&tables)[kMaxTables]);

/// The widest table this machine can run that `capability` allows ("AVX512", "AVX2", anything else:
/// portable), as at::get_cpu_capability() spells it.
const KernelTable& kernel_table(const char* capability);

}  // namespace fusednorm::cpu
