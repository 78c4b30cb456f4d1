// A backward call on the CPU: chunks of rows or strips of columns, by threads, and the sums over
// them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "cpu/host.h"

namespace fusednorm {

// A thread is worth waking (0.65 us) for about this much of a row's traffic.
constexpr int64_t kGrainBytes = 64 * 1024;

/// Whether what comes next is worth asking for early: beyond `from` bytes, and not long rows.
inline bool worth_asking_early(int64_t bytes, int64_t row_bytes, int64_t from) {
  return bytes > from && row_bytes <= cpu::caches().early_row();
}

/// Whether a backward's gradients are better stored past the caches. In fp32 they are as soon as
/// the tensors around the call exceed the caches, even if the gradient is read right after (with a
/// pass over it, 2048 x 768: 408 us stored, 386 streamed; 4096 x 1024: 1871, 1580); in 16 bits only
/// where the gradient alone does (4096 x 1024: 803, 844; 8192 x 4096: 11.7 ms, 8.9).
inline bool past_caches(int64_t element_size, int64_t bytes) {
  return element_size > 2 ? bytes > cpu::caches().part() : exceeds_cache(bytes);
}

// grad_weight and grad_bias are summed over chunks of rows, then over the chunks. A chunk is a
// function of the number of rows alone, so the bits do not depend on the number of threads. 64
// chunks, but of at most 1024 rows, so that fp32 sums stay short, and of at least 16, so that the
// partial sums stay a small part of the traffic. Up to 64 rows are one chunk: partial sums of a few
// long rows are as large as the rows (32 x 65536 bf16: 1.1 ms with chunks of 8, 0.5 with one).
inline int64_t rows_per_chunk(int64_t rows) {
  if (rows <= 64) return std::max<int64_t>(1, rows);
  return std::min<int64_t>(1024, std::max<int64_t>(16, (rows + 63) / 64));
}

/// A backward call: the kernels and their arguments, and where the sums go.
struct BackwardCall {
  cpu::BackwardKernel kernel;
  cpu::BackwardTermsKernel terms_kernel = nullptr;  // null: there are none that go by columns
  cpu::BackwardColumnsKernel columns_kernel = nullptr;
  DType dtype;  // as whose rows' parameters the kernel takes weight and bias
  cpu::BackwardArgs args;
  int64_t rows, grain_rows;
  Tensor gradients[2];                // of weight and bias; undefined: not wanted
  bool computes[2] = {false, false};  // which of their sums the kernel makes

  int parameters() const { return computes[0] + computes[1]; }
  at::ScalarType acc_dtype() const { return dtype == DType::kFloat64 ? at::kDouble : at::kFloat; }
  int64_t slots() const { return kernels().parameter_size(dtype, args.cols); }
  int64_t slot_bytes() const { return dtype == DType::kFloat64 ? 8 : 4; }

  /// By the size of one of the tensors around the call; args.cols is known.
  void suit_caches(const Tensor& rows_of_call) {
    const int64_t element_size = rows_of_call.element_size();
    const int64_t bytes = rows_of_call.numel() * element_size;
    args.ask_early = worth_asking_early(bytes, args.cols * element_size, cpu::caches().part());
    args.past_caches = past_caches(element_size, bytes);
  }

  /// Where grad_weight and grad_bias are summed; null: not at all.
  struct Sums {
    void *weight = nullptr, *bias = nullptr;
  };
  /// In parameters() * slots() elements of memory.
  Sums sums_in(char* memory) const {
    return {computes[0] ? memory : nullptr,
            computes[1] ? memory + computes[0] * slots() * slot_bytes() : nullptr};
  }
  /// The sums over one chunk, stored as they are, may be the gradients themselves.
  bool sums_are_gradients() const {
    bool same = kernels().parameter_step[static_cast<int>(dtype)] == 1;
    for (int k = 0; k < 2; ++k) {
      const bool stored = gradients[k].defined() && gradients[k].scalar_type() == acc_dtype();
      same = same && (!computes[k] || stored);
    }
    return same;
  }
  Sums gradients_as_sums() const {
    return {computes[0] ? gradients[0].data_ptr() : nullptr,
            computes[1] ? gradients[1].data_ptr() : nullptr};
  }

