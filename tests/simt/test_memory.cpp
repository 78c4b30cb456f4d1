// The executor catches wrong accesses to memory, and nothing in kernels that are right.
#include "test_kernels.h"

namespace {

using namespace simt_test;

// ---- Global memory ----

TEST_F(Simt, LoadBeforeTheBeginning) {
  check([](Args a) { put(a.out + threadIdx.x, get(a.in + int(threadIdx.x) - a.bug) + a.bug); },
        {32}, same, "block 0, thread 0, test_memory.cpp:");
  expect_error(
      [](Args a) { get(a.in - 1); }, {1},
      "load_global of 4 bytes at byte -4 of in, before its beginning (it has 16384 bytes)");
}

TEST_F(Simt, LoadPastTheEnd) {
  check(
      [](Args a) {
        const char* p = reinterpret_cast<const char*>(a.in + kFloats - 4) + (a.bug ? 16 : 0);
        put(a.out + threadIdx.x, load_global<16>(p).word[0] != 0);
      },
      {32}, [](unsigned) { return 1.0f; },
      "load_global of 16 bytes at byte 16384 of in, past its end");
}

TEST_F(Simt, LoadAcrossTheEnd) {
  check(
      [](Args a) {
        const char* p = reinterpret_cast<const char*>(a.in + kFloats) - (a.bug ? 2 : 4);
        put(a.out + threadIdx.x, load_global<4>(p).word[0] != 0);
      },
      {32}, [](unsigned) { return 1.0f; }, "at byte 16382 of in, past its end");
}

TEST_F(Simt, StoreOutside) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x + (a.bug && threadIdx.x == 31) * kFloats, threadIdx.x);
      },
      {32}, same, "store_global of 4 bytes at byte 16508 of out, past its end");
}

TEST_F(Simt, StoreToReadOnly) {
  check([](Args a) { put((a.bug ? const_cast<float*>(a.in) : a.out) + threadIdx.x, threadIdx.x); },
        {32}, same, " of in, which is read-only");
}

TEST_F(Simt, MisalignedGlobal) {
  check(
      [](Args a) {
        const auto c = load_global<16>(a.in + 4 * threadIdx.x + a.bug);
        put(a.out + threadIdx.x, std::bit_cast<float>(c.word[0]) / 4);
      },
      {32}, same, "load_global of 16 bytes, misaligned: 4 past a multiple of 16");
}

TEST_F(Simt, DoubleWrite) {
  check(
      [](Args a) {
        put(a.out + global_thread(), global_thread());
        if (a.bug && blockIdx.x == 1 && threadIdx.x == 5) put(a.out + 7, 0);
      },
      {32, 2}, same, "store_global to byte 28 of out, which block 0, thread 7 has written");
}

TEST_F(Simt, LoadOfWhatIsWritten) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        if (a.bug) get(a.out + threadIdx.x);
      },
      {32}, same, "of out, which this launch has written");
  check(
      [](Args a) {
        if (a.bug) get(a.out + threadIdx.x);
        put(a.out + threadIdx.x, threadIdx.x);
      },
      {32}, same, "of out, which this launch has read by load_global");
}

TEST_F(Simt, LoadOfOnesOwn) {
  // In place: what is read is written by the same thread afterwards, and by nobody else.
  check(
      [](Args a) {
        float* const own = a.out + 2 * threadIdx.x;
        const auto c = load_own<8>(own);
        store_global<8>(a.bug && threadIdx.x == 5 ? a.out + 2 : own, c);
        put(own, 2 * threadIdx.x), put(own + 1, 2 * threadIdx.x + 1);
      },
      {32}, same, "of out, which ");
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        __syncthreads();
        if (a.bug) load_own<8>(a.out + (threadIdx.x ^ 2) / 2 * 2);
      },
      {32}, same, "of out, which another thread has written");
}

TEST_F(Simt, LoadOfWhatAnEarlierLaunchWrote) {
  EXPECT_EQ("", run([](Args a) { put(a.out + threadIdx.x, threadIdx.x); }, {32}, false));
  const auto copy = [](Args a) { put(a.out + 32 + threadIdx.x, get(a.out + threadIdx.x)); };
  launch_kernel<Args>(copy, {in_.data(), out_.data(), false}, {"copy", 1, 32, 1, 0}, nullptr);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(i % 32, out_[i]);
}

