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
#include "stream.h"
#include "loads.h"
#include "statistics.h"
#include "forward.h"
#include "backward.h"
#include "parameters.h"
#include "residual.h"
#include "group_rows.h"
#include "group_channels_last.h"
// clang-format on

}  // namespace

#define FN_STRING_(x) #x
#define FN_STRING(x) FN_STRING_(x)
#define FN_EACH_DTYPE(kernel, Statistics)                                                       \
  {                                                                                             \
    kernel<Statistics, double>, kernel<Statistics, float>, kernel<Statistics, paired_bfloat16>, \
        kernel<Statistics, float16>                                                             \
  }

#define FN_EACH_ADD_PAIR(kernel, Statistics)                                       \
  {                                                                                \
    kernel<Statistics, double, double>, kernel<Statistics, float, float>,          \
        kernel<Statistics, paired_bfloat16, paired_bfloat16>,                      \
        kernel<Statistics, float16, float16>, kernel<Statistics, bfloat16, float>, \
        kernel<Statistics, float16, float>                                         \
  }

// For each instruction set 8 forward kernels; 28 LayerNorm and 18 RMSNorm backward sweeps. Of the
// residual add 16 of each step alone; fused 12 forward kernels, 12 LayerNorm and 16 RMSNorm
// backward sweeps.
extern const KernelTable kTable;
const KernelTable kTable = {
    FN_STRING(FUSEDNORM_ISA),
    FN_EACH_DTYPE(forward, LayerNormStatistics),
    FN_EACH_DTYPE(forward, RmsNormStatistics),
    FN_EACH_DTYPE(backward, LayerNormStatistics),
    FN_EACH_DTYPE(backward, RmsNormStatistics),
    FN_EACH_DTYPE(backward_terms, LayerNormStatistics),
    FN_EACH_DTYPE(backward_terms, RmsNormStatistics),
    FN_EACH_DTYPE(backward_columns, LayerNormStatistics),
    FN_EACH_DTYPE(backward_columns, RmsNormStatistics),
    {convert<double>, convert<float>, convert<paired_bfloat16>, convert<float16>},
    {reduce<double>, reduce<float>, reduce<paired_bfloat16>, reduce<float16>},
    add_rows,
    split_rows,
    {{group_forward<double>, group_forward<float>, group_forward<bfloat16>, group_forward<float16>},
     {group_backward<double>, group_backward<float>, group_backward<bfloat16>,
      group_backward<float16>}},
    FN_EACH_ADD_PAIR(add_forward, LayerNormStatistics),
    FN_EACH_ADD_PAIR(add_forward, RmsNormStatistics),
    FN_EACH_ADD_PAIR(add_backward, LayerNormStatistics),
    FN_EACH_ADD_PAIR(add_backward, RmsNormStatistics),
    {1, 1, kParameterStep<paired_bfloat16>, 1},
};

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
