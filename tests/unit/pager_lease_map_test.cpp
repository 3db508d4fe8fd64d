// Leases by range, compared with leases block by block, under random operations; and their memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "pager/block/lease_map.h"

namespace vmem::pager::test {
namespace {

using core::BlockIndex;

constexpr BlockIndex kBlocks = 48;
constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;

void* stream(size_t number) {
  static char streams[8];
  return &streams[number];
}

// The reference: applies each call to every block.
class Model {
 public:
  std::map<BlockIndex, Leases> blocks;

  LeaseMap::Change acquire(BlockIndex first, BlockIndex last, int location, void* s, unsigned access) {
    return each(first, last, [&](Leases& leases) {
      auto lease = of(leases, s);
      if (lease == leases.end()) lease = leases.insert(lease, Lease{location, s});
      if (lease->count == 0) lease->access = lease->reads = lease->writes = 0;
      lease->grant(access);
    });
  }
  LeaseMap::Change take_back(BlockIndex first, BlockIndex last, int location, void* s, unsigned access) {
    return each(first, last, [&](Leases& leases) {
      const auto lease = of(leases, s);
      if (lease != leases.end() && lease->location == location && lease->count != 0) lease->take_back(access);
    });
  }
  LeaseMap::Change release(BlockIndex first, BlockIndex last, void* s, unsigned asked) {
    return each(first, last, [&](Leases& leases) {
      const auto lease = of(leases, s);
      if (lease->location >= 0) {
        ++lease->pending;
        lease->ended |= asked != 0 ? asked : lease->access;
      }
      lease->release(asked);
    });
  }
  LeaseMap::Change end(BlockIndex first, BlockIndex last, void* s) {
    return each(first, last, [&](Leases& leases) {
      const auto lease = of(leases, s);
      if (--lease->pending == 0) lease->ended = 0;
    });
  }
  LeaseMap::Change revive(BlockIndex first, BlockIndex last, void* s) {
    return each(first, last, [&](Leases& leases) {
      const auto lease = of(leases, s);
      lease->revive(0);
      if (lease->location >= 0 && --lease->pending == 0) lease->ended = 0;
    });
  }
  // A release and its end, before the lease is forgotten.
  void revive_at_once(BlockIndex first, BlockIndex last, void* s, unsigned asked) {
    each(first, last, [&](Leases& leases) {
      const auto lease = of(leases, s);
      const bool device = lease->location >= 0;
      if (device) {
        ++lease->pending;
        lease->ended |= asked != 0 ? asked : lease->access;
      }
      lease->release(asked);
      lease->revive(asked);
      if (device && --lease->pending == 0) lease->ended = 0;
    });
  }
  bool live(BlockIndex b, void* s) {
    const auto at = blocks.find(b);
    if (at == blocks.end()) return false;
    const auto lease = of(at->second, s);
    return lease != at->second.end() && lease->count != 0;
  }
  int location(BlockIndex b) const {
    const auto at = blocks.find(b);
    return at == blocks.end() ? -100 : at->second.front().location;
  }

 private:
  static Leases::iterator of(Leases& leases, void* s) {
    return std::find_if(leases.begin(), leases.end(), [&](const Lease& l) { return l.location < 0 || l.stream == s; });
  }
  static bool ending(const Leases& leases) {
    return !leases.empty() && std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; });
  }
  // Counts Change::ending in both directions, but not for a block that gets its first lease.
  template <typename Each>
  LeaseMap::Change each(BlockIndex first, BlockIndex last, Each change_one) {
    LeaseMap::Change change;
    for (BlockIndex b = first; b <= last; ++b) {
      Leases& leases = blocks[b];
      const bool had = !leases.empty(), before = ending(leases);
      change_one(leases);
      std::erase_if(leases, [](const Lease& l) { return l.count == 0 && l.pending == 0; });
      change.leased += had == leases.empty();
      change.ending += before != ending(leases);
      if (leases.empty()) blocks.erase(b);
    }
    return change;
  }
};

struct Held {  // an acquire, or a pending release
  BlockIndex first, last;
  int location;
  void* stream;
  unsigned access;
};

