// The executor catches wrong barriers, shuffles and clusters, and nothing in kernels that are
// right.
#include "test_kernels.h"

namespace {

using namespace simt_test;

// ---- Barriers ----

TEST_F(Simt, ExitedThreadAtABarrier) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        if (a.bug && threadIdx.x == 40) return;
        __syncthreads();
      },
      {64}, same, "deadlock: block 0, threads 0-39 wait at __syncthreads, line ");
}

TEST_F(Simt, DivergentBarrier) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        if (a.bug && threadIdx.x >= 32) {
          __syncthreads();
        } else {
          __syncthreads();
        }
      },
      {64}, same, "waits at another one, in line");
}

TEST_F(Simt, BarrierAgainstShuffle) {
  check(
      [](Args a) {
        if (a.bug && threadIdx.x == 3) __syncthreads();
        put(a.out + threadIdx.x, warp_sum(1));
        if (!(a.bug && threadIdx.x == 3)) __syncthreads();
      },
      {32}, [](unsigned) { return 32.0f; }, "wait at __shfl_xor_sync (0xffffffff)");
}

/// The first 64 threads produce for the other 64, through two named barriers.
TEST_F(Simt, NamedBarriers) {
  check(
      [](Args a) {
        float* slot = shared_floats() + threadIdx.x % 64;
        for (int i = 0; i < 3; ++i) {
          if (threadIdx.x < 64) {
            if (i > 0) named_barrier(2, 128);
            put_shared(slot, 100 * i + threadIdx.x);
            if (!(a.bug && i == 2)) named_barrier(1, 128);
            if (a.bug && i == 2) named_barrier(3, 64);
            if (i == 2) put(a.out + threadIdx.x, 0);
          } else {
            if (!(a.bug && i == 2)) named_barrier(1, 128);
            const float v = get_shared(shared_floats() + 127 - threadIdx.x);
            if (i < 2) named_barrier(2, 128);
            if (i == 2) put(a.out + threadIdx.x, v);
          }
        }
      },
      {128}, [](unsigned i) { return i < 64 ? 0.0f : 200.0f + 127 - i; },
      "with no barrier in between");
}

TEST_F(Simt, NamedBarrierMisuse) {
  expect_error([](Args) { named_barrier(0, 64); }, {64}, "must be 1 to 15");
  expect_error([](Args) { named_barrier(16, 64); }, {64}, "must be 1 to 15");
  expect_error([](Args) { named_barrier(1, 40); }, {64}, "not whole warps");
  expect_error([](Args) { named_barrier(1, 96); }, {64}, "not whole warps");
  expect_error([](Args) { named_barrier(1, threadIdx.x % 2 ? 32 : 64); }, {64},
               "of 32 threads, while thread 0 waits for 64 there");
  expect_error(
      [](Args) {
        if (threadIdx.x % 2) named_barrier(1, 32);
      },
      {64}, "complete with only some lanes");
  expect_error(
      [](Args) {
        if (threadIdx.x < 32) named_barrier(7, 64);
      },
      {64}, "threads 0-31 wait at named_barrier (0x7)");
}

// ---- Shuffles ----

TEST_F(Simt, ShuffleKinds) {
  check(
      [](Args a) {
        const int lane = threadIdx.x;
        const unsigned mask = 0xffu << lane / 8 * 8;  // separate groups of 8 lanes
        float sum = lane;
        for (int d = 4; d > 0; d /= 2) sum += __shfl_xor_sync(mask, sum, d, 8);
        const double up = __shfl_up_sync(mask, double(lane), 1, 8);
        const uint64_t down = __shfl_down_sync(mask, uint64_t(lane) << 40, 3, 8);
        const int first = __shfl_sync(mask, lane, a.bug ? 8 : 0, a.bug ? 32 : 8);
        const bool right = sum == lane / 8 * 64 + 28 && up == (lane % 8 ? lane - 1 : lane) &&
                           down >> 40 == unsigned(lane % 8 + 3 < 8 ? lane + 3 : lane) &&
                           first == lane / 8 * 8;
        put(a.out + lane, right);
      },
      {32}, [](unsigned) { return 1.0f; }, "reads from lane 8 outside the mask 0x");
}

TEST_F(Simt, ShuffleWidth) {
  expect_error([](Args) { __shfl_xor_sync(kFullMask, 1, 1, 12); }, {32}, "width 12");
  expect_error([](Args) { __shfl_xor_sync(kFullMask, 1, 1, 64); }, {32}, "width 64");
}

TEST_F(Simt, GroupsOfAWarpMayDiverge) {
  check(
      [](Args a) {  // each group of 8 lanes shuffles another number of times
        const unsigned group = threadIdx.x / 8;
        float v = 1;
        for (unsigned i = 0; i <= group; ++i) v += __shfl_xor_sync(0xffu << group * 8, v, 1, 8);
        put(a.out + threadIdx.x, v);
      },
      {32}, [](unsigned i) { return float(2 << i / 8); }, nullptr);
}

TEST_F(Simt, MissingLane) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        if (a.bug && threadIdx.x == 30) return;
        warp_sum(1);
      },
      {32}, same, "exit");  // "exits, but thread .. waits for it" or "lanes .. have exited"
}

TEST_F(Simt, MissingLaneInTheNaturalOrder) {
  expect_error(
      [](Args) {
        if (threadIdx.x != 31) warp_sum(1);
      },
      {32}, "thread 31, test_kernels.h:");
  expect_error(
      [](Args) {
        if (threadIdx.x != 0) warp_sum(1);
      },
      {32}, "lanes 0x1 of mask 0xffffffff have exited");
}

