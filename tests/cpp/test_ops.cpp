// The operators through the dispatcher and the public header, in a program without Python.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "fusednorm.h"

namespace {

using at::Tensor;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Ops, GradientsReachEveryInput) {
  // field report B01: every route keeps the graph.
  const Tensor x =
      at::tensor({1.f, 2.f, 4.f, 3.f, 0.f, 5.f, 2.f, 1.f}).reshape({1, 2, 4}).requires_grad_();
  const Tensor c =
      at::tensor({1.f, 2.f, -1.f, 3.f});  // else the gradient of x is 0, as LayerNorm's is
  const Tensor w = at::ones({4}).requires_grad_(), b = at::zeros({4}).requires_grad_();
  const Tensor y = fusednorm::layer_norm(x, {4}, w, b);
  ASSERT_TRUE(y.requires_grad());
  EXPECT_EQ(y.grad_fn()->name(), "LayerNormBackward");
  const auto grads = torch::autograd::grad({(y * c).sum()}, {x, w, b});
  for (const Tensor& grad : grads) EXPECT_GT(grad.abs().max().item<double>(), 0.1);

  const Tensor r = fusednorm::rms_norm(x, {4}, w, 1e-6);
  ASSERT_TRUE(r.requires_grad());
  EXPECT_EQ(r.grad_fn()->name(), "RmsNormBackward");
  EXPECT_TRUE(at::allclose(r, at::rms_norm(x, {4}, w, 1e-6), 1e-5, 1e-6));
}

TEST(Ops, NoGradKeepsNoGraph) {
  const Tensor x = at::randn({3, 5}).requires_grad_();
  const Tensor with_graph = fusednorm::layer_norm(x, {5});
  at::NoGradGuard no_grad;
  const Tensor y = fusednorm::layer_norm(x, {5});
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(at::equal(y, with_graph));
}