class LeaseMapModel : public ::testing::TestWithParam<int> {
 protected:
  void expect_same() {
    ASSERT_EQ(map.check(), "");
    ASSERT_EQ(map.blocks(), model.blocks.size());
    for (BlockIndex b = 0; b < kBlocks; ++b) {
      const Leases* found = map.find(b);
      const auto wanted = model.blocks.find(b);
      ASSERT_EQ(found != nullptr, wanted != model.blocks.end()) << b;
      if (found != nullptr) {
        ASSERT_TRUE(std::is_permutation(found->begin(), found->end(), wanted->second.begin(), wanted->second.end()))
            << b;
      }
    }
  }
  void expect(const LeaseMap::Change& got, const LeaseMap::Change& wanted) {
    EXPECT_EQ(got.leased, wanted.leased);
    EXPECT_EQ(got.ending, wanted.ending);
    expect_same();
  }
  size_t below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random); }
  Held take(std::vector<Held>& from) {
    const size_t i = below(from.size());
    const Held held = from[i];
    from.erase(from.begin() + static_cast<ptrdiff_t>(i));
    return held;
  }
  Held any() {
    const BlockIndex a = below(kBlocks), b = below(kBlocks);
    const int location = static_cast<int>(below(3)) - 1;
    return {std::min(a, b), std::max(a, b), location < 0 ? VMEM_HOST : location,
            location < 0 ? nullptr : stream(below(3)), access != 0 ? access : 1 + static_cast<unsigned>(below(kBoth))};
  }
  void acquire() {
    const Held held = any();
    for (BlockIndex b = held.first; b <= held.last; ++b) {
      const int location = model.location(b);
      if (location != -100 && location != held.location) return;
    }
    ASSERT_TRUE(map.prepare(held.first, held.last, held.stream));
    if (below(8) == 0) {  // refused for another reason
      EXPECT_EQ(map.join(held.first, held.last), 0u);
      expect_same();
      return;
    }
    expect(map.acquire(held.first, held.last, held.location, held.stream, held.access),
           model.acquire(held.first, held.last, held.location, held.stream, held.access));
    acquired.push_back(held);
  }
  void take_back() {
    if (acquired.empty()) return;
    const Held held = take(acquired);
    LeaseMap::Change wanted = model.take_back(held.first, held.last, held.location, held.stream, held.access);
    expect(map.take_back(held.first, held.last, held.location, held.stream, held.access), wanted);
  }
  void release(const Held& held, bool exact) {
    const size_t ranges = map.ranges();
    const unsigned asked = exact && below(2) == 0 ? held.access : 0;
    ASSERT_TRUE(map.divide(held.first, held.last));
    if (exact) {
      EXPECT_EQ(map.ranges(), ranges) << "both ends were there";
    }
    bool undone = false;
    BlockIndex unleased = held.first;
    while (unleased <= held.last && model.live(unleased, held.stream)) ++unleased;
    ASSERT_EQ(map.unleased(held.first, held.last, held.stream), unleased);
    for (BlockIndex b = held.first; unleased > held.last && b <= held.last;) {
      const int location = model.location(b);
      BlockIndex last = b;
      while (last < held.last && model.location(last + 1) == location) ++last;
      const LeaseMap::Change change = map.release(b, last, held.stream, asked);
      if (exact && below(4) == 0) {
        EXPECT_EQ(map.revive(b, last, held.stream, asked).ending, change.ending);
        undone = true;
        acquired.push_back(held);
      } else {
        const LeaseMap::Change wanted = model.release(b, last, held.stream, asked);
        if (location >= 0) {
          EXPECT_EQ(change.ending, wanted.ending);
          pending.push_back({b, last, location, held.stream, 0});
        }
      }
      b = last + 1;
    }
    map.join(held.first, held.last);
    if (undone) model.revive_at_once(held.first, held.last, held.stream, asked);
    expect_same();
  }
  // After any release, the remaining holders may still do what they asked for.
  void expect_all_may() {
    for (const Held& h : acquired) {
      for (BlockIndex b = h.first; b <= h.last; ++b) {
        const Leases* leases = map.find(b);
        ASSERT_NE(leases, nullptr) << b;
        const auto lease = std::find_if(leases->begin(), leases->end(),
                                        [&](const Lease& l) { return l.location < 0 || l.stream == h.stream; });
        ASSERT_NE(lease, leases->end()) << b;
        ASSERT_EQ(lease->access & h.access, h.access) << b;
      }
    }
  }
  void reached() {
    if (pending.empty()) return;
    const Held held = take(pending);
    if (below(8) == 0) {
      const LeaseMap::Change change = map.revive(held.first, held.last, held.stream);
      map.join(held.first, held.last);
      EXPECT_EQ(change.ending, model.revive(held.first, held.last, held.stream).ending);
      expect_same();
      acquired.push_back({held.first, held.last, held.location, held.stream, 0});
      return;
    }
    expect(map.end(held.first, held.last, held.stream), model.end(held.first, held.last, held.stream));
  }

  unsigned access = 0;  // access of every acquire; 0: each its own
  LeaseMap map;
  Model model;
  std::vector<Held> acquired, pending;
  std::mt19937_64 random{static_cast<uint64_t>(GetParam())};
};

