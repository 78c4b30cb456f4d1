// The CPU kernels: one source, compiled once for each instruction set (FUSEDNORM_ISA names it).
//
// Which accumulator an element goes to depends on its column and the row's length alone.
//
// Nothing inline from the standard library may be emitted here: the linker would be free to use the
// AVX-512 copy of it in the rest of the program (tests/check_symbols.sh looks for such symbols).
#include "row_kernels.h"

#if defined(FUSEDNORM_AVX512) || defined(FUSEDNORM_AVX2)
#include <immintrin.h>
#endif

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// In this order: each uses what stands before it.
// clang-format off
#include "simd.h"
#include "columns.h"
#include "statistics.h"
#include "forward.h"
#include "backward.h"
#include "parameters.h"
#include "group_rows.h"
#include "group_channels_last.h"
// clang-format on

}  // namespace

#define FN_STRING_(x) #x
#define FN_STRING(x) FN_STRING_(x)
#define FN_EACH_DTYPE(kernel, Statistics)                                                \
  {                                                                                      \
    kernel<Statistics, double>, kernel<Statistics, float>, kernel<Statistics, bfloat16>, \
        kernel<Statistics, float16>                                                      \
  }

// For each instruction set 8 forward kernels, and 28 LayerNorm and 18 RMSNorm backward ones.
extern const KernelTable kTable;
const KernelTable kTable = {
    FN_STRING(FUSEDNORM_ISA),
    FN_EACH_DTYPE(forward, LayerNormStatistics),
    FN_EACH_DTYPE(forward, RmsNormStatistics),
    FN_EACH_DTYPE(backward, LayerNormStatistics),
    FN_EACH_DTYPE(backward, RmsNormStatistics),
    {convert<double>, convert<float>},
    {reduce<double>, reduce<float>},
    {{group_forward<double>, group_forward<float>, group_forward<bfloat16>, group_forward<float16>},
     {group_backward<double>, group_backward<float>, group_backward<bfloat16>,
      group_backward<float16>}},
};

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
