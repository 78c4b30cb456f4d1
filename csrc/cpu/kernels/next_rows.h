#pragma once

// Blocks of rows, and what is read into cache for the block after. Included by kernels.h.

// Four rows to a sweep: weight and bias are read once for the four, and what one row waits for (its
// sums, the root) is hidden behind the others (256 x 768 bf16: 5.9 us a MB, 4.8 so).
constexpr int kBlockRows = 4;

/// The rows that come after those at hand, to be read into cache early; null: not. (8192 x 4096
/// bf16 forward: 6.3 ms without this and Touch, 4.9 with; 16384 x 768 bf16 backward: 3.8 and 2.2.)
template <class T, int kRows>
struct NextRows {
  static constexpr bool kEver = true;
  const T* data[kRows] = {};

  FN_INLINE bool any() const { return data[0] != nullptr; }
  FN_INLINE void read(int64_t begin, int64_t end) const {
    constexpr int64_t kLine = kCacheLine / sizeof(T);
    for (int64_t i = begin; i < end; i += kLine) {
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(data[r] + i);
    }
  }
};

/// Rows of two tensors, both asked for early.
template <class T, class R, int kRows>
struct NextPairs {
  static constexpr bool kEver = true;
  NextRows<T, kRows> first;
  NextRows<R, kRows> second;

  FN_INLINE bool any() const { return first.any(); }
  FN_INLINE void read(int64_t begin, int64_t end) const {
    first.read(begin, end);
    second.read(begin, end);
  }
};

/// Nothing is asked for early.
struct NoNextRows {
  static constexpr bool kEver = false;
  FN_INLINE bool any() const { return false; }
  FN_INLINE void read(int64_t, int64_t) const {}
};

/// for_columns, before each strip of which the same columns of the next rows are asked for. Asking
/// in the sweep's own loop, or only testing whether to ask, cost 8 % where everything is in cache.
template <class T, class Next, class Body>
FN_INLINE void for_columns_with_next(int64_t begin, int64_t end, const Next& next, Body body) {
  constexpr int64_t kStrip = 2 * kLanes<T>;
  int64_t i = begin;
  if constexpr (Next::kEver) {
    if (next.any()) {
      for (; i + kStrip <= end; i += kStrip) {
        next.read(i, i + kStrip);
#pragma GCC unroll 1  // the body is large: once less of it
        for (int64_t j = i; j < i + kStrip; j += kLanes<T>) body(j, Full{});
      }
    }
  }
  for_columns<T>(i, end, body);
}
