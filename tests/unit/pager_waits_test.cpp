// Waits for a device tier without room: they end when nothing progressed for the whole time-out,
// not by the clock.
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "common/patience.h"
#include "core/clock.h"
#include "core/signals.h"
#include "device/sim/sim_device.h"
#include "pager_steps.h"

namespace vmem::pager::test {
namespace {

using device::SimKernel;

class PagerWaits : public PagerSteps {
 protected:
  static constexpr size_t kStaging = 16, kOnDevice = 24;  // blocks that fit

  void start_with_device(unsigned timeout_ms, bool handles = false) {
    std::unique_ptr<device::SimDevices> made;
    device::SimOptions options;
    options.memory_bytes = 2 * kOnDevice * kHugePage;
    options.handles = handles;
    ASSERT_TRUE(device::make_sim_devices(options, &made).ok());
    Settings c = config(64 << 20);  // half of it for staging frames
    c.fault_timeout_ms = timeout_ms;
    c.device_budget = kOnDevice * kHugePage;
    start(std::move(c), std::make_unique<FakeTrap>(false, true, false), std::move(made));
    r = region(4 * kOnDevice, kHugePage);
  }
  Status acquire(size_t first, size_t count, int location, unsigned access = VMEM_READ) {
    const vmem_range what = range(r + first * kHugePage, count * kHugePage, access);
    return pager->acquire({&what, 1}, location, nullptr);
  }
  void release(size_t first, size_t count) {
    const vmem_range what = range(r + first * kHugePage, count * kHugePage);
    const Status s = pager->release({&what, 1}, nullptr);
    EXPECT_TRUE(s.ok()) << s.text();
  }
  // Blocks that a kernel changes: their only copy is on the device.
  void change_on_device(size_t first, size_t count) {
    Status s = acquire(first, count, 0, VMEM_READ | VMEM_WRITE);
    ASSERT_TRUE(s.ok()) << s.text();
    s = device::current_sim()->launch(nullptr, [this, first, count](SimKernel& k) {
      for (size_t b = first; b < first + count; ++b) {
        if (std::byte* at = k.at(r + b * kHugePage, 1, true); at != nullptr) *at = std::byte{7};
      }
    });
    ASSERT_TRUE(s.ok()) << s.text();
    release(first, count);
  }
  Status to_host(size_t first, size_t count) {
    return pager->evict(r + first * kHugePage, count * kHugePage, VMEM_HOST);
  }
  uint64_t on_device() {
    vmem_residency out = {};
    EXPECT_TRUE(pager->queries().query(r, 4 * kOnDevice * kHugePage, &out).ok());
    return out.device_bytes / kHugePage;
  }