TEST_F(Simt, UnwrittenOutput) {
  EXPECT_EQ("", run(
                    [](Args a) {
                      if (threadIdx.x != 3) put(a.out + threadIdx.x, 0);
                    },
                    {32}, true));
  EXPECT_NO_THROW(simt::expect_all_written(out_.data(), 12));
  EXPECT_NO_THROW(simt::expect_all_written(out_.data() + 4, 28 * 4));
  try {
    simt::expect_all_written(out_.data(), 32 * 4);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ("simt: byte 12 of out was never written", error.what());
  }
}

TEST_F(Simt, NoMemory) {
  const auto kernel = [](Args a) { get(a.in); };
  EXPECT_THROW(
      launch_kernel<Args>(kernel, {in_.data(), nullptr, false}, {"k", 1, 1, 1, 0}, nullptr),
      std::runtime_error);
}

TEST_F(Simt, OverlappingRanges) {
  simt::register_memory(in_.data(), 64, false, "a");
  simt::register_memory(in_.data() + 4, 64, false, "b");
  simt::register_memory(out_.data(), 64, true, "c");
  EXPECT_THROW(simt::register_memory(out_.data() + 15, 64, true, "d"), std::runtime_error);
  simt::register_memory(out_.data(), 8, false, "view");  // of memory that is written
  const auto kernel = [](Args a) {
    put(a.out, get(a.in + 19));
    if (a.bug) get(a.out);
  };
  launch_kernel<Args>(kernel, {in_.data(), out_.data(), false}, {"k", 1, 1, 1, 0}, nullptr);
  EXPECT_EQ(19, out_[0]);
  EXPECT_THROW(
      launch_kernel<Args>(kernel, {in_.data(), out_.data(), true}, {"k", 1, 1, 1, 0}, nullptr),
      std::runtime_error);
}

// ---- Shared memory ----

/// The sum over the block of each of `rounds` numbers. Without the second barrier, the next round's
/// store races with this round's loads.
template <bool kSecondBarrier>
float block_sums(const float* in, int rounds) {
  float* buffer = shared_floats();
  float total = 0;
  for (int round = 0; round < rounds; ++round) {
    const float sum = warp_sum(get(in + threadIdx.x));
    if (threadIdx.x % 32 == 0) put_shared(buffer + threadIdx.x / 32, sum);
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / 32; ++w) total += get_shared(buffer + w);
    if (kSecondBarrier) __syncthreads();
  }
  return total;
}

TEST_F(Simt, BlockReduction) {
  check(
      [](Args a) {
        const float* in = a.in + blockIdx.x * blockDim.x;
        put(a.out + global_thread(), a.bug ? block_sums<false>(in, 2) : block_sums<true>(in, 2));
      },
      {128, 3}, [](unsigned i) { return 2 * (128 * 127 / 2 + 128 * 128 * float(i / 128)); },
      "with no barrier in between");
}

TEST_F(Simt, ReadAfterWriteInABlock) {
  check(
      [](Args a) {
        put_shared(shared_floats() + threadIdx.x, threadIdx.x);
        if (!a.bug) __syncthreads();
        put(a.out + threadIdx.x, get_shared(shared_floats() + (threadIdx.x ^ 32)));
      },
      {64}, [](unsigned i) { return float(i ^ 32); }, "shared memory, which ");
}

TEST_F(Simt, WriteAfterWriteInABlock) {
  check(
      [](Args a) {
        if (threadIdx.x == 0) put_shared(shared_floats(), 1);
        if (!a.bug) __syncthreads();
        if (threadIdx.x == 32) put_shared(shared_floats(), 2);
        __syncthreads();
        put(a.out + threadIdx.x, get_shared(shared_floats()));
      },
      {64}, [](unsigned) { return 2.0f; }, "wrote with no barrier in between");
}

TEST_F(Simt, ShufflesDoNotOrderMemory) {
  check(
      [](Args a) {
        put_shared(shared_floats() + threadIdx.x, threadIdx.x);
        if (a.bug) {
          warp_sum(0);
        } else {
          __syncwarp();
        }
        put(a.out + threadIdx.x, get_shared(shared_floats() + (threadIdx.x ^ 1)));
      },
      {64}, [](unsigned i) { return float(i ^ 1); }, "wrote with no barrier in between");
}

