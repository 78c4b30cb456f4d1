// The schemas, and the typed calls into the dispatcher.
#include "operators/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <sstream>

namespace fusednorm {
namespace {

// ---- Schemas ----

template <class Argument>
std::string fallback_of(Argument) {
  return std::string(Argument::fallback);
}
template <class Option>
std::string fallback_of(arg::of<Option>) {
  std::ostringstream text;
  if constexpr (std::is_same_v<typename Option::Type, bool>) {
    text << (Option::fallback ? "True" : "False");
  } else if constexpr (std::is_same_v<typename Option::Type, std::string_view>) {
    text << '"' << Option::fallback << '"';
  } else {
    text << std::showpoint << Option::fallback;
  }
  return text.str();
}

/// "Tensor? weight=None, ", for each; a backward is given all its positional arguments.
template <class... Arguments>
std::string schema_of(List<Arguments...>, bool with_fallbacks) {
  std::string text;
  [[maybe_unused]] const auto append = [&](auto argument) {
    using Argument = decltype(argument);
    text += std::string(text.empty() ? "" : ", ") + std::string(Argument::type) + ' ' +
            std::string(Argument::name);
    const std::string fallback = fallback_of(argument);
    if (with_fallbacks && !fallback.empty()) text += '=' + fallback;
  };
  (append(Arguments{}), ...);
  return text;
}

template <class... Returns>
std::string schema_of_returns(List<Returns...>, bool names) {
  std::string text;
  const auto append = [&](const char* name) {
    text +=
        std::string(text.empty() ? "" : ", ") + "Tensor" + (names ? " " : "") + (names ? name : "");
  };
  (append(Returns::name), ...);
  return sizeof...(Returns) == 1 ? text : '(' + text + ')';
}

template <class Op>
std::string schema() {
  const std::string keywords = schema_of(typename Op::Keywords{}, true);
  return Op::name() + '(' + schema_of(typename Op::Positional{}, !is_backward(Op::form)) +
         (keywords.empty() ? "" : ", *, " + keywords) + ") -> " +
         schema_of_returns(typename Op::Returns{},
                           !is_backward(Op::form) && Op::form != Form::kOutput);
}

// ---- Calls ----

template <class Op>
const auto& handle() {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow(("fusednorm::" + Op::name()).c_str(), "")
                                .template typed<typename Op::Function>();
  return found;
}

template <class Op, class... Arguments>
typename Op::Result call_operator(const Call& call, const std::optional<Keys>& keys,
                                  List<Arguments...>) {
  return keys ? handle<Op>().redispatch(*keys, Arguments::get(call)...)
              : handle<Op>().call(Arguments::get(call)...);
}

template <class All, class NormOf, Form kForm>
All dispatch(const Call& call, const std::optional<Keys>& keys) {
  using Op = Operator<NormOf, kForm>;
  return unpack<All>(call_operator<Op>(call, keys, typename Op::Arguments{}),
                     typename Op::Returns{});
}

template <class NormOf>
Outputs outputs_of(const Call& call, const std::optional<Keys>& keys) {
  if (call.form == Form::kOutput) return dispatch<Outputs, NormOf, Form::kOutput>(call, keys);
  if constexpr (NormOf::has_residual) {
    if (call.form == Form::kAdd) return dispatch<Outputs, NormOf, Form::kAdd>(call, keys);
    if (call.form == Form::kAddInPlace) {
      return dispatch<Outputs, NormOf, Form::kAddInPlace>(call, keys);
    }
    if (call.form == Form::kAddForward) {
      return dispatch<Outputs, NormOf, Form::kAddForward>(call, keys);
    }
  }
  return dispatch<Outputs, NormOf, Form::kForward>(call, keys);
}

template <class NormOf>
Gradients gradients_of(const Call& call, const std::optional<Keys>& keys) {
  if constexpr (NormOf::has_residual) {
    if (call.form == Form::kAddBackward) {
      return dispatch<Gradients, NormOf, Form::kAddBackward>(call, keys);
    }
  }
  return dispatch<Gradients, NormOf, Form::kBackward>(call, keys);
}

}  // namespace

Outputs dispatch_outputs(const Call& call, std::optional<Keys> keys) {
  switch (call.norm.kind) {
    case NormKind::kLayerNorm:
      return outputs_of<LayerNorm>(call, keys);
    case NormKind::kRmsNorm:
      return outputs_of<RmsNorm>(call, keys);
    case NormKind::kScaleRows:
      return outputs_of<ScaleRows>(call, keys);
    default:
      return outputs_of<GroupNorm>(call, keys);
  }
}

Gradients dispatch_gradients(const Call& call, std::optional<Keys> keys) {
  switch (call.norm.kind) {
    case NormKind::kLayerNorm:
      return gradients_of<LayerNorm>(call, keys);
    case NormKind::kRmsNorm:
      return gradients_of<RmsNorm>(call, keys);
    case NormKind::kScaleRows:
      return gradients_of<ScaleRows>(call, keys);
    default:
      return gradients_of<GroupNorm>(call, keys);
  }
}

}  // namespace fusednorm

TORCH_LIBRARY(fusednorm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define = [&](auto op) {
    m.def(torch::schema(fusednorm::schema<decltype(op)>().c_str()), tags);
  };
  fusednorm::for_each_operator<fusednorm::LayerNorm>(define);
  fusednorm::for_each_operator<fusednorm::RmsNorm>(define);
  fusednorm::for_each_operator<fusednorm::ScaleRows>(define);
  fusednorm::for_each_operator<fusednorm::GroupNorm>(define);
  m.def("scale_norm(Tensor input, Tensor g, float eps=1e-5) -> Tensor", tags);
}
