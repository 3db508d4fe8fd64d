// Frames and buffers within the host budget: charges = blocks + free frames + slabs of buffers + tables.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <set>

#include "memory/frame_pool.h"
#include "pager_fakes.h"

namespace {

using vmem::core::kHugePage;
using vmem::core::Status;
using vmem::memory::FramePool;
using vmem::memory::HostBudget;
using vmem::pager::test::FakeTrap;

constexpr uint64_t kMiB = 1 << 20;

class MemoryFrames : public ::testing::Test {
 protected:
  FakeTrap trap;
  void TearDown() override { EXPECT_EQ(pool.check(), ""); }

  HostBudget budget{16 * kMiB};
  FramePool pool{trap, budget, {}};
};

TEST_F(MemoryFrames, FramesAreDistinctAndEndWithTheBudget) {
  std::set<std::byte*> frames;
  for (int i = 0; i < 8; ++i) {
    std::byte* f = pool.get(kHugePage, 0);
    ASSERT_NE(f, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(f) % kHugePage, 0u);
    memset(f, i, kHugePage);
    EXPECT_TRUE(frames.insert(f).second);
  }
  EXPECT_EQ(budget.charged(), 16 * kMiB);
  EXPECT_EQ(budget.available(), 0u);
  EXPECT_EQ(pool.get(kHugePage, 0), nullptr);
  EXPECT_EQ(pool.get(4096, 0), nullptr);
  EXPECT_FALSE(budget.charge(1, 0));
  EXPECT_EQ(budget.charged(), 16 * kMiB);
}

TEST_F(MemoryFrames, AReturnedFrameStaysPaidForAndIsHandedOutAgain) {
  std::byte* f = pool.get(kHugePage, 0);
  pool.put(f, kHugePage);
  EXPECT_EQ(budget.charged(), 2 * kMiB);
  EXPECT_EQ(budget.in_use(), 0u);
  EXPECT_EQ(budget.available(), 16 * kMiB);
  EXPECT_EQ(pool.get(kHugePage, 0), f);
  EXPECT_EQ(budget.charged(), 2 * kMiB);
}

TEST_F(MemoryFrames, BlocksHaveWhatTheLeastOfTheRestLeaves) {
  EXPECT_EQ(pool.room(), 16 * kMiB);
  ASSERT_TRUE(budget.charge(3 * kMiB, 0, vmem::memory::Use::fixed));
  ASSERT_TRUE(pool.want_bounce(kHugePage, 6 * kMiB).ok());
  EXPECT_EQ(pool.room(), 11 * kMiB);
  EXPECT_EQ(pool.idle_buffers(), 0u) << "one has to be there";
  std::byte* const buffers[] = {pool.get_bounce(kHugePage), pool.get_bounce(kHugePage), pool.get_bounce(kHugePage)};
  EXPECT_EQ(pool.idle_buffers(), 0u) << "they are in use";
  EXPECT_EQ(pool.room(), 11 * kMiB) << "what is beyond the least gives way";
  for (std::byte* b : buffers) pool.put_bounce(b, kHugePage);
  EXPECT_EQ(pool.idle_buffers(), 4 * kMiB);
  std::byte* const frame = pool.get(8 * kMiB, kMiB);
  ASSERT_NE(frame, nullptr);
  EXPECT_EQ(pool.idle_buffers(), 2 * kMiB) << "one gave way";
  EXPECT_EQ(pool.check(), "");
  pool.put(frame, 8 * kMiB);
  budget.set(2 * kMiB);
  EXPECT_EQ(pool.room(), 0u);
  budget.set(16 * kMiB);
  pool.unwant_bounce(kHugePage);
  EXPECT_EQ(pool.idle_buffers(), 0u);
}

TEST_F(MemoryFrames, WhatNobodyHasTakenGoesAndWhatWasTakenStays) {
  std::byte* frames[8];
  for (auto& f : frames) f = pool.get(kHugePage, 0);
  EXPECT_EQ(pool.room_to_keep(), 8 * kMiB);
  for (auto& f : frames) pool.put(f, kHugePage);
  EXPECT_EQ(pool.unused(), 0u) << "it is not watched yet";
  EXPECT_EQ(pool.room_to_keep(), 0u) << "a region that goes leaves no more beside them";
  EXPECT_EQ(budget.charged(), 16 * kMiB) << "what is kept is charged";
  pool.watch();
  EXPECT_EQ(pool.unused(), 16 * kMiB);
  std::byte* f = pool.get(kHugePage, 0);
  EXPECT_EQ(pool.unused(), 14 * kMiB);
  pool.put(f, kHugePage);
  EXPECT_EQ(pool.unused(), 14 * kMiB) << "it was taken meanwhile";
  EXPECT_EQ(pool.check(), "");
  pool.release_unused(4 * kMiB);
  EXPECT_EQ(pool.unused(), 10 * kMiB);
  EXPECT_EQ(budget.charged(), 12 * kMiB);
  pool.release_unused(64 * kMiB);
  EXPECT_EQ(pool.unused(), 0u);
  EXPECT_EQ(budget.charged(), 2 * kMiB);
  EXPECT_EQ(pool.check(), "");
}

TEST_F(MemoryFrames, BuffersThatNobodyHasTakenGoButForTheLeast) {
  ASSERT_TRUE(pool.want_bounce(kHugePage, 8 * kMiB, 2 * kMiB).ok());
  std::byte* buffers[4];
  for (auto& b : buffers) ASSERT_NE(b = pool.get_bounce(kHugePage), nullptr);
  for (auto& b : buffers) pool.put_bounce(b, kHugePage);
  EXPECT_EQ(pool.idle(), 6 * kMiB);
  pool.watch();
  std::byte* b = pool.get_bounce(kHugePage);
  EXPECT_EQ(pool.unused(), 6 * kMiB) << "the one in use is the least that is kept";
  pool.put_bounce(b, kHugePage);
  pool.release_unused(64 * kMiB);
  EXPECT_EQ(pool.idle(), 0u);
  EXPECT_EQ(budget.charged(), 2 * kMiB);
  EXPECT_EQ(pool.check(), "");
  pool.unwant_bounce(kHugePage);
  EXPECT_EQ(budget.charged(), 0u);
}

TEST_F(MemoryFrames, UnusedFramesGiveWayToWhoNeedsTheRoom) {
  for (auto* f : {pool.get(kHugePage, 0), pool.get(kHugePage, 0)}) pool.put(f, kHugePage);
  pool.watch();
  EXPECT_TRUE(budget.charge(15 * kMiB, 0));
  EXPECT_EQ(pool.unused(), 0u);
  EXPECT_EQ(budget.charged(), 15 * kMiB);
  EXPECT_EQ(pool.check(), "");
}

TEST_F(MemoryFrames, AFrameIsFreshUntilItHasBeenFree) {
  bool fresh = false;
  std::byte* f = pool.get(kHugePage, 0, &fresh);
  EXPECT_TRUE(fresh);
  pool.put(f, kHugePage);
  EXPECT_EQ(pool.get(kHugePage, 0, &fresh), f);
  EXPECT_FALSE(fresh);
}

TEST_F(MemoryFrames, FreeFramesOfOneSizeMakeRoomForAnother) {
  std::byte* big[8];
  for (auto& f : big) f = pool.get(kHugePage, 0);
  for (auto& f : big) pool.put(f, kHugePage);
  EXPECT_EQ(budget.charged(), 16 * kMiB);
  for (int i = 0; i < 256; ++i) ASSERT_NE(pool.get(64 << 10, 0), nullptr) << i;
  EXPECT_EQ(budget.charged(), 16 * kMiB);
  EXPECT_EQ(pool.get(64 << 10, 0), nullptr);
}

TEST_F(MemoryFrames, EverySizeOfABlockHasFramesAndBuffers) {
  budget.set(2 * vmem::core::kMaxBlock);
  for (size_t size = vmem::core::kMinBlock; size <= vmem::core::kMaxBlock; size *= 2) {
    std::byte* const frame = pool.get(size, 0);
    ASSERT_NE(frame, nullptr) << size;
    frame[0] = frame[size - 1] = std::byte{1};
    pool.put(frame, size);
    ASSERT_TRUE(pool.want_bounce(size, size).ok()) << size;
    std::byte* const buffer = pool.get_bounce(size);
    ASSERT_NE(buffer, nullptr) << size;
    buffer[0] = buffer[size - 1] = std::byte{1};
    pool.put_bounce(buffer, size);
    pool.unwant_bounce(size);
    EXPECT_EQ(pool.check(), "");
  }
}

TEST_F(MemoryFrames, AReserveIsKeptFromThoseWhoRespectItOnly) {
  for (int i = 0; i < 6; ++i) ASSERT_NE(pool.get(kHugePage, 4 * kMiB), nullptr);
  EXPECT_EQ(pool.get(kHugePage, 4 * kMiB), nullptr);
  EXPECT_FALSE(budget.charge(1, 4 * kMiB));
  EXPECT_NE(pool.get(kHugePage, 2 * kMiB), nullptr);
  EXPECT_NE(pool.get(kHugePage, 0), nullptr);
}

TEST_F(MemoryFrames, ACreditTravelsWithoutAFrame) {
  ASSERT_TRUE(budget.charge(3 * kMiB, 0));
  EXPECT_EQ(budget.charged(), 3 * kMiB);
  // A block was moved in place: the frame's slot returns, its credit stays with the region.
  std::byte* f = pool.get(kHugePage, 0);
  pool.put_slot(f, kHugePage);
  EXPECT_EQ(budget.charged(), 5 * kMiB);
  budget.credit(2 * kMiB);
  budget.credit(3 * kMiB);
  EXPECT_EQ(budget.charged(), 0u);
}

TEST_F(MemoryFrames, ALoweredBudgetIsReachedByTrimAndByFramesThatComeBack) {
  std::byte* frames[8];
  for (auto& f : frames) f = pool.get(kHugePage, 0);
  for (int i = 0; i < 4; ++i) pool.put(frames[i], kHugePage);
  budget.set(6 * kMiB);
  budget.trim();
  EXPECT_EQ(budget.charged(), 8 * kMiB) << "what is handed out cannot be taken back";
  EXPECT_EQ(budget.available(), 0u);
  EXPECT_EQ(pool.get(kHugePage, 0), nullptr);
  pool.put(frames[4], kHugePage);
  EXPECT_EQ(budget.charged(), 6 * kMiB) << "a frame that comes back above the budget is not kept";
  pool.put(frames[5], kHugePage);
  EXPECT_EQ(budget.charged(), 6 * kMiB);
  EXPECT_EQ(budget.available(), 2 * kMiB);
}

TEST_F(MemoryFrames, BounceBuffersAreBoundedAndReused) {
  EXPECT_EQ(pool.get_bounce(64 << 10), nullptr) << "nobody asked for any";
  ASSERT_TRUE(pool.want_bounce(64 << 10, 4 * kMiB).ok());
  EXPECT_EQ(budget.charged(), 2 * kMiB) << "the first slab is there before the first fault";
  EXPECT_EQ(budget.overhead(), 2 * kMiB);
  std::set<std::byte*> buffers;
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(pool.free_bounce(64 << 10), 64u - static_cast<size_t>(i));
    std::byte* b = pool.get_bounce(64 << 10);
    ASSERT_NE(b, nullptr);
    memset(b, i, 64 << 10);
    EXPECT_TRUE(buffers.insert(b).second);
  }
  EXPECT_EQ(pool.get_bounce(64 << 10), nullptr) << "the limit holds";
  EXPECT_EQ(budget.charged(), 4 * kMiB);
  std::byte* one = *buffers.begin();
  pool.put_bounce(one, 64 << 10);
  EXPECT_EQ(pool.get_bounce(64 << 10), one);
  EXPECT_EQ(budget.charged(), 4 * kMiB);
}

