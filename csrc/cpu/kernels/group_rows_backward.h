#pragma once

// GroupNorm, channels first: backward. Included by group.cpp.

/// One group of one sample as backward sees it.
template <class In, class T>
struct GroupRow {
  const In* x;
  const T* grad_output;
  T* grad_input;            // null: not wanted
  const acc_of<T>* weight;  // of the group's channels; null: 1
  double* grad_weight;      // of the group's channels, added to; null: not wanted
  double* grad_bias;
  acc_of<T> mean, rstd;
  acc_of<T> scale[2];  // of a scaled row: grad_input is multiplied by both
  bool past_caches;
};

template <class acc_t>
struct GroupCoefficients {
  acc_t minus_shift, mean_g, minus_projection;
};

/// From the sums over a group of t = (x - mean) * rstd, of g and of g * t.
template <class acc_t>
FN_INLINE GroupCoefficients<acc_t> group_coefficients(double sum_t, double sum_g, double sum_gt,
                                                      double count, acc_t rstd,
                                                      const NormParams& params) {
  constexpr double kUnit = __is_same(acc_t, double) ? 0x1p-53 : 0x1p-24;
  const double shift = sum_t / count;
  return {static_cast<acc_t>(-shift), static_cast<acc_t>(sum_g / count),
          static_cast<acc_t>(
              -projection_of(sum_gt - shift * sum_g, double{rstd}, kUnit, count, params))};
}

/// The sums of the lanes of two vectors.
FN_INLINE void sum_lanes_of_two(f64v a, f64v b, double* sums) {
  sums[0] = sum_lanes(a);
  sums[1] = sum_lanes(b);
}
FN_INLINE void sum_lanes_of_two(f32v a, f32v b, double* sums) {
#if defined(FUSEDNORM_AVX512)
  // The first step takes both: 9 instructions in place of 18.
  const __m512 both = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b),
                                    _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1));
  const __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  _mm_storeu_pd(sums, _mm_cvtps_pd(_mm_add_ps(t, _mm_movehl_ps(t, t))));
#else
  sums[0] = static_cast<double>(sum_lanes(a));
  sums[1] = static_cast<double>(sum_lanes(b));
#endif
}

/// Sums of the runs of a group, each of grad_output and of grad_output * t with
/// t = (x - mean) * rstd, to sums[2 * channel]; returns the sum of t over the group.
template <class In, class T>
FN_INLINE double run_sums(const GroupRow<In, T>& row, int64_t channels, int64_t spatial,
                          double* sums) {
  using V = vector_of<T>;
  const V mean = Broadcast<V>::of(row.mean), rstd = Broadcast<V>::of(row.rstd);
  const In* x = row.x;
  const T* grad_output = row.grad_output;
  const auto add = [&](int64_t i, auto part, V(&acc)[3]) FN_LAMBDA_INLINE {
    const V t = keep((load(x + i, part) - mean) * rstd, part);
    const V g = load(grad_output + i, part);
    acc[0] = acc[0] + t;
    acc[1] = acc[1] + g;
    acc[2] = mul_add(g, t, acc[2]);
  };
  double sum_t = 0;
  if (spatial > 16 * kLanes<T>) {
    for (int64_t c = 0; c < channels; ++c, x += spatial, grad_output += spatial) {
      double run[3];
      row_sums<T>(spatial, add, run);
      sum_t += run[0];
      sums[2 * c] = run[1];
      sums[2 * c + 1] = run[2];
    }
    return sum_t;
  }
  // Short runs: a single chain of additions each; t's goes on for some runs.
  V acc[3] = {};
  int64_t additions = 0;
  for (int64_t c = 0; c < channels; ++c, x += spatial, grad_output += spatial) {
    acc[1] = acc[2] = V{};
    for_columns<T>(spatial, [&](int64_t i, auto part) FN_LAMBDA_INLINE { add(i, part, acc); });
    sum_lanes_of_two(acc[1], acc[2], sums + 2 * c);
    additions += spatial;
    if (additions > 16 * kLanes<T>) {
      sum_t += static_cast<double>(sum_lanes(acc[0]));
      acc[0] = V{};
      additions = 0;
    }
  }
  return sum_t + static_cast<double>(sum_lanes(acc[0]));
}

