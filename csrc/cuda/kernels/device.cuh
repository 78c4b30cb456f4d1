// What the kernels ask of the machine, and nothing else: memory, barriers, copies, launches. They
// reach global and shared memory only through these functions, so tests/simt/ can run the very same
// kernels on the host and check every access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "row_norm_launch.h"

namespace fusednorm::cuda {

/// Bytes that move together, aligned to their number.
template <int kBytes>
struct alignas(kBytes) Chunk {
  uint32_t word[kBytes / 4];
};
template <>
struct alignas(2) Chunk<2> {
  uint16_t half;
};

/// The compiler forgets what it knows of the chunk: numbers once unpacked from it are unpacked
/// again by the next pass, an instruction each, in place of a register each.
template <int kBytes>
FN_HOST_DEVICE void forget(Chunk<kBytes>& chunk) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) asm volatile("" : "+r"(chunk.word[i]));
#else
  (void)chunk;
#endif
}

}  // namespace fusednorm::cuda

#if defined(FUSEDNORM_SIMT)
#include "simt.h"  // the same functions on the host, checked
#else

namespace fusednorm::cuda {

// ---- Global memory ----

/// Reads what no thread of the grid writes.
template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_global(const void* p) {
  Chunk<kBytes> c;
  if constexpr (kBytes == 2) {
    c.half = __ldg(static_cast<const unsigned short*>(p));
  } else if constexpr (kBytes == 4) {
    c.word[0] = __ldg(static_cast<const unsigned*>(p));
  } else if constexpr (kBytes == 8) {
    const uint2 v = __ldg(static_cast<const uint2*>(p));
    c.word[0] = v.x, c.word[1] = v.y;
  } else if constexpr (kBytes == 16) {
    const uint4 v = __ldg(static_cast<const uint4*>(p));
    c.word[0] = v.x, c.word[1] = v.y, c.word[2] = v.z, c.word[3] = v.w;
  } else {
    static_assert(kBytes == 32);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    asm("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
        : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]), "=r"(c.word[4]),
          "=r"(c.word[5]), "=r"(c.word[6]), "=r"(c.word[7])
        : "l"(p));
#else
    const auto low = load_global<16>(p), high = load_global<16>(static_cast<const char*>(p) + 16);
    for (int i = 0; i < 4; ++i) c.word[i] = low.word[i], c.word[4 + i] = high.word[i];
#endif
  }
  return c;
}

/// Reads what at most this thread writes, later in the launch: not through the read-only path.
template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_own(const void* p) {
  static_assert(kBytes >= 8);
  Chunk<kBytes> c;
  if constexpr (kBytes == 8) {
    const uint2 v = *static_cast<const uint2*>(p);
    c.word[0] = v.x, c.word[1] = v.y;
  } else if constexpr (kBytes == 16) {
    const uint4 v = *static_cast<const uint4*>(p);
    c.word[0] = v.x, c.word[1] = v.y, c.word[2] = v.z, c.word[3] = v.w;
  } else {
    static_assert(kBytes == 32);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]),
                   "=r"(c.word[4]), "=r"(c.word[5]), "=r"(c.word[6]), "=r"(c.word[7])
                 : "l"(p)
                 : "memory");
#else
    const auto low = load_own<16>(p), high = load_own<16>(static_cast<const char*>(p) + 16);
    for (int i = 0; i < 4; ++i) c.word[i] = low.word[i], c.word[4 + i] = high.word[i];
#endif
  }
  return c;
}

/// Asks for the line at `p` to be in L2 by the time it is read.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

template <int kBytes>
__device__ __forceinline__ void store_global(void* p, const Chunk<kBytes>& c) {
  if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(p) = c.half;
  } else if constexpr (kBytes == 4) {
    *static_cast<unsigned*>(p) = c.word[0];
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(p) = make_uint2(c.word[0], c.word[1]);
  } else if constexpr (kBytes == 16) {
    *static_cast<uint4*>(p) = make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]);
  } else {
    static_assert(kBytes == 32);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(p),
                 "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]), "r"(c.word[4]),
                 "r"(c.word[5]), "r"(c.word[6]), "r"(c.word[7])
                 : "memory");
