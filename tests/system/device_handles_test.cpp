// Devices with page tables of their own: kernels that still run when their blocks must leave,
// devices that are lost while the CPU has a copy of a block mapped, and too little memory for such
// copies. On simulated devices.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;
using vmem::core::Status;
using vmem::device::SimKernel;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;

class Handles : public systest::SimTest {
 protected:
  void SetUp() override { start(2, {}, true); }
  void TearDown() override {
    open_ = true;  // after any failure, no stream stays blocked
    SimTest::TearDown();
    vmem_set("staging_share", "50");  // the default, for later tests in this process
  }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  // Launches a kernel that blocks until open_, then loads a word. Returns when it runs.
  static void launch_held(void* stream, const uint64_t* at) {
    open_ = runs_ = ended_ = reached_ = false;
    const Status s = sim().launch(stream, [at](SimKernel& k) {
      runs_ = true;
      while (!open_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      reached_ = k.at(at, 8, false) != nullptr;
      ended_ = true;
    });
    ASSERT_TRUE(s.ok()) << s.text();
    ASSERT_TRUE(until([] { return runs_.load(); }));
  }
  // A step hook: lets the kernel continue when a thread waits for it, or when its block is removed
  // without a wait.
  static void let_go(const char* step) {
    if (std::strstr(step, ".draining") != nullptr || std::strcmp(step, "device.punch") == 0) open_ = true;
  }
  static inline std::atomic<bool> open_{false}, runs_{false}, ended_{false}, reached_{false};
};

TEST_F(Handles, ShutdownLetsKernelsEndThatUseWhatTheyLeased) {
  if (IsSkipped()) return;
  TempFile file(kBlock);
  void *f = nullptr, *r = nullptr;
  ASSERT_EQ(vmem_map(&f, kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  ASSERT_EQ(vmem_alloc(&r, 2 * kBlock, 0), 0) << vmem_last_error();
  store_on_device(static_cast<uint64_t*>(f), 101);
  ASSERT_EQ(vmem_acquire(r, 2 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_held(stream_, static_cast<uint64_t*>(r));
  vmem::core::step_hook.store(&let_go);
  vmem_shutdown();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([] { return ended_.load(); }));
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
  uint64_t written = 0;
  memcpy(&written, file.read().data(), 8);
  EXPECT_EQ(written, 101u);
}

// A kernel that shutdown waits for may itself wait for a signal handler of the thread that shuts
// down.
TEST_F(Handles, SignalsComeWhileShutdownLetsKernelsEnd) {
  if (IsSkipped()) return;
  static std::atomic<bool> draining;
  static std::atomic<const uint64_t*> absent;
  static std::atomic<uint64_t> seen;
  draining = false;
  seen = 0;
  void* r = nullptr;
  ASSERT_EQ(vmem_alloc(&r, 2 * kBlock, 0), 0) << vmem_last_error();
  auto* const at = static_cast<uint64_t*>(r);
  at[kWords] = 5;
  ASSERT_EQ(vmem_evict(at + kWords, kBlock, VMEM_SSD), 0) << vmem_last_error();
  absent = at + kWords;
  ASSERT_EQ(vmem_acquire(r, kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_held(stream_, at);
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) {
    seen = *static_cast<const volatile uint64_t*>(absent.load());
    open_ = true;
  };
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "free.draining") == 0) draining = true;
  });
  std::thread shutting(vmem_shutdown);
  EXPECT_TRUE(until([] { return draining.load(); }));
  pthread_kill(shutting.native_handle(), SIGUSR1);
  EXPECT_TRUE(until([] { return open_.load(); })) << "the call keeps it out";
  open_ = true;
  shutting.join();
  vmem::core::step_hook.store(nullptr);
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(seen, 5u);
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
}

// While a sync writes the CPU's stores under a READ lease, the device's bytes stay stale.
TEST_F(Handles, AnAcquireBesideASyncOfWhatTheCpuStoredIsRefused) {
  if (IsSkipped()) return;
  TempFile file(kBlock);
  vmem::region r(kBlock, file.path(), 0, VMEM_MAP_SHARED);
  words(r)[0] = 1;
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  words(r)[0] = 2;
  static std::atomic<bool> stands, goes_on;
  stands = goes_on = false;
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.copying_shown") != 0 || stands.exchange(true)) return;
    while (!goes_on) usleep(1000);
  });
  std::thread syncing([&] { EXPECT_EQ(vmem_sync(words(r), kBlock), 0) << vmem_last_error(); });
  ASSERT_TRUE(until([] { return stands.load(); }));
  EXPECT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream(0)), -EBUSY);
  EXPECT_EQ(vmem_acquire(words(r), kBlock, kBoth, 0, stream(0)), -EBUSY);
  goes_on = true;
  syncing.join();
  vmem::core::step_hook.store(nullptr);
  ASSERT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  std::atomic<uint64_t> seen{0};
  const uint64_t* const at = words(r);
  ASSERT_TRUE(sim()
                  .launch(stream_,
                          [&seen, at](SimKernel& k) {
                            if (const std::byte* p = k.at(at, 8, false)) seen = *reinterpret_cast<const uint64_t*>(p);
                          })
                  .ok());
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(seen, 2u);
  EXPECT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
}

