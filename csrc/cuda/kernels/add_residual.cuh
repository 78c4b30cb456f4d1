// The residual add, fused: rows that are alpha * residual + addend as they are fetched (Loads), and
// the gradient of such a sum as it leaves (Stores).
#pragma once

#include "row_norm_backward.cuh"

namespace fusednorm::cuda {

// ---- Forward ----

/// One fused multiply-add in the accumulation type, rounded to T: the norm is of what is stored.
template <class T, class X, int kColumns>
FN_HOST_DEVICE Chunk<kColumns * sizeof(T)> residual_sum(const Chunk<kColumns * sizeof(T)>& residual,
                                                        const Chunk<kColumns * sizeof(X)>& addend,
                                                        acc_of<T> alpha) {
  acc_of<T> r[kColumns], x[kColumns];
  unpack<T, kColumns>(residual, r);
  unpack<X, kColumns>(addend, x);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) r[j] = Math::mul_add(alpha, r[j], x[j]);
  return pack<T, kColumns>(r);
}

/// Whether all three tensors are read and written in whole, aligned chunks.
FN_HOST_DEVICE bool sums_are_exact(const AddForwardArgs& args) {
  return args.source.exact && args.addend_source.exact && args.residual_out_exact;
}

template <class T>
__device__ __forceinline__ Source source_of_row(Source source, const RowLayout& layout,
                                                int64_t row) {
  source.data =
      static_cast<const char*>(layout.data) + row_offset(layout, row) * static_cast<int>(sizeof(T));
  return source;
}

/// A sum in registers, stored before its statistics are taken. With 128 bytes a thread only where
/// all rows are exact: beside the way for other rows that kernel spilled; they take AddLoopRow.
template <class T, class X, int kColumns_, int kUnits>
struct AddRegisterRow : RegisterRow<T, kColumns_, kUnits> {
  using Args = AddForwardArgs;
  static constexpr int kColumns = kColumns_, kElement = sizeof(T);
  static constexpr int kBytes = kColumns * kElement, kAddend = kColumns * sizeof(X);
  static constexpr int kMostBytes = 128;

  __device__ __forceinline__ void fetch(const Args& args, int64_t row, int row_cols,
                                        const Group& group) {
    const Source residual = source_of_row<T>(args.source, args.input, row);
    const Source addend = source_of_row<X>(args.addend_source, args.addend, row);
    const auto alpha = static_cast<acc_of<T>>(args.alpha);
    const int first = group.thread * kColumns, stride = group.threads * kColumns;
    this->cols = row_cols, this->first = first, this->stride = stride;
    const char* const r = residual.data + static_cast<int64_t>(first) * kElement;
    const char* const x = addend.data + static_cast<int64_t>(first) * int{sizeof(X)};
    char* const out = static_cast<char*>(args.residual_out) + (row * args.cols + first) * kElement;
    if constexpr (kBytes * kUnits < kMostBytes) {
      if (!sums_are_exact(args)) {
        // Unit by unit: with the chunks that cover them all on their way, kernels spilled.
#pragma unroll
        for (int k = 0; k < kUnits; ++k) {
          const int left = row_cols - first - k * stride;
          this->raw[k] = {};
          if (left > 0) {
            this->raw[k] = residual_sum<T, X, kColumns>(
                load_unit<kElement, kBytes>(r + k * stride * kElement, left, residual),
                load_unit<sizeof(X), kAddend>(x + k * stride * int{sizeof(X)}, left, addend),
                alpha);
          }
          store_unit<kElement>(out + k * stride * kElement, this->raw[k], left,
                               args.residual_out_exact, group.lane, group.width);
        }
        return;
      }
    }
    Chunk<kAddend> added[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      this->raw[k] = {}, added[k] = {};
      if (first + k * stride < row_cols) {
        this->raw[k] = load_own<kBytes>(r + k * stride * kElement);
        added[k] = load_global<kAddend>(x + k * stride * int{sizeof(X)});
      }
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      this->raw[k] = residual_sum<T, X, kColumns>(this->raw[k], added[k], alpha);
      if (first + k * stride < row_cols) {
        store_global<kBytes>(out + k * stride * kElement, this->raw[k]);
      }
    }
  }

  __device__ __forceinline__ void last_pass() {}
};

/// A sum too long for registers (over 64 KB, on sm_90 over 1 MB), or that AddRegisterRow leaves:
/// taken again in each pass, and stored in the last one, when nobody reads the residual any more.
/// The same thread has the same columns in the same order as in any other kernel: the same bits.
template <class T, class X, int kColumns_>
struct AddLoopRow {
  using Args = AddForwardArgs;
  static constexpr int kColumns = kColumns_, kElement = sizeof(T);
  static constexpr int kBytes = kColumns * kElement, kAddend = kColumns * sizeof(X);
  static constexpr int kTogether = 2;
  Source residual, addend;
  char* out;
  acc_of<T> alpha;
  int cols, units, thread, threads, lane, exponent;
  bool out_exact, stores;

  __device__ __forceinline__ int column(int k) const { return (k * threads + thread) * kColumns; }

  __device__ __forceinline__ void fetch(const Args& args, int64_t row, int row_cols,
                                        const Group& group) {
    residual = source_of_row<T>(args.source, args.input, row);
    addend = source_of_row<X>(args.addend_source, args.addend, row);
    out = static_cast<char*>(args.residual_out) + row * args.cols * kElement;
    out_exact = args.residual_out_exact, stores = false;
    alpha = static_cast<acc_of<T>>(args.alpha);
    cols = row_cols, units = args.units, thread = group.thread, threads = group.threads;
    lane = group.lane, exponent = 0;
  }

  template <class F>
  __device__ __forceinline__ void for_units(F f) {
    for (int first = 0; first < units; first += kTogether) {
      Chunk<kBytes> raw[kTogether];
      Chunk<kAddend> x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int col = column(first + i), left = cols - col;
        raw[i] = {}, x[i] = {};
        if (left <= 0) continue;
        const char* const p = residual.data + static_cast<int64_t>(col) * kElement;
        const char* const q = addend.data + static_cast<int64_t>(col) * int{sizeof(X)};
        raw[i] =
            residual.exact ? load_own<kBytes>(p) : load_unit<kElement, kBytes>(p, left, residual);
        x[i] =
            addend.exact ? load_global<kAddend>(q) : load_unit<sizeof(X), kAddend>(q, left, addend);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= units) break;  // the same for all threads
        const int col = column(first + i);
        const auto sum = residual_sum<T, X, kColumns>(raw[i], x[i], alpha);
        if (stores) {
          store_unit<kElement>(out + static_cast<int64_t>(col) * kElement, sum, cols - col,
                               out_exact, lane, 32);
        }
        f(col, [&](acc_of<T>* v) {
          unpack<T, kColumns>(sum, v);
          if (exponent != 0) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) v[j] = std::ldexp(v[j], -exponent);
          }
        });
      }
    }
  }

  __device__ __forceinline__ void rescale(int by) { exponent = by; }
  __device__ __forceinline__ void last_pass() { stores = true; }
};

// ---- Backward ----

/// The gradient of the sum: grad_residual_out is added to it before it is rounded; grad_input takes
/// it, of grad_output's dtype, and grad_residual alpha times it.
template <class X>
struct SplitStore {
  using Args = AddBackwardArgs;
  using grad_t = X;
};

}  // namespace fusednorm::cuda
