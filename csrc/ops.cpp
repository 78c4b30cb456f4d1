// Schemas, typed calls into the dispatcher, the public C++ functions, and the Meta key.
#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "fusednorm.h"

// What an operator takes apart from its tensors, as api.md orders it.
#define FN_LAYER_NORM_OPTIONS "float weight_offset=0.0, bool eps_outside=False, bool unbiased=False"
#define FN_RMS_NORM_OPTIONS "float weight_offset=0.0, str casting_mode=\"default\""

TORCH_LIBRARY(fusednorm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5, *, " FN_LAYER_NORM_OPTIONS ") -> Tensor",
      tags);
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "*, " FN_RMS_NORM_OPTIONS ") -> Tensor",
      tags);
  m.def(
      "layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-5, *, " FN_LAYER_NORM_OPTIONS
      ", ScalarType? out_dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)",
      tags);
  m.def(
      "rms_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, " FN_RMS_NORM_OPTIONS
      ", ScalarType? out_dtype=None) -> (Tensor output, Tensor rstd)",
      tags);
  m.def(
      "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, float eps, bool[3] output_mask, "
      "*, " FN_LAYER_NORM_OPTIONS ") -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor rstd, Tensor? weight, float? eps, bool[2] output_mask, *, " FN_RMS_NORM_OPTIONS
      ") -> (Tensor, Tensor)",
      tags);
}

namespace fusednorm {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <class Handle, class... Args>
auto call(const Handle& handle, const Keys& keys, Args&&... args) {
  return keys ? handle.redispatch(*keys, std::forward<Args>(args)...)
              : handle.call(std::forward<Args>(args)...);
}

}  // namespace

Tensor dispatch_output(const Norm& norm, const ForwardInputs& in, Keys keys) {
  if (norm.centered) {
    static const auto handle =
        find<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                    const OptionalTensor&, double, double, bool, bool)>("fusednorm::layer_norm");
    return call(handle, keys, in.input, in.normalized_shape, in.weight, in.bias, *norm.eps,
                norm.weight_offset, norm.eps_outside, norm.unbiased);
  }
  static const auto handle =
      find<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, std::optional<double>,
                  double, std::string_view)>("fusednorm::rms_norm");
  return call(handle, keys, in.input, in.normalized_shape, in.weight, norm.eps, norm.weight_offset,
              norm.casting_mode);
}

ThreeTensors dispatch_forward(const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype, Keys keys) {
  if (norm.centered) {
    static const auto handle = find<ThreeTensors(
        const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double,
        double, bool, bool, std::optional<at::ScalarType>)>("fusednorm::layer_norm_forward");
    return call(handle, keys, in.input, in.normalized_shape, in.weight, in.bias, *norm.eps,
                norm.weight_offset, norm.eps_outside, norm.unbiased, out_dtype);
  }
  static const auto handle = find<std::tuple<Tensor, Tensor>(
      const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, std::optional<double>, double,
      std::string_view, std::optional<at::ScalarType>)>("fusednorm::rms_norm_forward");
  auto [output, rstd] = call(handle, keys, in.input, in.normalized_shape, in.weight, norm.eps,
                             norm.weight_offset, norm.casting_mode, out_dtype);
  return {std::move(output), Tensor(), std::move(rstd)};
}

ThreeTensors dispatch_backward(const Norm& norm, const BackwardInputs& in, Keys keys) {
  if (norm.centered) {
    static const auto handle =
        find<ThreeTensors(const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&,
                          const Tensor&, const OptionalTensor&, const OptionalTensor&, double,
                          std::array<bool, 3>, double, bool, bool)>(
            "fusednorm::layer_norm_backward");
    return call(handle, keys, in.grad_output, in.input, in.normalized_shape, in.mean, in.rstd,
                in.weight, in.bias, *norm.eps, in.output_mask, norm.weight_offset, norm.eps_outside,
                norm.unbiased);
  }
  static const auto handle = find<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const OptionalTensor&,
      std::optional<double>, std::array<bool, 2>, double, std::string_view)>(
      "fusednorm::rms_norm_backward");
  auto [grad_input, grad_weight] =
      call(handle, keys, in.grad_output, in.input, in.normalized_shape, in.rstd, in.weight,
           norm.eps, std::array<bool, 2>{in.output_mask[0], in.output_mask[1]}, norm.weight_offset,
           norm.casting_mode);
  return {std::move(grad_input), std::move(grad_weight), Tensor()};
}

// ---- The Meta key: shapes and dtypes, by the same checks ----

