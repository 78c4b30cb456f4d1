// What the machine answers about its caches.
#include "cpu/caches.h"

#include <unistd.h>

#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fusednorm::cpu {
namespace {

/// `sizes`: by level, 1 to 3; 0: unknown.
bool complete(const int64_t (&sizes)[4]) { return sizes[1] > 0 && sizes[2] > 0; }

#if defined(__x86_64__)
/// Leaf 4 of Intel, 0x8000001d of AMD: each entry is one cache, not the sum over those there are.
bool ask_cpuid(unsigned leaf, int64_t (&sizes)[4]) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  for (unsigned i = 0; i < 16 && __get_cpuid_count(leaf, i, &a, &b, &c, &d) != 0; ++i) {
    const unsigned type = a & 31, level = a >> 5 & 7;
    if (type == 0) break;
    if (type == 2 || level > 3 || level == 0) continue;  // 2: instructions
    sizes[level] = (int64_t{b >> 22} + 1) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) *
                   (int64_t{c} + 1);  // ways, partitions, line, sets
  }
  return complete(sizes);
}
#endif

bool ask_sysconf(int64_t (&sizes)[4]) {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  sizes[1] = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  sizes[2] = sysconf(_SC_LEVEL2_CACHE_SIZE);
  // Not the third: it may be the sum over all sockets (402 MB where a core reaches 32).
  sizes[3] = 0;
#endif
  return complete(sizes);
}

bool from_environment(const char* name, int64_t* size) {
  const char* text = std::getenv(name);
  if (text == nullptr) return false;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (end == text || *end != '\0' || value <= 0) return false;
  *size = value;
  return true;
}

Caches ask() {
  Caches result;
  int64_t sizes[4] = {};
#if defined(__x86_64__)
  if (ask_cpuid(0x8000001d, sizes) || ask_cpuid(4, sizes)) result.source = "cpuid";
#endif
  if (!complete(sizes) && ask_sysconf(sizes)) result.source = "sysconf";
  if (complete(sizes)) {
    result.l1 = sizes[1];
    result.l2 = sizes[2];
    if (sizes[3] > 0) result.last_level = sizes[3];
  }
  bool set = from_environment("FUSEDNORM_L1_BYTES", &result.l1);
  set = from_environment("FUSEDNORM_L2_BYTES", &result.l2) || set;
  set = from_environment("FUSEDNORM_LAST_LEVEL_BYTES", &result.last_level) || set;
  if (set) result.source = "environment";
  return result;
}

}  // namespace

const Caches& caches() {
  static const Caches result = ask();
  return result;
}

}  // namespace fusednorm::cpu
