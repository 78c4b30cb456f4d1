// Picks the kernels for the machine. Compiled without instruction set flags.
#include <cstring>

#include "row_kernels.h"

namespace fusednorm::cpu {

#define FN_INSTRUCTION_SET(isa)            \
  namespace isa {                          \
  void set_forward(KernelTable* table);    \
  void set_backward(KernelTable* table);   \
  void set_add(KernelTable* table);        \
  void set_group(KernelTable* table);      \
  void set_parameters(KernelTable* table); \
  inline KernelTable table() {             \
    KernelTable result{};                  \
    result.name = #isa;                    \
    set_forward(&result);                  \
    set_backward(&result);                 \
    set_add(&result);                      \
    set_group(&result);                    \
    set_parameters(&result);               \
    return result;                         \
  }                                        \
  }

FN_INSTRUCTION_SET(portable)
#if defined(FUSEDNORM_X86)
FN_INSTRUCTION_SET(avx2)
FN_INSTRUCTION_SET(avx512)

// AVX-512's, but where rows of bf16 are read and written. What converts parameters is AVX-512's:
// the bits are the same, and the order of parameters too.
namespace avx512bf16 {
void set_forward(KernelTable* table);
void set_backward(KernelTable* table);
void set_add(KernelTable* table);
void set_group(KernelTable* table);
inline KernelTable table() {
  KernelTable result = avx512::table();
  result.name = "avx512bf16";
  set_forward(&result);
  set_backward(&result);
  set_add(&result);
  set_group(&result);
  return result;
}
}  // namespace avx512bf16
#endif

/// One of the tables, made when it is first asked for.
template <KernelTable (*make)()>
const KernelTable* once() {
  static const KernelTable table = make();
  return &table;
}

int runnable_tables(const KernelTable* (&tables)[kMaxTables]) {
  int count = 0;
#if defined(FUSEDNORM_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16"))
    tables[count++] = once<avx512bf16::table>();
  if (has_avx512) tables[count++] = once<avx512::table>();
  if (has_avx2) tables[count++] = once<avx2::table>();
#endif
  tables[count++] = once<portable::table>();
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
