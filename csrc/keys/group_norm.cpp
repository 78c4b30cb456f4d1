// GroupNorm on every key but the CPU's: schemas, checks, Meta, Autograd, and the composites that
// serve CUDA, vmap, tangents and derivatives of backward.
#include "operators/group_norm.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "backward_node.h"
#include "operators/checks.h"
#include "operators/dispatch.h"
#include "fusednorm.h"

TORCH_LIBRARY_FRAGMENT(fusednorm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5) -> Tensor",
      tags);
  m.def(
      "group_norm_forward(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-5) -> (Tensor output, Tensor mean, Tensor rstd)",
      tags);
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, int num_groups, Tensor mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, float eps, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)",
      tags);
}

namespace fusednorm {

// ---- Checks ----

void check_forward(const GroupNorm& group, const ForwardInputs& in) {
  const Norm& norm = group.norm;
  checks::check_tensor(norm, "input", in.input);
  TORCH_CHECK(in.input.dim() >= 2, "fusednorm::", norm.op,
              ": input: expected shape [N, C, *] (2 dimensions at least), got ",
              in.input.sym_sizes());
  const auto channels = in.input.sym_size(1);
  TORCH_CHECK(group.num_groups > 0, "fusednorm::", norm.op,
              ": num_groups: expected a positive number, got ", group.num_groups);
  TORCH_CHECK((channels % group.num_groups).sym_eq(0).expect_true(__FILE__, __LINE__),
              "fusednorm::", norm.op, ": num_groups: expected a divisor of the ", channels,
              " channels of an input of shape ", in.input.sym_sizes(), ", got ", group.num_groups);
  for (const auto& [name, parameter] :
       {std::pair{"weight", &in.weight}, std::pair{"bias", &in.bias}}) {
    if (present(*parameter)) {
      checks::check_beside(norm, name, **parameter, in.input, {channels}, "the input's channels");
    }
  }
  TORCH_CHECK(std::isfinite(*norm.eps), "fusednorm::", norm.op,
              ": eps: expected a finite number, got ", *norm.eps);
}

void check_backward(const GroupNorm& group, const BackwardInputs& in) {
  const Norm& norm = group.norm;
  check_forward(group, {in.input, {}, in.weight, in.bias});
  checks::check_beside(norm, "grad_output", in.grad_output, in.input, in.input.sym_sizes(),
                       "the input's shape");
  TORCH_CHECK(in.grad_output.scalar_type() == in.input.scalar_type(), "fusednorm::", norm.op,
              ": grad_output: expected the input's dtype ", in.input.scalar_type(), ", got ",
              in.grad_output.scalar_type());
  const auto acc_dtype = accumulation_dtype(in.input.scalar_type());
  for (const auto& [name, statistic] : {std::pair{"mean", &in.mean}, std::pair{"rstd", &in.rstd}}) {
    checks::check_beside(norm, name, *statistic, in.input, {in.input.sym_size(0), group.num_groups},
                         "[N, num_groups]");
    TORCH_CHECK(statistic->scalar_type() == acc_dtype, "fusednorm::", norm.op, ": ", name,
                ": expected dtype ", acc_dtype, ", got ", statistic->scalar_type());
  }
}

namespace {

// ---- Meta: shapes, dtypes and memory formats, by the same checks ----

struct MetaBackend {
  static Tensor like(const Tensor& input) {
    return at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format());
  }

  static Tensor output(c10::DispatchKeySet, const GroupNorm& group, const ForwardInputs& in) {
    check_forward(group, in);
    return like(in.input);
  }

  static ThreeTensors forward(c10::DispatchKeySet keys, const GroupNorm& group,
                              const ForwardInputs& in) {
    Tensor output = MetaBackend::output(keys, group, in);
    const auto statistic = [&] {
      return at::empty_symint({in.input.sym_size(0), group.num_groups},
                              in.input.options().dtype(accumulation_dtype(output.scalar_type())));
    };
    return {std::move(output), statistic(), statistic()};
  }