TEST_F(MemoryFrames, ABounceBufferThatDoesNotFitIsRefusedWithTheBudget) {
  ASSERT_TRUE(budget.charge(15 * kMiB, 0));
  const Status s = pool.want_bounce(4096, 4 * kMiB);
  EXPECT_EQ(s.code(), -ENOMEM);
  EXPECT_NE(s.text().find("16 MiB"), std::string_view::npos) << s.text();
  EXPECT_EQ(budget.charged(), 15 * kMiB);
}

TEST_F(MemoryFrames, BuffersOfWhichOneFitsAreRefusedAndMakeNoRoomForEachOther) {
  ASSERT_TRUE(budget.charge(13 * kMiB, 0));
  const Status s = pool.want_bounce(kHugePage, 8 * kMiB, 2 * kHugePage);
  EXPECT_EQ(s.code(), -ENOMEM) << s.text();
  EXPECT_EQ(budget.charged(), 13 * kMiB) << "the first is not left behind";
  EXPECT_EQ(pool.least_overhead(), 0u);
  EXPECT_EQ(pool.get_bounce(kHugePage), nullptr);
  EXPECT_EQ(pool.check(), "");
  budget.credit(kMiB);
  EXPECT_TRUE(pool.want_bounce(kHugePage, 8 * kMiB, 2 * kHugePage).ok());
  EXPECT_EQ(budget.charged(), 16 * kMiB);
  EXPECT_EQ(pool.check(), "");
}

