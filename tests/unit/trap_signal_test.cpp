// The trap that serves faults in a signal handler, beyond the contract of every trap.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "common/patience.h"
#include "core/types.h"
#include "trap_backends.h"

namespace vmem::trap::testing {
namespace {

using vmem::test::eventually;

class TrapSignal : public ::testing::Test {
 public:
  void SetUp() override {
    options_.in_signal_handler = true;
    uint64_t ignored = 0, here = 0;
    load(&here, &ignored);  // the tests' handler of SIGBUS comes first
    if (core::Status s = make_userfault_trap(options_, &trap_); !s.ok()) GTEST_SKIP() << s.text();
    ASSERT_TRUE(trap_->attach(kSize, core::kPage, Transfer::copy, &range_).ok());
    frame_ = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    write_pattern(frame_, kSize, 1);
  }
  void TearDown() override {
    if (trap_ == nullptr) return;
    trap_->serve_by(nullptr, nullptr);
    EXPECT_TRUE(trap_->detach(range_, kSize).ok());
    EXPECT_TRUE(trap_->unmap(range_, kSize).ok());
    munmap(frame_, kSize);
  }
  uint64_t* words() const { return static_cast<uint64_t*>(range_); }

  static constexpr size_t kSize = 4 * core::kPage;
  UserfaultOptions options_;
  std::unique_ptr<Trap> trap_;
  void *range_ = nullptr, *frame_ = nullptr;
  std::atomic<unsigned> served_{0}, elsewhere_{0};
};

TEST_F(TrapSignal, AFaultIsServedOnTheThreadThatMakesIt) {
  ASSERT_TRUE(trap_->serve_by(
      [](const Fault& fault, void* user) {
        auto* const test = static_cast<TrapSignal*>(user);
        if (fault.address - reinterpret_cast<uintptr_t>(test->range_) >= kSize) return false;
        ++test->served_;
        test->elsewhere_ += fault.thread == static_cast<uint32_t>(gettid()) ? 0 : 1;
        return test->trap_->fill(test->range_, kSize, test->frame_, Transfer::copy, Protect::no).ok();
      },
      this));
  uint64_t value = 0;
  std::thread other([&] { EXPECT_EQ(load(words(), &value), 0); });
  other.join();
  EXPECT_EQ(value, pattern(1, 0));
  EXPECT_EQ(first_wrong(range_, kSize, 1), -1);
  EXPECT_EQ(served_, 1u);
  EXPECT_EQ(elsewhere_, 0u);
}

TEST_F(TrapSignal, AStoreToAProtectedPageSaysSo) {
  static std::atomic<FaultKind> kind;
  kind = FaultKind::read;
  ASSERT_TRUE(trap_->fill(range_, kSize, frame_, Transfer::copy, Protect::yes).ok());
  ASSERT_TRUE(trap_->serve_by(
      [](const Fault& fault, void* user) {
        auto* const test = static_cast<TrapSignal*>(user);
        kind = fault.kind;
        return test->trap_->unprotect(test->range_, kSize).ok();
      },
      this));
  words()[7] = 5;
  EXPECT_EQ(words()[7], 5u);
  EXPECT_EQ(kind, FaultKind::write_protect);
}

TEST_F(TrapSignal, ASignalThatIsDueIsHandledWhileAThreadIsParked) {
  static std::atomic<bool> handled, parked;
  handled = parked = false;
  struct sigaction note {
  }, before{};
  note.sa_handler = [](int) { handled = true; };
  sigaction(SIGUSR1, &note, &before);
  ASSERT_TRUE(trap_->serve_by([](const Fault&, void*) { return parked = true; }, nullptr));
  uint64_t value = 0;
  std::thread waits([&] { EXPECT_EQ(load(words(), &value), 0); });
  ASSERT_TRUE(eventually([&] { return parked.load(); }));
  pthread_kill(waits.native_handle(), SIGUSR1);
  EXPECT_TRUE(eventually([&] { return handled.load(); }));
  ASSERT_TRUE(trap_->fill(range_, kSize, frame_, Transfer::copy, Protect::no).ok());
  waits.join();
  EXPECT_EQ(value, pattern(1, 0));
  sigaction(SIGUSR1, &before, nullptr);
}

TEST_F(TrapSignal, NoThreadIsInsideAServerThatHasBeenTakenAway) {
  static std::atomic<bool> inside, go_on;
  inside = go_on = false;
  ASSERT_TRUE(trap_->serve_by(
      [](const Fault&, void*) {
        inside = true;
        while (!go_on) usleep(1000);
        inside = false;
        return true;
      },
      nullptr));
  uint64_t value = 0;
  std::thread faults([&] { EXPECT_EQ(load(words(), &value), 0); });
  ASSERT_TRUE(eventually([&] { return inside.load(); }));
  std::thread lets([] {
    usleep(50000);
    go_on = true;
  });
  trap_->serve_by(nullptr, nullptr);
  EXPECT_FALSE(inside);
  ASSERT_TRUE(trap_->fill(range_, kSize, frame_, Transfer::copy, Protect::no).ok());
  faults.join();
  lets.join();
  EXPECT_EQ(value, pattern(1, 0));
}

TEST_F(TrapSignal, ASigbusOfAnotherGoesToTheHandlerThatWasThere) {
  ASSERT_TRUE(trap_->serve_by([](const Fault&, void*) { return false; }, nullptr));
  const int file = memfd_create("empty", MFD_CLOEXEC);
  void* const beyond = mmap(nullptr, core::kPage, PROT_READ, MAP_SHARED, file, 0);
  uint64_t value = 0;
  EXPECT_EQ(load(static_cast<uint64_t*>(beyond), &value), SIGBUS);
  munmap(beyond, core::kPage);
  close(file);
}

TEST_F(TrapSignal, AProcessHasOneAtATimeAndItsHandlerGoesWithIt) {
  std::unique_ptr<Trap> second;
  EXPECT_EQ(make_userfault_trap(options_, &second).code(), -EBUSY);
  struct sigaction ours {
  }, after{};
  sigaction(SIGBUS, nullptr, &ours);
  EXPECT_TRUE(trap_->detach(range_, kSize).ok());
  EXPECT_TRUE(trap_->unmap(range_, kSize).ok());
  trap_.reset();
  sigaction(SIGBUS, nullptr, &after);
  EXPECT_NE(ours.sa_sigaction, after.sa_sigaction);
  EXPECT_TRUE(make_userfault_trap(options_, &second).ok());
}

}  // namespace
}  // namespace vmem::trap::testing
