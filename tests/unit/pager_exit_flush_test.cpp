// Shared files at exit: they are written whatever leases there are, and no wait lasts for ever.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "edit_block.h"
#include "pager/calls/exit_flush.h"
#include "pager/tier/retry.h"
#include "pager_device_parts.h"

namespace vmem::pager::test {
namespace {

// Devices whose work ends when the test says so.
class Working : public FakeDevices {
 public:
  Status drain(int d) override {
    std::unique_lock lock(mutex_);
    ++drained;
    ended_.wait(lock, [this] { return !busy_; });
    return health(d);
  }
  void be_busy(bool on) {
    const std::lock_guard lock(mutex_);
    busy_ = on;
    ended_.notify_all();
  }
  std::atomic<size_t> drained{0};

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool busy_ = false;
};

class PagerExitFlush : public DeviceParts {
 protected:
  PagerExitFlush() : DeviceParts(std::make_unique<Working>()) {}
  Region& changed(Backing backing) {
    Region& r = region(1, backing);
    bring(r, 0);
    put(r, 0, 7);
    return r;
  }
  // A shared file with a block that device 0 has changed and has leased for writing.
  Region& leased() {
    Region& r = device_region(1);
    r.backing = Backing::file_shared;
    supply_frames(r);
    place_changed(r);
    BigLock lock(map.mutex());
    EXPECT_TRUE(lease_manager.grant({&r, 0, 0}, VMEM_WRITE, 0, nullptr).ok());
    return r;
  }
  void end_lease(Region& r) {
    BigLock lock(map.mutex());
    lease_manager.take_back({&r, 0, 0}, VMEM_WRITE, 0, nullptr);
    edit(r.table, 0).flags = 0;
    remove(r, 0);
  }
  void TearDown() override {
    working.be_busy(false);
    while (drains != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    DeviceParts::TearDown();
  }

  Working& working = static_cast<Working&>(devices);
  ExitFlush& exit_writes = calls.exit_flush;
};

TEST_F(PagerExitFlush, OnlySharedFilesAreWrittenAndLeasesDoNotMatter) {
  changed(Backing::anonymous);
  Region& r = changed(Backing::file_shared);
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, 0, 0}, VMEM_WRITE, VMEM_HOST, nullptr).ok());
  }
  ASSERT_TRUE(exit_writes.flush_shared().ok());
  EXPECT_EQ(written(), 1u);
  EXPECT_EQ(working.drained, 0u) << "no device has a lease";
  BigLock lock(map.mutex());
  lease_manager.take_back({&r, 0, 0}, VMEM_WRITE, VMEM_HOST, nullptr);
}

TEST_F(PagerExitFlush, WhatNeedsNoDeviceIsWrittenWithoutAskingOne) {
  Region& r = leased();
  changed(Backing::file_shared);
  ASSERT_TRUE(exit_writes.flush_host().ok());
  EXPECT_EQ(written(), 1u);
  EXPECT_EQ(devices.copied, 0u);
  EXPECT_EQ(working.drained, 0u);
  end_lease(r);
}

TEST_F(PagerExitFlush, AFailureIsTheAnswerAndTheOthersAreWritten) {
  changed(Backing::file_shared);
  changed(Backing::file_shared);
  engine.tear(EIO, 1);
  EXPECT_EQ(exit_writes.flush_shared().code(), -EIO);
  EXPECT_EQ(written(), 2u);
  EXPECT_TRUE(exit_writes.flush_shared().ok()) << "it is tried again";
  EXPECT_EQ(written(), 3u);
}

TEST_F(PagerExitFlush, ABlockThatDoesNotComeToRestIsGivenUpAfterTheTimeOut) {
  tunables.fault_timeout_ms = 30;
  Region& other = changed(Backing::file_shared);
  Region& r = region(1, Backing::file_shared);
  engine.hold(Io::Op::read, true);
  DeferredWork after;
  {
    BigLock lock(map.mutex());
    ASSERT_TRUE(page_in.start_fill(r, 0, core::Urgency::fault, after));
  }
  page_in.run(after);
  engine.until_held(1);
  EXPECT_EQ(exit_writes.flush_shared().code(), -ETIMEDOUT);
  EXPECT_TRUE(r.unfinished);
  EXPECT_FALSE(other.unfinished);
  engine.hold(Io::Op::read, false);
  engine.let_go();
  engine.until_idle();
  EXPECT_TRUE(exit_writes.flush_shared().ok());
  EXPECT_FALSE(r.unfinished);
}

TEST_F(PagerExitFlush, ABlockOnItsWayToASlowDiskIsWaitedForWithoutLimit) {
  tunables.fault_timeout_ms = 30;
  Region& r = changed(Backing::file_shared);
  engine.hold(Io::Op::write, true);
  Transition* m = nullptr;
  {
    BigLock lock(map.mutex());
    map.withdraw(r.table[0].aux);
    m = isolator.begin_take(r, 0, false, false);
    ASSERT_NE(m, nullptr);
  }
  write_back.evict_batch({&m, 1});
  engine.until_held(1);
  auto at_exit = std::async(std::launch::async, [&] { return exit_writes.flush_shared(); });
  EXPECT_EQ(at_exit.wait_for(std::chrono::milliseconds(150)), std::future_status::timeout);
  engine.hold(Io::Op::write, false);
  engine.let_go();
  EXPECT_TRUE(at_exit.get().ok());
  EXPECT_FALSE(r.unfinished);
  EXPECT_EQ(written(), 1u);
}

TEST_F(PagerExitFlush, WhatADeviceStoresUnderALeaseIsWaitedForAndWritten) {
  Region& r = leased();
  ASSERT_TRUE(exit_writes.flush_shared().ok());
  EXPECT_EQ(working.drained, 1u);
  EXPECT_GE(written(), 1u);
  EXPECT_EQ(state(r, 0), State::on_device);
  EXPECT_EQ(r.counts.told_at_exit, 0u);
  end_lease(r);
}

TEST_F(PagerExitFlush, ADeviceThatNeverEndsIsWaitedForOnce) {
  tunables.fault_timeout_ms = 30;
  Region& r = leased();
  working.be_busy(true);
  const Status s = exit_writes.flush_shared();
  EXPECT_EQ(s.code(), -ETIMEDOUT);
  EXPECT_NE(s.text().find("device 0"), std::string_view::npos) << s.text();
  EXPECT_GE(written(), 1u) << "what could be had is in the file";
  EXPECT_TRUE(exit_writes.flush_shared().ok()) << "it was told";
  EXPECT_EQ(working.drained, 1u);
  end_lease(r);
}

}  // namespace
}  // namespace vmem::pager::test