TEST_F(MemoryFrames, BuffersGoWithTheirLastUser) {
  ASSERT_TRUE(pool.want_bounce(64 << 10, 4 * kMiB).ok());
  ASSERT_TRUE(pool.want_bounce(64 << 10, 4 * kMiB).ok());
  std::byte* b = pool.get_bounce(64 << 10);
  pool.unwant_bounce(64 << 10);
  EXPECT_EQ(budget.charged(), 2 * kMiB);
  pool.put_bounce(b, 64 << 10);
  pool.unwant_bounce(64 << 10);
  EXPECT_EQ(budget.charged(), 0u);
  EXPECT_EQ(pool.get_bounce(64 << 10), nullptr) << "nobody asks for any";
}

TEST_F(MemoryFrames, IdleBuffersBeyondTheLeastMakeRoomForBlocks) {
  ASSERT_TRUE(pool.want_bounce(64 << 10, 8 * kMiB).ok());
  std::vector<std::byte*> buffers;
  while (std::byte* b = pool.get_bounce(64 << 10)) buffers.push_back(b);
  EXPECT_EQ(buffers.size(), 128u);
  EXPECT_EQ(budget.charged(), 8 * kMiB);
  EXPECT_EQ(pool.least_overhead(), 2 * kMiB);
  EXPECT_FALSE(budget.charge(10 * kMiB, 0)) << "all are in use";
  for (std::byte* b : buffers) pool.put_bounce(b, 64 << 10);
  EXPECT_FALSE(budget.charge(15 * kMiB, 0)) << "the first slab stays";
  EXPECT_TRUE(budget.charge(14 * kMiB, 0));
  EXPECT_EQ(budget.charged(), 16 * kMiB);
  EXPECT_EQ(budget.overhead(), 2 * kMiB);
  EXPECT_NE(pool.get_bounce(64 << 10), nullptr);
}

