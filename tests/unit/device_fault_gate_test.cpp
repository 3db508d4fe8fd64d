// The parking handler: which faults it parks, and that every other fault behaves as without it.
// Cases that end in a signal or replace handlers run in a child process.
#include <gtest/gtest.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/log.h"
#include "device/managed/fault_gate.h"

namespace vmem::device::fault_gate {
namespace {

constexpr size_t kUnit = kGateUnit;

std::byte* address_space(size_t size, int protection) {
  void* p = mmap(nullptr, size + kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  auto* base = reinterpret_cast<std::byte*>(core::round_up(reinterpret_cast<uintptr_t>(p), kUnit));
  EXPECT_EQ(mprotect(base, size, protection), 0);
  return base;
}

uintptr_t at(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}

// Returns the child's exit code, or 1000 + the signal that killed it.
int in_child(int (*body)()) {
  const unsigned most = 30 * vmem::test::patience();
  const pid_t child = fork();
  if (child == 0) {
    alarm(most);
    core::set_log_level(core::Level::error);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

void on(int sig, void (*handler)(int, siginfo_t*, void*), int flags, std::vector<int> mask = {}) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  for (int s : mask) sigaddset(&action.sa_mask, s);
  sigaction(sig, &action, nullptr);
}

void on_plain(int sig, void (*handler)(int), int flags = 0) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(sig, &action, nullptr);
}

void crash(std::byte* p) {
  *static_cast<volatile std::byte*>(p) = std::byte{1};
}

class DeviceFaultGate : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(install().ok());
    base_ = address_space(4 * kUnit, PROT_READ | PROT_WRITE);
    ASSERT_TRUE(add(base_, 4 * kUnit).ok());
  }
  void TearDown() override {
    ASSERT_TRUE(set_hook(nullptr).ok());
    remove(base_);
    uninstall();
    munmap(base_, 4 * kUnit);
  }
  void shut(size_t unit) {
    ASSERT_TRUE(set(at(base_) + unit * kUnit, kUnit, Gate::shut));
    ASSERT_EQ(mprotect(base_ + unit * kUnit, kUnit, PROT_NONE), 0);
  }
  void open(size_t unit) {
    ASSERT_EQ(mprotect(base_ + unit * kUnit, kUnit, PROT_READ | PROT_WRITE), 0);
    ASSERT_TRUE(set(at(base_) + unit * kUnit, kUnit, Gate::open));
  }
  static void until_parked(uint32_t n) {
    while (stats().waiting < n) std::this_thread::yield();
  }
  std::byte* base_ = nullptr;
};

TEST_F(DeviceFaultGate, AllParkedThreadsGoOnWhenTheUnitOpens) {
  shut(1);
  std::vector<std::thread> threads;
  std::atomic<int> through{0};
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, i] {
      errno = 1234;
      base_[kUnit + static_cast<size_t>(i) * 5000] = std::byte{7};
      if (errno == 1234) ++through;
    });
  until_parked(8);
  EXPECT_EQ(through, 0);
  open(1);
  for (auto& t : threads) t.join();
  EXPECT_EQ(through, 8);
}

TEST_F(DeviceFaultGate, OpeningOneUnitLeavesTheOthersParked) {
  shut(0);
  shut(2);
  std::atomic<int> through{0};
  std::thread first([&] { base_[0] = std::byte{1}, ++through; });
  std::thread third([&] { base_[2 * kUnit] = std::byte{1}, through += 10; });
  until_parked(2);
  open(2);
  third.join();
  EXPECT_EQ(through, 10);
  open(0);
  first.join();
  EXPECT_EQ(through, 11);
}

TEST_F(DeviceFaultGate, ThreadsThatRaceWithOpeningNeverSeeTheirFault) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      while (!stop) base_[kUnit + 64 * i] = std::byte{3};
    });
  for (int i = 0; i < 3000; ++i) {
    shut(1);
    open(1);
  }
  stop = true;
  for (auto& t : threads) t.join();
}

