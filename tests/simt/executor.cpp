// Fibers, their order, and launches.
#undef _FORTIFY_SOURCE  // its longjmp refuses to leave a stack for another
#include "executor.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>

#include "state.h"

namespace simt {

Index thread_index, block_index, block_dim, grid_dim;
Executor executor;
Thread* current = nullptr;

namespace {

void* launcher_context = nullptr;

// ---- Fibers ----

constexpr size_t kStackBytes = 64 * 1024;

/// Mapped above a guard page, and never freed: the pool lives as long as the program.
char* allocate_stack(unsigned number) {
  const size_t page = sysconf(_SC_PAGESIZE), bytes = page + kStackBytes + page;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || mprotect(base, page, PROT_NONE) != 0) throw std::bad_alloc();
  // Staggered by 5 cache lines, or all the stacks would compete for the same sets of the cache.
  return static_cast<char*>(base) + bytes - number * 5 % 64 * 64;
}

/// The next thread to run becomes the current one; back to the launcher if none can.
void* next_context() {
  auto& ready = executor.ready;
  if (ready.empty()) return launcher_context;
  if (executor.seed != 0) {
    executor.random = executor.random * 6364136223846793005u + 1442695040888963407u;
    std::swap(ready[(executor.random >> 33) % ready.size()], ready.back());
  }
  current = ready.back();
  ready.pop_back();
  thread_index.x = current->index;
  block_index.x = current->block->index;
  return current->context;
}

/// Goes on at `to` until somebody resumes what is saved in `from`: a place on this stack. (By
/// swapcontext each switch would be two system calls, for the signal mask.)
void jump(void* to, void** from) {
  jmp_buf here;
  *from = &here;
  if (_setjmp(here) == 0) _longjmp(*static_cast<jmp_buf*>(to), 1);
}

constexpr char kExit[] = "exit";

void exit_thread() {
  Thread& t = *current;
  check_copies_arrived(t);
  for (unsigned i = 0; i < t.warp->num_meetings; ++i) {
    const Meeting& m = t.warp->meetings[i];
    if (m.mask >> t.lane & 1) {
      const Thread& other = *executor.threads[t.warp->first + std::countr_zero(m.arrived)];
      fail(other.location, "exits, but thread %u waits for it at %s with mask 0x%x", other.index,
           other.waits_at, m.mask);
    }
  }
  t.waits_at = kExit;
  t.warp->exited |= 1u << t.lane;
  ++t.block->exited;
  ++executor.exited;
}

Thread* starting = nullptr;
void* starter_context = nullptr;

void fiber() {
  jump(starter_context, &starting->context);
  for (;;) {
    executor.launch.run(executor.launch.kernel_and_args);
    exit_thread();
    leave();
  }
}

/// Lets a fiber run up to where it waits for its first launch.
void start_fiber(Thread& t) {
  static ucontext_t place;
  getcontext(&place);
  place.uc_stack.ss_sp = t.stack_top - kStackBytes;
  place.uc_stack.ss_size = kStackBytes;
  makecontext(&place, fiber, 0);
  starting = &t;
  jmp_buf here;
  starter_context = &here;
  if (_setjmp(here) == 0) setcontext(&place);
}

// ---- Launches ----

[[noreturn]] void invalid_launch(const std::string& what) {
  throw std::runtime_error("simt: kernel " + std::string(executor.launch.kernel) + ": " + what);
}

void check_launch(const Launch& l) {
  if (l.grid == 0) invalid_launch("an empty grid");
  if (l.threads == 0 || l.threads > 1024) {
    invalid_launch(std::to_string(l.threads) + " threads in a block");
  }
  if (l.cluster == 0 || l.cluster > 16 || l.grid % l.cluster != 0) {
    invalid_launch("a grid of " + std::to_string(l.grid) + " blocks in clusters of " +
                   std::to_string(l.cluster));
  }
  if (l.shared_bytes > 227 * 1024) {
    invalid_launch(std::to_string(l.shared_bytes) + " bytes of shared memory in a block");
  }
}

void build_block(Block& block, unsigned rank) {
  const Launch& l = executor.launch;
  block.rank = rank;
  const unsigned granules = (l.shared_bytes + kGranule - 1) / kGranule;
  if (block.granules.size() < granules) {
    block.granules.resize(granules);
    constexpr size_t kAlignment = 128;
    block.shared_owner = std::make_unique<char[]>(granules * kGranule + kAlignment);
    std::memset(block.shared_owner.get(), 0xff, granules * kGranule + kAlignment);
    const auto address = reinterpret_cast<uintptr_t>(block.shared_owner.get());
    block.shared = block.shared_owner.get() + (kAlignment - address % kAlignment) % kAlignment;
  }
  block.warps.resize((l.threads + 31) / 32);
  for (unsigned i = 0; i < l.threads; ++i) {
    const unsigned id = rank * l.threads + i;
    if (executor.threads.size() == id) {
      executor.threads.push_back(std::make_unique<Thread>());
      executor.threads[id]->stack_top = allocate_stack(id);
    }
    Thread& t = *executor.threads[id];
    t.id = id, t.index = i, t.lane = i % 32;
    t.block = &block;
    t.warp = &block.warps[i / 32];
  }
  for (unsigned i = 0; i < block.warps.size(); ++i) {
    Warp& warp = block.warps[i];
    const unsigned lanes = std::min(32u, l.threads - 32 * i);
    warp.number = i, warp.first = rank * l.threads + 32 * i;
    warp.lanes = 0xffffffffu >> (32 - lanes);
  }
}

void build_cluster() {
  const Launch& l = executor.launch;
  while (executor.blocks.size() < l.cluster) executor.blocks.push_back(std::make_unique<Block>());
  for (unsigned rank = 0; rank < l.cluster; ++rank) build_block(*executor.blocks[rank], rank);
  executor.num_threads = l.cluster * l.threads;
}

void start_cluster(unsigned first_block) {
  const Launch& l = executor.launch;
  if (executor.time > UINT32_MAX / 2) {  // before clocks wrap, forget them
    for (auto& block : executor.blocks) {
      std::fill(block->granules.begin(), block->granules.end(), Granule{});
      for (Warp& warp : block->warps) {
        std::memset(warp.knows_warp, 0, sizeof warp.knows_warp);
        std::memset(warp.knows_lane, 0, sizeof warp.knows_lane);
      }
    }
    executor.time = 0;
  }
  executor.start = executor.floor = ++executor.time;
  executor.barrier = {};
  executor.exited = 0;
  executor.ready.clear();
  for (unsigned rank = 0; rank < l.cluster; ++rank) {
    Block& block = *executor.blocks[rank];
    block.index = first_block + rank;
    block.exited = 0;
    block.remote_writer = nullptr;
    block.barrier = {};
    std::fill(std::begin(block.named), std::end(block.named), Barrier{});
    for (Warp& warp : block.warps) warp.exited = warp.num_meetings = 0;
    meet(block, executor.start);
  }
  for (unsigned i = executor.num_threads; i-- > 0;) {
    Thread& t = *executor.threads[i];
    if (t.context == nullptr) start_fiber(t);
    t.copies.clear();
    t.committed_groups = 0;
    wake(t);
  }
}

/// Consecutive threads that wait for the same are one entry.
std::string who_waits_where() {
  std::string text;
  int entries = 0;
  for (unsigned i = 0; i < executor.num_threads;) {
    const Thread& t = *executor.threads[i];
    unsigned end = i + 1;
    for (; end < executor.num_threads; ++end) {
      const Thread& u = *executor.threads[end];
      if (u.block != t.block || std::strcmp(u.waits_at, t.waits_at) != 0) break;
      if (t.waits_at != kExit &&
          (u.wait_detail != t.wait_detail || u.location.line() != t.location.line())) {
        break;
      }
    }
    if (++entries > 12) return text + "; ...";
    text += (entries > 1 ? "; block " : "block ") + std::to_string(t.block->index) + ", threads " +
            std::to_string(t.index) + "-" + std::to_string(t.index + end - i - 1);
    if (t.waits_at == kExit) {
      text += " have exited";
    } else {
      char detail[32] = "";
      if (t.wait_detail != 0) std::snprintf(detail, sizeof detail, " (0x%x)", t.wait_detail);
      text += " wait at " + std::string(t.waits_at) + detail + ", line " +
              std::to_string(t.location.line());
    }
    i = end;
  }
  return text;
}

void run_cluster(unsigned first_block) {
  start_cluster(first_block);
  jump(next_context(), &launcher_context);
  current = nullptr;
  std::string error;
  if (executor.failed) {
    error = executor.message;
  } else if (executor.exited < executor.num_threads) {
    error =
        "simt: kernel " + std::string(executor.launch.kernel) + ": deadlock: " + who_waits_where();
  }
  for (unsigned r = 0; error.empty() && r < executor.launch.cluster; ++r) {
    const Block& block = *executor.blocks[r];
    if (block.remote_writer == nullptr) continue;
    error = "simt: kernel " + std::string(executor.launch.kernel) + ", block " +
            std::to_string(block.remote_writer->block->index) + ", thread " +
            std::to_string(block.remote_writer->index) +
            ": no cluster_barrier after its store to " + "the shared memory of block " +
            std::to_string(block.index) + ", which may have finished";
  }
  if (error.empty()) return;
  for (auto& t : executor.threads) t->context = nullptr;  // kernels own nothing to unwind
  throw std::runtime_error(error);
}

}  // namespace

