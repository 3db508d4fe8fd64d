// The contract of every eviction policy. Hit rates: policy_hitrate_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "replay/simple_policies.h"

namespace vmem::policy {
namespace {

using core::FrameId;

class PolicyEvictionPolicy : public testing::TestWithParam<replay::MakePolicy> {
 protected:
  PolicyEvictionPolicy() : evictor(GetParam()()) { evictor->resize(1024, 1024); }

  void admit(FrameId id, uint32_t weight = 1) { evictor->admit({.id = id, .weight = weight}); }
  // Evicts victims worth `pages`, not counting probes.
  std::vector<FrameId> evict(uint64_t pages) {
    std::vector<FrameId> ids;
    std::array<Victim, 64> out;
    for (uint64_t got = 0; got < pages;) {
      const size_t n = evictor->victims(pages - got, out);
      size_t real = 0;
      for (size_t i = 0; i < n; ++i) {
        if (!out[i].probe) ids.push_back(out[i].id), ++real;
      }
      if (real == 0) break;
      got += real;
    }
    return ids;
  }

  std::unique_ptr<EvictionPolicy> evictor;
};
INSTANTIATE_TEST_SUITE_P(AllKinds, PolicyEvictionPolicy, testing::ValuesIn(replay::kPolicies),
                         [](const auto& make) { return std::string(make.param()->name()); });

TEST_P(PolicyEvictionPolicy, ColdLeavesFirstThenByPriorityThenHotThenPinned) {
  evictor->admit({.id = 0, .weight = 1, .pinned = true});
  evictor->admit({.id = 1, .weight = 1, .temperature = Temperature::hot});
  evictor->admit({.id = 2, .weight = 1, .priority = Priority::high});
  evictor->admit({.id = 3, .weight = 1, .priority = Priority::normal});
  evictor->admit({.id = 4, .weight = 1, .priority = Priority::low});
  evictor->admit({.id = 5, .weight = 1, .priority = Priority::high, .temperature = Temperature::cold});
  EXPECT_EQ(evict(6), (std::vector<FrameId>{5, 4, 3, 2, 1, 0}));
}

TEST_P(PolicyEvictionPolicy, OfTheColdWhatWasReadAheadWaitsForItsUse) {
  evictor->admit({.id = 0, .weight = 1, .temperature = Temperature::cold, .ahead = true, .hinted = true});
  evictor->admit({.id = 1, .weight = 1, .temperature = Temperature::cold, .ahead = true});
  evictor->admit({.id = 2, .weight = 1, .temperature = Temperature::cold});
  evictor->admit({.id = 3, .weight = 1, .temperature = Temperature::cold, .ahead = true});
  evictor->admit({.id = 4, .weight = 1});
  EXPECT_EQ(evict(1), std::vector<FrameId>{2});
  evictor->touched(1);  // in its place
  evictor->hold(3);
  evictor->touched(3);  // by a lease
  evictor->unhold(3);
  EXPECT_EQ(evict(4), (std::vector<FrameId>{1, 3, 0, 4}));
}

// A call that wants more than there are used-up blocks does not evict others with them.
TEST_P(PolicyEvictionPolicy, OfWhatIsUsedUpOneCallTakesNoMore) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  for (FrameId id = 6; id < 8; ++id) evictor->advise(id, Temperature::cold, Priority::normal, false);
  std::array<Victim, 64> out;
  ASSERT_EQ(evictor->victims(6, out), 2u);
  EXPECT_EQ(out[0].id, 6u);
  EXPECT_EQ(out[1].id, 7u);
  EXPECT_EQ(evict(6).size(), 6u);
}

TEST_P(PolicyEvictionPolicy, AdviceMovesABlock) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  evictor->advise(7, Temperature::cold, Priority::normal, false);
  EXPECT_EQ(evict(1), std::vector<FrameId>{7});
  for (FrameId id = 0; id < 4; ++id) evictor->advise(id, Temperature::hot, Priority::normal, false);
  evictor->advise(4, Temperature::normal, Priority::normal, true);
  evictor->advise(0, Temperature::normal, Priority::low, false);
  const auto order = evict(7);
  ASSERT_EQ(order.size(), 7u);
  EXPECT_EQ(order[0], 0u);
  EXPECT_EQ(order[6], 4u);
  for (size_t i = 3; i < 6; ++i) EXPECT_LE(order[i], 3u) << "hot leave after all others";
}

