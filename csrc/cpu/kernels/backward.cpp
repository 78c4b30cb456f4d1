// Backward kernels of the row norms: for each instruction set 12 LayerNorm and 15 RMSNorm sweeps.
#include "kernels.h"

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// clang-format off
#include "backward_row.h"
#include "backward_apply.h"
#include "backward_rows.h"
// clang-format on

/// grad_bias alone.
template <class T>
void bias_rows(const BackwardArgs& args, int64_t row_begin, int64_t row_end, int64_t col_begin,
               int64_t col_end, ParameterSums<T> sums) {
  for (int64_t r = row_begin; r < row_end; r += kBlockRows) {
    const T* rows[kBlockRows];
    const int count = static_cast<int>(row_end - r < kBlockRows ? row_end - r : kBlockRows);
    for (int k = 0; k < count; ++k) {
      rows[k] = static_cast<const T*>(args.grad_output.data) + args.grad_output.offset(r + k);
    }
    bias_sums(rows, count, col_begin, col_end, sums);
    sums.first = false;
  }
}

/// Calls f with the BackwardRows of what is wanted; grad_input or grad_weight is.
template <class Statistics, class T, class F>
FN_INLINE void with_rows(const BackwardArgs& args, bool grad_weight, F f) {
  using Store = GradInputStore<T>;
  if (args.grad_input == nullptr) {
    // Of a first layer's norm; no sweep for x_hat unrounded.
    if constexpr (Statistics::kCentered) {
      f(BackwardRows<Statistics, false, true, RoundNone, T, T, Store>{args});
    } else {
      f(BackwardRows<Statistics, false, true, RoundAny<T>, T, T, Store>{args, {args.round_x_hat}});
    }
  } else if (!grad_weight) {
    f(BackwardRows<Statistics, true, false, RoundNone, T, T, Store>{args});
  } else if (Statistics::kCentered || !rounds<T>(args.round_x_hat)) {
    f(BackwardRows<Statistics, true, true, RoundNone, T, T, Store>{args});
  } else if constexpr (!Statistics::kCentered && !__is_same(T, double)) {
    f(BackwardRows<Statistics, true, true, RoundAny<T>, T, T, Store>{args, {args.round_x_hat}});
  }
}

template <class Statistics, class T>
void backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
              void* grad_bias) {
  const Sums<Statistics, T> sums(grad_weight, grad_bias, args.cols);
  if (args.grad_input == nullptr && grad_weight == nullptr) {
    if (grad_bias != nullptr) bias_rows<T>(args, row_begin, row_end, 0, args.cols, sums.sums);
    return;
  }
  with_rows<Statistics, T>(args, grad_weight != nullptr, [&](const auto& rows) FN_LAMBDA_INLINE {
    rows.all_columns(row_begin, row_end, sums.sums);
  });
}

template <class Statistics, class T>
bool backward_terms(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* terms) {
  bool ordinary = true;
  // What a row's terms are does not depend on which parameters' gradients are wanted.
  with_flag(args.grad_input != nullptr, [&](auto input) {
    const BackwardRows<Statistics, input.value, true, RoundNone, T, T, GradInputStore<T>> rows{
        args};
    ordinary = rows.all_terms(row_begin, row_end, static_cast<BackwardRow<acc_of<T>>*>(terms));
  });
  return ordinary;
}

template <class Statistics, class T>
void backward_columns(const BackwardArgs& args, const void* terms, int64_t row_count,
                      int64_t col_begin, int64_t col_end, void* grad_weight, void* grad_bias) {
  const Sums<Statistics, T> sums(grad_weight, grad_bias, args.cols);
  if (args.grad_input == nullptr && grad_weight == nullptr) {
    if (grad_bias != nullptr) bias_rows<T>(args, 0, row_count, col_begin, col_end, sums.sums);
    return;
  }
  with_rows<Statistics, T>(args, grad_weight != nullptr, [&](const auto& rows) FN_LAMBDA_INLINE {
    rows.columns(static_cast<const BackwardRow<acc_of<T>>*>(terms), row_count, col_begin, col_end,
                 sums.sums);
  });
}

}  // namespace

void set_backward(KernelTable* table) {
  for_dtypes<paired_bfloat16>([&](int i, auto element) {
    using T = decltype(element);
    table->layer_norm_backward[i] = backward<LayerNormStatistics, T>;
    table->rms_norm_backward[i] = backward<RmsNormStatistics, T>;
    table->layer_norm_backward_terms[i] = backward_terms<LayerNormStatistics, T>;
    table->rms_norm_backward_terms[i] = backward_terms<RmsNormStatistics, T>;
    table->layer_norm_backward_columns[i] = backward_columns<LayerNormStatistics, T>;
    table->rms_norm_backward_columns[i] = backward_columns<RmsNormStatistics, T>;
  });
}

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
