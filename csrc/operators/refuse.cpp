// The keys we have no kernels for: an error that says so, for any operator.
#include <c10/util/Exception.h>

#include "operators/operators.h"

namespace fusednorm {
namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!given[i].isTensor() || !given[i].toTensor().defined()) continue;
    const Tensor& tensor = given[i].toTensor();
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized(),
                op.schema().name(), ": ", arguments[i].name(),
                ": expected a dense (strided) tensor, got ",
                tensor.is_nested()      ? c10::str("a nested tensor")
                : tensor.is_quantized() ? c10::str("a quantized tensor")
                                        : c10::str("layout ", tensor.layout()));
  }
  TORCH_CHECK(false, op.schema().name(),
              ": fusednorm was built without CUDA, and has no kernel for a CUDA tensor");
}

void refuse_on(torch::Library& m) {
  const auto refuse_one = [&](auto op) {
    m.impl(op.name().c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
  };
  for_each_operator<LayerNorm>(refuse_one);
  for_each_operator<RmsNorm>(refuse_one);
  for_each_operator<ScaleRows>(refuse_one);
  for_each_operator<GroupNorm>(refuse_one);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, SparseCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, QuantizedCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCUDA, m) { refuse_on(m); }
#if !defined(FUSEDNORM_WITH_CUDA)
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { refuse_on(m); }
#endif

}  // namespace fusednorm
