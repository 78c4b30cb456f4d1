// What a small call costs from C++: fusednorm::layer_norm beside at::layer_norm, without grad.
//
// Each shape takes turns between the two, and the best of many samples counts. A line of JSON for
// each, in nanoseconds a call; bench_norms.py reads them.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fusednorm.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>

namespace {

constexpr int kSamples = 300;
constexpr double kSampleNanoseconds = 2e5;  // the clock and the loop cost nothing beside this

template <class Call>
double nanoseconds(const Call& call, int64_t calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(calls);
}

void measure(int64_t rows, int64_t cols, at::ScalarType dtype, const char* dtype_name) {
  const auto options = at::TensorOptions().dtype(dtype);
  const at::Tensor x = at::randn({rows, cols}).to(dtype);
  const at::Tensor weight = at::ones({cols}, options), bias = at::zeros({cols}, options);
  const auto ours = [&] { (void)fusednorm::layer_norm(x, {cols}, weight, bias); };
  const auto eager = [&] { (void)at::layer_norm(x, {cols}, weight, bias); };
  nanoseconds(ours, 100);
  const double guess = nanoseconds(eager, 100);
  const auto calls = std::max<int64_t>(1, static_cast<int64_t>(kSampleNanoseconds / guess));
  double best_ours = std::numeric_limits<double>::infinity(), best_eager = best_ours;
  for (int sample = 0; sample < kSamples; ++sample) {
    best_ours = std::min(best_ours, nanoseconds(ours, calls));
    best_eager = std::min(best_eager, nanoseconds(eager, calls));
  }
  std::printf(
      "{\"rows\": %lld, \"cols\": %lld, \"dtype\": \"%s\", \"ours_ns\": %.1f, \"eager_ns\": "
      "%.1f}\n",
      static_cast<long long>(rows), static_cast<long long>(cols), dtype_name, best_ours,
      best_eager);
}

}  // namespace

int main() {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  constexpr int64_t kShapes[][2] = {{1, 64}, {1, 768}, {1, 4096}, {8, 768}, {8, 4096}};
  for (const auto& [rows, cols] : kShapes) {
    measure(rows, cols, at::kFloat, "fp32");
    measure(rows, cols, at::kBFloat16, "bf16");
  }
}
