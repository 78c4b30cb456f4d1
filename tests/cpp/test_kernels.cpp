// The CPU kernels alone, every table that this machine can run, against the formulas in long
// double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels/row_kernels.h"

namespace fusednorm::cpu {
namespace {

std::vector<const KernelTable*> tables() {
  const KernelTable* found[kMaxTables];
  const int count = runnable_tables(found);
  return {found, found + count};
}

// What is checked for a norm of fp32 or fp64 rows: element type, dtype tag, tolerance in its
// epsilon.
struct Case {
  int64_t rows, cols;
  double offset;  // of the row's mean, in standard deviations
};

template <class T>
struct Problem {
  int64_t rows, cols;
  std::vector<T> x, g, weight, bias;

  Problem(const Case& c) : rows(c.rows), cols(c.cols) {
    std::mt19937 engine(17);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < rows * cols; ++i) {
      x.push_back(static_cast<T>(c.offset + normal(engine)));
      g.push_back(static_cast<T>(normal(engine)));
    }
    for (int64_t i = 0; i < cols; ++i) {
      weight.push_back(static_cast<T>(1 + 0.25 * normal(engine)));
      bias.push_back(static_cast<T>(normal(engine)));
    }
  }

  RowLayout layout(const std::vector<T>& values) const {
    RowLayout result;
    result.data = values.data();
    result.sizes[0] = rows;
    result.strides[0] = cols;
    return result;
  }
};

/// The values, and the largest term that each kind of gradient is summed from: with 2 columns the
/// terms of grad_input cancel to nothing, and rounding errors are those of the terms.
struct Expected {
  std::vector<long double> y, dx, dw, db;
  long double y_scale = 0, dx_scale = 0, dw_scale = 0, db_scale = 0;
};

template <class T>
Expected expected_of(const Problem<T>& p, bool centered, const NormParams& params) {
  Expected e;
  e.dw.assign(p.cols, 0);
  e.db.assign(p.cols, 0);
  std::vector<long double> dw_terms(p.cols, 0), db_terms(p.cols, 0);
  const long double n = p.cols;
  for (int64_t r = 0; r < p.rows; ++r) {
    const T* x = &p.x[r * p.cols];
    const T* g = &p.g[r * p.cols];
    long double mean = 0, squares = 0;
    for (int64_t i = 0; i < p.cols; ++i) mean += x[i];
    mean = centered ? mean / n : 0;
    for (int64_t i = 0; i < p.cols; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const long double rstd = 1 / std::sqrt(squares / n + params.eps);
    long double mean_g = 0, projection = 0;
    for (int64_t i = 0; i < p.cols; ++i) {
      const long double x_hat = (x[i] - mean) * rstd,
                        gw = static_cast<long double>(g[i]) * p.weight[i];
      e.y.push_back(x_hat * p.weight[i] + (centered ? p.bias[i] : 0));
      mean_g += gw / n;
      projection += gw * x_hat / n;
      e.dw[i] += g[i] * x_hat;
      e.db[i] += g[i];
      dw_terms[i] += std::fabs(g[i] * x_hat);
      db_terms[i] += std::fabs(g[i]);
      e.y_scale = std::max(e.y_scale, std::fabs(e.y.back()));
      e.dx_scale = std::max(e.dx_scale, std::fabs(rstd * gw));
    }
    for (int64_t i = 0; i < p.cols; ++i) {
      const long double x_hat = (x[i] - mean) * rstd,
                        gw = static_cast<long double>(g[i]) * p.weight[i];
      e.dx.push_back(rstd * (gw - (centered ? mean_g : 0) - x_hat * projection));
    }
  }
  for (int64_t i = 0; i < p.cols; ++i) {
    e.dw_scale = std::max(e.dw_scale, dw_terms[i]);
    e.db_scale = std::max(e.db_scale, db_terms[i]);
  }
  return e;
}

/// The largest error, in units of T's epsilon at `scale`.
template <class T>
double error_of(const std::vector<T>& actual, const std::vector<long double>& expected,
                long double scale) {
  long double error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error = std::max(error, std::fabs(actual[i] - expected[i]));
  }
  return static_cast<double>(error / scale / std::numeric_limits<T>::epsilon());
}

template <class T>
void check_against_formulas(const KernelTable& table, const Case& c, bool centered) {
  SCOPED_TRACE(testing::Message() << table.name << (centered ? " LayerNorm " : " RMSNorm ")
                                  << c.rows << "x" << c.cols << " offset " << c.offset);
  const int dtype = static_cast<int>(std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32);
  const Problem<T> p(c);
  const Expected e = expected_of(p, centered, NormParams{});
  std::vector<T> y(p.x.size()), mean(p.rows), rstd(p.rows), dx(p.x.size()), dw(p.cols), db(p.cols);

  ForwardArgs forward;
  forward.input = p.layout(p.x);
  forward.output = y.data();
  forward.mean = centered ? mean.data() : nullptr;
  forward.rstd = rstd.data();
  forward.weight = p.weight.data();
  forward.bias = centered ? p.bias.data() : nullptr;
  forward.cols = p.cols;
  (centered ? table.layer_norm_forward : table.rms_norm_forward)[dtype](forward, 0, p.rows);
  EXPECT_LE(error_of(y, e.y, e.y_scale), 4);

  BackwardArgs backward;
  backward.grad_output = p.layout(p.g);
  backward.input = p.layout(p.x);
  backward.mean = mean.data();
  backward.rstd = rstd.data();
  backward.weight = p.weight.data();
  backward.grad_input = dx.data();
  backward.cols = p.cols;
  (centered ? table.layer_norm_backward : table.rms_norm_backward)[dtype](
      backward, 0, p.rows, dw.data(), centered ? db.data() : nullptr);
  EXPECT_LE(error_of(dx, e.dx, e.dx_scale), 8);
  EXPECT_LE(error_of(dw, e.dw, e.dw_scale), 4);
  if (centered) {
    EXPECT_LE(error_of(db, e.db, e.db_scale), 4);
  }
}

TEST(RowKernels, MatchTheFormulas) {
  // Straddling vectors (4, 8, 16), the unrolled step (64), sum blocks (256, 512, 1024), row blocks
  // (4).
  for (const KernelTable* table : tables()) {
    for (const bool centered : {true, false}) {
      for (const int64_t cols :
           {2,  3,   4,   5,   7,   8,   9,   15,   16,   17,   31,   33,   63,   64,
            65, 127, 255, 256, 257, 511, 513, 1023, 1024, 1025, 2049, 4097, 10007}) {
        for (const int64_t rows : {1, 3, 4, 5}) {
          check_against_formulas<float>(*table, {rows, cols, 0.5}, centered);
          check_against_formulas<double>(*table, {rows, cols, 0.5}, centered);
        }
      }
      check_against_formulas<float>(*table, {9, 1000, 1e4}, centered);
      check_against_formulas<float>(*table, {9, 1000, 1e6}, centered);
      check_against_formulas<float>(*table, {2, 1 << 20, 3}, centered);
    }
  }
}

TEST(RowKernels, TouchNothingBesideTheirRows) {
  // Guard elements around odd rows keep their bits, for each dtype.
  for (const KernelTable* table : tables()) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const size_t size = dtype == 0 ? 8 : dtype == 1 ? 4 : 2, acc = dtype == 0 ? 8 : 4;
      for (const int64_t cols : {1, 3, 16, 33, 70}) {
        const int64_t rows = 3;
        std::vector<unsigned char> x(rows * cols * size, 0), y((rows * cols + 2) * size, 0xa5);
        std::vector<unsigned char> stat((rows + 2) * acc, 0xa5);
        ForwardArgs args;
        args.input.data = x.data();
        args.input.sizes[0] = rows;
        args.input.strides[0] = cols;
        args.output = y.data() + size;
        args.rstd = stat.data() + acc;
        args.cols = cols;
        table->rms_norm_forward[dtype](args, 0, rows);
        for (size_t i = 0; i < size; ++i) {
          EXPECT_EQ(y[i], 0xa5);
          EXPECT_EQ(y[y.size() - 1 - i], 0xa5);
        }
        for (size_t i = 0; i < acc; ++i) {
          EXPECT_EQ(stat[i], 0xa5);
          EXPECT_EQ(stat[stat.size() - 1 - i], 0xa5);
        }
        EXPECT_EQ(y[size], 0);  // 0 normalizes to 0
      }
    }
  }
}

