// Prefetches and hints, and the share of host memory that they use.
#pragma once

#include <vector>

#include "core/step.h"
#include "device_fixture.h"

namespace systest {

TEST_P(DeviceTier, PrefetchMovesBetweenAllTiers) {
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 0, nullptr));
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr));
  EXPECT_TRUE(until([&] { return r.query().host_bytes == r.size(); }));
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
  const uint64_t read = vmem::stats().read_bytes;
  app_->check(s, words(r), n, 0, 1);
  app_->set(s, words(r), n, 0, 2);
  VMEM_DO(release(words(r), n, s));
  EXPECT_EQ(vmem::stats().read_bytes, read);
  ASSERT_TRUE(app_->synchronize(s).ok());
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr));
  EXPECT_TRUE(until([&] { return r.query().ssd_bytes == r.size(); }));
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr));
  EXPECT_TRUE(until([&] { return r.query().host_bytes == r.size(); }));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 2), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

// The leases end after the hint's blocks have come: by time of use alone, the hint's blocks would
// leave first.
TEST_P(DeviceTier, OfAColdRegionWhatAHintBroughtStaysUntilItIsUsed) {
  start({{"block_size", "2MiB"}});
  vmem::region r(64 * kMiB, 0);
  const size_t n = r.size() / 8, mib = kWordsPerMiB;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  r.advise(VMEM_ADVISE_COLD, 0);
  const auto there = [&](size_t at, size_t size) {
    return residency(words(r) + at * mib, size * kMiB).device_bytes == size * kMiB;
  };
  const auto before = vmem::stats();
  void* s = stream();
  VMEM_DO(acquire(words(r), 20 * mib, VMEM_READ, s));
  app_->check(s, words(r), 20 * mib, 0, 1);
  VMEM_DO(vmem_prefetch(words(r) + 20 * mib, 8 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(20, 8); }));
  VMEM_DO(release(words(r), 20 * mib, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_TRUE(until([&] { return device_stats().leased_bytes == 0; }));
  VMEM_DO(vmem_prefetch(words(r) + 28 * mib, 8 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(28, 8); }));
  EXPECT_TRUE(there(20, 8));
  VMEM_DO(acquire(words(r) + 20 * mib, 16 * mib, VMEM_READ, s));
  app_->check(s, words(r) + 20 * mib, 16 * mib, 20 * mib, 1);
  VMEM_DO(release(words(r) + 20 * mib, 16 * mib, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  const auto after = vmem::stats();
  EXPECT_EQ(after.prefetched_blocks - before.prefetched_blocks, 8u);
  EXPECT_EQ(after.prefetch_hits - before.prefetch_hits, 8u);
  EXPECT_EQ(after.prefetch_wasted, before.prefetch_wasted);
  // These are not used: they are the waste.
  VMEM_DO(vmem_prefetch(words(r) + 36 * mib, 4 * kMiB, 0, nullptr));
  EXPECT_TRUE(until([&] { return there(36, 4); }));
  VMEM_DO(vmem_prefetch(words(r) + 36 * mib, 4 * kMiB, VMEM_SSD, nullptr));
  EXPECT_TRUE(until([&] { return vmem::stats().prefetch_wasted == before.prefetch_wasted + 2; }));
}

TEST_P(DeviceTier, AHintForABlockThatIsStillOnItsWayOutIsKept) {
  start({{"block_size", "2MiB"}});
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  on_its_way_ = false;
  vmem::core::step_hook.store(&stay_taken);
  VMEM_DO(vmem_prefetch(r.data(), 2 * kMiB, VMEM_SSD, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), 0, nullptr), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size() / 2; })) << "the rest need not wait for it";
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

TEST_P(DeviceTier, WhatAsksABlockElsewhereEndsTheHintThatWaitsForIt) {
  start({{"block_size", "2MiB"}});
  vmem::region r(2 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  on_its_way_ = false;
  vmem::core::step_hook.store(&stay_taken);
  VMEM_DO(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), 0, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(vmem_prefetch(r.data(), r.size(), VMEM_SSD, nullptr), 0) << vmem_last_error();
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  r.evict();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  EXPECT_EQ(device_stats().in_bytes, 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

// Everything on the device is leased, so the hint waits for room.
TEST_P(DeviceTier, OnlyWhatIsAskedElsewhereIsTakenOutOfAHint) {
  start({{"device_budget", "8MiB"}});
  vmem::region a(8 * kMiB, 0), b(6 * kMiB, 0);
  const size_t n = b.size() / 8, block = 2 * kWordsPerMiB;
  cpu_set(words(b), n, 0, 1);
  void* s = stream();
  VMEM_DO(acquire(words(a), a.size() / 8, VMEM_READ, s));
  const uint64_t before = vmem::stats().prefetched_blocks;
  VMEM_DO(vmem_prefetch(b.data(), b.size(), 0, nullptr));
  VMEM_DO(vmem_evict(words(b) + block, block * 8, VMEM_SSD));
  EXPECT_EQ(b.query().device_bytes, 0u);
  VMEM_DO(release(words(a), a.size() / 8, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  // Both blocks come. Neither has been used, so the second may evict the first.
  EXPECT_TRUE(until([&] { return vmem::stats().prefetched_blocks == before + 2; }));
  EXPECT_TRUE(until([&] { return b.query().device_bytes != 0; }));
  EXPECT_EQ(residency(words(b) + block, block * 8).ssd_bytes, block * 8);
  EXPECT_EQ(cpu_wrong(words(b), n, 0, 1), 0u);
}

// The reserve for faults is kept even with the largest share and the largest blocks. A later region
// that does not fit beside it is refused.
TEST_P(DeviceTier, TheLargestShareLeavesFaultsTheirReserve) {
  start({{"host_budget", "256MiB"}, {"device_budget", "8MiB"}, {"staging_share", "90"}, {"block_size", "32MiB"}});
  vmem::region large(96 * kMiB, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_set("block_size", "2MiB"), 0);
  vmem::region r(240 * kMiB, 0);
  void* s = stream();
  cpu_set(words(r), r.size() / 8, 0, 1);
  r.evict();
  for (size_t at = 0; at < r.size() / 8; at += 2 * kWordsPerMiB) {
    VMEM_DO(acquire(words(r) + at, 2 * kWordsPerMiB, VMEM_READ, s));
    VMEM_DO(release(words(r) + at, 2 * kWordsPerMiB, s));
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  const uint64_t before = vmem::stats().evictions;
  cpu_set(words(large), large.size() / 8, 0, 2);
  EXPECT_EQ(cpu_wrong(words(large), large.size() / 8, 0, 2), 0u);
  // Three blocks, two passes, and the blocks evicted ahead of time. If blocks in use were evicted,
  // there would be hundreds.
  EXPECT_LE(vmem::stats().evictions - before, 12u) << "taken away while it is used";
  within_budget();
  ASSERT_EQ(vmem_set("block_size", "32MiB"), 0);
  EXPECT_THROW(vmem::region(64 * kMiB, VMEM_HOST_ONLY).size(), std::exception);
  EXPECT_EQ(vmem_set("block_size", "2MiB"), 0);
  EXPECT_EQ(vmem_set("staging_share", "50"), 0);
}

}  // namespace systest
