// Copies of a device's blocks that stay in host memory, the staging pool, and the driver's own
// pages.
#pragma once

#include <vector>

#include "core/step.h"
#include "device_fixture.h"

namespace systest {

// Host memory holds everything: after the first pass nothing comes from the disk, and nothing comes
// back from the device.
TEST_P(DeviceTier, WhatLeavesUnchangedIsStillInHostMemory) {
  for (const bool on_disk : {true, false}) {
    start({{"host_budget", "256MiB"}});
    vmem::region r(48 * kMiB, 0);
    const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
    cpu_set(words(r), n, 0, 6);
    if (on_disk) r.evict();
    void* s = stream();
    uint64_t read = 0, written = 0, back = 0;
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t at = 0; at < n; at += part) {
        VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
        app_->check(s, words(r) + at, part, at, 6);
        VMEM_DO(release(words(r) + at, part, s));
      }
      within_budget();
      if (pass != 0) continue;
      read = vmem::stats().read_bytes;
      written = vmem::stats().write_bytes;
      back = device_stats().out_bytes;
    }
    ASSERT_TRUE(app_->synchronize(s).ok());
    EXPECT_EQ(app_->wrong(), 0u);
    EXPECT_EQ(vmem::stats().read_bytes, read);
    EXPECT_EQ(vmem::stats().write_bytes, written);
    EXPECT_EQ(device_stats().out_bytes, back);
    EXPECT_EQ(back, 0u);
    EXPECT_EQ(cpu_wrong(words(r), n, 0, 6), 0u);
    r.evict();  // writes the data that only host memory had
    EXPECT_EQ(r.query().ssd_bytes, r.size());
    EXPECT_EQ(cpu_wrong(words(r), n, 0, 6), 0u);
  }
}

// A tenth of 256 MiB and the device together cannot hold everything. Half can, even with half of
// that kept free.
TEST_P(DeviceTier, TheShareOfHostMemoryForTheDeviceTierIsASetting) {
  for (const char* share : {"10", "50"}) {
    start({{"host_budget", "256MiB"}, {"device_budget", "8MiB"}, {"staging_share", share}});
    vmem::region r(50 * kMiB, 0);
    const size_t n = r.size() / 8, part = 2 * kWordsPerMiB;
    cpu_set(words(r), n, 0, 6);
    r.evict();
    void* s = stream();
    uint64_t read = 0;  // by the last pass
    const auto pass = [&] {
      const uint64_t before = vmem::stats().read_bytes;
      for (size_t at = 0; at < n; at += part) {
        VMEM_DO(acquire(words(r) + at, part, VMEM_READ, s));
        app_->check(s, words(r) + at, part, at, 6);
        VMEM_DO(release(words(r) + at, part, s));
      }
      within_budget();
      read = vmem::stats().read_bytes - before;
    };
    if (share == std::string("50")) {
      EXPECT_TRUE(until([&] { return pass(), read == 0; })) << "frames come as they are needed; then all has a copy";
      const auto all = vmem::stats();
      const auto there = device_stats();
      const auto where = r.query();
      pass();
      const auto all_now = vmem::stats();
      const auto there_now = device_stats();
      EXPECT_EQ(read, 0u) << "and keeps it. Before and after the pass: on the device " << where.device_bytes << ", "
                          << r.query().device_bytes << "; in host memory " << where.host_bytes << ", "
                          << r.query().host_bytes << "; left the device " << there.evictions << ", "
                          << there_now.evictions << "; without a copy " << there.clean_drops << ", "
                          << there_now.clean_drops << "; copied from it " << there.out_bytes << ", "
                          << there_now.out_bytes << "; left host memory " << all.evictions << ", " << all_now.evictions
                          << "; without a write " << all.clean_drops << ", " << all_now.clean_drops << "; host bytes "
                          << all.host_bytes << ", " << all_now.host_bytes << "; the driver's "
                          << there.driver_host_bytes << ", " << there_now.driver_host_bytes;
    } else {
      for (int more = 0; more < 4; ++more) {
        pass();
        EXPECT_GT(read, 0u) << "pass " << more;
      }
    }
    ASSERT_TRUE(app_->synchronize(s).ok());
    EXPECT_EQ(app_->wrong(), 0u);
  }
  EXPECT_EQ(vmem_set("staging_share", "91"), -EINVAL);
  EXPECT_EQ(vmem_set("staging_share", "50"), 0);
}