// A prefetch of up to half of memory must not evict its own blocks; guesses get a quarter.
TEST(PolicyAnnounced, WhatTheProgramAnnouncedOutlivesWhatIsOnlyOld) {
  for (const bool hinted : {true, false}) {
    auto evictor = replay::kAdaptive();
    evictor->resize(2048, 1024);
    for (FrameId id = 0; id < 1024; ++id) evictor->admit({.id = id, .weight = 1});
    size_t lost = 0;
    for (FrameId id = 1024; id < 1536; ++id) {
      std::array<Victim, 64> out;
      bool real = false;
      for (int tries = 0; tries < 64 && !real; ++tries) {
        const size_t n = evictor->victims(1, out);
        for (size_t i = 0; i < n; ++i) {
          if (out[i].probe) continue;
          real = true;
          if (out[i].id >= 1024) ++lost;
        }
      }
      ASSERT_TRUE(real);
      evictor->admit({.id = id, .weight = 1, .ahead = true, .hinted = hinted});
    }
    if (hinted) {
      EXPECT_EQ(lost, 0u);
    } else {
      EXPECT_GT(lost, 64u) << "a guess may not take everything";
    }
  }
}

TEST_P(PolicyEvictionPolicy, AdviceThatChangesNothingKeepsTheTurn) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  auto other = GetParam()();
  other->resize(1024, 1024);
  for (FrameId id = 0; id < 8; ++id) other->admit({.id = id, .weight = 1});
  for (FrameId id = 0; id < 8; ++id) evictor->advise(id, Temperature::normal, Priority::normal, false);
  std::array<Victim, 1> a, b;
  for (int i = 0; i < 8; ++i) {
    ASSERT_EQ(evictor->victims(1, a), 1u);
    ASSERT_EQ(other->victims(1, b), 1u);
    EXPECT_EQ(a[0].id, b[0].id);
  }
}

TEST_P(PolicyEvictionPolicy, HeldBlocksAreNeverVictimsAndHoldsCount) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  for (FrameId id = 0; id < 4; ++id) evictor->hold(id);
  evictor->hold(0);
  auto gone = evict(8);
  std::sort(gone.begin(), gone.end());
  EXPECT_EQ(gone, (std::vector<FrameId>{4, 5, 6, 7}));
  EXPECT_TRUE(evict(1).empty());
  evictor->unhold(0);
  EXPECT_TRUE(evict(1).empty()) << "one hold of two is left";
  evictor->unhold(0);
  EXPECT_EQ(evict(1), std::vector<FrameId>{0});
}

TEST_P(PolicyEvictionPolicy, AdviceOnAHeldBlockCountsWhenItIsLetGo) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  evictor->hold(6);
  evictor->advise(6, Temperature::cold, Priority::normal, false);
  EXPECT_NE(evict(1).at(0), 6u);
  evictor->unhold(6);
  EXPECT_EQ(evict(1), std::vector<FrameId>{6});
}

TEST_P(PolicyEvictionPolicy, VictimsAreWorthWhatWasAsked) {
  for (FrameId id = 0; id < 16; ++id) admit(id, id % 2 == 0 ? 512 : 1);
  std::array<Victim, 64> out;
  uint64_t pages = 0;
  const size_t n = evictor->victims(1024, out);
  for (size_t i = 0; i < n; ++i) {
    if (!out[i].probe) pages += out[i].id % 2 == 0 ? 512 : 1;
  }
  EXPECT_GE(pages, 1024u);
  EXPECT_LT(pages, 1024u + 512u) << "and not a block more";
}

TEST_P(PolicyEvictionPolicy, AVictimIsForgottenAndMayComeBack) {
  admit(3);
  EXPECT_EQ(evict(1), std::vector<FrameId>{3});
  EXPECT_TRUE(evict(1).empty());
  evictor->touched(3);  // too late, harmless
  evictor->remove(3);
  evictor->hold(3);
  evictor->unhold(3);
  EXPECT_TRUE(evict(1).empty());
  evictor->admit({.id = 3, .weight = 1, .age = 0});
  EXPECT_EQ(evict(1), std::vector<FrameId>{3});
}

