// The CUDA key, compiled by the host compiler: dtype dispatch, device guard, stream, allocation.
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <bit>
#include <limits>

#include "cuda/kernels/row_norm_launch.h"
#include "device/device_key.h"
#include "device/tensor_rows.h"
#include "device/two_steps.h"

#if defined(FUSEDNORM_SIMT)
#include "simt_host.h"
#else
#include "cuda/cuda_device.h"
#endif

namespace fusednorm {
namespace {

using cuda::AddBackwardArgs;
using cuda::AddForwardArgs;
using cuda::BackwardArgs;
using cuda::ForwardArgs;
using cuda::LaunchResult;

// ---- The pairs of dtypes there are kernels for ----

template <DType kIn, DType kOther>
struct Pair {
  static constexpr DType in = kIn, other = kOther;
};

/// f(pair): dtypes of a call become template arguments.
template <class F>
LaunchResult with_pair(DType in, DType other, const F& f) {
  if (in == other) {
    switch (in) {
      case DType::kFloat64:
        return f(Pair<DType::kFloat64, DType::kFloat64>{});
      case DType::kFloat32:
        return f(Pair<DType::kFloat32, DType::kFloat32>{});
      case DType::kBFloat16:
        return f(Pair<DType::kBFloat16, DType::kBFloat16>{});
      case DType::kFloat16:
        return f(Pair<DType::kFloat16, DType::kFloat16>{});
    }
  }
  // checks.h lets no other pair pass
  return in == DType::kBFloat16 ? f(Pair<DType::kBFloat16, DType::kFloat32>{})
                                : f(Pair<DType::kFloat16, DType::kFloat32>{});
}

// ---- Tensors as the kernels see them ----

/// Columns count in 32 bits there.
constexpr int64_t kMaxCols = 1 << 30;

void check_launchable(const Norm& norm, const Tensor& tensor, const Sizes& sizes) {
  TORCH_CHECK(sizes.cols <= kMaxCols, "fusednorm::", norm.op, ": input: expected rows of at most ",
              kMaxCols, " elements on ", tensor.device(), ", got ", sizes.cols);
}

void check_plan(const Norm& norm, const Tensor& tensor, int shared_bytes,
                const cuda::Architecture& a) {
  TORCH_CHECK(shared_bytes <= a.shared_per_block, "fusednorm::", norm.op, ": the plan needs ",
              shared_bytes, " bytes of shared memory a block, but ", tensor.device(), " has ",
              a.shared_per_block);
}

void check_launch(const Norm& norm, const LaunchResult& result) {
  TORCH_CHECK(result.error == 0, "fusednorm::", norm.op, ": the launch of ", result.shape.kernel,
              " failed: ", cuda::error_text(result.error), " (", result.shape.grid, " blocks of ",
              result.shape.threads, " threads, clusters of ", result.shape.cluster, ", ",
              result.shape.shared_bytes, " bytes of shared memory)");
}

Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor& like) {
  return at::empty(sizes, like.options().dtype(dtype).memory_format(std::nullopt));
}

/// Rows whose number counts in 32 bits, or of one stride: what kernels can divide.
Rows rows_of(const Tensor& tensor, const Sizes& sizes) {
  Rows rows(tensor, sizes);
  if (rows.layout.dims > 1 && sizes.rows > std::numeric_limits<int32_t>::max()) {
    return Rows(tensor.contiguous(), sizes);
  }
  return rows;
}

/// Whether every row ends on a unit, and the first one starts on a chunk: of a contiguous tensor
/// then all do.
bool rows_are_exact(const Tensor& tensor, int columns, const Sizes& sizes) {
  const int64_t chunk = columns * tensor.element_size();
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % chunk == 0 &&
         sizes.cols % columns == 0;
}

cuda::Source source_of(const Rows& rows, int columns, const Sizes& sizes) {
  bool exact = rows_are_exact(rows.tensor, columns, sizes);
  for (int d = 0; d < rows.layout.dims; ++d) exact &= rows.layout.strides[d] % columns == 0;
  cuda::may_read(rows.tensor);
  const char* const begin = static_cast<const char*>(rows.layout.data);
  return {nullptr, begin, begin + extent_bytes(rows.tensor), exact};
}

/// A weight or bias, copied only where it is not contiguous, does not start on 16 bytes (a slice of
/// a flat parameter) or is fp64 beside a narrower input.
struct Affine {
  Tensor holder;
  cuda::Parameter parameter{nullptr, DType::kFloat32, 4};