  std::byte* r = nullptr;
};

// The machine stands still during a write that all waiters wait for.
TEST_F(PagerWaits, AStoppedMachineEndsNoWaitForTheDeviceTier) {
  start_with_device(60000);
  change_on_device(0, kOnDevice);
  engine->hold(Io::Op::write, true);
  auto leaving = calling([&] { return to_host(0, kOnDevice); });
  vmem::test::eventually([&] { return on_device() <= kOnDevice - kStaging; });
  ASSERT_EQ(on_device(), kOnDevice - kStaging) << "all staging frames are taken";
  engine->until_held(1);
  ASSERT_TRUE(pager->tunables_update().set_device_budget((kOnDevice - kStaging) * kHugePage).ok());
  auto acquiring = calling([&] { return acquire(2 * kOnDevice, 1, 0); });
  auto on_host = calling([&] { return acquire(kOnDevice - 1, 1, VMEM_HOST); });
  usleep(100000);
  for (int stop = 0; stop < 3; ++stop) {
    core::clock_jumped_ns += uint64_t{3600} * 1000000000;
    usleep(100000);  // code that checks only the clock would give up
  }
  EXPECT_NE(leaving.wait_for(std::chrono::milliseconds(0)), std::future_status::ready);
  EXPECT_NE(acquiring.wait_for(std::chrono::milliseconds(0)), std::future_status::ready);
  EXPECT_NE(on_host.wait_for(std::chrono::milliseconds(0)), std::future_status::ready);
  engine->hold(Io::Op::write, false);
  engine->let_go();
  for (auto* call : {&leaving, &acquiring, &on_host}) {
    const Status s = call->get();
    EXPECT_TRUE(s.ok()) << s.text();
  }
  release(2 * kOnDevice, 1);
  release(kOnDevice - 1, 1);
}

// No frame is freed: every write fails.
TEST_F(PagerWaits, WhoWaitsForTheDeviceTierIsToldWhenNothingGoesOn) {
  start_with_device(200);
  change_on_device(0, kOnDevice);
  engine->fail(Io::Op::write, EIO);
  // The short time-out of one call may end before the last frame is taken.
  EXPECT_TRUE(vmem::test::eventually([&] {
    EXPECT_FALSE(to_host(0, kOnDevice).ok());
    return on_device() == kOnDevice - kStaging;
  })) << "all staging frames are taken";
  EXPECT_FALSE(acquire(kOnDevice - 1, 1, VMEM_HOST).ok());
  ASSERT_TRUE(pager->tunables_update().set_device_budget((kOnDevice - kStaging) * kHugePage).ok());
  EXPECT_FALSE(acquire(2 * kOnDevice, 1, 0).ok());
  engine->fail(Io::Op::write, 0);
  // The first call may still report an earlier failed write.
  Status s;
  EXPECT_TRUE(vmem::test::eventually([&] { return (s = to_host(0, kOnDevice)).ok(); })) << s.text();
  EXPECT_TRUE(vmem::test::eventually([&] { return (s = acquire(kOnDevice - 1, 1, VMEM_HOST)).ok(); })) << s.text();
  release(kOnDevice - 1, 1);
}

// An access under a WRITE lease waits for its end, at most for the time-out; time in which nothing
// runs does not count.
TEST_F(PagerWaits, AStoppedMachineEndsNoWaitForAWriteLease) {
  start_with_device(60000, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0, VMEM_READ | VMEM_WRITE).ok());
  auto loading = getting(r);
  EXPECT_EQ(loading.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  for (int stop = 0; stop < 3; ++stop) {
    trap->until_quiet();
    core::clock_jumped_ns += uint64_t{3600} * 1000000000;
    EXPECT_EQ(loading.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  }
  release(0, 1);
  EXPECT_EQ(loading.get(), 7u);
}

// If the trap does not take its SIGBUS back at once, the pager retries; the block stays on its
// device until then.
TEST_F(PagerWaits, WhatGaveSigbusForALeaseIsAnsweredThoughTheTrapRefusedToTakeItBack) {
  start_with_device(50, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0, VMEM_READ | VMEM_WRITE).ok());
  EXPECT_TRUE(bus(r)) << "for as long as it is leased";
  trap->refuse_unfail(3);
  release(0, 1);
  trap->until_called("unfail refused", 3);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(get(r), 7u);
}

// A call that needs the block elsewhere says why it is not there.
TEST_F(PagerWaits, ABlockWhoseSigbusIsNeverTakenBackStaysOnItsDeviceAndCallsSaySo) {
  start_with_device(50, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0, VMEM_READ | VMEM_WRITE).ok());
  EXPECT_TRUE(bus(r));
  trap->refuse_unfail(SIZE_MAX);
  release(0, 1);
  const Status s = to_host(0, 1);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("the trap has not undone that"), std::string_view::npos) << s.text();
  EXPECT_EQ(on_device(), 1u);
  trap->refuse_unfail(0);
  EXPECT_TRUE(vmem::test::eventually([&] { return !bus(r); }));
  EXPECT_EQ(get(r), 7u);
}

