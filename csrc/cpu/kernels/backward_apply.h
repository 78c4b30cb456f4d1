#pragma once

// Backward, second sweep: grad_input, while grad_weight and grad_bias gather the block. Included by
// backward.cpp and add.cpp.

/// Some rows of a call: what the sweep over their columns needs.
template <int kRows, class In, class T, class Store>
struct RowBlock {
  const In* x[kRows];
  const T* grad_output[kRows];
  Store out[kRows];
  BackwardRow<acc_of<T>> rows[kRows];
};

/// The sums of grad_weight and grad_bias over rows, for columns from column 0 on; `first`: nothing
/// has been added yet, and what stands there is not read.
template <class T>
struct ParameterSums {
  parameter_of<T>*grad_weight, *grad_bias;
  bool first;
};

// What a sweep makes, as template parameters: kInput: grad_input; kSums: all sums that go with
// x_hat in registers, grad_weight and with LayerNorm grad_bias. Of LayerNorm's two sums one alone
// is not worth a loop: the other goes to memory that nobody reads (one addition and one store of a
// vector for 4 rows). A bias whose sum is wanted beside these has bias_sums.

/// grad_input of kRows rows for columns [begin, end), begin a multiple of kLanes; the sums take the
/// rows in order, one addition each. past_caches: rows of grad_input lie on whole vectors and are
/// streamed.
template <class Statistics, bool kInput, bool kSums, int kRows, class Rounding, class In, class T,
          class Store, class Next>
[[gnu::noinline]] void backward_apply(const RowBlock<kRows, In, T, Store>& block,
                                      const parameter_of<T>* weight, int64_t begin, int64_t end,
                                      const ParameterSums<T>& sums, Rounding rounding,
                                      bool past_caches, const Next& next) {
  using V = vector_of<T>;
  constexpr bool kWeight = kSums, kBias = kSums && Statistics::kCentered;
  // Scaled rows come alone; an ordinary one that comes alone is multiplied by 1, which is exact.
  constexpr bool kScaled = kRows == 1;
  // Taken out of the block first: a store to grad_input might change what is reached by a
  // reference.
  const In* x[kRows];
  const T* grad_output[kRows];
  Store out[kRows];
  V mean[kRows], rstd[kRows], minus_shift_rstd[kRows], mean_g[kRows], minus_projection[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    x[r] = block.x[r];
    grad_output[r] = block.grad_output[r];
    out[r] = block.out[r];
    mean[r] = Broadcast<V>::of(block.rows[r].mean);
    rstd[r] = Broadcast<V>::of(block.rows[r].rstd);
    minus_shift_rstd[r] = Broadcast<V>::of(block.rows[r].minus_shift_rstd);
    mean_g[r] = Broadcast<V>::of(block.rows[r].mean_g);
    minus_projection[r] = Broadcast<V>::of(block.rows[r].minus_projection);
  }
  const V scale0 = Broadcast<V>::of(block.rows[0].scale[0]);
  const V scale1 = Broadcast<V>::of(block.rows[0].scale[1]);
  parameter_of<T>* const grad_weight = sums.grad_weight;
  parameter_of<T>* const grad_bias = sums.grad_bias;
  const bool first = sums.first;
  const auto columns = [&](auto past) FN_LAMBDA_INLINE {
    for_columns_with_next<T>(begin, end, next, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
      V w{}, dw{}, db{};
      if constexpr (kInput) w = load(weight + i, part);
      if constexpr (kWeight) {
        if (!first) dw = load(grad_weight + i, part);
      }
      if constexpr (kBias) {
        if (!first) db = load(grad_bias + i, part);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V g = load(grad_output[r] + i, part);
        const V x_hat = normalize<Statistics, VectorMath>(load(x[r] + i, part), mean[r], rstd[r],
                                                          minus_shift_rstd[r]);
        if constexpr (kInput) {
          V d = grad_input<Statistics, VectorMath>(g * w, x_hat, mean_g[r], minus_projection[r],
                                                   rstd[r]);
          if constexpr (kScaled) d = d * scale0 * scale1;
          out[r].put(i, d, part, past.value);
        }
        if constexpr (kWeight) dw = mul_add(g, rounding.round(x_hat), dw);
        if constexpr (kBias) db = db + g;
      }
      if constexpr (kWeight) store(grad_weight + i, dw, part);
      if constexpr (kBias) store(grad_bias + i, db, part);
    });
  };
  if constexpr (kInput && kRows > 1) {
    with_flag(past_caches, columns);
  } else {
    columns(No{});
  }
}

/// The sum of grad_bias alone, with the same additions in the same order: of up to kBlockRows rows,
/// for columns [begin, end).
template <class T>
[[gnu::noinline]] void bias_sums(const T* const* grad_output, int rows, int64_t begin, int64_t end,
                                 const ParameterSums<T>& sums) {
  using V = vector_of<T>;
  parameter_of<T>* const grad_bias = sums.grad_bias;
  for_columns<T>(begin, end, [&](int64_t i, auto part) FN_LAMBDA_INLINE {
    V db{};
    if (!sums.first) db = load(grad_bias + i, part);
    for (int r = 0; r < rows; ++r) db = db + load(grad_output[r] + i, part);
    store(grad_bias + i, db, part);
  });
}
