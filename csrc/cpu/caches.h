// How large this machine's caches are. Torch-free; asked once.
//
// Sizes decide when memory is asked for early and when it is written past the caches. They never
// decide in which order anything is added: the bits are the same on every machine
// (tests/test_caches.py).
#pragma once

#include <cstdint>

namespace fusednorm::cpu {

struct Caches {
  // Bytes: of a core's first two caches, and of one last-level cache, which a group of cores may
  // share. By default those of the machine that the thresholds were measured on (AMD EPYC, family
  // 26).
  int64_t l1 = 48 << 10, l2 = 1 << 20, last_level = 32 << 20;
  const char* source = "defaults";  // or "cpuid", "sysconf", "environment"

  /// Weight and bias of more than this drive a row out of the first cache.
  int64_t parameters() const { return l1 / 2; }
  /// Of longer rows, four asked for early drive out of the second cache what is needed now.
  int64_t early_row() const { return l2 / 16; }
  /// A tensor of this size is one of about four around a call, and the last-level cache does not
  /// hold all four beside others' data. (5 MiB of 32.)
  int64_t part() const { return last_level / 32 * 5; }
};

/// FUSEDNORM_L1_BYTES, FUSEDNORM_L2_BYTES and FUSEDNORM_LAST_LEVEL_BYTES, read at the first call,
/// say otherwise than the machine.
const Caches& caches();

}  // namespace fusednorm::cpu
