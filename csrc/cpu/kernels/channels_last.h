#pragma once

// GroupNorm, channels last: the channels of a position lie side by side, so a group is no
// contiguous row. A vector holds the same channels of one position after the other; what belongs to
// a group (pivot, mean, rstd) is spread over its channels first, so that no loop over elements
// knows of groups. Included by kernels.h.

// Sums run over 32 positions in fp32, and from there on in fp64.
constexpr int64_t kRunPositions = 32;
// Vectors of a position that are taken together: their sums and coefficients stay in registers.
#if defined(FUSEDNORM_AVX512)
constexpr int kStrip = 4;
#else
constexpr int kStrip = 2;
#endif
// How far ahead memory is asked for: where a piece of a position ends, prefetchers lose the track.
constexpr int64_t kAheadPositions = 16;

/// body(first channel, number of vectors, part): strips of whole vectors, whole vectors, one part.
template <class T, class Body>
FN_INLINE void for_strips(int64_t channels, Body body) {
  int64_t i = 0;
  for (; i + kStrip * kLanes<T> <= channels; i += kStrip * kLanes<T>) {
    body(i, Count<kStrip>{}, Full{});
  }
  for (; i + kLanes<T> <= channels; i += kLanes<T>) body(i, Count<1>{}, Full{});
  if (i < channels) body(i, Count<1>{}, Part{static_cast<int>(channels - i)});
}

/// Some groups of one sample. Arrays of one number a channel are padded to whole vectors.
template <class T>
struct GroupBlock {
  const GroupShape& shape;
  int64_t sample, first_group, groups;

  int64_t first_channel() const { return first_group * shape.group_channels; }
  int64_t channels() const { return groups * shape.group_channels; }
  /// From one array to the next: whole vectors, and one for what spread writes beyond.
  int64_t stride() const {
    return (channels() + kLanes<T> - 1) / kLanes<T> * kLanes<T> + kLanes<T>;
  }
  int64_t offset() const { return sample * shape.sample_size() + first_channel(); }
  int64_t row(int64_t group) const { return sample * shape.groups + first_group + group; }
  /// Whether the vectors of every position may be streamed to.
  bool may_stream(const T* first_position) const {
    return shape.channels() % kLanes<T> == 0 && FUSEDNORM_ISA::may_stream(first_position);
  }
  /// Sets one group's channels in an array, in whole vectors: what comes behind them is set after.
  FN_INLINE void spread(int64_t group, acc_of<T> value, acc_of<T>* array) const {
    acc_of<T>* const first = array + group * shape.group_channels;
    const auto all = Broadcast<vector_of<T>>::of(value);
    for (int64_t d = 0; d < shape.group_channels; d += kLanes<T>) store(first + d, all);
  }
};

/// How a shape is cut, by itself alone: into blocks of groups whose second sweep finds them in the
/// cache, but whose positions are no smaller than a few cache lines; and a block too large for the
/// cache into chunks of positions, which idle threads may take.
template <class T>
struct Blocking {
  const GroupShape& shape;
  int64_t groups, chunk, chunks;  // groups of a block, positions of a chunk, chunks of a block

  Blocking(const GroupShape& s, int64_t tensors) : shape(s) {
    constexpr int64_t kLeastBytes = 256, kCacheBytes = 512 * 1024;
    const int64_t channel_bytes = s.group_channels * static_cast<int64_t>(sizeof(T));
    const int64_t least = (kLeastBytes + channel_bytes - 1) / channel_bytes;
    const int64_t most = kCacheBytes / (tensors * channel_bytes * s.spatial);
    // A block that ends inside a cache line makes every vector of the next one cross lines.
    int64_t whole = 1;
    while (whole < 64 && whole * channel_bytes % 64 != 0) whole *= 2;
    groups = most / whole * whole;
    if (groups < least) groups = (least + whole - 1) / whole * whole;
    if (groups > s.groups) groups = s.groups;
    const int64_t runs = kCacheBytes / (tensors * groups * channel_bytes * kRunPositions);
    chunk = (runs < 2 ? 2 : runs) * kRunPositions;
    chunks = (s.spatial + chunk - 1) / chunk;
  }

  int64_t block_bytes() const { return groups * shape.cols() * static_cast<int64_t>(sizeof(T)); }
  int64_t blocks() const { return (shape.groups + groups - 1) / groups; }
  GroupBlock<T> block(int64_t sample, int64_t b) const {
    const int64_t first = b * groups, left = shape.groups - first;
    return {shape, sample, first, left < groups ? left : groups};
  }
  int64_t end(int64_t c) const {
    return shape.spatial < (c + 1) * chunk ? shape.spatial : (c + 1) * chunk;
  }
  /// body(first position, position after the last, chunk) for each chunk.
  template <class Body>
  void for_chunks(const Parallel& parallel, Body body) const {
    parallel_for(parallel, chunks, kGroupGrainBytes, [&](int64_t begin, int64_t last) {
      for (int64_t c = begin; c < last; ++c) body(c * chunk, end(c), c);
    });
  }
};

