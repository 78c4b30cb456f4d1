// The CPU key: from tensors to rows, dtype dispatch, threads over rows.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "operators/checks.h"
#include "fusednorm.h"
#include "device/tensor_rows.h"
#include "device/two_steps.h"
#include "cpu/host.h"
#include "cpu/kernels/row_kernels.h"

namespace fusednorm {
namespace {

/// Whether what comes next is worth asking for early. Not rows of more than 64 KB: four of them
/// early in the second-level cache drive out what is needed now.
bool worth_asking_early(int64_t bytes, int64_t row_bytes, int64_t from = kPartOfCache) {
  return bytes > from && row_bytes <= 64 << 10;
}

/// In a forward (2048 x 768 fp32, its output not in cache: 292 us, 184 so; all in cache: 145, 169).
/// In 16 bits there is more to compute for a byte, and it pays later (4096 x 768: 286 us, 380;
/// 2048 x 4096: 1063, 896).
bool forward_asks_early(const Tensor& output, const Sizes& sizes) {
  const int64_t element_size = output.element_size();
  return worth_asking_early(static_cast<int64_t>(output.nbytes()), sizes.cols * element_size,
                            element_size > 2 ? kPartOfCache : 2 * kPartOfCache);
}

/// Whether a backward's gradients are better stored past the caches. In fp32 they are as soon as
/// the tensors around the call exceed the caches, even if the gradient is read right after (with a
/// pass over it, 2048 x 768: 408 us stored, 386 streamed; 4096 x 1024: 1871, 1580); in 16 bits only
/// where the gradient alone does (4096 x 1024: 803, 844; 8192 x 4096: 11.7 ms, 8.9).
bool past_caches(int64_t element_size, int64_t bytes) {
  return element_size > 2 ? bytes > kPartOfCache : exceeds_cache(bytes);
}

// A thread is worth waking (0.65 us) for about this much of a row's traffic.
constexpr int64_t kGrainBytes = 64 * 1024;

template <class Body>
void parallel_rows(const Sizes& sizes, int64_t element_size, const Body& body) {
  const int64_t row_bytes = std::max<int64_t>(1, sizes.cols * element_size);
  at::parallel_for(0, sizes.rows, std::max<int64_t>(1, kGrainBytes / row_bytes), body);
}

// ---- Forward ----

DType rounding_of(const Norm& norm, const Tensor& input) {
  return norm.llama() ? dtype_of(input.scalar_type()) : DType::kFloat64;
}

/// What a forward reads, held for as long as its kernels run.
struct ForwardOperands {
  Rows input;
  Affine weight, bias;

  ForwardOperands(const Norm& norm, const Tensor& rows, const OptionalTensor& weight_in,
                  const OptionalTensor& bias_in, at::ScalarType parameter_dtype, const Sizes& sizes)
      : input(rows, sizes),
        weight(weight_in, norm.weight_offset, parameter_dtype),
        bias(bias_in, 0, parameter_dtype) {
    if (bias.data != nullptr && weight.data == nullptr) {
      weight.fill_with(1, sizes.cols, parameter_dtype);
    }
  }

