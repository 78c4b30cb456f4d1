#include "operators/checks.h"

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace fusednorm::checks {
namespace {

bool same_shape(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sym_eq(b[i]).expect_true(__FILE__, __LINE__)) return false;
  }
  return true;
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

/// Of the input's dtype, or fp32 beside a 16-bit input.
void check_wider(const Norm& norm, std::string_view argument, at::ScalarType dtype,
                 at::ScalarType input_dtype) {
  TORCH_CHECK(dtype == input_dtype || (dtype == at::kFloat && input_dtype != at::kDouble),
              "fusednorm::", norm.op, ": ", argument, ": expected the input's dtype ", input_dtype,
              input_dtype == at::kDouble ? "" : " or Float", ", got ", dtype);
}

// ---- Tensors, as FN_TENSORS declares them ----

/// What the tensors of a call are checked against.
struct Beside {
  const Call& call;
  const Tensor& rows;
  c10::SymInt channels;       // GroupNorm's parameters are of this shape,
  c10::SymInt statistics[2];  // its statistics of this

  explicit Beside(const Call& c) : call(c), rows(c.rows()) {}
  bool grouped() const { return call.norm.kind == NormKind::kGroupNorm; }
  bool of_sum() const { return call.form == Form::kAddBackward; }

  c10::SymIntArrayRef shape(Shape shape) const {
    if (shape == Shape::kParameter) return grouped() ? channels : call.normalized_shape;
    if (shape != Shape::kLeading) return rows.sym_sizes();
    return grouped() ? c10::SymIntArrayRef(statistics) : leading_shape(call);
  }
  const char* shape_name(Shape shape) const {
    if (shape == Shape::kParameter) return grouped() ? "the input's channels" : "normalized_shape";
    if (shape == Shape::kLeading) return grouped() ? "[N, num_groups]" : "the leading dimensions";
    return of_sum() ? "the shape of residual_out" : "the input's shape";
  }
};

void check_dtype(const Beside& beside, std::string_view argument, Dtype dtype,
                 at::ScalarType given) {
  const Norm& norm = beside.call.norm;
  const auto of_rows = beside.rows.scalar_type();
  switch (dtype) {
    case Dtype::kAny:
      return;
    case Dtype::kGradient: {
      const auto of_input = beside.of_sum() ? beside.call.input_dtype : of_rows;
      const bool widens = !beside.grouped() && given == at::kFloat && is_half(of_input);
      TORCH_CHECK(given == of_input || widens || is_narrower(given, of_input),
                  "fusednorm::", norm.op, ": ", argument, ": expected the input's dtype ", of_input,
                  !is_half(of_input) ? " or a narrower one"
                  : beside.grouped() ? ""
                                     : " or Float",
                  ", got ", given);
      return;
    }
    case Dtype::kRows:
      TORCH_CHECK(given == of_rows, "fusednorm::", norm.op, ": ", argument,
                  ": expected the dtype of residual_out ", of_rows, ", got ", given);
      return;
    case Dtype::kAccumulation:
      TORCH_CHECK(given == accumulation_dtype(of_rows), "fusednorm::", norm.op, ": ", argument,
                  ": expected dtype ", accumulation_dtype(of_rows), ", got ", given);
  }
}

template <class Argument>
void check_beside(const Beside& beside, const Tensor& tensor) {
  const Norm& norm = beside.call.norm;
  check_tensor(norm, Argument::name, tensor);
  TORCH_CHECK(tensor.device() == beside.rows.device(), "fusednorm::", norm.op, ": ", Argument::name,
              ": expected on the input's device ", beside.rows.device(), ", got ", tensor.device());
  const auto shape = beside.shape(Argument::shape);
  TORCH_CHECK(same_shape(tensor.sym_sizes(), shape), "fusednorm::", norm.op, ": ", Argument::name,
              ": expected shape ", shape, " (", beside.shape_name(Argument::shape), "), got ",
              tensor.sym_sizes());
  check_dtype(beside, Argument::name, Argument::dtype, tensor.scalar_type());
}

/// Where the operator has it, and for an optional one where it is there.
template <class Argument>
void check_argument(const Beside& beside) {
  const auto& given = Argument::get(beside.call);
  if (!Call::has(&given)) return;
  if constexpr (Argument::is_required) {
    check_beside<Argument>(beside, given);
  } else {
    if (present(given)) check_beside<Argument>(beside, *given);
  }
}

// ---- Rows ----

void check_rows(const Call& call) {
  const Norm& norm = call.norm;
  const char* const argument = call.form == Form::kAddBackward ? "residual_out" : "input";
  check_tensor(norm, argument, call.rows());
  const auto sizes = call.rows().sym_sizes(), normalized = call.normalized_shape;
  TORCH_CHECK(!normalized.empty(), "fusednorm::", norm.op,
              ": normalized_shape: expected at least one dimension, got ", normalized);
  const bool fits = sizes.size() >= normalized.size() &&
                    same_shape(sizes.slice(sizes.size() - normalized.size()), normalized);
  TORCH_CHECK(fits, "fusednorm::", norm.op, ": ", argument, ": expected shape [*, ",
              c10::Join(", ", normalized), "] (normalized_shape = ", normalized, "), got ", sizes);
}

void check_groups(const Norm& norm, const Tensor& input) {
  check_tensor(norm, "input", input);
  TORCH_CHECK(input.dim() >= 2, "fusednorm::", norm.op,
              ": input: expected shape [N, C, *] (2 dimensions at least), got ", input.sym_sizes());
  const auto channels = input.sym_size(1);
  TORCH_CHECK(norm.num_groups > 0, "fusednorm::", norm.op,
              ": num_groups: expected a positive number, got ", norm.num_groups);
  TORCH_CHECK((channels % norm.num_groups).sym_eq(0).expect_true(__FILE__, __LINE__),
              "fusednorm::", norm.op, ": num_groups: expected a divisor of the ", channels,
              " channels of an input of shape ", input.sym_sizes(), ", got ", norm.num_groups);
}

// ---- Numbers ----

void check_finite(const Norm& norm, std::string_view argument, double value) {
  TORCH_CHECK(std::isfinite(value), "fusednorm::", norm.op, ": ", argument,
              ": expected a finite number, got ", value);
}

[[noreturn]] void refuse_choice(const Norm& norm, std::string_view argument, const Allowed& allowed,
                                std::string_view given) {
  std::string expected;
  for (const std::string_view choice : allowed.choices) {
    if (!choice.empty()) {
      expected += (expected.empty() ? "\"" : " or \"") + std::string(choice) + '"';
    }
  }
  TORCH_CHECK(false, "fusednorm::", norm.op, ": ", argument, ": expected ", expected, ", got \"",
              given, "\"");
}

/// An option's value against the range that options.h gives it.
template <class Option>
void check_option(const Call& call) {
  const Norm& norm = call.norm;
  const auto value = norm.*Option::kept;
  if constexpr (Option::allowed.rule == Allowed::kFinite) {
    check_finite(norm, Option::name, value);
  } else if constexpr (Option::allowed.rule == Allowed::kOneOf) {
    for (const std::string_view choice : Option::allowed.choices) {
      if (value == choice && !value.empty()) return;
    }
    refuse_choice(norm, Option::name, Option::allowed, value);
  } else if constexpr (Option::allowed.rule == Allowed::kTwoColumns) {
    if (value == Option::fallback) return;
    c10::SymInt cols = 1;
    for (const auto& size : call.normalized_shape) cols *= size;
    TORCH_CHECK(cols != 1, "fusednorm::", norm.op, ": ", Option::name,
                ": expected rows of at least 2 elements, got normalized_shape ",
                call.normalized_shape, ": N - 1 is 0");
  }
}

void check_numbers(const Call& call) {
  const Norm& norm = call.norm;
  check_eps(norm);
  for_each(EveryOption{}, [&](auto option) { check_option<decltype(option)>(call); });
  check_finite(norm, "alpha", call.alpha);
  if (call.out_dtype) check_wider(norm, "out_dtype", *call.out_dtype, call.input->scalar_type());
  TORCH_CHECK(
      call.form != Form::kAddBackward || is_supported(call.input_dtype), "fusednorm::", norm.op,
      ": input_dtype: expected float64, float32, bfloat16 or float16, got ", call.input_dtype);
}

}  // namespace

