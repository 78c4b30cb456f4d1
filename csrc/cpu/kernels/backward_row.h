#pragma once

// Backward, first sweep: the sums of one row; and where a row's gradient goes. Included by
// backward.cpp and add.cpp.

/// What grad_input and grad_weight need to know of a row.
template <class acc_t>
struct BackwardRow {
  acc_t mean, rstd, minus_shift_rstd, mean_g, minus_projection;
  acc_t scale[2];  // of a scaled row: grad_input is multiplied by both
};

template <class Statistics, bool kInput, class In, class T>
[[gnu::noinline]] void backward_row(const In* x, const T* grad_output,
                                    const parameter_of<T>* weight, int64_t cols, acc_of<T> mean,
                                    acc_of<T> rstd, const NormParams& params, const Touch& touch,
                                    BackwardRow<acc_of<T>>* result) {
  using acc_t = acc_of<T>;
  using V = vector_of<T>;
  constexpr double kUnit = __is_same(acc_t, double) ? 0x1p-53 : 0x1p-24;
  acc_t minus_shift_rstd = 0, mean_g = 0, minus_projection = 0;
  const V mean_v = Broadcast<V>::of(mean), rstd_v = Broadcast<V>::of(rstd);
  const double count = static_cast<double>(cols);
  if constexpr (Statistics::kCentered && kInput) {
    double sums[3];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[3]) FN_LAMBDA_INLINE {
          const V t = keep((load(x + i, part) - mean_v) * rstd_v, part);
          const V g = load(grad_output + i, part) * load(weight + i, part);
          acc[0] = acc[0] + t;
          acc[1] = acc[1] + g;
          acc[2] = mul_add(g, t, acc[2]);
        },
        sums, touch);
    const double shift = sums[0] / count;
    minus_shift_rstd = static_cast<acc_t>(-shift);
    mean_g = static_cast<acc_t>(sums[1] / count);
    minus_projection = static_cast<acc_t>(
        -projection_of(sums[2] - shift * sums[1], double{rstd}, kUnit, count, params));
  } else if constexpr (Statistics::kCentered) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          acc[0] = acc[0] + keep((load(x + i, part) - mean_v) * rstd_v, part);
        },
        sums);
    minus_shift_rstd = static_cast<acc_t>(-sums[0] / count);
  } else if constexpr (kInput) {
    double sums[1];
    row_sums<T>(
        cols,
        [&](int64_t i, auto part, V(&acc)[1]) FN_LAMBDA_INLINE {
          const V g = load(grad_output + i, part) * load(weight + i, part);
          acc[0] = mul_add(g, load(x + i, part) * rstd_v, acc[0]);
        },
        sums, touch);
    minus_projection =
        static_cast<acc_t>(-projection_of(sums[0], double{rstd}, kUnit, count, params));
  }
  // Number by number: a copy of the whole, read again as a vector, would wait for its parts.
  result->mean = mean;
  result->rstd = rstd;
  result->minus_shift_rstd = minus_shift_rstd;
  result->mean_g = mean_g;
  result->minus_projection = minus_projection;
  result->scale[0] = result->scale[1] = 1;
}

/// Where the gradient of a row goes: to grad_input.
template <class T>
struct GradInputStore {
  T* grad_input;

  static FN_INLINE GradInputStore of(const BackwardArgs& args, int64_t r) {
    return {static_cast<T*>(args.grad_input) + r * args.cols};
  }
  static FN_INLINE bool may_stream(const BackwardArgs& args) {
    return rows_may_stream(static_cast<T*>(args.grad_input), args.cols);
  }
  FN_INLINE Touch touch() const { return {reinterpret_cast<char*>(grad_input), sizeof(T)}; }
  template <class Columns>
  FN_INLINE void put(int64_t i, vector_of<T> d, Columns part, bool past_caches) const {
    write(grad_input + i, d, part, past_caches);
  }
};

/// grad_residual_out is added to it first (null: 0); then it goes to grad_input, and times alpha to
/// grad_residual (null: not wanted).
template <class T, class R>
struct SplitStore {
  const R* grad_residual_out;
  T* grad_input;
  R* grad_residual;
  acc_of<R> alpha;

  static FN_INLINE SplitStore of(const BackwardArgs& args, int64_t r) {
    const SplitArgs& split = *args.split;
    const auto* other = static_cast<const R*>(split.grad_residual_out.data);
    auto* dx = static_cast<T*>(args.grad_input);
    auto* dr = static_cast<R*>(split.grad_residual);
    return {other != nullptr ? other + split.grad_residual_out.offset(r) : nullptr,
            dx != nullptr ? dx + r * args.cols : nullptr,
            dr != nullptr ? dr + r * args.cols : nullptr, static_cast<acc_of<R>>(split.alpha)};
  }
  static FN_INLINE bool may_stream(const BackwardArgs& args) {
    return rows_may_stream(static_cast<T*>(args.grad_input), args.cols) &&
           rows_may_stream(static_cast<R*>(args.split->grad_residual), args.cols);
  }
  FN_INLINE Touch touch() const {
    if (grad_input == nullptr) return {reinterpret_cast<char*>(grad_residual), sizeof(R)};
    return {reinterpret_cast<char*>(grad_input), sizeof(T)};
  }
  template <class Columns>
  FN_INLINE void put(int64_t i, vector_of<T> d, Columns part, bool past_caches) const {
    if (grad_residual_out != nullptr) d = d + load(grad_residual_out + i, part);
    if (grad_input != nullptr) write(grad_input + i, d, part, past_caches);
    if (grad_residual != nullptr) {
      write(grad_residual + i, Broadcast<vector_of<R>>::of(alpha) * d, part, past_caches);
    }
  }
};
