// The CPU's view of blocks on a device with page tables of its own. Instantiated for backends
// that have them.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

#include "child.h"
#include "device/managed/fault_gate.h"
#include "device_fixture.h"

namespace systest {

class DeviceTierViews : public DeviceTier {
 protected:
  // Leases the whole region at device 0 for a kernel, which checks for round `seen`.
  void lease_and_check(vmem::region& r, uint64_t seen, unsigned access, void* s) {
    VMEM_DO(acquire(words(r), r.size() / 8, access, s));
    app_->check(s, words(r), r.size() / 8, 0, seen);
  }
  void right_so_far(void* s) {
    ASSERT_TRUE(app_->synchronize(s).ok());
    EXPECT_EQ(app_->wrong(), 0u);
  }
};

TEST_P(DeviceTierViews, ALoadUnderAReadLeaseIsRightAndTheDeviceKeepsTheBlock) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  const uint64_t parked = vmem::device::fault_gate::stats().parked;
  lease_and_check(r, 1, VMEM_READ, s);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  EXPECT_EQ(device_stats().used_bytes, r.size());
  app_->check(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  EXPECT_EQ(vmem::device::fault_gate::stats().parked, parked) << "nobody parks in a signal handler";
}

TEST_P(DeviceTierViews, ALoadWithoutALeaseOfWhatIsReadMostIsRightAndTheDeviceKeepsTheBlock) {
  start();
  vmem::region r(8 * kMiB, 0);
  r.advise(VMEM_ADVISE_SET_READ_MOSTLY);
  const size_t n = r.size() / 8;
  void* s = stream();
  for (uint64_t round = 1; round < 4; ++round) {
    VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
    app_->set(s, words(r), n, 0, round);
    VMEM_DO(release(words(r), n, s));
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
    EXPECT_EQ(device_stats().used_bytes, r.size());
    lease_and_check(r, round, VMEM_READ, s);
    VMEM_DO(release(words(r), n, s));
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
  }
  right_so_far(s);
  within_budget();
}

TEST_P(DeviceTierViews, AStoreToWhatTheCpuWasShownWithoutALeaseIsWhatTheDeviceSeesNext) {
  start();
  TempFile file(4 * kMiB);
  vmem::region r(4 * kMiB, file.path(), 0, VMEM_MAP_SHARED);
  r.advise(VMEM_ADVISE_SET_READ_MOSTLY);
  const size_t n = r.size() / 8;
  void* s = stream();
  VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  for (uint64_t round = 1; round < 4; ++round) {
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
    cpu_set(words(r), n, 0, round + 1);
    EXPECT_EQ(device_stats().used_bytes, 0u) << "what it had is old";
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round + 1), 0u);
    lease_and_check(r, round + 1, VMEM_READ, s);
    VMEM_DO(release(words(r), n, s));
    right_so_far(s);  // the lease has ended
  }
  VMEM_DO(vmem_sync(r.data(), r.size()));
  const auto bytes = file.read();
  EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()), n, 0, 4), 0u);
}

// The soak makes none of these calls. It runs in a process that the kernel would end for one, as it
// does with shared page tables.
TEST_P(DeviceTierViews, NeitherSignalHandlersNorChangesOfAccessNorThePagemapServeIt) {
  start();
  if (IsSkipped()) return;
  vmem_shutdown();
  const std::string suite = ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name();
  const std::string backends = suite.substr(0, suite.find('/'));
  for (const bool separate : {true, false}) {
    const std::string test = backends + "/DeviceTier.CpuAndKernelsTakeTurnsByLeases/" +
                             (separate             ? "handles"
                              : backends == "Cuda" ? "managed"
                                                   : "sim");
    const int status = wait_for_child(start_child(test, {{"ASAN_OPTIONS", without_leak_check()},
                                                         {"VMEM_SOAK_WATCHED", "1"},
                                                         {"VMEM_SOAK_SECONDS", "2"},
                                                         {"VMEM_TEST_MUST_PASS", "1"}}),
                                      60);
    EXPECT_TRUE(separate ? status == 0 : WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS) << test << ": " << status;
  }
}

TEST_P(DeviceTierViews, AWriteLeaseEndsWhatTheCpuSawBefore) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  for (uint64_t round = 1; round < 5; ++round) {
    lease_and_check(r, round, VMEM_READ, s);
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
    VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s));
    app_->set(s, words(r), n, 0, round + 1);
    VMEM_DO(release(words(r), n, s));
    VMEM_DO(release(words(r), n, s));
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round + 1), 0u);
  }
  right_so_far(s);
}

TEST_P(DeviceTierViews, AStoreUnderAReadLeaseIsTheCpusUntilTheRelease) {
  start();
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  cpu_set(words(r), n, 0, 2);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 2), 0u);
  app_->check(s, words(r), n, 0, 1);  // the data that it acquired
  EXPECT_EQ(acquire(words(r), n, VMEM_READ, s), -EBUSY) << "these bytes are not to be had at the device";
  VMEM_DO(vmem_sync(r.data(), r.size()));
  EXPECT_EQ(device_stats().used_bytes, r.size()) << "a kernel may use it";
  cpu_set(words(r), n, 0, 3);  // must not count as written
  app_->check(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  lease_and_check(r, 3, VMEM_READ, s);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  r.evict();
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
}