TEST_F(MemoryFrames, ALoweredBudgetTakesIdleBuffersAndThoseThatComeBack) {
  ASSERT_TRUE(pool.want_bounce(kHugePage, 8 * kMiB, 2 * kHugePage).ok());
  EXPECT_EQ(pool.least_overhead(), 4 * kMiB);
  std::byte* buffers[4];
  for (auto& b : buffers) b = pool.get_bounce(kHugePage);
  pool.put_bounce(buffers[3], kHugePage);
  budget.set(4 * kMiB);
  budget.trim();
  EXPECT_EQ(budget.charged(), 6 * kMiB);
  for (int i = 0; i < 3; ++i) pool.put_bounce(buffers[i], kHugePage);
  EXPECT_EQ(budget.charged(), 4 * kMiB);
}

TEST_F(MemoryFrames, TablesCountAndMayExceedTheBudgetUntilBlocksLeave) {
  budget.set_tables(3 * kMiB);
  EXPECT_EQ(budget.charged(), 3 * kMiB);
  EXPECT_EQ(budget.overhead(), 3 * kMiB);
  ASSERT_TRUE(budget.charge(13 * kMiB, 0));
  budget.set_tables(5 * kMiB);
  EXPECT_EQ(budget.charged(), 18 * kMiB);
  EXPECT_EQ(budget.available(), 0u);
  EXPECT_FALSE(budget.charge(4096, 0));
  budget.credit(13 * kMiB);
  EXPECT_EQ(budget.available(), 11 * kMiB);
}