TEST_F(DeviceFaultGate, OtherSignalsReachAParkedThread) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer keeps signals back from threads in raw system calls";
#endif
  static std::atomic<int> got{0};
  on(
      SIGUSR1, [](int, siginfo_t*, void*) { ++got; }, SA_RESTART);
  shut(0);
  std::thread parked([&] { base_[0] = std::byte{1}; });
  until_parked(1);
  pthread_kill(parked.native_handle(), SIGUSR1);
  while (got == 0) std::this_thread::yield();
  until_parked(1);  // and it parks again
  open(0);
  parked.join();
  on_plain(SIGUSR1, SIG_DFL);
}

TEST_F(DeviceFaultGate, TheHookIsAskedOnceAStoreIsForbiddenByNoGate) {
  ASSERT_EQ(mprotect(base_, kUnit, PROT_READ), 0);
  std::atomic<int> asked{0};
  ASSERT_TRUE(set_hook([&](uintptr_t address, bool store) {
                EXPECT_EQ(address, at(base_) + 99);
                EXPECT_TRUE(store);
                ++asked;
                open(0);
                return true;
              }).ok());
  base_[99] = std::byte{8};
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(base_[99], std::byte{8});
}

TEST_F(DeviceFaultGate, ManyAskersAtOnceAreAllServed) {
  ASSERT_EQ(mprotect(base_, 4 * kUnit, PROT_READ), 0);
  ASSERT_TRUE(set_hook([&](uintptr_t address, bool) {
                open((address - at(base_)) / kUnit);
                return true;
              }).ok());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 100; ++i) threads.emplace_back([&, i] { base_[i % 4 * kUnit + i] = std::byte{5}; });
  for (auto& t : threads) t.join();
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(base_[i % 4 * kUnit + i], std::byte{5});
}

TEST_F(DeviceFaultGate, GatesAreThoseThatWereSet) {
  EXPECT_EQ(gate(at(base_) + kUnit), Gate::open);
  EXPECT_TRUE(set(at(base_) + kUnit, 2 * kUnit, Gate::writers));
  EXPECT_EQ(gate(at(base_)), Gate::open);
  EXPECT_EQ(gate(at(base_) + kUnit), Gate::writers);
  EXPECT_EQ(gate(at(base_) + 3 * kUnit - 1), Gate::writers);
  EXPECT_EQ(gate(at(base_) + 3 * kUnit), Gate::open);
  EXPECT_FALSE(set(at(base_) + 3 * kUnit, 2 * kUnit, Gate::shut));  // beyond the range
  EXPECT_FALSE(set(0x10000, kUnit, Gate::shut));
  EXPECT_TRUE(set(at(base_), 4 * kUnit, Gate::open));
}

TEST_F(DeviceFaultGate, MisalignedRangesAreRefused) {
  EXPECT_EQ(add(base_ + 4096, kUnit).code(), -EINVAL);
  EXPECT_EQ(add(base_, 4096).code(), -EINVAL);
  EXPECT_EQ(add(base_, 0).code(), -EINVAL);
  EXPECT_EQ(add(nullptr, kUnit).code(), -EINVAL);
}

TEST(DeviceFaultGateTable, TakesManyRangesAndSaysWhenItIsFull) {
  std::vector<void*> added;
  core::Status last;
  for (size_t i = 1; last.ok() && i <= kMaxRanges + 1; ++i) {
    void* base = reinterpret_cast<void*>(i * 2 * kUnit);
    last = add(base, kUnit);
    if (last.ok()) added.push_back(base);
  }
  EXPECT_EQ(last.code(), -ENOSPC);
  EXPECT_EQ(added.size(), kMaxRanges);
  for (void* base : added) remove(base);
  EXPECT_TRUE(add(reinterpret_cast<void*>(kUnit), kUnit).ok());
  remove(reinterpret_cast<void*>(kUnit));
}

// --- faults that are not ours ---------------------------------------------------------------------------------------

sigjmp_buf back;
std::atomic<int> calls{0};
std::atomic<uintptr_t> fault_address{0};
void jump_back(int, siginfo_t* info, void*) {
  ++calls;
  fault_address = at(info->si_addr);
  siglongjmp(back, 1);
}
std::byte* forbidden() {
  static std::byte* const p = address_space(kUnit, PROT_NONE);
  return p;
}

// Returns by jump_back().
__attribute__((noinline)) void crash_and_return(std::byte* p) {
  if (sigsetjmp(back, 1) == 0) crash(p);
}