// A stale block leaves its device once its last lease has ended, even if the device refuses at
// first.
TEST_F(Handles, WhatIsStaleLeavesThoughItWasRefusedOnce) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  words(r)[0] = 1;
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  words(r)[0] = 2;
  static std::atomic<int> refused;
  refused = 0;
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    return op == SimOp::hold && refused++ == 0 ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
  });
  ASSERT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return refused > 0; }));
  EXPECT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();  // or it hangs
  sim().set_hook(nullptr);
  EXPECT_EQ(load(words(r)), 2u);
  EXPECT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
}

TEST_F(Handles, ALeaseOfAStreamThatIsNoMoreLastsAsLongAsItsWork) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  void* const gone = stream(0);
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, gone), 0) << vmem_last_error();
  launch_held(gone, words(r));
  sim().forget_stream(gone);
  vmem::core::step_hook.store(&let_go);
  EXPECT_EQ(vmem_release(words(r), kBlock, gone), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(words(r), kBlock, VMEM_HOST), 0) << vmem_last_error();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([] { return ended_.load(); }));
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
  EXPECT_TRUE(sim().health(0).ok());
}

// The device is healthy but refuses to copy, and nothing shows that it will ever stop.
TEST_F(Handles, AnAccessThatCannotHaveWhatTheDeviceHasIsGivenUp) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  vmem::region r(2 * kBlock);
  for (const bool leased : {true, false}) {
    SCOPED_TRACE(leased ? "leased" : "not leased");
    store_on_device(words(r), 51 + leased);
    ASSERT_EQ(leased ? vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_) : 0, 0) << vmem_last_error();
    sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
      return op == SimOp::issue_out ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
    });
    systest::LogLines log;
    EXPECT_TRUE(bus(words(r)));
    EXPECT_TRUE(log.contains("the contents are intact"));
    sim().set_hook(nullptr);
    EXPECT_TRUE(until([&] { return !bus(words(r)); }));
    EXPECT_EQ(load(words(r)), 51u + leased);
    ASSERT_EQ(leased ? vmem_release(words(r), kBlock, stream_) : 0, 0) << vmem_last_error();
  }
}

// The device is busy. The acquire only orders its stream after the device's work.
TEST_F(Handles, AnAcquireOfNewBlocksWaitsForNoDevice) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  open_ = runs_ = false;
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::copy_in) return Status();
    runs_ = true;
    while (!open_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Status();
  });
  ASSERT_EQ(vmem_acquire(words(r), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  static std::atomic<uint64_t> seen;
  seen = 1;
  ASSERT_TRUE(sim()
                  .launch(stream_,
                          [at = words(r) + kWords](SimKernel& k) {
                            if (auto* w = reinterpret_cast<uint64_t*>(k.at(at, 8, true)); w != nullptr) seen = (*w)++;
                          })
                  .ok());
  EXPECT_EQ(vmem_release(words(r), r.size(), stream_), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return runs_.load(); })) << "it was cleared inside the acquire";
  open_ = true;
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  sim().set_hook(nullptr);
  EXPECT_EQ(seen, 0u);
  EXPECT_EQ(load(words(r) + kWords), 1u);
  EXPECT_EQ(load(words(r)), 0u);
}

