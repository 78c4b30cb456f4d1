// Kernels of GroupNorm, for both layouts.
#include "kernels.h"

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// clang-format off
#include "parameters.h"
#include "group_common.h"
#include "group_rows_forward.h"
#include "group_rows_backward.h"
#include "channels_last.h"
#include "channels_last_forward.h"
#include "channels_last_backward.h"
// clang-format on

template <class T>
void group_forward(const GroupForwardArgs& args, const Parallel& parallel) {
  if (args.shape.channels_last) {
    channels_last_forward<T>(args, parallel);
  } else {
    group_rows_forward<T>(args, parallel);
  }
}

template <class T>
void group_backward(const GroupBackwardArgs& args, const Parallel& parallel) {
  if (args.shape.channels_last) {
    channels_last_backward<T>(args, parallel);
  } else {
    group_rows_backward<T>(args, parallel);
  }
}

}  // namespace

void set_group(KernelTable* table) {
  for_dtypes<bfloat16>([&](int i, auto element) {
    using T = decltype(element);
    table->group_norm.forward[i] = group_forward<T>;
    table->group_norm.backward[i] = group_backward<T>;
  });
}

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
