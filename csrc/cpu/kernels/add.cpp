// The fused residual add: for each instruction set 12 forward kernels, 12 LayerNorm and 17 RMSNorm
// backward sweeps.
#include "kernels.h"

namespace fusednorm::cpu::FUSEDNORM_ISA {
namespace {

// clang-format off
#include "forward.h"
#include "backward_row.h"
#include "backward_apply.h"
#include "backward_rows.h"
// clang-format on

template <class Statistics, class T, class R>
void add_forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  forward_rows<Statistics, T>(args, SumRows<T, R>{args}, row_begin, row_end);
}

/// Of the sum of input and residual, which is always wanted.
template <class Statistics, class T, class R>
void add_backward(const BackwardArgs& args, int64_t row_begin, int64_t row_end, void* grad_weight,
                  void* grad_bias) {
  using Store = SplitStore<T, R>;
  const Sums<Statistics, T> sums(grad_weight, grad_bias, args.cols);
  if (grad_weight == nullptr) {
    BackwardRows<Statistics, true, false, RoundNone, R, T, Store>{args}.all_columns(
        row_begin, row_end, sums.sums);
  } else if (Statistics::kCentered || !rounds<R>(args.round_x_hat)) {
    BackwardRows<Statistics, true, true, RoundNone, R, T, Store>{args}.all_columns(
        row_begin, row_end, sums.sums);
  } else if constexpr (!Statistics::kCentered && !__is_same(R, double)) {
    BackwardRows<Statistics, true, true, RoundAny<R>, R, T, Store>{args, {args.round_x_hat}}
        .all_columns(row_begin, row_end, sums.sums);
  }
}

template <class T, class R>
void set_pair(KernelTable* table, DType input, DType residual) {
  const int pair = add_pair(input, residual);
  table->add_layer_norm_forward[pair] = add_forward<LayerNormStatistics, T, R>;
  table->add_rms_norm_forward[pair] = add_forward<RmsNormStatistics, T, R>;
  table->add_layer_norm_backward[pair] = add_backward<LayerNormStatistics, T, R>;
  table->add_rms_norm_backward[pair] = add_backward<RmsNormStatistics, T, R>;
}

}  // namespace

void set_add(KernelTable* table) {
#if !defined(FUSEDNORM_ONLY_BF16)
  set_pair<double, double>(table, DType::kFloat64, DType::kFloat64);
  set_pair<float, float>(table, DType::kFloat32, DType::kFloat32);
  set_pair<float16, float16>(table, DType::kFloat16, DType::kFloat16);
  set_pair<float16, float>(table, DType::kFloat16, DType::kFloat32);
#endif
  set_pair<paired_bfloat16, paired_bfloat16>(table, DType::kBFloat16, DType::kBFloat16);
  set_pair<bfloat16, float>(table, DType::kBFloat16, DType::kFloat32);
}

}  // namespace fusednorm::cpu::FUSEDNORM_ISA
