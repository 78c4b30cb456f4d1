// The CPU key: from tensors to rows, dtype dispatch, threads over rows.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "../checks.h"
#include "../fusednorm.h"
#include "../ops.h"
#include "../tensor_rows.h"
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
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  // A wider output is that of the input widened first: the kernel sees one dtype.
  const Rows rows(
      in.input.scalar_type() == output.scalar_type() ? in.input : in.input.to(output.scalar_type()),
      sizes);
  Affine weight(in.weight, norm.weight_offset, acc_dtype);
  const Affine bias(in.bias, 0, acc_dtype);
  if (bias.data != nullptr && weight.data == nullptr) weight.fill_with(1, sizes.cols, acc_dtype);

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
  const int dtype = static_cast<int>(dtype_of(output.scalar_type()));
  const auto kernel =
      norm.centered ? kernels().layer_norm_forward[dtype] : kernels().rms_norm_forward[dtype];
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
// function of the shape alone, so the bits do not depend on the number of threads. 64 chunks, but
// of at most 1024 rows, so that fp32 sums stay short, and of at least 16 (8 where rows are few), so
// that the partial sums stay a small part of the traffic.
int64_t rows_per_chunk(const Sizes& sizes) {
  const int64_t for_64 = (sizes.rows + 63) / 64;
  return std::min<int64_t>(1024, std::max<int64_t>(for_64, sizes.rows < 128 ? 8 : 16));
}

ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
  // Beside a wider grad_output (an fp32 output of a 16-bit input) the input is widened to it.
  const auto dtype = in.grad_output.scalar_type();
  const auto acc_dtype = accumulation_dtype(dtype);
  const Sizes sizes = sizes_of(in.input, in.normalized_shape.size());
  const Rows grad_output(in.grad_output, sizes);
  const Rows input(in.input.scalar_type() == dtype ? in.input : in.input.to(dtype), sizes);
  const Tensor mean = in.mean.defined() ? in.mean.contiguous() : Tensor();
  const Tensor rstd = in.rstd.contiguous();
  Affine weight(in.weight, norm.weight_offset, acc_dtype);
  if (weight.data == nullptr) weight.fill_with(1, sizes.cols, acc_dtype);

  const auto shape = C10_AS_INTARRAYREF_SLOW(in.normalized_shape);
  Tensor grad_input, grad_parameters[2];
  if (in.output_mask[0]) grad_input = empty(in.input.sizes(), dtype);
  if (in.output_mask[1]) grad_parameters[0] = empty(shape, checks::grad_weight_dtype(in));
  if (in.output_mask[2]) grad_parameters[1] = empty(shape, checks::grad_bias_dtype(in));

  cpu::BackwardArgs args;
  args.grad_output = grad_output.layout;
  args.input = input.layout;
  args.mean = mean.defined() ? mean.const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  args.weight = weight.data;
  args.grad_input = grad_input.defined() ? grad_input.data_ptr() : nullptr;
  args.cols = sizes.cols;
  args.params = norm.params(acc_dtype);
  const int kernel_dtype = static_cast<int>(dtype_of(dtype));
  const auto kernel = norm.centered ? kernels().layer_norm_backward[kernel_dtype]
                                    : kernels().rms_norm_backward[kernel_dtype];
  args.round_x_hat = rounding_of(norm, in.input);

  const int64_t parameters = in.output_mask[1] + in.output_mask[2];
  if (sizes.cols == 0) return {grad_input, grad_parameters[0], grad_parameters[1]};
  if (parameters == 0) {
    if (in.output_mask[0]) {
      parallel_rows(sizes, grad_input.element_size(), [&](int64_t begin, int64_t end) {
        kernel(args, begin, end, nullptr, nullptr);
      });
    }
    return {grad_input, Tensor(), Tensor()};
  }

  const int64_t chunk = rows_per_chunk(sizes), chunks = (sizes.rows + chunk - 1) / chunk;
  const Tensor partials = empty({chunks, parameters, sizes.cols}, acc_dtype);
  const int64_t partial_bytes = sizes.cols * partials.element_size();
  char* const first = static_cast<char*>(partials.data_ptr());
  const int64_t chunk_bytes = chunk * sizes.cols * in.input.element_size();
  at::parallel_for(
      0, chunks, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, chunk_bytes)),
      [&](int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; ++c) {
          char* const partial = first + c * parameters * partial_bytes;
          std::memset(partial, 0, static_cast<size_t>(parameters * partial_bytes));
          kernel(args, c * chunk, std::min(sizes.rows, (c + 1) * chunk),
                 in.output_mask[1] ? partial : nullptr,
                 in.output_mask[2] ? partial + in.output_mask[1] * partial_bytes : nullptr);
        }
      });
  const auto reduce = kernels().reduce[acc_dtype == at::kDouble ? 0 : 1];
  constexpr int64_t kStrip = 64;  // columns
  const int64_t strips = (sizes.cols + kStrip - 1) / kStrip;
  const int64_t strip_bytes = kStrip * parameters * std::max<int64_t>(1, chunks) * 4;
  at::parallel_for(0, strips, std::max<int64_t>(1, kGrainBytes / strip_bytes),
                   [&](int64_t begin, int64_t end) {
                     int64_t slot = 0;
                     for (const Tensor& gradient : grad_parameters) {
                       if (!gradient.defined()) continue;
                       reduce(first + slot++ * partial_bytes, chunks, parameters * sizes.cols,
                              dtype_of(gradient.scalar_type()), gradient.data_ptr(), begin * kStrip,
                              std::min(sizes.cols, end * kStrip));
                     }
                   });
  return {grad_input, grad_parameters[0], grad_parameters[1]};
}

struct Cpu {
  static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor&) {
    return fusednorm::empty(sizes, dtype);
  }
  static constexpr auto forward_rows = &fusednorm::forward_rows;
  static ThreeTensors backward_rows(const Norm& norm, const BackwardInputs& in) {
    auto gradients = fusednorm::backward_rows(norm, in);
    Tensor& grad_input = std::get<0>(gradients);
    if (grad_input.defined()) grad_input = grad_input.to(in.input.scalar_type());
    return gradients;
  }
};

}  // namespace

const char* cpu_kernels() { return kernels().name; }

TORCH_LIBRARY_IMPL(fusednorm, CPU, m) { Operators<DeviceBackend<Cpu>>::register_on(m); }

}  // namespace fusednorm