TEST_P(LeaseMapModel, WhoReleasesWhatItAcquiredFindsBothEnds) {
  if (GetParam() % 2 == 0) access = kBoth;
  for (int i = 0; i < 3000 && !HasFatalFailure(); ++i) {
    const size_t what = below(10);
    if (what < 5) acquire();
    if (what >= 5 && what < 8 && !acquired.empty()) release(take(acquired), true);
    if (what == 8) reached();
    if (what == 9 && i % 4 == 0) take_back();
    EXPECT_LE(map.ranges(), access == 0 ? kBlocks : 2 * (acquired.size() + pending.size()));
    if (i % 16 == 0) expect_all_may();
  }
  while (!acquired.empty() && !HasFatalFailure()) release(take(acquired), true);
  while (!pending.empty() && !HasFatalFailure()) {
    reached();
    while (!acquired.empty() && !HasFatalFailure()) release(take(acquired), true);
  }
  EXPECT_TRUE(map.empty());
  EXPECT_EQ(map.bytes(), 0u);
}

TEST_P(LeaseMapModel, PartsOfAcquiresMayBeReleased) {
  for (int i = 0; i < 3000 && !HasFatalFailure(); ++i) {
    const size_t what = below(10);
    if (what < 4) acquire();
    if (what >= 4 && what < 8) release(any(), false);
    if (what >= 8) reached();
    acquired.clear();
  }
  while (!pending.empty() && !HasFatalFailure()) reached();
}

INSTANTIATE_TEST_SUITE_P(Seeds, LeaseMapModel, testing::Range(1, 9));

TEST(LeaseMap, ALeaseOfAMillionBlocksIsOneRange) {
  LeaseMap map;
  constexpr BlockIndex kLast = (1 << 20) - 1;
  ASSERT_TRUE(map.prepare(0, kLast, nullptr));
  EXPECT_EQ(map.acquire(0, kLast, VMEM_HOST, nullptr, VMEM_READ).leased, kLast + 1);
  EXPECT_EQ(map.ranges(), 1u);
  EXPECT_LT(map.bytes(), 4096u);
  // Another lease in the middle divides it, and leaves no trace when it is released.
  ASSERT_TRUE(map.prepare(100, 199, nullptr));
  EXPECT_EQ(map.acquire(100, 199, VMEM_HOST, nullptr, VMEM_WRITE).leased, 0u);
  EXPECT_EQ(map.ranges(), 3u);
  ASSERT_TRUE(map.divide(100, 199));
  map.release(100, 199, nullptr);
  EXPECT_EQ(map.join(100, 199), 0u);
  EXPECT_EQ(map.ranges(), 3u) << "a lease keeps the access that its acquires united, as before";
  ASSERT_TRUE(map.divide(0, kLast));
  map.release(0, kLast, nullptr);
  EXPECT_EQ(map.join(0, kLast), kLast + 1);
  EXPECT_EQ(map.bytes(), 0u);
}

TEST(LeaseMap, VisitsWhatIsLeasedAndCutsItToTheRange) {
  LeaseMap map;
  for (const BlockIndex b : {10, 30}) {
    ASSERT_TRUE(map.prepare(b, b + 9, stream(0)));
    map.acquire(b, b + 9, 0, stream(0), VMEM_READ);
  }
  std::vector<std::pair<BlockIndex, BlockIndex>> seen;
  EXPECT_TRUE(map.visit(15, 34, [&](BlockIndex first, BlockIndex last, const Leases& leases) {
    EXPECT_EQ(leases.size(), 1u);
    seen.emplace_back(first, last);
    return true;
  }));
  EXPECT_EQ(seen, (std::vector<std::pair<BlockIndex, BlockIndex>>{{15, 19}, {30, 34}}));
  EXPECT_FALSE(map.visit(0, 40, [](BlockIndex, BlockIndex, const Leases&) { return false; }));
  EXPECT_EQ(map.leased(15, 34), 10u);
  EXPECT_EQ(map.leased(20, 29), 0u);
  EXPECT_EQ(map.unleased(10, 30, stream(0)), 20u);
  EXPECT_EQ(map.unleased(30, 39, stream(1)), 30u);
}

}  // namespace
}  // namespace vmem::pager::test
