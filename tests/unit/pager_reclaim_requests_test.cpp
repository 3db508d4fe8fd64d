// Requests to evict: each has its turn in order, a few blocks at a time, until it has none left or
// its region goes.
#include <gtest/gtest.h>

#include "pager/host/reclaim.h"

namespace {

using vmem::pager::ReclaimRequests;
using vmem::pager::Region;

class PagerReclaimRequests : public ::testing::Test {
 protected:
  void SetUp() override { region.blocks = other.blocks = 8; }
  void TearDown() override { EXPECT_EQ(requests.check(), ""); }
  ReclaimRequests requests;
  Region region{8, 4}, other{8, 4};
};

TEST_F(PagerReclaimRequests, TheFirstGoesOnUntilNoneOfItsBlocksIsLeft) {
  EXPECT_TRUE(requests.empty());
  ASSERT_TRUE(requests.add({&region, 2, 4}, false));
  ASSERT_TRUE(requests.add({&other, 0, 1}, true));
  requests.go_on(4);
  ASSERT_FALSE(requests.empty());
  EXPECT_EQ(requests.first().span.region, &region);
  EXPECT_EQ(requests.first().span.first, 4u);
  EXPECT_EQ(requests.first().span.last, 4u);
  EXPECT_FALSE(requests.first().behind);
  EXPECT_EQ(requests.check(), "");
  requests.go_on(5);
  ASSERT_FALSE(requests.empty());
  EXPECT_EQ(requests.first().span.region, &other);
  EXPECT_TRUE(requests.first().behind);
  requests.go_on(2);
  EXPECT_TRUE(requests.empty());
}

TEST_F(PagerReclaimRequests, AFreedRegionTakesItsRequestsAlong) {
  ASSERT_TRUE(requests.add({&region, 0, 7}, false));
  ASSERT_TRUE(requests.add({&other, 0, 7}, false));
  ASSERT_TRUE(requests.add({&region, 1, 1}, true));
  requests.forget(region);
  ASSERT_FALSE(requests.empty());
  EXPECT_EQ(requests.first().span.region, &other);
  requests.forget(other);
  EXPECT_TRUE(requests.empty());
}

TEST_F(PagerReclaimRequests, ThereAreAtMostSoMany) {
  for (size_t i = 0; i < ReclaimRequests::kMost; ++i) {
    ASSERT_FALSE(requests.full()) << i;
    ASSERT_TRUE(requests.add({&region, 0, 7}, false));
  }
  EXPECT_TRUE(requests.full());
  requests.go_on(8);
  EXPECT_FALSE(requests.full()) << "one is over";
}

TEST_F(PagerReclaimRequests, BlocksThatNoRegionHasAreNoticed) {
  ASSERT_TRUE(requests.add({&region, 0, region.blocks}, false));
  EXPECT_EQ(requests.check(), "a request to evict is of blocks 0 to 8, of 8");
  requests.forget(region);
  ASSERT_TRUE(requests.add({&region, 3, 2}, false));
  EXPECT_EQ(requests.check(), "a request to evict is of blocks 3 to 2, of 8");
  requests.forget(region);
}

}  // namespace
