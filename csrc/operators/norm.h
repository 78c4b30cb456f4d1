// What is normalized how: an operator's arguments apart from its tensors, as a value that checks,
// keys and devices share.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "maths/row_norm.h"
#include "operators/options.h"

namespace fusednorm {

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm, kScaleRows, kGroupNorm };

/// How an option's type is kept: text is one of its range's own strings once it is checked.
template <class T>
struct KeptAs {
  using type = T;
};
template <>
struct KeptAs<std::string> {
  using type = std::string_view;
};

struct Norm {
  const char* op;  // as error messages name it
  NormKind kind;
  std::optional<double> eps;
  int64_t num_groups = 0;  // GroupNorm's

#define FN_FIELD(type_, name_, fallback_, range, sentence) KeptAs<type_>::type name_ = fallback_;
  FUSEDNORM_EVERY_OPTION(FN_FIELD)
#undef FN_FIELD

  bool centered() const { return kind == NormKind::kLayerNorm || kind == NormKind::kGroupNorm; }
  bool clamp() const { return kind == NormKind::kScaleRows; }  // see row_norm.h
  bool llama() const { return casting_mode == "llama"; }
  /// eps=None is the machine epsilon of the accumulation type (as in torch 2.15).
  NormParams params(c10::ScalarType acc_dtype) const {
    const double machine_epsilon = acc_dtype == c10::ScalarType::Double ? 0x1p-52 : 0x1p-23;
    return {eps.value_or(machine_epsilon), eps_outside, unbiased ? 1 : 0, clamp()};
  }
};

/// Statistics and sums of fp64 are kept in fp64, of everything else in fp32.
inline c10::ScalarType accumulation_dtype(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double ? dtype : c10::ScalarType::Float;
}

// ---- The options as types: option::weight_offset and so on ----

/// What an option may be.
struct Allowed {
  enum Rule : uint8_t { kAny, kFinite, kTwoColumns, kOneOf } rule;
  std::array<std::string_view, 4> choices = {};
};

namespace allowed {
inline constexpr Allowed any{Allowed::kAny}, finite{Allowed::kFinite},
    two_columns{Allowed::kTwoColumns};
template <class... Text>
constexpr Allowed one_of(Text... choices) {
  return {Allowed::kOneOf, {choices...}};
}
}  // namespace allowed

namespace option {
#define FN_TYPE(type_, name_, fallback_, allowed_, sentence_)              \
  struct name_ {                                                           \
    using Type = KeptAs<type_>::type;                                      \
    static constexpr std::string_view name = #name_, sentence = sentence_; \
    static constexpr Type fallback = fallback_;                            \
    static constexpr Allowed allowed = allowed::allowed_;                  \
    static constexpr Type Norm::*kept = &Norm::name_;                      \
  };
FUSEDNORM_EVERY_OPTION(FN_TYPE)
#undef FN_TYPE
}  // namespace option

/// Types in a row.
template <class... Items>
struct List {};
template <class Empty, class... Items>
using Rest = List<Items...>;

#define FN_ITEM(type, name, fallback, range, sentence) , option::name
using LayerNormOptionList = Rest<void FUSEDNORM_LAYER_NORM_OPTIONS(FN_ITEM)>;
using RmsNormOptionList = Rest<void FUSEDNORM_RMS_NORM_OPTIONS(FN_ITEM)>;
using EveryOption = Rest<void FUSEDNORM_EVERY_OPTION(FN_ITEM)>;
#undef FN_ITEM

/// f(item), for each of a list: f is given objects of these types.
template <class... Items, class F>
constexpr void for_each(List<Items...>, F&& f) {
  (f(Items{}), ...);
}

/// The options, from the struct that C++ callers fill.
inline void set_options(const LayerNormOptions& options, Norm* norm) {
#define FN_SET(type, name, fallback, range, sentence) norm->name = options.name;
  FUSEDNORM_LAYER_NORM_OPTIONS(FN_SET)
}
inline void set_options(const RmsNormOptions& options, Norm* norm) {
  FUSEDNORM_RMS_NORM_OPTIONS(FN_SET)
#undef FN_SET
}

/// The norm with its text kept in the ranges' own strings: the caller's may go away.
inline Norm with_own_text(Norm norm) {
  for_each(EveryOption{}, [&](auto option) {
    using Option = decltype(option);
    if constexpr (Option::allowed.rule == Allowed::kOneOf) {
      std::string_view& given = norm.*Option::kept;
      std::string_view own;
      for (const std::string_view choice : Option::allowed.choices) {
        if (choice == given) own = choice;
      }
      given = own;
    }
  });
  return norm;
}

}  // namespace fusednorm
