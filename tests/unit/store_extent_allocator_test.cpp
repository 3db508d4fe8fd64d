// The allocator, compared with a model that keeps one flag for each page.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "store/extent_allocator.h"

namespace vmem::store {
namespace {

constexpr uint64_t kChunk = ExtentAllocator::kChunkPages;

class Model {
 public:
  uint64_t size() const { return pages_.size(); }
  bool is_free(uint64_t page) const { return pages_[page] == kFree; }
  uint64_t count() const { return count_; }
  uint64_t first_fit(uint64_t pages) const {
    const size_t at = pages_.find(std::string(pages, kFree));
    return at == std::string::npos ? UINT64_MAX : at;
  }
  uint64_t trailing() const { return pages_.size() - (pages_.find_last_not_of(kFree) + 1); }
  void grow(uint64_t pages) {
    pages_.append(pages, kFree);
    count_ += pages;
  }
  void shrink(uint64_t pages) {  // the last pages, which are free
    pages_.resize(pages_.size() - pages);
    count_ -= pages;
  }
  // All of these pages had the other value.
  void set(uint64_t first, uint64_t pages, bool free) {
    pages_.replace(first, pages, pages, free ? kFree : kUsed);
    count_ = free ? count_ + pages : count_ - pages;
  }

 private:
  static constexpr char kFree = 'f', kUsed = 'u';
  std::string pages_;
  uint64_t count_ = 0;  // free pages; a count after every step would take long under the sanitizers
};

TEST(ExtentAllocatorTest, RandomUseAgreesWithTheModel) {
  std::mt19937_64 random(42);
  ExtentAllocator extents;
  Model model;
  std::vector<std::pair<uint64_t, uint64_t>> live;
  for (int n = 0; n < 4000; ++n) {
    const auto dice = random() % 100;
    if (dice < 4) {
      const uint64_t pages = 1 + random() % (3 * kChunk);
      if (model.size() < 40 * kChunk) {
        extents.grow(pages);
        model.grow(pages);
      }
    } else if (dice < 52) {
      const uint64_t pages = random() % 20 == 0 ? 1 + random() % (2 * kChunk) : 1 + random() % 40;
      uint64_t first = 0;
      const uint64_t expected = model.first_fit(pages);
      ASSERT_EQ(extents.allocate(pages, &first), expected != UINT64_MAX);
      if (expected == UINT64_MAX) continue;
      ASSERT_EQ(first, expected);
      model.set(first, pages, false);
      live.emplace_back(first, pages);
    } else if (dice < 95 && !live.empty()) {
      const size_t which = random() % live.size();
      const auto [first, pages] = live[which];
      live[which] = live.back();
      live.pop_back();
      ASSERT_TRUE(extents.release(first, pages));
      model.set(first, pages, true);
    } else if (dice < 97) {
      const uint64_t trailing = model.trailing();
      ASSERT_EQ(extents.trailing_free_pages(), trailing);
      const uint64_t cut = trailing == 0 ? 0 : random() % (trailing + 1);
      extents.shrink(cut);
      model.shrink(cut);
    } else {
      uint64_t first = 0;
      uint64_t pages = 0;
      if (!extents.take_idle(2 * kChunk, &first, &pages)) continue;
      ASSERT_LE(pages, 2 * kChunk);
      for (uint64_t page = first; page < first + pages; ++page) ASSERT_TRUE(model.is_free(page));
      ASSERT_EQ(extents.free_pages(), model.count() - pages);
      extents.release_idle(first, pages);
    }
    ASSERT_EQ(extents.size_pages(), model.size());
    ASSERT_EQ(extents.free_pages(), model.count());
    if (n % 50 == 0) {
      ASSERT_TRUE(extents.check());
    }
  }
  ASSERT_TRUE(extents.check());
}

TEST(ExtentAllocatorTest, NeighboursBecomeOneRunAcrossChunks) {
  ExtentAllocator extents;
  extents.grow(5 * kChunk);
  std::vector<uint64_t> firsts(5 * kChunk / 8);
  for (uint64_t& first : firsts) ASSERT_TRUE(extents.allocate(8, &first));
  EXPECT_EQ(extents.free_pages(), 0u);
  std::shuffle(firsts.begin(), firsts.end(), std::mt19937_64(3));
  for (const uint64_t first : firsts) ASSERT_TRUE(extents.release(first, 8));
  EXPECT_EQ(extents.longest_free_run(), 5 * kChunk);
  uint64_t first = 1;
  EXPECT_TRUE(extents.allocate(5 * kChunk, &first));
  EXPECT_EQ(first, 0u);
}

TEST(ExtentAllocatorTest, WhatIsNotInUseCannotBeReleased) {
  ExtentAllocator extents;
  extents.grow(kChunk + 10);
  uint64_t first = 0;
  ASSERT_TRUE(extents.allocate(100, &first));
  EXPECT_FALSE(extents.release(first + 50, 51)) << "half of it is free";
  EXPECT_FALSE(extents.release(first, 0));
  EXPECT_FALSE(extents.release(kChunk + 9, 2)) << "beyond the end";
  EXPECT_FALSE(extents.release(UINT64_MAX, 1));
  EXPECT_FALSE(extents.release(1, UINT64_MAX));
  EXPECT_TRUE(extents.release(first, 100));
  EXPECT_FALSE(extents.release(first, 100)) << "twice";
  EXPECT_EQ(extents.free_pages(), kChunk + 10);
  EXPECT_TRUE(extents.check());
}

TEST(ExtentAllocatorTest, OnlyWhatWasUsedAndIsFreeAgainIsIdle) {
  ExtentAllocator extents;
  extents.grow(4 * kChunk);
  EXPECT_EQ(extents.idle_pages(), 0u) << "never handed out: nothing to give back";
  uint64_t first = 0;
  ASSERT_TRUE(extents.allocate(2 * kChunk, &first));
  ASSERT_TRUE(extents.release(first, 2 * kChunk));
  EXPECT_EQ(extents.idle_pages(), 2 * kChunk);
  uint64_t pages = 0;
  ASSERT_TRUE(extents.take_idle(kChunk, &first, &pages));
  EXPECT_EQ(pages, kChunk);
  EXPECT_EQ(extents.idle_pages(), kChunk);
  extents.release_idle(first, pages);
  EXPECT_EQ(extents.idle_pages(), kChunk) << "given back already";
  ASSERT_TRUE(extents.take_idle(kChunk, &first, &pages));
  extents.release_idle(first, pages);
  EXPECT_FALSE(extents.take_idle(kChunk, &first, &pages));
  EXPECT_TRUE(extents.check());
}

TEST(ExtentAllocatorTest, NothingIsFoundWhereNothingIs) {
  ExtentAllocator extents;
  uint64_t first = 0;
  EXPECT_FALSE(extents.allocate(1, &first));
  EXPECT_EQ(extents.longest_free_run(), 0u);
  EXPECT_EQ(extents.trailing_free_pages(), 0u);
  extents.grow(10);
  EXPECT_FALSE(extents.allocate(11, &first));
  EXPECT_FALSE(extents.allocate(0, &first));
  EXPECT_TRUE(extents.allocate(10, &first));
  EXPECT_FALSE(extents.allocate(1, &first));
  EXPECT_TRUE(extents.check());
}

}  // namespace
}  // namespace vmem::store