void check_tensor(const Norm& norm, std::string_view argument, const Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "fusednorm::", norm.op, ": ", argument,
              ": expected a tensor, got none");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), "fusednorm::", norm.op, ": ",
              argument, ": expected a dense (strided) tensor, got ",
              tensor.is_nested() ? c10::str("a nested tensor") : c10::str(tensor.layout()));
  TORCH_CHECK(is_supported(tensor.scalar_type()), "fusednorm::", norm.op, ": ", argument,
              ": expected dtype float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

void check_eps(const Norm& norm) {
  if (!norm.eps.has_value()) return;
  TORCH_CHECK(std::isfinite(*norm.eps) && (!norm.clamp() || *norm.eps > 0), "fusednorm::", norm.op,
              ": eps: expected a finite number", norm.clamp() ? " above 0" : "", ", got ",
              *norm.eps);
}

void check(const Call& call) {
  Beside beside(call);
  if (beside.grouped()) {
    check_groups(call.norm, *call.input);
    beside.channels = call.input->sym_size(1);
    beside.statistics[0] = call.input->sym_size(0);
    beside.statistics[1] = call.norm.num_groups;
  } else {
    check_rows(call);
  }
  check_numbers(call);
#define FN_CHECK(name_, presence, shape_, dtype_, gradient) \
  if constexpr (arg::name_::shape != Shape::kRows) check_argument<arg::name_>(beside);
  FN_TENSORS(FN_CHECK)
#undef FN_CHECK
}

}  // namespace fusednorm::checks