TEST_P(DeviceTierViews, ASyncWritesWhatTheCpuStoredUnderAReadLease) {
  start();
  TempFile file(4 * kMiB);
  vmem::region r(4 * kMiB, file.path(), 0, VMEM_MAP_SHARED);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  for (uint64_t round = 2; round < 4; ++round) {
    cpu_set(words(r), n, 0, round);
    VMEM_DO(vmem_sync(r.data(), r.size()));
    const auto bytes = file.read();
    EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()), n, 0, round), 0u);
  }
  app_->check(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 3), 0u);
}

TEST_P(DeviceTierViews, WhatTheProgramMayNotReadGoesToADeviceAndIsWritten) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  char* const page = static_cast<char*>(r.data()) + 3 * kMiB;
  cpu_set(words(r), n, 0, 1);
  ASSERT_EQ(mprotect(page, 4096, PROT_NONE), 0);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  right_so_far(s);
  ASSERT_EQ(mprotect(page, 4096, PROT_READ | PROT_WRITE), 0);
  cpu_set(words(r), n, 0, 2);  // the CPU may store until the release
  ASSERT_EQ(mprotect(page, 4096, PROT_NONE), 0);
  VMEM_DO(vmem_sync(r.data(), r.size()));
  VMEM_DO(release(words(r), n, s));
  lease_and_check(r, 2, VMEM_READ, s);
  right_so_far(s);
  VMEM_DO(release(words(r), n, s));
  ASSERT_EQ(mprotect(page, 4096, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 2), 0u);
}

TEST_P(DeviceTierViews, AnAccessUnderAWriteLeaseWaitsForItsEnd) {
  start({{"fault_timeout_ms", "600000"}});
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s = stream();
  *app_->gate() = 0;
  VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
  app_->stand_still(s, app_->gate());
  app_->set(s, words(r), n, 0, 7);
  VMEM_DO(release(words(r), n, s));
  std::atomic<bool> over{false};
  std::atomic<size_t> bad{1};
  const uint64_t before = vmem::stats().faults;
  std::thread reader([&] {
    bad = cpu_wrong(words(r), n, 0, 7);
    over = true;
  });
  EXPECT_TRUE(until([&] { return vmem::stats().faults > before; }));
  EXPECT_FALSE(over);
  *app_->gate() = 1;
  reader.join();
  EXPECT_EQ(bad, 0u);
  right_so_far(s);
}

TEST_P(DeviceTierViews, AnAccessUnderAWriteLeaseIsGivenUpAfterTheTimeOutAndNothingIsLost) {
  start({{"fault_timeout_ms", "300"}});
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s = stream();
  LogLines log;
  VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
  app_->set(s, words(r), n, 0, 7);
  EXPECT_TRUE(raises_sigbus([&] { (void)*static_cast<volatile uint64_t*>(words(r)); }));
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  // The next access requests it again, and the thread that handles the queue retracts the refusal.
  VMEM_DO(vmem_evict(r.data(), r.size(), VMEM_HOST));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 7), 0u);
}

TEST_P(DeviceTierViews, AccessesOfBlocksThatNobodyLeasesAreRightWhateverMoves) {
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s = stream();
  struct sigaction at_start = {}, now = {};
  sigaction(SIGSEGV, nullptr, &at_start);
  for (uint64_t round = 1; round < 4; ++round) {
    VMEM_DO(acquire(words(r), n, VMEM_WRITE, s));
    app_->set(s, words(r), n, 0, round);
    VMEM_DO(release(words(r), n, s));
    if (round == 2) r.prefetch(0);
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
    cpu_set(words(r), n, 0, round + 10);
    if (round == 3) r.prefetch(0);
    EXPECT_EQ(cpu_wrong(words(r), n, 0, round + 10), 0u);
    lease_and_check(r, round + 10, VMEM_READ, s);
    VMEM_DO(release(words(r), n, s));
  }
  right_so_far(s);
  sigaction(SIGSEGV, nullptr, &now);
  EXPECT_EQ(now.sa_handler, at_start.sa_handler) << "no handler is ours";
}

TEST_P(DeviceTierViews, CopiesForTheCpuGiveWayWhenMemoryIsShort) {
  start({{"host_budget", "48MiB"}, {"staging_share", "30"}});
  vmem::region r(24 * kMiB, 0), other(64 * kMiB, VMEM_HOST_ONLY);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  for (uint64_t round = 1; round < 4; ++round) {
    EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
    cpu_set(words(other), other.size() / 8, 0, round);
    EXPECT_EQ(cpu_wrong(words(other), other.size() / 8, 0, round), 0u);
    within_budget();
  }
  app_->check(s, words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
}

TEST_P(DeviceTierViews, ABlockWithACopyForTheCpuGoesToAnotherDevice) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  start();
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s[] = {stream(0), stream(1)};
  lease_and_check(r, 1, VMEM_READ, s[0]);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  VMEM_DO(release(words(r), n, s[0]));
  right_so_far(s[0]);
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s[1], 1));
  app_->check(s[1], words(r), n, 0, 1);
  app_->set(s[1], words(r), n, 0, 2);
  VMEM_DO(release(words(r), n, s[1]));
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 2), 0u);
  right_so_far(s[1]);
}

TEST_P(DeviceTierViews, ContentsThatAreDroppedTakeTheCopyForTheCpuAlong) {
  start();
  vmem::region r(4 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  void* s = stream();
  lease_and_check(r, 1, VMEM_READ, s);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
  VMEM_DO(release(words(r), n, s));
  right_so_far(s);
  VMEM_DO(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, VMEM_HOST));
  for (size_t i = 0; i < n; i += 512) ASSERT_EQ(words(r)[i], 0u) << i;
}

}  // namespace systest