/// `sums` has room for 2 * group_channels.
template <bool kScaled, class In, class T>
FN_INLINE void group_backward_runs(const GroupShape& shape, const NormParams& params,
                                   const GroupRow<In, T>& row, double* sums) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  // Without weight and parameter gradients the whole group is one run.
  const bool one_run = row.weight == nullptr && row.grad_weight == nullptr;
  const int64_t channels = one_run ? 1 : shape.group_channels;
  const int64_t spatial = one_run ? shape.cols() : shape.spatial;
  const double sum_t = run_sums(row, channels, spatial, sums);
  double sum_g = 0, sum_gt = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const double w = row.weight == nullptr ? 1.0 : static_cast<double>(row.weight[c]);
    sum_g += w * sums[2 * c];
    sum_gt += w * sums[2 * c + 1];
  }
  const auto k =
      group_coefficients(sum_t, sum_g, sum_gt, static_cast<double>(shape.cols()), row.rstd, params);
  if (row.grad_weight != nullptr) {
    for (int64_t c = 0; c < channels; ++c) {
      row.grad_weight[c] += sums[2 * c + 1] + static_cast<double>(k.minus_shift) * sums[2 * c];
      row.grad_bias[c] += sums[2 * c];
    }
  }
  if (row.grad_input == nullptr) return;
  const V mean = Broadcast<V>::of(row.mean), rstd = Broadcast<V>::of(row.rstd);
  const V minus_shift = Broadcast<V>::of(k.minus_shift), mean_g = Broadcast<V>::of(k.mean_g);
  const V minus_projection = Broadcast<V>::of(k.minus_projection);
  for (int64_t c = 0; c < channels; ++c) {
    const In* const x = row.x + c * spatial;
    const T* const grad_output = row.grad_output + c * spatial;
    T* const dx = row.grad_input + c * spatial;
    const V w = Broadcast<V>::of(row.weight == nullptr ? acc_t(1) : row.weight[c]);
    write_columns(dx, spatial, row.past_caches, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      const V x_hat =
          normalize<LayerNormStatistics, VectorMath>(load(x + i, part), mean, rstd, minus_shift);
      V d = grad_input<LayerNormStatistics, VectorMath>(load(grad_output + i, part) * w, x_hat,
                                                        mean_g, minus_projection, rstd);
      if constexpr (kScaled) {
        d = d * Broadcast<V>::of(row.scale[0]) * Broadcast<V>::of(row.scale[1]);
      }
      return d;
    });
  }
}

/// The same for spatial = 1: channels lie side by side.
template <bool kScaled, class In, class T>
FN_INLINE void group_backward_vectors(const GroupShape& shape, const NormParams& params,
                                      const GroupRow<In, T>& row) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  const int64_t cols = shape.group_channels;
  const V mean = Broadcast<V>::of(row.mean), rstd = Broadcast<V>::of(row.rstd);
  const auto gain = [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    return row.weight == nullptr ? Broadcast<V>::of(acc_t(1)) : load(row.weight + i, part);
  };
  double sums[3];
  row_sums<T>(
      cols,
      [&](int64_t i, auto part, V(&acc)[3]) FN_LAMBDA_INLINE {
        const V t = keep((load(row.x + i, part) - mean) * rstd, part);
        const V g = load(row.grad_output + i, part) * gain(i, part);
        acc[0] = acc[0] + t;
        acc[1] = acc[1] + g;
        acc[2] = mul_add(g, t, acc[2]);
      },
      sums);
  const auto k =
      group_coefficients(sums[0], sums[1], sums[2], static_cast<double>(cols), row.rstd, params);
  const V minus_shift = Broadcast<V>::of(k.minus_shift), mean_g = Broadcast<V>::of(k.mean_g);
  const V minus_projection = Broadcast<V>::of(k.minus_projection);
  for_columns<T>(cols, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    const V g = load(row.grad_output + i, part);
    const V x_hat =
        normalize<LayerNormStatistics, VectorMath>(load(row.x + i, part), mean, rstd, minus_shift);
    if (row.grad_weight != nullptr) {
      add_to(row.grad_weight + i, g * x_hat, part);
      add_to(row.grad_bias + i, g, part);
    }
    if (row.grad_input != nullptr) {
      V d = grad_input<LayerNormStatistics, VectorMath>(g * gain(i, part), x_hat, mean_g,
                                                        minus_projection, rstd);
      if constexpr (kScaled) {
        d = d * Broadcast<V>::of(row.scale[0]) * Broadcast<V>::of(row.scale[1]);
      }
      store(row.grad_input + i, d, part);
    }
  });
}

