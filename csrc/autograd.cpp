// The Autograd key: a hand-written node around the forward operators; ATen arithmetic
// (composites.h) for what the kernels do not compute (tangents, derivatives of backward) and inside
// vmap.
//
// Not torch::autograd::Function: torch.func refuses it, it has no jvp, and it costs 13 % of a small
// forward + backward. Both `_forward` and `_backward` have their own Autograd kernel, since
// functorch levels re-enter autograd on the inner operator: without it, hessians were silently
// wrong.
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include "composites.h"

namespace fusednorm {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// ---- The node ----

/// What makes a fused residual operator of a norm.
struct Add {
  double alpha;
  at::ScalarType input_dtype, residual_dtype;

  /// One tensor is the gradient of both addends.
  bool shares_gradient() const { return alpha == 1 && input_dtype == residual_dtype; }
};

/// Which gradients are wanted: of input, residual (of a fused residual operator), weight and bias.
using Mask = std::array<bool, 4>;

/// What a backward needs to know apart from tensors. It returns what the node has edges for: four
/// gradients with `add`, and without it three.
struct BackwardConstants {
  Norm norm;
  std::optional<at::ScalarType> bias_dtype;
  std::optional<Add> add;

  /// `rows` is what was normalized: the input, or the sum.
  variable_list gradients(const variable_list& grads, const Tensor& rows,
                          c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight, Mask mask) const {
    OptionalTensor bias;
    if (mask[3] && bias_dtype != (weight.defined() ? weight : rows).scalar_type()) {
      // Only its dtype is read: one element, expanded.
      bias = at::empty({1}, rows.options().dtype(*bias_dtype)).expand_symint(normalized_shape);
    }
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    if (!add) {
      auto [grad_input, grad_weight, grad_bias] =
          dispatch_backward(norm, {grads[0],
                                   rows,
                                   normalized_shape,
                                   mean,
                                   rstd,
                                   optional(weight),
                                   bias,
                                   {mask[0], mask[2], mask[3]}});
      return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
    }
    const bool shared = add->shares_gradient();
    auto [grad_input, grad_residual, grad_weight, grad_bias] = dispatch_add_backward(
        norm, {grads[0],
               optional(grads[1]),
               rows,
               normalized_shape,
               mean,
               rstd,
               optional(weight),
               bias,
               add->input_dtype,
               {mask[0] || (shared && mask[1]), mask[1] && !shared, mask[2], mask[3]},
               add->alpha});
    if (shared && mask[1]) grad_residual = grad_input;
    if (!mask[0]) grad_input = Tensor();
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight),
            std::move(grad_bias)};
  }

  /// The output was not used: the gradient of the sum, if any, is its own. A copy of it, since what
  /// autograd hands out must not be what the caller handed in.
  variable_list without_grad_output(const variable_list& grads, Mask mask) const {
    if (!add) return variable_list(3);
    variable_list result(4);
    if (!grads[1].defined()) return result;
    const auto copy_to = [&](at::ScalarType dtype) {
      return grads[1].to(dtype, /*non_blocking=*/false, /*copy=*/true,
                         at::MemoryFormat::Contiguous);
    };
    if (mask[0]) result[0] = copy_to(add->input_dtype);
    if (mask[1]) {
      if (add->alpha != 1) {
        result[1] = (grads[1] * add->alpha).contiguous();
      } else {
        result[1] = mask[0] && add->shares_gradient() ? result[0] : copy_to(add->residual_dtype);
      }
    }
    return result;
  }
};

/// The backward of all four operators. Keeps what was normalized (the input, or the sum), the
/// weight and the row statistics, nothing else.
class RowNormBackward : public torch::autograd::Node {
 public:
  RowNormBackward(const Norm& norm, const ForwardInputs& in) : RowNormBackward(norm, in, {}) {
    rows_ = SavedVariable(in.input, /*is_output=*/false);
    set_next_edges(torch::autograd::collect_next_edges(in.input, in.weight, in.bias));
  }

