// The node that a norm's forward leaves in the autograd graph.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <string>

#include "ops.h"

namespace fusednorm {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Mask = std::array<bool, 3>;

inline bool present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// The backward of one kind of norm. Keeps the input, the weight and the row statistics, nothing
/// else. Constants has what a backward needs to know apart from tensors:
///     const char* name() const
///     void collect(CompiledNodeArgs&) const     what a compiled graph is cached by
///     variable_list gradients(grad_output, input, normalized_shape, mean, rstd, weight, Mask)
///     const
template <class Constants>
class NormBackward : public torch::autograd::Node {
 public:
  NormBackward(Constants constants, const ForwardInputs& in)
      : constants_(std::move(constants)),
        normalized_shape_(in.normalized_shape.begin(), in.normalized_shape.end()),
        input_(in.input, /*is_output=*/false),
        weight_(in.weight, /*is_output=*/false) {
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

  std::string name() const override { return constants_.name(); }

  // Compiled autograd: what a graph is cached by, and how this node is traced. The call goes into
  // the graph as one function of tensors: while tracing, incoming gradients are dummies of no true
  // shape.

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SavedVariable* saved : {&input_, &weight_, &mean_, &rstd_}) {
      args.collect(*saved, /*is_output=*/false);
    }
    args.collect(normalized_shape_);
    constants_.collect(args);
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

  Constants constants_;
  std::vector<c10::SymInt> normalized_shape_;
  SavedVariable input_, weight_, mean_, rstd_;
};

template <class Constants>
auto make_node(Constants constants, const ForwardInputs& in) {
  using Node = NormBackward<Constants>;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  return c10::make_intrusive<Node>(std::move(constants), in);
#else
  return std::shared_ptr<Node>(new Node(std::move(constants), in), torch::autograd::deleteNode);
#endif
}

template <class... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

}  // namespace fusednorm
