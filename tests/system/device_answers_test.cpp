// Devices that are busy, that do not answer, or that have an unreported error; and streams that
// capture a graph, which rules out some questions. On simulated devices with page tables of their
// own.
#include <cstring>

#include "sim_support.h"

namespace {

using systest::kBlock;
using vmem::core::Status;
using vmem::device::SimKernel;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;

class DeviceAnswers : public systest::SimTest {
 protected:
  void SetUp() override { start(2, {}, true); }
  void TearDown() override {
    open_ = true;  // after any failure, nothing stays blocked
    SimTest::TearDown();
  }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static uint64_t leased_bytes() { return device_stats().leased_bytes; }
  // Launches a kernel that blocks until open_, then loads a word. Returns when it runs.
  static void launch_held(void* stream, const uint64_t* at) {
    open_ = runs_ = ended_ = reached_ = false;
    const Status s = sim().launch(stream, [at](SimKernel& k) {
      runs_ = true;
      while (!open_) usleep(1000);
      reached_ = k.at(at, 8, false) != nullptr;
      ended_ = true;
    });
    ASSERT_TRUE(s.ok()) << s.text();
    ASSERT_TRUE(until([] { return runs_.load(); }));
  }
  // A step hook: opens when the kernel's block is removed, since no thread waits for the kernel.
  static void open_at_punch(const char* step) {
    if (std::strcmp(step, "device.punch") == 0) open_ = true;
  }
  static inline std::atomic<bool> open_{false}, runs_{false}, ended_{false}, reached_{false};
};

TEST_F(DeviceAnswers, TheCpuIsServedWhileAllThatComesToABusyDeviceWaits) {
  if (IsSkipped()) return;
  static std::atomic<int> waiting;
  waiting = 0;
  open_ = false;
  vmem::region r(8 * kBlock);
  store_on_device(words(r), 7);
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    while (op == SimOp::copy_in && !open_) usleep(1000);
    return Status();
  });
  vmem::core::step_hook.store([](const char* step) { waiting += std::strcmp(step, "device.issued") == 0; });
  // Each waiting thread still waits when the next one begins, until all threads that may wait do.
  int begun = 0;
  for (bool one_more = true; one_more && begun < 7;) {
    const int b = ++begun;
    aside([&, b] {
      EXPECT_EQ(vmem_acquire(words(r) + b * kWords, kBlock, VMEM_WRITE, 0, stream_), 0) << vmem_last_error();
    });
    one_more = vmem::test::eventually([&] { return waiting == b; }, std::chrono::milliseconds(b < 3 ? 30000 : 300));
  }
  EXPECT_GE(waiting, 2);
  std::atomic<bool> seen{false};
  aside([&] {
    EXPECT_EQ(load(words(r)), 7u);
    seen = true;
  });
  EXPECT_TRUE(until([&] { return seen.load(); })) << "nobody is left to copy a block out";
  open_ = true;
  join();
  EXPECT_TRUE(until([&] { return waiting == begun; }));
  vmem::core::step_hook.store(nullptr);
  sim().set_hook(nullptr);
  EXPECT_EQ(vmem_release(words(r) + kWords, begun * kBlock, stream_), 0) << vmem_last_error();
}