// Whatever makes a block come first: its pages may be pinned for as long as the program runs.
TEST_P(PolicyEvictionPolicy, ABlockThatCannotLeaveKeepsNoOtherFromBeingNamed) {
  struct Way {
    const char* what;
    Priority priority;
    Temperature temperature;
    bool pinned, ahead;
  };
  constexpr Way kWays[] = {{"cold", Priority::normal, Temperature::cold, false, false},
                           {"cold, read ahead", Priority::normal, Temperature::cold, false, true},
                           {"low", Priority::low, Temperature::normal, false, false},
                           {"normal", Priority::normal, Temperature::normal, false, false},
                           {"high", Priority::high, Temperature::normal, false, false},
                           {"hot", Priority::normal, Temperature::hot, false, false},
                           {"pinned", Priority::normal, Temperature::normal, true, false}};
  constexpr FrameId kStuck = 100, kAll = 400;
  for (const Way& stuck : kWays) {
    for (const Way& others : kWays) {
      SCOPED_TRACE(std::string(others.what) + " behind " + stuck.what);
      auto policy = GetParam()();
      policy->resize(kAll, kAll);
      for (FrameId id = 0; id < kAll; ++id) {
        const Way& way = id < kStuck ? stuck : others;
        policy->admit({.id = id,
                       .weight = 1,
                       .priority = way.priority,
                       .temperature = way.temperature,
                       .pinned = way.pinned,
                       .ahead = way.ahead});
      }
      std::array<Victim, 32> out;
      size_t gone = 0, named = 0;
      for (; gone < kAll - kStuck && named < 10 * kAll; ++named) {
        const size_t n = policy->victims(8, out);
        ASSERT_NE(n, 0u);
        for (const Victim& v : std::span(out).first(n)) {
          if (v.probe) continue;
          ++named;
          EXPECT_FALSE(v.refused) << "others are left";
          if (v.id >= kStuck) {
            ++gone;
            continue;
          }
          policy->admit({.id = v.id,
                         .weight = 1,
                         .priority = stuck.priority,
                         .temperature = stuck.temperature,
                         .pinned = stuck.pinned,
                         .refused = true,
                         .age = 0});
        }
      }
      EXPECT_EQ(gone, kAll - kStuck);
      EXPECT_LT(named, 3 * kAll);
      // Now they are all that is left.
      std::set<FrameId> last;
      for (size_t n = 1; n != 0;) {
        n = policy->victims(8, out);
        for (const Victim& v : std::span(out).first(n)) {
          if (!v.probe) last.insert(v.id);
        }
      }
      EXPECT_EQ(last.size(), kStuck);
    }
  }
}

TEST_P(PolicyEvictionPolicy, ABlockThatCouldNotLeaveComesFirstAgainAfterAWhile) {
  for (FrameId id = 0; id < 64; ++id) admit(id);
  for (const FrameId id : {FrameId{100}, FrameId{101}})
    evictor->admit({.id = id, .weight = 1, .temperature = Temperature::cold, .refused = true});
  std::vector<FrameId> gone;
  while (gone.size() < 32) gone.push_back(evict(1).at(0));
  const auto place = [&](FrameId id) { return std::find(gone.begin(), gone.end(), id) - gone.begin(); };
  EXPECT_GE(place(100), 8) << "others come first";
  EXPECT_LT(place(100), place(101)) << "the oldest is tried first";
  EXPECT_LT(place(101), 32) << "no other block is cold";
}