  /// Rows [begin, end) and all columns.
  void rows_of(int64_t begin, int64_t end, const Sums& sums) const {
    kernel(args, begin, end, sums.weight, sums.bias);
  }

  /// From `chunks` partial sums to the gradients, for columns [begin, end).
  void reduce(const char* sums, int64_t chunks, int64_t begin, int64_t end) const {
    const char* const from[2] = {sums, sums + computes[0] * slots() * slot_bytes()};
    for (int k = 0; k < 2; ++k) {
      const Tensor& gradient = gradients[k];
      if (!gradient.defined()) continue;
      kernels().reduce[static_cast<int>(dtype)](from[k], chunks, parameters() * slots(),
                                                dtype_of(gradient.scalar_type()),
                                                gradient.data_ptr(), begin, end);
    }
  }

  void in_chunks() const {
    const int64_t chunk = rows_per_chunk(rows), chunks = (rows + chunk - 1) / chunk;
    // 1 x 65536 fp32: 89 us by way of partial sums, 40 without.
    if (chunks == 1 && sums_are_gradients()) return rows_of(0, rows, gradients_as_sums());
    const Tensor partials = empty({chunks, parameters(), slots()}, acc_dtype());
    const int64_t bytes = parameters() * slots() * slot_bytes();
    char* const first = static_cast<char*>(partials.data_ptr());
    at::parallel_for(
        0, chunks, std::max<int64_t>(1, grain_rows / chunk), [&](int64_t begin, int64_t end) {
          for (int64_t c = begin; c < end; ++c) {
            rows_of(c * chunk, std::min(rows, (c + 1) * chunk), sums_in(first + c * bytes));
          }
        });
    constexpr int64_t kStrip = 64;  // columns
    at::parallel_for(
        0, (args.cols + kStrip - 1) / kStrip,
        std::max<int64_t>(
            1, kGrainBytes / (kStrip * parameters() * std::max<int64_t>(1, chunks) * slot_bytes())),
        [&](int64_t begin, int64_t end) {
          reduce(first, chunks, begin * kStrip, std::min(args.cols, end * kStrip));
        });
  }

  /// One chunk of rows by many threads: all rows' sums first, then strips of columns. The same bits
  /// as in_chunks. False where a row is too extreme for it.
  bool in_strips() const {
    const int64_t terms_bytes = cpu::kTermsBytes * (slot_bytes() / 4);
    const auto terms = std::make_unique<char[]>(rows * terms_bytes);
    std::atomic<bool> ordinary{true};
    at::parallel_for(0, rows, std::max<int64_t>(1, grain_rows), [&](int64_t begin, int64_t end) {
      if (!terms_kernel(args, begin, end, terms.get())) ordinary = false;
    });
    if (!ordinary) return false;
    const bool direct = sums_are_gradients();
    Tensor partial;
    if (!direct) partial = empty({parameters(), slots()}, acc_dtype());
    char* const memory = direct ? nullptr : static_cast<char*>(partial.data_ptr());
    const Sums sums = direct ? gradients_as_sums() : sums_in(memory);
    const int64_t strips = (args.cols + kStripColumns - 1) / kStripColumns;
    at::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t from = s * kStripColumns, to = std::min(args.cols, from + kStripColumns);
        columns_kernel(args, terms.get(), rows, from, to, sums.weight, sums.bias);
        if (!direct) reduce(memory, 1, from, to);
      }
    });
    return true;
  }

  void run() const {
    if (args.cols == 0) return;
    if (parameters() != 0) {
      if (!strips_pay() || !in_strips()) in_chunks();
    } else {
      at::parallel_for(0, rows, std::max<int64_t>(1, grain_rows),
                       [&](int64_t begin, int64_t end) { rows_of(begin, end, Sums{}); });
    }
  }

 private:
  // In strips of 1024 columns four fp32 rows and the sums stay in the first cache. Below four
  // strips a thread's wake-up costs more than it saves.
  static constexpr int64_t kStripColumns = 1024;
  bool strips_pay() const {
    return terms_kernel != nullptr && rows <= 64 && args.cols >= 4 * kStripColumns &&
           grain_rows < rows && at::get_num_threads() > 1 && !at::in_parallel_region();
  }
};

}  // namespace fusednorm
