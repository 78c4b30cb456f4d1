// The launch plans of the CUDA kernels: data from pure functions, so every promise about them is
// tested without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/kernels/launch_config.h"

namespace {

using namespace fusednorm::cuda;
using fusednorm::DType;

constexpr int kArchitectures[] = {80, 86, 90, 100, 120};
constexpr std::pair<DType, DType> kPairs[] = {
    {DType::kFloat64, DType::kFloat64},   {DType::kFloat32, DType::kFloat32},
    {DType::kBFloat16, DType::kBFloat16}, {DType::kFloat16, DType::kFloat16},
    {DType::kBFloat16, DType::kFloat32},  {DType::kFloat16, DType::kFloat32}};

// Plans are constants where the shape is one.
static_assert(forward_plan(4096, DType::kBFloat16, DType::kBFloat16, architecture(90)).threads ==
              128);
static_assert(backward_plan(8192, 4096, DType::kBFloat16, DType::kBFloat16, true, architecture(90))
                  .groups == 132);

/// Every length up to 5000, and around each power of two up to 2^22.
std::vector<int64_t> lengths() {
  std::vector<int64_t> result;
  for (int64_t n = 1; n <= 5000; ++n) result.push_back(n);
  for (int64_t p = 8192; p <= 1 << 22; p *= 2) {
    for (const int64_t n : {p - 1, p, p + 1, p + p / 2, p + p / 2 + 1}) result.push_back(n);
  }
  return result;
}

template <class F>
void for_each_case(F f) {
  for (const int arch : kArchitectures) {
    for (const auto& [in, other] : kPairs) {
      for (const int64_t cols : lengths()) {
        SCOPED_TRACE(testing::Message() << "sm_" << arch << ", " << cols << " columns, dtypes "
                                        << static_cast<int>(in) << static_cast<int>(other));
        f(arch, in, other, cols);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(ForwardPlan, HoldsTheRowAndFitsTheDevice) {
  for_each_case([](int arch, DType in, DType out, int64_t cols) {
    const Architecture a = architecture(arch);
    const ForwardPlan p = forward_plan(cols, in, out, a);
    EXPECT_GE(int64_t{p.units} * p.threads_per_row * p.columns, cols);
    EXPECT_EQ(p.threads * p.cluster, p.threads_per_row * p.rows_per_block);
    EXPECT_EQ(p.columns * std::max(size_of(in), size_of(out)), p.unit_bytes);
    EXPECT_EQ(p.unit_bytes, arch >= 100 ? 32 : 16);
    EXPECT_LE(p.cluster, a.max_cluster);
    EXPECT_LE(p.shared_bytes, a.shared_per_block);
    EXPECT_GE(blocks_per_sm(p.threads, p.max_registers, p.shared_bytes, a), 1);
    EXPECT_TRUE(p.threads_per_row < 32 || p.threads % 32 == 0);
    EXPECT_TRUE(p.rows_per_block == 1 || p.threads_per_row <= 32);  // no barrier among other rows
    if (p.residence == Residence::kRegisters) {
      EXPECT_LE(p.units * p.unit_bytes, 128);
      EXPECT_LE(p.threads, forward_max_threads(p.units * p.unit_bytes));
    } else {
      EXPECT_EQ(p.threads, kLoopThreads);
    }
  });
}

TEST(ForwardPlan, ReadsARowOnceUpToTheSizeOfSharedMemory) {
  for_each_case([](int arch, DType in, DType out, int64_t cols) {
    const Architecture a = architecture(arch);
    const ForwardPlan p = forward_plan(cols, in, out, a);
    // Less one sixteenth: a segment has 33 chunks for 32 lanes, and the sums need some.
    const int64_t on_chip = int64_t{a.shared_per_block} * a.max_cluster / 16 * 15;
    if (cols * size_of(in) < on_chip) {
      EXPECT_NE(p.residence, Residence::kStreaming);
    }
  });
}

TEST(ForwardPlan, NeighbouringWidthsGetSimilarPlans) {
  // From one block a row on, the threads follow the row length in steps of a warp of each block:
  // beyond 64 columns more, at most a sixth more threads, or the next kernel.
  for_each_case([](int arch, DType in, DType out, int64_t cols) {
    const Architecture a = architecture(arch);
    const ForwardPlan p = forward_plan(cols, in, out, a), q = forward_plan(cols + 1, in, out, a);
    if (p.residence != q.residence || p.units != q.units || p.cluster != q.cluster) return;
    if (p.threads_per_row <= 128) return;
    EXPECT_LE(q.threads_per_row - p.threads_per_row, 32 * p.cluster);
  });
}

TEST(BackwardPlan, HoldsTheRowAndFitsTheDevice) {
  for_each_case([](int arch, DType in, DType grad, int64_t cols) {
    const Architecture a = architecture(arch);
    for (const int64_t rows : {0, 1, 3, 131, 4096, 100000}) {
      for (const bool centered : {false, true}) {
        const BackwardPlan p = backward_plan(rows, cols, in, grad, centered, a);
        EXPECT_GE(int64_t{p.units} * p.threads_per_row * p.columns, cols);
        EXPECT_EQ(p.threads * p.blocks_per_row, p.threads_per_row * p.rows_per_block);
        EXPECT_LE(p.threads, kBackwardThreads);
        EXPECT_LE(p.units, kBackwardUnits);
        EXPECT_LE(p.cluster, a.max_cluster);
        EXPECT_LE(p.shared_bytes, a.shared_per_block);
        EXPECT_GE(p.stages, 2);
        EXPECT_LE(p.stages, kMaxStages);
        EXPECT_TRUE(p.threads_per_row < 32 || p.threads % 32 == 0);
        EXPECT_TRUE(p.threads_per_row <= 32 || p.rows_per_block <= 15);  // a named barrier each
        EXPECT_TRUE(p.rows_per_block == 1 || p.blocks_per_row == 1);
        EXPECT_LE(p.groups * 2 * p.rows_per_block, rows + 2 * p.rows_per_block - 1);
        EXPECT_EQ(p.groups == 0, rows == 0);
        // Where a stage's grad_output begins: copies of 16 bytes go there.
        const int width = std::min(32, p.threads_per_row);
        const int units = p.units * p.threads / width * (width + 1);
        EXPECT_EQ(units * p.columns * size_of(in) % 16, 0);
      }
    }
  });
}

TEST(BackwardPlan, BitsDoNotDependOnTheArchitecture) {
  for_each_case([](int arch, DType in, DType grad, int64_t cols) {
    for (const int64_t rows : {1, 1000, 100000}) {
      const BackwardPlan p = backward_plan(rows, cols, in, grad, true, architecture(arch));
      const BackwardPlan q = backward_plan(rows, cols, in, grad, true, architecture(90));
      EXPECT_EQ(p.units, q.units);
      EXPECT_EQ(p.columns, q.columns);
      EXPECT_EQ(p.threads_per_row, q.threads_per_row);
      EXPECT_EQ(p.rows_per_block, q.rows_per_block);
      EXPECT_EQ(p.groups, q.groups);
    }
  });
}

TEST(BackwardPlan, PartialSumsStayUnderFivePercent) {
  for_each_case([](int arch, DType in, DType grad, int64_t cols) {
    if (arch != 90) return;
    for (const bool centered : {false, true}) {
      const double partial = 2.0 * accumulation_size(in) * (centered ? 2 : 1);
      for (const int64_t rows : {16384, 100000, 1 << 20}) {
        const BackwardPlan p = backward_plan(rows, cols, in, grad, centered, architecture(90));
        const double traffic = static_cast<double>(rows) * (2 * size_of(in) + size_of(grad));
        EXPECT_LE(static_cast<double>(p.groups) * partial / traffic, 0.05);
      }
    }
  });
}

TEST(BackwardPlan, GridFollowsTheRows) {
  const auto blocks = [](int64_t rows, int64_t cols, DType dtype) {
    const auto p = backward_plan(rows, cols, dtype, dtype, true, architecture(90));
    return p.groups * p.blocks_per_row;
  };
  EXPECT_EQ(blocks(1, 768, DType::kFloat32), 1);  // few rows: no large grid
  EXPECT_LE(blocks(64, 768, DType::kFloat32), 32);
  EXPECT_GE(blocks(100000, 32, DType::kFloat32), 132);   // many short rows: a block on each SM
  EXPECT_EQ(blocks(16384, 256, DType::kBFloat16), 132);  // little to do: one wave
  EXPECT_EQ(blocks(100000, 4096, DType::kBFloat16), 1184);
  EXPECT_GE(blocks(512, 65536, DType::kBFloat16), 128);  // few long rows: clusters do
}

TEST(BackwardPlan, LossByQuantisationIsAsWritten) {
  // What the comment at kBackwardBlocks says, in percent for 108, 132, 148 and 170 SMs.
  const int sms[] = {108, 132, 148, 170};
  const int expected[4][4] = {{0, 0, 0, 1}, {2, 0, 11, 22}, {19, 0, 11, 22}, {39, 0, 11, 22}};
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      EXPECT_NEAR(100 * quantisation_loss(kBackwardBlocks[i], sms[j]), expected[i][j], 0.6)
          << kBackwardBlocks[i] << " blocks on " << sms[j] << " SMs";
    }
  }
}

}  // namespace