TEST(DeviceFaultGateChain, AHandlerFromBeforeGetsItsFaultAndMayJumpOut) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              if (!install().ok()) return 2;
              for (int i = 0; i < 3; ++i) crash_and_return(forbidden() + 17);
              return calls == 3 && fault_address == at(forbidden() + 17) ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, APlainHandlerFromBeforeIsCalled) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, [](int sig) { _exit(sig); });
              if (!install().ok()) return 2;
              crash(forbidden());
              return 1;
            }),
            SIGSEGV);
}

TEST(DeviceFaultGateChain, WithoutAHandlerTheProcessDiesOfItsFault) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, SIG_DFL);
              if (!install().ok()) return 2;
              crash(forbidden());
              return 1;
            }),
            1000 + SIGSEGV);
}

TEST(DeviceFaultGateChain, ASentSignalWithoutAHandlerKills) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, SIG_DFL);
              if (!install().ok()) return 2;
              raise(SIGSEGV);
              return 1;
            }),
            1000 + SIGSEGV);
}

TEST(DeviceFaultGateChain, IgnoringCoversSentSignalsAndNotFaults) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, SIG_IGN);
              if (!install().ok()) return 2;
              raise(SIGSEGV);  // ignored
              crash(forbidden());
              return 1;
            }),
            1000 + SIGSEGV);
}

TEST(DeviceFaultGateChain, MasksAndNodeferAreThoseOfTheHandlerFromBefore) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV,
                 [](int, siginfo_t*, void*) {
                   sigset_t now;
                   pthread_sigmask(SIG_SETMASK, nullptr, &now);
                   _exit(sigismember(&now, SIGUSR2) == 1 && sigismember(&now, SIGHUP) == 1 &&
                                 sigismember(&now, SIGSEGV) == 0 && sigismember(&now, SIGTERM) == 0
                             ? 0
                             : 3);
                 },
                 SA_NODEFER, {SIGUSR2});
              if (!install().ok()) return 2;
              sigset_t blocked;
              sigemptyset(&blocked);
              sigaddset(&blocked, SIGHUP);  // blocked by the interrupted code
              pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
              crash(forbidden());
              return 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, AHandlerThatRepairsTheFaultIsReturnedFrom) {
  EXPECT_EQ(in_child([] {
              on(
                  SIGSEGV,
                  [](int, siginfo_t*, void*) {
                    sigset_t now;
                    pthread_sigmask(SIG_SETMASK, nullptr, &now);
                    if (sigismember(&now, SIGSEGV) != 1) _exit(3);
                    mprotect(forbidden(), kUnit, PROT_READ | PROT_WRITE);
                  },
                  0);
              if (!install().ok()) return 2;
              crash(forbidden());
              sigset_t now;
              pthread_sigmask(SIG_SETMASK, nullptr, &now);
              return sigismember(&now, SIGSEGV) == 0 && sigismember(&now, SIGTERM) == 0 ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, AOneShotHandlerHasOneShot) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, SA_RESETHAND);
              if (!install().ok()) return 2;
              crash_and_return(forbidden());
              if (calls != 1) return 3;
              crash(forbidden());
              return 1;
            }),
            1000 + SIGSEGV);
}

__attribute__((noinline)) int overflow(int depth) {
  volatile char page[4096];
  page[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : overflow(depth + 1) + page[0];
}

TEST(DeviceFaultGateChain, StackOverflowReachesAHandlerOnTheAlternateStack) {
  EXPECT_EQ(in_child([] {
              stack_t alternate = {};
              alternate.ss_size = 64 * 1024;
              alternate.ss_sp = address_space(kUnit, PROT_READ | PROT_WRITE);
              sigaltstack(&alternate, nullptr);
              on(
                  SIGSEGV, [](int, siginfo_t*, void*) { _exit(0); }, SA_ONSTACK);
              if (!install().ok()) return 2;
              return overflow(1) == 0 ? 4 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, AHandlerInstalledLaterIsFoundAndPutBehindOurs) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, SIG_DFL);
              if (!install().ok()) return 2;
              on(SIGSEGV, jump_back, 0);  // replaces ours and never calls it
              if (!check().ok() || !check().ok()) return 3;
              std::byte* base = address_space(kUnit, PROT_NONE);
              if (!add(base, kUnit).ok() || !set(at(base), kUnit, Gate::shut)) return 4;
              std::thread parked([&] { crash(base); });
              while (stats().waiting == 0) std::this_thread::yield();
              mprotect(base, kUnit, PROT_READ | PROT_WRITE);
              set(at(base), kUnit, Gate::open);
              parked.join();
              for (int i = 0; i < 3; ++i) crash_and_return(forbidden());
              return calls == 3 ? 0 : 1;
            }),
            0);
}