void leave() {
  void** from = &current->context;
  jump(next_context(), from);
}

void wake(Thread& t) {
  t.waits_at = nullptr;
  executor.ready.push_back(&t);
}

void fail(const Location& at, const char* format, ...) {
  const char* file = std::strrchr(at.file_name(), '/');
  const int length =
      std::snprintf(executor.message, sizeof executor.message,
                    "simt: kernel %s, block %u, thread %u, %s:%u: ", executor.launch.kernel,
                    current->block->index, current->index,
                    file != nullptr ? file + 1 : at.file_name(), unsigned{at.line()});
  va_list args;
  va_start(args, format);
  if (length < int{sizeof executor.message}) {
    std::vsnprintf(executor.message + length, sizeof executor.message - length, format, args);
  }
  va_end(args);
  executor.failed = true;
  void* abandoned = nullptr;
  jump(launcher_context, &abandoned);
  __builtin_unreachable();
}

void launch(const Launch& launch) {
  static std::mutex one_at_a_time;  // backward may run on a thread of its own
  const std::lock_guard lock(one_at_a_time);
  executor.launch = launch;
  check_launch(launch);
  executor.failed = false;
  executor.random = executor.seed * 0x9e3779b97f4a7c15u;
  block_dim.x = launch.threads, grid_dim.x = launch.grid;
  begin_launch();
  build_cluster();
  ++executor.statistics.launches;
  executor.statistics.blocks += launch.grid;
  executor.statistics.threads += uint64_t{launch.grid} * launch.threads;
  for (unsigned i = 0; i < launch.grid; i += launch.cluster) run_cluster(i);
}

void set_seed(uint64_t seed) { executor.seed = seed; }
const Statistics& statistics() { return executor.statistics; }

}  // namespace simt
