// Leases: visibility of stores between kernels and the CPU, and the calls that are refused.
#pragma once

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "device_fixture.h"

namespace systest {

TEST_P(DeviceTier, KernelsSeeWhatTheCpuWroteThoughItWentToTheSsd) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  void* s = stream();
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
      app_->check(s, words(r) + at, part, at, 1);
      VMEM_DO(release(words(r) + at, part, s));
      within_budget();
    }
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  const auto stats = device_stats();
  EXPECT_EQ(stats.out_bytes, 0u) << "blocks that nobody wrote are dropped without a copy";
  EXPECT_GT(stats.clean_drops, 0u);
  EXPECT_GT(r.query().device_bytes, 0u);
}

TEST_P(DeviceTier, WhatKernelsWroteComesBackToTheCpuAndToKernels) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (round > 1) app_->check(s, words(r) + at, part, at, round - 1);
      app_->set(s, words(r) + at, part, at, round);
      VMEM_DO(release(words(r) + at, part, s));
    }
    within_budget();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  r.evict();
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, BlocksNeverWrittenAreZerosOnTheDeviceAndCostNoTransfer) {
  start();
  vmem::region r(64 * kMiB, 0);
  const size_t n = r.size() / 8, part = 16 * kWordsPerMiB;
  void* s = stream();
  for (size_t at = 0; at < n; at += part) {
    VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
    app_->check_zero(s, words(r) + at, part);
    VMEM_DO(release(words(r) + at, part, s));
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(vmem::stats().read_bytes, 0u);
  EXPECT_EQ(vmem::stats().write_bytes, 0u);
  EXPECT_EQ(device_stats().in_bytes, 0u);
  EXPECT_EQ(device_stats().out_bytes, 0u);
}

TEST_P(DeviceTier, ACpuStoreUnderAReadLeaseIsKept) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ, s));
  EXPECT_EQ(words(r)[5 * kStampStride], stamp(5 * kStampStride, 1));
  words(r)[7] = 4711;
  words(r)[n - 1] = 4712;
  VMEM_DO(release(words(r), n, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  r.evict();
  EXPECT_EQ(words(r)[7], 4711u);
  EXPECT_EQ(words(r)[n - 1], 4712u);
}

TEST_P(DeviceTier, RefusalsNameWhatWasWrongAndChangeNothing) {
  start();
  vmem::region r(128 * kMiB, 0), host(4 * kMiB, VMEM_HOST_ONLY);
  void* s = stream();
  const size_t n = 4 * kWordsPerMiB;
  EXPECT_EQ(acquire(words(r), n, VMEM_READ, s, devices_), -ENODEV);
  EXPECT_EQ(acquire(words(host), n, VMEM_READ, s), -EINVAL);
  EXPECT_EQ(release(words(r), n, s), -EINVAL) << "nothing is leased";
  EXPECT_EQ(acquire(words(r), r.size() / 8, VMEM_READ, s), -ENOMEM) << "larger than any budget";
  EXPECT_NE(std::string(vmem_last_error()).find("device_budget 32"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), devices_, nullptr), -ENODEV);
  std::vector<uint64_t> heap(64);
  EXPECT_EQ(acquire(heap.data(), 8, VMEM_READ, s), -EINVAL);
  // A call does not wait for blocks under live leases.
  VMEM_DO(acquire(words(r), 24 * kWordsPerMiB, VMEM_READ, s));
  EXPECT_EQ(acquire(words(r) + 64 * kWordsPerMiB, 16 * kWordsPerMiB, VMEM_READ, s), -ENOMEM);
  EXPECT_EQ(vmem_acquire(r.data(), 4096, VMEM_READ, VMEM_HOST, nullptr), -EBUSY) << "live at another location";
  EXPECT_EQ(vmem_free(r.data()), -EBUSY);
  vmem_range two[2] = {{words(r) + 100 * kWordsPerMiB, 2 * kMiB, VMEM_READ, 0}, {words(r), 2 * kMiB, VMEM_READ, 7}};
  EXPECT_EQ(vmem_acquire_ranges(two, 2, 0, s), -EINVAL);
  two[1] = {words(r) + 64 * kWordsPerMiB, 16 * kMiB, VMEM_READ, 0};
  EXPECT_EQ(vmem_acquire_ranges(two, 2, 0, s), -ENOMEM) << "all or nothing";
  EXPECT_EQ(release(two[0].ptr == nullptr ? nullptr : words(r) + 100 * kWordsPerMiB, 8, s), -EINVAL);
  VMEM_DO(release(words(r), 24 * kWordsPerMiB, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  VMEM_DO(vmem_acquire(r.data(), 4096, VMEM_READ, VMEM_HOST, nullptr));
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s), -EBUSY) << "held at the host";
  VMEM_DO(vmem_release(r.data(), 4096, nullptr));
  EXPECT_EQ(device_stats().leased_bytes, 0u);
}

