// Runs small kernels without and with a mistake.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>

#include "device.cuh"

namespace simt_test {

using namespace fusednorm::cuda;

constexpr unsigned kFullMask = 0xffffffffu;

struct Args {
  const float* in;
  float* out;
  bool bug;
};
struct Shape {
  unsigned threads, grid = 1, cluster = 1, shared_bytes = 4096;
};

// Accesses to one float, which errors place at the line of the kernel.
inline float get(const void* p, Location at = Location::current()) {
  return std::bit_cast<float>(load_global<4>(p, at).word[0]);
}
inline void put(void* p, float v, Location at = Location::current()) {
  store_global<4>(p, {{std::bit_cast<uint32_t>(v)}}, at);
}
inline float* shared_floats() { return reinterpret_cast<float*>(shared_memory()); }
inline float get_shared(const void* p, Location at = Location::current()) {
  return std::bit_cast<float>(load_shared<4>(p, at).word[0]);
}
inline void put_shared(void* p, float v, Location at = Location::current()) {
  store_shared<4>(p, {{std::bit_cast<uint32_t>(v)}}, at);
}
inline unsigned global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

class Simt : public testing::Test {
 protected:
  static constexpr int kFloats = 4096;
  void SetUp() override {
    std::iota(in_.begin(), in_.end(), 0.0f);
    simt::clear_memory();
  }
  void TearDown() override {
    simt::clear_memory();
    simt::set_seed(0);
  }

  /// Returns the error.
  std::string run(void (*kernel)(Args), const Shape& shape, bool bug) {
    simt::clear_memory();
    simt::register_memory(in_.data(), sizeof in_, false, "in");
    simt::register_memory(out_.data(), sizeof out_, true, "out");
    out_.fill(-1);
    try {
      EXPECT_EQ(cudaSuccess, launch_kernel(kernel, Args{in_.data(), out_.data(), bug},
                                           {"test_kernel", shape.grid, shape.threads, shape.cluster,
                                            shape.shared_bytes},
                                           nullptr));
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }

  void expect_error(void (*kernel)(Args), const Shape& shape, const char* error) {
    const std::string text = run(kernel, shape, true);
    EXPECT_NE(std::string::npos, text.find(error)) << "'" << text << "'";
    EXPECT_EQ(0u, text.find("simt: kernel test_kernel")) << text;
  }

  /// The kernel is right without its bug: out[i] is expected(i). With it, in every order, there is
  /// this error.
  template <class Expected>
  void check(void (*kernel)(Args), const Shape& shape, Expected expected, const char* error) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      SCOPED_TRACE(seed);
      simt::set_seed(seed);
      EXPECT_EQ("", run(kernel, shape, false));
      const unsigned n = shape.threads * shape.grid;
      EXPECT_NO_THROW(simt::expect_all_written(out_.data(), n * sizeof(float)));
      for (unsigned i = 0; i < n; ++i) ASSERT_EQ(expected(i), out_[i]) << i;
      if (error != nullptr) expect_error(kernel, shape, error);
    }
  }

  // The gap: accesses past the end of `in` do not hit `out`.
  alignas(128) std::array<float, kFloats> in_, gap_, out_;
};

inline float same(unsigned i) { return float(i); }

/// Sums 32 numbers of a warp; all lanes get the sum.
inline float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kFullMask, v, d);
  return v;
}

}  // namespace simt_test
