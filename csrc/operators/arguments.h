// Every argument that an operator may have, and the call that holds them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "operators/norm.h"

namespace fusednorm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline bool present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// ---- Tensors: each declared once ----

/// What a tensor's shape is, beside that of the rows: what is normalized, the input or the sum.
enum class Shape : uint8_t { kRows, kLikeRows, kLeading, kParameter };
/// Its dtype: any of the four; that of the rows; that of a gradient, the input's, fp32 beside 16
/// bits, or a narrower one (which is widened first); what the rows accumulate in.
enum class Dtype : uint8_t { kAny, kRows, kGradient, kAccumulation };
/// Whether it has a gradient, and gradients depend on it (kLinear: they do not, but for their
/// dtype).
enum class Gradient : uint8_t { kNone, kLinear, kFull };

// TENSOR(name, Required or Optional, shape, dtype, gradient)
// In the order in which they are checked.
#define FN_TENSORS(TENSOR)                                     \
  TENSOR(input, Required, kRows, kAny, kFull)                  \
  TENSOR(residual_out, Required, kRows, kAny, kFull)           \
  TENSOR(weight, Optional, kParameter, kAny, kFull)            \
  TENSOR(bias, Optional, kParameter, kAny, kLinear)            \
  TENSOR(residual, Required, kLikeRows, kAny, kFull)           \
  TENSOR(grad_output, Required, kLikeRows, kGradient, kFull)   \
  TENSOR(grad_residual_out, Optional, kLikeRows, kRows, kFull) \
  TENSOR(mean, Required, kLeading, kAccumulation, kNone)       \
  TENSOR(rstd, Required, kLeading, kAccumulation, kNone)

/// An operator's form; the first three are a norm's own, the others those of the residual add.
enum class Form : uint8_t {
  kOutput,
  kForward,  // with what backward needs
  kBackward,
  kAdd,
  kAddInPlace,
  kAddForward,
  kAddBackward
};
constexpr bool adds_residual(Form form) { return form >= Form::kAdd; }
constexpr bool is_backward(Form form) {
  return form == Form::kBackward || form == Form::kAddBackward;
}
constexpr bool keeps_statistics(Form form) {
  return form == Form::kForward || form == Form::kAddForward;
}

/// Which gradients are wanted.
struct Wanted {
  bool input = false, residual = false, weight = false, bias = false;
};

struct Required {
  using Kept = const Tensor*;
  static inline const Tensor none;
};
struct Optional {
  using Kept = const OptionalTensor*;
  static inline const OptionalTensor none;
};

/// An operator's arguments, borrowed from the caller. What the operator has not got is undefined.
struct Call {
  Norm norm;
  Form form;

#define FN_FIELD(name, presence, shape, dtype, gradient) presence::Kept name = &presence::none;
  FN_TENSORS(FN_FIELD)
#undef FN_FIELD
  c10::SymIntArrayRef normalized_shape = {};  // GroupNorm: empty
  double alpha = 1;                           // residual_out = alpha * residual + input
  std::optional<at::ScalarType> out_dtype = {};
  at::ScalarType input_dtype = at::ScalarType::Undefined;  // of a residual add, in its backward
  Wanted wanted = {};

  /// Whether the operator has this argument (which may be undefined all the same).
  static bool has(const Tensor* tensor) { return tensor != &Required::none; }
  static bool has(const OptionalTensor* tensor) { return tensor != &Optional::none; }

  /// What is normalized.
  const Tensor& rows() const { return form == Form::kAddBackward ? *residual_out : *input; }
  bool wants_rows() const { return wanted.input || wanted.residual; }

  /// The norm alone, of a sum that is there.
  Call of_sum(const Tensor& sum) const {
    Call call = *this;
    call.form = form == Form::kAdd          ? Form::kOutput
                : form == Form::kAddInPlace ? Form::kOutput
                : form == Form::kAddForward ? Form::kForward
                                            : Form::kBackward;
    call.input = &sum;
    call.wanted.input = wants_rows();
    call.wanted.residual = false;
    return call;
  }
};