// The memory for stores to leased blocks of a device is judged without the staging frames.
TEST_F(PagerWaits, AStoreUnderAReadLeaseHasRoomBesideStagingFrames) {
  start_with_device(300, true);
  change_on_device(0, kOnDevice);
  engine->hold(Io::Op::write, true);
  auto leaving = calling([&] { return to_host(0, kOnDevice); });
  ASSERT_TRUE(vmem::test::eventually([&] { return on_device() == kOnDevice - kStaging; })) << "32 MiB of them";
  engine->hold(Io::Op::write, false);
  engine->let_go();
  ASSERT_TRUE(leaving.get().ok());
  ASSERT_TRUE(pager->tunables_update().set_host_budget(uint64_t{43} << 20).ok());
  ASSERT_TRUE(acquire(0, 1, 0).ok());
  put(r, 5);
  release(0, 1);
  EXPECT_EQ(get(r), 5u);
}

// Staging frames stay: a lowered budget must hold them, counted once, and what the CPU accesses.
TEST_F(PagerWaits, ALoweredBudgetCountsStagingFramesOnce) {
  constexpr uint64_t kMiB = 1 << 20;
  start_with_device(60000);
  change_on_device(0, kOnDevice);
  engine->hold(Io::Op::write, true);
  auto leaving = calling([&] { return to_host(0, kOnDevice); });
  ASSERT_TRUE(vmem::test::eventually([&] { return on_device() == kOnDevice - kStaging; })) << "32 MiB of them";
  engine->hold(Io::Op::write, false);
  engine->let_go();
  Status s = leaving.get();
  EXPECT_TRUE(s.ok()) << s.text();
  EXPECT_GE(stats().host_bytes, kStaging * kHugePage);
  for (const uint64_t budget : {64, 43}) {
    s = pager->tunables_update().set_host_budget(budget * kMiB);
    EXPECT_TRUE(s.ok()) << s.text();
    for (size_t b = 0; b < 2 * kOnDevice; ++b) put(r + b * kHugePage + 8, budget + b);
    for (size_t b = 0; b < 2 * kOnDevice; ++b) EXPECT_EQ(get(r + b * kHugePage + 8), budget + b);
    EXPECT_TRUE(vmem::test::eventually([&] { return stats().host_bytes <= budget * kMiB; })) << stats().host_bytes;
  }
  s = pager->tunables_update().set_host_budget(41 * kMiB);  // 32, buffers, and four blocks
  EXPECT_EQ(s.code(), -EBUSY);
  for (const char* n : {"41 MiB", "42 MiB", "34 MiB"}) EXPECT_NE(s.text().find(n), std::string_view::npos) << s.text();
  EXPECT_EQ(stats().host_budget, 43 * kMiB) << "the old one stays";
  change_on_device(0, 1);
}

// A thread that frees a region waits for calls that still use it. Such a call may wait, in turn,
// for a signal handler of the freeing thread. The handler may access the region, which is an error
// and gets SIGBUS.
class PagerFrees : public PagerSteps {
 protected:
  static inline std::atomic<bool> entered, accessed;
  static inline std::atomic<int> handled;
  // Accesses through a thread that may call what the fakes need.
  static void handler(int) {
    const int error = errno;
    entered = true;
    while (!accessed) usleep(100);
    ++handled;
    errno = error;
  }
  std::byte* r = nullptr;
};

TEST_F(PagerFrees, SignalsComeWhileItWaitsForACallThatUsesTheRegion) {
  start(config());
  r = region(4);
  put(r, 1);
  struct sigaction action = {}, before = {};
  action.sa_handler = handler;
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  entered = accessed = false;
  handled = 0;
  int refused = 0;
  engine->hold(Io::Op::write, true);
  auto synced = calling([&] { return pager->sync(r, 4 * kSmall); });
  engine->until_held(1);
  std::thread freeing([&] {
    const core::SignalsDeferred deferred;  // as in every call of the API
    const Status s = pager->destroy(r, false);
    EXPECT_TRUE(s.ok()) << s.text();
  });
  EXPECT_TRUE(vmem::test::eventually([&] {
    vmem_residency out = {};
    return pager->queries().query(r, kSmall, &out).code() == -EINVAL;
  })) << "it is being freed";
  std::thread accessing([&] {
    while (!entered) usleep(100);
    if (bus(r + 2 * kSmall)) ++refused;
    accessed = true;
  });
  pthread_kill(freeing.native_handle(), SIGUSR1);
  EXPECT_TRUE(vmem::test::eventually([] { return handled == 1; })) << "the call keeps it out";
  engine->hold(Io::Op::write, false);
  engine->let_go();
  synced.get().ignore();
  entered = true;
  freeing.join();
  accessing.join();
  EXPECT_EQ(refused, 1);
  sigaction(SIGUSR1, &before, nullptr);
}

