#pragma once

// The residual add as a step of its own, and in backward the step after the norm's, for the pairs
// of dtypes that no fused kernel takes. Included by kernels.h.

FN_INLINE double to_double(double a) { return a; }
FN_INLINE double to_double(float a) { return a; }
template <class T>
FN_INLINE double to_double(T a) {
  return to_float(a);
}

/// Calls f with an element of the dtype.
template <class F>
FN_INLINE void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(bfloat16{});
    case DType::kFloat16:
      return f(float16{});
  }
}

template <class T, class R>
void add_rows_of(const AddArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    const T* x = static_cast<const T*>(args.input.data) + args.input.offset(r);
    const R* residual = static_cast<const R*>(args.residual.data) + args.residual.offset(r);
    R* sum = static_cast<R*>(args.residual_out) + args.residual_out_rows.offset(r);
    if constexpr (__is_same(acc_of<T>, acc_of<R>)) {
      using V = vector_of<T>;
      const V alpha = Broadcast<V>::of(static_cast<acc_of<T>>(args.alpha));
      for_columns<T>(args.cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
        store(sum + i, fused_mul_add(alpha, load(residual + i, part), load(x + i, part)), part);
      });
    } else {
      for (int64_t i = 0; i < args.cols; ++i) {
        put(__builtin_fma(args.alpha, to_double(residual[i]), to_double(x[i])), sum + i);
      }
    }
  }
}

void add_rows(const AddArgs& args, int64_t row_begin, int64_t row_end) {
  with_dtype(args.input_dtype, [&](auto x) {
    with_dtype(args.residual_dtype, [&](auto residual) {
      add_rows_of<decltype(x), decltype(residual)>(args, row_begin, row_end);
    });
  });
}

template <class T, class R>
void split_rows_of(const SplitArgs& args, int64_t row_begin, int64_t row_end) {
  using acc_t = decltype(acc_of<T>{} + acc_of<R>{});  // the wider one
  for (int64_t r = row_begin; r < row_end; ++r) {
    const acc_t* sum = static_cast<const acc_t*>(args.gradient) + r * args.cols;
    const R* other = nullptr;
    if (args.grad_residual_out.data != nullptr) {
      other = static_cast<const R*>(args.grad_residual_out.data) + args.grad_residual_out.offset(r);
    }
    T* dx = nullptr;
    R* dr = nullptr;
    if (args.grad_input != nullptr) dx = static_cast<T*>(args.grad_input) + r * args.cols;
    if (args.grad_residual != nullptr) dr = static_cast<R*>(args.grad_residual) + r * args.cols;
    if constexpr (__is_same(acc_of<T>, acc_of<R>)) {
      using V = vector_of<T>;
      const V alpha = Broadcast<V>::of(static_cast<acc_t>(args.alpha));
      for_columns<T>(args.cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
        V g = load(sum + i, part);
        if (other != nullptr) g = g + load(other + i, part);
        if (dx != nullptr) store(dx + i, g, part);
        if (dr != nullptr) store(dr + i, alpha * g, part);
      });
    } else {
      for (int64_t i = 0; i < args.cols; ++i) {
        double g = sum[i];
        if (other != nullptr) g += to_double(other[i]);
        if (dx != nullptr) put(g, dx + i);
        if (dr != nullptr) put(args.alpha * g, dr + i);
      }
    }
  }
}

void split_rows(const SplitArgs& args, int64_t row_begin, int64_t row_end) {
  with_dtype(args.input_dtype, [&](auto x) {
    with_dtype(args.residual_dtype, [&](auto residual) {
      split_rows_of<decltype(x), decltype(residual)>(args, row_begin, row_end);
    });
  });
}
