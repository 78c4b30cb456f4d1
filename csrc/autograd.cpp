// The Autograd key: hand-written nodes around the forward operators; ATen arithmetic for what the
// kernels do not compute (tangents, derivatives of backward) and inside vmap.
//
// Not torch::autograd::Function: torch.func refuses it, it has no jvp, and it costs 13 % of a small
// forward + backward. Both `_forward` and `_backward` have their own Autograd kernel, since
// functorch levels re-enter autograd on the inner operator: without it, hessians were silently
// wrong.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include "checks.h"
#include "ops.h"

namespace fusednorm {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

bool present(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// ---- Composites: the formulas of row_norm.h in ATen arithmetic, differentiable to any order ----

/// They compute in fp64: their speed matters little, and a large mean or an extreme row, for which
/// the kernels take care in fp32, then needs none.
constexpr at::ScalarType kComposite = at::kDouble;

struct NormalizedRows {
  Tensor x_hat, rstd, deviation;  // deviation: sqrt(variance), with eps_outside only
  std::vector<int64_t> dims;      // the normalized dimensions
  c10::SymInt divisor;            // N - ddof
};

NormalizedRows normalize_rows(const Norm& norm, const Tensor& input, size_t normalized_dims) {
  NormalizedRows rows;
  c10::SymInt cols = 1;
  for (size_t i = 1; i <= normalized_dims; ++i) {
    rows.dims.push_back(-static_cast<int64_t>(i));
    cols *= input.sym_size(-static_cast<int64_t>(i));
  }
  const NormParams params = norm.params(accumulation_dtype(input.scalar_type()));
  rows.divisor = cols - params.ddof;
  Tensor x = input.to(kComposite);
  if (norm.centered) {
    x = x - x.mean(rows.dims, /*keepdim=*/true);
    x = x - x.mean(rows.dims, /*keepdim=*/true);  // what the first mean's rounding left
  }
  const Tensor variance = (x * x).sum(rows.dims, /*keepdim=*/true) / rows.divisor;
  if (params.eps_outside) {
    // At 0 the derivative of the root is taken as 0: the root of 1 is differentiated there instead.
    const Tensor zero = variance == 0;
    rows.deviation = variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0);
    rows.rstd = (rows.deviation + params.eps).reciprocal();
  } else {
    rows.rstd = (variance + params.eps).rsqrt();
  }
  rows.x_hat = x * rows.rstd;
  return rows;
}

Tensor gain_of(const Norm& norm, const Tensor& weight) {
  return weight.to(kComposite) + norm.weight_offset;
}

Tensor round_x_hat(const Norm& norm, const Tensor& x_hat, const Tensor& input) {
  return norm.llama() ? x_hat.to(input.scalar_type()).to(x_hat.scalar_type()) : x_hat;
}

ThreeTensors composite_forward(const Norm& norm, const ForwardInputs& in,
                               std::optional<at::ScalarType> out_dtype) {
  checks::check_forward(norm, in, out_dtype);
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  const auto rows = normalize_rows(norm, in.input, in.normalized_shape.size());
  Tensor output = round_x_hat(norm, rows.x_hat, in.input);
  if (present(in.weight)) output = output * gain_of(norm, *in.weight);
  if (present(in.bias)) output = output + in.bias->to(kComposite);
  const auto shape = checks::leading_shape(in.input, in.normalized_shape);
  Tensor mean;
  if (norm.centered) mean = in.input.detach().to(kComposite).mean(rows.dims).to(acc_dtype);
  return {output.to(out_dtype.value_or(in.input.scalar_type())).contiguous(), mean,
          rows.rstd.detach().reshape_symint(shape).to(acc_dtype)};
}

/// The gradients as differentiable functions of grad_output, input and weight. The statistics are
/// computed anew: the saved ones are constants, with which second derivatives would be wrong.
ThreeTensors composite_backward(const Norm& norm, const BackwardInputs& in) {
  checks::check_backward(norm, in);
  const auto rows = normalize_rows(norm, in.input, in.normalized_shape.size());
  const Tensor grad_output = in.grad_output.to(kComposite);
  Tensor grad_input, grad_weight, grad_bias;
  if (in.output_mask[0]) {
    const Tensor g = present(in.weight) ? grad_output * gain_of(norm, *in.weight) : grad_output;
    Tensor projection = (g * rows.x_hat).sum(rows.dims, /*keepdim=*/true) / rows.divisor;
    if (norm.eps_outside) {
      const Tensor zero = rows.deviation == 0;
      projection =
          (projection / (rows.deviation.masked_fill(zero, 1) * rows.rstd)).masked_fill(zero, 0);
    }
    grad_input = g - rows.x_hat * projection;
    if (norm.centered) grad_input = grad_input - g.mean(rows.dims, /*keepdim=*/true);
    grad_input = (grad_input * rows.rstd).to(in.input.scalar_type()).contiguous();
  }
  const auto over_rows = [&](const Tensor& values, at::ScalarType dtype) {
    std::vector<int64_t> leading;
    for (int64_t d = 0; d < in.input.dim() - static_cast<int64_t>(rows.dims.size()); ++d) {
      leading.push_back(d);
    }
    // A copy in any case: a single row's grad_bias must not be grad_output itself.
    return (leading.empty() ? values : values.sum(leading))
        .to(dtype, /*non_blocking=*/false, /*copy=*/true)
        .contiguous();
  };
  if (in.output_mask[1]) {
    grad_weight = over_rows(grad_output * round_x_hat(norm, rows.x_hat, in.input),
                            checks::grad_weight_dtype(in));
  }
  if (in.output_mask[2]) grad_bias = over_rows(grad_output, checks::grad_bias_dtype(in));
  return {grad_input, grad_weight, grad_bias};
}

struct CompositeBackend {
  static Tensor output(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in) {
    return std::get<0>(composite_forward(norm, in, std::nullopt));
  }
  static ThreeTensors forward(c10::DispatchKeySet, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    return composite_forward(norm, in, out_dtype);
  }
  static ThreeTensors backward(c10::DispatchKeySet, const Norm& norm, const BackwardInputs& in) {
    return composite_backward(norm, in);
  }
};

// ---- The nodes ----

using Mask = std::array<bool, 3>;

/// What a backward needs to know apart from tensors.
struct BackwardConstants {
  Norm norm;
  std::optional<at::ScalarType> bias_dtype;