// The caller may try what it refuses otherwise.
TEST_P(PolicyEvictionPolicy, WhenOnlyRefusedBlocksAreLeftTheVictimsSayThatAndComeAlone) {
  for (FrameId id = 0; id < 4; ++id) admit(id);
  for (FrameId id = 4; id < 8; ++id) evictor->admit({.id = id, .weight = 1, .refused = true});
  std::array<Victim, 64> out;
  size_t left = 4;
  while (left != 0) {
    const size_t n = evictor->victims(8, out);
    ASSERT_NE(n, 0u);
    for (const Victim& v : std::span(out).first(n)) {
      EXPECT_FALSE(v.refused);
      left -= v.probe ? 0 : 1;
    }
  }
  ASSERT_EQ(evictor->victims(8, out), 4u);
  for (FrameId i = 0; i < 4; ++i) {
    EXPECT_EQ(out[i].id, 4 + i);
    EXPECT_TRUE(out[i].refused);
  }
  EXPECT_EQ(evictor->victims(8, out), 0u);
}

TEST_P(PolicyEvictionPolicy, AHeldOrAdvisedBlockIsNoLongerRefused) {
  for (FrameId id = 0; id < 8; ++id) admit(id);
  for (FrameId id = 8; id < 10; ++id)
    evictor->admit({.id = id, .weight = 1, .temperature = Temperature::cold, .refused = true});
  evictor->hold(8);
  evictor->unhold(8);
  evictor->advise(9, Temperature::cold, Priority::low, false);
  EXPECT_EQ(evict(2), (std::vector<FrameId>{8, 9}));
}

TEST_P(PolicyEvictionPolicy, BlocksThatMayNotBeProbedAreNot) {
  for (FrameId id = 0; id < 512; ++id) evictor->admit({.id = id, .weight = 1, .probes = false});
  std::array<Victim, 64> out;
  size_t evicted = 0;
  while (const size_t n = evictor->victims(8, out)) {
    for (size_t i = 0; i < n; ++i) EXPECT_FALSE(out[i].probe);
    evicted += n;
  }
  EXPECT_EQ(evictor->probed(), 0u);
  EXPECT_EQ(evicted, 512u);
}

TEST_P(PolicyEvictionPolicy, ALowClassKeepsAFloorUnderAHighPriorityScan) {
  for (FrameId id = 0; id < 32; ++id) admit(id);
  FrameId next = 32;
  std::set<FrameId> low_left;
  for (FrameId id = 0; id < 32; ++id) low_left.insert(id);
  for (; next < 1000; ++next) {
    evictor->admit({.id = next, .weight = 1, .priority = Priority::high});
    if (next >= 256) {
      for (const FrameId id : evict(1)) low_left.erase(id);
    }
  }
  EXPECT_GE(low_left.size(), 14u) << "1/16 of 256";
  EXPECT_LE(low_left.size(), 18u);
}

TEST_P(PolicyEvictionPolicy, TheLargestBlockCountsWhole) {
  constexpr uint32_t kLargest = core::kMaxBlock / core::kPage;
  evictor->resize(16, 16 * uint64_t{kLargest});
  for (FrameId id = 0; id < 8; ++id) evictor->admit({.id = id, .weight = kLargest, .probes = false});
  std::vector<Victim> out(8);
  EXPECT_EQ(evictor->victims(kLargest, out), 1u);
  EXPECT_EQ(evictor->victims(3 * uint64_t{kLargest}, out), 3u);
}

