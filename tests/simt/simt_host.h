// The functions of csrc/cuda/cuda_device.h for kernels that run on the host: row_norm_cuda.cpp,
// compiled with FUSEDNORM_SIMT, takes the CPU key and tells the executor which memory a launch may
// touch.
//
// Environment: FUSEDNORM_SIMT_ARCH, the architecture whose plans are used (90);
// FUSEDNORM_SIMT_SEED, the order in which threads run (0: by number). To see errors:
// FUSEDNORM_SIMT_SHARED, the shared memory of a block; FUSEDNORM_SIMT_LAUNCH_ERROR, what every
// launch returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/kernels/row_norm_launch.h"
#include "device/tensor_rows.h"
#include "executor.h"

namespace fusednorm::cuda {

struct DeviceGuard {
  explicit DeviceGuard(const at::Tensor&) {}
  ~DeviceGuard() {
    simt::clear_memory();
    written().clear();
  }
  static std::vector<std::pair<const void*, size_t>>& written() {
    static std::vector<std::pair<const void*, size_t>> ranges;
    return ranges;
  }
};

inline CUstream_st* current_stream() { return nullptr; }

inline int environment(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

inline const Architecture& architecture_of(const at::Tensor&) {
  static Architecture a;
  a = architecture(environment("FUSEDNORM_SIMT_ARCH", 90));
  a.shared_per_block = environment("FUSEDNORM_SIMT_SHARED", a.shared_per_block);
  simt::set_seed(static_cast<uint64_t>(environment("FUSEDNORM_SIMT_SEED", 0)));
  return a;
}

inline std::string error_text(int error) { return "error " + std::to_string(error); }

inline void may_read(const at::Tensor& tensor) {
  simt::register_memory(tensor.const_data_ptr(), static_cast<size_t>(extent_bytes(tensor)), false,
                        "an argument");
}

/// A result: every byte has to be written.
inline void may_write(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  simt::register_memory(tensor.data_ptr(), static_cast<size_t>(extent_bytes(tensor)), true,
                        "a result");
  DeviceGuard::written().emplace_back(tensor.const_data_ptr(),
                                      static_cast<size_t>(extent_bytes(tensor)));
}

/// Scratch memory: may be written, and read by a later launch.
inline void may_use(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  simt::register_memory(tensor.data_ptr(), static_cast<size_t>(extent_bytes(tensor)), true,
                        "the workspace");
}

inline void launched() {
  for (const auto& [begin, bytes] : DeviceGuard::written()) simt::expect_all_written(begin, bytes);
}

}  // namespace fusednorm::cuda

/// Kernels that ran here since the library was loaded; for tests/simt/test_simt.py, by ctypes.
extern "C" __attribute__((visibility("default"), used)) inline uint64_t fusednorm_simt_launches() {
  return simt::statistics().launches;
}
