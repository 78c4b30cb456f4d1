#pragma once

// GroupNorm, channels last: the channels of a position lie side by side, so a group is no
// contiguous row. A vector holds the same channels of one position after the other; what belongs to
// a group (pivot, mean, rstd) is spread over its channels first, so that no loop over elements
// knows of groups. Included by row_kernels.cpp.

// Sums run over 32 positions in fp32, and from there on in fp64.
constexpr int64_t kRunPositions = 32;
// Vectors of a position that are taken together: their sums and coefficients stay in registers.
#if defined(FUSEDNORM_AVX512)
constexpr int kStrip = 4;
#else
constexpr int kStrip = 2;
#endif
// How far ahead memory is asked for: where a piece of a position ends, prefetchers lose the track.
constexpr int64_t kAheadPositions = 16;

/// body(first channel, number of vectors, part): strips of whole vectors, whole vectors, one part.
template <class T, class Body>
FN_INLINE void for_strips(int64_t channels, Body body) {
  int64_t i = 0;
  for (; i + kStrip * kLanes<T> <= channels; i += kStrip * kLanes<T>) {
    body(i, Count<kStrip>{}, Full{});
  }
  for (; i + kLanes<T> <= channels; i += kLanes<T>) body(i, Count<1>{}, Full{});
  if (i < channels) body(i, Count<1>{}, Part{static_cast<int>(channels - i)});
}

/// Some groups of one sample. Arrays of one number a channel are padded to whole vectors.
template <class T>
struct GroupBlock {
  const GroupShape& shape;
  int64_t sample, first_group, groups;

  int64_t first_channel() const { return first_group * shape.group_channels; }
  int64_t channels() const { return groups * shape.group_channels; }
  /// From one array to the next: whole vectors, and one for what spread writes beyond.
  int64_t stride() const {
    return (channels() + kLanes<T> - 1) / kLanes<T> * kLanes<T> + kLanes<T>;
  }
  int64_t offset() const { return sample * shape.sample_size() + first_channel(); }
  int64_t row(int64_t group) const { return sample * shape.groups + first_group + group; }
  /// Whether the vectors of every position may be streamed to.
  bool may_stream(const T* first_position) const {
    return shape.channels() % kLanes<T> == 0 && FUSEDNORM_ISA::may_stream(first_position);
  }
  /// Sets one group's channels in an array, in whole vectors: what comes behind them is set after.
  FN_INLINE void spread(int64_t group, acc_of<T> value, acc_of<T>* array) const {
    acc_of<T>* const first = array + group * shape.group_channels;
    const auto all = Broadcast<vector_of<T>>::of(value);
    for (int64_t d = 0; d < shape.group_channels; d += kLanes<T>) store(first + d, all);
  }
};

/// How a shape is cut, by itself alone: into blocks of groups whose second sweep finds them in the
/// cache, but whose positions are no smaller than a few cache lines; and a block too large for the
/// cache into chunks of positions, which idle threads may take.
template <class T>
struct Blocking {
  const GroupShape& shape;
  int64_t groups, chunk, chunks;  // groups of a block, positions of a chunk, chunks of a block

  Blocking(const GroupShape& s, int64_t tensors) : shape(s) {
    constexpr int64_t kLeastBytes = 256, kCacheBytes = 512 * 1024;
    const int64_t channel_bytes = s.group_channels * static_cast<int64_t>(sizeof(T));
    const int64_t least = (kLeastBytes + channel_bytes - 1) / channel_bytes;
    const int64_t most = kCacheBytes / (tensors * channel_bytes * s.spatial);
    // A block that ends inside a cache line makes every vector of the next one cross lines.
    int64_t whole = 1;
    while (whole < 64 && whole * channel_bytes % 64 != 0) whole *= 2;
    groups = most / whole * whole;
    if (groups < least) groups = (least + whole - 1) / whole * whole;
    if (groups > s.groups) groups = s.groups;
    const int64_t runs = kCacheBytes / (tensors * groups * channel_bytes * kRunPositions);
    chunk = (runs < 2 ? 2 : runs) * kRunPositions;
    chunks = (s.spatial + chunk - 1) / chunk;
  }

