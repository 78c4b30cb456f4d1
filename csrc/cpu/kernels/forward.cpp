// Forward kernels of the row norms: 8 for each instruction set.
#include "kernels.h"

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// clang-format off
#include "forward.h"
// clang-format on

template <class Statistics, class T>
void forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  forward_rows<Statistics, T>(args, InputRows<T>{args}, row_begin, row_end);
}

}  // namespace

void set_forward(KernelTable* table) {
  for_dtypes<paired_bfloat16>([&](int i, auto element) {
    using T = decltype(element);
    table->layer_norm_forward[i] = forward<LayerNormStatistics, T>;
    table->rms_norm_forward[i] = forward<RmsNormStatistics, T>;
  });
}

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
