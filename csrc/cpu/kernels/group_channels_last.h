#pragma once

// GroupNorm, channels last: the channels of a position lie side by side, so a group is no
// contiguous row. One vector holds the same 16 channels of one position after the other; what
// belongs to a group (pivot, mean, rstd) is spread over its channels first, so that no loop over
// elements knows of groups. Included by row_kernels.cpp.

// Sums run over 32 positions in fp32, in two accumulators each, and from there on in fp64.
constexpr int64_t kBlockPositions = 32;
// Positions that are applied together: their coefficients stay in registers.
constexpr int64_t kTogether = 8;
constexpr int64_t kChunkBytes = 128 * 1024;

/// Arrays of one number a channel, each padded to whole vectors.
template <class T>
struct ChannelsLast {
  const GroupShape& shape;
  int64_t channels, stride, chunk, chunks;

  explicit ChannelsLast(const GroupShape& s)
      : shape(s),
        channels(s.channels()),
        stride((channels + kLanes<T> - 1) / kLanes<T> * kLanes<T>) {
    const int64_t position_bytes = channels * static_cast<int64_t>(sizeof(T));
    const int64_t blocks = kChunkBytes / (kBlockPositions * position_bytes);
    chunk = (blocks < 2 ? 2 : blocks) * kBlockPositions;
    chunks = (s.spatial + chunk - 1) / chunk;
  }

  int64_t end(int64_t c) const {
    return shape.spatial < (c + 1) * chunk ? shape.spatial : (c + 1) * chunk;
  }
  int64_t chunk_bytes() const { return chunk * channels * static_cast<int64_t>(sizeof(T)); }
  /// Sets the group's channels in an array.
  template <class acc_t>
  void spread(int64_t group, acc_t value, acc_t* array) const {
    acc_t* const first = array + group * shape.group_channels;
    for (int64_t d = 0; d < shape.group_channels; ++d) first[d] = value;
  }
};

/// body(sample) for samples or runs of them: side by side if there are enough, else one after the
/// other, each on all threads.
template <class Body>
FN_INLINE void for_samples(const Parallel& parallel, int64_t count, int64_t item_bytes, Body body) {
  if (count < parallel.threads) {
    for (int64_t n = 0; n < count; ++n) body(n);
  } else {
    parallel_for(parallel, count, item_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) body(n);
    });
  }
}

/// kSums sums a channel over `positions`, added to sums[k * stride]; add(i, part, row) gives the
/// function of a position that adds to its accumulators.
template <class T, int kSums, class Setup>
FN_INLINE void channel_sums(const ChannelsLast<T>& layout, int64_t begin, int64_t end, Setup setup,
                            double* sums) {
  using V = vector_of<T>;
  for (int64_t first = begin; first < end; first += kBlockPositions) {
    const int64_t last = end - first < kBlockPositions ? end : first + kBlockPositions;
    for_columns<T>(layout.channels, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      V acc[2][kSums] = {};
      const auto add = setup(i, part);
      int64_t p = first;
      for (; p + 2 <= last; p += 2) {
        add(p * layout.channels + i, acc[0]);
        add((p + 1) * layout.channels + i, acc[1]);
      }
      if (p < last) add(p * layout.channels + i, acc[0]);
      for (int k = 0; k < kSums; ++k) {
        add_to(sums + k * layout.stride + i, acc[0][k] + acc[1][k], Full{});
      }
    });
  }
}

/// body(element, part) for the positions of [begin, end), with `setup` made once for several.
template <class T, class Setup>
FN_INLINE void for_positions(const ChannelsLast<T>& layout, int64_t begin, int64_t end,
                             Setup setup) {
  for (int64_t first = begin; first < end; first += kTogether) {
    const int64_t last = end - first < kTogether ? end : first + kTogether;
    for_columns<T>(layout.channels, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      const auto body = setup(i, part);
      for (int64_t p = first; p < last; ++p) body(p * layout.channels + i);
    });
  }
}

/// The sums of all chunks of a sample, on all threads; the first chunk's place holds the total.
template <class T, int kSums, class Setup>
FN_INLINE void sample_sums(const ChannelsLast<T>& layout, const Parallel& parallel, double* sums,
                           Setup setup) {
  const int64_t size = kSums * layout.stride;
  parallel_for(parallel, layout.chunks, layout.chunk_bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t i = 0; i < size; ++i) sums[c * size + i] = 0;  // of the sweep before
      channel_sums<T, kSums>(layout, c * layout.chunk, layout.end(c), setup, sums + c * size);
    }
  });
  for (int64_t c = 1; c < layout.chunks; ++c) {
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[c * size + i];
  }
}