TEST_F(MemoryFrames, AFrameFromTheSystemIsZeroAfterRelease) {
  std::byte* slot = pool.get_slot(kHugePage);
  ASSERT_NE(slot, nullptr);
  EXPECT_EQ(budget.charged(), 0u) << "a slot is address space only";
  memset(slot, 7, kHugePage);
  ASSERT_TRUE(trap.release_frames(slot, kHugePage).ok());
  EXPECT_EQ(slot[12345], std::byte{0});
  pool.put_slot(slot, kHugePage);
}

// Checks the sum after each of many random calls against a model.
TEST_F(MemoryFrames, UsedIsTheSumOfItsPartsWhateverHappens) {
  std::mt19937 random(7);
  constexpr size_t kSizes[] = {4096, 64 << 10, kHugePage};
  std::vector<std::pair<std::byte*, size_t>> frames, bounce;
  uint64_t credits = 0, tables = 0, handed = 0, slabs = 0;
  ASSERT_TRUE(pool.want_bounce(64 << 10, 4 * kMiB).ok());
  slabs = budget.overhead();
  for (int n = 0; n < 20000; ++n) {
    const size_t size = kSizes[random() % 3];
    const uint64_t reserve = random() % 2 == 0 ? 0 : kMiB;
    switch (random() % 8) {
      case 0:
      case 1:
        if (std::byte* f = pool.get(size, reserve)) frames.emplace_back(f, size), handed += size;
        break;
      case 2:
      case 3:
        if (!frames.empty()) {
          std::swap(frames[random() % frames.size()], frames.back());
          pool.put(frames.back().first, frames.back().second);
          handed -= frames.back().second;
          frames.pop_back();
        }
        break;
      case 4:
        if (budget.charge(size, reserve)) credits += size;
        break;
      case 5:
        if (credits != 0) budget.credit(credits), credits = 0;
        break;
      case 6:
        if (bounce.empty() || random() % 2 == 0) {
          if (std::byte* b = pool.get_bounce(64 << 10)) bounce.emplace_back(b, 64 << 10);
        } else {
          pool.put_bounce(bounce.back().first, 64 << 10);
          bounce.pop_back();
        }
        break;
      default:
        if (budget.available() > 2 * kMiB) tables = random() % kMiB, budget.set_tables(tables);
        break;
    }
    slabs = budget.overhead() - tables;  // idle slabs may have been given up
    ASSERT_EQ(pool.check(), "") << n;
    ASSERT_EQ(budget.in_use(), credits + handed + slabs + tables) << n;
    if (budget.charged() > budget.limit()) budget.trim();
    ASSERT_LE(budget.charged(), budget.limit()) << n;
    ASSERT_LE(budget.charged() - budget.in_use(), budget.limit()) << n;
  }
}

}  // namespace
