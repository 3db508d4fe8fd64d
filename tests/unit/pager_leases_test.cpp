// Leases of many blocks: other threads get the pager's lock in between and may change anything; the
// memory of leases is charged and credited.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include "core/step.h"
#include "pager_steps.h"

namespace {

using vmem::core::Status;

constexpr size_t kBlock = 4096, kMany = 1024;
constexpr uint64_t kMiB = 1 << 20;

// Runs a function on the working thread each time that long work opens the lock.
class Given {
 public:
  explicit Given(std::function<void()> what) {
    what_ = std::move(what);
    times_ = 0;
    vmem::core::step_hook.store(at);
  }
  ~Given() { vmem::core::step_hook.store(nullptr); }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;
  static int times() { return times_; }

 private:
  static void at(const char* step) {
    static thread_local bool inside = false;
    if (inside || strcmp(step, "lock.given") != 0) return;
    inside = true;
    ++times_;
    what_();
    inside = false;
  }
  static inline std::function<void()> what_;
  static inline std::atomic<int> times_;
};

class PagerLeases : public vmem::pager::test::PagerSteps {
 protected:
  uint64_t held() {
    struct vmem_stats out = {};
    pager->queries().stats(&out);
    return out.host_bytes;
  }
  Status acquire(std::byte* at, size_t blocks, unsigned access = VMEM_READ | VMEM_WRITE) {
    const vmem_range one = range(at, blocks * kBlock, access);
    return pager->acquire({&one, 1}, VMEM_HOST, nullptr);
  }
  Status release(std::byte* at, size_t blocks) {
    const vmem_range one = range(at, blocks * kBlock);
    return pager->release({&one, 1}, nullptr);
  }
  void fill(std::byte* at, size_t blocks) {
    for (size_t b = 0; b < blocks; ++b) put(at + b * kBlock, b + 1);
  }
};

TEST_F(PagerLeases, WhoNeedsTheLockHasItInTheMidstOfALongAcquireAndRelease) {
  start(config(32 * kMiB));
  std::byte* const r = region(kMany, kBlock);
  fill(r, kMany);
  const Given given([&] { held(); });
  ASSERT_TRUE(acquire(r, kMany).ok());
  EXPECT_GE(Given::times(), static_cast<int>(kMany / 256)) << "all of it was there";
  const int before = Given::times();
  ASSERT_TRUE(release(r, kMany).ok());
  EXPECT_GE(Given::times() - before, static_cast<int>(kMany / 256));
  const int absent = Given::times();
  evict(r, kMany * kBlock);
  ASSERT_TRUE(acquire(r, kMany).ok());
  EXPECT_GE(Given::times() - absent, static_cast<int>(kMany / 256));
  EXPECT_EQ(pager->check(), "");
  for (size_t b = 0; b < kMany; b += 100) EXPECT_EQ(get(r + b * kBlock), b + 1);
  ASSERT_TRUE(release(r, kMany).ok());
}

TEST_F(PagerLeases, NorDoesAnybodyWaitForRegionsThatAreMadeLookedThroughAndFreed) {
  start(config(512 * kMiB));
  std::byte* r = nullptr;
  {
    const Given given([&] { held(); });
    r = region(64 * kMany, kBlock);
    EXPECT_GE(Given::times(), static_cast<int>(64 * kMany / 4096)) << "residents for all of it";
  }
  fill(r, kMany);
  std::byte* const other = region(16, kBlock);
  put(other, 7);
  const Given given([&] {
    held();
    EXPECT_EQ(ssd(other, 16 * kBlock), 0u);
    EXPECT_EQ(get(other), 7u);
  });
  const auto looks = [&](auto call) {
    const int before = Given::times();
    call();
    EXPECT_GE(Given::times() - before, static_cast<int>(kMany / 256));
  };
  looks([&] { ssd(r, 64 * kMany * kBlock); });
  looks([&] { EXPECT_TRUE(pager->sync(r, 64 * kMany * kBlock).ok()); });
  looks([&] { EXPECT_TRUE(pager->advise(r, kBlock, VMEM_ADVISE_PRIORITY_LOW, 0).ok()); });
  looks([&] { EXPECT_TRUE(pager->destroy(r, false).ok()); });
}

TEST_F(PagerLeases, WhatIsLeasedStaysThoughEvictedBetweenTheTurns) {
  start(config(32 * kMiB));
  std::byte* const r = region(kMany, kBlock);
  fill(r, kMany);
  {
    const Given given([&] { evict(r, kMany * kBlock); });
    ASSERT_TRUE(acquire(r, kMany).ok());
  }
  EXPECT_EQ(ssd(r, kMany * kBlock), 0u);
  evict(r, kMany * kBlock);
  EXPECT_EQ(ssd(r, kMany * kBlock), 0u);
  EXPECT_EQ(pager->check(), "");
  ASSERT_TRUE(release(r, kMany).ok());
  evict(r, kMany * kBlock);
  EXPECT_EQ(ssd(r, kMany * kBlock), kMany * kBlock);
}

// Two threads lease one range; each changes it when the other is half way.
TEST_F(PagerLeases, HoldsFollowTheLeasesThatThereAreByThen) {
  start(config(32 * kMiB));
  std::byte* const r = region(kMany, kBlock);
  fill(r, kMany);
  bool more = true;
  {
    const Given given([&] {
      if (std::exchange(more, false)) {
        EXPECT_TRUE(acquire(r, kMany).ok());
      }
    });
    ASSERT_TRUE(acquire(r, kMany).ok());
  }
  EXPECT_FALSE(more);
  EXPECT_EQ(pager->check(), "");
  // The other lease ends in the middle of this release, and a new one begins.
  more = true;
  {
    ASSERT_TRUE(release(r, kMany).ok());
    const Given given([&] {
      if (std::exchange(more, false)) {
        EXPECT_TRUE(acquire(r + kMany / 4 * kBlock, kMany / 2).ok());
      }
    });
    ASSERT_TRUE(release(r, kMany).ok());
  }
  EXPECT_FALSE(more);
  EXPECT_EQ(pager->check(), "");
  evict(r, kMany * kBlock);
  EXPECT_EQ(ssd(r, kMany * kBlock), kMany / 2 * kBlock);
  ASSERT_TRUE(release(r + kMany / 4 * kBlock, kMany / 2).ok());
  EXPECT_EQ(pager->check(), "");
  EXPECT_EQ(release(r, 1).code(), -EINVAL);
}

TEST_F(PagerLeases, AnAcquireThatFailsLateHasLeasedNothingAndHoldsNothing) {
  start(config(32 * kMiB));
  std::byte* const r = region(kMany, kBlock);
  std::byte* const large = region(64, kMiB);
  fill(r, kMany);
  const vmem_range both[] = {range(r, kMany * kBlock), range(large, 64 * kMiB)};
  EXPECT_EQ(pager->acquire(both, VMEM_HOST, nullptr).code(), -ENOMEM);
  EXPECT_EQ(pager->check(), "");
  EXPECT_EQ(release(r, 1).code(), -EINVAL);
  evict(r, kMany * kBlock);
  EXPECT_EQ(ssd(r, kMany * kBlock), kMany * kBlock);
  // If one of two ranges is not leased, neither is released.
  ASSERT_TRUE(acquire(r, 10).ok());
  const vmem_range some[] = {range(r, 10 * kBlock), range(r + 5 * kBlock, 10 * kBlock)};
  EXPECT_EQ(pager->release(some, nullptr).code(), -EINVAL);
  EXPECT_EQ(pager->check(), "");
  ASSERT_TRUE(release(r, 10).ok());
  EXPECT_EQ(release(r, 1).code(), -EINVAL);
}

TEST_F(PagerLeases, WhatLeasesAreKeptInIsChargedByRangeAndGivenBack) {
  start(config(256 * kMiB));
  // The table of sparse data uses up the free allowance of a process.
  constexpr size_t kStride = 128 * kBlock, kPages = 3000;
  std::byte* const sparse = region(kPages * 128, kBlock);
  for (size_t n = 0; n < kPages; ++n) put(sparse + n * kStride, n);
  std::byte* const r = region(kMany, kBlock);
  fill(r, kMany);
  const uint64_t before = held();
  ASSERT_TRUE(acquire(r, kMany).ok());
  const uint64_t one = held() - before;
  EXPECT_GT(one, 0u);
  EXPECT_LT(one, 4096u);
  ASSERT_TRUE(release(r, kMany).ok());
  EXPECT_EQ(held(), before);
  for (size_t b = 0; b < kMany; b += 2) ASSERT_TRUE(acquire(r + b * kBlock, 1).ok());
  EXPECT_GT(held() - before, kMany / 2 * 100);
  for (size_t b = 0; b < kMany; b += 2) ASSERT_TRUE(release(r + b * kBlock, 1).ok());
  EXPECT_EQ(held(), before);
}

}  // namespace