  Affine(const OptionalTensor& source, at::ScalarType acc_dtype) {
    if (!source.has_value() || !source->defined()) return;
    holder = source->contiguous();
    if (holder.scalar_type() == at::kDouble) holder = holder.to(acc_dtype);
    if (reinterpret_cast<uintptr_t>(holder.const_data_ptr()) % 16 != 0) holder = holder.clone();
    cuda::may_read(holder);
    parameter = {holder.const_data_ptr(), dtype_of(holder.scalar_type()),
                 static_cast<int>(holder.element_size())};
  }
};

void* writable(const Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  cuda::may_write(tensor);
  return tensor.data_ptr();
}

/// What the arguments of forward and backward have in common.
template <class Args, class Plan>
void set_common(const Norm& norm, const Sizes& sizes, const Plan& plan, const Affine& weight,
                at::ScalarType acc_dtype, Args* args) {
  args->weight = weight.parameter;
  args->weight_offset = norm.weight_offset;
  args->rows = sizes.rows;
  args->cols = sizes.cols;
  args->params = norm.params(acc_dtype);
  args->centered = norm.centered();
  args->round_x_hat = norm.llama();
  args->threads_per_row = plan.threads_per_row;
  args->rows_per_block = plan.rows_per_block;
  args->cluster = plan.cluster;
}

// ---- Forward ----

/// What a forward kernel needs to know beyond set_common. `rows`: those that are held.
void set_forward(const Norm& norm, const Sizes& sizes, const cuda::ForwardPlan& plan,
                 const Rows& rows, const Affine& bias, const Outputs& to, ForwardArgs* args) {
  args->input = rows.layout;
  args->source = source_of(rows, plan.columns, sizes);
  args->output = writable(to.output);
  args->output_exact = rows_are_exact(to.output, plan.columns, sizes);
  args->mean = writable(to.mean);
  args->rstd = writable(to.rstd);
  args->bias = bias.parameter;
  args->has_offset = norm.weight_offset != 0;
  args->units = plan.units;
  args->log2_threads = std::bit_width(static_cast<unsigned>(plan.threads_per_row)) - 1;
  args->log2_cluster = std::bit_width(static_cast<unsigned>(plan.cluster)) - 1;
}

void forward_rows(const Call& call, const Outputs& to) {
  const Norm& norm = call.norm;
  const Tensor& input = *call.input;
  const Sizes sizes = sizes_of(input, call.normalized_shape.size());
  check_launchable(norm, input, sizes);
  if (sizes.cols == 0) return fill_statistics(to);
  if (sizes.rows == 0) return;
  const auto acc_dtype = accumulation_dtype(input.scalar_type());
  const DType in_dtype = dtype_of(input.scalar_type());
  const DType out_dtype = dtype_of(to.output.scalar_type());
  const cuda::DeviceGuard guard(input);
  const cuda::Architecture& architecture = cuda::architecture_of(input);
  const auto plan = cuda::forward_plan(sizes.cols, in_dtype, out_dtype, architecture);
  check_plan(norm, input, plan.shared_bytes, architecture);

  const Rows rows = rows_of(input, sizes);
  const Affine weight(*call.weight, acc_dtype), bias(*call.bias, acc_dtype);
  ForwardArgs args = {};
  set_common(norm, sizes, plan, weight, acc_dtype, &args);
  set_forward(norm, sizes, plan, rows, bias, to, &args);
  check_launch(norm, with_pair(in_dtype, out_dtype, [&](auto pair) {
                 return cuda::launch_forward<pair.in, pair.other>(plan, args,
                                                                  cuda::current_stream());
               }));
  cuda::launched();
}

// ---- Backward ----

/// The gradients of weight and bias of a norm's call (of a sum, call.of_sum); that of the rows goes
/// where launch(plan, sizes, args, reduce) has told the kernel, and to made->input, if it is
/// defined.
template <class Args, class Launch>
void run_backward(const Call& call, Gradients* made, const Launch& launch) {
  const Norm& norm = call.norm;
  const Tensor& rows = *call.input;
  const Sizes sizes = sizes_of(rows, call.normalized_shape.size());
  check_launchable(norm, rows, sizes);
  const auto acc_dtype = accumulation_dtype(rows.scalar_type());
  const int64_t acc_size = acc_dtype == at::kDouble ? 8 : 4;
  const auto shape = C10_AS_INTARRAYREF_SLOW(call.normalized_shape);
  const cuda::DeviceGuard guard(rows);
  const auto& [wants_rows, none, wants_weight, wants_bias] = call.wanted;
  if (wants_weight) made->weight = empty(shape, checks::grad_weight_dtype(call), rows);
  if (wants_bias) made->bias = empty(shape, checks::grad_bias_dtype(call), rows);
  const int parameters = wants_weight + wants_bias;
  const bool any_row = sizes.rows > 0;
  if (sizes.cols == 0 || (parameters == 0 && !(any_row && wants_rows))) return;

  const DType in_dtype = dtype_of(rows.scalar_type());
  const DType grad_dtype = dtype_of(call.grad_output->scalar_type());
  const cuda::Architecture& architecture = cuda::architecture_of(rows);
  const auto plan = cuda::backward_plan(sizes.rows, sizes.cols, in_dtype, grad_dtype,
                                        norm.centered(), architecture);
  check_plan(norm, rows, plan.shared_bytes, architecture);

  // One workspace: the groups' sums, then, of two launches, the rows' sums.
  const int64_t stride = cuda::partial_stride(sizes.cols);
  const int64_t partials = plan.groups * parameters * stride;
  const int64_t row_sums =
      plan.cluster < plan.blocks_per_row ? sizes.rows * 3 * (plan.threads_per_row / 32) : 0;
  const Tensor workspace = empty({partials + row_sums}, acc_dtype, rows);
  cuda::may_use(workspace);

  const Rows grad_output = rows_of(*call.grad_output, sizes), input = rows_of(rows, sizes);
  const Tensor mean = call.mean->defined() ? call.mean->contiguous() : Tensor();
  const Tensor rstd = call.rstd->contiguous();
  const Affine weight(*call.weight, acc_dtype);
  Args args = {};
  cuda::ReduceArgs reduce = {};
  set_common(norm, sizes, plan, weight, acc_dtype, &args);
  if (any_row) {
    cuda::may_read(rstd);
    if (mean.defined()) cuda::may_read(mean);
    args.grad_output = grad_output.layout;
    args.input = input.layout;
    args.grad_output_source = source_of(grad_output, plan.columns, sizes);
    args.input_source = source_of(input, plan.columns, sizes);
    args.mean = mean.defined() ? mean.const_data_ptr() : nullptr;
    args.rstd = rstd.const_data_ptr();
  }
  args.grad_input = writable(made->input);
  args.grad_input_exact = made->input.defined() && rows_are_exact(made->input, plan.columns, sizes);
  char* const memory = static_cast<char*>(workspace.data_ptr());
  args.partials = parameters > 0 ? memory : nullptr;
  args.grad_weight = wants_weight;
  args.grad_bias = wants_bias;
  args.row_sums = memory + partials * acc_size;
  args.blocks_per_row = plan.blocks_per_row;
  args.stages = plan.stages;
  args.groups = plan.groups;
  reduce.partials = memory;
  reduce.groups = plan.groups;
  reduce.cols = sizes.cols;
  reduce.stride = stride;
  for (const Tensor& gradient : {made->weight, made->bias}) {
    if (!gradient.defined()) continue;
    reduce.dtypes[reduce.parameters] = dtype_of(gradient.scalar_type());
    reduce.gradients[reduce.parameters++] = writable(gradient);
  }
  check_launch(norm, launch(plan, sizes, &args, reduce));
  cuda::launched();
}

Gradients backward_rows(const Call& call) {
  const DType in_dtype = dtype_of(call.input->scalar_type());
  const DType grad_dtype = dtype_of(call.grad_output->scalar_type());
  Gradients made;
  if (call.wanted.input) {
    made.input = empty(call.input->sizes(), call.input->scalar_type(), *call.input);
  }
  run_backward<BackwardArgs>(
      call, &made,
      [&](const auto& plan, const Sizes&, const BackwardArgs* args, const auto& reduce) {
        return with_pair(in_dtype, grad_dtype, [&](auto pair) {
          return cuda::launch_backward<pair.in, pair.other>(plan, *args, reduce,
                                                            cuda::current_stream());
        });
      });
  return made;
}

// ---- The residual add, as steps of its own ----

// For pairs of dtypes without a fused kernel (fp64 beside another, a 16-bit residual under another
// input), in ATen's arithmetic, with copies in the wider accumulation type. ATen's add leaves the
// fused multiply-add to the compiler: with alpha != 1 the sum may differ by an ulp of that type.

/// Rounds once: ATen goes from fp64 to 16 bits by fp32. There an inexact value takes the odd one of
/// its two neighbours, from which the second rounding is that of the value itself.
void store(const Tensor& wide, const Tensor& target) {
  if (wide.scalar_type() != at::kDouble || target.element_size() != 2) {
    target.copy_(wide);
    return;
  }
  const Tensor nearest = wide.to(at::kFloat), back = nearest.to(at::kDouble);
  const Tensor bits = nearest.view(at::kInt);
  const Tensor towards_zero = bits - (back.abs() > wide.abs()).to(at::kInt);
  target.copy_(at::where(back == wide, bits, at::bitwise_or(towards_zero, 1)).view(at::kFloat));
}

void add(const Call& call, const Tensor& residual_out) {
  const Tensor &input = *call.input, &residual = *call.residual;
  const bool wide = input.scalar_type() == at::kDouble || residual.scalar_type() == at::kDouble;
  const auto acc_dtype = wide ? at::kDouble : at::kFloat;
  store(at::add(input.to(acc_dtype), residual.to(acc_dtype), call.alpha), residual_out);
}

void split(const Tensor& gradient, const Call& call, const Gradients& to) {
  const bool more = present(*call.grad_residual_out);
  const Tensor sum = more ? gradient + **call.grad_residual_out : gradient;
  if (to.input.defined()) store(sum, to.input);
  if (to.residual.defined()) store(call.alpha == 1 ? sum : sum * call.alpha, to.residual);
}

/// The kernel writes grad_input in the input's dtype, so the input is widened; but for the x_hat
/// that the llama mode rounds to that dtype for grad_weight.
Gradients backward_rows_wide(const Call& call) {
  const auto dtype = call.input->scalar_type();
  const bool rounds = call.norm.llama() && accumulation_dtype(dtype) != dtype && call.wanted.weight;
  const Tensor input = call.input->to(call.grad_output->scalar_type());
  Call wide = call;
  wide.input = &input;
  wide.wanted.weight = call.wanted.weight && !rounds;
  Gradients made = backward_rows(wide);
  if (rounds) {
    const Tensor grad_output = call.grad_output->to(at::kFloat), rstd = call.rstd->to(at::kFloat);
    Call rounding = call;
    rounding.grad_output = &grad_output;
    rounding.rstd = &rstd;
    rounding.wanted = {};
    rounding.wanted.weight = true;
    made.weight = backward_rows(rounding).weight;
  }
  // Of an absent parameter, the dtype is the input's.
  if (made.weight.defined()) made.weight = made.weight.to(checks::grad_weight_dtype(call));
  if (made.bias.defined()) made.bias = made.bias.to(checks::grad_bias_dtype(call));
  return made;
}

struct Cuda {
  static constexpr auto empty = &fusednorm::empty;
  static constexpr auto forward_rows = &fusednorm::forward_rows;
  static constexpr auto backward_rows = &fusednorm::backward_rows;
  static constexpr auto backward_rows_wide = &fusednorm::backward_rows_wide;
  static constexpr auto add = &fusednorm::add;
  static constexpr auto split = &fusednorm::split;
  static void add_forward_rows(const Call& call, const Outputs& to);
  static Gradients add_backward_rows(const Call& call);
};

// ---- The residual add, fused ----

/// Whether there are kernels for an input, and an output, of this dtype beside the residual.
bool is_add_pair(at::ScalarType input, at::ScalarType residual) {
  return input == residual || (residual == at::kFloat && input != at::kDouble);
}

void Cuda::add_forward_rows(const Call& call, const Outputs& to) {
  const Norm& norm = call.norm;
  const Tensor& input = *call.input;
  const auto dtype = to.output.scalar_type(), residual_dtype = to.residual_out.scalar_type();
  if (!is_add_pair(dtype, residual_dtype) || input.scalar_type() != dtype) {
    return TwoSteps<Cuda>::forward(call, to);
  }
  const Sizes sizes = sizes_of(input, call.normalized_shape.size());
  check_launchable(norm, input, sizes);
  if (sizes.cols == 0) return fill_statistics(to);
  if (sizes.rows == 0) return;
  const auto acc_dtype = accumulation_dtype(residual_dtype);
  const DType in_dtype = dtype_of(dtype), held_dtype = dtype_of(residual_dtype);
  const cuda::DeviceGuard guard(input);
  const cuda::Architecture& architecture = cuda::architecture_of(input);
  const auto plan = cuda::forward_plan(sizes.cols, held_dtype, in_dtype, architecture);
  check_plan(norm, input, plan.shared_bytes, architecture);

  const Rows residual = rows_of(*call.residual, sizes), addend = rows_of(input, sizes);
  const cuda::Source addend_source = source_of(addend, plan.columns, sizes);
  // In place a thread may write only what no other one reads: whole chunks, and rows without gaps.
  // Any other residual gets its sum by a copy.
  const bool direct = !to.residual_out.is_same(*call.residual) ||
                      (to.residual_out.is_contiguous() &&
                       rows_are_exact(to.residual_out, plan.columns, sizes) && addend_source.exact);
  const Tensor sum = direct ? to.residual_out : empty(input.sizes(), residual_dtype, input);
  const Affine weight(*call.weight, acc_dtype), bias(*call.bias, acc_dtype);
  AddForwardArgs args = {};
  set_common(norm, sizes, plan, weight, acc_dtype, &args);
  set_forward(norm, sizes, plan, residual, bias, to, &args);
  args.addend = addend.layout;
  args.addend_source = addend_source;
  args.residual_out = writable(sum);
  args.residual_out_exact = rows_are_exact(sum, plan.columns, sizes);
  args.alpha = call.alpha;
  check_launch(norm, with_pair(in_dtype, held_dtype, [&](auto pair) {
                 return cuda::launch_add_forward<pair.in, pair.other>(plan, args,
                                                                      cuda::current_stream());
               }));
  cuda::launched();
  if (!direct) to.residual_out.copy_(sum);
}

Gradients Cuda::add_backward_rows(const Call& call) {
  const Tensor& sum = *call.residual_out;
  const auto dtype = call.grad_output->scalar_type(), residual_dtype = sum.scalar_type();
  if (!is_add_pair(dtype, residual_dtype) || call.input_dtype != dtype) {
    return TwoSteps<Cuda>::backward(call);
  }
  Gradients made;
  if (call.wanted.input) made.input = empty(sum.sizes(), dtype, sum);
  if (call.wanted.residual) made.residual = empty(sum.sizes(), residual_dtype, sum);
  std::optional<Rows> more;
  run_backward<AddBackwardArgs>(
      call.of_sum(sum), &made,
      [&](const auto& plan, const Sizes& sizes, AddBackwardArgs* args, const auto& reduce) {
        if (present(*call.grad_residual_out) && sizes.rows > 0) {
          more.emplace(rows_of(**call.grad_residual_out, sizes));
          args->grad_residual_out = more->layout;
          args->grad_residual_out_source = source_of(*more, plan.columns, sizes);
        }
        args->grad_residual = writable(made.residual);
        args->grad_residual_exact =
            made.residual.defined() && rows_are_exact(made.residual, plan.columns, sizes);
        args->alpha = call.alpha;
        return with_pair(dtype_of(dtype), dtype_of(residual_dtype), [&](auto pair) {
          return cuda::launch_add_backward<pair.in, pair.other>(plan, *args, reduce,
                                                                cuda::current_stream());
        });
      });
  return made;
}

}  // namespace

#if defined(FUSEDNORM_SIMT)
TORCH_LIBRARY_IMPL(fusednorm, CPU, m) {
#else
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) {
#endif
  register_norms<DeviceKey<Cuda>, LayerNorm, RmsNorm, ScaleRows>(m);
}

}  // namespace fusednorm
