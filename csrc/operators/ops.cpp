// Schemas, typed calls into the dispatcher, the public C++ functions, and the Meta key.
#include "add_ops.h"
#include "dispatch.h"
#include "fusednorm.h"
#include "keys/meta.h"
#include "scale_norm.h"

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

  m.def("scale_norm(Tensor input, Tensor g, float eps=1e-5) -> Tensor", tags);
  // Not part of the interface: what scale_norm calls.
  m.def(
      "_scale_rows(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float eps=1e-5) "
      "-> Tensor",
      tags);
  m.def(
      "_scale_rows_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float eps=1e-5, *, ScalarType? out_dtype=None) -> (Tensor output, Tensor rstd)",
      tags);
  m.def(
      "_scale_rows_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor rstd, Tensor? weight, float eps, bool[2] output_mask) -> (Tensor, Tensor)",
      tags);

#define FN_LAYER_NORM_ARGUMENTS                                                         \
  "SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, " \
  "*, float alpha=1.0, " FN_LAYER_NORM_OPTIONS
#define FN_RMS_NORM_ARGUMENTS                                         \
  "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, " \
  "*, float alpha=1.0, " FN_RMS_NORM_OPTIONS
  m.def("add_layer_norm(Tensor input, Tensor residual, " FN_LAYER_NORM_ARGUMENTS
        ") -> (Tensor output, Tensor residual_out)",
        tags);
  m.def("add_rms_norm(Tensor input, Tensor residual, " FN_RMS_NORM_ARGUMENTS
        ") -> (Tensor output, Tensor residual_out)",
        tags);
  m.def("add_layer_norm_(Tensor input, Tensor(a!) residual, " FN_LAYER_NORM_ARGUMENTS
        ") -> Tensor output",
        tags);
  m.def("add_rms_norm_(Tensor input, Tensor(a!) residual, " FN_RMS_NORM_ARGUMENTS
        ") -> Tensor output",
        tags);
  // Not part of the interface: what autograd calls.
  m.def("add_layer_norm_forward(Tensor input, Tensor residual, " FN_LAYER_NORM_ARGUMENTS
        ", ScalarType? out_dtype=None) -> (Tensor output, Tensor residual_out, Tensor mean, "
        "Tensor rstd)",
        tags);
  m.def("add_rms_norm_forward(Tensor input, Tensor residual, " FN_RMS_NORM_ARGUMENTS
        ", ScalarType? out_dtype=None) -> (Tensor output, Tensor residual_out, Tensor rstd)",
        tags);
  m.def(
      "add_layer_norm_backward(Tensor grad_output, Tensor? grad_residual_out, "
      "Tensor residual_out, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
      "Tensor? bias, float eps, ScalarType input_dtype, bool[4] output_mask, *, "
      "float alpha=1.0, " FN_LAYER_NORM_OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "add_rms_norm_backward(Tensor grad_output, Tensor? grad_residual_out, Tensor residual_out, "
      "SymInt[] normalized_shape, Tensor rstd, Tensor? weight, float? eps, "
      "ScalarType input_dtype, bool[3] output_mask, *, float alpha=1.0, " FN_RMS_NORM_OPTIONS
      ") -> (Tensor, Tensor, Tensor)",
      tags);
}