  int64_t block_bytes() const { return groups * shape.cols() * static_cast<int64_t>(sizeof(T)); }
  int64_t blocks() const { return (shape.groups + groups - 1) / groups; }
  GroupBlock<T> block(int64_t sample, int64_t b) const {
    const int64_t first = b * groups, left = shape.groups - first;
    return {shape, sample, first, left < groups ? left : groups};
  }
  int64_t end(int64_t c) const {
    return shape.spatial < (c + 1) * chunk ? shape.spatial : (c + 1) * chunk;
  }
  /// body(first position, position after the last, chunk) for each chunk.
  template <class Body>
  void for_chunks(const Parallel& parallel, Body body) const {
    parallel_for(parallel, chunks, kGroupGrainBytes, [&](int64_t begin, int64_t last) {
      for (int64_t c = begin; c < last; ++c) body(c * chunk, end(c), c);
    });
  }
};

/// body(first position, position after the last) calls what make(i, count, part) gives, with the
/// offset of each strip of each position. Runs of positions, so that strips side by side share
/// cache lines.
template <class T, class Run>
FN_INLINE void for_runs(const GroupBlock<T>& block, int64_t begin, int64_t end, Run run) {
  for (int64_t first = begin; first < end; first += kRunPositions) {
    const int64_t last = end - first < kRunPositions ? end : first + kRunPositions;
    for_strips<T>(block.channels(), [&](int64_t i, auto count, auto part)
                                        FN_LAMBDA_INLINE { run(first, last, i, count, part); });
  }
}

/// Sums of each channel over all positions, on all threads; sums[k * stride + channel]. `sums` has
/// room for those of each chunk. Sums(block, i, count, part) keeps what a strip needs.
template <class Sums, class T, class... Args>
FN_INLINE void channel_sums(const Blocking<T>& blocking, const GroupBlock<T>& block,
                            const Parallel& parallel, double* sums, const Args&... args) {
  using V = vector_of<T>;
  const int64_t stride = block.stride(), size = Sums::kSums * stride;
  const int64_t step = block.shape.channels();
  blocking.for_chunks(parallel, [&](int64_t begin, int64_t end, int64_t c) {
    double* const of_chunk = sums + c * size;
    for (int64_t i = 0; i < size; ++i) of_chunk[i] = 0;
    for_runs(block, begin, end,
             [&](int64_t first, int64_t last, int64_t i, auto count, auto part) FN_LAMBDA_INLINE {
               typename Sums::template Of<T, count.value, decltype(part)> strip(i, part, args...);
               V acc[Sums::kSums][count.value] = {};
               for (int64_t p = first; p < last; ++p)
                 strip.add(p * step + i, acc, step * kAheadPositions);
               for (int k = 0; k < Sums::kSums; ++k) {
                 for (int v = 0; v < count.value; ++v) {
                   add_to(of_chunk + k * stride + i + v * kLanes<T>, acc[k][v], Full{});
                 }
               }
             });
  });
  for (int64_t c = 1; c < blocking.chunks; ++c) {
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[c * size + i];
  }
}

/// Apply(block, i, count, part)'s store for each strip of each position, on all threads.
template <class Apply, class T, class... Args>
FN_INLINE void apply_channels(const Blocking<T>& blocking, const GroupBlock<T>& block,
                              const Parallel& parallel, const Args&... args) {
  const int64_t step = block.shape.channels();
  blocking.for_chunks(parallel, [&](int64_t begin, int64_t end, int64_t) {
    for_runs(block, begin, end,
             [&](int64_t first, int64_t last, int64_t i, auto count, auto part) FN_LAMBDA_INLINE {
               typename Apply::template Of<T, count.value, decltype(part)> strip(i, part, args...);
               for (int64_t p = first; p < last; ++p)
                 strip.store_at(p * step + i, step * kAheadPositions);
             });
    end_streaming();
  });
}

/// A strip of an array.
template <class T, int n>
struct Strip {
  vector_of<T> v[n];
  template <class Which>
  FN_INLINE Strip(const acc_of<T>* array, Which part) {
#pragma GCC unroll 4
    for (int k = 0; k < n; ++k) v[k] = load(array + k * kLanes<T>, part);
  }
};

/// What the blocks of one thread need in turn.
template <class T>
struct Workspace {
  int64_t stride;
  Scratch<double> sums;
  Scratch<acc_of<T>> arrays, pivots;
  Scratch<RowStatistics<acc_of<T>>> rows;
  Scratch<bool> extreme;