TEST_F(DeviceAnswers, WhatTheCpuIsShownOfADeadDeviceStaysAlsoWhileAGraphIsCaptured) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  store_on_device(words(r), 51);
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(load(words(r)), 51u);
  at_rest(words(r));  // all of it is mapped for the CPU
  ASSERT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(leased_bytes(), 0u);
  sim().capture(stream_, true);
  sim().fail(0, "a kernel has met error 700");  // no call has asked for it
  void* const other = stream(1);
  // the CPU's copy is dropped first
  EXPECT_EQ(vmem_acquire(words(r), kBlock, kBoth, 1, other), 0) << vmem_last_error();
  launch_store(other, words(r) + 1, 52);
  EXPECT_EQ(vmem_release(words(r), kBlock, other), 0) << vmem_last_error();
  sim().capture(stream_, false);
  ASSERT_FALSE(bus(words(r))) << "the last copy was dropped";
  EXPECT_EQ(load(words(r)), 51u);
  EXPECT_EQ(load(words(r) + 1), 52u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

TEST_F(DeviceAnswers, AReleaseOnAStreamThatIsNoMoreIsRefusedWhileAGraphIsCaptured) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  void* const gone = stream(0);
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, gone), 0) << vmem_last_error();
  launch_held(gone, words(r));
  sim().forget_stream(gone);
  sim().capture(stream_, true);
  vmem::core::step_hook.store(&open_at_punch);
  EXPECT_EQ(vmem_release(words(r), kBlock, gone), -EBUSY);
  EXPECT_NE(said().find("cannot be waited for"), std::string::npos) << said();
  EXPECT_EQ(leased_bytes(), kBlock);
  EXPECT_EQ(vmem_evict(words(r), kBlock, VMEM_HOST), 0) << vmem_last_error();  // skips leased blocks
  EXPECT_FALSE(ended_);
  sim().capture(stream_, false);
  open_ = true;
  EXPECT_EQ(vmem_release(words(r), kBlock, gone), 0) << vmem_last_error();
  EXPECT_EQ(leased_bytes(), 0u);
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
}

TEST_F(DeviceAnswers, ShutdownAsksAgainWhetherKernelsHaveEnded) {
  if (IsSkipped()) return;
  static std::atomic<int> asked;
  asked = 0;
  void* r = nullptr;
  ASSERT_EQ(vmem_alloc(&r, 2 * kBlock, 0), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(r, 2 * kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_held(stream_, static_cast<uint64_t*>(r));
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::drain) return Status();
    if (++asked < 3) return vmem::core::error(EBUSY, "a stream captures a graph");
    open_ = true;
    return Status();
  });
  vmem::core::step_hook.store(&open_at_punch);
  vmem_shutdown();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([] { return ended_.load(); }));
  EXPECT_TRUE(reached_) << "its block was unmapped under it";
  EXPECT_GE(asked, 3);
}

TEST_F(DeviceAnswers, ALeaseLastsWhileItsDeviceIsWellAndDoesNotTell) {
  if (IsSkipped()) return;
  static std::atomic<int> asked;
  asked = 0;
  vmem::region r(2 * kBlock);
  ASSERT_EQ(vmem_acquire(words(r), kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  launch_held(stream_, words(r));
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::poll) return Status();
    ++asked;
    return vmem::core::error(EIO, "as the test wants it");
  });
  EXPECT_EQ(vmem_release(words(r), kBlock, stream_), 0) << vmem_last_error();
  EXPECT_EQ(leased_bytes(), kBlock) << "its kernel runs yet";
  EXPECT_GT(asked, 0);
  sim().set_hook(nullptr);
  EXPECT_EQ(leased_bytes(), kBlock);
  open_ = true;
  EXPECT_TRUE(until([] { return leased_bytes() == 0; }));
  EXPECT_TRUE(reached_);
}

TEST_F(DeviceAnswers, ARangeStaysOpenToKernelsWhereItsLastOneCannotBeMarked) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view view;
  ASSERT_EQ(vmem_kernel_begin(&kernel, words(r), kBlock, kBoth, 0, 0, &view), 0) << vmem_last_error();
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    return op == SimOp::record ? vmem::core::error(EIO, "as the test wants it") : Status();
  });
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), -EIO);
  sim().set_hook(nullptr);
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
}

// The stream returns an error of its own device, while the hint names another device.
TEST_F(DeviceAnswers, AStreamOfALostDeviceLosesNoOther) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  store_on_device(words(r), 7);
  void* const other = stream(1);
  ASSERT_EQ(vmem_acquire(words(r) + kWords, kBlock, VMEM_READ, 1, other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  ASSERT_EQ(vmem_advise(words(r), r.size(), VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();  // at rest
  sim().fail(1, "a kernel has met error 700");
  EXPECT_EQ(vmem_prefetch(words(r), kBlock, 0, other), -EIO);
  EXPECT_FALSE(sim().health(1).ok());
  EXPECT_TRUE(sim().health(0).ok());
  vmem_release(words(r) + kWords, kBlock, other);
  store_on_device(words(r) + 1, 8);
  EXPECT_EQ(load(words(r)), 7u);
  EXPECT_EQ(load(words(r) + 1), 8u);
}

}  // namespace
