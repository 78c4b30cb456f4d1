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
#include "device/tensor_rows.h"
#include "device/two_steps.h"
#include "operators/checks.h"

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
  args->centered = norm.centered;
  args->round_x_hat = norm.llama();
  args->threads_per_row = plan.threads_per_row;
  args->rows_per_block = plan.rows_per_block;
  args->cluster = plan.cluster;
}

// ---- Forward ----

/// Statistics of nothing: 0/0.
void fill_statistics(const Tensor& mean, const Tensor& rstd) {
  for (const Tensor& statistic : {mean, rstd}) {
    if (statistic.defined()) statistic.fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

/// What a forward kernel needs to know beyond set_common. `rows`: those that are held.
void set_forward(const Norm& norm, const Sizes& sizes, const cuda::ForwardPlan& plan,
                 const Rows& rows, const Affine& bias, const Tensor& output, const Tensor& mean,
                 const Tensor& rstd, ForwardArgs* args) {
  args->input = rows.layout;
  args->source = source_of(rows, plan.columns, sizes);
  args->output = writable(output);
  args->output_exact = rows_are_exact(output, plan.columns, sizes);
  args->mean = writable(mean);
  args->rstd = writable(rstd);
  args->bias = bias.parameter;
  args->has_offset = norm.weight_offset != 0;
  args->units = plan.units;
  args->log2_threads = std::bit_width(static_cast<unsigned>(plan.threads_per_row)) - 1;
  args->log2_cluster = std::bit_width(static_cast<unsigned>(plan.cluster)) - 1;
}

void forward_rows(const Norm& norm, const ForwardInputs& in, const Tensor& output,
                  const Tensor& mean, const Tensor& rstd) {
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  check_launchable(norm, in.input, sizes);
  if (sizes.cols == 0) return fill_statistics(mean, rstd);
  if (sizes.rows == 0) return;
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const DType in_dtype = dtype_of(in.input.scalar_type());
  const DType out_dtype = dtype_of(output.scalar_type());
  const cuda::DeviceGuard guard(in.input);
  const cuda::Architecture& architecture = cuda::architecture_of(in.input);
  const auto plan = cuda::forward_plan(sizes.cols, in_dtype, out_dtype, architecture);
  check_plan(norm, in.input, plan.shared_bytes, architecture);

  const Rows rows = rows_of(in.input, sizes);
  const Affine weight(in.weight, acc_dtype), bias(in.bias, acc_dtype);
  ForwardArgs args = {};
  set_common(norm, sizes, plan, weight, acc_dtype, &args);
  set_forward(norm, sizes, plan, rows, bias, output, mean, rstd, &args);
  check_launch(norm, with_pair(in_dtype, out_dtype, [&](auto pair) {
                 return cuda::launch_forward<pair.in, pair.other>(plan, args,
                                                                  cuda::current_stream());
               }));
  cuda::launched();
}

// ---- Backward ----

/// The gradients of weight and bias; that of the rows goes where launch(plan, sizes, args, reduce)
/// has told the kernel, and to grad_input, if it is defined.
template <class Args, class Launch>
std::array<Tensor, 2> run_backward(const Norm& norm, const BackwardInputs& in,
                                   const Tensor& grad_input, const Launch& launch) {
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  check_launchable(norm, in.input, sizes);
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const int64_t acc_size = acc_dtype == at::kDouble ? 8 : 4;
  const auto shape = C10_AS_INTARRAYREF_SLOW(in.normalized_shape);
  const cuda::DeviceGuard guard(in.input);
  std::array<Tensor, 2> gradients;
  if (in.output_mask[1]) gradients[0] = empty(shape, checks::grad_weight_dtype(in), in.input);
  if (in.output_mask[2]) gradients[1] = empty(shape, checks::grad_bias_dtype(in), in.input);
  const int parameters = in.output_mask[1] + in.output_mask[2];
  const bool any_row = sizes.rows > 0;
  if (sizes.cols == 0 || (parameters == 0 && !(any_row && in.output_mask[0]))) return gradients;

  const DType in_dtype = dtype_of(in.input.scalar_type());
  const DType grad_dtype = dtype_of(in.grad_output.scalar_type());
  const cuda::Architecture& architecture = cuda::architecture_of(in.input);
  const auto plan = cuda::backward_plan(sizes.rows, sizes.cols, in_dtype, grad_dtype, norm.centered,
                                        architecture);
  check_plan(norm, in.input, plan.shared_bytes, architecture);

  // One workspace: the groups' sums, then, of two launches, the rows' sums.
  const int64_t stride = cuda::partial_stride(sizes.cols);
  const int64_t partials = plan.groups * parameters * stride;
  const int64_t row_sums =
      plan.cluster < plan.blocks_per_row ? sizes.rows * 3 * (plan.threads_per_row / 32) : 0;
  const Tensor workspace = empty({partials + row_sums}, acc_dtype, in.input);
  cuda::may_use(workspace);

  const Rows grad_output = rows_of(in.grad_output, sizes), input = rows_of(in.input, sizes);
  const Tensor mean = in.mean.defined() ? in.mean.contiguous() : Tensor();
  const Tensor rstd = in.rstd.contiguous();
  const Affine weight(in.weight, acc_dtype);
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
  args.grad_input = writable(grad_input);
  args.grad_input_exact = grad_input.defined() && rows_are_exact(grad_input, plan.columns, sizes);
  char* const memory = static_cast<char*>(workspace.data_ptr());
  args.partials = parameters > 0 ? memory : nullptr;
  args.grad_weight = in.output_mask[1];
  args.grad_bias = in.output_mask[2];
  args.row_sums = memory + partials * acc_size;
  args.blocks_per_row = plan.blocks_per_row;
  args.stages = plan.stages;
  args.groups = plan.groups;
  reduce.partials = memory;
  reduce.groups = plan.groups;
  reduce.cols = sizes.cols;
  reduce.stride = stride;
  for (const Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    reduce.dtypes[reduce.parameters] = dtype_of(gradient.scalar_type());
    reduce.gradients[reduce.parameters++] = writable(gradient);
  }
  check_launch(norm, launch(plan, sizes, &args, reduce));
  cuda::launched();
  return gradients;
}

ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
  const DType in_dtype = dtype_of(in.input.scalar_type());
  const DType grad_dtype = dtype_of(in.grad_output.scalar_type());
  Tensor grad_input;
  if (in.output_mask[0]) grad_input = empty(in.input.sizes(), in.input.scalar_type(), in.input);
  auto [grad_weight, grad_bias] = run_backward<BackwardArgs>(
      norm, in, grad_input,
      [&](const auto& plan, const Sizes&, const BackwardArgs* args, const auto& reduce) {
        return with_pair(in_dtype, grad_dtype, [&](auto pair) {
          return cuda::launch_backward<pair.in, pair.other>(plan, *args, reduce,
                                                            cuda::current_stream());
        });
      });
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
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

void add(const AddInputs& in, const Tensor& residual_out) {
  const bool wide =
      in.input.scalar_type() == at::kDouble || in.residual.scalar_type() == at::kDouble;
  const auto acc_dtype = wide ? at::kDouble : at::kFloat;
  store(at::add(in.input.to(acc_dtype), in.residual.to(acc_dtype), in.alpha), residual_out);
}

void split(const Tensor& gradient, size_t, const OptionalTensor& grad_residual_out, double alpha,
           const Tensor& grad_input, const Tensor& grad_residual) {
  const bool adds = grad_residual_out.has_value() && grad_residual_out->defined();
  const Tensor sum = adds ? gradient + *grad_residual_out : gradient;
  if (grad_input.defined()) store(sum, grad_input);
  if (grad_residual.defined()) store(alpha == 1 ? sum : sum * alpha, grad_residual);
}

/// The kernel writes grad_input in the input's dtype, so the input is widened; but for the x_hat
/// that the llama mode rounds to that dtype for grad_weight.
ThreeTensors backward_rows_wide(const Norm& norm, const BackwardInputs& in) {
  const bool narrow = accumulation_dtype(in.input.scalar_type()) != in.input.scalar_type();
  const bool rounds = norm.llama() && narrow && in.output_mask[1];
  const Tensor input = in.input.to(in.grad_output.scalar_type());
  auto [grad_input, grad_weight, grad_bias] =
      backward_rows(norm, {in.grad_output,
                           input,
                           in.normalized_shape,
                           in.mean,
                           in.rstd,
                           in.weight,
                           in.bias,
                           {in.output_mask[0], in.output_mask[1] && !rounds, in.output_mask[2]}});
  if (rounds) {
    const Tensor grad_output = in.grad_output.to(at::kFloat), rstd = in.rstd.to(at::kFloat);
    grad_weight = std::get<1>(backward_rows(norm, {grad_output,
                                                   in.input,
                                                   in.normalized_shape,
                                                   in.mean,
                                                   rstd,
                                                   in.weight,
                                                   in.bias,
                                                   {false, true, false}}));
  }
  // Of an absent parameter, the dtype is the input's.
  if (grad_weight.defined()) grad_weight = grad_weight.to(checks::grad_weight_dtype(in));
  if (grad_bias.defined()) grad_bias = grad_bias.to(checks::grad_bias_dtype(in));
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

struct Cuda {
  static constexpr auto empty = &fusednorm::empty;
  static constexpr auto forward_rows = &fusednorm::forward_rows;
  static constexpr auto backward_rows = &fusednorm::backward_rows;
  static constexpr auto backward_rows_wide = &fusednorm::backward_rows_wide;
  static constexpr auto add = &fusednorm::add;
  static constexpr auto split = &fusednorm::split;
  static void add_forward_rows(const Norm&, const AddInputs&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&);
  static FourTensors add_backward_rows(const Norm&, const AddBackwardInputs&);
};

// ---- The residual add, fused ----

/// Whether there are kernels for an input, and an output, of this dtype beside the residual.
bool is_add_pair(at::ScalarType input, at::ScalarType residual) {
  return input == residual || (residual == at::kFloat && input != at::kDouble);
}

void Cuda::add_forward_rows(const Norm& norm, const AddInputs& in, const Tensor& output,
                            const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
  const auto dtype = output.scalar_type(), residual_dtype = residual_out.scalar_type();
  if (!is_add_pair(dtype, residual_dtype) || in.input.scalar_type() != dtype) {
    return TwoSteps<Cuda>::forward(norm, in, output, residual_out, mean, rstd);
  }
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  check_launchable(norm, in.input, sizes);
  if (sizes.cols == 0) return fill_statistics(mean, rstd);
  if (sizes.rows == 0) return;
  const auto acc_dtype = accumulation_dtype(residual_dtype);
  const DType in_dtype = dtype_of(dtype), held_dtype = dtype_of(residual_dtype);
  const cuda::DeviceGuard guard(in.input);
  const cuda::Architecture& architecture = cuda::architecture_of(in.input);
  const auto plan = cuda::forward_plan(sizes.cols, held_dtype, in_dtype, architecture);
  check_plan(norm, in.input, plan.shared_bytes, architecture);

  const Rows residual = rows_of(in.residual, sizes), addend = rows_of(in.input, sizes);
  const cuda::Source addend_source = source_of(addend, plan.columns, sizes);
  // In place a thread may write only what no other one reads: whole chunks, and rows without gaps.
  // Any other residual gets its sum by a copy.
  const bool direct = !residual_out.is_same(in.residual) ||
                      (residual_out.is_contiguous() &&
                       rows_are_exact(residual_out, plan.columns, sizes) && addend_source.exact);
  const Tensor sum = direct ? residual_out : empty(in.input.sizes(), residual_dtype, in.input);
  const Affine weight(in.weight, acc_dtype), bias(in.bias, acc_dtype);
  AddForwardArgs args = {};
  set_common(norm, sizes, plan, weight, acc_dtype, &args);
  set_forward(norm, sizes, plan, residual, bias, output, mean, rstd, &args);
  args.addend = addend.layout;
  args.addend_source = addend_source;
  args.residual_out = writable(sum);
  args.residual_out_exact = rows_are_exact(sum, plan.columns, sizes);
  args.alpha = in.alpha;
  check_launch(norm, with_pair(in_dtype, held_dtype, [&](auto pair) {
                 return cuda::launch_add_forward<pair.in, pair.other>(plan, args,
                                                                      cuda::current_stream());
               }));
  cuda::launched();
  if (!direct) residual_out.copy_(sum);
}

FourTensors Cuda::add_backward_rows(const Norm& norm, const AddBackwardInputs& in) {
  const auto dtype = in.grad_output.scalar_type(), residual_dtype = in.residual_out.scalar_type();
  if (!is_add_pair(dtype, residual_dtype) || in.input_dtype != dtype) {
    return TwoSteps<Cuda>::backward(norm, in);
  }
  const bool adds = in.grad_residual_out.has_value() && in.grad_residual_out->defined();
  Tensor grad_input, grad_residual;
  if (in.output_mask[0]) grad_input = empty(in.residual_out.sizes(), dtype, in.residual_out);
  if (in.output_mask[1]) {
    grad_residual = empty(in.residual_out.sizes(), residual_dtype, in.residual_out);
  }
  std::optional<Rows> more;
  auto [grad_weight, grad_bias] = run_backward<AddBackwardArgs>(
      norm, in.of_norm(), grad_input,
      [&](const auto& plan, const Sizes& sizes, AddBackwardArgs* args, const auto& reduce) {
        if (adds && sizes.rows > 0) {
          more.emplace(rows_of(*in.grad_residual_out, sizes));
          args->grad_residual_out = more->layout;
          args->grad_residual_out_source = source_of(*more, plan.columns, sizes);
        }
        args->grad_residual = writable(grad_residual);
        args->grad_residual_exact =
            grad_residual.defined() && rows_are_exact(grad_residual, plan.columns, sizes);
        args->alpha = in.alpha;
        return with_pair(dtype_of(dtype), dtype_of(residual_dtype), [&](auto pair) {
          return cuda::launch_add_backward<pair.in, pair.other>(plan, *args, reduce,
                                                                cuda::current_stream());
        });
      });
  return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight),
          std::move(grad_bias)};
}

}  // namespace

#if defined(FUSEDNORM_SIMT)
TORCH_LIBRARY_IMPL(fusednorm, CPU, m) { register_operators<DeviceBackend<Cuda>>(m); }
#else
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { register_operators<DeviceBackend<Cuda>>(m); }
#endif

}  // namespace fusednorm