TEST_F(Simt, SyncwarpOrdersOnlyItsLanes) {
  check(
      [](Args a) {  // a chain: 0 -> 8 by one mask, 8 -> 16 by another
        const unsigned lane = threadIdx.x;
        if (lane == 0) put_shared(shared_floats(), 5);
        if (lane < 16) __syncwarp(0xffffu);
        if (lane >= 8 && lane < 24 && !(a.bug && lane < 16))
          __syncwarp(a.bug ? 0xff0000 : 0xffff00);
        float v = 0;
        if (lane >= 16 && lane < 24) v = get_shared(shared_floats());
        put(a.out + lane, v);
      },
      {32}, [](unsigned i) { return i >= 16 && i < 24 ? 5.0f : 0.0f; },
      "which thread 0 wrote with no barrier");
}

TEST_F(Simt, WriteAfterReadsOfAWarp) {
  check(
      [](Args a) {
        if (threadIdx.x == 0) put_shared(shared_floats(), 1);
        __syncwarp();
        put(a.out + threadIdx.x, get_shared(shared_floats()));
        if (!a.bug) __syncwarp();
        if (threadIdx.x == 0) put_shared(shared_floats(), 2);
      },
      {32}, [](unsigned) { return 1.0f; }, "with no barrier in between");
}

TEST_F(Simt, AnyReaderIsNoticed) {  // in the natural order, where the writer is the latest reader
  expect_error(
      [](Args) {
        if (threadIdx.x == 0) put_shared(shared_floats(), 1);
        __syncthreads();
        if (threadIdx.x == 0) get_shared(shared_floats());
        if (threadIdx.x == 1) put_shared(shared_floats(), 2);
      },
      {64}, "which thread 0 read with no barrier");
  expect_error(
      [](Args) {
        if (threadIdx.x == 0) put_shared(shared_floats(), 1);
        __syncwarp();
        if (threadIdx.x != 0) get_shared(shared_floats());
        if (threadIdx.x == 30) put_shared(shared_floats(), 2);
      },
      {32}, "which thread 1 read with no barrier");
  expect_error(
      [](Args) {
        if (threadIdx.x == 0) put_shared(shared_floats(), 1);
        named_barrier(1, 96);
        if (threadIdx.x >= 32) get_shared(shared_floats());
        __syncwarp();
        if (threadIdx.x == 95) put_shared(shared_floats(), 2);
      },
      {96}, "which warp 1 read with no barrier");
}

TEST_F(Simt, HalvesOfAWordAreApart) {
  check(
      [](Args a) {
        store_shared<2>(shared_memory() + 2 * threadIdx.x, {uint16_t(threadIdx.x)});
        put(a.out + threadIdx.x, load_shared<2>(shared_memory() + 2 * threadIdx.x).half);
      },
      {64}, same, nullptr);
}

TEST_F(Simt, UninitialisedShared) {
  check(
      [](Args a) {
        if (!a.bug || threadIdx.x != 9) put_shared(shared_floats() + threadIdx.x, threadIdx.x);
        put(a.out + global_thread(), get_shared(shared_floats() + threadIdx.x));
      },
      {32, 2}, [](unsigned i) { return float(i % 32); },
      "load_shared of byte 36 of shared memory, which nobody has written");
}

TEST_F(Simt, SharedOfAnEarlierBlockIsUninitialised) {
  check(
      [](Args a) {
        if (!a.bug || blockIdx.x == 0) put_shared(shared_floats() + threadIdx.x, threadIdx.x);
        put(a.out + global_thread(), get_shared(shared_floats() + threadIdx.x));
      },
      {32, 2}, [](unsigned i) { return float(i % 32); }, "nobody has written");
}

TEST_F(Simt, SharedOutside) {
  check(
      [](Args a) {
        float* p = shared_floats() + threadIdx.x + (a.bug && threadIdx.x == 31);
        put_shared(p, threadIdx.x);
        put(a.out + threadIdx.x, get_shared(p));
      },
      {32, 1, 1, 128}, same, "store_shared of 4 bytes at byte 128 of shared memory, which has 128");
  check(
      [](Args a) {
        if (a.bug) get_shared(shared_floats() - 1);
        put(a.out + threadIdx.x, threadIdx.x);
      },
      {32, 1, 1, 0}, same, "load_shared of 4 bytes at byte -4 of shared memory, which has 0");
}