  Workspace(const Blocking<T>& blocking, int kSums, int kArrays)
      : stride(blocking.block(0, 0).stride()),
        sums(blocking.chunks * kSums * stride),
        arrays(kArrays * stride),
        pivots(blocking.groups),
        rows(blocking.groups),
        extreme(blocking.groups) {}
  acc_of<T>* array(int i) const { return arrays.data + i * stride; }
};

/// One group of one sample, copied into a contiguous row (channels first) and back: for the few
/// whose squares over- or underflow.
template <class T>
struct GatheredGroup {
  const GroupBlock<T>& block;
  int64_t group;

  template <class F>
  void for_elements(F f) const {
    const GroupShape& shape = block.shape;
    for (int64_t d = 0; d < shape.group_channels; ++d) {
      for (int64_t p = 0; p < shape.spatial; ++p) {
        f(d * shape.spatial + p, p * shape.channels() + group * shape.group_channels + d);
      }
    }
  }
  void gather(const T* elements, T* row) const {
    for_elements([&](int64_t to, int64_t from) { row[to] = elements[from]; });
  }
  void scatter(const T* row, T* elements) const {
    for_elements([&](int64_t from, int64_t to) { elements[to] = row[from]; });
  }
};

// ---- Forward ----

/// Of x - pivot and its square.
struct PivotSums {
  static constexpr int kSums = 2;
  template <class T, int n, class Which>
  struct Of {
    const T* x;
    Which part;
    Strip<T, n> pivot;
    FN_INLINE Of(int64_t i, Which p, const T* x_, const Workspace<T>& space)
        : x(x_), part(p), pivot(space.array(0) + i, p) {}
    FN_INLINE void add(int64_t at, vector_of<T> (&acc)[kSums][n], int64_t ahead) const {
#pragma GCC unroll 4
      for (int k = 0; k < n; ++k) {
        const T* const p = x + at + k * kLanes<T>;
        __builtin_prefetch(p + ahead);
        const auto d = load(p, part) - pivot.v[k];
        acc[0][k] = acc[0][k] + d;
        acc[1][k] = mul_add(d, d, acc[1][k]);
      }
    }
  };
};

template <bool kAffine>
struct Normalize {
  template <class T, int n, class Which>
  struct Of {
    const T* x;
    T* y;
    bool past_caches;
    Which part;
    Strip<T, n> mean, rstd, minus_shift_rstd, weight, bias;
    FN_INLINE Of(int64_t i, Which p, const T* x_, T* y_, bool past, const Workspace<T>& space,
                 const acc_of<T>* weights, const acc_of<T>* biases)
        : x(x_),
          y(y_),
          past_caches(past),
          part(p),
          mean(space.array(0) + i, p),
          rstd(space.array(1) + i, p),
          minus_shift_rstd(space.array(2) + i, p),
          weight(kAffine ? weights + i : space.array(0) + i, p),
          bias(kAffine ? biases + i : space.array(0) + i, p) {}
    FN_INLINE void store_at(int64_t at, int64_t ahead) const {
#pragma GCC unroll 4
      for (int k = 0; k < n; ++k) {
        const int64_t j = at + k * kLanes<T>;
        if (!past_caches) __builtin_prefetch(y + j + ahead, 1);
        const auto x_hat = normalize<LayerNormStatistics, VectorMath>(
            load(x + j, part), mean.v[k], rstd.v[k], minus_shift_rstd.v[k]);
        write(y + j, kAffine ? mul_add(x_hat, weight.v[k], bias.v[k]) : x_hat, part, past_caches);
      }
    }
  };
};