/// One group of one sample, copied into a contiguous row (channels first) and back: for the few
/// whose squares over- or underflow.
template <class T>
struct GatheredGroup {
  const ChannelsLast<T>& layout;
  int64_t group;

  template <class F>
  void for_elements(F f) const {
    const GroupShape& shape = layout.shape;
    for (int64_t d = 0; d < shape.group_channels; ++d) {
      for (int64_t p = 0; p < shape.spatial; ++p) {
        f(d * shape.spatial + p, p * layout.channels + group * shape.group_channels + d);
      }
    }
  }
  void gather(const T* sample, T* row) const {
    for_elements([&](int64_t to, int64_t from) { row[to] = sample[from]; });
  }
  void scatter(const T* row, T* sample) const {
    for_elements([&](int64_t from, int64_t to) { sample[to] = row[from]; });
  }
};

// ---- Forward ----

/// A pivot for each group: the mean of 16 positions spread over the sample.
template <class T>
void group_pivots(const ChannelsLast<T>& layout, const T* x, acc_of<T>* pivot) {
  using V = vector_of<T>;
  int64_t positions = 16;
  while (positions > layout.shape.spatial) positions /= 2;
  // Divided first, by a power of two and so exactly: the sum of huge values would overflow.
  const V share = Broadcast<V>::of(acc_of<T>(1) / static_cast<acc_of<T>>(positions));
  for_columns<T>(layout.channels, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    V sum{};
    for (int64_t k = 0; k < positions; ++k) {
      const int64_t p = k * layout.shape.spatial / positions;
      sum = sum + load(x + p * layout.channels + i, part) * share;
    }
    store(pivot + i, sum);
  });
  for (int64_t g = 0; g < layout.shape.groups; ++g) {
    const int64_t first = g * layout.shape.group_channels;
    double sum = 0;
    for (int64_t d = 0; d < layout.shape.group_channels; ++d) {
      sum += static_cast<double>(pivot[first + d]);
    }
    sum /= static_cast<double>(layout.shape.group_channels);
    layout.spread(g, static_cast<acc_of<T>>(sum), pivot);
  }
}

/// As row_statistics, from sums about a pivot. `close`: false where the mean turned out more than a
/// standard deviation from the pivot, so that cancellation cost digits.
template <class acc_t>
FN_INLINE bool statistics_about(acc_t pivot, double sum, double sum_squares, double count,
                                const NormParams& params, bool* close,
                                RowStatistics<acc_t>* result) {
  const double delta = sum / count;
  double squares = sum_squares - sum * delta;
  if (squares < 0) squares = 0;
  *close = delta * sum <= squares;
  const double variance = variance_of(squares, count, params);
  double rstd = reciprocal_deviation(variance, params);
  if (rstd > Range<acc_t>::kHuge && rstd <= Range<double>::kHuge) rstd = Range<acc_t>::kHuge;
  result->mean = static_cast<acc_t>(pivot + delta);
  result->rstd = static_cast<acc_t>(rstd);
  const double shift = (static_cast<double>(pivot) - result->mean) + delta;
  result->minus_shift_rstd = static_cast<acc_t>(-shift * rstd);
  return variance_floor(variance, params) >= Range<acc_t>::kTiny &&
         sum_squares <= Range<acc_t>::kHuge;
}

