// The checks of the operators that write to an argument: where their memory lies.
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "operators/checks.h"

namespace fusednorm::checks {
namespace {

/// The memory of a strided tensor: runs of `run` bytes, whose beginnings lie multiples of `step`
/// apart (0: there is one), all within [begin, end).
struct MemoryRuns {
  int64_t begin, end, run, step = 0;

  explicit MemoryRuns(const Tensor& tensor) {
    const int64_t size = tensor.element_size();
    begin = reinterpret_cast<int64_t>(tensor.const_data_ptr());
    run = size;
    c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // stride in bytes, size
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d) * size, tensor.size(d));
    }
    std::sort(dims.begin(), dims.end());
    end = begin + run;
    for (const auto& [stride, count] : dims) {
      end += stride * (count - 1);
      if (stride == run && step == 0) {
        run *= count;
      } else {
        step = std::gcd(step, stride);
      }
    }
  }
};

/// Whether no byte of one tensor lies in the other; false too where it would take a search to tell.
bool lie_apart(const MemoryRuns& first, const MemoryRuns& second) {
  if (first.end <= second.begin || second.end <= first.begin) return true;
  const int64_t step = std::gcd(first.step, second.step);
  if (step == 0) return false;
  const int64_t distance = ((second.begin - first.begin) % step + step) % step;
  return distance >= first.run && step - distance >= second.run;
}

}  // namespace

/// Each stride passes over what the smaller ones reach.
void check_writable(const Call& call) {
  const Tensor& tensor = *call.residual;
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_contiguous()) return;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (sizes[d] > 1) dims.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    TORCH_CHECK(stride > reach, "fusednorm::", call.norm.op, ": ", arg::residual::name,
                ": expected memory of its own for each element (it is written to), got shape ",
                sizes, " with strides ", strides, ": expanded or overlapping");
    reach += (size - 1) * stride;
  }
}

void check_apart(const Call& call) {
  const Tensor& residual = *call.residual;
  if (residual.numel() == 0) return;
  const MemoryRuns written(residual);
  const auto check = [&](std::string_view argument, const Tensor& tensor, bool may_be_same) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    const bool same = tensor.const_data_ptr() == residual.const_data_ptr() &&
                      tensor.scalar_type() == residual.scalar_type() &&
                      tensor.sizes() == residual.sizes() && tensor.strides() == residual.strides();
    TORCH_CHECK((same && may_be_same) || lie_apart(written, MemoryRuns(tensor)),
                "fusednorm::", call.norm.op, ": ", argument,
                ": expected memory apart from residual, which is written to, got an overlap");
  };
  check(arg::input::name, *call.input, true);
  if (present(*call.weight)) check(arg::weight::name, **call.weight, false);
  if (present(*call.bias)) check(arg::bias::name, **call.bias, false);
}

}  // namespace fusednorm::checks
