// The race check against full vector clocks, on random programs: it never blames a program without
// a race, and finds nearly all races.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.cuh"

namespace {

using namespace fusednorm::cuda;

constexpr unsigned kBlocks = 2, kThreads = 96, kAll = kBlocks * kThreads, kWords = 3;
using VectorClock = std::array<uint32_t, kAll>;

enum class Sync { kNone, kCluster, kBlock, kNamed, kLanes };
struct Step {
  int word = -1;  // to access, before the synchronisation; -1: none
  bool write = false, remote = false;
  Sync sync = Sync::kNone;
  int id = 0;              // of the named barrier
  unsigned mask = 0;       // of the lanes
  std::vector<int> group;  // the threads that meet
};

struct Word {
  unsigned writer;
  uint32_t written;
  VectorClock read;
};

struct Program {
  std::vector<std::vector<Step>> steps;  // [phase][thread]

  std::vector<VectorClock> clocks = std::vector<VectorClock>(kAll);
  std::map<std::pair<int, int>, VectorClock> published;  // [phase, thread]: before they met
  Word words[kBlocks][kWords] = {};
  bool race = false, missed = false;

  bool is_race(unsigned t, const Word& word, bool write) const {
    const VectorClock& known = clocks[t];
    if (known[word.writer] < word.written) return true;
    for (unsigned u = 0; write && u < kAll; ++u) {
      if (u != t && known[u] < word.read[u]) return true;
    }
    return false;
  }
  void access(unsigned t, Word& word, bool write) {
    if (write) word = {t, clocks[t][t], {}};
    if (!write) word.read[t] = clocks[t][t];
  }
  void meet(int phase, unsigned t, const std::vector<int>& group) {
    for (int u : group) {
      const VectorClock& other = published.at({phase, u});
      for (unsigned i = 0; i < kAll; ++i) clocks[t][i] = std::max(clocks[t][i], other[i]);
    }
    ++clocks[t][t];
  }
};

Program random_program(std::mt19937& random, int phases) {
  const auto one_in = [&](int n) { return random() % n == 0; };
  const int sparse = 20 << random() % 4;
  Program p;
  p.steps.assign(phases, std::vector<Step>(kAll));
  const auto set = [&](int phase, Sync sync, int id, unsigned mask, const std::vector<int>& group) {
    for (int t : group) {
      Step& s = p.steps[phase][t];
      s.sync = sync, s.id = id, s.mask = mask, s.group = group;
    }
  };
  for (int phase = 0; phase < phases; ++phase) {
    for (Step& s : p.steps[phase]) {
      if (phase == 0 || !one_in(sparse)) continue;
      s.word = random() % kWords, s.write = one_in(4), s.remote = s.write && one_in(3);
    }
    if (phase == 0 || phase == phases - 1 || one_in(8)) {
      std::vector<int> all(kAll);
      for (unsigned t = 0; t < kAll; ++t) all[t] = t;
      set(phase, Sync::kCluster, 0, 0, all);
      continue;
    }
    for (unsigned block = 0; block < kBlocks; ++block) {
      const unsigned kind = random() % 8, warps = random() % 8;
      std::vector<int> group;
      for (unsigned t = 0; t < kThreads; ++t) {
        if (kind < 1 || warps >> t / 32 & 1) group.push_back(block * kThreads + t);
      }
      if (kind < 1) set(phase, Sync::kBlock, 0, 0, group);
      if (kind >= 1 && kind < 4) set(phase, Sync::kNamed, 1 + warps, 0, group);
      for (unsigned warp = 0; kind >= 4 && warp < kThreads / 32; ++warp) {
        const unsigned mask = one_in(2) ? 0xffffffffu : random() & random();
        std::vector<int> lanes;
        for (unsigned lane = 0; lane < 32; ++lane) {
          if (mask >> lane & 1) lanes.push_back(block * kThreads + warp * 32 + lane);
        }
        set(phase, Sync::kLanes, 0, mask, lanes);
      }
    }
  }
  return p;
}

struct Args {
  Program* program;
};

void interpret(Args args) {
  Program& p = *args.program;
  const unsigned block = cluster_rank(), t = block * kThreads + threadIdx.x;
  p.clocks[t][t] = 1;
  const auto address = [](int word) { return shared_memory() + 4 * word; };
  for (unsigned i = 0; i < kWords; ++i) {
    if (threadIdx.x != 0) continue;
    p.access(t, p.words[block][i], true);
    store_shared<4>(address(i), {{0}});
  }
  for (int phase = 0; phase < int(p.steps.size()); ++phase) {
    const Step& s = p.steps[phase][t];
    if (s.word >= 0 && !p.missed) {
      Word& word = p.words[block ^ s.remote][s.word];
      p.race = p.is_race(t, word, s.write);
      if (s.write) {
        store_shared_of<4>(block ^ s.remote, address(s.word), {{0}});
      } else {
        load_shared<4>(address(s.word));
      }
      p.missed = p.race;  // else the executor has ended the launch
      p.access(t, word, s.write);
    }
    p.published[{phase, t}] = p.clocks[t];
    if (s.sync == Sync::kNone) continue;
    if (s.sync == Sync::kCluster) cluster_barrier();
    if (s.sync == Sync::kBlock) __syncthreads();
    if (s.sync == Sync::kNamed) named_barrier(s.id, s.group.size());
    if (s.sync == Sync::kLanes) __syncwarp(s.mask);
    p.meet(phase, t, s.group);
  }
}

TEST(SimtRaces, AgreeWithVectorClocks) {
  std::mt19937 random(1);
  int clean = 0, caught = 0, missed = 0;
  for (int i = 0; i < 400; ++i) {
    Program p = random_program(random, 4 + i % 16);
    simt::set_seed(i % 4);
    std::string error;
    try {
      launch_kernel(interpret, Args{&p}, {"random", kBlocks, kThreads, kBlocks, 64}, nullptr);
    } catch (const std::runtime_error& e) {
      error = e.what();
    }
    if (error.empty()) {
      ++(p.missed ? missed : clean);
    } else {
      ASSERT_TRUE(p.race) << "program " << i << ": " << error;
      ASSERT_NE(std::string::npos, error.find("with no barrier in between")) << error;
      ++(p.missed ? missed : caught);
    }
  }
  simt::set_seed(0);
  EXPECT_GT(clean, 20);
  EXPECT_GT(caught, 100);
  EXPECT_LE(missed, caught / 50);
  RecordProperty("clean", clean);
  RecordProperty("caught", caught);
  RecordProperty("missed", missed);
}

}  // namespace
