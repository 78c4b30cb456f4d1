#pragma once

// GroupNorm, channels last: forward. Included by group.cpp.

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