  void give(cpu::ForwardArgs* args, const Tensor& output, const Tensor& mean,
            const Tensor& rstd) const {
    args->input = input.layout;
    args->output = output.data_ptr();
    args->mean = mean.defined() ? mean.data_ptr() : nullptr;
    args->rstd = rstd.defined() ? rstd.data_ptr() : nullptr;
    args->weight = weight.data;
    args->bias = bias.data;
  }
};

void forward_rows(const Norm& norm, const ForwardInputs& in, const Tensor& output,
                  const Tensor& mean, const Tensor& rstd) {
  const auto dtype = output.scalar_type();
  const auto acc_dtype = accumulation_dtype(dtype);
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  // A wider output is that of the input widened first: the kernel sees one dtype.
  const ForwardOperands operands(norm,
                                 in.input.scalar_type() == dtype ? in.input : in.input.to(dtype),
                                 in.weight, in.bias, dtype, sizes);

  cpu::ForwardArgs args;
  operands.give(&args, output, mean, rstd);
  args.cols = sizes.cols;
  args.params = norm.params(acc_dtype);
  args.round_x_hat = rounding_of(norm, in.input);
  args.ask_early = forward_asks_early(output, sizes);
  const int kernel_dtype = static_cast<int>(dtype_of(dtype));
  const auto kernel = norm.centered ? kernels().layer_norm_forward[kernel_dtype]
                                    : kernels().rms_norm_forward[kernel_dtype];
  if (sizes.cols == 0) {  // statistics of nothing: 0/0
    for (const Tensor& statistic : {mean, rstd}) {
      if (statistic.defined()) statistic.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    return;
  }
  parallel_rows(sizes, output.element_size(),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// ---- Backward ----

// grad_weight and grad_bias are summed over chunks of rows, then over the chunks. A chunk is a
// function of the number of rows alone, so the bits do not depend on the number of threads. 64
// chunks, but of at most 1024 rows, so that fp32 sums stay short, and of at least 16, so that the
// partial sums stay a small part of the traffic. Up to 64 rows are one chunk: partial sums of a few
// long rows are as large as the rows (32 x 65536 bf16: 1.1 ms with chunks of 8, 0.5 with one).
int64_t rows_per_chunk(int64_t rows) {
  if (rows <= 64) return std::max<int64_t>(1, rows);
  return std::min<int64_t>(1024, std::max<int64_t>(16, (rows + 63) / 64));
}

/// A backward call: the kernels and their arguments, and where the sums go.
struct BackwardCall {
  cpu::BackwardKernel kernel;
  cpu::BackwardTermsKernel terms_kernel = nullptr;  // null: there are none that go by columns
  cpu::BackwardColumnsKernel columns_kernel = nullptr;
  DType dtype;  // as whose rows' parameters the kernel takes weight and bias
  cpu::BackwardArgs args;
  int64_t rows, grain_rows;
  Tensor gradients[2];                // of weight and bias; undefined: not wanted
  bool computes[2] = {false, false};  // which of their sums the kernel makes

  int parameters() const { return computes[0] + computes[1]; }
  at::ScalarType acc_dtype() const { return dtype == DType::kFloat64 ? at::kDouble : at::kFloat; }
  int64_t slots() const { return kernels().parameter_size(dtype, args.cols); }
  int64_t slot_bytes() const { return dtype == DType::kFloat64 ? 8 : 4; }

  /// By the size of one of the tensors around the call; args.cols is known.
  void suit_caches(const Tensor& rows_of_call) {
    const int64_t element_size = rows_of_call.element_size();
    const int64_t bytes = rows_of_call.numel() * element_size;
    args.ask_early = worth_asking_early(bytes, args.cols * element_size);
    args.past_caches = past_caches(element_size, bytes);
  }

  /// Where grad_weight and grad_bias are summed; null: not at all.
  struct Sums {
    void *weight = nullptr, *bias = nullptr;
  };
  /// In parameters() * slots() elements of memory.
  Sums sums_in(char* memory) const {
    return {computes[0] ? memory : nullptr,
            computes[1] ? memory + computes[0] * slots() * slot_bytes() : nullptr};
  }
  /// The sums over one chunk, stored as they are, may be the gradients themselves.
  bool sums_are_gradients() const {
    bool same = kernels().parameter_step[static_cast<int>(dtype)] == 1;
    for (int k = 0; k < 2; ++k) {
      const bool stored = gradients[k].defined() && gradients[k].scalar_type() == acc_dtype();
      same = same && (!computes[k] || stored);
    }
    return same;
  }
  Sums gradients_as_sums() const {
    return {computes[0] ? gradients[0].data_ptr() : nullptr,
            computes[1] ? gradients[1].data_ptr() : nullptr};
  }

  /// Rows [begin, end) and all columns.
  void rows_of(int64_t begin, int64_t end, const Sums& sums) const {
    kernel(args, begin, end, sums.weight, sums.bias);
  }

  /// From `chunks` partial sums to the gradients, for columns [begin, end).
  void reduce(const char* sums, int64_t chunks, int64_t begin, int64_t end) const {
    const char* const from[2] = {sums, sums + computes[0] * slots() * slot_bytes()};
    for (int k = 0; k < 2; ++k) {
      const Tensor& gradient = gradients[k];
      if (!gradient.defined()) continue;
      kernels().reduce[static_cast<int>(dtype)](from[k], chunks, parameters() * slots(),
                                                dtype_of(gradient.scalar_type()),
                                                gradient.data_ptr(), begin, end);
    }
  }

  void in_chunks() const {
    const int64_t chunk = rows_per_chunk(rows), chunks = (rows + chunk - 1) / chunk;
    // 1 x 65536 fp32: 89 us by way of partial sums, 40 without.
    if (chunks == 1 && sums_are_gradients()) return rows_of(0, rows, gradients_as_sums());
    const Tensor partials = empty({chunks, parameters(), slots()}, acc_dtype());
    const int64_t bytes = parameters() * slots() * slot_bytes();
    char* const first = static_cast<char*>(partials.data_ptr());
    at::parallel_for(
        0, chunks, std::max<int64_t>(1, grain_rows / chunk), [&](int64_t begin, int64_t end) {
          for (int64_t c = begin; c < end; ++c) {
            rows_of(c * chunk, std::min(rows, (c + 1) * chunk), sums_in(first + c * bytes));
          }
        });
    constexpr int64_t kStrip = 64;  // columns
    at::parallel_for(
        0, (args.cols + kStrip - 1) / kStrip,
        std::max<int64_t>(
            1, kGrainBytes / (kStrip * parameters() * std::max<int64_t>(1, chunks) * slot_bytes())),
        [&](int64_t begin, int64_t end) {
          reduce(first, chunks, begin * kStrip, std::min(args.cols, end * kStrip));
        });
  }

  /// One chunk of rows by many threads: all rows' sums first, then strips of columns. The same bits
  /// as in_chunks. False where a row is too extreme for it.
  bool in_strips() const {
    const int64_t terms_bytes = cpu::kTermsBytes * (slot_bytes() / 4);
    const auto terms = std::make_unique<char[]>(rows * terms_bytes);
    std::atomic<bool> ordinary{true};
    at::parallel_for(0, rows, std::max<int64_t>(1, grain_rows), [&](int64_t begin, int64_t end) {
      if (!terms_kernel(args, begin, end, terms.get())) ordinary = false;
    });
    if (!ordinary) return false;
    const bool direct = sums_are_gradients();
    Tensor partial;
    if (!direct) partial = empty({parameters(), slots()}, acc_dtype());
    char* const memory = direct ? nullptr : static_cast<char*>(partial.data_ptr());
    const Sums sums = direct ? gradients_as_sums() : sums_in(memory);
    const int64_t strips = (args.cols + kStripColumns - 1) / kStripColumns;
    at::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t from = s * kStripColumns, to = std::min(args.cols, from + kStripColumns);
        columns_kernel(args, terms.get(), rows, from, to, sums.weight, sums.bias);
        if (!direct) reduce(memory, 1, from, to);
      }
    });
    return true;
  }

  void run() const {
    if (args.cols == 0) return;
    if (parameters() != 0) {
      if (!strips_pay() || !in_strips()) in_chunks();
    } else {
      at::parallel_for(0, rows, std::max<int64_t>(1, grain_rows),
                       [&](int64_t begin, int64_t end) { rows_of(begin, end, Sums{}); });
    }
  }

 private:
  // In strips of 1024 columns four fp32 rows and the sums stay in the first cache. Below four
  // strips a thread's wake-up costs more than it saves.
  static constexpr int64_t kStripColumns = 1024;
  bool strips_pay() const {
    return terms_kernel != nullptr && rows <= 64 && args.cols >= 4 * kStripColumns &&
           grain_rows < rows && at::get_num_threads() > 1 && !at::in_parallel_region();
  }
};

/// What a backward reads, held for as long as its kernels run.
struct BackwardOperands {
  Rows grad_output, input;
  Tensor mean, rstd;
  Affine weight;

