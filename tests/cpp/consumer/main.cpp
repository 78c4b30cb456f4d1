// Trains one step of a small model with fusednorm, in C++ alone, and prints the gradients. Fails
// where they are not those of LibTorch's own norms.
#include <fusednorm/fusednorm.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({8, 4});
  torch::nn::Linear linear(4, 6);
  torch::Tensor weight = torch::ones(6, torch::requires_grad());
  torch::Tensor bias = torch::zeros(6, torch::requires_grad());
  torch::Tensor gain = torch::ones(6, torch::requires_grad());
  std::vector<torch::Tensor> parameters = linear->parameters();
  parameters.insert(parameters.end(), {weight, bias, gain});
  const torch::Tensor target = torch::randn({8, 6});

  const auto loss_with = [&](bool ours) {
    torch::Tensor h = linear(x);
    h = ours ? fusednorm::layer_norm(h, {6}, weight, bias)
             : torch::layer_norm(h, {6}, weight, bias, 1e-5);
    h = ours ? fusednorm::rms_norm(h.tanh(), {6}, gain, 1e-6)
             : torch::rms_norm(h.tanh(), {6}, gain, 1e-6);
    return torch::mse_loss(h, target);
  };
  const auto expected = torch::autograd::grad({loss_with(false)}, parameters);

  torch::optim::SGD optimizer(parameters, 0.1);
  const torch::Tensor before = loss_with(true);
  before.backward();
  const char* names[] = {"linear.weight", "linear.bias", "weight", "bias", "gain"};
  double largest = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::cout << "grad of " << names[i] << ":\n" << parameters[i].grad() << "\n";
    largest = std::max(largest, (parameters[i].grad() - expected[i]).abs().max().item<double>());
  }
  optimizer.step();
  const double loss_before = before.item<double>(), loss_after = loss_with(true).item<double>();
  std::cout << "kernels " << fusednorm::cpu_kernels() << ", loss " << loss_before << " -> "
            << loss_after << ", largest difference from LibTorch's gradients " << largest << "\n";
  // Gradients of about 0.1 through two norms in fp32: some ulps of 1.
  return loss_after < loss_before && largest < 1e-6 ? 0 : 1;
}