struct sigaction replaced;
TEST(DeviceFaultGateChain, ALaterHandlerThatCallsOursRunsOnceAndTheFirstHandlerRunsToo) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              if (!install().ok()) return 2;
              struct sigaction polite = {};
              polite.sa_flags = SA_SIGINFO;
              polite.sa_sigaction = [](int sig, siginfo_t* info, void* context) {
                calls += 100;
                replaced.sa_sigaction(sig, info, context);
              };
              sigaction(SIGSEGV, &polite, &replaced);
              for (int i = 0; i < 2; ++i) {  // before it was found, and after
                crash_and_return(forbidden());
                if (calls != 101 * (i + 1)) return 3;
                if (!check().ok()) return 4;
              }
              return 0;
            }),
            0);
}

TEST(DeviceFaultGateChain, PuttingTheFirstHandlerBackMakesNoLoop) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              if (!install().ok()) return 2;
              for (int i = 0; i < 200; ++i) {  // more often than the chain is long
                on(SIGSEGV, jump_back, 0);
                if (!check().ok()) return 3;
              }
              crash_and_return(forbidden());
              return calls == 1 ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, UninstallPutsThePreviousHandlerBack) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              if (!install().ok() || !install().ok()) return 2;
              struct sigaction now;
              uninstall();
              sigaction(SIGSEGV, nullptr, &now);
              if (now.sa_sigaction == jump_back) return 3;  // counted
              uninstall();
              sigaction(SIGSEGV, nullptr, &now);
              return now.sa_sigaction == jump_back ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, ARefusedStoreGoesToTheHandlerFromBefore) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              std::byte* base = address_space(kUnit, PROT_READ);
              if (!install().ok() || !add(base, kUnit).ok()) return 2;
              if (sigsetjmp(back, 1) == 0) crash(base);  // no hook
              if (calls != 1) return 3;
              if (!set_hook([](uintptr_t, bool) { return false; }).ok()) return 4;
              crash_and_return(base + 1);
              return calls == 2 && fault_address == at(base + 1) ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, AHookThatAlwaysSaysAgainEndsInTheFault) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              std::byte* base = address_space(kUnit, PROT_READ);
              if (!install().ok() || !add(base, kUnit).ok()) return 2;
              if (!set_hook([](uintptr_t, bool) { return true; }).ok()) return 4;
              crash_and_return(base);
              return calls == 1 ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, ParkedThreadsOfARemovedRangeGetTheirFault) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, [](int) { _exit(0); });
              std::byte* base = address_space(kUnit, PROT_NONE);
              if (!install().ok() || !add(base, kUnit).ok() || !set(at(base), kUnit, Gate::shut)) return 2;
              std::thread parked([&] { crash(base); });
              while (stats().waiting == 0) std::this_thread::yield();
              remove(base);
              parked.join();
              return 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, AForkedChildIsNotParked) {
  EXPECT_EQ(in_child([] {
              on_plain(SIGSEGV, SIG_DFL);
              std::byte* base = address_space(kUnit, PROT_NONE);
              if (!install().ok() || !add(base, kUnit).ok() || !set(at(base), kUnit, Gate::shut)) return 2;
              const pid_t child = fork();
              if (child == 0) {
                crash(base);
                _exit(1);
              }
              int status = 0;
              waitpid(child, &status, 0);
              return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV ? 0 : 1;
            }),
            0);
}

TEST(DeviceFaultGateChain, JumpingIntoAShutUnitIsAnErrorOfTheProgram) {
  EXPECT_EQ(in_child([] {
              on(SIGSEGV, jump_back, 0);
              std::byte* base = address_space(kUnit, PROT_READ | PROT_WRITE);
              if (!install().ok() || !add(base, kUnit).ok()) return 2;
              if (sigsetjmp(back, 1) == 0) reinterpret_cast<void (*)()>(base)();
              return calls == 1 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace vmem::device::fault_gate