/// What the forward forms return.
struct Outputs {
  Tensor output, residual_out, mean, rstd;
};
/// What the backward forms return.
struct Gradients {
  Tensor input, residual, weight, bias;
};

// ---- Arguments as types: their name, how a schema writes them, their place in a call ----

namespace arg {

#define FN_TYPE(name_, presence, shape_, dtype_, gradient_)                      \
  struct name_ {                                                                 \
    static constexpr std::string_view name = #name_;                             \
    static constexpr bool is_required = std::is_same_v<presence, Required>;      \
    static constexpr Shape shape = Shape::shape_;                                \
    static constexpr Dtype dtype = Dtype::dtype_;                                \
    static constexpr Gradient gradient = Gradient::gradient_;                    \
    static constexpr std::string_view type = is_required ? "Tensor" : "Tensor?"; \
    static constexpr std::string_view fallback = is_required ? "" : "None";      \
    using Passed = const std::remove_pointer_t<presence::Kept>&;                 \
    static Passed get(const Call& call) { return *call.name_; }                  \
    static void put(Call* call, Passed tensor) { call->name_ = &tensor; }        \
  };
FN_TENSORS(FN_TYPE)
#undef FN_TYPE

/// The residual of the operators that write to it.
struct written_residual : residual {
  static constexpr std::string_view type = "Tensor(a!)";
};

#define FN_TYPE(tag, name_, type_, fallback_, passed, place)           \
  struct tag {                                                         \
    static constexpr std::string_view name = name_, type = type_;      \
    static constexpr std::string_view fallback = fallback_;            \
    using Passed = passed;                                             \
    static Passed get(const Call& call) { return call.place; }         \
    static void put(Call* call, Passed value) { call->place = value; } \
  };
FN_TYPE(normalized_shape, "normalized_shape", "SymInt[]", "", c10::SymIntArrayRef, normalized_shape)
FN_TYPE(num_groups, "num_groups", "int", "", int64_t, norm.num_groups)
FN_TYPE(alpha, "alpha", "float", "1.0", double, alpha)
FN_TYPE(out_dtype, "out_dtype", "ScalarType?", "None", std::optional<at::ScalarType>, out_dtype)
FN_TYPE(input_dtype, "input_dtype", "ScalarType", "", at::ScalarType, input_dtype)
FN_TYPE(eps_or_none, "eps", "float?", "None", std::optional<double>, norm.eps)
#undef FN_TYPE
struct eps {
  static constexpr std::string_view name = "eps", type = "float", fallback = "1e-5";
  using Passed = double;
  static Passed get(const Call& call) { return *call.norm.eps; }
  static void put(Call* call, double value) { call->norm.eps = value; }
};

template <class Type>
constexpr std::string_view kTypeText = "str";
template <>
inline constexpr std::string_view kTypeText<double> = "float";
template <>
inline constexpr std::string_view kTypeText<bool> = "bool";

/// An option of options.h.
template <class Option>
struct of {
  static constexpr std::string_view name = Option::name;
  static constexpr std::string_view type = kTypeText<typename Option::Type>;
  using Passed = typename Option::Type;
  static Passed get(const Call& call) { return call.norm.*Option::kept; }
  static void put(Call* call, Passed value) { call->norm.*Option::kept = value; }
};

/// Which of these gradients are wanted; a gradient is a pointer to its flag.
template <bool Wanted::*... kGradients>
struct output_mask {
  static constexpr size_t kCount = sizeof...(kGradients);
  static constexpr std::string_view name = "output_mask", fallback = "";
  static constexpr std::string_view type = kCount == 2   ? "bool[2]"
                                           : kCount == 3 ? "bool[3]"
                                                         : "bool[4]";
  using Passed = std::array<bool, kCount>;
  static Passed get(const Call& call) { return {call.wanted.*kGradients...}; }
  static void put(Call* call, Passed mask) {
    size_t i = 0;
    ((call->wanted.*kGradients = mask[i++]), ...);
  }
};

}  // namespace arg

}  // namespace fusednorm
