// From tensors to rows, for the kernels of every device.
#pragma once

#include <ATen/core/Tensor.h>

#include "operators/add_ops.h"
#include "operators/checks.h"
#include "maths/row_norm.h"
#include "maths/rows.h"

namespace fusednorm {

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

// ---- The functions of a dispatch key, for a device that has kernels ----

/// Device gives empty(sizes, dtype, like), forward_rows (mean and rstd undefined: not wanted),
/// backward_rows, add_forward_rows (residual_out may be the residual) and add_backward_rows.
template <class Device>
struct DeviceBackend {
  static Tensor output(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in) {
    checks::check_forward(norm, in);
    Tensor output = Device::empty(in.input.sizes(), in.input.scalar_type(), in.input);
    Device::forward_rows(norm, in, output, Tensor(), Tensor());
    return output;
  }

  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    checks::check_forward(norm, in, out_dtype);
    const auto dtype = out_dtype.value_or(in.input.scalar_type());
    Tensor output = Device::empty(in.input.sizes(), dtype, in.input);
    Tensor mean = norm.centered ? statistic(in) : Tensor(), rstd = statistic(in);
    Device::forward_rows(norm, in, output, mean, rstd);
    return {std::move(output), std::move(mean), std::move(rstd)};
  }

  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    checks::check_backward(norm, in);
    return Device::backward_rows(norm, in);
  }

  static TwoTensors add(c10::DispatchKeySet, const Norm& norm, const AddInputs& in) {
    checks::check_add(norm, in);
    Tensor output = Device::empty(in.input.sizes(), in.input.scalar_type(), in.input);
    Tensor residual_out = Device::empty(in.input.sizes(), in.residual.scalar_type(), in.input);
    Device::add_forward_rows(norm, in, output, residual_out, Tensor(), Tensor());
    return {std::move(output), std::move(residual_out)};
  }

  static Tensor add_in_place(c10::DispatchKeySet, const Norm& norm, const AddInputs& in) {
    checks::check_add_in_place(norm, in);
    checks::check_apart(norm, in);
    Tensor output = Device::empty(in.input.sizes(), in.input.scalar_type(), in.input);
    Device::add_forward_rows(norm, in, output, in.residual, Tensor(), Tensor());
    return output;
  }

  static FourTensors add_forward(c10::DispatchKeySet, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    checks::check_add(norm, in, out_dtype);
    const auto dtype = out_dtype.value_or(in.input.scalar_type());
    Tensor output = Device::empty(in.input.sizes(), dtype, in.input);
    Tensor residual_out = Device::empty(in.input.sizes(), in.residual.scalar_type(), in.input);
    const ForwardInputs of_norm = in.of(residual_out);
    Tensor mean = norm.centered ? statistic(of_norm) : Tensor(), rstd = statistic(of_norm);
    Device::add_forward_rows(norm, in, output, residual_out, mean, rstd);
    return {std::move(output), std::move(residual_out), std::move(mean), std::move(rstd)};
  }

  static FourTensors add_backward(c10::DispatchKeySet, const Norm& norm,
                                  const AddBackwardInputs& in) {
    checks::check_add_backward(norm, in);
    return Device::add_backward_rows(norm, in);
  }

 private:
  static Tensor statistic(const ForwardInputs& in) {
    const auto leading = in.input.sizes().slice(0, in.input.dim() - in.normalized_shape.size());
    return Device::empty(leading, accumulation_dtype(in.input.scalar_type()), in.input);
  }
};

}  // namespace fusednorm
