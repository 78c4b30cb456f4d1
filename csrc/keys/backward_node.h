// The node that a norm's forward leaves in the autograd graph.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <string>
#include <vector>

#include "operators/ops.h"

namespace fusednorm {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The backward of a norm: keeps what was normalized (the input, or the sum of a fused residual
/// operator), the weight and the row statistics, nothing else. Constants is what a backward needs
/// to know apart from these:
///     std::string name() const
///     bool rows_are_output() const    what was normalized is an output of the forward
///     void collect(CompiledNodeArgs&) const    what a compiled graph is cached by
///     variable_list gradients(grads, rows, normalized_shape, mean, rstd, weight, wanted) const
///     variable_list without_grad_output(grads, wanted) const    where the output was not used
/// where `wanted` has a flag for each edge, and gradients returns as many tensors.
template <class Constants>
class BackwardNode : public torch::autograd::Node {
 public:
  /// `rows`: undefined where they are an output.
  BackwardNode(Constants constants, c10::SymIntArrayRef normalized_shape, const Tensor& rows,
               const OptionalTensor& weight, torch::autograd::edge_list&& edges)
      : constants_(std::move(constants)),
        normalized_shape_(normalized_shape.begin(), normalized_shape.end()),
        rows_(rows, /*is_output=*/false),
        weight_(weight, /*is_output=*/false) {
    set_next_edges(std::move(edges));
  }

  /// What forward returned, once its history is set. The sum refers back to this node: as an output
  /// it is kept without a cycle.
  void save_results(const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
    if (constants_.rows_are_output()) rows_ = SavedVariable(residual_out, /*is_output=*/true);
    mean_ = SavedVariable(mean, /*is_output=*/false);
    rstd_ = SavedVariable(rstd, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return constants_.without_grad_output(grads, wanted());
    return constants_.gradients(grads, rows_.unpack(getptr()), normalized_shape_, mean_.unpack(),
                                rstd_.unpack(), weight_.unpack(), wanted());
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
    args.collect(rows_, /*is_output=*/constants_.rows_are_output());
    for (const SavedVariable* saved : {&weight_, &mean_, &rstd_}) {
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
    for (const SavedVariable* saved : saved_variables()) packed.pack(saved->unpack(getptr()));
    packed.pack(normalized_shape_);
    packed.pack(wanted());
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
          const auto wanted = args.unpack<std::vector<bool>>();
          if (!traced_grads[0].defined()) {
            return constants.without_grad_output(traced_grads, wanted);
          }
          return constants.gradients(traced_grads, rows, shape, mean, rstd, weight, wanted);
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
  std::array<SavedVariable*, 4> saved_variables() { return {&rows_, &weight_, &mean_, &rstd_}; }
  std::vector<bool> wanted() const {
    std::vector<bool> result;
    for (size_t i = 0; i < num_outputs(); ++i) result.push_back(task_should_compute_output(i));
    return result;
  }

  Constants constants_;
  std::vector<c10::SymInt> normalized_shape_;
  SavedVariable rows_, weight_, mean_, rstd_;
};

template <class Constants, class... Args>
auto make_node(Constants constants, Args&&... args) {
  using Node = BackwardNode<Constants>;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  return c10::make_intrusive<Node>(std::move(constants), std::forward<Args>(args)...);
#else
  return std::shared_ptr<Node>(new Node(std::move(constants), std::forward<Args>(args)...),
                               torch::autograd::deleteNode);
#endif
}

template <class... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

}  // namespace fusednorm
