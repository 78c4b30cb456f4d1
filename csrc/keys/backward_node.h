// The node that a norm's forward leaves in the autograd graph.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <string>
#include <vector>

#include "operators/operators.h"

namespace fusednorm {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// What a backward needs to know apart from what the node saves. It returns what the node has edges
/// for: the gradients of input, weight and bias, and behind the first that of a residual.
struct BackwardConstants {
  /// What makes a fused residual operator of a norm.
  struct Residual {
    double alpha;
    at::ScalarType input_dtype, residual_dtype;

    /// One tensor is the gradient of both addends.
    bool shares_gradient() const { return alpha == 1 && input_dtype == residual_dtype; }
  };

  Norm norm;
  std::optional<at::ScalarType> bias_dtype;
  std::optional<Residual> residual;

  explicit BackwardConstants(const Call& call);

  std::string name() const;
  /// What was normalized is an output of the forward: the sum.
  bool rows_are_output() const { return residual.has_value(); }
  /// What a compiled graph is cached by.
  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const;

  /// `rows` is what was normalized; `wanted` has a flag for each edge.
  variable_list gradients(const variable_list& grads, const Tensor& rows,
                          c10::SymIntArrayRef normalized_shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight,
                          const std::vector<bool>& wanted) const;
  /// The output was not used: the gradient of the sum, if any, is its own.
  variable_list without_grad_output(const variable_list& grads,
                                    const std::vector<bool>& wanted) const;

 private:
  Wanted wanted_of(const std::vector<bool>& edges) const;
};

/// The backward of a norm: keeps what was normalized (the input, or the sum of a fused residual
/// operator), the weight and the row statistics, nothing else.
class BackwardNode : public torch::autograd::Node {
 public:
  BackwardNode(const Call& call, torch::autograd::edge_list&& edges)
      : constants_(call),
        normalized_shape_(call.normalized_shape.begin(), call.normalized_shape.end()),
        rows_(constants_.rows_are_output() ? Tensor() : *call.input, /*is_output=*/false),
        weight_(*call.weight, /*is_output=*/false) {
    set_next_edges(std::move(edges));
  }

  /// What forward returned, once its history is set. The sum refers back to this node: as an output
  /// it is kept without a cycle.
  void save_results(const Outputs& made) {
    if (constants_.rows_are_output()) rows_ = SavedVariable(made.residual_out, /*is_output=*/true);
    mean_ = SavedVariable(made.mean, /*is_output=*/false);
    rstd_ = SavedVariable(made.rstd, /*is_output=*/false);
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

  BackwardConstants constants_;
  std::vector<c10::SymInt> normalized_shape_;
  SavedVariable rows_, weight_, mean_, rstd_;
};

inline auto make_node(const Call& call, torch::autograd::edge_list&& edges) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  return c10::make_intrusive<BackwardNode>(call, std::move(edges));
#else
  return std::shared_ptr<BackwardNode>(new BackwardNode(call, std::move(edges)),
                                       torch::autograd::deleteNode);
#endif
}

}  // namespace fusednorm