/// A pivot for each group: the mean of 16 elements or more, of 4 to 16 positions spread over the
/// sample.
template <class T>
void group_pivots(const GroupBlock<T>& block, const T* x, const Workspace<T>& space) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const GroupShape& shape = block.shape;
  int64_t positions = shape.group_channels >= 4 ? 4 : 16 / shape.group_channels;
  while (positions > shape.spatial) positions /= 2;
  // Divided first: the sum of huge values would overflow.
  const V divisor = Broadcast<V>::of(static_cast<acc_t>(positions));
  acc_t* const means = space.array(0);
  for_columns<T>(block.channels(), [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    V sum{};
    for (int64_t k = 0; k < positions; ++k) {
      const int64_t p = k * shape.spatial / positions;
      sum = sum + load(x + p * shape.channels() + i, part) / divisor;
    }
    store(means + i, sum);
  });
  for (int64_t g = 0; g < block.groups; ++g) {
    double sum = 0;
    for (int64_t d = 0; d < shape.group_channels; ++d) {
      sum += static_cast<double>(means[g * shape.group_channels + d]);
    }
    space.pivots.data[g] = static_cast<acc_t>(sum / static_cast<double>(shape.group_channels));
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
void channels_last_forward_block(const GroupForwardArgs& args, const Blocking<T>& blocking,
                                 const GroupBlock<T>& block, const Parallel& parallel,
                                 const Workspace<T>& space) {
  using acc_t = acc_of<T>;
  const GroupShape& shape = args.shape;
  const T* const x = static_cast<const T*>(args.input) + block.offset();
  T* const y = static_cast<T*>(args.output) + block.offset();
  const double *const sums = space.sums.data, *const square_sums = sums + block.stride();
  RowStatistics<acc_t>* const rows = space.rows.data;

  group_pivots(block, x, space);
  bool all_close = false;
  for (int sweep = 0; sweep < 3 && !all_close; ++sweep) {
    acc_t* const pivots = space.pivots.data;
    for (int64_t g = 0; g < block.groups; ++g) block.spread(g, pivots[g], space.array(0));
    channel_sums<PivotSums>(blocking, block, parallel, space.sums.data, x, space);
    all_close = true;
    for (int64_t g = 0; g < block.groups; ++g) {
      double sum = 0, sum_squares = 0;
      const int64_t first = g * shape.group_channels;
      for (int64_t c = first; c < first + shape.group_channels; ++c) {
        sum += sums[c];
        sum_squares += square_sums[c];
      }
      bool close;
      space.extreme.data[g] =
          !statistics_about(pivots[g], sum, sum_squares, static_cast<double>(shape.cols()),
                            args.params, &close, &rows[g]);
      if (!close && sweep < 2) {  // the others' sums will be the same once more
        pivots[g] = rows[g].mean;
        all_close = false;
      }
    }
  }
  for (int64_t g = 0; g < block.groups; ++g) {
    block.spread(g, rows[g].mean, space.array(0));
    block.spread(g, rows[g].rstd, space.array(1));
    block.spread(g, rows[g].minus_shift_rstd, space.array(2));
  }

  const bool past_caches = args.past_caches && block.may_stream(y);
  const acc_t* const weight = static_cast<const acc_t*>(args.weight);
  if (weight == nullptr) {
    apply_channels<Normalize<false>>(blocking, block, parallel, x, y, past_caches, space, weight,
                                     weight);
  } else {
    const acc_t* const bias = static_cast<const acc_t*>(args.bias);
    const int64_t first = block.first_channel();
    apply_channels<Normalize<true>>(blocking, block, parallel, x, y, past_caches, space,
                                    weight + first, bias + first);
  }

  for (int64_t g = 0; g < block.groups; ++g) {
    if (__builtin_expect(space.extreme.data[g], 0)) {
      const Scratch<T> row(2 * shape.cols());
      const GatheredGroup<T> gathered{block, g};
      gathered.gather(x, row.data);
      group_forward_row(args, block.first_group + g, row.data, row.data + shape.cols(), &rows[g]);
      gathered.scatter(row.data + shape.cols(), y);
    }
    save_statistics(args, block.row(g), rows[g]);
  }
}

/// body(begin, end) for the ranges of [0, count): side by side if they are many, else here, with
/// all threads left for what is inside.
template <class Body>
FN_INLINE void for_ranges(const Parallel& parallel, int64_t count, int64_t item_bytes, Body body) {
  if (count < parallel.threads) {
    body(0, count);
  } else {
    parallel_for(parallel, count, item_bytes, body);
  }
}

template <class T>
void channels_last_forward(const GroupForwardArgs& args, const Parallel& parallel) {
  const Blocking<T> blocking(args.shape, 1);
  const int64_t blocks = blocking.blocks();
  for_ranges(parallel, args.shape.samples * blocks, blocking.block_bytes(),
             [&](int64_t begin, int64_t end) {
               const Workspace<T> space(blocking, PivotSums::kSums, 3);
               for (int64_t i = begin; i < end; ++i) {
                 channels_last_forward_block(args, blocking, blocking.block(i / blocks, i % blocks),
                                             parallel, space);
               }
             });
}

// ---- Backward ----

/// Of t = (x - mean) * rstd, of grad_output and of grad_output * t.
struct GradientSums {
  static constexpr int kSums = 3;
  template <class T, int n, class Which>
  struct Of {
    const T *x, *grad_output;
    Which part;
    Strip<T, n> mean, rstd;
    FN_INLINE Of(int64_t i, Which p, const T* x_, const T* g, const Workspace<T>& space)
        : x(x_),
          grad_output(g),
          part(p),
          mean(space.array(0) + i, p),
          rstd(space.array(1) + i, p) {}
    FN_INLINE void add(int64_t at, vector_of<T> (&acc)[kSums][n], int64_t ahead) const {
#pragma GCC unroll 4
      for (int k = 0; k < n; ++k) {
        const int64_t j = at + k * kLanes<T>;
        __builtin_prefetch(x + j + ahead);
        __builtin_prefetch(grad_output + j + ahead);
        const auto t = (load(x + j, part) - mean.v[k]) * rstd.v[k];
        const auto g = load(grad_output + j, part);
        acc[0][k] = acc[0][k] + t;
        acc[1][k] = acc[1][k] + g;
        acc[2][k] = mul_add(g, t, acc[2][k]);
      }
    }
  };
};

struct GradInput {
  template <class T, int n, class Which>
  struct Of {
    const T *x, *grad_output;
    T* dx;
    bool past_caches;
    Which part;
    Strip<T, n> mean, rstd, minus_shift, mean_g, minus_projection, weight;
    FN_INLINE Of(int64_t i, Which p, const T* x_, const T* g, T* d, bool past,
                 const Workspace<T>& space, const acc_of<T>* weights)
        : x(x_),
          grad_output(g),
          dx(d),
          past_caches(past),
          part(p),
          mean(space.array(0) + i, p),
          rstd(space.array(1) + i, p),
          minus_shift(space.array(2) + i, p),
          mean_g(space.array(3) + i, p),
          minus_projection(space.array(4) + i, p),
          weight(weights + i, p) {}
    FN_INLINE void store_at(int64_t at, int64_t ahead) const {
#pragma GCC unroll 4
      for (int k = 0; k < n; ++k) {
        const int64_t j = at + k * kLanes<T>;
        if (!past_caches) __builtin_prefetch(dx + j + ahead, 1);
        const auto x_hat = normalize<LayerNormStatistics, VectorMath>(load(x + j, part), mean.v[k],
                                                                      rstd.v[k], minus_shift.v[k]);
        write(dx + j,
              grad_input<LayerNormStatistics, VectorMath>(load(grad_output + j, part) * weight.v[k],
                                                          x_hat, mean_g.v[k], minus_projection.v[k],
                                                          rstd.v[k]),
              part, past_caches);
      }
    }
  };
};

/// weight, grad_weight and grad_bias: of the block's channels; the latter two are added to, or
/// null: not wanted.
template <class T>
void channels_last_backward_block(const GroupBackwardArgs& args, const Blocking<T>& blocking,
                                  const GroupBlock<T>& block, const Parallel& parallel,
                                  const Workspace<T>& space, const acc_of<T>* weight,
                                  double* grad_weight, double* grad_bias) {
  using acc_t = acc_of<T>;
  const GroupShape& shape = args.shape;
  const T* const x = static_cast<const T*>(args.input) + block.offset();
  const T* const grad_output = static_cast<const T*>(args.grad_output) + block.offset();
  T* const dx =
      args.grad_input == nullptr ? nullptr : static_cast<T*>(args.grad_input) + block.offset();
  const acc_t* const mean = static_cast<const acc_t*>(args.mean) + block.row(0);
  const acc_t* const rstd = static_cast<const acc_t*>(args.rstd) + block.row(0);
  for (int64_t g = 0; g < block.groups; ++g) {
    block.spread(g, mean[g], space.array(0));
    block.spread(g, rstd[g], space.array(1));
  }

  channel_sums<GradientSums>(blocking, block, parallel, space.sums.data, x, grad_output, space);
  const double *const of_t = space.sums.data, *const of_g = of_t + block.stride();
  const double* const of_gt = of_g + block.stride();
  for (int64_t g = 0; g < block.groups; ++g) {
    double sum_t = 0, sum_g = 0, sum_gt = 0;
    const int64_t first = g * shape.group_channels, last = first + shape.group_channels;
    for (int64_t c = first; c < last; ++c) {
      const double w = static_cast<double>(weight[c]);
      sum_t += of_t[c];
      sum_g += w * of_g[c];
      sum_gt += w * of_gt[c];
    }
    const auto k = group_coefficients(sum_t, sum_g, sum_gt, static_cast<double>(shape.cols()),
                                      rstd[g], args.params);
    if (grad_weight != nullptr && is_ordinary(rstd[g])) {
      for (int64_t c = first; c < last; ++c) {
        grad_weight[c] += of_gt[c] + static_cast<double>(k.minus_shift) * of_g[c];
        grad_bias[c] += of_g[c];
      }
    }
    block.spread(g, k.minus_shift, space.array(2));
    block.spread(g, k.mean_g, space.array(3));
    block.spread(g, k.minus_projection, space.array(4));
  }
  if (dx != nullptr) {
    const bool past_caches = args.past_caches && block.may_stream(dx);
    apply_channels<GradInput>(blocking, block, parallel, x, grad_output, dx, past_caches, space,
                              weight);
  }

  for (int64_t g = 0; g < block.groups; ++g) {
    if (__builtin_expect(is_ordinary(rstd[g]), 1)) continue;
    const int64_t cols = shape.cols(), first = g * shape.group_channels;
    const Scratch<T> rows(3 * cols);
    const Scratch<double> channel(2 * shape.group_channels);
    const GatheredGroup<T> gathered{block, g};
    gathered.gather(x, rows.data);
    gathered.gather(grad_output, rows.data + cols);
    group_backward_row<T>(shape, args.params,
                          {rows.data,
                           rows.data + cols,
                           dx == nullptr ? nullptr : rows.data + 2 * cols,
                           weight + first,
                           grad_weight == nullptr ? nullptr : grad_weight + first,
                           grad_bias == nullptr ? nullptr : grad_bias + first,
                           mean[g],
                           rstd[g],
                           {1, 1},
                           false},
                          channel.data);
    if (dx != nullptr) gathered.scatter(rows.data + 2 * cols, dx);
  }
}

template <class T>
void channels_last_backward(const GroupBackwardArgs& args, const Parallel& parallel) {
  const Blocking<T> blocking(args.shape, 2);
  ChannelGradients gradients(args);
  const int64_t blocks = blocking.blocks();
  Scratch<acc_of<T>> ones(args.weight == nullptr ? args.shape.channels() : 0);
  for (int64_t c = 0; args.weight == nullptr && c < args.shape.channels(); ++c) ones.data[c] = 1;
  const auto* const weight =
      args.weight == nullptr ? ones.data : static_cast<const acc_of<T>*>(args.weight);
  // A range of (chunk of samples, block): the samples of a chunk in order, the range's blocks of
  // each.
  for_ranges(parallel, gradients.chunks * blocks, gradients.chunk * blocking.block_bytes(),
             [&](int64_t begin, int64_t end) {
               const Workspace<T> space(blocking, GradientSums::kSums, 5);
               for (int64_t c = begin / blocks; c * blocks < end; ++c) {
                 const int64_t first = begin > c * blocks ? begin - c * blocks : 0;
                 const int64_t last = end < (c + 1) * blocks ? end - c * blocks : blocks;
                 double *const dw = gradients.weight(c), *const db = gradients.bias(c);
                 for (int64_t n = gradients.begin(c); n < gradients.end(c); ++n) {
                   for (int64_t b = first; b < last; ++b) {
                     const GroupBlock<T> block = blocking.block(n, b);
                     const int64_t channel = block.first_channel();
                     channels_last_backward_block(args, blocking, block, parallel, space,
                                                  weight + channel,
                                                  dw == nullptr ? nullptr : dw + channel,
                                                  db == nullptr ? nullptr : db + channel);
                   }
                 }
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
