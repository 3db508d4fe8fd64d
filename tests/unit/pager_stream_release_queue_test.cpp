// Releases that streams have not reached: the queue asks for the oldest of each lane, and for the
// next when that ended.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <deque>
#include <list>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "pager/block/region.h"
#include "pager/lease/stream_release_queue.h"

namespace vmem::pager::test {
namespace {

class PagerStreamReleaseQueue : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(all.check(), ""); }
  // Queues a release on the stream, which has recorded the mark.
  uint64_t add(int device, void* stream, Region* r = nullptr, bool recorded = true) {
    std::list<PendingRelease> made(1);
    PendingRelease& e = made.front();
    e.device = device;
    e.stream = e.end = stream;
    e.thread = pthread_self();
    e.recorded = recorded;
    if (r != nullptr) e.spans.push_back({r, 0, 0});
    all.add(made, made.begin());
    EXPECT_TRUE(made.empty());
    last = e.id;
    return last;
  }
  std::vector<uint64_t> oldest(uint64_t after = 0) {
    std::array<const PendingRelease*, 4> out{};
    const size_t count = all.oldest(after, out);
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < count; ++i) ids.push_back(out[i]->id);
    return ids;
  }
  void end(uint64_t id) {
    const size_t before = over.size();
    const PendingRelease* e = all.find(id);
    ASSERT_NE(e, nullptr) << id;
    all.end(*e, &over);
    EXPECT_EQ(over.size(), before + 1);
    EXPECT_EQ(&over.back(), e) << "it is kept until the lock is gone";
  }
  using Ids = std::vector<uint64_t>;

  StreamReleaseQueue all;
  std::list<PendingRelease> over;
  uint64_t last = 0;
  int a = 0, b = 0;  // streams
};

TEST_F(PagerStreamReleaseQueue, TheOldestOfEachLaneIsAskedFor) {
  EXPECT_TRUE(all.empty());
  const uint64_t one = add(0, &a), two = add(0, &a), three = add(0, &b), four = add(1, &a);
  EXPECT_EQ(all.size(), 4u);
  EXPECT_EQ(oldest(), (Ids{one, three, four})) << "another stream, and another device, is another lane";
  EXPECT_EQ(oldest(one), (Ids{three, four}));
  end(one);
  EXPECT_EQ(oldest(), (Ids{two, three, four}));
  end(two);
  EXPECT_EQ(oldest(), (Ids{three, four}));
  EXPECT_EQ(add(0, &a), four + 1);
  EXPECT_EQ(oldest(), (Ids{three, four, four + 1})) << "the lane begins anew";
}

TEST_F(PagerStreamReleaseQueue, ALaneIsOneThreads) {
  const uint64_t mine = add(0, &a);
  uint64_t other = 0;
  std::thread([&] { other = add(0, &a); }).join();
  EXPECT_EQ(oldest(), (Ids{mine, other})) << "what two threads put on a stream may be in either order";
}

TEST_F(PagerStreamReleaseQueue, AReleaseWhoseOwnerIsInTheDriverIsNotAskedFor) {
  const uint64_t one = add(0, &a, nullptr, false), two = add(0, &a);
  EXPECT_TRUE(oldest().empty()) << "nor those behind it";
  end(one);
  EXPECT_EQ(oldest(), (Ids{two}));
}

TEST_F(PagerStreamReleaseQueue, ALookHasItsEnd) {
  std::array<char, 9> streams{};
  for (char& s : streams) add(0, &s);
  EXPECT_EQ(oldest(), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(oldest(4), (Ids{5, 6, 7, 8}));
  EXPECT_EQ(oldest(8), (Ids{9}));
  EXPECT_TRUE(oldest(9).empty());
}

TEST_F(PagerStreamReleaseQueue, OneThatIsNotToBeLeavesFromTheMiddle) {
  const uint64_t one = add(0, &a), two = add(0, &a), three = add(0, &a);
  end(two);
  EXPECT_EQ(oldest(), (Ids{one})) << "the oldest is as it was";
  EXPECT_EQ(all.find(two), nullptr);
  end(one);
  EXPECT_EQ(oldest(), (Ids{three}));
}

TEST_F(PagerStreamReleaseQueue, ARegionThatGoesIsAskedForByNobody) {
  Region gone{16, 4}, stays{16, 4};
  const uint64_t one = add(0, &a, &gone);
  add(0, &b, &stays);
  EXPECT_TRUE(all.any(gone) && all.any(stays));
  all.forget(gone);
  EXPECT_FALSE(all.any(gone));
  EXPECT_TRUE(all.any(stays));
  EXPECT_EQ(all.size(), 2u) << "the stream gets there all the same";
  EXPECT_NE(all.find(one), nullptr);
}

TEST_F(PagerStreamReleaseQueue, TheCheckSeesALaneThatNobodyAsksFor) {
  const uint64_t one = add(0, &a), two = add(0, &a);
  auto* first = const_cast<PendingRelease*>(all.find(one));
  auto* second = const_cast<PendingRelease*>(all.find(two));
  first->oldest = false;
  EXPECT_EQ(all.check(), "the oldest release of a lane is not marked");
  first->oldest = second->oldest = true;
  EXPECT_EQ(all.check(), "a lane has two oldest");
  second->oldest = false;
  std::swap(first->id, second->id);
  EXPECT_EQ(all.check(), "releases at devices are not in the order of their numbers");
  std::swap(first->id, second->id);
}

// Streams reach their releases in order, whichever comes first; each check finds all that were
// reached.
TEST_F(PagerStreamReleaseQueue, NoneIsForgottenInALongMix) {
  std::mt19937 random(5);
  std::array<char, 5> streams{};
  std::array<std::deque<uint64_t>, 5> lanes;
  for (int n = 0; n < 4000; ++n) {
    const size_t lane = random() % streams.size();
    if (random() % 2 == 0) {
      lanes[lane].push_back(add(0, &streams[lane]));
    } else if (!lanes[lane].empty()) {
      // Now and then a release that must not end.
      const auto which =
          lanes[lane].begin() + static_cast<ptrdiff_t>(random() % 8 == 0 ? random() % lanes[lane].size() : 0);
      end(*which);
      lanes[lane].erase(which);
      over.clear();
    }
    std::vector<uint64_t> expected;
    for (const auto& l : lanes)
      if (!l.empty()) expected.push_back(l.front());
    std::sort(expected.begin(), expected.end());
    if (expected.size() > 4) expected.resize(4);
    ASSERT_EQ(oldest(), expected) << n;
    ASSERT_EQ(all.check(), "") << n;
  }
}

}  // namespace
}  // namespace vmem::pager::test