TEST_F(Simt, LaneAtAnotherShuffle) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        if (a.bug && threadIdx.x == 30) __shfl_up_sync(kFullMask, 1, 1);
        __shfl_xor_sync(kFullMask, 1, 1);
      },
      {32}, same, " waits for it at __shfl_");
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        __shfl_xor_sync(a.bug && threadIdx.x == 7 ? 0xff : kFullMask, 1, 1);
      },
      {32}, same, " waits for it at __shfl_xor_sync with mask 0x");
}

TEST_F(Simt, MaskMisuse) {
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        __syncwarp(a.bug ? 0xfu : kFullMask);
      },
      {32}, same, "is not in its own mask 0xf");
  check(
      [](Args a) {
        put(a.out + threadIdx.x, threadIdx.x);
        __syncwarp(a.bug ? kFullMask : 0xffffu);
      },
      {16}, same, "names lanes beyond the block");
}

// ---- Clusters ----

/// Every block sends its number to all blocks of its cluster.
TEST_F(Simt, ClusterReduction) {
  check(
      [](Args a) {
        float* sums = shared_floats();
        if (!a.bug) cluster_barrier();
        const float sum = warp_sum(get(a.in + global_thread()));
        if (threadIdx.x < 4) {
          store_shared_of<4>(threadIdx.x, sums + cluster_rank(), {{std::bit_cast<uint32_t>(sum)}});
        }
        cluster_barrier();
        float total = 0;
        for (int i = 0; i < 4; ++i) total += get_shared(sums + i);
        put(a.out + global_thread(), total);
      },
      {32, 8, 4}, [](unsigned i) { return 128 * 127 / 2 + 128 * 128 * float(i / 128); },
      "before the first cluster_barrier");
}

TEST_F(Simt, ReadOfARemoteStoreBeforeTheBarrier) {
  check(
      [](Args a) {
        cluster_barrier();
        const float v = threadIdx.x;
        store_shared_of<4>(cluster_rank() ^ 1, shared_floats() + threadIdx.x,
                           {{std::bit_cast<uint32_t>(v)}});
        if (!a.bug) cluster_barrier();
        if (a.bug) __syncthreads();
        put(a.out + global_thread(), get_shared(shared_floats() + threadIdx.x));
        if (a.bug) cluster_barrier();
      },
      {32, 2, 2}, [](unsigned i) { return float(i % 32); }, "load_shared of byte ");
}

TEST_F(Simt, RemoteStoreToABlockThatMayHaveFinished) {
  check(
      [](Args a) {
        put(a.out + global_thread(), 1);
        cluster_barrier();
        if (threadIdx.x == 0 && cluster_rank() == 0) store_shared_of<4>(1, shared_floats(), {{7}});
        if (!a.bug) cluster_barrier();
      },
      {32, 2, 2}, [](unsigned) { return 1.0f; }, "finished");
}

TEST_F(Simt, RemoteStoreToAFinishedBlock) {
  expect_error(
      [](Args) {
        cluster_barrier();
        if (cluster_rank() == 0) return;
        __syncthreads();  // in the natural order, block 0 finishes meanwhile
        store_shared_of<4>(0, shared_floats() + threadIdx.x, {{7}});
      },
      {32, 2, 2}, "store_shared_of block 0, which has finished");
}

TEST_F(Simt, WrongRank) {
  check(
      [](Args a) {
        put(a.out + global_thread(), 1);
        cluster_barrier();
        if (threadIdx.x == 0) {
          store_shared_of<4>(a.bug ? 2 : 1, shared_floats() + cluster_rank(), {{7}});
        }
        cluster_barrier();
      },
      {32, 4, 2}, [](unsigned) { return 1.0f; }, "store_shared_of block 2 of a cluster of 2");
}

TEST_F(Simt, DivergentClusterBarrier) {
  check(
      [](Args a) {
        put(a.out + global_thread(), 1);
        if (!(a.bug && cluster_rank() == 1)) cluster_barrier();
      },
      {32, 2, 2}, [](unsigned) { return 1.0f; }, "threads 0-31 wait at cluster_barrier, line ");
}

// ---- The executor itself ----

TEST_F(Simt, InvalidLaunches) {
  const auto kernel = [](Args) {};
  EXPECT_NE("", run(kernel, {0}, false));
  EXPECT_NE("", run(kernel, {1025}, false));
  EXPECT_NE("", run(kernel, {32, 0}, false));
  EXPECT_NE("", run(kernel, {32, 3, 2}, false));
  EXPECT_NE("", run(kernel, {32, 1, 1, 228 * 1024}, false));
  EXPECT_EQ("", run(kernel, {1024, 8, 8, 227 * 1024}, false));
  EXPECT_EQ("", run(kernel, {32, 16, 16}, false));
  EXPECT_NE("", run(kernel, {32, 32, 32}, false));
}

TEST_F(Simt, Statistics) {
  const auto before = simt::statistics();
  EXPECT_EQ("", run(
                    [](Args a) {
                      put(a.out + global_thread(), warp_sum(get(a.in)));
                      __syncthreads();
                    },
                    {64, 2}, false));
  const auto& after = simt::statistics();
  EXPECT_EQ(1u, after.launches - before.launches);
  EXPECT_EQ(2u, after.blocks - before.blocks);
  EXPECT_EQ(128u, after.threads - before.threads);
  EXPECT_EQ(128u, after.loads - before.loads);
  EXPECT_EQ(128u, after.stores - before.stores);
  EXPECT_EQ(128u, after.barriers - before.barriers);
  EXPECT_EQ(5 * 128u, after.shuffles - before.shuffles);
}

}  // namespace
