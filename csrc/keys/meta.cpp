// The Meta key: shapes, dtypes and memory formats of what the operators return, by the same checks.
#include <ATen/ops/empty.h>

#include "operators/checks.h"
#include "operators/operators.h"

namespace fusednorm {
namespace {

/// Row norms return contiguous tensors, GroupNorm keeps the input's memory format.
struct Meta {
  static Outputs outputs(Keys, const Call& call) {
    checks::check(call);
    if (call.form == Form::kAddInPlace) checks::check_writable(call);
    Outputs made;
    made.output = like_rows(call, call.out_dtype.value_or(call.input->scalar_type()));
    if (call.form == Form::kAdd || call.form == Form::kAddForward) {
      made.residual_out = like_rows(call, call.residual->scalar_type());
    }
    if (keeps_statistics(call.form)) {
      if (call.norm.centered()) made.mean = statistic(call);
      made.rstd = statistic(call);
    }
    return made;
  }

  static Gradients gradients(Keys, const Call& call) {
    checks::check(call);
    Gradients made;
    const auto rows_dtype = call.rows().scalar_type();
    if (call.wanted.input) {
      const bool of_sum = call.form == Form::kAddBackward;
      made.input = like_rows(call, of_sum ? call.input_dtype : rows_dtype);
    }
    if (call.wanted.residual) made.residual = like_rows(call, rows_dtype);
    if (call.wanted.weight) made.weight = parameter(call, checks::grad_weight_dtype(call));
    if (call.wanted.bias) made.bias = parameter(call, checks::grad_bias_dtype(call));
    return made;
  }

 private:
  static bool grouped(const Call& call) { return call.norm.kind == NormKind::kGroupNorm; }

  static Tensor empty(const Call& call, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    return at::empty_symint(shape, call.rows().options().dtype(dtype));
  }
  static Tensor like_rows(const Call& call, at::ScalarType dtype) {
    const Tensor& rows = call.rows();
    if (!grouped(call)) return empty(call, rows.sym_sizes(), dtype);
    return at::empty_symint(rows.sym_sizes(), rows.options(), rows.suggest_memory_format());
  }
  static Tensor statistic(const Call& call) {
    // Those of a sum are kept in what its addends' norm accumulates in: the residual's dtype.
    const auto of = call.form == Form::kAddForward ? call.residual : call.input;
    const auto dtype = accumulation_dtype(of->scalar_type());
    if (!grouped(call)) return empty(call, checks::leading_shape(call), dtype);
    return at::empty_symint({call.input->sym_size(0), call.norm.num_groups},
                            call.input->options().dtype(dtype));
  }
  static Tensor parameter(const Call& call, at::ScalarType dtype) {
    if (!grouped(call)) return empty(call, call.normalized_shape, dtype);
    return at::empty_symint({call.input->sym_size(1)}, call.input->options().dtype(dtype));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, Meta, m) {
  register_norms<Meta, LayerNorm, RmsNorm, ScaleRows, GroupNorm>(m);
}

}  // namespace fusednorm
