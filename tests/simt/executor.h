// Runs CUDA kernels on the host and checks what they do; see simt.h for how they get here.
//
// Every CUDA thread is a fiber. The blocks of a cluster run together, clusters one after another,
// all on the caller's OS thread. The first failed check ends the launch with a std::runtime_error
// that names the kernel, the block, the thread and the line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>

namespace simt {

using Location = std::source_location;

// ---- What a test asks for ----

/// Kernels may read [begin, begin + bytes), and write it if `writable`. Read-only ranges may
/// overlap any others; two writable ones may not. `name` must outlive the registration.
void register_memory(const void* begin, size_t bytes, bool writable, const char* name);
void clear_memory();

/// Throws unless kernels have written every byte since register_memory.
void expect_all_written(const void* begin, size_t bytes);

/// The order in which threads run where nothing orders them. 0: by number, but that whoever
/// completes a barrier goes on; else pseudo-random.
void set_seed(uint64_t seed);

/// Counts since the program started; accesses and barriers are counted per thread.
struct Statistics {
  uint64_t launches = 0, blocks = 0, threads = 0, loads = 0, stores = 0, barriers = 0, shuffles = 0;
};
const Statistics& statistics();

// ---- What simt.h asks for ----

/// One coordinate: the kernels use no other.
struct Index {
  unsigned x = 0;
};
extern Index thread_index, block_index, block_dim, grid_dim;

struct Launch {
  const char* kernel;
  unsigned grid, threads, cluster, shared_bytes;
  void (*run)(const void* kernel_and_args);  // the kernel, for the current thread
  const void* kernel_and_args;
};
void launch(const Launch& launch);

void check_load(const void* p, unsigned bytes, const Location& at);
void check_own_load(const void* p, unsigned bytes, const Location& at);  // claims the bytes
void check_store(const void* p, unsigned bytes, const Location& at);
char* shared_memory();
void check_shared_load(const void* p, unsigned bytes, const Location& at);
void check_shared_store(const void* p, unsigned bytes, const Location& at);
/// Returns the place of `p` in the memory of block `rank` of the cluster.
void* check_remote_store(unsigned rank, const void* p, unsigned bytes, const Location& at);

void copy_async(void* shared, const void* global, unsigned bytes, const Location& at);
void commit_copies();
void wait_copies(unsigned pending);

void sync_threads(const Location& at);
void named_barrier(int id, int threads, const Location& at);
void cluster_barrier(const Location& at);
unsigned cluster_rank();
void sync_warp(unsigned mask, const Location& at);

enum class Shuffle { kIndex, kUp, kDown, kXor };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, unsigned bytes, int operand,
                 int width, const Location& at);

}  // namespace simt
