// From tensors to rows, for the kernels of every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "maths/row_norm.h"
#include "maths/rows.h"

namespace fusednorm {

using at::Tensor;

inline DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat16;  // checks.h lets no other pass
  }
}

// ---- Rows ----

struct Sizes {
  int64_t rows, cols, leading_dims;
};

inline Sizes sizes_of(const Tensor& input, size_t normalized_dims) {
  Sizes sizes{1, 1, input.dim() - static_cast<int64_t>(normalized_dims)};
  for (int64_t d = 0; d < input.dim(); ++d) {
    (d < sizes.leading_dims ? sizes.rows : sizes.cols) *= input.size(d);
  }
  return sizes;
}

inline bool rows_are_contiguous(const Tensor& tensor, int64_t leading_dims) {
  int64_t expected = 1;
  for (int64_t d = tensor.dim() - 1; d >= leading_dims; --d) {
    if (tensor.size(d) == 1) continue;
    if (tensor.stride(d) != expected) return false;
    expected *= tensor.size(d);
  }
  return true;
}

/// The leading dimensions, collapsed where their strides allow; false if more than three remain.
inline bool collapse(const Tensor& tensor, int64_t leading_dims, RowLayout* layout) {
  int dims = 0;
  for (int64_t d = 0; d < leading_dims; ++d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d);
    if (size == 1) continue;
    if (dims > 0 && layout->strides[dims - 1] == size * stride) {
      layout->sizes[dims - 1] *= size;
      layout->strides[dims - 1] = stride;
    } else if (dims == kMaxRowDims) {
      return false;
    } else {
      layout->sizes[dims] = size;
      layout->strides[dims++] = stride;
    }
  }
  layout->dims = dims == 0 ? 1 : dims;
  return true;
}

/// A tensor's rows, read where they lie if they can be, else from one copy. Along expanded leading
/// dimensions the copy has one row only.
struct Rows {
  Tensor tensor;
  RowLayout layout;

  Rows(const Tensor& source, const Sizes& sizes) : tensor(source) {
    if (!rows_are_contiguous(tensor, sizes.leading_dims)) {
      Tensor distinct = tensor;
      for (int64_t d = 0; d < sizes.leading_dims; ++d) {
        if (distinct.size(d) > 1 && distinct.stride(d) == 0) distinct = distinct.narrow(d, 0, 1);
      }
      tensor = distinct.contiguous().expand(source.sizes());
    }
    if (!collapse(tensor, sizes.leading_dims, &layout)) {
      tensor = tensor.contiguous();
      collapse(tensor, sizes.leading_dims, &layout);
    }
    layout.data = tensor.const_data_ptr();
  }
};

/// From the tensor's first byte to its last, gaps between its rows included.
inline int64_t extent_bytes(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.element_size();
}

}  // namespace fusednorm
