// The machine of csrc/cuda/kernels/device.cuh, on the host: device.cuh includes this file in place
// of its own functions when FUSEDNORM_SIMT is defined. Every access goes through a check of
// executor.h.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "executor.h"

// ---- What nvcc has built in ----

#define threadIdx ::simt::thread_index
#define blockIdx ::simt::block_index
#define blockDim ::simt::block_dim
#define gridDim ::simt::grid_dim
// nvcc inlines all that a thread does; here the checks of an access cost more than calls, and
// functions that kernels share are compiled once: 9 s for fp32, where all inlined took 73.
#undef __forceinline__
#define __forceinline__ inline
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

inline void __syncthreads(simt::Location at = simt::Location::current()) { simt::sync_threads(at); }
inline void __syncwarp(unsigned mask = 0xffffffffu, simt::Location at = simt::Location::current()) {
  simt::sync_warp(mask, at);
}

namespace simt {
template <class T>
T shuffle_value(Shuffle kind, unsigned mask, T value, int operand, int width, const Location& at) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return std::bit_cast<T>(static_cast<Bits>(
      shuffle(kind, mask, std::bit_cast<Bits>(value), sizeof(T), operand, width, at)));
}
}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              simt::Location at = simt::Location::current()) {
  return simt::shuffle_value(simt::Shuffle::kIndex, mask, value, lane, width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 simt::Location at = simt::Location::current()) {
  return simt::shuffle_value(simt::Shuffle::kUp, mask, value, delta, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   simt::Location at = simt::Location::current()) {
  return simt::shuffle_value(simt::Shuffle::kDown, mask, value, delta, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  simt::Location at = simt::Location::current()) {
  return simt::shuffle_value(simt::Shuffle::kXor, mask, value, lane_mask, width, at);
}

// ---- The functions of device.cuh ----

namespace fusednorm::cuda {

using simt::Location;

template <int kBytes>
Chunk<kBytes> load_global(const void* p, Location at = Location::current()) {
  simt::check_load(p, kBytes, at);
  Chunk<kBytes> c;
  std::memcpy(&c, p, kBytes);
  return c;
}

template <int kBytes>
Chunk<kBytes> load_own(const void* p, Location at = Location::current()) {
  simt::check_own_load(p, kBytes, at);
  Chunk<kBytes> c;
  std::memcpy(&c, p, kBytes);
  return c;
}

inline void prefetch(const void*) {}

template <int kBytes>
void store_global(void* p, const Chunk<kBytes>& c, Location at = Location::current()) {
  simt::check_store(p, kBytes, at);
  std::memcpy(p, &c, kBytes);
}

inline char* shared_memory() { return simt::shared_memory(); }

template <int kBytes>
Chunk<kBytes> load_shared(const void* p, Location at = Location::current()) {
  simt::check_shared_load(p, kBytes, at);
  Chunk<kBytes> c;
  std::memcpy(&c, p, kBytes);
  return c;
}

template <int kBytes>
void store_shared(void* p, const Chunk<kBytes>& c, Location at = Location::current()) {
  simt::check_shared_store(p, kBytes, at);
  std::memcpy(p, &c, kBytes);
}

template <int kBytes>
void store_shared_of(unsigned rank, void* p, const Chunk<kBytes>& c,
                     Location at = Location::current()) {
  static_assert(kBytes == 4 || kBytes == 8);
  std::memcpy(simt::check_remote_store(rank, p, kBytes, at), &c, kBytes);
}

template <int kBytes>
void copy_async(void* shared, const void* global, Location at = Location::current()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  simt::copy_async(shared, global, kBytes, at);
}

inline void commit_copies() { simt::commit_copies(); }

template <int kPending>
void wait_copies() {
  static_assert(kPending >= 0);
  simt::wait_copies(kPending);
}

inline void named_barrier(int id, int threads, Location at = Location::current()) {
  simt::named_barrier(id, threads, at);
}

inline unsigned cluster_rank() { return simt::cluster_rank(); }

inline void cluster_barrier(Location at = Location::current()) { simt::cluster_barrier(at); }

/// Clusters of any shape run here, one at a time.
template <class Args>
int max_clusters(void (*)(Args), const LaunchShape&) {
  return 1;
}

/// Runs the kernel to its end; a failed check throws.
template <class Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, const LaunchShape& shape,
                          cudaStream_t) {
  static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) <= 4096);
  if (const char* const error = std::getenv("FUSEDNORM_SIMT_LAUNCH_ERROR")) {
    return static_cast<cudaError_t>(std::atoi(error));
  }
  const auto run = [&] { kernel(args); };
  using Run = decltype(run);
  simt::launch({shape.kernel, shape.grid, shape.threads, shape.cluster, shape.shared_bytes,
                [](const void* p) { (*static_cast<Run*>(p))(); }, &run});
  return cudaSuccess;
}

}  // namespace fusednorm::cuda