// Accesses block 0 by `access` while a sync delays the freeing of the region.
class PagerFreesDevices : public PagerWaits {
 protected:
  void free_beside(const std::function<void()>& access) {
    put(r + kHugePage, 1);
    engine->hold(Io::Op::write, true);
    auto syncing = calling([&] { return pager->sync(r + kHugePage, kHugePage); });
    engine->until_held(1);
    auto accessing = std::async(std::launch::async, access);
    auto freeing = calling([&] {
      const auto asked = [&] { return !access_first || stats().faults > faults; };
      EXPECT_TRUE(vmem::test::eventually(asked));
      return pager->destroy(r, true);
    });
    EXPECT_EQ(accessing.wait_for(vmem::test::patiently(std::chrono::seconds(30))), std::future_status::ready)
        << "only detach() would answer it";
    engine->hold(Io::Op::write, false);
    engine->let_go();
    syncing.get().ignore();
    EXPECT_TRUE(freeing.get().ok());
  }
  // Waits until the freeing has begun.
  void until_freed() {
    EXPECT_TRUE(vmem::test::eventually([&] {
      vmem_residency out = {};
      return pager->queries().query(r, kHugePage, &out).code() == -EINVAL;
    }));
  }
  bool access_first = false;
  uint64_t faults = 0;
};

TEST_F(PagerFreesDevices, AnAccessThatWaitsForAWriteLeaseGetsItsSignal) {
  start_with_device(600000, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0, VMEM_READ | VMEM_WRITE).ok());
  access_first = true;
  put(r + kHugePage, 1);
  faults = stats().faults;
  free_beside([&] { EXPECT_TRUE(bus(r)); });
}

TEST_F(PagerFreesDevices, AnAccessOfABlockThatIsNotShownGetsItsSignalThoughTheTrapRefusedAtFirst) {
  start_with_device(600000, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0).ok());
  free_beside([&] {
    until_freed();
    trap->refuse_fail(3);  // of the block, of the page, of the block again
    EXPECT_TRUE(bus(r));
  });
  EXPECT_EQ(trap->calls("fail refused"), 3u);
}

TEST_F(PagerFreesDevices, AStoreToACopyThatIsShownGoesOn) {
  start_with_device(600000, true);
  put(r, 7);
  ASSERT_TRUE(acquire(0, 1, 0).ok());
  EXPECT_EQ(get(r), 7u);
  free_beside([&] {
    until_freed();
    EXPECT_TRUE(trap->store(r, 8));
    EXPECT_EQ(get(r), 8u);
  });
}

// Freeing removes the region's frames without regard to transitions: an access must not begin
// read-ahead.
TEST_F(PagerFrees, AnAccessOfARegionThatIsTakenApartBeginsNothing) {
  constexpr size_t kBlocks = 64;
  Settings c = config();
  c.readahead_bytes = 16 * kSmall;
  start(std::move(c));
  r = region(kBlocks);
  for (size_t b = 0; b < kBlocks; ++b) put(r + b * kSmall, b + 1);
  evict(r, kBlocks * kSmall);
  for (size_t b = 0; b < 8; ++b) EXPECT_EQ(get(r + b * kSmall), b + 1);
  engine->until_idle();
  Gate quiet("free.quiet");
  auto freed = calling([&] { return pager->destroy(r, false); });
  quiet.until_reached();
  const uint64_t reads = engine->count(Io::Op::read);
  for (size_t b = 0; b < kBlocks; ++b) trap->report(r + b * kSmall, trap::FaultKind::read);
  trap->until_quiet();
  engine->until_idle();
  EXPECT_EQ(engine->count(Io::Op::read), reads);
  quiet.open();
  EXPECT_TRUE(freed.get().ok());
}

}  // namespace
}  // namespace vmem::pager::test
