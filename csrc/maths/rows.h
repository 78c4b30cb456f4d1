// Where the rows of a tensor lie: torch-free, for the kernels of every device.
#pragma once

#include <cstdint>

#include "row_norm.h"

namespace fusednorm {

constexpr int kMaxRowDims = 3;

/// Up to three collapsed leading dimensions, strides in elements. The elements of one row are
/// contiguous.
struct RowLayout {
  const void* data = nullptr;
  int dims = 1;
  int64_t sizes[kMaxRowDims] = {0, 0, 0};
  int64_t strides[kMaxRowDims] = {0, 0, 0};

  FN_HOST_DEVICE int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int d = dims - 1; d > 0; --d) {
      result += row % sizes[d] * strides[d];
      row /= sizes[d];
    }
    return result + row * strides[0];
  }
};

}  // namespace fusednorm