template <class T>
void channels_last_forward_sample(const GroupForwardArgs& args, const ChannelsLast<T>& layout,
                                  const Parallel& parallel, int64_t sample) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const GroupShape& shape = args.shape;
  const T* const x = static_cast<const T*>(args.input) + sample * shape.sample_size();
  T* const y = static_cast<T*>(args.output) + sample * shape.sample_size();
  const Scratch<double> sums(layout.chunks * 2 * layout.stride);
  const Scratch<acc_t> arrays(4 * layout.stride);
  acc_t *const pivot = arrays.data, *const mean = pivot + layout.stride;
  acc_t *const rstd = mean + layout.stride, *const minus_shift_rstd = rstd + layout.stride;
  const Scratch<RowStatistics<acc_t>> rows(shape.groups);
  const Scratch<bool> extreme(shape.groups);
  const double count = static_cast<double>(shape.cols());

  group_pivots(layout, x, pivot);
  bool all_close = false;
  for (int sweep = 0; sweep < 3 && !all_close; ++sweep) {
    sample_sums<T, 2>(layout, parallel, sums.data, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      return [x, part, about = load(pivot + i)](int64_t at, V(&acc)[2]) FN_LAMBDA_INLINE {
        const V d = load(x + at, part) - about;
        acc[0] = acc[0] + d;
        acc[1] = mul_add(d, d, acc[1]);
      };
    });
    all_close = true;
    for (int64_t g = 0; g < shape.groups; ++g) {
      double sum = 0, sum_squares = 0;
      const int64_t first = g * shape.group_channels;
      for (int64_t c = first; c < first + shape.group_channels; ++c) {
        sum += sums.data[c];
        sum_squares += sums.data[layout.stride + c];
      }
      bool close;
      extreme.data[g] = !statistics_about(pivot[first], sum, sum_squares, count, args.params,
                                          &close, &rows.data[g]);
      if (!close && sweep < 2) {
        layout.spread(g, rows.data[g].mean, pivot);
        all_close = false;
      }
    }
  }
  for (int64_t g = 0; g < shape.groups; ++g) {
    layout.spread(g, rows.data[g].mean, mean);
    layout.spread(g, rows.data[g].rstd, rstd);
    layout.spread(g, rows.data[g].minus_shift_rstd, minus_shift_rstd);
  }

  const auto normalized = [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    return [x, part, m = load(mean + i), r = load(rstd + i),
            s = load(minus_shift_rstd + i)](int64_t at) FN_LAMBDA_INLINE {
      return normalize<LayerNormStatistics, VectorMath>(load(x + at, part), m, r, s);
    };
  };
  const acc_t* const weight = static_cast<const acc_t*>(args.weight);
  const acc_t* const bias = static_cast<const acc_t*>(args.bias);
  parallel_for(parallel, layout.chunks, layout.chunk_bytes(), [&](int64_t begin, int64_t end) {
    if (weight == nullptr) {
      for_positions(layout, begin * layout.chunk, layout.end(end - 1),
                    [&](int64_t i, auto part) FN_LAMBDA_INLINE {
                      return [y, part, x_hat = normalized(i, part)](int64_t at)
                                 FN_LAMBDA_INLINE { store(y + at, x_hat(at), part); };
                    });
    } else {
      for_positions(layout, begin * layout.chunk, layout.end(end - 1),
                    [&](int64_t i, auto part) FN_LAMBDA_INLINE {
                      return [y, part, x_hat = normalized(i, part), w = load(weight + i, part),
                              b = load(bias + i, part)](int64_t at) FN_LAMBDA_INLINE {
                        store(y + at, mul_add(x_hat(at), w, b), part);
                      };
                    });
    }
  });

  for (int64_t g = 0; g < shape.groups; ++g) {
    if (__builtin_expect(extreme.data[g], 0)) {
      const Scratch<T> row(2 * shape.cols());
      const GatheredGroup<T> gathered{layout, g};
      gathered.gather(x, row.data);
      group_forward_row(args, g, row.data, row.data + shape.cols(), &rows.data[g]);
      gathered.scatter(row.data + shape.cols(), y);
    }
    save_statistics(args, sample * shape.groups + g, rows.data[g]);
  }
}

template <class T>
void channels_last_forward(const GroupForwardArgs& args, const Parallel& parallel) {
  const ChannelsLast<T> layout(args.shape);
  for_samples(parallel, args.shape.samples, args.shape.sample_size() * sizeof(T),
              [&](int64_t n) { channels_last_forward_sample<T>(args, layout, parallel, n); });
}

// ---- Backward ----

