// What the executor keeps about the running cluster. Internal to tests/simt.
//
// Happens-before. Logical time advances with every synchronisation that orders memory; a thread's
// `clock` is the time of the last one it took part in, and an access carries the clock of its
// thread. Everybody in a group that met at time g knows all the accesses of the group with a clock
// below g. So a few numbers replace vector clocks: the last meeting of the cluster, of the block,
// of the warp, and what a warp knows of another (named barriers) or a lane of another (partial
// __syncwarp). Shuffles synchronise execution but order no memory.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "executor.h"

namespace simt {

using Clock = uint32_t;

/// Who has read a granule since it was last written.
enum class Readers : uint8_t { kOne, kWarp, kBlock };

/// Two bytes of shared memory, the smallest access. Clocks of earlier clusters mean "never". Of
/// several readers we keep the latest, the set of lanes (of one warp) or of warps, and the range of
/// their clocks: enough never to blame a right kernel, and nearly always to blame a wrong one.
struct Granule {
  Clock written, read, first_read;  // of the last write; of the latest and first of the readers
  uint32_t members;                 // lanes or warps that have read; kOne: unused
  uint16_t writer, reader;          // Thread::id; the latest reader's
  Readers readers;
  bool copying;  // the destination of a copy under way
};
constexpr unsigned kGranule = 2;

struct Copy {
  char* to;
  const void* from;
  unsigned bytes;
  uint64_t group;
  Location at;
};

struct Block;
struct Warp;

struct Thread {
  void* context = nullptr;  // where the fiber goes on; null: not started, or abandoned
  char* stack_top = nullptr;
  unsigned id = 0, index = 0, lane = 0;  // in the cluster, the block, the warp
  Block* block = nullptr;
  Warp* warp = nullptr;
  Clock clock = 0;

  const char* waits_at = nullptr;  // null: it runs or could
  unsigned wait_detail = 0;        // a mask or a barrier's number
  Location location;
  Thread* next = nullptr;  // at the same barrier

  std::vector<Copy> copies;  // in the order of their groups
  uint64_t committed_groups = 0;
};

/// Lanes that wait for each other.
struct Meeting {
  unsigned mask, arrived, kind;
};

struct Warp {
  unsigned number = 0, first = 0, lanes = 0;  // in its block; the id of lane 0; which lanes exist
  unsigned exited = 0;                        // lanes
  Clock floor = 0;                            // the last meeting of the whole warp
  Meeting meetings[32];
  unsigned num_meetings = 0;
  uint64_t value[32], result[32];
  uint8_t source[32];
  Clock knows_warp[32] = {};      // of the same block
  Clock knows_lane[32][32] = {};  // [knower][known]
};

struct Barrier {
  unsigned arrived = 0, expected = 0;
  Thread* last = nullptr;
};

struct Block {
  unsigned index = 0, rank = 0, exited = 0;
  Clock floor = 0;  // the last barrier of the whole block
  Barrier barrier, named[16];
  std::vector<Warp> warps;
  char* shared = nullptr;
  std::unique_ptr<char[]> shared_owner;
  std::vector<Granule> granules;
  const Thread* remote_writer = nullptr;  // into its memory, since the last cluster barrier
};

/// The cluster that runs, and the pools it is made of.
struct Executor {
  Launch launch = {};
  Statistics statistics;
  uint64_t first_writer = 0;  // global thread t of this launch writes as first_writer + t
  uint32_t launch_number = 0;

  Clock time = 0;
  Clock start = 0, floor = 0;  // of this cluster: its first moment, its last barrier
  Barrier barrier;             // of the cluster
  unsigned exited = 0;
  std::vector<std::unique_ptr<Thread>> threads;  // the first num_threads are this cluster's
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned num_threads = 0;
  std::vector<Thread*> ready;  // taken from the back

  uint64_t seed = 0, random = 0;
  bool failed = false;
  char message[1024];
};
extern Executor executor;
extern Thread* current;

/// Ends the launch from within a fiber.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(const Location& at, const char* format, ...);

/// The current thread stops here until it is woken.
void leave();
void wake(Thread& t);

/// Everybody in the warp or the block has met.
void meet(Warp& warp, Clock now);
void meet(Block& block, Clock now);

/// From now on, earlier accesses to global memory belong to earlier launches.
void begin_launch();
void check_copies_arrived(const Thread& t);

inline uintptr_t address_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }
void check_aligned(const char* what, uintptr_t address, unsigned bytes, const Location& at);

/// Does an access of thread `other` at `clock` happen before what `t` does now?
inline bool ordered_before(unsigned other, Clock clock, const Thread& t) {
  if (other == t.id || clock < executor.floor) return true;
  const Thread& o = *executor.threads[other];
  if (o.block != t.block) return false;
  if (clock < t.block->floor) return true;
  if (o.warp != t.warp) return clock < t.warp->knows_warp[o.warp->number];
  return clock < t.warp->floor || clock < t.warp->knows_lane[t.lane][o.lane];
}

}  // namespace simt
