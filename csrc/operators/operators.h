// The operators: of each norm and form, its name, schema and signature, made from lists of
// arguments. A dispatch key registers two functions of a Call, and register_norms makes kernels of
// every operator's signature from them.
#pragma once

#include <torch/library.h>

#include <string>
#include <type_traits>

#include "operators/arguments.h"
#include "operators/visibility.h"

namespace fusednorm {

// ---- The norms: what their operators take and save ----

struct LayerNorm {
  static constexpr NormKind kind = NormKind::kLayerNorm;
  static constexpr const char* name = "layer_norm";
  using RowShape = List<arg::normalized_shape>;
  using Eps = List<arg::eps>;
  using Parameters = List<arg::weight, arg::bias>;
  using KeywordParameters = List<>;
  using Options = LayerNormOptionList;
  using Statistics = List<arg::mean, arg::rstd>;
  static constexpr bool widens = true;        // its output may be wider than its input
  static constexpr bool has_residual = true;  // there are forms with the residual add
};

struct RmsNorm {
  static constexpr NormKind kind = NormKind::kRmsNorm;
  static constexpr const char* name = "rms_norm";
  using RowShape = List<arg::normalized_shape>;
  using Eps = List<arg::eps_or_none>;
  using Parameters = List<arg::weight>;
  using KeywordParameters = List<arg::bias>;
  using Options = RmsNormOptionList;
  using Statistics = List<arg::rstd>;
  static constexpr bool widens = true;
  static constexpr bool has_residual = true;
};

/// The rows of scale_norm, which hands over g as the weight of every column. Not part of the
/// interface.
struct ScaleRows {
  static constexpr NormKind kind = NormKind::kScaleRows;
  static constexpr const char* name = "_scale_rows";
  using RowShape = List<arg::normalized_shape>;
  using Eps = List<arg::eps>;
  using Parameters = List<arg::weight>;
  using KeywordParameters = List<>;
  using Options = List<>;
  using Statistics = List<arg::rstd>;
  static constexpr bool widens = true;
  static constexpr bool has_residual = false;
};

/// A row is one group of one sample: channels [g * C / G, (g + 1) * C / G) of the input [N, C, *]
/// at all its positions.
struct GroupNorm {
  static constexpr NormKind kind = NormKind::kGroupNorm;
  static constexpr const char* name = "group_norm";
  using RowShape = List<arg::num_groups>;
  using Eps = List<arg::eps>;
  using Parameters = List<arg::weight, arg::bias>;
  using KeywordParameters = List<>;
  using Options = List<>;
  using Statistics = List<arg::mean, arg::rstd>;
  static constexpr bool widens = false;
  static constexpr bool has_residual = false;
};

// ---- Lists ----

template <class... Lists>
struct ConcatenationOf {
  using type = List<>;
};
template <class... Items>
struct ConcatenationOf<List<Items...>> {
  using type = List<Items...>;
};
template <class... A, class... B, class... More>
struct ConcatenationOf<List<A...>, List<B...>, More...> {
  using type = typename ConcatenationOf<List<A..., B...>, More...>::type;
};
template <class... Lists>
using Concatenation = typename ConcatenationOf<Lists...>::type;
template <bool kTake, class Items>
using If = std::conditional_t<kTake, Items, List<>>;

template <class... Options>
auto arguments_of(List<Options...>) -> List<arg::of<Options>...>;

// ---- What is returned ----

/// A tensor that a forward returns: its name, and its place among all outputs.
#define FN_RETURN(name_)                                       \
  struct return_##name_ {                                      \
    static constexpr const char* name = #name_;                \
    static constexpr Tensor Outputs::*place = &Outputs::name_; \
  };
FN_RETURN(output)
FN_RETURN(residual_out)
FN_RETURN(mean)
FN_RETURN(rstd)
#undef FN_RETURN
auto return_of(arg::mean) -> return_mean;
auto return_of(arg::rstd) -> return_rstd;
template <class... Statistics>
auto returns_of(List<Statistics...>) -> List<decltype(return_of(Statistics{}))...>;

/// A gradient that a backward returns: its flag, and its place among all gradients.
template <Tensor Gradients::*kPlace, bool Wanted::*kWanted>
struct return_gradient {
  static constexpr const char* name = "";
  static constexpr Tensor Gradients::*place = kPlace;
};
using gradient_of_input = return_gradient<&Gradients::input, &Wanted::input>;
using gradient_of_residual = return_gradient<&Gradients::residual, &Wanted::residual>;
auto gradient_of(arg::weight) -> return_gradient<&Gradients::weight, &Wanted::weight>;
auto gradient_of(arg::bias) -> return_gradient<&Gradients::bias, &Wanted::bias>;
template <class... Parameters>
auto gradients_of(List<Parameters...>) -> List<decltype(gradient_of(Parameters{}))...>;
template <Tensor Gradients::*... kPlaces, bool Wanted::*... kWanted>
auto mask_of(List<return_gradient<kPlaces, kWanted>...>) -> List<arg::output_mask<kWanted...>>;

template <class Items>
struct ResultOf;
template <class Only>
struct ResultOf<List<Only>> {
  using type = Tensor;
};
template <class First, class Second>
struct ResultOf<List<First, Second>> {
  using type = std::tuple<Tensor, Tensor>;
};
template <class A, class B, class C>
struct ResultOf<List<A, B, C>> {
  using type = std::tuple<Tensor, Tensor, Tensor>;
};
template <class A, class B, class C, class D>
struct ResultOf<List<A, B, C, D>> {
  using type = std::tuple<Tensor, Tensor, Tensor, Tensor>;
};