TEST(Ops, ForwardThenBackwardIsAutograd) {
  const Tensor x = at::randn({2, 3, 8}, at::kDouble), w = at::randn({8}, at::kDouble);
  const Tensor g = at::randn({2, 3, 8}, at::kDouble);
  const auto [y, mean, rstd] = fusednorm::layer_norm_forward(x, {8}, w);
  EXPECT_EQ(mean.sizes(), (at::IntArrayRef{2, 3}));
  const auto [dx, dw, db] =
      fusednorm::layer_norm_backward(g, x, {8}, mean, rstd, w, {}, 1e-5, {true, true, false});
  EXPECT_FALSE(db.defined());
  const Tensor xr = x.detach().requires_grad_(), wr = w.detach().requires_grad_();
  const auto expected =
      torch::autograd::grad({at::layer_norm(xr, {8}, wr, {}, 1e-5)}, {xr, wr}, {g});
  EXPECT_TRUE(at::allclose(dx, expected[0], 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(dw, expected[1], 1e-10, 1e-12));

  const auto [z, r] = fusednorm::rms_norm_forward(x, {8}, w, 1e-6);
  const auto [dz, dzw, dzb] =
      fusednorm::rms_norm_backward(g, x, {8}, r, w, 1e-6, {true, true, false});
  EXPECT_FALSE(dzb.defined());
  const auto rms = torch::autograd::grad({at::rms_norm(xr, {8}, wr, 1e-6)}, {xr, wr}, {g});
  EXPECT_TRUE(at::allclose(dz, rms[0], 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(dzw, rms[1], 1e-10, 1e-12));
  const Tensor b = at::randn({8}, at::kDouble).requires_grad_();
  const Tensor shifted = fusednorm::rms_norm(x, {8}, w, 1e-6, {}, b);
  EXPECT_TRUE(at::allclose(shifted, z + b, 1e-12, 1e-12));
  EXPECT_TRUE(
      at::allclose(torch::autograd::grad({shifted}, {b}, {g})[0], g.sum({0, 1}), 1e-12, 1e-12));
}

TEST(Ops, ScaleNorm) {
  // Lengths 5 and 0.5, the second one clamped to 1: d/dg of the sum is 7/5 + 0.7.
  const Tensor x = at::tensor({3.0, 4.0, 0.3, 0.4}, at::kDouble).reshape({2, 2}).requires_grad_();
  const Tensor g = at::full({}, 2.0, at::kDouble).requires_grad_();
  const Tensor y = fusednorm::scale_norm(x, g, 1.0);
  const Tensor expected = at::tensor({1.2, 1.6, 0.6, 0.8}, at::kDouble).reshape({2, 2});
  EXPECT_TRUE(at::allclose(y, expected, 1e-14, 1e-14));
  const auto grads = torch::autograd::grad({y.sum()}, {x, g});
  const Tensor dx = at::tensor({0.064, -0.048, 2.0, 2.0}, at::kDouble).reshape({2, 2});
  EXPECT_TRUE(at::allclose(grads[0], dx, 1e-14, 1e-14));
  EXPECT_TRUE(at::allclose(grads[1], at::tensor(2.1, at::kDouble), 1e-14, 1e-14));
  EXPECT_EQ(error_of([&] { fusednorm::scale_norm(x, x[0]); }),
            "fusednorm::scale_norm: g: expected a tensor of one element, got shape [2]");
}

TEST(Ops, Bf16BiasGradientDoesNotStall) {
  // field report B07: torch's own stops at 256 a thread.
  const Tensor x = at::tensor({1.0, 3.0}).to(at::kBFloat16).expand({4096, 2}).contiguous();
  const Tensor w = at::ones({2}, at::kBFloat16).requires_grad_();
  const Tensor b = at::zeros({2}, at::kBFloat16).requires_grad_();
  const Tensor y = fusednorm::layer_norm(x, {2}, w, b);
  const auto grads = torch::autograd::grad({y}, {w, b}, {at::ones_like(y)});
  EXPECT_TRUE(at::equal(grads[0].to(at::kFloat), at::tensor({-4096.f, 4096.f})));
  EXPECT_TRUE(at::equal(grads[1].to(at::kFloat), at::tensor({4096.f, 4096.f})));
}

TEST(Ops, ResidualAddAndNorm) {
  const Tensor x = at::randn({2, 3, 8}).requires_grad_(), r = at::randn({2, 3, 8}, at::kDouble);
  const Tensor w = at::randn({8}).requires_grad_();
  const Tensor stream = r.detach().requires_grad_();
  const auto [y, s] = fusednorm::add_layer_norm(x, stream, {8}, w, {}, 1e-5, 0.5);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_EQ(s.scalar_type(), at::kDouble);
  EXPECT_EQ(y.grad_fn()->name(), "AddLayerNormBackward");
  EXPECT_EQ(y.grad_fn(), s.grad_fn());
  const Tensor sum = stream * 0.5 + x.to(at::kDouble);
  const Tensor plain = at::layer_norm(sum, {8}, w.to(at::kDouble), {}, 1e-5).to(at::kFloat);
  EXPECT_TRUE(at::allclose(s, sum, 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(y, plain, 1e-5, 1e-6));
  const auto loss = [](const Tensor& output, const Tensor& residual_out) {
    return (output * residual_out).sum();
  };
  const auto grads = torch::autograd::grad({loss(y, s)}, {x, stream, w});
  const auto expected = torch::autograd::grad({loss(plain, sum)}, {x, stream, w});
  for (size_t i = 0; i < grads.size(); ++i) {
    EXPECT_EQ(grads[i].scalar_type(), expected[i].scalar_type());
    EXPECT_TRUE(at::allclose(grads[i], expected[i], 1e-4, 1e-5)) << i;
  }

  // In place: the same bits, without autograd only.
  const auto [z, t] = fusednorm::add_rms_norm(x.detach(), r, {8}, w.detach(), 1e-6);
  Tensor in_place = r.clone();
  EXPECT_TRUE(at::equal(fusednorm::add_rms_norm_(x.detach(), in_place, {8}, w.detach(), 1e-6), z));
  EXPECT_TRUE(at::equal(in_place, t));
  EXPECT_EQ(error_of([&] { fusednorm::add_layer_norm_(x, in_place, {8}); }),
            "fusednorm::add_layer_norm_: input: expected no gradient to be asked for (the residual "
            "is updated in place, for inference), got a tensor that requires grad: use "
            "add_layer_norm, or torch.no_grad()");
  EXPECT_EQ(error_of([&] { fusednorm::add_rms_norm(x, r[0], {8}); }),
            "fusednorm::add_rms_norm: residual: expected shape [2, 3, 8] (the input's shape), got "
            "[3, 8]");
}

TEST(Ops, Errors) {
  const Tensor x = at::randn({2, 4});
  EXPECT_EQ(error_of([&] { fusednorm::layer_norm(x, {4}, at::ones({3})); }),
            "fusednorm::layer_norm: weight: expected shape [4] (normalized_shape), got [3]");
  EXPECT_EQ(
      error_of([&] { fusednorm::rms_norm(x, {5}); }),
      "fusednorm::rms_norm: input: expected shape [*, 5] (normalized_shape = [5]), got [2, 4]");
  EXPECT_EQ(
      error_of([&] { fusednorm::rms_norm(x.to(at::kLong), {4}); }),
      "fusednorm::rms_norm: input: expected dtype float64, float32, bfloat16 or float16, got Long");
  EXPECT_EQ(error_of([&] {
              fusednorm::rms_norm(x, {4}, {}, 1e-6, {0.0, "gemma"});
            }),
            "fusednorm::rms_norm: casting_mode: expected \"default\" or \"llama\", got \"gemma\"");
  EXPECT_EQ(error_of([&] { fusednorm::layer_norm(Tensor(), {4}); }).empty(), false);
}

#if !defined(FUSEDNORM_WITH_CUDA)
TEST(Ops, CudaKeySaysBuiltWithoutCuda) {
  // No CUDA tensor can be made here; the key's kernel is called by name.
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fusednorm::rms_norm", "");
  torch::jit::Stack stack{
      at::randn({2, 4}),     std::vector<int64_t>{4}, c10::IValue(), c10::IValue(), 0.0,
      std::string("default")};
  const std::string error =
      error_of([&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), &stack); });
  EXPECT_NE(error.find("fusednorm was built without CUDA"), std::string::npos) << error;
}
#endif

}  // namespace