// Every 16-bit value survives: as a weight converted to fp32, and as a reduced sum stored again.
// The doubles half way between neighbours round to even, and their own neighbours to the nearer
// one.
TEST(RowKernels, SixteenBitConversions) {
  for (const KernelTable* table : tables()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      std::vector<uint16_t> bits(65536), back(65536);
      for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
      std::vector<float> widened(65536);
      table->convert[1](dtype, bits.data(), 0.0, widened.data(), 65536);
      table->reduce[1](widened.data(), 1, 65536, dtype, back.data(), 0, 65536);
      const int infinity = dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
      for (int i = 0; i < 65536; ++i) {
        if ((i & 0x7fff) > infinity) {
          EXPECT_TRUE(std::isnan(widened[i])) << i;
          EXPECT_GT(back[i] & 0x7fff, infinity) << i;
        } else if (i != 0x8000) {  // a sum that starts at +0 has no -0
          EXPECT_EQ(back[i], bits[i]) << table->name << " " << i;
        }
      }
      for (int i = 1; i < infinity - 1; ++i) {
        const double low = widened[i], high = widened[i + 1], half = low + (high - low) / 2;
        const double values[3] = {half, std::nextafter(half, low), std::nextafter(half, high)};
        uint16_t rounded[3];
        table->reduce[0](values, 1, 3, dtype, rounded, 0, 3);
        EXPECT_EQ(rounded[0], i % 2 == 0 ? i : i + 1);
        EXPECT_EQ(rounded[1], i);
        EXPECT_EQ(rounded[2], i + 1);
      }
    }
  }
}

