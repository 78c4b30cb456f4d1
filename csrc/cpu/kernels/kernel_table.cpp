// Picks the kernels for the machine. Compiled without instruction set flags.
#include <cstring>

#include "row_kernels.h"

namespace fusednorm::cpu {

namespace portable {
extern const KernelTable kTable;
}
#if defined(FUSEDNORM_X86)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512bf16 {
extern const KernelTable kTable;
}
#endif

const KernelTable& kernel_table(const char* capability) {
#if defined(FUSEDNORM_X86)
  const bool avx512_allowed = std::strncmp(capability, "AVX512", 6) == 0;
  const bool avx2_allowed = avx512_allowed || std::strncmp(capability, "AVX2", 4) == 0;
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512_allowed && has_avx512) {
    return __builtin_cpu_supports("avx512bf16") ? avx512bf16::kTable : avx512::kTable;
  }
  if (avx2_allowed && has_avx2) return avx2::kTable;
#endif
  return portable::kTable;
}

}  // namespace fusednorm::cpu
