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

int runnable_tables(const KernelTable* (&tables)[kMaxTables]) {
  int count = 0;
#if defined(FUSEDNORM_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) tables[count++] = &avx512bf16::kTable;
  if (has_avx512) tables[count++] = &avx512::kTable;
  if (has_avx2) tables[count++] = &avx2::kTable;
#endif
  tables[count++] = &portable::kTable;
  return count;
}

const KernelTable& kernel_table(const char* capability) {
  const bool avx512_allowed = std::strncmp(capability, "AVX512", 6) == 0;
  const bool avx2_allowed = avx512_allowed || std::strncmp(capability, "AVX2", 4) == 0;
  const KernelTable* tables[kMaxTables];
  const int count = runnable_tables(tables);
  int i = 0;
  while (i < count - 1 && ((!avx512_allowed && std::strncmp(tables[i]->name, "avx512", 6) == 0) ||
                           (!avx2_allowed && std::strcmp(tables[i]->name, "avx2") == 0))) {
    ++i;
  }
  return *tables[i];
}

}  // namespace fusednorm::cpu
