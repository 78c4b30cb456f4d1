// Global memory: which of it kernels may read and write, and what they have.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "state.h"

namespace simt {
namespace {

struct Range {
  uintptr_t begin, end;
  bool writable, meets_writable;  // the latter: its bytes may be written too
  const char* name;
  // Of a writable range, for each byte: who wrote it (0: nobody; see Executor::first_writer), and
  // the last launch that read it.
  std::vector<uint32_t> writer, reader;
};
std::vector<Range> ranges;
uint64_t next_writer = 0;              // the writers of earlier launches have lower numbers
size_t last_load = 0, last_store = 0;  // tried first

Range* find(uintptr_t begin, unsigned bytes, bool writable, size_t& last) {
  for (size_t i = 0, j = last; i < ranges.size(); ++i, ++j) {
    if (j >= ranges.size()) j = 0;
    Range& r = ranges[j];
    // In this order, neither sum wraps.
    if (begin >= r.begin && begin < r.end && r.end - begin >= bytes && r.writable >= writable) {
      last = j;
      return &r;
    }
  }
  return nullptr;
}

[[noreturn]] void fail_outside(const char* what, uintptr_t begin, unsigned bytes,
                               const Location& at) {
  if (ranges.empty()) fail(at, "%s of %u bytes, but no memory is registered", what, bytes);
  const auto distance = [&](const Range& r) {
    return begin < r.begin ? r.begin - begin : begin >= r.end ? begin - r.end : 0;
  };
  const Range& r =
      *std::min_element(ranges.begin(), ranges.end(),
                        [&](const Range& a, const Range& b) { return distance(a) < distance(b); });
  const long long offset = static_cast<long long>(begin - r.begin);
  fail(at, "%s of %u bytes at byte %lld of %s, %s (it has %zu bytes)", what, bytes, offset, r.name,
       offset < 0 ? "before its beginning" : "past its end", size_t(r.end - r.begin));
}

/// Records a read of what may be written, and refuses it after a write of this launch.
void check_not_written(Range& r, uintptr_t begin, unsigned bytes, const Location& at) {
  const uintptr_t first = std::max(begin, r.begin), last = std::min(begin + bytes, r.end);
  for (uintptr_t i = first; i < last; ++i) {
    if (r.writer[i - r.begin] > executor.first_writer) {
      fail(at, "load_global of byte %zu of %s, which this launch has written", size_t(i - r.begin),
           r.name);
    }
    r.reader[i - r.begin] = executor.launch_number;
  }
}

/// The number by which this thread of this launch is known.
uint32_t this_writer() {
  return executor.first_writer + current->block->index * executor.launch.threads + current->index +
         1;
}

}  // namespace

void check_aligned(const char* what, uintptr_t address, unsigned bytes, const Location& at) {
  if (address % bytes == 0) return;
  fail(at, "%s of %u bytes, misaligned: %u past a multiple of %u", what, bytes,
       unsigned(address % bytes), bytes);
}

void register_memory(const void* begin, size_t bytes, bool writable, const char* name) {
  Range r = {address_of(begin), address_of(begin) + bytes, writable, writable, name, {}, {}};
  for (Range& other : ranges) {
    if (other.begin >= r.end || r.begin >= other.end) continue;
    if (writable && other.writable) {
      throw std::runtime_error("simt: " + std::string(name) + " overlaps " + other.name +
                               ", and both are writable");
    }
    r.meets_writable |= other.writable;
    other.meets_writable |= writable;
  }
  if (writable) r.writer.resize(bytes), r.reader.resize(bytes);
  ranges.push_back(std::move(r));
}

void clear_memory() {
  ranges.clear();
  next_writer = 0;
}

void expect_all_written(const void* begin, size_t bytes) {
  if (bytes == 0) return;
  const uintptr_t first = address_of(begin);
  for (const Range& r : ranges) {
    if (!r.writable || first < r.begin || first >= r.end || r.end - first < bytes) continue;
    const auto from = r.writer.begin() + (first - r.begin),
               unwritten = std::find(from, from + bytes, 0);
    if (unwritten == from + bytes) return;
    throw std::runtime_error("simt: byte " + std::to_string(unwritten - r.writer.begin()) + " of " +
                             r.name + " was never written");
  }
  throw std::runtime_error("simt: expect_all_written of memory that is not registered as writable");
}

void begin_launch() {
  executor.first_writer = next_writer;
  next_writer += uint64_t{executor.launch.grid} * executor.launch.threads;
  if (next_writer >= UINT32_MAX) {
    throw std::runtime_error("simt: 2^32 threads since clear_memory");
  }
  ++executor.launch_number;
}

void check_load(const void* p, unsigned bytes, const Location& at) {
  const uintptr_t begin = address_of(p);
  ++executor.statistics.loads;
  Range* r = find(begin, bytes, false, last_load);
  if (r == nullptr) fail_outside("load_global", begin, bytes, at);
  check_aligned("load_global", begin, bytes, at);
  if (!r->meets_writable) return;
  for (Range& other : ranges) {
    if (other.writable && begin < other.end && other.begin < begin + bytes) {
      check_not_written(other, begin, bytes, at);
    }
  }
}

void check_own_load(const void* p, unsigned bytes, const Location& at) {
  const uintptr_t begin = address_of(p);
  ++executor.statistics.loads;
  Range* r = find(begin, bytes, false, last_load);
  if (r == nullptr) fail_outside("load_own", begin, bytes, at);
  check_aligned("load_own", begin, bytes, at);
  if (!r->meets_writable) return;
  for (Range& other : ranges) {
    if (!other.writable || begin >= other.end || other.begin >= begin + bytes) continue;
    const uintptr_t first = std::max(begin, other.begin), last = std::min(begin + bytes, other.end);
    for (uintptr_t i = first - other.begin; i < last - other.begin; ++i) {
      uint32_t& owner = other.writer[i];
      if (owner > executor.first_writer && owner != this_writer()) {
        fail(at, "load_own of byte %zu of %s, which another thread has written", size_t(i),
             other.name);
      }
      owner = this_writer();
    }
  }
}

void check_store(const void* p, unsigned bytes, const Location& at) {
  const uintptr_t begin = address_of(p);
  ++executor.statistics.stores;
  Range* r = find(begin, bytes, true, last_store);
  if (r == nullptr) {
    size_t ignored = 0;
    if (const Range* read_only = find(begin, bytes, false, ignored)) {
      fail(at, "store_global to byte %zu of %s, which is read-only",
           size_t(begin - read_only->begin), read_only->name);
    }
    fail_outside("store_global", begin, bytes, at);
  }
  check_aligned("store_global", begin, bytes, at);
  const uint32_t writer = this_writer();
  for (size_t i = begin - r->begin; i < begin - r->begin + bytes; ++i) {
    const uint32_t before = r->writer[i];
    if (before > executor.first_writer && before != writer) {
      const unsigned other = before - executor.first_writer - 1;
      fail(at, "store_global to byte %zu of %s, which block %u, thread %u has written", i, r->name,
           other / executor.launch.threads, other % executor.launch.threads);
    }
    if (r->reader[i] == executor.launch_number) {
      fail(at, "store_global to byte %zu of %s, which this launch has read by load_global", i,
           r->name);
    }
    r->writer[i] = writer;
  }
}

}  // namespace simt