template <bool kScaled, class In, class T>
FN_INLINE void group_backward_row_of(const GroupShape& shape, const NormParams& params,
                                     const GroupRow<In, T>& row, double* sums) {
  if (shape.spatial == 1) {
    group_backward_vectors<kScaled>(shape, params, row);
  } else {
    group_backward_runs<kScaled>(shape, params, row, sums);
  }
}

/// Outside this range rstd may be subnormal or infinite, and x - mean may overflow.
template <class acc_t>
FN_INLINE bool is_ordinary(acc_t rstd) {
  return rstd >= Range<acc_t>::kTiny && rstd <= 1 / Range<acc_t>::kTiny;
}

template <class T>
void group_backward_row(const GroupShape& shape, const NormParams& params,
                        const GroupRow<T, T>& row, double* sums) {
  using acc_t = acc_of<T>;
  ScaledRow<T> scaled;
  if (__builtin_expect(is_ordinary(row.rstd), 1) ||
      !scaled_row<LayerNormStatistics>(row.x, shape.cols(), params, &scaled)) {
    group_backward_row_of<false>(shape, params, row, sums);
    return;
  }
  const int half = scaled.exponent / 2;
  const GroupRow<acc_t, T> other{scaled.x,
                                 row.grad_output,
                                 row.grad_input,
                                 row.weight,
                                 row.grad_weight,
                                 row.grad_bias,
                                 scaled.statistics.mean,
                                 scaled.statistics.rstd,
                                 {static_cast<acc_t>(__builtin_ldexp(1.0, -half)),
                                  static_cast<acc_t>(__builtin_ldexp(1.0, half - scaled.exponent))},
                                 row.past_caches};
  group_backward_row_of<true>(shape, scaled.params, other, sums);
}

template <class T>
void group_rows_backward(const GroupBackwardArgs& args, const Parallel& parallel) {
  using acc_t = acc_of<T>;
  const GroupShape& shape = args.shape;
  const int64_t cols = shape.cols(), groups = shape.groups, channels = shape.group_channels;
  const acc_t* const weight = static_cast<const acc_t*>(args.weight);
  T* const grad_input = static_cast<T*>(args.grad_input);
  ChannelGradients gradients(args);
  // A range of (chunk, group): the samples of a chunk in order, the range's groups of each.
  parallel_for(
      parallel, gradients.chunks * groups, gradients.chunk * cols * static_cast<int64_t>(sizeof(T)),
      [&](int64_t begin, int64_t end) {
        const Scratch<double> sums(2 * channels);
        for (int64_t c = begin / groups; c * groups < end; ++c) {
          const int64_t first = begin > c * groups ? begin - c * groups : 0;
          const int64_t last = end < (c + 1) * groups ? end - c * groups : groups;
          double *dw = gradients.weight(c), *db = gradients.bias(c);
          for (int64_t n = gradients.begin(c); n < gradients.end(c); ++n) {
            for (int64_t g = first; g < last; ++g) {
              const int64_t r = n * groups + g, channel = g * channels;
              group_backward_row<T>(shape, args.params,
                                    {static_cast<const T*>(args.input) + r * cols,
                                     static_cast<const T*>(args.grad_output) + r * cols,
                                     grad_input == nullptr ? nullptr : grad_input + r * cols,
                                     weight == nullptr ? nullptr : weight + channel,
                                     dw == nullptr ? nullptr : dw + channel,
                                     db == nullptr ? nullptr : db + channel,
                                     static_cast<const acc_t*>(args.mean)[r],
                                     static_cast<const acc_t*>(args.rstd)[r],
                                     {1, 1},
                                     args.past_caches},
                                    sums.data);
            }
          }
        }
        if (args.past_caches) end_streaming();
      });
  gradients.finish();
}
