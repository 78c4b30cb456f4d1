// Barriers and shuffles.
#include <algorithm>
#include <bit>
#include <cstring>

#include "executor.h"
#include "state.h"

namespace simt {
namespace {

void wait(Thread& t, const char* what, unsigned detail, const Location& at) {
  t.waits_at = what, t.wait_detail = detail, t.location = at;
  leave();
}

void wait_at(Barrier& barrier, const char* what, unsigned detail, const Location& at) {
  ++barrier.arrived;
  current->next = barrier.last;
  barrier.last = current;
  wait(*current, what, detail, at);
}

void release(Barrier& barrier) {
  for (Thread* t = barrier.last; t != nullptr; t = t->next) wake(*t);
  barrier = {};
}

/// Some lanes of a warp: what one of them knew of another, all know.
void meet(Warp& warp, unsigned mask, Clock now) {
  if (mask == warp.lanes) return meet(warp, now);
  Clock known[32] = {};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    for (int i = 0; i < 32; ++i) known[i] = std::max(known[i], warp.knows_lane[lane][i]);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    known[lane] = now;
    executor.threads[warp.first + lane]->clock = now;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) std::copy_n(known, 32, warp.knows_lane[lane]);
  }
}

/// Whole warps of a block, at a named barrier that is complete but for the current thread.
void meet(Block& block, const Barrier& barrier, int id, Clock now, const Location& at) {
  unsigned lanes[32] = {};
  lanes[current->warp->number] = 1u << current->lane;
  for (const Thread* t = barrier.last; t != nullptr; t = t->next) {
    lanes[t->warp->number] |= 1u << t->lane;
  }
  Clock known[32] = {};
  for (Warp& warp : block.warps) {
    if (lanes[warp.number] == 0) continue;
    if (lanes[warp.number] != warp.lanes) {
      fail(at, "named_barrier %d is complete with only some lanes (0x%x) of warp %u", id,
           lanes[warp.number], warp.number);
    }
    for (int i = 0; i < 32; ++i) known[i] = std::max(known[i], warp.knows_warp[i]);
  }
  for (int i = 0; i < 32; ++i) known[i] = lanes[i] != 0 ? now : known[i];
  for (Warp& warp : block.warps) {
    if (lanes[warp.number] == 0) continue;
    meet(warp, now);
    std::copy_n(known, 32, warp.knows_warp);
  }
}

/// The current lane meets those of `mask`; returns the value of lane `source`.
uint64_t exchange(unsigned kind, const char* name, unsigned mask, uint64_t value, unsigned source,
                  bool orders_memory, const Location& at) {
  Thread& t = *current;
  Warp& warp = *t.warp;
  const unsigned bit = 1u << t.lane;
  if ((mask & bit) == 0) fail(at, "%s: lane %u is not in its own mask 0x%x", name, t.lane, mask);
  if ((mask & ~warp.lanes) != 0) {
    fail(at, "%s: mask 0x%x names lanes beyond the block", name, mask);
  }
  if ((mask & warp.exited) != 0) {
    fail(at, "%s: lanes 0x%x of mask 0x%x have exited", name, mask & warp.exited, mask);
  }
  if ((mask >> source & 1) == 0) {
    fail(at, "%s: reads from lane %u outside the mask 0x%x", name, source, mask);
  }
  Meeting* meeting = nullptr;
  for (unsigned i = 0; i < warp.num_meetings; ++i) {
    Meeting& m = warp.meetings[i];
    if (m.mask == mask && m.kind == kind) {
      meeting = &m;
    } else if ((m.mask & bit) != 0 && (m.arrived & mask) != 0) {  // each waits for the other
      const Thread& other = *executor.threads[warp.first + std::countr_zero(m.arrived)];
      fail(at, "%s with mask 0x%x, while thread %u waits for it at %s with mask 0x%x (line %u)",
           name, mask, other.index, other.waits_at, m.mask, unsigned{other.location.line()});
    }
  }
  if (meeting == nullptr) {
    meeting = &warp.meetings[warp.num_meetings++];
    *meeting = {mask, 0, kind};
  }
  warp.value[t.lane] = value;
  warp.source[t.lane] = source;
  meeting->arrived |= bit;
  if (meeting->arrived != mask) {
    wait(t, name, mask, at);
    return warp.result[t.lane];
  }
  *meeting = warp.meetings[--warp.num_meetings];
  if (orders_memory) meet(warp, mask, ++executor.time);
  for (unsigned m = mask; m != 0;) {  // from the last lane: the first is to run first
    const unsigned lane = 31 - std::countl_zero(m);
    m ^= 1u << lane;
    warp.result[lane] = warp.value[warp.source[lane]];
    if (lane != t.lane) wake(*executor.threads[warp.first + lane]);
  }
  return warp.result[t.lane];
}

}  // namespace