// Every way in which a block can change on its device while host memory has an old copy.
TEST_P(DeviceTier, AHostCopyOfWhatChangedIsNotUsed) {
  start({{"host_budget", "192MiB"}});
  vmem::region r(16 * kMiB, 0), other(64 * kMiB, 0);
  const size_t n = r.size() / 8, half = n / 2, all = other.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  const auto make_room = [&] {
    for (size_t at = 0; at < all; at += part) {
      VMEM_DO(acquire(words(other) + at, part, VMEM_READ, s));
      VMEM_DO(release(words(other) + at, part, s));
    }
  };
  cpu_set(words(r), n, 0, 1);
  for (uint64_t round = 2; round < 8; ++round) {
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    app_->check(s, words(r), n, 0, round - 1);
    if (round % 3 == 0) {  // the CPU stores, under the lease, after the kernel has checked
      ASSERT_TRUE(app_->synchronize(s).ok());
      cpu_set(words(r), half, 0, round);
      VMEM_DO(release(words(r), n, s));
    } else {
      if (round % 3 == 1) {
        VMEM_DO(release(words(r), n, s));
      }
      VMEM_DO(acquire(words(r), half, VMEM_READ | VMEM_WRITE, s));
      app_->set(s, words(r), half, 0, round);
      VMEM_DO(release(words(r), half, s));
      if (round % 3 == 2) {
        VMEM_DO(release(words(r), n, s));
      }
    }
    VMEM_DO(acquire(words(r) + half, n - half, VMEM_WRITE, s));
    app_->set(s, words(r) + half, n - half, half, round);
    VMEM_DO(release(words(r) + half, n - half, s));
    if (round % 2 == 0) r.sync();
    make_room();
    if (round > 4) r.evict();
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u) << round;
    if (round == 6) make_room();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

// Copies never keep memory from other blocks: changed and unchanged blocks are loaded in turn, with
// too few frames for either.
TEST_P(DeviceTier, HostCopiesGiveWay) {
  start({{"host_budget", "64MiB"}});
  vmem::region read(64 * kMiB, 0), changed(64 * kMiB, 0);
  const size_t n = read.size() / 8, part = 4 * kWordsPerMiB;
  cpu_set(words(read), n, 0, 3);
  void* s = stream();
  for (uint64_t pass = 1; pass < 3; ++pass) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(words(read) + at, part, VMEM_READ, s));
      app_->check(s, words(read) + at, part, at, 3);
      VMEM_DO(release(words(read) + at, part, s));
      VMEM_DO(acquire(words(changed) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (pass == 1) app_->check_zero(s, words(changed) + at, part);
      if (pass == 2) app_->check(s, words(changed) + at, part, at, 1);
      app_->set(s, words(changed) + at, part, at, pass);
      VMEM_DO(release(words(changed) + at, part, s));
      if (at % (4 * part) == 0) within_budget();
    }
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(changed), n, 0, 2), 0u);
  EXPECT_EQ(cpu_wrong(words(read), n, 0, 3), 0u);
}

// Host memory is full of blocks that the CPU uses, so the staging pool may grow but cannot.
TEST_P(DeviceTier, AStagingPoolThatCannotGrowServesTheDevice) {
  start({{"host_budget", "320MiB"}});
  vmem::region cpu(320 * kMiB, VMEM_HOST_ONLY), r(96 * kMiB, 0);
  const size_t n = r.size() / 8, part = 8 * kWordsPerMiB;
  void* s = stream();
  for (uint64_t round = 1; round < 4; ++round) {
    cpu_set(words(cpu), cpu.size() / 8, 0, round);
    for (size_t at = 0; at < n; at += part) {
      // Do not prefetch the block that the CPU reads next: the read could come between the block's
      // mapping and its closing.
      if (round != 3 || at + part < n) {
        VMEM_DO(vmem_prefetch(words(r) + (at + part) % n, part * 8, 0, s));
      }
      VMEM_DO(acquire(words(r) + at, part, VMEM_READ | VMEM_WRITE, s));
      if (round != 1) app_->check(s, words(r) + at, part, at, round - 1);
      app_->set(s, words(r) + at, part, at, round);
      VMEM_DO(release(words(r) + at, part, s));
    }
    within_budget();
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
  EXPECT_EQ(cpu_wrong(words(cpu), cpu.size() / 8, 0, 3), 0u);
}

// A thread that touches a block on its way from the SSD to the device sleeps until the block is
// made. If it were woken to retry, it would access the block between its mapping and its closing,
// which takes as long here as on a busy machine.
TEST_P(DeviceTier, ATouchOfABlockOnItsWayWaitsUntilItIsMade) {
  start();
  vmem::region r(16 * kMiB, 0);
  vmem::core::step_hook.store([](const char* step) {
    wait_for_touch(step);
    if (std::strcmp(step, "device.mapped") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  touch_what_comes(r);
  vmem::core::step_hook.store(nullptr);
}

// CPU reads of blocks on a device make the driver take host pages, outside of every budget.
TEST_P(DeviceTier, HostPagesOfTheDriverAreCountedAndGivenBack) {
  if (GetParam().own_page_tables) GTEST_SKIP() << "the driver takes none";
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 1);
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  EXPECT_EQ(device_stats().driver_host_bytes, r.size()) << "a lease keeps them where they are";
  VMEM_DO(release(words(r), n, s));
  for (int i = 0; i < 4000 && r.query().device_bytes != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(device_stats().driver_host_bytes, 0u);
  EXPECT_EQ(r.query().device_bytes, 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  within_budget();
}

}  // namespace systest
