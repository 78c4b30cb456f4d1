// The CPU key: from tensors to rows, dtype dispatch, threads over rows.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "../checks.h"
#include "../fusednorm.h"
#include "../tensor_rows.h"
#include "../two_steps.h"
#include "host.h"
#include "kernels/row_kernels.h"

namespace fusednorm {
namespace {

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

void forward_rows(const Norm& norm, const ForwardInputs& in, const Tensor& output,
                  const Tensor& mean, const Tensor& rstd) {
  const auto dtype = output.scalar_type();
  const auto acc_dtype = accumulation_dtype(dtype);
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  // A wider output is that of the input widened first: the kernel sees one dtype.
  const Rows rows(in.input.scalar_type() == dtype ? in.input : in.input.to(dtype), sizes);
  Affine weight(in.weight, norm.weight_offset, dtype);
  const Affine bias(in.bias, 0, dtype);
  if (bias.data != nullptr && weight.data == nullptr) weight.fill_with(1, sizes.cols, dtype);

  cpu::ForwardArgs args;
  args.input = rows.layout;
  args.output = output.data_ptr();
  args.mean = mean.defined() ? mean.data_ptr() : nullptr;
  args.rstd = rstd.defined() ? rstd.data_ptr() : nullptr;
  args.weight = weight.data;
  args.bias = bias.data;
  args.cols = sizes.cols;
  args.params = norm.params(acc_dtype);
  args.round_x_hat = rounding_of(norm, in.input);
  args.beyond_cache = beyond_cache(2 * output.nbytes());
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

/// A backward call: the kernels' arguments, and where the sums go.
struct BackwardCall {
  bool centered;
  DType dtype;
  cpu::BackwardArgs args;
  int64_t rows, grain_rows;
  Tensor gradients[2];  // of weight and bias; undefined: not wanted

  int parameters() const { return gradients[0].defined() + gradients[1].defined(); }
  at::ScalarType acc_dtype() const { return dtype == DType::kFloat64 ? at::kDouble : at::kFloat; }
  int64_t slots() const { return kernels().parameter_size(dtype, args.cols); }
  int64_t slot_bytes() const { return dtype == DType::kFloat64 ? 8 : 4; }

  /// Rows [begin, end) and all columns; `sums`: grad_weight's, then grad_bias's, or null.
  void rows_of(int64_t begin, int64_t end, char* sums) const {
    const int i = static_cast<int>(dtype);
    const auto kernel =
        centered ? kernels().layer_norm_backward[i] : kernels().rms_norm_backward[i];
    kernel(args, begin, end, weight_sums(sums), bias_sums(sums, slots()));
  }

  /// From `chunks` partial sums to the gradients, for columns [begin, end).
  void reduce(const char* sums, int64_t chunks, int64_t begin, int64_t end) const {
    int64_t slot = 0;
    for (const Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      kernels().reduce[static_cast<int>(dtype)](
          sums + slot++ * slots() * slot_bytes(), chunks, parameters() * slots(),
          dtype_of(gradient.scalar_type()), gradient.data_ptr(), begin, end);
    }
  }

  void in_chunks() const {
    const int64_t chunk = rows_per_chunk(rows), chunks = (rows + chunk - 1) / chunk;
    const Tensor partials = empty({chunks, parameters(), slots()}, acc_dtype());
    const int64_t bytes = parameters() * slots() * slot_bytes();
    char* const first = static_cast<char*>(partials.data_ptr());
    at::parallel_for(0, chunks, std::max<int64_t>(1, grain_rows / chunk),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t c = begin; c < end; ++c) {
                         rows_of(c * chunk, std::min(rows, (c + 1) * chunk), first + c * bytes);
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
    const int i = static_cast<int>(dtype);
    const auto terms_kernel =
        centered ? kernels().layer_norm_backward_terms[i] : kernels().rms_norm_backward_terms[i];
    const auto columns_kernel = centered ? kernels().layer_norm_backward_columns[i]
                                         : kernels().rms_norm_backward_columns[i];
    const int64_t terms_bytes = cpu::kTermsBytes * (slot_bytes() / 4);
    const auto terms = std::make_unique<char[]>(rows * terms_bytes);
    std::atomic<bool> ordinary{true};
    at::parallel_for(0, rows, std::max<int64_t>(1, grain_rows), [&](int64_t begin, int64_t end) {
      if (!terms_kernel(args, begin, end, terms.get())) ordinary = false;
    });
    if (!ordinary) return false;
    const Tensor partial = empty({parameters(), slots()}, acc_dtype());
    char* const sums = static_cast<char*>(partial.data_ptr());
    const int64_t strips = (args.cols + kStripColumns - 1) / kStripColumns;
    at::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t from = s * kStripColumns, to = std::min(args.cols, from + kStripColumns);
        columns_kernel(args, terms.get(), rows, from, to, weight_sums(sums),
                       bias_sums(sums, slots()));
        reduce(sums, 1, from, to);
      }
    });
    return true;
  }