// Random calls against a plain model of the resident blocks.
TEST_P(PolicyEvictionPolicy, KeepsItsWordUnderRandomCalls) {
  struct Known {
    uint32_t weight;
    bool pinned, probes;
    int holds = 0;
    bool cold = false, refused = false;
  };
  constexpr FrameId kIds = 300;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::mt19937_64 random(seed);
    auto policy = GetParam()();
    policy->resize(kIds, 2000);
    std::map<FrameId, Known> known;
    std::set<FrameId> probed;
    std::vector<Victim> out;
    for (int step = 0; step < 20000; ++step) {
      const auto id = static_cast<FrameId>(random() % kIds);
      const auto it = known.find(id);
      switch (random() % 10) {
        case 0:
        case 1:
        case 2:
        case 3: {
          if (it != known.end()) break;
          Admission a{.id = id, .weight = static_cast<uint32_t>(1 + (random() % 4 == 0 ? random() % 512 : 0))};
          a.priority = static_cast<Priority>(random() % 3);
          a.temperature = random() % 4 == 0 ? static_cast<Temperature>(random() % 3) : Temperature::normal;
          a.pinned = random() % 10 == 0;
          a.sequential = random() % 5 == 0;
          a.probes = random() % 3 != 0;
          a.ahead = random() % 4 == 0;
          a.refused = random() % 8 == 0;
          if (random() % 2 == 0) a.age = random() % 4000;
          policy->admit(a);
          known[id] = {a.weight, a.pinned, a.probes};
          known[id].cold = a.temperature == Temperature::cold;
          known[id].refused = a.refused;
          break;
        }
        case 4:
          policy->touched(id);
          break;
        case 5:
          if (random() % 4 != 0) break;
          policy->remove(id);
          known.erase(id);
          break;
        case 6: {
          const bool pinned = random() % 5 == 0;
          const auto temperature = static_cast<Temperature>(random() % 3);
          policy->advise(id, temperature, static_cast<Priority>(random() % 3), pinned);
          if (it == known.end()) break;
          it->second.pinned = pinned;
          it->second.cold = temperature == Temperature::cold;
          break;
        }
        case 7:
          if (it == known.end()) break;
          policy->hold(id);
          ++it->second.holds;
          break;
        case 8:
          if (it == known.end() || it->second.holds == 0) break;
          policy->unhold(id);
          --it->second.holds;
          break;
        case 9: {
          out.resize(1 + random() % 32);
          const uint64_t pages = 1 + random() % 600;
          const size_t n = policy->victims(pages, out);
          ASSERT_LE(n, out.size());
          uint64_t freed = 0, largest = 0;
          bool all_cold = true;
          std::set<FrameId> seen;
          for (size_t i = 0; i < n; ++i) {
            const Victim v = out[i];
            ASSERT_TRUE(seen.insert(v.id).second) << "named twice";
            const auto k = known.find(v.id);
            ASSERT_NE(k, known.end()) << "not resident";
            ASSERT_EQ(k->second.holds, 0) << "held";
            if (v.probe) {
              ASSERT_TRUE(k->second.probes);
              continue;
            }
            freed += k->second.weight;
            largest = std::max<uint64_t>(largest, k->second.weight);
            if (k->second.pinned) {
              for (const auto& [other, what] : known)
                ASSERT_TRUE(what.pinned || what.holds != 0 || what.refused) << other;
            }
            all_cold &= k->second.cold && !k->second.pinned;
            known.erase(k);
          }
          ASSERT_LT(freed, pages + largest) << "more than was asked";
          // Used-up blocks come alone, if there are any.
          if (freed < pages && n < out.size() && (freed == 0 || !all_cold)) {
            for (const auto& [other, what] : known)
              ASSERT_TRUE(what.holds != 0 || (freed != 0 && what.refused)) << other << " could have been evicted";
          }
          break;
        }
      }
    }
    for (auto& [id, what] : known) {
      for (; what.holds != 0; --what.holds) policy->unhold(id);
    }
    out.resize(64);
    while (const size_t n = policy->victims(100, out)) {
      for (size_t i = 0; i < n; ++i) {
        if (out[i].probe) continue;
        ASSERT_EQ(known.erase(out[i].id), 1u);
      }
    }
    EXPECT_TRUE(known.empty()) << "all are evicted in the end";
  }
}

TEST_P(PolicyEvictionPolicy, SameCallsSameAnswers) {
  auto run = [&] {
    std::mt19937_64 random(7);
    auto policy = GetParam()();
    policy->resize(256, 256);
    std::vector<std::pair<FrameId, bool>> log;
    std::array<Victim, 16> out;
    std::set<FrameId> in;
    for (int i = 0; i < 5000; ++i) {
      const auto id = static_cast<FrameId>(random() % 256);
      if (in.insert(id).second) policy->admit({.id = id, .weight = 1, .age = random() % 500});
      policy->touched(static_cast<FrameId>(random() % 256));
      if (in.size() < 128) continue;
      const size_t n = policy->victims(4, out);
      for (size_t k = 0; k < n; ++k) {
        log.emplace_back(out[k].id, out[k].probe);
        if (!out[k].probe) in.erase(out[k].id);
      }
    }
    return log;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace vmem::policy
