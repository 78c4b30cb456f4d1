// The CPU key of GroupNorm: memory formats, dtypes and outputs for the kernels.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <limits>

#include "cpu/host.h"
#include "cpu/kernels/group_kernels.h"
#include "device/device_key.h"
#include "device/tensor_rows.h"

namespace fusednorm {
namespace {

cpu::Parallel parallel() {
  const auto run = [](int64_t count, int64_t grain, cpu::Parallel::Body body, void* context) {
    at::parallel_for(0, count, grain,
                     [&](int64_t begin, int64_t end) { body(context, begin, end); });
  };
  return {at::get_num_threads(), run};
}

cpu::GroupShape shape_of(int64_t groups, const Tensor& input, at::MemoryFormat format) {
  cpu::GroupShape shape{input.size(0), groups, input.size(1) / groups, 1, false};
  for (int64_t d = 2; d < input.dim(); ++d) shape.spatial *= input.size(d);
  // With one channel, or one position, both formats are the same memory.
  shape.channels_last =
      format != at::MemoryFormat::Contiguous && shape.spatial > 1 && shape.channels() > 1;
  return shape;
}

struct GroupCpu {
  static Outputs outputs(Keys, const Call& call) {
    checks::check(call);
    const int64_t groups = call.norm.num_groups, channels = call.input->size(1);
    const auto dtype = call.input->scalar_type(), acc_dtype = accumulation_dtype(dtype);
    const auto format = call.input->suggest_memory_format();
    const bool statistics = keeps_statistics(call.form);
    Outputs to;
    to.output = empty(call.input->sizes(), dtype, format);
    if (statistics) {
      to.mean = empty({call.input->size(0), groups}, acc_dtype);
      to.rstd = empty({call.input->size(0), groups}, acc_dtype);
    }
    if (call.input->numel() == 0) {
      fill_statistics(to);
      return to;
    }
    const Tensor input = call.input->contiguous(format);
    Affine weight(*call.weight, 0, acc_dtype), bias(*call.bias, 0, acc_dtype);
    if (weight.data == nullptr && bias.data != nullptr) weight.fill_with(1, channels, acc_dtype);
    if (weight.data != nullptr && bias.data == nullptr) bias.fill_with(0, channels, acc_dtype);

    cpu::GroupForwardArgs args;
    args.shape = shape_of(groups, input, format);
    args.input = input.const_data_ptr();
    args.output = to.output.data_ptr();
    args.mean = statistics ? to.mean.data_ptr() : nullptr;
    args.rstd = statistics ? to.rstd.data_ptr() : nullptr;
    args.weight = weight.data;
    args.bias = bias.data;
    args.params = call.norm.params(acc_dtype);
    args.past_caches = exceeds_cache(2 * input.numel() * input.element_size());
    kernels().group_norm.forward[static_cast<int>(dtype_of(dtype))](args, parallel());
    return to;
  }

  static Gradients gradients(Keys, const Call& call) {
    checks::check(call);
    const int64_t groups = call.norm.num_groups, channels = call.input->size(1);
    const auto dtype = call.input->scalar_type(), acc_dtype = accumulation_dtype(dtype);
    const auto format = call.input->suggest_memory_format();
    Gradients to;
    if (call.wanted.input) to.input = empty(call.input->sizes(), dtype, format);
    if (call.wanted.weight) to.weight = empty({channels}, checks::grad_weight_dtype(call));
    if (call.wanted.bias) to.bias = empty({channels}, checks::grad_bias_dtype(call));
    if (call.input->numel() == 0) {  // sums of nothing
      for (const Tensor& sum : {to.weight, to.bias}) {
        if (sum.defined()) sum.zero_();
      }
      return to;
    }
    const Tensor input = call.input->contiguous(format);
    const Tensor grad_output = call.grad_output->to(dtype).contiguous(format);  // may be narrower
    const Tensor mean = call.mean->contiguous(), rstd = call.rstd->contiguous();
    const Affine weight(*call.weight, 0, acc_dtype);

    cpu::GroupBackwardArgs args;
    args.shape = shape_of(groups, input, format);
    args.grad_output = grad_output.const_data_ptr();
    args.input = input.const_data_ptr();
    args.mean = mean.const_data_ptr();
    args.rstd = rstd.const_data_ptr();
    args.weight = weight.data;
    args.grad_input = to.input.defined() ? to.input.data_ptr() : nullptr;
    args.grad_weight = to.weight.defined() ? to.weight.data_ptr() : nullptr;
    args.grad_bias = to.bias.defined() ? to.bias.data_ptr() : nullptr;
    args.grad_weight_dtype = dtype_of(checks::grad_weight_dtype(call));
    args.grad_bias_dtype = dtype_of(checks::grad_bias_dtype(call));
    args.params = call.norm.params(acc_dtype);
    // As for rows (row_norm_cpu.cpp), but in 16 bits earlier: there is less to compute for a byte
    // (8 x 320 x 64 x 64, with a pass over the gradient: 2.9 ms stored, 2.6 streamed).
    args.past_caches = static_cast<int64_t>(input.nbytes()) >
                       (input.element_size() > 2 ? kPartOfCache : 2 * kPartOfCache);
    kernels().group_norm.backward[static_cast<int>(dtype_of(dtype))](args, parallel());
    return to;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, CPU, m) { register_norms<GroupCpu, GroupNorm>(m); }

}  // namespace fusednorm