namespace fusednorm {
namespace {

using Schema = Operators<MetaBackend>;
using AddSchema = AddOperators<MetaBackend>;

}  // namespace

Tensor dispatch_output(const Norm& norm, const ForwardInputs& in, Keys keys) {
  if (norm.centered) {
    static const auto handle = find("fusednorm::layer_norm", Schema::layer_norm);
    return call(handle, keys, in.input, in.normalized_shape, in.weight, in.bias, *norm.eps,
                norm.weight_offset, norm.eps_outside, norm.unbiased);
  }
  if (norm.clamp) {
    static const auto handle = find("fusednorm::_scale_rows", Schema::scale_rows);
    return call(handle, keys, in.input, in.normalized_shape, in.weight, *norm.eps);
  }
  static const auto handle = find("fusednorm::rms_norm", Schema::rms_norm);
  return call(handle, keys, in.input, in.normalized_shape, in.weight, norm.eps, norm.weight_offset,
              norm.casting_mode);
}

ThreeTensors dispatch_forward(const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype, Keys keys) {
  if (norm.centered) {
    static const auto handle = find("fusednorm::layer_norm_forward", Schema::layer_norm_forward);
    return call(handle, keys, in.input, in.normalized_shape, in.weight, in.bias, *norm.eps,
                norm.weight_offset, norm.eps_outside, norm.unbiased, out_dtype);
  }
  if (norm.clamp) {
    static const auto handle = find("fusednorm::_scale_rows_forward", Schema::scale_rows_forward);
    auto [output, rstd] =
        call(handle, keys, in.input, in.normalized_shape, in.weight, *norm.eps, out_dtype);
    return {std::move(output), Tensor(), std::move(rstd)};
  }
  static const auto handle = find("fusednorm::rms_norm_forward", Schema::rms_norm_forward);
  auto [output, rstd] = call(handle, keys, in.input, in.normalized_shape, in.weight, norm.eps,
                             norm.weight_offset, norm.casting_mode, out_dtype);
  return {std::move(output), Tensor(), std::move(rstd)};
}

ThreeTensors dispatch_backward(const Norm& norm, const BackwardInputs& in, Keys keys) {
  if (norm.centered) {
    static const auto handle = find("fusednorm::layer_norm_backward", Schema::layer_norm_backward);
    return call(handle, keys, in.grad_output, in.input, in.normalized_shape, in.mean, in.rstd,
                in.weight, in.bias, *norm.eps, in.output_mask, norm.weight_offset, norm.eps_outside,
                norm.unbiased);
  }
  const std::array<bool, 2> mask{in.output_mask[0], in.output_mask[1]};
  if (norm.clamp) {
    static const auto handle = find("fusednorm::_scale_rows_backward", Schema::scale_rows_backward);
    auto [grad_input, grad_weight] = call(handle, keys, in.grad_output, in.input,
                                          in.normalized_shape, in.rstd, in.weight, *norm.eps, mask);
    return {std::move(grad_input), std::move(grad_weight), Tensor()};
  }
  static const auto handle = find("fusednorm::rms_norm_backward", Schema::rms_norm_backward);
  auto [grad_input, grad_weight] =
      call(handle, keys, in.grad_output, in.input, in.normalized_shape, in.rstd, in.weight,
           norm.eps, mask, norm.weight_offset, norm.casting_mode);
  return {std::move(grad_input), std::move(grad_weight), Tensor()};
}

namespace {

/// The forms that return both, and those in place, differ in what they return alone.
template <class LayerNormHandle, class RmsNormHandle>
auto call_add(const LayerNormHandle& layer_norm, const RmsNormHandle& rms_norm, const Norm& norm,
              const AddInputs& in, Keys keys) {
  if (norm.centered) {
    return call(layer_norm, keys, in.input, in.residual, in.normalized_shape, in.weight, in.bias,
                *norm.eps, in.alpha, norm.weight_offset, norm.eps_outside, norm.unbiased);
  }
  return call(rms_norm, keys, in.input, in.residual, in.normalized_shape, in.weight, norm.eps,
              in.alpha, norm.weight_offset, norm.casting_mode);
}

}  // namespace

TwoTensors dispatch_add(const Norm& norm, const AddInputs& in, Keys keys) {
  static const auto layer_norm = find("fusednorm::add_layer_norm", AddSchema::add_layer_norm);
  static const auto rms_norm = find("fusednorm::add_rms_norm", AddSchema::add_rms_norm);
  return call_add(layer_norm, rms_norm, norm, in, keys);
}

Tensor dispatch_add_in_place(const Norm& norm, const AddInputs& in, Keys keys) {
  static const auto layer_norm = find("fusednorm::add_layer_norm_", AddSchema::add_layer_norm_);
  static const auto rms_norm = find("fusednorm::add_rms_norm_", AddSchema::add_rms_norm_);
  return call_add(layer_norm, rms_norm, norm, in, keys);
}

FourTensors dispatch_add_forward(const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype, Keys keys) {
  if (norm.centered) {
    static const auto handle =
        find("fusednorm::add_layer_norm_forward", AddSchema::add_layer_norm_forward);
    return call(handle, keys, in.input, in.residual, in.normalized_shape, in.weight, in.bias,
                *norm.eps, in.alpha, norm.weight_offset, norm.eps_outside, norm.unbiased,
                out_dtype);
  }
  static const auto handle =
      find("fusednorm::add_rms_norm_forward", AddSchema::add_rms_norm_forward);
  auto [output, residual_out, rstd] =
      call(handle, keys, in.input, in.residual, in.normalized_shape, in.weight, norm.eps, in.alpha,
           norm.weight_offset, norm.casting_mode, out_dtype);
  return {std::move(output), std::move(residual_out), Tensor(), std::move(rstd)};
}

FourTensors dispatch_add_backward(const Norm& norm, const AddBackwardInputs& in, Keys keys) {
  if (norm.centered) {
    static const auto handle =
        find("fusednorm::add_layer_norm_backward", AddSchema::add_layer_norm_backward);
    return call(handle, keys, in.grad_output, in.grad_residual_out, in.residual_out,
                in.normalized_shape, in.mean, in.rstd, in.weight, in.bias, *norm.eps,
                in.input_dtype, in.output_mask, in.alpha, norm.weight_offset, norm.eps_outside,
                norm.unbiased);
  }
  static const auto handle =
      find("fusednorm::add_rms_norm_backward", AddSchema::add_rms_norm_backward);
  const auto& mask = in.output_mask;
  auto [grad_input, grad_residual, grad_weight] = call(
      handle, keys, in.grad_output, in.grad_residual_out, in.residual_out, in.normalized_shape,
      in.rstd, in.weight, norm.eps, in.input_dtype, std::array<bool, 3>{mask[0], mask[1], mask[2]},
      in.alpha, norm.weight_offset, norm.casting_mode);
  return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight), Tensor()};
}

