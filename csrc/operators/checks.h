// Every check of what a user passes, for all keys and all routes. A message reads
//     fusednorm::OPERATOR: ARGUMENT: expected WHAT, got WHAT
#pragma once

#include "operators/arguments.h"

namespace fusednorm::checks {

/// All that can be wrong with a call, but for the memory that it writes to.
void check(const Call& call);

/// The residual of an operator that writes to it: elements with memory of their own, in which
/// nothing lies that is read (`input` may be the residual itself). Where sizes are symbols, or
/// there is no memory, the run decides.
void check_writable(const Call& call);
void check_apart(const Call& call);

/// A dense tensor of one of the four dtypes.
void check_tensor(const Norm& norm, std::string_view argument, const Tensor& tensor);
/// A finite number, above 0 where it is a clamp.
void check_eps(const Norm& norm);

// ---- What follows from checked arguments ----

/// The dimensions in front of the normalized ones.
inline c10::SymIntArrayRef leading_shape(const Call& call) {
  const Tensor& rows = call.rows();
  return rows.sym_sizes().slice(0, rows.dim() - call.normalized_shape.size());
}

/// Whether every number of `dtype` is one of `than`, which has more.
inline bool is_narrower(at::ScalarType dtype, at::ScalarType than) {
  return dtype != than && (than == at::kDouble ||
                           (than == at::kFloat && (dtype == at::kBFloat16 || dtype == at::kHalf)));
}

// The dtypes of the gradients: of what they belong to; where that is absent, the weight's or
// that of the rows.
inline at::ScalarType grad_weight_dtype(const Call& call) {
  return present(*call.weight) ? call.weight->value().scalar_type() : call.rows().scalar_type();
}
inline at::ScalarType grad_bias_dtype(const Call& call) {
  return present(*call.bias) ? call.bias->value().scalar_type() : grad_weight_dtype(call);
}

}  // namespace fusednorm::checks
