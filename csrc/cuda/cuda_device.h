// What the host side asks of CUDA: the device guard, the stream, the architecture. tests/simt/ has
// the same functions for kernels that run on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>
#include <string>

#include "cuda/kernels/row_norm_launch.h"

namespace fusednorm::cuda {

/// Makes the tensor's device the current one, for as long as it lives.
struct DeviceGuard {
  explicit DeviceGuard(const at::Tensor& tensor) : guard(tensor.device()) {}
  c10::cuda::CUDAGuard guard;
};

inline CUstream_st* current_stream() { return c10::cuda::getCurrentCUDAStream(); }

/// What the tensor's device offers: asked once. Plans follow the architecture; a device with less
/// than its architecture promises gets plans for what it has.
inline const Architecture& architecture_of(const at::Tensor& tensor) {
  constexpr int kMaxDevices = 64;
  static std::array<Architecture, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> once;
  const int device = tensor.device().index();
  TORCH_CHECK(device >= 0 && device < kMaxDevices, "fusednorm: expected a device index below ",
              kMaxDevices, ", got ", device);
  std::call_once(once[device], [device] {
    int major = 0, minor = 0, shared = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    C10_CUDA_CHECK(
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    Architecture a = architecture(major * 10 + minor);
    if (shared < a.shared_per_block) a.shared_per_block = shared;
    if (a.max_cluster > 8 && !grants_cluster<DType::kFloat32, DType::kFloat32>(a.max_cluster))
      a.max_cluster = 8;
    known[device] = a;
  });
  return known[device];
}

inline std::string error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// The executor of tests/simt/ is told which memory a launch may touch; a GPU is not.
inline void may_read(const at::Tensor&) {}
inline void may_write(const at::Tensor&) {}
inline void may_use(const at::Tensor&) {}
inline void launched() {}

}  // namespace fusednorm::cuda