  BackwardOperands(const Norm& norm, const BackwardInputs& in, const Tensor& rows,
                   at::ScalarType parameter_dtype, const Sizes& sizes)
      : grad_output(in.grad_output, sizes),
        input(rows, sizes),
        mean(in.mean.defined() ? in.mean.contiguous() : Tensor()),
        rstd(in.rstd.contiguous()),
        weight(in.weight, norm.weight_offset, parameter_dtype) {
    if (weight.data == nullptr) weight.fill_with(1, sizes.cols, parameter_dtype);
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

ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
  // Beside a wider grad_output (an fp32 output of a 16-bit input) the input is widened to it.
  const auto dtype = in.grad_output.scalar_type();
  const auto acc_dtype = accumulation_dtype(dtype);
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  const BackwardOperands operands(
      norm, in, in.input.scalar_type() == dtype ? in.input : in.input.to(dtype), dtype, sizes);

  const auto shape = C10_AS_INTARRAYREF_SLOW(in.normalized_shape);
  BackwardCall call;
  Tensor grad_input;
  if (in.output_mask[0]) grad_input = empty(in.input.sizes(), dtype);
  if (in.output_mask[1]) call.gradients[0] = empty(shape, checks::grad_weight_dtype(in));
  if (in.output_mask[2]) call.gradients[1] = empty(shape, checks::grad_bias_dtype(in));

  call.dtype = dtype_of(dtype);
  const int i = static_cast<int>(call.dtype);
  const cpu::KernelTable& table = kernels();
  call.kernel = norm.centered ? table.layer_norm_backward[i] : table.rms_norm_backward[i];
  call.terms_kernel =
      norm.centered ? table.layer_norm_backward_terms[i] : table.rms_norm_backward_terms[i];
  call.columns_kernel =
      norm.centered ? table.layer_norm_backward_columns[i] : table.rms_norm_backward_columns[i];
  for (int k = 0; k < 2; ++k) call.computes[k] = call.gradients[k].defined();
  call.rows = sizes.rows;
  call.grain_rows = kGrainBytes / std::max<int64_t>(1, sizes.cols * in.grad_output.element_size());
  operands.give(&call.args, grad_input);
  call.args.cols = sizes.cols;
  call.args.params = norm.params(acc_dtype);
  call.args.round_x_hat = rounding_of(norm, in.input);
  call.suit_caches(in.grad_output);

  if (in.output_mask[0] || call.parameters() != 0) call.run();
  return {grad_input, call.gradients[0], call.gradients[1]};
}

// ---- The residual add, as steps of its own ----

void add(const AddInputs& in, const Tensor& residual_out) {
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  cpu::AddArgs args;
  // A residual that is updated in place may lie in ways that no row kernel writes to.
  const bool in_rows = rows_are_contiguous(residual_out, sizes.leading_dims) &&
                       collapse(residual_out, sizes.leading_dims, &args.residual_out_rows);
  const Tensor target =
      in_rows ? residual_out : empty(in.input.sizes(), residual_out.scalar_type());
  if (!in_rows) collapse(target, sizes.leading_dims, &args.residual_out_rows);
  args.residual_out = target.data_ptr();
  const Rows input(in.input, sizes), residual(in.residual, sizes);
  args.input = input.layout;
  args.residual = residual.layout;
  args.input_dtype = dtype_of(in.input.scalar_type());
  args.residual_dtype = dtype_of(residual_out.scalar_type());
  args.cols = sizes.cols;
  args.alpha = in.alpha;
  parallel_rows(sizes, target.element_size(),
                [&](int64_t begin, int64_t end) { kernels().add(args, begin, end); });
  if (!in_rows) residual_out.copy_(target);
}

void split(const Tensor& gradient, size_t normalized_dims, const OptionalTensor& grad_residual_out,
           double alpha, const Tensor& grad_input, const Tensor& grad_residual) {
  const Sizes sizes = sizes_of(gradient, normalized_dims);
  std::optional<Rows> other;
  cpu::SplitArgs args;
  args.gradient = gradient.const_data_ptr();
  // What there is none of takes the gradient's dtype.
  DType residual_dtype = dtype_of(gradient.scalar_type());
  if (grad_residual_out.has_value() && grad_residual_out->defined()) {
    other.emplace(*grad_residual_out, sizes);
    args.grad_residual_out = other->layout;
    residual_dtype = dtype_of(grad_residual_out->scalar_type());
  }
  if (grad_residual.defined()) {
    args.grad_residual = grad_residual.data_ptr();
    residual_dtype = dtype_of(grad_residual.scalar_type());
  }
  if (grad_input.defined()) args.grad_input = grad_input.data_ptr();
  args.input_dtype = dtype_of((grad_input.defined() ? grad_input : gradient).scalar_type());
  args.residual_dtype = residual_dtype;
  args.cols = sizes.cols;
  args.alpha = alpha;
  parallel_rows(sizes, gradient.element_size(),
                [&](int64_t begin, int64_t end) { kernels().split(args, begin, end); });
}

// ---- The residual add, fused; in two steps where no fused kernel takes the dtypes ----

struct Cpu {
  static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor&) {
    return fusednorm::empty(sizes, dtype);
  }
  static constexpr auto forward_rows = &fusednorm::forward_rows;
  static constexpr auto backward_rows_wide = &fusednorm::backward_rows;
  static ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
    auto gradients = fusednorm::backward_rows(norm, in);
    Tensor& grad_input = std::get<0>(gradients);
    if (grad_input.defined()) grad_input = grad_input.to(in.input.scalar_type());
    return gradients;
  }
  static constexpr auto add = &fusednorm::add;
  static constexpr auto split = &fusednorm::split;
  static void add_forward_rows(const Norm&, const AddInputs&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&);
  static FourTensors add_backward_rows(const Norm&, const AddBackwardInputs&);
};

void Cpu::add_forward_rows(const Norm& norm, const AddInputs& in, const Tensor& output,
                           const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
  const auto dtype = output.scalar_type(), residual_dtype = residual_out.scalar_type();
  const int pair = cpu::add_pair(dtype_of(dtype), dtype_of(residual_dtype));
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  cpu::AddArgs add;
  if (pair == cpu::kNoAddPair || in.input.scalar_type() != dtype || sizes.cols == 0 ||
      !rows_are_contiguous(residual_out, sizes.leading_dims) ||
      !collapse(residual_out, sizes.leading_dims, &add.residual_out_rows)) {
    return TwoSteps<Cpu>::forward(norm, in, output, residual_out, mean, rstd);
  }
  const Rows residual(in.residual, sizes);
  const ForwardOperands operands(norm, in.input, in.weight, in.bias,
                                 pair < kNumDTypes ? dtype : at::kFloat, sizes);
  add.residual = residual.layout;
  add.residual_out = residual_out.data_ptr();
  add.alpha = in.alpha;
  cpu::ForwardArgs args;
  args.add = &add;
  operands.give(&args, output, mean, rstd);
  args.cols = sizes.cols;
  args.params = norm.params(accumulation_dtype(residual_dtype));
  args.round_x_hat = rounding_of(norm, residual_out);
  args.ask_early = forward_asks_early(residual_out, sizes);
  const auto kernel =
      norm.centered ? kernels().add_layer_norm_forward[pair] : kernels().add_rms_norm_forward[pair];
  parallel_rows(sizes, output.element_size() + residual_out.element_size(),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

FourTensors Cpu::add_backward_rows(const Norm& norm, const AddBackwardInputs& in) {
  const auto dtype = in.grad_output.scalar_type(), residual_dtype = in.residual_out.scalar_type();
  const int pair = cpu::add_pair(dtype_of(dtype), dtype_of(residual_dtype));
  const bool adds = in.grad_residual_out.has_value() && in.grad_residual_out->defined();
  const Sizes sizes = sizes_of(in.residual_out, in.normalized_shape.size());
  // Without a sum there is nothing to add or to split.
  if (pair == cpu::kNoAddPair || in.input_dtype != dtype || !in.wants_sum() || sizes.cols == 0) {
    return TwoSteps<Cpu>::backward(norm, in);
  }
  std::optional<Rows> other;
  if (adds) other.emplace(*in.grad_residual_out, sizes);
  const BackwardInputs of_norm = in.of_norm();
  const BackwardOperands operands(norm, of_norm, in.residual_out,
                                  pair < kNumDTypes ? dtype : at::kFloat, sizes);

  const auto shape = C10_AS_INTARRAYREF_SLOW(in.normalized_shape);
  BackwardCall call;
  Tensor grad_input, grad_residual;
  if (in.output_mask[0]) grad_input = fusednorm::empty(in.residual_out.sizes(), dtype);
  if (in.output_mask[1]) grad_residual = fusednorm::empty(in.residual_out.sizes(), residual_dtype);
  if (in.output_mask[2])
    call.gradients[0] = fusednorm::empty(shape, checks::grad_weight_dtype(of_norm));
  if (in.output_mask[3])
    call.gradients[1] = fusednorm::empty(shape, checks::grad_bias_dtype(of_norm));
  call.kernel = norm.centered ? kernels().add_layer_norm_backward[pair]
                              : kernels().add_rms_norm_backward[pair];
  call.dtype = cpu::parameter_dtype(pair);
  call.computes[0] = in.output_mask[2] || in.output_mask[3];
  call.computes[1] = call.computes[0] && norm.centered;
  call.rows = sizes.rows;
  call.grain_rows = kGrainBytes / std::max<int64_t>(1, sizes.cols * in.residual_out.element_size());

  cpu::SplitArgs split;
  if (adds) split.grad_residual_out = other->layout;
  split.grad_residual = grad_residual.defined() ? grad_residual.data_ptr() : nullptr;
  split.alpha = in.alpha;
  call.args.split = &split;
  operands.give(&call.args, grad_input);
  call.args.cols = sizes.cols;
  call.args.params = norm.params(accumulation_dtype(residual_dtype));
  call.args.round_x_hat = rounding_of(norm, in.residual_out);
  call.suit_caches(in.residual_out);
  call.run();
  return {std::move(grad_input), std::move(grad_residual), std::move(call.gradients[0]),
          std::move(call.gradients[1])};
}

}  // namespace

const char* cpu_kernels() { return kernels().name; }

TORCH_LIBRARY_IMPL(fusednorm, CPU, m) { register_operators<DeviceBackend<Cpu>>(m); }

}  // namespace fusednorm
