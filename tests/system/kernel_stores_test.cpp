// Blocks in ranges open for writing: those that kernels stored to are written back, and the others
// are not. Simulated devices, whose kernels are threads.
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernel_fixture.h"

namespace systest {
namespace {

constexpr uint32_t kBlocks = 8;

class KernelStores : public KernelPaging {
 protected:
  void SetUp() override {
    start(1, {{"device_budget", "8MiB"}}, true);
    if (IsSkipped()) return;
    region_ = vmem::region(kBlocks * kBlock);
    for (uint64_t b = 0; b < kBlocks; ++b) words(region_)[b * kWords] = 100 + b;
  }
  void TearDown() override {
    if (region_) {
      EXPECT_EQ(vmem_sync(region_.data(), region_.size()), 0) << "nothing moves then";
    }
    KernelPaging::TearDown();
  }
  // A kernel that loads a word of each block, and stores to a word of one. The range is open for
  // both.
  void turn(const Open& open, uint32_t stores_to, uint64_t value) {
    std::atomic<int> wrong{0};
    launch(stream_, [&, view = open.view()](SimKernel& k) {
      Group group(view.table, long_enough());
      for (uint32_t b = 0; b < kBlocks; ++b) {
        const bool stores = b == stores_to;
        if (group.acquire(b, stores ? Intent::write : Intent::read) != Answer::present) {
          ++wrong;
          continue;
        }
        const auto* const first = word(k, view, b, 0, false);
        wrong += first == nullptr || *first != 100 + b ? 1 : 0;
        if (stores) {
          if (auto* w = word(k, view, b, 7, true); w != nullptr) *w = value;
        }
        group.release(b);
      }
    });
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    EXPECT_EQ(wrong, 0);
  }

  vmem::region region_;
};

TEST_F(KernelStores, WhatIsOnlyLoadedIsNotWrittenBack) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), kBoth, stream_, 2 * kBlock);
  for (int i = 0; i < 3; ++i) turn(open, kBlocks, 0);
  EXPECT_GE(device_stats().in_bytes, 2 * region_.size()) << "blocks came more than once";
  EXPECT_EQ(device_stats().out_bytes, 0u) << "their frames had them yet";
  open.end();
  for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words(region_)[b * kWords], 100 + b);
  EXPECT_EQ(device_stats().out_bytes, 0u);
}

TEST_F(KernelStores, WhatIsStoredIsNotLostAmongIt) {
  if (IsSkipped()) return;
  Open open(region_.data(), region_.size(), kBoth, stream_, 2 * kBlock);
  for (uint32_t i = 0; i < 2 * kBlocks; ++i) turn(open, i % kBlocks, 1000 + i);
  EXPECT_GE(device_stats().out_bytes, kBlocks * kBlock);
  EXPECT_LT(device_stats().out_bytes, 4 * kBlocks * kBlock) << "what was only loaded as well";
  open.end();
  for (uint64_t b = 0; b < kBlocks; ++b) {
    EXPECT_EQ(words(region_)[b * kWords], 100 + b);
    EXPECT_EQ(words(region_)[b * kWords + 7], 1000 + kBlocks + b);
  }
}

// The service knows only the stores up to its last look, and cannot look again.
TEST_F(KernelStores, WhatWasStoredOnADeviceThatIsLostIsLostAndNotAsItWas) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  words(r)[0] = 100;
  Open open(r.data(), r.size(), kBoth, stream_, 2 * kBlock);
  std::atomic<int> told;
  launch_add(stream_, open.view(), 0, &told);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(told, kPresent);
  sim().lose(0, "as the test wants it");
  open.end();
  EXPECT_TRUE(bus(words(r))) << "these would be the bytes before it stored";
}

// The same block is in two ranges, of which one reports no stores, and in a lease of the program.
TEST_F(KernelStores, WhatOneRangeSaysIsNotSaidForOthers) {
  if (IsSkipped()) return;
  void* const other = stream(0);
  Open reads(region_.data(), region_.size(), kBoth, stream_, kBlock);
  {
    Open stores(region_.data(), region_.size(), kBoth, other, kBlock);
    std::atomic<int> told;
    turn(reads, kBlocks, 0);
    launch_add(other, stores.view(), kBlocks - 1, &told);
    ASSERT_TRUE(sim().synchronize(other).ok());
    EXPECT_EQ(told, kPresent);
    reads.end();
  }
  EXPECT_EQ(words(region_)[(kBlocks - 1) * kWords], 100 + kBlocks);
  words(region_)[(kBlocks - 1) * kWords] = 100 + kBlocks - 1;
  ASSERT_EQ(vmem_acquire(region_.data(), kBlock, kBoth, 0, other), 0) << vmem_last_error();
  {
    Open again(region_.data(), region_.size(), kBoth, stream_, kBlock);
    turn(again, kBlocks, 0);
    launch_store(other, words(region_) + 9, 99);
  }
  ASSERT_EQ(vmem_release(region_.data(), kBlock, other), 0) << vmem_last_error();
  EXPECT_EQ(words(region_)[9], 99u);
}

}  // namespace
}  // namespace systest
