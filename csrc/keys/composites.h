// The formulas in ATen arithmetic, differentiable to any order: for tangents, for derivatives of
// backward, and inside vmap.
#pragma once

#include "operators/operators.h"

namespace fusednorm {

/// The row norms, and the residual add in front of them (composites.cpp).
struct RowComposites {
  static Outputs outputs(Keys keys, const Call& call);
  static Gradients gradients(Keys keys, const Call& call);
};

/// GroupNorm, as LayerNorm of its groups (group_composites.cpp).
struct GroupComposites {
  static Outputs outputs(Keys keys, const Call& call);
  static Gradients gradients(Keys keys, const Call& call);
};

}  // namespace fusednorm