void meet(Warp& warp, Clock now) {
  for (unsigned m = warp.lanes; m != 0; m &= m - 1) {
    executor.threads[warp.first + std::countr_zero(m)]->clock = now;
  }
  warp.floor = now;
}

void meet(Block& block, Clock now) {
  for (Warp& warp : block.warps) meet(warp, now);
  block.floor = now;
}

unsigned cluster_rank() { return current->block->rank; }

void sync_threads(const Location& at) {
  Block& block = *current->block;
  ++executor.statistics.barriers;
  if (const Thread* other = block.barrier.last;
      other != nullptr &&
      (other->location.line() != at.line() || other->location.column() != at.column() ||
       std::strcmp(other->location.file_name(), at.file_name()) != 0)) {
    fail(at, "__syncthreads, while thread %u waits at another one, in line %u", other->index,
         unsigned{other->location.line()});
  }
  if (block.barrier.arrived + 1 < executor.launch.threads) {
    return wait_at(block.barrier, "__syncthreads", 0, at);
  }
  meet(block, ++executor.time);
  release(block.barrier);
}

void named_barrier(int id, int threads, const Location& at) {
  Block& block = *current->block;
  ++executor.statistics.barriers;
  if (id < 1 || id > 15) fail(at, "named_barrier %d: its number must be 1 to 15", id);
  if (threads <= 0 || threads % 32 != 0 || unsigned(threads) > executor.launch.threads) {
    fail(at, "named_barrier %d of %d threads: not whole warps of a block of %u", id, threads,
         executor.launch.threads);
  }
  Barrier& barrier = block.named[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != unsigned(threads)) {
    fail(at, "named_barrier %d of %d threads, while thread %u waits for %u there", id, threads,
         barrier.last->index, barrier.expected);
  }
  if (barrier.arrived + 1 < barrier.expected) return wait_at(barrier, "named_barrier", id, at);
  meet(block, barrier, id, ++executor.time, at);
  release(barrier);
}

void cluster_barrier(const Location& at) {
  ++executor.statistics.barriers;
  if (executor.barrier.arrived + 1 < executor.num_threads) {
    return wait_at(executor.barrier, "cluster_barrier", 0, at);
  }
  executor.floor = ++executor.time;
  for (unsigned r = 0; r < executor.launch.cluster; ++r) {
    meet(*executor.blocks[r], executor.time);
    executor.blocks[r]->remote_writer = nullptr;
  }
  release(executor.barrier);
}

void sync_warp(unsigned mask, const Location& at) {
  ++executor.statistics.barriers;
  exchange(0, "__syncwarp", mask, 0, current->lane, true, at);
}

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, unsigned bytes, int operand,
                 int width, const Location& at) {
  static const char* const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                      "__shfl_xor_sync"};
  const char* name = names[int(kind)];
  ++executor.statistics.shuffles;
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail(at, "%s: width %d", name, width);
  const int lane = current->lane, first = lane & ~(width - 1), last = first + width - 1;
  int source = first + (operand & (width - 1));
  if (kind != Shuffle::kIndex) {
    // What would come from beyond the lane's segment comes from the lane itself.
    operand = operand < 0 || operand > 31 ? 32 : operand;  // beyond every segment
    source = kind == Shuffle::kUp     ? lane - operand
             : kind == Shuffle::kDown ? lane + operand
                                      : lane ^ operand;
    if (source > last || (kind == Shuffle::kUp && source < first)) source = lane;
  }
  return exchange(1 + int(kind) * 2 + bytes / 8, name, mask, value, source, false, at);
}

}  // namespace simt
