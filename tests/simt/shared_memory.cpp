// Shared memory: bounds, unwritten bytes, races; and asynchronous copies into it.
#include <algorithm>
#include <bit>
#include <cstdio>

#include "state.h"

namespace simt {
namespace {

/// Checks the bounds; returns the first granule.
unsigned locate(const Block& block, const void* p, unsigned bytes, const char* what,
                const Location& at) {
  const uintptr_t offset = address_of(p) - address_of(block.shared);
  const unsigned size = executor.launch.shared_bytes;
  if (offset > size || size - offset < bytes) {
    fail(at, "%s of %u bytes at byte %lld of shared memory, which has %u", what, bytes,
         static_cast<long long>(offset), size);
  }
  check_aligned(what, offset, bytes, at);
  return offset / kGranule;
}

struct Name {
  char text[64];
};
Name name_of(const Thread& t) {
  Name name;
  if (executor.launch.cluster == 1) {
    std::snprintf(name.text, sizeof name.text, "thread %u", t.index);
  } else {
    std::snprintf(name.text, sizeof name.text, "block %u, thread %u", t.block->index, t.index);
  }
  return name;
}
Name name_of(unsigned id) { return name_of(*executor.threads[id]); }

[[noreturn]] void fail_race(const char* what, unsigned granule, const Name& other,
                            const char* other_did, const Location& at) {
  fail(at, "%s of byte %u of shared memory, which %s %s with no barrier in between", what,
       granule * kGranule, other.text, other_did);
}

/// What thread `t` knows of the warp, or of the lane of its own warp.
Clock known_of_warp(const Thread& t, unsigned warp) {
  return warp == t.warp->number ? t.warp->floor : t.warp->knows_warp[warp];
}
Clock known_of_lane(const Thread& t, unsigned lane) {
  return std::max(t.warp->floor, t.warp->knows_lane[t.lane][lane]);
}

/// Have all the reads happened before what `t` does now, in its own block?
bool readers_ordered_before(const Granule& s, const Thread& t) {
  if (s.read < t.block->floor) return true;
  if (s.readers == Readers::kOne) return ordered_before(s.reader, s.read, t);
  if (t.clock <= s.read) return false;  // nobody knows more than its own clock
  const Warp& warp = *executor.threads[s.reader]->warp;
  if (s.readers == Readers::kWarp && &warp != t.warp) return s.read < known_of_warp(t, warp.number);
  for (unsigned m = s.members; m != 0; m &= m - 1) {
    const unsigned i = std::countr_zero(m);
    if (s.readers == Readers::kBlock ? s.read >= known_of_warp(t, i)
                                     : i != t.lane && s.read >= known_of_lane(t, i)) {
      return false;
    }
  }
  return true;
}

void check_granule_read(const Thread& t, Granule& s, unsigned i, const Location& at) {
  if (s.written < executor.start) {
    fail(at, "load_shared of byte %u of shared memory, which nobody has written", i * kGranule);
  }
  if (s.copying) {
    fail(at, "load_shared of byte %u of shared memory, whose copy_async by %s has not arrived",
         i * kGranule, name_of(s.writer).text);
  }
  if (!ordered_before(s.writer, s.written, t)) {
    fail_race("load_shared", i, name_of(s.writer), "wrote", at);
  }
  if (readers_ordered_before(s, t)) {  // whoever comes after this read comes after those
    s.readers = Readers::kOne;
    s.first_read = t.clock;
  } else {
    const Thread& reader = *executor.threads[s.reader];
    const bool one_warp = s.readers != Readers::kBlock && reader.warp == t.warp;
    if (s.readers == Readers::kOne) s.members = 1u << reader.lane;
    if (s.readers != Readers::kBlock && !one_warp) s.members = 1u << reader.warp->number;
    s.readers = one_warp ? Readers::kWarp : Readers::kBlock;
    s.members |= 1u << (one_warp ? t.lane : t.warp->number);
    s.first_read = std::min(s.first_read, t.clock);
    if (t.clock < s.read) return;
  }
  s.read = t.clock;
  s.reader = t.id;
}

/// No reader known for sure to race with a write of `t` goes on unnoticed.
void check_readers(const Thread& t, const Block& block, const Granule& s, unsigned i,
                   const char* what, const Location& at) {
  if (!ordered_before(s.reader, s.read, t)) fail_race(what, i, name_of(s.reader), "read", at);
  if (t.block != &block || s.readers == Readers::kOne || s.first_read < block.floor) return;
  const bool lanes = s.readers == Readers::kWarp;
  if (lanes && executor.threads[s.reader]->warp != t.warp) return;  // as ordered as the latest
  for (unsigned m = s.members; m != 0; m &= m - 1) {
    const unsigned j = std::countr_zero(m);
    if (lanes && j != t.lane && s.first_read >= known_of_lane(t, j)) {
      fail_race(what, i, name_of(t.warp->first + j), "read", at);
    }
    if (!lanes && j != t.warp->number && s.first_read >= known_of_warp(t, j)) {
      Name name;
      std::snprintf(name.text, sizeof name.text, "warp %u", j);
      fail_race(what, i, name, "read", at);
    }
  }
}

void check_granule_write(const Thread& t, const Block& block, Granule& s, unsigned i,
                         const char* what, const Location& at) {
  if (s.written >= executor.start) {
    if (s.copying) {
      fail(at, "%s of byte %u of shared memory, the destination of a copy_async by %s under way",
           what, i * kGranule, name_of(s.writer).text);
    }
    if (!ordered_before(s.writer, s.written, t)) {
      fail_race(what, i, name_of(s.writer), "wrote", at);
    }
  }
  if (s.read >= executor.start) check_readers(t, block, s, i, what, at);
  s.written = t.clock, s.writer = t.id, s.copying = false;
  s.read = 0, s.readers = Readers::kOne;
}

void check_write(const Block& block, Granule* granules, unsigned first, unsigned bytes,
                 const char* what, const Location& at) {
  for (unsigned i = first; i < first + bytes / kGranule; ++i) {
    check_granule_write(*current, block, granules[i], i, what, at);
  }
}

}  // namespace

char* shared_memory() { return current->block->shared; }

void check_shared_load(const void* p, unsigned bytes, const Location& at) {
  Block& block = *current->block;
  ++executor.statistics.loads;
  const unsigned first = locate(block, p, bytes, "load_shared", at);
  for (unsigned i = first; i < first + bytes / kGranule; ++i) {
    check_granule_read(*current, block.granules[i], i, at);
  }
}

void check_shared_store(const void* p, unsigned bytes, const Location& at) {
  Block& block = *current->block;
  ++executor.statistics.stores;
  const unsigned first = locate(block, p, bytes, "store_shared", at);
  check_write(block, block.granules.data(), first, bytes, "store_shared", at);
}

void* check_remote_store(unsigned rank, const void* p, unsigned bytes, const Location& at) {
  ++executor.statistics.stores;
  if (rank >= executor.launch.cluster) {
    fail(at, "store_shared_of block %u of a cluster of %u", rank, executor.launch.cluster);
  }
  Block& own = *current->block;
  Block& block = *executor.blocks[rank];
  const unsigned first = locate(own, p, bytes, "store_shared_of", at);
  if (&block != &own) {
    if (executor.floor == executor.start) {
      fail(at, "store_shared_of block %u before the first cluster_barrier: it may not have started",
           block.index);
    }
    if (block.exited == executor.launch.threads) {
      fail(at, "store_shared_of block %u, which has finished", block.index);
    }
    block.remote_writer = current;
  }
  check_write(block, block.granules.data(), first, bytes, "store_shared_of", at);
  return block.shared + first * kGranule;
}

void copy_async(void* shared, const void* global, unsigned bytes, const Location& at) {
  Block& block = *current->block;
  check_load(global, bytes, at);
  ++executor.statistics.stores;
  const unsigned first = locate(block, shared, bytes, "copy_async", at);
  check_write(block, block.granules.data(), first, bytes, "copy_async", at);
  for (unsigned i = 0; i < bytes / kGranule; ++i) block.granules[first + i].copying = true;
  std::memset(shared, 0xff, bytes);
  current->copies.push_back(
      {static_cast<char*>(shared), global, bytes, current->committed_groups, at});
}

void commit_copies() { ++current->committed_groups; }

void wait_copies(unsigned pending) {
  Thread& t = *current;
  const Block& block = *t.block;
  auto copy = t.copies.begin();
  for (; copy != t.copies.end() && copy->group + pending < t.committed_groups; ++copy) {
    std::memcpy(copy->to, copy->from, copy->bytes);
    Granule* granules = t.block->granules.data() + (copy->to - block.shared) / kGranule;
    for (unsigned i = 0; i < copy->bytes / kGranule; ++i) {
      granules[i].copying = false;
      granules[i].written = t.clock;
    }
  }
  t.copies.erase(t.copies.begin(), copy);
}

void check_copies_arrived(const Thread& t) {
  if (!t.copies.empty()) {
    fail(t.copies[0].at, "exits with %zu copies it has not waited for", t.copies.size());
  }
}

}  // namespace simt