// The vector stores of 16-bit outputs round every fp32 value as the scalar rule does: nearest even.
TEST(RowKernels, SixteenBitStores) {
  std::mt19937 engine(3);
  for (const KernelTable* table : tables()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      // y = x_hat * weight with a constant row x_hat = 1: eps 0, so y is the weight, rounded once.
      const auto i_dtype = static_cast<size_t>(dtype);
      const int64_t cols = 4096;
      std::vector<uint16_t> ones(cols, dtype == DType::kBFloat16 ? 0x3f80 : 0x3c00), y(cols),
          expected(cols);
      std::vector<float> weight(cols);
      for (float& w : weight) {
        const uint32_t bits = engine();
        std::memcpy(&w, &bits, 4);
        if (std::isnan(w)) w = 0x1p-130f;
      }
      std::vector<float> converted(table->parameter_size(dtype, cols));
      table->convert[i_dtype](DType::kFloat32, weight.data(), 0.0, converted.data(), cols);
      ForwardArgs args;
      args.input.data = ones.data();
      args.input.sizes[0] = 1;
      args.output = y.data();
      args.weight = converted.data();
      args.cols = cols;
      args.params.eps = 0;
      table->rms_norm_forward[i_dtype](args, 0, 1);
      table->reduce[1](weight.data(), 1, cols, dtype, expected.data(), 0, cols);
      for (int64_t i = 0; i < cols; ++i) {
        EXPECT_EQ(y[i] & 0x7fff, expected[i] & 0x7fff) << table->name << " " << weight[i];
      }
    }
  }
}

TEST(RowKernels, ReduceIsExactWhereFloatsAreNot) {
  for (const KernelTable* table : tables()) {
    const int64_t count = 3, cols = 130;
    std::vector<float> partials(count * cols);
    for (int64_t c = 0; c < cols; ++c) {
      partials[c] = 0x1p24f;
      partials[cols + c] = 1;
      partials[2 * cols + c] = -0x1p24f;
    }
    std::vector<float> out(cols);
    table->reduce[1](partials.data(), count, cols, DType::kFloat32, out.data(), 0, cols);
    for (int64_t c = 0; c < cols; ++c) EXPECT_EQ(out[c], 1.0f);
  }
}

TEST(RowKernels, CapabilityPicksTheTable) {
  const auto all = tables();
  EXPECT_STREQ(kernel_table("DEFAULT").name, "portable");
  EXPECT_STREQ(kernel_table("NO AVX").name, "portable");
  EXPECT_STREQ(kernel_table("AVX512").name, all.front()->name);
  EXPECT_EQ(std::strncmp(kernel_table("AVX2").name, "avx512", 6) == 0, false);
}

TEST(RowLayoutTest, OffsetsOfCollapsedDimensions) {
  RowLayout layout;
  layout.dims = 3;
  const int64_t sizes[3] = {2, 3, 4}, strides[3] = {1000, 0, 7};
  std::memcpy(layout.sizes, sizes, sizeof(sizes));
  std::memcpy(layout.strides, strides, sizeof(strides));
  int64_t row = 0;
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(layout.offset(row++), a * 1000 + c * 7);
    }
  }
}

}  // namespace
}  // namespace fusednorm::cpu