/// All outputs, or all gradients, as an operator returns them, and back.
template <class All, class... Returns>
auto pack(All&& all, List<Returns...>) {
  if constexpr (sizeof...(Returns) == 1) {
    return Tensor((std::move(all.*Returns::place), ...));
  } else {
    return std::tuple<std::conditional_t<true, Tensor, Returns>...>(
        std::move(all.*Returns::place)...);
  }
}
template <class All, class... Returns>
All unpack(typename ResultOf<List<Returns...>>::type&& result, List<Returns...>) {
  All all;
  if constexpr (sizeof...(Returns) == 1) {
    ((all.*Returns::place = std::move(result)), ...);
  } else {
    std::apply([&](auto&... tensors) { ((all.*Returns::place = std::move(tensors)), ...); },
               result);
  }
  return all;
}

// ---- An operator ----

template <class NormOf, Form kForm>
struct Operator {
  static constexpr Form form = kForm;
  static constexpr NormKind kind = NormOf::kind;

  using GradientReturns =
      Concatenation<List<gradient_of_input>, If<adds_residual(kForm), List<gradient_of_residual>>,
                    decltype(gradients_of(Concatenation<typename NormOf::Parameters,
                                                        typename NormOf::KeywordParameters>{}))>;
  using Returns = std::conditional_t<
      is_backward(kForm), GradientReturns,
      Concatenation<
          List<return_output>,
          If<adds_residual(kForm) && kForm != Form::kAddInPlace, List<return_residual_out>>,
          If<keeps_statistics(kForm), decltype(returns_of(typename NormOf::Statistics{}))>>>;
  using Result = typename ResultOf<Returns>::type;

  // In the order of ATen's native_layer_norm and its backward.
  using ForwardPositional = Concatenation<
      List<arg::input>,
      If<adds_residual(kForm), List<std::conditional_t<kForm == Form::kAddInPlace,
                                                       arg::written_residual, arg::residual>>>,
      typename NormOf::RowShape, typename NormOf::Parameters, typename NormOf::Eps>;
  using BackwardPositional = Concatenation<
      List<arg::grad_output>,
      std::conditional_t<adds_residual(kForm), List<arg::grad_residual_out, arg::residual_out>,
                         List<arg::input>>,
      typename NormOf::RowShape, typename NormOf::Statistics, typename NormOf::Parameters,
      typename NormOf::Eps, If<adds_residual(kForm), List<arg::input_dtype>>,
      decltype(mask_of(GradientReturns{}))>;
  using Positional = std::conditional_t<is_backward(kForm), BackwardPositional, ForwardPositional>;
  using Keywords =
      Concatenation<If<adds_residual(kForm), List<arg::alpha>>, typename NormOf::KeywordParameters,
                    decltype(arguments_of(typename NormOf::Options{})),
                    If<keeps_statistics(kForm) && NormOf::widens, List<arg::out_dtype>>>;
  using Arguments = Concatenation<Positional, Keywords>;

  template <class... Items>
  static auto function_of(List<Items...>) -> Result (*)(typename Items::Passed...);
  using Function = std::remove_pointer_t<decltype(function_of(Arguments{}))>;

  static std::string name() {
    return std::string(adds_residual(kForm) ? "add_" : "") + NormOf::name +
           (kForm == Form::kAddInPlace ? "_"
            : is_backward(kForm)       ? "_backward"
            : keeps_statistics(kForm)  ? "_forward"
                                       : "");
  }
  /// In error messages: who calls an operator does not know of its `_forward`.
  static const char* name_in_errors() {
    static const std::string text = keeps_statistics(kForm) ? Operator < NormOf,
                             adds_residual(kForm) ? Form::kAdd : Form::kOutput > ::name() : name();
    return text.c_str();
  }
  static Call call() { return {{name_in_errors(), kind, {}}, kForm}; }
};

/// f(operator) for each operator of a norm.
template <class NormOf, class F>
void for_each_operator(F&& f) {
  f(Operator<NormOf, Form::kOutput>{});
  f(Operator<NormOf, Form::kForward>{});
  f(Operator<NormOf, Form::kBackward>{});
  if constexpr (NormOf::has_residual) {
    f(Operator<NormOf, Form::kAdd>{});
    f(Operator<NormOf, Form::kAddInPlace>{});
    f(Operator<NormOf, Form::kAddForward>{});
    f(Operator<NormOf, Form::kAddBackward>{});
  }
}

// ---- A dispatch key's kernels ----

using Keys = c10::DispatchKeySet;

/// The kernel of an operator, from Key::outputs(keys, call) or Key::gradients(keys, call).
template <class Key, class Operator, class Arguments = typename Operator::Arguments>
struct Kernel;
template <class Key, class Operator, class... Arguments>
struct Kernel<Key, Operator, List<Arguments...>> {
  static typename Operator::Result run(Keys keys, typename Arguments::Passed... values) {
    Call call = Operator::call();
    (Arguments::put(&call, values), ...);
    if constexpr (is_backward(Operator::form)) {
      return pack(Key::gradients(keys, call), typename Operator::Returns{});
    } else {
      return pack(Key::outputs(keys, call), typename Operator::Returns{});
    }
  }
};

template <class Key, class Op>
void register_operator(torch::Library& library) {
  library.impl(Op::name().c_str(), TORCH_FN((Kernel<Key, Op>::run)));
}
/// All operators of these norms.
template <class Key, class... Norms>
void register_norms(torch::Library& library) {
  (for_each_operator<Norms>([&](auto op) { register_operator<Key, decltype(op)>(library); }), ...);
}

// ---- Calls into the dispatcher; with a key set, a redispatch to it ----

FUSEDNORM_API Outputs dispatch_outputs(const Call& call, std::optional<Keys> keys = {});
FUSEDNORM_API Gradients dispatch_gradients(const Call& call, std::optional<Keys> keys = {});

}  // namespace fusednorm