  RowNormBackward(const Norm& norm, const AddInputs& in)
      : RowNormBackward(norm, in.of(in.residual),
                        Add{in.alpha, in.input.scalar_type(), in.residual.scalar_type()}) {
    set_next_edges(torch::autograd::collect_next_edges(in.input, in.residual, in.weight, in.bias));
  }

  /// What forward returned, once its history is set. The sum refers back to this node: as an output
  /// it is kept without a cycle.
  void save_results(const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
    if (is_add()) rows_ = SavedVariable(residual_out, /*is_output=*/true);
    mean_ = SavedVariable(mean, /*is_output=*/false);
    rstd_ = SavedVariable(rstd, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return constants_.without_grad_output(grads, mask());
    return constants_.gradients(grads, rows_.unpack(getptr()), normalized_shape_, mean_.unpack(),
                                rstd_.unpack(), weight_.unpack(), mask());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : saved_variables()) saved->reset_data();
  }

  std::string name() const override {
    const std::string norm = constants_.norm.centered ? "LayerNormBackward" : "RmsNormBackward";
    return is_add() ? "Add" + norm : norm;
  }

  // Compiled autograd: what a graph is cached by, and how this node is traced. The call goes into
  // the graph as one function of tensors: while tracing, incoming gradients are dummies of no true
  // shape.

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(rows_, /*is_output=*/is_add());
    for (const SavedVariable* saved : {&weight_, &mean_, &rstd_}) {
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
    args.collect(is_add());
    const Add none{0, at::ScalarType::Undefined, at::ScalarType::Undefined};
    const Add add = constants_.add.value_or(none);
    args.collect(add.alpha);
    args.collect(add.input_dtype);
    args.collect(add.residual_dtype);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using torch::dynamo::autograd::IValuePacker;
    for (SavedVariable* saved : saved_variables()) swap.before(*saved);
    swap.before(normalized_shape_);
    torch::dynamo::autograd::PackedArgs packed;
    for (const SavedVariable* saved : saved_variables()) packed.pack(saved->unpack(getptr()));
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
          const auto rows = args.unpack<Tensor>(), weight = args.unpack<Tensor>();
          const auto mean = args.unpack<Tensor>(), rstd = args.unpack<Tensor>();
          const auto shape = args.unpack<std::vector<c10::SymInt>>();
          const auto list = args.unpack<std::vector<bool>>();
          const Mask mask{list[0], list[1], list[2], list[3]};
          if (!traced_grads[0].defined()) return constants.without_grad_output(traced_grads, mask);
          return constants.gradients(traced_grads, rows, shape, mean, rstd, weight, mask);
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
  RowNormBackward(const Norm& norm, const ForwardInputs& in, std::optional<Add> add)
      : constants_{norm, std::nullopt, add},
        normalized_shape_(in.normalized_shape.begin(), in.normalized_shape.end()),
        weight_(in.weight, /*is_output=*/false) {
    constants_.norm.op = add ? (norm.centered ? "add_layer_norm_backward" : "add_rms_norm_backward")
                             : (norm.centered ? "layer_norm_backward" : "rms_norm_backward");
    // The caller's string may go away.
    constants_.norm.casting_mode = norm.llama() ? "llama" : "default";
    if (present(in.bias)) constants_.bias_dtype = in.bias->scalar_type();
  }

  bool is_add() const { return constants_.add.has_value(); }
  std::array<SavedVariable*, 4> saved_variables() { return {&rows_, &weight_, &mean_, &rstd_}; }
  Mask mask() const {
    const size_t parameters = is_add() ? 2 : 1;
    return {task_should_compute_output(0), is_add() && task_should_compute_output(1),
            task_should_compute_output(parameters), task_should_compute_output(parameters + 1)};
  }

  BackwardConstants constants_;
  std::vector<c10::SymInt> normalized_shape_;
  SavedVariable rows_, weight_, mean_, rstd_;
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
    if (any_tangent(in.input, in.weight, in.bias)) {
      return CompositeBackend::forward(keys, norm, in, out_dtype);
    }
    const bool requires_grad = torch::autograd::compute_requires_grad(in.input, in.weight, in.bias);
    const auto node = requires_grad ? make_node(norm, in) : decltype(make_node(norm, in))();
    ThreeTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_forward(norm, in, out_dtype, below(keys));
    }();
    if (requires_grad) {
      torch::autograd::set_history(std::get<0>(result), node);
      node->save_results(Tensor(), std::get<1>(result), std::get<2>(result));
    }
    return result;
  }

  static ThreeTensors backward(c10::DispatchKeySet keys, const Norm& norm,
                               const BackwardInputs& in) {
    if (any_tangent(in.grad_output, in.input, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.input, in.weight)) {
      return CompositeBackend::backward(keys, norm, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_backward(norm, in, below(keys));
  }

  static TwoTensors add(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    if (any_tangent(in.input, in.residual, in.weight, in.bias) ||
        torch::autograd::compute_requires_grad(in.input, in.residual, in.weight, in.bias)) {
      auto [output, residual_out, mean, rstd] = dispatch_add_forward(norm, in, std::nullopt, keys);
      return {std::move(output), std::move(residual_out)};
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add(norm, in, below(keys));
  }

  static FourTensors add_forward(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in,
                                 std::optional<at::ScalarType> out_dtype) {
    if (any_tangent(in.input, in.residual, in.weight, in.bias)) {
      return CompositeBackend::add_forward(keys, norm, in, out_dtype);
    }
    const bool requires_grad =
        torch::autograd::compute_requires_grad(in.input, in.residual, in.weight, in.bias);
    const auto node = requires_grad ? make_node(norm, in) : decltype(make_node(norm, in))();
    FourTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_add_forward(norm, in, out_dtype, below(keys));
    }();
    if (requires_grad) {
      const auto& [output, residual_out, mean, rstd] = result;
      torch::autograd::set_history(variable_list{output, residual_out}, node);
      node->save_results(residual_out, mean, rstd);
    }
    return result;
  }

  static FourTensors add_backward(c10::DispatchKeySet keys, const Norm& norm,
                                  const AddBackwardInputs& in) {
    if (any_tangent(in.grad_output, in.grad_residual_out, in.residual_out, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.grad_residual_out,
                                               in.residual_out, in.weight)) {
      return CompositeBackend::add_backward(keys, norm, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add_backward(norm, in, below(keys));
  }

  /// For inference: autograd would need the residual as it was.
  static Tensor add_in_place(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
    const auto check = [&](const char* argument, const OptionalTensor& tensor) {
      if (!present(tensor)) return;
      TORCH_CHECK(!any_tangent(tensor) && !torch::autograd::compute_requires_grad(tensor),
                  "fusednorm::", norm.op, ": ", argument,
                  ": expected no gradient to be asked for (the residual is updated in place, for "
                  "inference), got a tensor ",
                  any_tangent(tensor) ? "with a tangent" : "that requires grad", ": use ",
                  norm.centered ? "add_layer_norm" : "add_rms_norm", ", or torch.no_grad()");
    };
    check("input", in.input);
    check("residual", in.residual);
    check("weight", in.weight);
    check("bias", in.bias);
    at::AutoDispatchBelowAutograd guard;
    return dispatch_add_in_place(norm, in, below(keys));
  }
};

/// The ADInplaceOrView key, for the operators that write: what was saved of the residual before is
/// known to have changed.
Tensor bump_version(c10::DispatchKeySet keys, const Norm& norm, const AddInputs& in) {
  Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_add_in_place(norm, in, keys & c10::after_ADInplaceOrView_keyset);
  }();
  torch::autograd::impl::bump_version(in.residual);
  return output;
}

struct InPlaceBackend {
  static constexpr auto add_in_place = &bump_version;
};

}  // namespace

TORCH_LIBRARY_IMPL(fusednorm, Autograd, m) { register_operators<AutogradBackend>(m); }
TORCH_LIBRARY_IMPL(fusednorm, ADInplaceOrView, m) {
  m.impl("add_layer_norm_", TORCH_FN(AddOperators<InPlaceBackend>::add_layer_norm_));
  m.impl("add_rms_norm_", TORCH_FN(AddOperators<InPlaceBackend>::add_rms_norm_));
}
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  register_operators<CompositeBackend>(m);
}

}  // namespace fusednorm