  static ThreeTensors backward(c10::DispatchKeySet, const GroupNorm& group,
                               const BackwardInputs& in) {
    check_backward(group, in);
    const auto channels = [&](bool wanted, at::ScalarType dtype) {
      return wanted ? at::empty_symint({in.input.sym_size(1)}, in.input.options().dtype(dtype))
                    : Tensor();
    };
    return {in.output_mask[0] ? like(in.input) : Tensor(),
            channels(in.output_mask[1], checks::grad_weight_dtype(in)),
            channels(in.output_mask[2], checks::grad_bias_dtype(in))};
  }
};

// ---- Calls into the dispatcher ----

using Schema = GroupOperators<MetaBackend>;

Tensor dispatch_output(const GroupNorm& group, const ForwardInputs& in, Keys keys = {}) {
  static const auto handle = find("fusednorm::group_norm", Schema::group_norm);
  return call(handle, keys, in.input, group.num_groups, in.weight, in.bias, *group.norm.eps);
}

ThreeTensors dispatch_forward(const GroupNorm& group, const ForwardInputs& in, Keys keys = {}) {
  static const auto handle = find("fusednorm::group_norm_forward", Schema::group_norm_forward);
  return call(handle, keys, in.input, group.num_groups, in.weight, in.bias, *group.norm.eps);
}

ThreeTensors dispatch_backward(const GroupNorm& group, const BackwardInputs& in, Keys keys = {}) {
  static const auto handle = find("fusednorm::group_norm_backward", Schema::group_norm_backward);
  return call(handle, keys, in.grad_output, in.input, group.num_groups, in.mean, in.rstd, in.weight,
              in.bias, *group.norm.eps, in.output_mask);
}

// ---- Composites: LayerNorm of the groups as rows, then ATen for weight and bias ----
//
// Differentiable to any order, since layer_norm and its backward are. As the CUDA key they cost
// one write and one read of the normalized rows in fp32 more than a kernel of its own would
// (forward 12 bytes an fp32 element in place of 8), and in channels last a copy on each side.

/// [N, G, C / G * positions], channels first whatever the memory format.
Tensor groups_of(const GroupNorm& group, const Tensor& tensor) {
  c10::SymInt cols = tensor.sym_size(1) / group.num_groups;
  for (int64_t d = 2; d < tensor.dim(); ++d) cols *= tensor.sym_size(d);
  return tensor.reshape_symint({tensor.sym_size(0), group.num_groups, cols});
}

/// `tensor`, laid out as the input. By turning dimensions: vmap takes no memory format but the
/// contiguous one.
Tensor in_format_of(const Tensor& input, const Tensor& tensor) {
  if (input.suggest_memory_format() == at::MemoryFormat::Contiguous) return tensor.contiguous();
  return tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}

struct CompositeBackend {
  static at::ScalarType wide(const Tensor& input) {
    return accumulation_dtype(input.scalar_type());
  }
  static Tensor per_channel(const Tensor& parameter, const Tensor& input) {
    std::vector<c10::SymInt> shape(input.dim(), 1);
    shape[1] = input.sym_size(1);
    return parameter.to(wide(input)).reshape_symint(shape);
  }
  /// x_hat of the input's shape, in the accumulation type, with mean and rstd.
  static ThreeTensors normalized(const GroupNorm& group, const Tensor& input) {
    const Tensor rows = groups_of(group, input);
    const auto cols = rows.sym_size(2);
    auto [x_hat, mean, rstd] =
        fusednorm::dispatch_forward(group.norm, {rows, cols, {}, {}}, wide(input));
    return {x_hat.reshape_symint(input.sym_sizes()), mean, rstd};
  }

  static ThreeTensors forward(c10::DispatchKeySet, const GroupNorm& group,
                              const ForwardInputs& in) {
    check_forward(group, in);
    auto [output, mean, rstd] = normalized(group, in.input);
    if (present(in.weight)) output = output * per_channel(*in.weight, in.input);
    if (present(in.bias)) output = output + per_channel(*in.bias, in.input);
    return {in_format_of(in.input, output.to(in.input.scalar_type())), mean, rstd};
  }

  static Tensor output(c10::DispatchKeySet keys, const GroupNorm& group, const ForwardInputs& in) {
    return std::get<0>(forward(keys, group, in));
  }

  static ThreeTensors backward(c10::DispatchKeySet, const GroupNorm& group,
                               const BackwardInputs& in) {
    check_backward(group, in);
    const Tensor grad_output = in.grad_output.to(wide(in.input));
    Tensor grad_input, grad_weight, grad_bias;
    if (in.output_mask[0]) {
      Tensor g = grad_output;
      if (present(in.weight)) g = g * per_channel(*in.weight, in.input);
      const Tensor rows = groups_of(group, in.input);
      const auto cols = rows.sym_size(2);
      Norm norm = group.norm;
      norm.op = "layer_norm_backward";
      grad_input = std::get<0>(fusednorm::dispatch_backward(
          norm, {groups_of(group, g), rows, cols, in.mean, in.rstd, {}, {}, {true, false, false}}));
      grad_input = in_format_of(in.input, grad_input.reshape_symint(in.input.sym_sizes()));
    }
    const auto per_channel_sum = [&](const Tensor& values, at::ScalarType dtype) {
      std::vector<int64_t> dims{0};
      for (int64_t d = 2; d < in.input.dim(); ++d) dims.push_back(d);
      return values.sum(dims).to(dtype);
    };
    if (in.output_mask[1]) {
      const Tensor x_hat = std::get<0>(normalized(group, in.input));
      grad_weight = per_channel_sum(grad_output * x_hat, checks::grad_weight_dtype(in));
    }
    if (in.output_mask[2]) {
      grad_bias = per_channel_sum(grad_output, checks::grad_bias_dtype(in));
    }
    return {grad_input, grad_weight, grad_bias};
  }
};

// ---- Autograd ----

struct BackwardConstants {
  GroupNorm group;
  std::optional<at::ScalarType> bias_dtype;