#else
    static_cast<uint4*>(p)[0] = make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]);
    static_cast<uint4*>(p)[1] = make_uint4(c.word[4], c.word[5], c.word[6], c.word[7]);
#endif
  }
}

// ---- Shared memory, all of it dynamic ----

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_shared(const void* p) {
  Chunk<kBytes> c;
  if constexpr (kBytes == 32) {
    const auto low = load_shared<16>(p), high = load_shared<16>(static_cast<const char*>(p) + 16);
    for (int i = 0; i < 4; ++i) c.word[i] = low.word[i], c.word[4 + i] = high.word[i];
  } else if constexpr (kBytes == 16) {
    const uint4 v = *static_cast<const uint4*>(p);
    c.word[0] = v.x, c.word[1] = v.y, c.word[2] = v.z, c.word[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = *static_cast<const uint2*>(p);
    c.word[0] = v.x, c.word[1] = v.y;
  } else if constexpr (kBytes == 4) {
    c.word[0] = *static_cast<const unsigned*>(p);
  } else {
    c.half = *static_cast<const uint16_t*>(p);
  }
  return c;
}

template <int kBytes>
__device__ __forceinline__ void store_shared(void* p, const Chunk<kBytes>& c) {
  store_global<kBytes>(p, c);  // plain stores; the compiler sees the address space
}

/// Writes to the shared memory of block `rank` of the cluster, at the place `p` has in one's own.
/// Visible to it after a cluster barrier.
template <int kBytes>
__device__ __forceinline__ void store_shared_of(unsigned rank, void* p, const Chunk<kBytes>& c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static_assert(kBytes == 4 || kBytes == 8);
  const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(p));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  if constexpr (kBytes == 4) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(remote), "r"(c.word[0]) : "memory");
  } else {
    asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(remote), "r"(c.word[0]),
                 "r"(c.word[1])
                 : "memory");
  }
#else
  (void)rank;
  store_shared<kBytes>(p, c);  // no clusters before sm_90: rank is one's own
#endif
}

// ---- Asynchronous copies, global to shared. A thread waits for its own. ----

template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {  // past L1: nobody reads it again
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes)
                 : "memory");
  }
}

/// Ends a group of copies; a group may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Until all but the `kPending` groups committed last have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Barriers beyond __syncthreads and __syncwarp ----

/// Barrier `id` (1..15) of `threads` threads of the block: whole warps.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

/// All threads of all blocks of the cluster; orders their writes to shared memory.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// ---- Launch ----

/// What a kernel has to be granted before a launch of this shape.
inline cudaError_t grant(const void* kernel, const LaunchShape& shape) {
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shape.shared_bytes));
  }
  if (shape.cluster > 8 && error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return error;
}

struct LaunchConfig {
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};

  LaunchConfig(const LaunchShape& shape, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(shape.grid);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = shape.cluster > 1 ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

/// Enqueues a kernel of one argument; the caller reads the error.
template <class Args>
cudaError_t launch_kernel(void (*kernel)(Args), const Args& args, const LaunchShape& shape,
                          cudaStream_t stream) {
  const void* const entry = reinterpret_cast<const void*>(kernel);
  const cudaError_t error = grant(entry, shape);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  const LaunchConfig launch(shape, stream);
  void* arguments[] = {const_cast<Args*>(&args)};
  const cudaError_t launched = cudaLaunchKernelExC(&launch.config, entry, arguments);
  if (launched != cudaSuccess) (void)cudaGetLastError();  // ours to report: not the next kernel's
  return launched;
}

/// The clusters of this shape that fit on the current device at once; 0: none, or an error.
template <class Args>
int max_clusters(void (*kernel)(Args), const LaunchShape& shape) {
  const void* const entry = reinterpret_cast<const void*>(kernel);
  const LaunchConfig launch(shape, nullptr);
  int clusters = 0;
  if (grant(entry, shape) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, entry, &launch.config) != cudaSuccess) {
    (void)cudaGetLastError();  // a refusal is an answer, not a failure of what comes next
    return 0;
  }
  return clusters;
}

}  // namespace fusednorm::cuda

#endif
