// What every function of the CPU key needs: the kernels of this machine, memory, parameters.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/Version.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/caches.h"
#include "cpu/kernels/row_kernels.h"
#include "device/tensor_rows.h"
#include "operators/arguments.h"

namespace fusednorm {

inline const cpu::KernelTable& kernels() {
  static const cpu::KernelTable& table = cpu::kernel_table(at::get_cpu_capability().c_str());
  return table;
}

// Fresh memory of many MiB is mapped page by page as it is first written, which takes longer than
// the norm itself (8192 x 4096 fp32: 61 ms, with huge pages 15). Where the system gives huge pages
// on request, ask.
constexpr size_t kHugeBytes = 4 << 20;

inline Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype,
                    at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  Tensor tensor(at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, format));
#if defined(__linux__)
  if (tensor.nbytes() >= kHugeBytes) {
    constexpr uintptr_t kPage = 4096;
    const auto begin =
        (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + (kPage - 1)) & ~(kPage - 1);
    const auto end =
        (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + tensor.nbytes()) & ~(kPage - 1);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: may be refused
  }
#endif
  return tensor;
}

/// A weight or bias as the kernels of `dtype` take it, `offset` added: itself where nothing
/// changes.
struct Affine {
  Tensor holder;
  const void* data = nullptr;

  Affine(const OptionalTensor& parameter, double offset, at::ScalarType dtype) {
    if (!parameter.has_value() || !parameter->defined()) return;
    holder = parameter->contiguous();
    const DType kernel_dtype = dtype_of(dtype);
    const auto acc_dtype = accumulation_dtype(dtype);
    const int i = static_cast<int>(kernel_dtype);
    if (holder.scalar_type() != acc_dtype || offset != 0 || kernels().parameter_step[i] != 1) {
      const Tensor source = holder;
      holder = empty({kernels().parameter_size(kernel_dtype, source.numel())}, acc_dtype);
      kernels().convert[i](dtype_of(source.scalar_type()), source.const_data_ptr(), offset,
                           holder.data_ptr(), source.numel());
    }
    data = holder.const_data_ptr();
  }

  void fill_with(double value, int64_t cols, at::ScalarType dtype) {
    holder = at::full({kernels().parameter_size(dtype_of(dtype), cols)}, value,
                      at::TensorOptions().dtype(accumulation_dtype(dtype)));
    data = holder.const_data_ptr();
  }
};

/// Whether so much is more than a core's last-level cache is likely to hold.
inline bool exceeds_cache(int64_t bytes) { return bytes > cpu::caches().last_level; }

}  // namespace fusednorm