  variable_list gradients(const Tensor& grad_output, const Tensor& input,
                          c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight, Mask mask) const {
    OptionalTensor bias;
    if (mask[2] && bias_dtype != (weight.defined() ? weight : input).scalar_type()) {
      // Only its dtype is read: one element, expanded.
      bias = at::empty({1}, input.options().dtype(*bias_dtype)).expand_symint(normalized_shape);
    }
    auto [grad_input, grad_weight, grad_bias] = dispatch_backward(
        norm, {grad_output, input, normalized_shape, mean, rstd,
               weight.defined() ? OptionalTensor(weight) : std::nullopt, bias, mask});
    return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
  }
};

/// The backward of both norms. Keeps the input, the weight and the row statistics, nothing else.
class RowNormBackward : public torch::autograd::Node {
 public:
  RowNormBackward(const Norm& norm, const ForwardInputs& in)
      : constants_{norm, std::nullopt},
        normalized_shape_(in.normalized_shape.begin(), in.normalized_shape.end()),
        input_(in.input, /*is_output=*/false),
        weight_(in.weight, /*is_output=*/false) {
    constants_.norm.op = norm.centered ? "layer_norm_backward" : "rms_norm_backward";
    // The caller's string may go away.
    constants_.norm.casting_mode = norm.llama() ? "llama" : "default";
    if (present(in.bias)) constants_.bias_dtype = in.bias->scalar_type();
    set_next_edges(torch::autograd::collect_next_edges(in.input, in.weight, in.bias));
  }

  void save_statistics(const Tensor& mean, const Tensor& rstd) {
    mean_ = SavedVariable(mean, /*is_output=*/false);
    rstd_ = SavedVariable(rstd, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return variable_list(3);
    return constants_.gradients(grads[0], input_.unpack(), normalized_shape_, mean_.unpack(),
                                rstd_.unpack(), weight_.unpack(), mask());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : saved_variables()) saved->reset_data();
  }

  std::string name() const override {
    return constants_.norm.centered ? "LayerNormBackward" : "RmsNormBackward";
  }

