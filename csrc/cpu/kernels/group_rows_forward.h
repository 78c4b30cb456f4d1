#pragma once

// GroupNorm, channels first: a group is one contiguous row, in which each channel has a run of
// `spatial` elements. Forward. Included by group.cpp.

/// The output of one group of one sample.
template <class In, class T>
FN_INLINE void store_group(const GroupForwardArgs& args, int64_t group, const In* x,
                           const RowStatistics<acc_of<T>>& row, T* y) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const int64_t channels = args.shape.group_channels, spatial = args.shape.spatial;
  const V mean = Broadcast<V>::of(row.mean), rstd = Broadcast<V>::of(row.rstd);
  const V minus_shift_rstd = Broadcast<V>::of(row.minus_shift_rstd);
  const auto x_hat = [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    return normalize<LayerNormStatistics, VectorMath>(load(x + i, part), mean, rstd,
                                                      minus_shift_rstd);
  };
  if (args.weight == nullptr) {
    return write_columns(y, args.shape.cols(), args.past_caches,
                         [&](int64_t i, auto part) FN_LAMBDA_INLINE { return x_hat(i, part); });
  }
  const acc_t* weight = static_cast<const acc_t*>(args.weight) + group * channels;
  const acc_t* bias = static_cast<const acc_t*>(args.bias) + group * channels;
  if (spatial == 1) {
    return write_columns(y, channels, args.past_caches, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      return mul_add(x_hat(i, part), load(weight + i, part), load(bias + i, part));
    });
  }
  for (int64_t c = 0; c < channels; ++c, x += spatial, y += spatial) {
    const V w = Broadcast<V>::of(weight[c]), b = Broadcast<V>::of(bias[c]);
    write_columns(y, spatial, args.past_caches, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      return mul_add(x_hat(i, part), w, b);
    });
  }
}

/// One group of one sample, and its statistics.
template <class T>
void group_forward_row(const GroupForwardArgs& args, int64_t group, const T* x, T* y,
                       RowStatistics<acc_of<T>>* row) {
  const int64_t cols = args.shape.cols();
  ScaledRow<T> scaled;
  if (__builtin_expect(
          row_statistics<LayerNormStatistics>(DirectLoad<T>{x}, cols, args.params, row), 1) ||
      !scaled_row<LayerNormStatistics>(x, cols, args.params, &scaled)) {
    store_group(args, group, x, *row, y);
  } else {
    store_group(args, group, scaled.x, scaled.statistics, y);
    row->mean = scaled.mean();
    row->rstd = scaled.rstd();
  }
}

template <class acc_t>
FN_INLINE void save_statistics(const GroupForwardArgs& args, int64_t index,
                               const RowStatistics<acc_t>& row) {
  if (args.mean != nullptr) static_cast<acc_t*>(args.mean)[index] = row.mean;
  if (args.rstd != nullptr) static_cast<acc_t*>(args.rstd)[index] = row.rstd;
}

template <class T>
void group_rows_forward(const GroupForwardArgs& args, const Parallel& parallel) {
  const int64_t cols = args.shape.cols(), groups = args.shape.groups;
  const T* const input = static_cast<const T*>(args.input);
  T* const output = static_cast<T*>(args.output);
  parallel_for(parallel, args.shape.samples * groups, cols * static_cast<int64_t>(sizeof(T)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   RowStatistics<acc_of<T>> row;
                   group_forward_row(args, r % groups, input + r * cols, output + r * cols, &row);
                   save_statistics(args, r, row);
                 }
                 if (args.past_caches) end_streaming();
               });
}