TEST_F(Simt, MisalignedShared) {
  check(
      [](Args a) {
        store_shared<8>(shared_floats() + 2 * threadIdx.x + a.bug, {{threadIdx.x, 0}});
        put(a.out + threadIdx.x, load_shared<8>(shared_floats() + 2 * threadIdx.x).word[0]);
      },
      {32}, same, "store_shared of 8 bytes, misaligned: 4 past a multiple of 8");
}

// ---- Asynchronous copies ----

TEST_F(Simt, ReadOfACopyBeforeTheWait) {
  check(
      [](Args a) {
        copy_async<4>(shared_floats() + threadIdx.x, a.in + threadIdx.x);
        commit_copies();
        if (!a.bug) wait_copies<0>();
        put(a.out + threadIdx.x, get_shared(shared_floats() + threadIdx.x));
        wait_copies<0>();
      },
      {32}, same, "has not arrived");
}

TEST_F(Simt, UncommittedCopiesDoNotArrive) {
  check(
      [](Args a) {
        copy_async<4>(shared_floats() + threadIdx.x, a.in + threadIdx.x);
        if (!a.bug) commit_copies();
        wait_copies<0>();
        put(a.out + threadIdx.x, get_shared(shared_floats() + threadIdx.x));
      },
      {32}, same, "has not arrived");
}

TEST_F(Simt, CopiesOfOthersNeedABarrierToo) {
  check(
      [](Args a) {
        copy_async<4>(shared_floats() + threadIdx.x, a.in + threadIdx.x);
        commit_copies();
        if (a.bug) __syncthreads();
        wait_copies<0>();
        if (!a.bug) __syncthreads();
        put(a.out + threadIdx.x, get_shared(shared_floats() + (threadIdx.x ^ 63)));
      },
      {64}, [](unsigned i) { return float(i ^ 63); }, "load_shared of byte ");
}

TEST_F(Simt, StoreWhereACopyIsUnderWay) {
  check(
      [](Args a) {
        copy_async<4>(shared_floats() + threadIdx.x, a.in + threadIdx.x);
        commit_copies();
        if (!a.bug) wait_copies<0>();
        put_shared(shared_floats() + threadIdx.x, threadIdx.x);
        put(a.out + threadIdx.x, get_shared(shared_floats() + threadIdx.x));
      },
      {32}, same, "the destination of a copy_async by thread");
}

TEST_F(Simt, CopyFromOutside) {
  check(
      [](Args a) {
        copy_async<16>(shared_memory() + 16 * threadIdx.x, a.in + a.bug * kFloats);
        commit_copies();
        wait_copies<0>();
        put(a.out + threadIdx.x, threadIdx.x);
      },
      {32}, same, "load_global of 16 bytes");
}

TEST_F(Simt, ExitBeforeACopyArrives) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        copy_async<16>(shared_floats() + 4 * threadIdx.x, a.in + 4 * threadIdx.x);
        commit_copies();
        if (!a.bug) wait_copies<0>();
      },
      {32}, same, "exits with 1 copies it has not waited for");
}

/// Doubles tiles of 4 floats for each thread; one tile is under way while another is used.
TEST_F(Simt, CopyPipeline) {
  const auto kernel = [](Args a) {
    constexpr int kTiles = 6;
    const int lane = threadIdx.x;
    const auto start = [&](int tile) {
      if (tile < kTiles) {
        copy_async<4>(shared_floats() + tile % 2 * 32 + lane, a.in + tile * 32 + lane);
      }
      commit_copies();
    };
    start(0);
    for (int tile = 0; tile < kTiles; ++tile) {
      start(tile + 1);
      wait_copies<1>();
      __syncwarp();
      put(a.out + tile * 32 + lane, get_shared(shared_floats() + tile % 2 * 32 + 31 - lane));
      if (!a.bug) __syncwarp();  // else the next copy overwrites what others still read
    }
  };
  for (int seed = 0; seed < 4; ++seed) {
    simt::set_seed(seed);
    EXPECT_EQ("", run(kernel, {32}, false));
    for (int i = 0; i < 6 * 32; ++i) EXPECT_EQ(i / 32 * 32 + 31 - i % 32, out_[i]);
    expect_error(kernel, {32}, "copy_async");
  }
}

}  // namespace