/// body(first position, position after the last) calls what make(i, count, part) gives, with the
/// offset of each strip of each position. Runs of positions, so that strips side by side share
/// cache lines.
template <class T, class Run>
FN_INLINE void for_runs(const GroupBlock<T>& block, int64_t begin, int64_t end, Run run) {
  for (int64_t first = begin; first < end; first += kRunPositions) {
    const int64_t last = end - first < kRunPositions ? end : first + kRunPositions;
    for_strips<T>(block.channels(), [&](int64_t i, auto count, auto part)
                                        FN_LAMBDA_INLINE { run(first, last, i, count, part); });
  }
}

/// Sums of each channel over all positions, on all threads; sums[k * stride + channel]. `sums` has
/// room for those of each chunk. Sums(block, i, count, part) keeps what a strip needs.
template <class Sums, class T, class... Args>
FN_INLINE void channel_sums(const Blocking<T>& blocking, const GroupBlock<T>& block,
                            const Parallel& parallel, double* sums, const Args&... args) {
  using V = vector_of<T>;
  const int64_t stride = block.stride(), size = Sums::kSums * stride;
  const int64_t step = block.shape.channels();
  blocking.for_chunks(parallel, [&](int64_t begin, int64_t end, int64_t c) {
    double* const of_chunk = sums + c * size;
    for (int64_t i = 0; i < size; ++i) of_chunk[i] = 0;
    for_runs(block, begin, end,
             [&](int64_t first, int64_t last, int64_t i, auto count, auto part) FN_LAMBDA_INLINE {
               typename Sums::template Of<T, count.value, decltype(part)> strip(i, part, args...);
               V acc[Sums::kSums][count.value] = {};
               for (int64_t p = first; p < last; ++p)
                 strip.add(p * step + i, acc, step * kAheadPositions);
               for (int k = 0; k < Sums::kSums; ++k) {
                 for (int v = 0; v < count.value; ++v) {
                   add_to(of_chunk + k * stride + i + v * kLanes<T>, acc[k][v], Full{});
                 }
               }
             });
  });
  for (int64_t c = 1; c < blocking.chunks; ++c) {
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[c * size + i];
  }
}

/// Apply(block, i, count, part)'s store for each strip of each position, on all threads.
template <class Apply, class T, class... Args>
FN_INLINE void apply_channels(const Blocking<T>& blocking, const GroupBlock<T>& block,
                              const Parallel& parallel, const Args&... args) {
  const int64_t step = block.shape.channels();
  blocking.for_chunks(parallel, [&](int64_t begin, int64_t end, int64_t) {
    for_runs(block, begin, end,
             [&](int64_t first, int64_t last, int64_t i, auto count, auto part) FN_LAMBDA_INLINE {
               typename Apply::template Of<T, count.value, decltype(part)> strip(i, part, args...);
               for (int64_t p = first; p < last; ++p)
                 strip.store_at(p * step + i, step * kAheadPositions);
             });
    end_streaming();
  });
}

/// A strip of an array.
template <class T, int n>
struct Strip {
  vector_of<T> v[n];
  template <class Which>
  FN_INLINE Strip(const acc_of<T>* array, Which part) {
#pragma GCC unroll 4
    for (int k = 0; k < n; ++k) v[k] = load(array + k * kLanes<T>, part);
  }
};

/// What the blocks of one thread need in turn.
template <class T>
struct Workspace {
  int64_t stride;
  Scratch<double> sums;
  Scratch<acc_of<T>> arrays, pivots;
  Scratch<RowStatistics<acc_of<T>>> rows;
  Scratch<bool> extreme;

  Workspace(const Blocking<T>& blocking, int kSums, int kArrays)
      : stride(blocking.block(0, 0).stride()),
        sums(blocking.chunks * kSums * stride),
        arrays(kArrays * stride),
        pivots(blocking.groups),
        rows(blocking.groups),
        extreme(blocking.groups) {}
  acc_of<T>* array(int i) const { return arrays.data + i * stride; }
};

/// One group of one sample, copied into a contiguous row (channels first) and back: for the few
/// whose squares over- or underflow.
template <class T>
struct GatheredGroup {
  const GroupBlock<T>& block;
  int64_t group;

  template <class F>
  void for_elements(F f) const {
    const GroupShape& shape = block.shape;
    for (int64_t d = 0; d < shape.group_channels; ++d) {
      for (int64_t p = 0; p < shape.spatial; ++p) {
        f(d * shape.spatial + p, p * shape.channels() + group * shape.group_channels + d);
      }
    }
  }
  void gather(const T* elements, T* row) const {
    for_elements([&](int64_t to, int64_t from) { row[to] = elements[from]; });
  }
  void scatter(const T* row, T* elements) const {
    for_elements([&](int64_t from, int64_t to) { elements[to] = row[from]; });
  }
};