namespace {

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
  for (const std::string norm :
       {"layer_norm", "rms_norm", "_scale_rows", "add_layer_norm", "add_rms_norm", "group_norm"}) {
    for (const char* suffix : {"", "_forward", "_backward"}) {
      m.impl((norm + suffix).c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
  for (const char* name : {"add_layer_norm_", "add_rms_norm_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace

// ---- The public C++ functions ----

namespace {

// An operator names itself: the name given here is not read.
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

Tensor scale_norm(const Tensor& input, const Tensor& g, double eps) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("fusednorm::scale_norm", "")
                                 .typed<Tensor(const Tensor&, const Tensor&, double)>();
  return handle.call(input, g, eps);
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

TwoTensors add_layer_norm(const Tensor& input, const Tensor& residual,
                          at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps, double alpha,
                          const LayerNormOptions& options) {
  return dispatch_add(
      norm_of(eps, options),
      {input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, alpha});
}

TwoTensors add_rms_norm(const Tensor& input, const Tensor& residual,
                        at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                        std::optional<double> eps, double alpha, const RmsNormOptions& options) {
  return dispatch_add(
      norm_of(eps, options),
      {input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, {}, alpha});
}

Tensor add_layer_norm_(const Tensor& input, const Tensor& residual,
                       at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, double alpha,
                       const LayerNormOptions& options) {
  return dispatch_add_in_place(
      norm_of(eps, options),
      {input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, alpha});
}

Tensor add_rms_norm_(const Tensor& input, const Tensor& residual, at::IntArrayRef normalized_shape,
                     const OptionalTensor& weight, std::optional<double> eps, double alpha,
                     const RmsNormOptions& options) {
  return dispatch_add_in_place(
      norm_of(eps, options),
      {input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, {}, alpha});
}

TORCH_LIBRARY_IMPL(fusednorm, CompositeImplicitAutograd, m) {
  m.impl("scale_norm", TORCH_FN(scale_norm_by_rows));
}
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {  // else vmap loops over the batch
  m.impl("scale_norm", TORCH_FN(scale_norm_by_rows));
}
TORCH_LIBRARY_IMPL(fusednorm, Meta, m) { register_operators<MetaBackend>(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCPU, m) {
  refuse_on(m);
  m.impl("scale_norm", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
TORCH_LIBRARY_IMPL(fusednorm, QuantizedCPU, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, SparseCsrCUDA, m) { refuse_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, NestedTensorCUDA, m) {
  refuse_on(m);
  m.impl("scale_norm", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
#if !defined(FUSEDNORM_WITH_CUDA)
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { refuse_on(m); }
#endif

}  // namespace fusednorm
