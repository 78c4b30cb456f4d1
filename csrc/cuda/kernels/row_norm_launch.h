// The interface of the CUDA kernels to the host compiler: plain pointers, sizes, enums. No torch.
#pragma once

#include <cstdint>

#include "launch_config.h"
#include "maths/row_norm.h"
#include "maths/rows.h"

struct CUstream_st;

namespace fusednorm::cuda {

/// How a kernel is launched. `cluster` blocks of the grid share their memory.
struct LaunchShape {
  const char* kernel;  // its name, for errors
  unsigned grid, threads, cluster, shared_bytes;
};

/// A tensor as its rows are read.
struct Source {
  const char* data;   // set per row
  const char* begin;  // of the memory that belongs to the tensor: nothing else is touched
  const char* end;
  bool exact;  // every row starts on a chunk and ends on a unit
};

/// A weight or bias: contiguous, starting on 16 bytes; null: absent. Of fp64 only beside fp64.
struct Parameter {
  const void* data;
  DType dtype;
  int element_bytes;
};

struct ForwardArgs {
  RowLayout input;
  Source source;
  void* output;       // contiguous
  bool output_exact;  // as Source::exact
  void* mean;         // accumulation type, one a row; null: not wanted
  void* rstd;         // likewise
  Parameter weight, bias;
  double weight_offset;
  bool has_offset;  // weight_offset != 0, so that no thread compares doubles
  int64_t rows, cols;
  NormParams params;
  bool centered;     // LayerNorm; else RMSNorm: a kernel has both
  bool round_x_hat;  // to the input's dtype before the product with the weight
  int threads_per_row, rows_per_block, units, cluster;  // as the plan has them
  int log2_threads, log2_cluster;  // of threads_per_row up to 32; shifts, where divisions took 170
                                   // instructions before the first load
};

/// Of the norm of alpha * residual + addend: ForwardArgs' input and source are the residual's.
struct AddForwardArgs : ForwardArgs {
  RowLayout addend;
  Source addend_source;
  void* residual_out;  // contiguous; may be the residual where its rows are exact
  bool residual_out_exact;
  double alpha;
};

struct BackwardArgs {
  RowLayout grad_output, input;
  Source grad_output_source, input_source;
  const void* mean;  // contiguous, accumulation type; RMSNorm: null
  const void* rstd;  // likewise
  Parameter weight;
  double weight_offset;
  void* grad_input;  // contiguous, of the input's dtype; null: not wanted
  bool grad_input_exact;
  void* partials;  // [groups][parameters][partial_stride], accumulation type; null: none wanted
  bool grad_weight, grad_bias;
  void* row_sums;  // where a row's blocks are no cluster: [rows][3][warps], accumulation type
  int64_t rows, cols;
  NormParams params;
  bool centered;
  bool round_x_hat;                                                      // for grad_weight
  int threads_per_row, rows_per_block, blocks_per_row, cluster, stages;  // as the plan has them
  int64_t groups;
};

/// Of the norm of a sum, whose own gradient is added to what the norm's input gets. grad_input is
/// of grad_output's dtype here.
struct AddBackwardArgs : BackwardArgs {
  RowLayout grad_residual_out;  // of the sum's dtype; null: absent
  Source grad_residual_out_source;
  void* grad_residual;  // contiguous, of the sum's dtype: alpha * gradient; null: not wanted
  bool grad_residual_exact;
  double alpha;
};

/// The sums of the groups of rows, to be added.
struct ReduceArgs {
  const void* partials;
  void* gradients[2];
  DType dtypes[2];
  int64_t groups, cols, stride;
  int parameters;
};

/// What became of a launch: a cudaError_t, and which launch it was.
struct LaunchResult {
  int error;
  LaunchShape shape;
};

// For each pair of dtypes there is: the same twice, or a 16-bit input beside fp32. They enqueue and
// return.

template <DType kIn, DType kOut>
LaunchResult launch_forward(const ForwardPlan&, const ForwardArgs&, CUstream_st*);

/// grad_input and the partial sums, then `reduce` where it has parameters.
template <DType kIn, DType kGrad>
LaunchResult launch_backward(const BackwardPlan&, const BackwardArgs&, const ReduceArgs& reduce,
                             CUstream_st*);

// The residual add, input kIn beside a residual kResidual: of each such pair, with kResidual the
// rows' dtype and kIn that of output and grad_output.

template <DType kIn, DType kResidual>
LaunchResult launch_add_forward(const ForwardPlan&, const AddForwardArgs&, CUstream_st*);

template <DType kIn, DType kResidual>
LaunchResult launch_add_backward(const BackwardPlan&, const AddBackwardArgs&,
                                 const ReduceArgs& reduce, CUstream_st*);

/// Whether the current device runs clusters of `blocks` blocks of the largest kernel.
template <DType kIn, DType kOther>
bool grants_cluster(int blocks);

}  // namespace fusednorm::cuda
