// Read-ahead in a recorded order: blocks that were requested before, behind the same blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "policy/recorded_order.h"

namespace {

using vmem::policy::RecordedOrder;
using Blocks = std::vector<uint32_t>;

Blocks shuffled(uint32_t blocks, uint32_t seed) {
  Blocks all(blocks);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::minstd_rand(seed));
  return all;
}

// Requests the blocks that have not been read ahead; returns how many had been.
size_t pass(RecordedOrder& order, const Blocks& blocks, size_t* read = nullptr) {
  std::vector<bool> there(blocks.size());
  size_t had = 0, asked = 0;
  for (const uint32_t b : blocks) {
    if (there[b]) {
      ++had;
      continue;
    }
    for (const uint32_t next : order.on_request(b)) {
      asked += there[next] ? 0 : 1;
      there[next] = true;
    }
  }
  if (read != nullptr) *read = asked;
  return had;
}

TEST(PolicyRecordedOrder, TheSecondPassIsReadAhead) {
  RecordedOrder order(1000, 16);
  const Blocks blocks = shuffled(1000, 3);
  EXPECT_EQ(pass(order, blocks), 0u) << "nothing is known";
  for (int i = 0; i < 5; ++i) {
    size_t read = 0;
    EXPECT_GT(pass(order, blocks, &read), 900u) << "but one of each window";
    EXPECT_LE(read, 1000u);
  }
}

TEST(PolicyRecordedOrder, ItGoesOnWhereGroupsOvertakeEachOther) {
  RecordedOrder order(1000, 32);
  Blocks blocks = shuffled(1000, 3);
  pass(order, blocks);
  std::minstd_rand random(5);
  for (size_t i = 0; i + 8 < blocks.size(); i += 8)
    std::shuffle(blocks.begin() + static_cast<ptrdiff_t>(i), blocks.begin() + static_cast<ptrdiff_t>(i + 8), random);
  EXPECT_GT(pass(order, blocks), 800u);
}

TEST(PolicyRecordedOrder, SeveralPassesAtOnceAreFollowed) {
  RecordedOrder order(1000, 8);
  const Blocks blocks = shuffled(1000, 3);
  pass(order, blocks);
  std::vector<bool> there(1000);
  size_t had = 0;
  for (size_t i = 0; i < 250; ++i) {
    for (size_t part = 0; part < 4; ++part) {
      const uint32_t b = blocks[250 * part + i];
      had += there[b] ? 1 : 0;
      if (!there[b])
        for (const uint32_t next : order.on_request(b)) there[next] = true;
    }
  }
  EXPECT_GT(had, 800u);
}

TEST(PolicyRecordedOrder, BlocksAtRandomAreNoPass) {
  for (const uint32_t blocks : {2000u, 10000u}) {  // in the smaller one a fifth is near some pass
    RecordedOrder order(blocks, 16);
    std::minstd_rand random(7);
    size_t read = 0;
    for (int i = 0; i < 100000; ++i) read += order.on_request(random() % blocks).size();
    EXPECT_LT(read, 1000u) << "a hundredth of what is asked for, of " << blocks;
  }
}

TEST(PolicyRecordedOrder, AnotherOrderIsLearntInPlaceOfAnOldOne) {
  RecordedOrder order(1000, 16);
  pass(order, shuffled(1000, 3));
  const Blocks other = shuffled(1000, 4);
  pass(order, other);
  pass(order, other);
  EXPECT_GT(pass(order, other), 800u);
}

TEST(PolicyRecordedOrder, WhatIsReadForNobodyIsReadLess) {
  RecordedOrder order(1000, 16);
  const Blocks blocks = shuffled(1000, 3);
  pass(order, blocks);
  EXPECT_GT(pass(order, blocks), 900u);
  for (int i = 0; i < 40; ++i) order.on_waste();
  size_t read = 0;
  for (size_t i = 0; i < 60; ++i) read += order.on_request(blocks[i]).size();
  EXPECT_EQ(read, 0u);
  for (int i = 0; i < 10; ++i) pass(order, blocks);
  EXPECT_GT(pass(order, blocks), 900u) << "and more again when it is used";
}

TEST(PolicyRecordedOrder, NothingIsRecordedWhereItIsOff) {
  RecordedOrder order(1000, 0);
  const Blocks blocks = shuffled(1000, 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(pass(order, blocks), 0u);
}

}  // namespace