template <class T>
void channels_last_backward_sample(const GroupBackwardArgs& args, const ChannelsLast<T>& layout,
                                   const Parallel& parallel, int64_t sample, double* grad_weight,
                                   double* grad_bias) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const GroupShape& shape = args.shape;
  const int64_t offset = sample * shape.sample_size();
  const T* const x = static_cast<const T*>(args.input) + offset;
  const T* const grad_output = static_cast<const T*>(args.grad_output) + offset;
  T* const dx = args.grad_input == nullptr ? nullptr : static_cast<T*>(args.grad_input) + offset;
  const acc_t* const saved_mean = static_cast<const acc_t*>(args.mean) + sample * shape.groups;
  const acc_t* const saved_rstd = static_cast<const acc_t*>(args.rstd) + sample * shape.groups;
  const acc_t* const weight = static_cast<const acc_t*>(args.weight);
  const Scratch<double> sums(layout.chunks * 3 * layout.stride);
  const Scratch<acc_t> arrays(5 * layout.stride);
  acc_t *const mean = arrays.data, *const rstd = mean + layout.stride;
  acc_t *const minus_shift = rstd + layout.stride, *const mean_g = minus_shift + layout.stride;
  acc_t* const minus_projection = mean_g + layout.stride;

  for (int64_t g = 0; g < shape.groups; ++g) {
    layout.spread(g, saved_mean[g], mean);
    layout.spread(g, saved_rstd[g], rstd);
  }
  sample_sums<T, 3>(layout, parallel, sums.data, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    return [x, grad_output, part, m = load(mean + i), r = load(rstd + i)](int64_t at, V(&acc)[3])
               FN_LAMBDA_INLINE {
                 const V t = (load(x + at, part) - m) * r;
                 const V g = load(grad_output + at, part);
                 acc[0] = acc[0] + t;
                 acc[1] = acc[1] + g;
                 acc[2] = mul_add(g, t, acc[2]);
               };
  });
  const double *const of_t = sums.data, *const of_g = of_t + layout.stride;
  const double* const of_gt = of_g + layout.stride;
  for (int64_t g = 0; g < shape.groups; ++g) {
    double sum_t = 0, sum_g = 0, sum_gt = 0;
    const int64_t first = g * shape.group_channels, last = first + shape.group_channels;
    for (int64_t c = first; c < last; ++c) {
      const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[c]);
      sum_t += of_t[c];
      sum_g += w * of_g[c];
      sum_gt += w * of_gt[c];
    }
    const auto k = group_coefficients(sum_t, sum_g, sum_gt, static_cast<double>(shape.cols()),
                                      saved_rstd[g], args.params);
    if (grad_weight != nullptr && is_ordinary(saved_rstd[g])) {
      for (int64_t c = first; c < last; ++c) {
        grad_weight[c] += of_gt[c] + static_cast<double>(k.minus_shift) * of_g[c];
        grad_bias[c] += of_g[c];
      }
    }
    layout.spread(g, k.minus_shift, minus_shift);
    layout.spread(g, k.mean_g, mean_g);
    layout.spread(g, k.minus_projection, minus_projection);
  }

  if (dx != nullptr) {
    parallel_for(parallel, layout.chunks, layout.chunk_bytes(), [&](int64_t begin, int64_t end) {
      for_positions(layout, begin * layout.chunk, layout.end(end - 1),
                    [&](int64_t i, auto part) FN_LAMBDA_INLINE {
                      V w = Broadcast<V>::of(acc_t(1));
                      if (weight != nullptr) w = load(weight + i, part);
                      return [x, grad_output, dx, part, w, m = load(mean + i), r = load(rstd + i),
                              s = load(minus_shift + i), mg = load(mean_g + i),
                              mp = load(minus_projection + i)](int64_t at) FN_LAMBDA_INLINE {
                        const V x_hat =
                            normalize<LayerNormStatistics, VectorMath>(load(x + at, part), m, r, s);
                        store(dx + at,
                              grad_input<LayerNormStatistics, VectorMath>(
                                  load(grad_output + at, part) * w, x_hat, mg, mp, r),
                              part);
                      };
                    });
    });
  }

  for (int64_t g = 0; g < shape.groups; ++g) {
    if (__builtin_expect(is_ordinary(saved_rstd[g]), 1)) continue;
    const int64_t cols = shape.cols(), first = g * shape.group_channels;
    const Scratch<T> rows(3 * cols);
    const Scratch<double> channel(2 * shape.group_channels);
    const GatheredGroup<T> gathered{layout, g};
    gathered.gather(x, rows.data);
    gathered.gather(grad_output, rows.data + cols);
    group_backward_row<T>(shape, args.params,
                          {rows.data,
                           rows.data + cols,
                           dx == nullptr ? nullptr : rows.data + 2 * cols,
                           weight == nullptr ? nullptr : weight + first,
                           grad_weight == nullptr ? nullptr : grad_weight + first,
                           grad_bias == nullptr ? nullptr : grad_bias + first,
                           saved_mean[g],
                           saved_rstd[g],
                           {1, 1}},
                          channel.data);
    if (dx != nullptr) gathered.scatter(rows.data + 2 * cols, dx);
  }
}

template <class T>
void channels_last_backward(const GroupBackwardArgs& args, const Parallel& parallel) {
  const ChannelsLast<T> layout(args.shape);
  ChannelGradients gradients(args);
  for_samples(parallel, gradients.chunks,
              gradients.chunk * args.shape.sample_size() * static_cast<int64_t>(sizeof(T)),
              [&](int64_t c) {
                for (int64_t n = gradients.begin(c); n < gradients.end(c); ++n) {
                  channels_last_backward_sample<T>(args, layout, parallel, n, gradients.weight(c),
                                                   gradients.bias(c));
                }
              });
  gradients.finish();
}

// ---- By layout ----

template <class T>
void group_forward(const GroupForwardArgs& args, const Parallel& parallel) {
  if (args.shape.channels_last) {
    channels_last_forward<T>(args, parallel);
  } else {
    group_rows_forward<T>(args, parallel);
  }
}

template <class T>
void group_backward(const GroupBackwardArgs& args, const Parallel& parallel) {
  if (args.shape.channels_last) {
    channels_last_backward<T>(args, parallel);
  } else {
    group_rows_backward<T>(args, parallel);
  }
}
