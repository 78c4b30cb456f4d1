// The CPU key: from tensors to rows, dtype dispatch, threads over rows.
#include <ATen/Functions.h>

#include "cpu/backward_call.h"
#include "device/device_key.h"
#include "device/tensor_rows.h"
#include "device/two_steps.h"
#include "fusednorm.h"

namespace fusednorm {
namespace {

/// In a forward (2048 x 768 fp32, its output not in cache: 292 us, 184 so; all in cache: 145, 169).
/// In 16 bits there is more to compute for a byte, and it pays later (4096 x 768: 286 us, 380;
/// 2048 x 4096: 1063, 896).
bool forward_asks_early(const Tensor& output, const Sizes& sizes) {
  const int64_t element_size = output.element_size();
  return worth_asking_early(static_cast<int64_t>(output.nbytes()), sizes.cols * element_size,
                            element_size > 2 ? kPartOfCache : 2 * kPartOfCache);
}

template <class Body>
void parallel_rows(const Sizes& sizes, int64_t element_size, const Body& body) {
  const int64_t row_bytes = std::max<int64_t>(1, sizes.cols * element_size);
  at::parallel_for(0, sizes.rows, std::max<int64_t>(1, kGrainBytes / row_bytes), body);
}

// ---- Forward ----

/// What x_hat is rounded to: the dtype of what is normalized, in llama mode.
DType rounding_of(const Call& call) {
  return call.norm.llama() ? dtype_of(call.input->scalar_type()) : DType::kFloat64;
}

/// What a forward reads, held for as long as its kernels run. Weight and bias are converted to what
/// rows of `dtype` take.
struct ForwardOperands {
  Rows input;
  Affine weight, bias;

  ForwardOperands(const Call& call, const Tensor& rows, at::ScalarType dtype, const Sizes& sizes)
      : input(rows, sizes),
        weight(*call.weight, call.norm.weight_offset, dtype),
        bias(*call.bias, 0, dtype) {
    if (bias.data != nullptr && weight.data == nullptr) weight.fill_with(1, sizes.cols, dtype);
  }