  // In strips of 1024 columns four fp32 rows and the sums stay in the first cache. Below four
  // strips a thread's wake-up costs more than it saves.
  static constexpr int64_t kStripColumns = 1024;
  bool strips_pay() const {
    return rows <= 64 && args.cols >= 4 * kStripColumns && grain_rows < rows &&
           at::get_num_threads() > 1 && !at::in_parallel_region();
  }

 private:
  char* weight_sums(char* sums) const { return gradients[0].defined() ? sums : nullptr; }
  char* bias_sums(char* sums, int64_t slots) const {
    if (!gradients[1].defined()) return nullptr;
    return sums + gradients[0].defined() * slots * slot_bytes();
  }
};

ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
  // Beside a wider grad_output (an fp32 output of a 16-bit input) the input is widened to it.
  const auto dtype = in.grad_output.scalar_type();
  const auto acc_dtype = accumulation_dtype(dtype);
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  const Rows grad_output(in.grad_output, sizes);
  const Rows input(in.input.scalar_type() == dtype ? in.input : in.input.to(dtype), sizes);
  const Tensor mean = in.mean.defined() ? in.mean.contiguous() : Tensor();
  const Tensor rstd = in.rstd.contiguous();
  Affine weight(in.weight, norm.weight_offset, dtype);
  if (weight.data == nullptr) weight.fill_with(1, sizes.cols, dtype);

  const auto shape = C10_AS_INTARRAYREF_SLOW(in.normalized_shape);
  BackwardCall call;
  Tensor grad_input;
  if (in.output_mask[0]) grad_input = empty(in.input.sizes(), dtype);
  if (in.output_mask[1]) call.gradients[0] = empty(shape, checks::grad_weight_dtype(in));
  if (in.output_mask[2]) call.gradients[1] = empty(shape, checks::grad_bias_dtype(in));

  call.centered = norm.centered;
  call.dtype = dtype_of(dtype);
  call.rows = sizes.rows;
  call.grain_rows = kGrainBytes / std::max<int64_t>(1, sizes.cols * in.grad_output.element_size());
  call.args.grad_output = grad_output.layout;
  call.args.input = input.layout;
  call.args.mean = mean.defined() ? mean.const_data_ptr() : nullptr;
  call.args.rstd = rstd.const_data_ptr();
  call.args.weight = weight.data;
  call.args.grad_input = grad_input.defined() ? grad_input.data_ptr() : nullptr;
  call.args.cols = sizes.cols;
  call.args.params = norm.params(acc_dtype);
  call.args.round_x_hat = rounding_of(norm, in.input);
  call.args.beyond_cache = beyond_cache(3 * in.grad_output.numel() * in.grad_output.element_size());

  if (sizes.cols != 0) {
    if (call.parameters() != 0) {
      if (!call.strips_pay() || !call.in_strips()) call.in_chunks();
    } else if (in.output_mask[0]) {
      at::parallel_for(0, sizes.rows, std::max<int64_t>(1, call.grain_rows),
                       [&](int64_t begin, int64_t end) { call.rows_of(begin, end, nullptr); });
    }
  }
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
  static constexpr auto add_forward_rows = &TwoSteps<Cpu>::forward;
  static constexpr auto add_backward_rows = &TwoSteps<Cpu>::backward;
};

}  // namespace

const char* cpu_kernels() { return kernels().name; }

TORCH_LIBRARY_IMPL(fusednorm, CPU, m) { register_operators<DeviceBackend<Cpu>>(m); }

}  // namespace fusednorm