// A present block reads right. An absent one is an illegal address, and never shows old contents.
TEST_F(Handles, AKernelWithoutALeaseIsRightOrLosesItsDevice) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  store_on_device(words(r), 7);
  static std::atomic<uint64_t> seen;
  static std::atomic<bool> refused;
  const auto load_on_device = [&] {
    seen = 0;
    refused = false;
    ASSERT_TRUE(sim()
                    .launch(stream_,
                            [at = words(r)](SimKernel& k) {
                              const auto* w = reinterpret_cast<const uint64_t*>(k.at(at, 8, false));
                              if (w != nullptr) seen = *w;
                              refused = w == nullptr;
                            })
                    .ok());
  };
  load_on_device();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(seen, 7u);
  EXPECT_EQ(load(words(r)), 7u);  // this load brings the block to host memory
  load_on_device();
  EXPECT_EQ(sim().synchronize(stream_).code(), -EIO);
  EXPECT_TRUE(until([] { return refused.load(); }));
  EXPECT_EQ(load(words(r)), 7u) << "nothing is lost";
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_F(Handles, MemoryThatNoBlockHasGoesBackWhenTheBudgetIsLowered) {
  if (IsSkipped()) return;
  vmem::region r(12 * kBlock);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_evict(r.data(), 10 * kBlock, VMEM_HOST), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("device_budget", "8MiB"), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return sim().taken(0) <= 4 * kBlock; })) << sim().taken(0);
  store_on_device(words(r), 7);
  EXPECT_EQ(load(words(r)), 7u);
}

// The memory is freed for the program's own use.
TEST_F(Handles, MemoryThatNoBlockHasGoesBackWhenNoneComesForAWhile) {
  if (IsSkipped()) return;
  vmem::region r(12 * kBlock);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_evict(r.data(), 10 * kBlock, VMEM_HOST), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return sim().taken(0) == 2 * kBlock; })) << sim().taken(0);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return sim().taken(0) == 0; })) << sim().taken(0);
  store_on_device(words(r), 7);
  EXPECT_EQ(load(words(r)), 7u);
}

// While blocks come, the library keeps memory for them, until too little is free for others.
TEST_F(Handles, MemoryThatNoBlockHasGoesBackWhenLessIsFreeThanTheReserve) {
  if (IsSkipped()) return;
  static std::atomic<int> looks;
  vmem::region r(12 * kBlock);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  std::atomic<bool> stop{false};
  aside([&] {
    for (; !stop; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      store_on_device(words(r), 7);
      EXPECT_EQ(vmem_evict(words(r), kBlock, VMEM_HOST), 0) << vmem_last_error();
    }
  });
  ASSERT_EQ(vmem_evict(words(r) + kWords, 11 * kBlock, VMEM_HOST), 0) << vmem_last_error();
  looks = 0;
  vmem::core::step_hook.store([](const char* step) { looks += std::strcmp(step, "device.memory") == 0 ? 1 : 0; });
  EXPECT_TRUE(until([] { return looks >= 8; }));
  EXPECT_GE(sim().taken(0), 11 * kBlock) << "kept for the next";
  ASSERT_EQ(vmem_set("device_reserve", "120MiB"), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return sim().taken(0) <= kBlock; })) << sim().taken(0);
  stop = true;
  join();
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(load(words(r)), 7u);
  ASSERT_EQ(vmem_set("device_reserve", "4MiB"), 0) << "1/32 of what the device has";
}

class HandlesFull : public Handles {
 protected:
  void SetUp() override { start(1, {{"device_budget", "128MiB"}}, true); }  // all of the device's memory
};

TEST_F(HandlesFull, MemoryThatNoBlockHasGoesBackWhenOthersFindLittle) {
  if (IsSkipped()) return;
  vmem::region r(63 * kBlock);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return sim().taken(0) == 0; })) << sim().taken(0);
  store_on_device(words(r), 7);
  EXPECT_EQ(load(words(r)), 7u);
}

// Stale copies cannot be evicted. Their number is limited like that of leases, and other blocks
// still find memory.
class HandlesShort : public Handles {
 protected:
  void SetUp() override {
    start(1,
          {{"host_budget", "48MiB"}, {"staging_share", "30"}, {"device_budget", "64MiB"}, {"fault_timeout_ms", "300"}},
          true);
  }
};

