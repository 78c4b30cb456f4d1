// Weights converted, their gradients reduced, and the residual add as steps of its own (16 of
// each).
#include "kernels.h"

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// clang-format off
#include "parameters.h"
#include "residual.h"
// clang-format on

}  // namespace

void set_parameters(KernelTable* table) {
  for_dtypes<paired_bfloat16>([&](int i, auto element) {
    using T = decltype(element);
    table->convert[i] = convert<T>;
    table->reduce[i] = reduce<T>;
    table->parameter_step[i] = kParameterStep<T>;
  });
  table->add = add_rows;
  table->split = split_rows;
}

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