  // Compiled autograd: what a graph is cached by, and how this node is traced. The call goes into
  // the graph as one function of tensors: while tracing, incoming gradients are dummies of no true
  // shape.

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SavedVariable* saved : {&input_, &weight_, &mean_, &rstd_}) {
      args.collect(*saved, /*is_output=*/false);
    }
    args.collect(normalized_shape_);
    const Norm& norm = constants_.norm;
    args.collect(norm.centered);
    args.collect(norm.eps.has_value());
    args.collect(norm.eps.value_or(0));
    args.collect(norm.weight_offset);
    args.collect(norm.eps_outside);
    args.collect(norm.unbiased);
    args.collect(norm.llama());
    args.collect(constants_.bias_dtype.value_or(at::ScalarType::Undefined));
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using torch::dynamo::autograd::IValuePacker;
    for (SavedVariable* saved : saved_variables()) swap.before(*saved);
    swap.before(normalized_shape_);
    torch::dynamo::autograd::PackedArgs packed;
    for (const SavedVariable* saved : saved_variables()) packed.pack(saved->unpack());
    packed.pack(normalized_shape_);
    const Mask wanted = mask();
    packed.pack(std::vector<bool>(wanted.begin(), wanted.end()));
    const std::vector<at::TypePtr> types{at::TensorType::get(),
                                         at::TensorType::get(),
                                         at::TensorType::get(),
                                         at::TensorType::get(),
                                         IValuePacker<std::vector<c10::SymInt>>::packed_type(),
                                         IValuePacker<std::vector<bool>>::packed_type()};
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string bound = compiler->bind_function(
        swap.get_py_compiler(), name(),
        [constants = constants_](const variable_list& traced_grads,
                                 const std::vector<c10::IValue>& values) {
          torch::dynamo::autograd::PackedArgs args(values);
          const auto input = args.unpack<Tensor>(), weight = args.unpack<Tensor>();
          const auto mean = args.unpack<Tensor>(), rstd = args.unpack<Tensor>();
          const auto shape = args.unpack<std::vector<c10::SymInt>>();
          const auto wanted_list = args.unpack<std::vector<bool>>();
          if (!traced_grads[0].defined()) return variable_list(3);
          return constants.gradients(traced_grads[0], input, shape, mean, rstd, weight,
                                     {wanted_list[0], wanted_list[1], wanted_list[2]});
        },
        types, /*is_custom_function=*/true);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
    variable_list result = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", bound, grads, packed.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(metadata));
    for (SavedVariable* saved : saved_variables()) swap.after(*saved);
    swap.after(normalized_shape_);
    return result;
  }

 private:
  std::array<SavedVariable*, 4> saved_variables() { return {&input_, &weight_, &mean_, &rstd_}; }
  Mask mask() const {
    return {task_should_compute_output(0), task_should_compute_output(1),
            task_should_compute_output(2)};
  }

  BackwardConstants constants_;
  std::vector<c10::SymInt> normalized_shape_;
  SavedVariable input_, weight_, mean_, rstd_;
};

template <class... Args>
auto make_node(Args&&... args) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  return c10::make_intrusive<RowNormBackward>(std::forward<Args>(args)...);
#else
  return std::shared_ptr<RowNormBackward>(new RowNormBackward(std::forward<Args>(args)...),
                                          torch::autograd::deleteNode);
#endif
}

template <class... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

struct AutogradBackend {
  static c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys & c10::after_autograd_keyset;
  }

  static Tensor output(c10::DispatchKeySet keys, const Norm& norm, const ForwardInputs& in) {
    if (any_tangent(in.input, in.weight, in.bias) ||
        torch::autograd::compute_requires_grad(in.input, in.weight, in.bias)) {
      return std::get<0>(dispatch_forward(norm, in, std::nullopt, keys));
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_output(norm, in, below(keys));
  }

  static ThreeTensors forward(c10::DispatchKeySet keys, const Norm& norm, const ForwardInputs& in,
                              std::optional<at::ScalarType> out_dtype) {
    if (any_tangent(in.input, in.weight, in.bias)) return composite_forward(norm, in, out_dtype);
    const bool requires_grad = torch::autograd::compute_requires_grad(in.input, in.weight, in.bias);
    const auto node = requires_grad ? make_node(norm, in) : decltype(make_node(norm, in))();
    ThreeTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_forward(norm, in, out_dtype, below(keys));
    }();
    if (requires_grad) {
      torch::autograd::set_history(std::get<0>(result), node);
      node->save_statistics(std::get<1>(result), std::get<2>(result));
    }
    return result;
  }

  static ThreeTensors backward(c10::DispatchKeySet keys, const Norm& norm,
                               const BackwardInputs& in) {
    if (any_tangent(in.grad_output, in.input, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.input, in.weight)) {
      return composite_backward(norm, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_backward(norm, in, below(keys));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, Autograd, m) { Operators<AutogradBackend>::register_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  Operators<CompositeBackend>::register_on(m);
}

}  // namespace fusednorm
