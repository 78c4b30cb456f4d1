// Calls the CPU kernels alone, one case at a time, for valgrind --tool=callgrind to count.
//
// No torch, and no threads: the counts are the same on every run and every machine, so that two
// versions of a kernel compare exactly. Valgrind knows no AVX-512, so the tables are avx2 and
// portable. Run by count_instructions.sh; the counts of each case are dumped under the name that is
// passed here. Outside valgrind the requests do nothing.
#include <valgrind/callgrind.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/kernels/row_kernels.h"

namespace {

using namespace fusednorm;
using namespace fusednorm::cpu;

/// Values of period 61 between -1 and 1, the same for every compiler and library.
float value(int64_t i) { return static_cast<float>((i * 37 % 61) - 30) / 30.0f; }

/// Elements of one dtype; a bf16 is the upper half of an fp32.
std::vector<uint8_t> elements(int64_t count, DType dtype) {
  const size_t size = dtype == DType::kBFloat16 ? 2 : 4;
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * size);
  for (int64_t i = 0; i < count; ++i) {
    const float f = value(i);
    // The halves of a little-endian word: the upper one comes last.
    std::memcpy(&bytes[static_cast<size_t>(i) * size],
                reinterpret_cast<const uint8_t*>(&f) + (4 - size), size);
  }
  return bytes;
}

RowLayout layout(const std::vector<uint8_t>& values, int64_t rows, int64_t cols) {
  RowLayout result;
  result.data = values.data();
  result.sizes[0] = rows;
  result.strides[0] = cols;
  return result;
}

void count(const KernelTable& table, bool centered, DType dtype, int64_t rows, int64_t cols) {
  const auto x = elements(rows * cols, dtype), g = elements(rows * cols + 7, dtype);
  std::vector<uint8_t> y(x.size()), dx(x.size());
  const auto parameters = static_cast<size_t>(table.parameter_size(dtype, cols));
  std::vector<float> weight(parameters, 1.25f), bias(parameters, 0.5f);
  std::vector<float> mean(static_cast<size_t>(rows)), rstd(static_cast<size_t>(rows));
  std::vector<float> dw(parameters), db(parameters);

  ForwardArgs forward;
  forward.input = layout(x, rows, cols);
  forward.output = y.data();
  forward.mean = centered ? mean.data() : nullptr;
  forward.rstd = rstd.data();
  forward.weight = weight.data();
  forward.bias = centered ? bias.data() : nullptr;
  forward.cols = cols;
  BackwardArgs backward;
  backward.grad_output = layout(g, rows, cols);
  backward.input = layout(x, rows, cols);
  backward.mean = forward.mean;
  backward.rstd = rstd.data();
  backward.weight = weight.data();
  backward.grad_input = dx.data();
  backward.cols = cols;

  const int d = static_cast<int>(dtype);
  char name[128];
  // Between the requests there is the kernel's call alone.
  const auto counted = [&](const char* direction, const auto& call) {
    std::snprintf(name, sizeof(name), "%s %s %lldx%lld %s %s", table.name,
                  centered ? "layer_norm" : "rms_norm", static_cast<long long>(rows),
                  static_cast<long long>(cols), dtype == DType::kFloat32 ? "fp32" : "bf16",
                  direction);
    call();  // what the loader does at a first call is not counted
    CALLGRIND_ZERO_STATS;
    call();
    CALLGRIND_DUMP_STATS_AT(name);
  };
  const auto forward_kernel = centered ? table.layer_norm_forward[d] : table.rms_norm_forward[d];
  const auto backward_kernel = centered ? table.layer_norm_backward[d] : table.rms_norm_backward[d];
  counted("forward", [&] { forward_kernel(forward, 0, rows); });
  counted("backward",
          [&] { backward_kernel(backward, 0, rows, dw.data(), centered ? db.data() : nullptr); });
}

}  // namespace

int main() {
  constexpr int64_t kShapes[][2] = {{64, 64}, {64, 257}, {64, 768}, {16, 4096}, {4, 65536}};
  const KernelTable* tables[kMaxTables];
  const int found = runnable_tables(tables);
  for (int t = 0; t < found; ++t) {
    if (std::strncmp(tables[t]->name, "avx512", 6) == 0) continue;
    for (const auto& [rows, cols] : kShapes) {
      for (const bool centered : {true, false}) {
        count(*tables[t], centered, DType::kFloat32, rows, cols);
        count(*tables[t], centered, DType::kBFloat16, rows, cols);
      }
    }
  }
}