  void give(cpu::ForwardArgs* args, const Outputs& to) const {
    args->input = input.layout;
    args->output = to.output.data_ptr();
    args->mean = to.mean.defined() ? to.mean.data_ptr() : nullptr;
    args->rstd = to.rstd.defined() ? to.rstd.data_ptr() : nullptr;
    args->weight = weight.data;
    args->bias = bias.data;
  }
};

void forward_rows(const Call& call, const Outputs& to) {
  const auto dtype = to.output.scalar_type();
  const Sizes sizes = sizes_of(*call.input, call.normalized_shape.size());
  if (sizes.cols == 0) return fill_statistics(to);
  // A wider output is that of the input widened first: the kernel sees one dtype.
  const bool widens = call.input->scalar_type() != dtype;
  const ForwardOperands operands(call, widens ? call.input->to(dtype) : *call.input, dtype, sizes);
  cpu::ForwardArgs args;
  operands.give(&args, to);
  args.cols = sizes.cols;
  args.params = call.norm.params(accumulation_dtype(dtype));
  args.round_x_hat = rounding_of(call);
  args.ask_early = forward_asks_early(to.output, sizes);
  const int i = static_cast<int>(dtype_of(dtype));
  const auto kernel =
      call.norm.centered() ? kernels().layer_norm_forward[i] : kernels().rms_norm_forward[i];
  parallel_rows(sizes, to.output.element_size(),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// ---- Backward ----

/// What a backward reads, held for as long as its kernels run.
struct BackwardOperands {
  Rows grad_output, input;
  Tensor mean, rstd;
  Affine weight;

  BackwardOperands(const Call& call, const Tensor& rows, at::ScalarType dtype, const Sizes& sizes)
      : grad_output(*call.grad_output, sizes),
        input(rows, sizes),
        mean(call.mean->defined() ? call.mean->contiguous() : Tensor()),
        rstd(call.rstd->contiguous()),
        weight(*call.weight, call.norm.weight_offset, dtype) {
    if (weight.data == nullptr) weight.fill_with(1, sizes.cols, dtype);
  }

  void give(cpu::BackwardArgs* args, const Tensor& grad_input) const {
    args->grad_output = grad_output.layout;
    args->input = input.layout;
    args->mean = mean.defined() ? mean.const_data_ptr() : nullptr;
    args->rstd = rstd.const_data_ptr();
    args->weight = weight.data;
    args->grad_input = grad_input.defined() ? grad_input.data_ptr() : nullptr;
  }
};

/// What the backwards with and without a residual have in common. `rows`: their dtype is that of
/// sums and statistics.
void set_common(const Call& call, const Tensor& rows, const Sizes& sizes,
                const BackwardOperands& operands, const Tensor& grad_input, BackwardCall* run) {
  run->rows = sizes.rows;
  run->grain_rows = kGrainBytes / std::max<int64_t>(1, sizes.cols * rows.element_size());
  operands.give(&run->args, grad_input);
  run->args.cols = sizes.cols;
  run->args.params = call.norm.params(accumulation_dtype(rows.scalar_type()));
  run->args.round_x_hat = rounding_of(call);
  run->suit_caches(rows);
}

void allocate_parameters(const Call& call, BackwardCall* run) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(call.normalized_shape);
  if (call.wanted.weight) run->gradients[0] = empty(shape, checks::grad_weight_dtype(call));
  if (call.wanted.bias) run->gradients[1] = empty(shape, checks::grad_bias_dtype(call));
}

/// The gradient of the input has the dtype of grad_output.
Gradients backward_rows_wide(const Call& call) {
  // Beside a wider grad_output (an fp32 output of a 16-bit input) the input is widened to it.
  const auto dtype = call.grad_output->scalar_type();
  const bool widens = call.input->scalar_type() != dtype;
  const Sizes sizes = sizes_of(*call.input, call.normalized_shape.size());
  const BackwardOperands operands(call, widens ? call.input->to(dtype) : *call.input, dtype, sizes);
  BackwardCall run;
  Tensor grad_input;
  if (call.wanted.input) grad_input = empty(call.input->sizes(), dtype);
  allocate_parameters(call, &run);
  run.dtype = dtype_of(dtype);
  const int i = static_cast<int>(run.dtype);
  const cpu::KernelTable& table = kernels();
  const bool centered = call.norm.centered();
  run.kernel = centered ? table.layer_norm_backward[i] : table.rms_norm_backward[i];
  run.terms_kernel =
      centered ? table.layer_norm_backward_terms[i] : table.rms_norm_backward_terms[i];
  run.columns_kernel =
      centered ? table.layer_norm_backward_columns[i] : table.rms_norm_backward_columns[i];
  for (int k = 0; k < 2; ++k) run.computes[k] = run.gradients[k].defined();
  set_common(call, *call.grad_output, sizes, operands, grad_input, &run);
  if (call.wanted.input || run.parameters() != 0) run.run();
  return {grad_input, Tensor(), run.gradients[0], run.gradients[1]};
}

Gradients backward_rows(const Call& call) {
  Gradients made = backward_rows_wide(call);
  if (made.input.defined()) made.input = made.input.to(call.input->scalar_type());
  return made;
}

// ---- The residual add, as steps of its own ----

void add(const Call& call, const Tensor& residual_out) {
  const Sizes sizes = sizes_of(*call.input, call.normalized_shape.size());
  cpu::AddArgs args;
  // A residual that is updated in place may lie in ways that no row kernel writes to.
  const bool in_rows = rows_are_contiguous(residual_out, sizes.leading_dims) &&
                       collapse(residual_out, sizes.leading_dims, &args.residual_out_rows);
  const Tensor target =
      in_rows ? residual_out : empty(call.input->sizes(), residual_out.scalar_type());
  if (!in_rows) collapse(target, sizes.leading_dims, &args.residual_out_rows);
  args.residual_out = target.data_ptr();
  const Rows input(*call.input, sizes), residual(*call.residual, sizes);
  args.input = input.layout;
  args.residual = residual.layout;
  args.input_dtype = dtype_of(call.input->scalar_type());
  args.residual_dtype = dtype_of(residual_out.scalar_type());
  args.cols = sizes.cols;
  args.alpha = call.alpha;
  parallel_rows(sizes, target.element_size(),
                [&](int64_t begin, int64_t end) { kernels().add(args, begin, end); });
  if (!in_rows) residual_out.copy_(target);
}

void split(const Tensor& gradient, const Call& call, const Gradients& to) {
  const Sizes sizes = sizes_of(gradient, call.normalized_shape.size());
  std::optional<Rows> other;
  cpu::SplitArgs args;
  args.gradient = gradient.const_data_ptr();
  // What there is none of takes the gradient's dtype.
  DType residual_dtype = dtype_of(gradient.scalar_type());
  if (present(*call.grad_residual_out)) {
    other.emplace(**call.grad_residual_out, sizes);
    args.grad_residual_out = other->layout;
    residual_dtype = dtype_of((*call.grad_residual_out)->scalar_type());
  }
  if (to.residual.defined()) {
    args.grad_residual = to.residual.data_ptr();
    residual_dtype = dtype_of(to.residual.scalar_type());
  }
  if (to.input.defined()) args.grad_input = to.input.data_ptr();
  args.input_dtype = dtype_of((to.input.defined() ? to.input : gradient).scalar_type());
  args.residual_dtype = residual_dtype;
  args.cols = sizes.cols;
  args.alpha = call.alpha;
  parallel_rows(sizes, gradient.element_size(),
                [&](int64_t begin, int64_t end) { kernels().split(args, begin, end); });
}

// ---- The residual add, fused; in two steps where no fused kernel takes the dtypes ----

struct Cpu {
  static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor&) {
    return fusednorm::empty(sizes, dtype);
  }
  static constexpr auto forward_rows = &fusednorm::forward_rows;
  static constexpr auto backward_rows = &fusednorm::backward_rows;
  static constexpr auto backward_rows_wide = &fusednorm::backward_rows_wide;
  static constexpr auto add = &fusednorm::add;
  static constexpr auto split = &fusednorm::split;
  static void add_forward_rows(const Call& call, const Outputs& to);
  static Gradients add_backward_rows(const Call& call);
};

void Cpu::add_forward_rows(const Call& call, const Outputs& to) {
  const auto dtype = to.output.scalar_type(), residual_dtype = to.residual_out.scalar_type();
  const int pair = cpu::add_pair(dtype_of(dtype), dtype_of(residual_dtype));
  const Sizes sizes = sizes_of(*call.input, call.normalized_shape.size());
  cpu::AddArgs add;
  if (pair == cpu::kNoAddPair || call.input->scalar_type() != dtype || sizes.cols == 0 ||
      !rows_are_contiguous(to.residual_out, sizes.leading_dims) ||
      !collapse(to.residual_out, sizes.leading_dims, &add.residual_out_rows)) {
    return TwoSteps<Cpu>::forward(call, to);
  }
  const Rows residual(*call.residual, sizes);
  const ForwardOperands operands(call, *call.input, pair < kNumDTypes ? dtype : at::kFloat, sizes);
  add.residual = residual.layout;
  add.residual_out = to.residual_out.data_ptr();
  add.alpha = call.alpha;
  cpu::ForwardArgs args;
  args.add = &add;
  operands.give(&args, to);
  args.cols = sizes.cols;
  args.params = call.norm.params(accumulation_dtype(residual_dtype));
  args.round_x_hat = rounding_of(call.of_sum(to.residual_out));
  args.ask_early = forward_asks_early(to.residual_out, sizes);
  const auto kernel = call.norm.centered() ? kernels().add_layer_norm_forward[pair]
                                           : kernels().add_rms_norm_forward[pair];
  parallel_rows(sizes, to.output.element_size() + to.residual_out.element_size(),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Gradients Cpu::add_backward_rows(const Call& call) {
  const Tensor& sum = *call.residual_out;
  const auto dtype = call.grad_output->scalar_type(), residual_dtype = sum.scalar_type();
  const int pair = cpu::add_pair(dtype_of(dtype), dtype_of(residual_dtype));
  const Sizes sizes = sizes_of(sum, call.normalized_shape.size());
  // Without a sum there is nothing to add or to split.
  if (pair == cpu::kNoAddPair || call.input_dtype != dtype || !call.wants_rows() ||
      sizes.cols == 0) {
    return TwoSteps<Cpu>::backward(call);
  }
  std::optional<Rows> other;
  if (present(*call.grad_residual_out)) other.emplace(**call.grad_residual_out, sizes);
  const BackwardOperands operands(call, sum, pair < kNumDTypes ? dtype : at::kFloat, sizes);
  BackwardCall run;
  Gradients made;
  if (call.wanted.input) made.input = fusednorm::empty(sum.sizes(), dtype);
  if (call.wanted.residual) made.residual = fusednorm::empty(sum.sizes(), residual_dtype);
  allocate_parameters(call, &run);
  run.kernel = call.norm.centered() ? kernels().add_layer_norm_backward[pair]
                                    : kernels().add_rms_norm_backward[pair];
  run.dtype = cpu::parameter_dtype(pair);
  run.computes[0] = call.wanted.weight || call.wanted.bias;
  run.computes[1] = call.norm.centered() ? run.computes[0] : call.wanted.bias;
  cpu::SplitArgs split;
  if (other) split.grad_residual_out = other->layout;
  split.grad_residual = made.residual.defined() ? made.residual.data_ptr() : nullptr;
  split.alpha = call.alpha;
  run.args.split = &split;
  set_common(call.of_sum(sum), sum, sizes, operands, made.input, &run);
  run.run();
  made.weight = std::move(run.gradients[0]);
  made.bias = std::move(run.gradients[1]);
  return made;
}

}  // namespace

const char* cpu_kernels() { return kernels().name; }

TORCH_LIBRARY_IMPL(fusednorm, CPU, m) {
  register_norms<DeviceKey<Cpu>, LayerNorm, RmsNorm, ScaleRows>(m);
}

}  // namespace fusednorm
