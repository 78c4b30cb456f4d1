#pragma once

// What GroupNorm needs in both layouts: threads, scratch memory, sums in fp64. Included by
// group.cpp.

constexpr int64_t kGroupGrainBytes = 64 * 1024;  // a thread is worth waking for that much

template <class Body>
FN_INLINE void parallel_for(const Parallel& parallel, int64_t count, int64_t item_bytes,
                            Body body) {
  const int64_t grain = item_bytes >= kGroupGrainBytes ? 1 : kGroupGrainBytes / item_bytes;
  parallel.run(
      count, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); },
      &body);
}

template <class T>
struct Scratch {
  T* data;
  explicit Scratch(int64_t size) : data(new T[static_cast<unsigned long>(size)]()) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { delete[] data; }
};

FN_INLINE void add_to(double* sums, f64v a, Full) { store(sums, load(sums) + a); }
FN_INLINE void add_to(double* sums, f32v a, Full) {
  using half_f32v = float __attribute__((vector_size(kVectorBytes / 2)));
  half_f32v halves[2];
  __builtin_memcpy(halves, &a, sizeof(a));
  store(sums, load(sums) + __builtin_convertvector(halves[0], f64v));
  sums += kLanes<double>;
  store(sums, load(sums) + __builtin_convertvector(halves[1], f64v));
}
template <class V>
FN_INLINE void add_to(double* sums, V a, Part part) {
  for (int k = 0; k < part.count; ++k) sums[k] += static_cast<double>(a[k]);
}

/// grad_weight and grad_bias are summed over chunks of samples, then over the chunks. A chunk is a
/// function of the shape alone, so the bits do not depend on the number of threads: 64 chunks, but
/// none so small that its sums are a large part of the traffic.
FN_INLINE int64_t samples_per_chunk(const GroupShape& shape) {
  const int64_t for_64 = (shape.samples + 63) / 64, least = (15 + shape.spatial) / shape.spatial;
  const int64_t chunk = for_64 > least ? for_64 : least;
  return chunk < 1024 ? chunk : 1024;
}

/// Sums over the samples of each chunk, in fp64: [chunks, 2, channels].
struct ChannelGradients {
  const GroupBackwardArgs& args;
  int64_t chunk, chunks, channels;
  Scratch<double> sums;

  explicit ChannelGradients(const GroupBackwardArgs& a)
      : args(a),
        chunk(samples_per_chunk(a.shape)),
        chunks((a.shape.samples + chunk - 1) / chunk),
        channels(a.shape.channels()),
        sums(wanted() ? chunks * 2 * channels : 0) {}

  bool wanted() const { return args.grad_weight != nullptr || args.grad_bias != nullptr; }
  double* weight(int64_t c) { return wanted() ? sums.data + c * 2 * channels : nullptr; }
  double* bias(int64_t c) { return wanted() ? sums.data + (c * 2 + 1) * channels : nullptr; }
  int64_t begin(int64_t c) const { return c * chunk; }
  int64_t end(int64_t c) const {
    return args.shape.samples < (c + 1) * chunk ? args.shape.samples : (c + 1) * chunk;
  }
  void finish() {
    if (args.grad_weight != nullptr) {
      reduce<double>(sums.data, chunks, 2 * channels, args.grad_weight_dtype, args.grad_weight, 0,
                     channels);
    }
    if (args.grad_bias != nullptr) {
      reduce<double>(sums.data + channels, chunks, 2 * channels, args.grad_bias_dtype,
                     args.grad_bias, 0, channels);
    }
  }
};