TEST_P(DeviceTier, CapturingAGraphIsRefusedAndReplayUnderALeaseIsTheWay) {
  start();
  vmem::region r(8 * kMiB, 0);
  void* s = stream();
  app_->capture(s, true);
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("captur"), std::string::npos) << vmem_last_error();
  app_->capture(s, false);
  VMEM_DO(acquire(words(r), 8, VMEM_READ, s));
  VMEM_DO(release(words(r), 8, s));
}

TEST_P(DeviceTier, AnAcquireWaitsForStreamsThatHaveBeenToldToEndAndForNothingElse) {
  start();
  vmem::region r(64 * kMiB, 0);
  void *a = stream(), *b = stream();
  auto* gate = app_->gate();
  *gate = 0;
  app_->stand_still(a, gate);
  VMEM_DO(acquire(words(r), 24 * kWordsPerMiB, VMEM_READ | VMEM_WRITE, a));
  app_->set(a, words(r), 24 * kWordsPerMiB, 0, 1);
  VMEM_DO(release(words(r), 24 * kWordsPerMiB, a));  // the stream has not reached it
  EXPECT_EQ(device_stats().leased_bytes, 24 * kMiB);
  std::atomic<bool> through{false};
  std::thread other([&] {
    EXPECT_EQ(acquire(words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB, VMEM_READ, b), 0) << vmem_last_error();
    through = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(through) << "the budget holds one of the two";
  *gate = 1;
  other.join();
  app_->check_zero(b, words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB);
  VMEM_DO(release(words(r) + 32 * kWordsPerMiB, 24 * kWordsPerMiB, b));
  ASSERT_TRUE(app_->synchronize(b).ok());
  EXPECT_EQ(cpu_wrong(words(r), 24 * kWordsPerMiB, 0, 1), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, SyncEvictDontNeedAndFreeRespectLeases) {
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8, half = n / 2;
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 1);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EBUSY) << "all of it is under a live WRITE lease";
  VMEM_DO(release(words(r), half, s));
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EBUSY);
  EXPECT_EQ(vmem::stats().write_bytes, r.size() / 2) << "the released half is on the SSD";
  EXPECT_EQ(r.query().device_bytes, r.size()) << "and stays where it is";
  VMEM_DO(vmem_evict(r.data(), r.size(), VMEM_HOST));
  EXPECT_EQ(r.query().device_bytes, r.size() / 2) << "leased blocks are skipped";
  EXPECT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), -EBUSY);
  VMEM_DO(release(words(r) + half, half, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r) + half, half, half, 1), 0u);
  for (size_t i = 0; i < half; i += 4096) ASSERT_EQ(words(r)[i], 0u) << "dropped";
  VMEM_DO(vmem_sync(r.data(), r.size()));
  VMEM_DO(acquire(words(r), n, VMEM_READ, s));
  app_->check(s, words(r) + half, half, half, 1);
  app_->check_zero(s, words(r), half);
  VMEM_DO(release(words(r), n, s));
  r.free();  // waits for the stream
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

}  // namespace systest