namespace {

struct MetaBackend {
  static Tensor output(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in) {
    checks::check_forward(norm, in);
    return at::empty_symint(in.input.sym_sizes(), in.input.options());
  }

  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    checks::check_forward(norm, in, out_dtype);
    const auto dtype = in.input.scalar_type();
    const auto statistic = [&] {
      return at::empty_symint(checks::leading_shape(in.input, in.normalized_shape),
                              in.input.options().dtype(accumulation_dtype(dtype)));
    };
    return {
        at::empty_symint(in.input.sym_sizes(), in.input.options().dtype(out_dtype.value_or(dtype))),
        norm.centered ? statistic() : Tensor(), statistic()};
  }

  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    checks::check_backward(norm, in);
    const auto like = [&](bool wanted, c10::SymIntArrayRef shape, at::ScalarType dtype) {
      return wanted ? at::empty_symint(shape, in.input.options().dtype(dtype)) : Tensor();
    };
    return {like(in.output_mask[0], in.input.sym_sizes(), in.input.scalar_type()),
            like(in.output_mask[1], in.normalized_shape, checks::grad_weight_dtype(in)),
            like(in.output_mask[2], in.normalized_shape, checks::grad_bias_dtype(in))};
  }
};

// ---- Kinds of tensors we have no kernel for: an error that says so, for any operator ----

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!given[i].isTensor() || !given[i].toTensor().defined()) continue;
    const Tensor& tensor = given[i].toTensor();
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized(),
                op.schema().name(), ": ", arguments[i].name(),
                ": expected a dense (strided) tensor, got ",
                tensor.is_nested()      ? c10::str("a nested tensor")
                : tensor.is_quantized() ? c10::str("a quantized tensor")
                                        : c10::str("layout ", tensor.layout()));
  }
  TORCH_CHECK(false, op.schema().name(),
              ": fusednorm was built without CUDA, and has no kernel for a CUDA tensor");
}

void refuse_on(torch::Library& m) {
  for (const char* name : {"layer_norm", "rms_norm", "layer_norm_forward", "rms_norm_forward",
                           "layer_norm_backward", "rms_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace

// ---- The public C++ functions ----

namespace {

Norm norm_of(double eps, const LayerNormOptions& options) {
  return {"layer_norm", true, eps, options.weight_offset, options.eps_outside, options.unbiased};
}
Norm norm_of(std::optional<double> eps, const RmsNormOptions& options) {
  return {"rms_norm", false, eps, options.weight_offset, false, false, options.casting_mode};
}

}  // namespace

Tensor layer_norm(const Tensor& input, at::IntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  const LayerNormOptions& options) {
  return dispatch_output(norm_of(eps, options),
                         {input, c10::fromIntArrayRefSlow(normalized_shape), weight, bias});
}

Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                std::optional<double> eps, const RmsNormOptions& options) {
  return dispatch_output(norm_of(eps, options),
                         {input, c10::fromIntArrayRefSlow(normalized_shape), weight, {}});
}

ThreeTensors layer_norm_forward(const Tensor& input, at::IntArrayRef normalized_shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, const LayerNormOptions& options,
                                std::optional<at::ScalarType> out_dtype) {
  return dispatch_forward(norm_of(eps, options),
                          {input, c10::fromIntArrayRefSlow(normalized_shape), weight, bias},
                          out_dtype);
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& input, at::IntArrayRef normalized_shape,
                                            const OptionalTensor& weight, std::optional<double> eps,
                                            const RmsNormOptions& options,
                                            std::optional<at::ScalarType> out_dtype) {
  auto [output, mean, rstd] =
      dispatch_forward(norm_of(eps, options),
                       {input, c10::fromIntArrayRefSlow(normalized_shape), weight, {}}, out_dtype);
  return {std::move(output), std::move(rstd)};
}

ThreeTensors layer_norm_backward(const Tensor& grad_output, const Tensor& input,
                                 at::IntArrayRef normalized_shape, const Tensor& mean,
                                 const Tensor& rstd, const OptionalTensor& weight,
                                 const OptionalTensor& bias, double eps,
                                 std::array<bool, 3> output_mask, const LayerNormOptions& options) {
  return dispatch_backward(norm_of(eps, options),
                           {grad_output, input, c10::fromIntArrayRefSlow(normalized_shape), mean,
                            rstd, weight, bias, output_mask});
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_output, const Tensor& input,
                                             at::IntArrayRef normalized_shape, const Tensor& rstd,
                                             const OptionalTensor& weight,
                                             std::optional<double> eps,
                                             std::array<bool, 2> output_mask,
                                             const RmsNormOptions& options) {
  auto [grad_input, grad_weight, none] =
      dispatch_backward(norm_of(eps, options), {grad_output,
                                                input,
                                                c10::fromIntArrayRefSlow(normalized_shape),
                                                Tensor(),
                                                rstd,
                                                weight,
                                                {},
                                                {output_mask[0], output_mask[1], false}});
  return {std::move(grad_input), std::move(grad_weight)};
}

TORCH_LIBRARY_IMPL(fusednorm, Meta, m) { Operators<MetaBackend>::register_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, QuantizedCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCUDA, m) { refuse_on(m); }
#if !defined(FUSEDNORM_WITH_CUDA)
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { refuse_on(m); }
#endif

}  // namespace fusednorm