  std::string name() const { return "GroupNormBackward"; }
  bool rows_are_output() const { return false; }

  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    args.collect(group.num_groups);
    args.collect(*group.norm.eps);
    args.collect(bias_dtype.value_or(at::ScalarType::Undefined));
  }

  variable_list without_grad_output(const variable_list&, const std::vector<bool>&) const {
    return variable_list(3);
  }

  variable_list gradients(const variable_list& grads, const Tensor& input, c10::SymIntArrayRef,
                          const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                          const std::vector<bool>& wanted) const {
    OptionalTensor bias;
    if (wanted[2] && bias_dtype != (weight.defined() ? weight : input).scalar_type()) {
      // Only its dtype is read: one element, expanded.
      bias = at::empty({1}, input.options().dtype(*bias_dtype)).expand_symint(input.sym_size(1));
    }
    auto [grad_input, grad_weight, grad_bias] =
        dispatch_backward(group, {grads[0],
                                  input,
                                  {},
                                  mean,
                                  rstd,
                                  weight.defined() ? OptionalTensor(weight) : std::nullopt,
                                  bias,
                                  {wanted[0], wanted[1], wanted[2]}});
    return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
  }
};

struct AutogradBackend {
  static c10::DispatchKeySet below(c10::DispatchKeySet keys) {
    return keys & c10::after_autograd_keyset;
  }
  static auto node_of(const GroupNorm& group, const ForwardInputs& in) {
    std::optional<at::ScalarType> bias_dtype;
    if (present(in.bias)) bias_dtype = in.bias->scalar_type();
    return make_node(
        BackwardConstants{{"group_norm_backward", group.num_groups, *group.norm.eps}, bias_dtype},
        in.normalized_shape, in.input, in.weight,
        torch::autograd::collect_next_edges(in.input, in.weight, in.bias));
  }

  static Tensor output(c10::DispatchKeySet keys, const GroupNorm& group, const ForwardInputs& in) {
    if (any_tangent(in.input, in.weight, in.bias) ||
        torch::autograd::compute_requires_grad(in.input, in.weight, in.bias)) {
      return std::get<0>(dispatch_forward(group, in, keys));
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_output(group, in, below(keys));
  }

  static ThreeTensors forward(c10::DispatchKeySet keys, const GroupNorm& group,
                              const ForwardInputs& in) {
    if (any_tangent(in.input, in.weight, in.bias)) {
      return CompositeBackend::forward(keys, group, in);
    }
    const bool requires_grad = torch::autograd::compute_requires_grad(in.input, in.weight, in.bias);
    const auto node = requires_grad ? node_of(group, in) : decltype(node_of(group, in))();
    ThreeTensors result = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return dispatch_forward(group, in, below(keys));
    }();
    if (requires_grad) {
      torch::autograd::set_history(std::get<0>(result), node);
      node->save_results(Tensor(), std::get<1>(result), std::get<2>(result));
    }
    return result;
  }

  static ThreeTensors backward(c10::DispatchKeySet keys, const GroupNorm& group,
                               const BackwardInputs& in) {
    if (any_tangent(in.grad_output, in.input, in.weight) ||
        torch::autograd::compute_requires_grad(in.grad_output, in.input, in.weight)) {
      return CompositeBackend::backward(keys, group, in);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatch_backward(group, in, below(keys));
  }
};

// ---- AutocastCUDA ----

#if defined(FUSEDNORM_WITH_CUDA)
/// fp32 under autocast, as torch's; its input is widened first, for there is no kernel that would.
struct AutocastBackend {
  static Tensor widened(const Tensor& input) {
    return at::isReducedFloatingType(input.scalar_type()) ? input.to(at::kFloat) : input;
  }
  static Tensor output(c10::DispatchKeySet, const GroupNorm& group, const ForwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_output(group, {widened(in.input), {}, in.weight, in.bias});
  }
  static ThreeTensors forward(c10::DispatchKeySet, const GroupNorm& group,
                              const ForwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_forward(group, {widened(in.input), {}, in.weight, in.bias});
  }
  static ThreeTensors backward(c10::DispatchKeySet, const GroupNorm& group,
                               const BackwardInputs& in) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return dispatch_backward(group, in);
  }
};
#endif

}  // namespace

// ---- The public C++ function ----

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  return dispatch_output(GroupNorm("group_norm", num_groups, eps), {input, {}, weight, bias});
}

TORCH_LIBRARY_IMPL(fusednorm, Meta, m) { GroupOperators<MetaBackend>::register_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, Autograd, m) { GroupOperators<AutogradBackend>::register_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, FuncTorchBatchedDecomposition, m) {
  GroupOperators<CompositeBackend>::register_on(m);
}
#if defined(FUSEDNORM_WITH_CUDA)
TORCH_LIBRARY_IMPL(fusednorm, CUDA, m) { GroupOperators<CompositeBackend>::register_on(m); }
TORCH_LIBRARY_IMPL(fusednorm, AutocastCUDA, m) { GroupOperators<AutocastBackend>::register_on(m); }
#endif

}  // namespace fusednorm
