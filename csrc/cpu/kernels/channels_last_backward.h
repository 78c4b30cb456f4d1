#pragma once

// GroupNorm, channels last: backward. Included by group.cpp.

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