TEST_F(HandlesShort, StoresUnderReadLeasesLeaveMemoryToOthers) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 24;
  vmem::region r(kBlocks * kBlock), other(16 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < kBlocks; ++b) words(r)[b * kWords] = b + 1;
  ASSERT_EQ(vmem_acquire(words(r), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  size_t stored = 0;
  const auto store = [&](size_t b) {
    return !systest::raises_sigbus([&] { static_cast<volatile uint64_t*>(words(r))[b * kWords] = 100 + b; });
  };
  while (stored < kBlocks && store(stored)) ++stored;
  EXPECT_GT(stored, 1u);
  ASSERT_LT(stored, kBlocks) << "no bound";
  for (uint64_t round = 1; round <= 2; ++round) {
    for (size_t b = 0; b < 16; ++b) words(other)[b * kWords] = round * 1000 + b;
    for (size_t b = 0; b < 16; ++b) ASSERT_EQ(load(words(other) + b * kWords), round * 1000 + b);
  }
  EXPECT_TRUE(until([&] { return !bus(words(r) + stored * kWords); })) << "loads are served";
  const auto s = vmem::stats();
  EXPECT_LE(s.host_bytes, s.host_budget);
  ASSERT_EQ(vmem_release(words(r), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  for (size_t b = 0; b < kBlocks; ++b)
    EXPECT_EQ(load(words(r) + b * kWords), b < stored ? 100 + b : b + 1) << "block " << b << " of " << stored;
  EXPECT_TRUE(store(stored)) << "nothing is leased";
}

// Memory suffices for the copy that a load needs, but not for the block that the store would
// change: only the store is refused.
TEST_F(HandlesShort, AStoreThatHasNoRoomTakesNoLoadOfItsBlockWithIt) {
  if (IsSkipped()) return;
  if (access("/dev/vmem", R_OK | W_OK) == 0)
    GTEST_SKIP() << "the module refuses blocks, and not pages: loads of a block get SIGBUS with its stores";
  constexpr size_t kBlocks = 24, kPageWords = 512;
  vmem::region r(kBlocks * kBlock);
  for (size_t b = 0; b < kBlocks; ++b) words(r)[b * kWords + kPageWords] = words(r)[b * kWords] = b + 1;
  ASSERT_EQ(vmem_acquire(words(r), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  size_t stored = 0;
  const auto store = [&](size_t b) {
    return !systest::raises_sigbus([&] { static_cast<volatile uint64_t*>(words(r))[b * kWords] = 100 + b; });
  };
  while (stored < kBlocks && store(stored)) ++stored;
  ASSERT_LT(stored, kBlocks) << "no bound";
  // installed once: of two threads that each install one, the first would restore it under the
  // other
  struct sigaction action = {}, before = {};
  action.sa_handler = systest::on_bus;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGBUS, &action, &before);
  std::atomic<bool> stop{false};
  std::atomic<size_t> loads{0}, wrong{0}, refused{0};
  std::thread loading([&, at = words(r) + stored * kWords + kPageWords] {
    for (; !stop; ++loads) {
      uint64_t is = stored + 1;
      refused += systest::raises_sigbus([&] { is = load(at); });
      wrong += is != stored + 1;
    }
  });
  for (size_t page : {2, 0, 3})  // not page 1, which may still give SIGBUS
    EXPECT_TRUE(systest::raises_sigbus([&] { words(r)[stored * kWords + page * kPageWords] = 1; }));
  for (const size_t so_far = loads; loads < so_far + 3;) usleep(1000);
  stop = true;
  loading.join();
  sigaction(SIGBUS, &before, nullptr);
  EXPECT_EQ(refused, 0u) << "of " << loads;
  EXPECT_EQ(wrong, 0u);
  ASSERT_EQ(vmem_release(words(r), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(load(words(r) + b * kWords), b < stored ? 100 + b : b + 1) << b;
  EXPECT_TRUE(store(stored)) << "nothing is leased";
}

// --- a device is lost, and host memory has the only good copy

// A kernel changes blocks, and the CPU gets copies mapped: block b has `first` + b. Afterwards no
// lease is left.
class HandlesLost : public Handles {
 protected:
  void change_and_show(uint64_t* at, size_t blocks, uint64_t first) {
    for (size_t b = 0; b < blocks; ++b) store_on_device(at + b * kWords, first + b);
    ASSERT_EQ(vmem_acquire(at, blocks * kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
    for (size_t b = 0; b < blocks; ++b) ASSERT_EQ(load(at + b * kWords), first + b);
    for (size_t b = 0; b < blocks; ++b) at_rest(at + b * kWords);  // all of it is mapped for the CPU
    ASSERT_EQ(vmem_release(at, blocks * kBlock, stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    ASSERT_EQ(device_stats().leased_bytes, 0u);  // the lease has ended
  }
  void expect_all(const uint64_t* at, size_t blocks, uint64_t first) {
    for (size_t b = 0; b < blocks; ++b) {
      ASSERT_FALSE(bus(at + b * kWords)) << "block " << b << " is lost";
      EXPECT_EQ(load(at + b * kWords), first + b);
    }
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
};

TEST_F(HandlesLost, WhatTheCpuIsShownGoesToAnotherDevice) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  change_and_show(words(r), 2, 51);
  sim().lose(0, "the test took it away");
  void* const other = stream(1);
  ASSERT_EQ(vmem_acquire(words(r), r.size(), kBoth, 1, other), 0) << vmem_last_error();
  static std::atomic<uint64_t> seen;
  seen = 0;
  ASSERT_TRUE(sim()
                  .launch(other,
                          [at = words(r)](SimKernel& k) {
                            if (auto* w = reinterpret_cast<uint64_t*>(k.at(at, 8, false)); w != nullptr) seen = *w;
                          })
                  .ok());
  ASSERT_EQ(vmem_release(words(r), r.size(), other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  EXPECT_EQ(seen, 51u);
  expect_all(words(r), 2, 51);
}

TEST_F(HandlesLost, WhatTheCpuIsShownStaysWhenMemoryIsShort) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock), other(96 * kBlock, VMEM_HOST_ONLY);
  change_and_show(words(r), 8, 51);
  sim().lose(0, "the test took it away");
  size_t leased = 0;
  while (vmem_acquire(words(other) + leased * kWords, kBlock, VMEM_READ, VMEM_HOST, nullptr) == 0) ++leased;
  ASSERT_GT(leased, 0u);
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 0; })) << "what is not shown any more is lost";
  expect_all(words(r), 8, 51);
  EXPECT_EQ(vmem_release(words(other), leased * kBlock, nullptr), 0) << vmem_last_error();
}

TEST_F(HandlesLost, WhatTheCpuIsShownIsWrittenByASync) {
  if (IsSkipped()) return;
  TempFile file(2 * kBlock);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  change_and_show(words(r), 2, 51);
  sim().lose(0, "the test took it away");
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
  const auto bytes = file.read();
  for (size_t b = 0; b < 2; ++b) {
    uint64_t is = 0;
    memcpy(&is, &bytes[b * kBlock], 8);
    EXPECT_EQ(is, 51 + b);
  }
  expect_all(words(r), 2, 51);
}

// The staging frames that blocks came through: there are few, and other blocks need them.
class CopiesOfALostDevice : public HandlesLost, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { start(2, {{"host_budget", "64MiB"}, {"staging_share", "25"}}, GetParam()); }
};

TEST_P(CopiesOfALostDevice, AreTheBlocksAndStay) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock), busy(14 * kBlock);
  for (size_t b = 0; b < 2; ++b) words(r)[b * kWords] = 51 + b;
  ASSERT_EQ(vmem_acquire(words(r), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(words(r), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  ASSERT_EQ(vmem_advise(words(r), r.size(), VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();  // at rest
  sim().lose(0, "the test took it away");
  struct vmem_device_stats s = {};
  s.size = sizeof s;
  EXPECT_EQ(vmem_device_stats(0, &s), -EIO);  // the loss has been noticed
  void* const other = stream(1);
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t b = 0; b < 14; ++b) words(busy)[b * kWords] = round * 100 + b;
    ASSERT_EQ(vmem_acquire(words(busy), busy.size(), VMEM_READ, 1, other), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(words(busy), busy.size(), other), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(other).ok());
    ASSERT_EQ(vmem_evict(words(busy), busy.size(), VMEM_SSD), 0) << vmem_last_error();
  }
  expect_all(words(r), 2, 51);
  for (size_t b = 0; b < 14; ++b) EXPECT_EQ(load(words(busy) + b * kWords), 300 + b);
}
INSTANTIATE_TEST_SUITE_P(, CopiesOfALostDevice, ::testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "handles" : "shared"); });

class HandlesOnUserfault : public Handles {
 protected:
  void SetUp() override { start(1, {{"trap", "uffd"}}, true); }
  void TearDown() override {
    Handles::TearDown();
    vmem_set("trap", "auto");
  }
};

// madvise() instead of vmem_advise() on the CPU's copy of a block that a device keeps.
TEST_F(HandlesOnUserfault, PagesThatTheProgramDropsStopNothing) {
  if (IsSkipped()) return;
  constexpr size_t kPageWords = 512, kPages = 2 * kBlock / 4096;
  vmem::region r(2 * kBlock);
  const auto store_all = [&](uint64_t round) {
    for (size_t p = 0; p < kPages; ++p) words(r)[p * kPageWords] = round * 10000 + p;
  };
  const auto wrong = [&](uint64_t round) {
    size_t n = 0;
    for (size_t p = 0; p < kPages; ++p) n += load(words(r) + p * kPageWords) != round * 10000 + p;
    return n;
  };
  const auto drop = [&](size_t page, size_t pages) {
    ASSERT_EQ(madvise(words(r) + page * kPageWords, pages * 4096, MADV_DONTNEED), 0);
  };
  store_all(1);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  EXPECT_EQ(wrong(1), 0u);
  drop(3, 40);
  EXPECT_EQ(wrong(1), 0u) << "the device has it";
  drop(3, 1);
  drop(kPages / 2, 2);
  store_all(2);  // stores find the dropped pages
  EXPECT_EQ(wrong(2), 0u);
  drop(5, 1);
  EXPECT_EQ(load(words(r) + 5 * kPageWords), 0u) << "nobody else has it";
  drop(7, 1);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();  // so does the library
  EXPECT_EQ(load(words(r) + 7 * kPageWords), 0u);
  store_all(3);
  EXPECT_EQ(r.query().device_bytes, r.size());
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(3), 0u);
}

TEST_F(HandlesOnUserfault, ABlockThatShowsItsFileIsRefusedAtADeviceWithWhatToDo) {
  if (IsSkipped()) return;
  TempFile file(2 * kBlock, 5);
  const auto want = TempFile::content(2 * kBlock, 5);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  auto* bytes = static_cast<volatile unsigned char*>(r.data());
  ASSERT_EQ(truncate(file.path().c_str(), 4096), 0);
  EXPECT_EQ(bytes[7], want[7]);
  ASSERT_EQ(truncate(file.path().c_str(), 2 * kBlock), 0);
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), -EIO);
  EXPECT_NE(said().find("map it again"), std::string::npos) << said();
  EXPECT_EQ(bytes[7], want[7]);
  r.free();
  vmem::region again(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  EXPECT_EQ(vmem_acquire(again.data(), again.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(again.data(), again.size(), stream_), 0) << vmem_last_error();
}

// Accesses do not park there, so the file's own pages stay mapped.
TEST_F(HandlesOnUserfault, ABlockThatShowsItsFileGoesOnShowingIt) {
  if (IsSkipped()) return;
  TempFile file(2 * kBlock, 5);
  const auto want = TempFile::content(2 * kBlock, 5);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_PRIVATE);
  auto* bytes = static_cast<volatile unsigned char*>(r.data());
  ASSERT_EQ(truncate(file.path().c_str(), 4096), 0);
  EXPECT_EQ(bytes[7], want[7]);
  bytes[7] = static_cast<unsigned char>(want[7] + 1);
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 0, stream_), -EIO);
  EXPECT_NE(said().find("shorter"), std::string::npos) << said();
  EXPECT_EQ(bytes[7], static_cast<unsigned char>(want[7] + 1)) << "nobody else has it";
  EXPECT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(bytes[7], want[7]);
  ASSERT_EQ(truncate(file.path().c_str(), 2 * kBlock), 0);
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 0, stream_), -EIO) << "as it was mapped";
  EXPECT_EQ(vmem_acquire(static_cast<char*>(r.data()) + kBlock, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(static_cast<char*>(r.data()) + kBlock, kBlock, stream_), 0) << vmem_last_error();
}

}  // namespace
