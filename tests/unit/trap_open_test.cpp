// Without permission for userfaultfd, and with each fallback forced.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <thread>

#include "core/step.h"
#include "trap/mapping.h"
#include "trap/os.h"
#include "trap/probe.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap_backends.h"

namespace vmem::trap {
namespace {

// Runs make_userfault_trap() in a child whose userfaultfd(2) fails with `error`; returns its
// status.
core::Status make_under_seccomp(int error) {
  int ends[2];
  if (pipe(ends) != 0) return core::system_error(errno, "pipe");
  const pid_t child = fork();
  if (child == 0) {
    const std::array<sock_filter, 4> filter{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog program{filter.size(), const_cast<sock_filter*>(filter.data())};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      _exit(1);
    UserfaultOptions options;
    options.allow_device = false;
    std::unique_ptr<Trap> trap;
    const core::Status s = make_userfault_trap(options, &trap);
    const std::string line = std::to_string(s.code()) + " " + std::string(s.text());
    _exit(write(ends[1], line.data(), line.size()) == static_cast<ssize_t>(line.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::array<char, 4096> line{};
  const ssize_t got = read(ends[0], line.data(), line.size() - 1);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (got <= 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) return core::error(ENOTSUP, "no seccomp here");
  const int code = std::atoi(line.data());
  return code == 0 ? core::Status() : core::Status(code, line.data());
}

TEST(TrapOpen, WhereItIsForbiddenTheErrorSaysHowToAllowIt) {
  const core::Status s = make_under_seccomp(EPERM);
  if (s.code() == -ENOTSUP) GTEST_SKIP() << s.text();
  EXPECT_EQ(s.code(), -EPERM);
  for (const char* hint : {"/dev/userfaultfd", "vm.unprivileged_userfaultfd", "CAP_SYS_PTRACE", "seccomp"})
    EXPECT_NE(s.text().find(hint), std::string_view::npos) << hint << " is missing in: " << s.text();
}

TEST(TrapOpen, WhereTheKernelHasNoneTheErrorSaysSo) {
  const core::Status s = make_under_seccomp(ENOSYS);
  if (s.code() == -ENOTSUP) GTEST_SKIP() << s.text();
  EXPECT_EQ(s.code(), -ENOSYS);
  EXPECT_NE(s.text().find("CONFIG_USERFAULTFD"), std::string_view::npos) << s.text();
}

TEST(TrapOpen, WithoutAFreeDescriptorTheErrorSaysSo) {
  const core::Status s = make_under_seccomp(EMFILE);
  if (s.code() == -ENOTSUP) GTEST_SKIP() << s.text();
  EXPECT_EQ(s.code(), -EMFILE);
  EXPECT_NE(s.text().find("ulimit -n"), std::string_view::npos) << s.text();
}

TEST(TrapOpen, EachFallbackCanBeForced) {
  const auto caps_of = [](const UserfaultOptions& options, Caps* caps) {
    std::unique_ptr<Trap> trap;
    core::Status s = make_userfault_trap(options, &trap);
    if (s.ok()) *caps = trap->caps();
    return s;
  };
  Caps best, caps;
  const core::Status s = caps_of({}, &best);
  if (!s.ok()) GTEST_SKIP() << s.text();
  EXPECT_STREQ(best.name, "userfaultfd");
  EXPECT_FALSE(best.install);
  UserfaultOptions options;
  options.allow_move = false;
  ASSERT_TRUE(caps_of(options, &caps).ok());
  EXPECT_FALSE(caps.move);
  EXPECT_EQ(caps.poison, best.poison);
  options = {};
  options.allow_write_protect = false;
  ASSERT_TRUE(caps_of(options, &caps).ok());
  EXPECT_FALSE(caps.write_protect);
  EXPECT_EQ(caps.move, best.move);
  options = {};
  options.allow_poison = false;
  ASSERT_TRUE(caps_of(options, &caps).ok());
  EXPECT_FALSE(caps.poison);
  options = {};
  options.allow_privileged = false;
  ASSERT_TRUE(caps_of(options, &caps).ok());
  EXPECT_FALSE(caps.system_calls);
  options = {};
  options.allow_process_madvise = false;
  ASSERT_TRUE(caps_of(options, &caps).ok());
  EXPECT_FALSE(caps.batch_drop);
}

TEST(TrapRangeMap, RemembersWhatIsAttachedThroughCuts) {
  RangeMap map;
  RangeMap::Entry e{};
  EXPECT_FALSE(map.find(0x1000, &e));
  map.set(0x10000, 0x8000, Transfer::move, true);
  ASSERT_TRUE(map.find(0x17fff, &e));
  EXPECT_EQ(e.transfer, Transfer::move);
  EXPECT_FALSE(map.find(0x18000, &e));
  EXPECT_FALSE(map.find(0xffff, &e));
  map.erase(0x12000, 0x1000);  // a hole in the middle
  EXPECT_FALSE(map.find(0x12000, &e));
  EXPECT_TRUE(map.find(0x11fff, &e));
  EXPECT_TRUE(map.find(0x13000, &e));
  Range left{};
  ASSERT_TRUE(map.first_owned(&left));
  EXPECT_EQ(left.address, 0x10000u);
  EXPECT_EQ(left.size, 0x2000u);
  map.set(0x11000, 0x4000, Transfer::copy, false);  // over parts of two ranges
  ASSERT_TRUE(map.find(0x14fff, &e));
  EXPECT_EQ(e.transfer, Transfer::copy);
  ASSERT_TRUE(map.find(0x15000, &e));
  EXPECT_EQ(e.transfer, Transfer::move);
  map.set(0x19000, 0x1000, Transfer::copy, false);
  map.set(0x18000, 0x1000, Transfer::copy, false);
  map.set(0x1a000, 0x1000, Transfer::copy, false);
  ASSERT_TRUE(map.find(0x19000, &e));
  EXPECT_EQ(e.size, 0x1000u);  // separate from its neighbours
  map.erase(0x17000, 0x1800);  // the ends of two ranges
  EXPECT_TRUE(map.find(0x16fff, &e));
  EXPECT_FALSE(map.find(0x17000, &e));
  EXPECT_FALSE(map.find(0x187ff, &e));
  ASSERT_TRUE(map.find(0x18800, &e));
  EXPECT_EQ(e.size, 0x800u);
  EXPECT_EQ(e.transfer, Transfer::copy);
  map.erase(0, SIZE_MAX);
  EXPECT_FALSE(map.first_owned(&left));
  EXPECT_FALSE(map.find(0x19000, &e));
}

TEST(TrapTransfer, HugeFramesStayWholeWhateverLayWhereTheyGo) {
  Probed probed;
  if (const core::Status s = probe({}, &probed); !s.ok()) GTEST_SKIP() << s.text();
  close(probed.fd);
  if (probed.self >= 0) close(probed.self);
  if (!probed.frees_tables) {
    if (probed.pagemap >= 0) close(probed.pagemap);
    GTEST_SKIP() << "MADV_DONTNEED does not free page tables here (Linux 6.14 does), or no huge page is to be had";
  }
  std::unique_ptr<Trap> trap;
  ASSERT_TRUE(make_userfault_trap({}, &trap).ok());
  constexpr size_t kSize = size_t{2} << 20;
  void *region, *huge, *small;
  ASSERT_TRUE(trap->attach(kSize, kSize, Transfer::move, &region).ok());
  ASSERT_TRUE(trap->reserve_frames(kSize, true, &huge).ok());
  ASSERT_TRUE(trap->reserve_frames(kSize, false, &small).ok());
  const auto is_huge = [&](void* at) {
    return os::any_page(probed.pagemap, reinterpret_cast<uintptr_t>(at), kSize, os::kScanHuge) == 1;
  };
  memset(huge, 1, kSize);
  memset(small, 2, kSize);
  if (!is_huge(huge)) GTEST_SKIP() << "no huge page to be had";
  const auto there_and_back = [&](void* frame) {
    EXPECT_TRUE(trap->fill(region, kSize, frame, Transfer::move, Protect::no).ok());
    const bool was_huge = is_huge(region);
    EXPECT_TRUE(trap->take(region, kSize, frame, Transfer::move).ok());
    return was_huge;
  };
  EXPECT_FALSE(there_and_back(small));
  EXPECT_TRUE(there_and_back(huge)) << "after small pages";
  EXPECT_TRUE(trap->fail(region, kSize).ok());
  EXPECT_TRUE(trap->unfail(region, kSize).ok());
  EXPECT_TRUE(there_and_back(huge)) << "after a failed block";
  for (const size_t page : {size_t{0}, kSize / 2, kSize - core::kPage}) {
    EXPECT_TRUE(trap->fail(static_cast<std::byte*>(region) + page, core::kPage).ok());
    EXPECT_TRUE(trap->unfail(static_cast<std::byte*>(region) + page, core::kPage).ok());
    EXPECT_TRUE(there_and_back(huge)) << "after a page that gave SIGBUS, " << page;
  }
  for (const bool store : {false, true}) {
    std::thread toucher([&] {
      if (store) {
        __atomic_store_n(static_cast<char*>(region), 3, __ATOMIC_RELAXED);
      } else {
        EXPECT_EQ(__atomic_load_n(static_cast<char*>(region), __ATOMIC_RELAXED), 1);
      }
    });
    testing::next_fault(*trap);
    EXPECT_TRUE(trap->fill(region, kSize, huge, Transfer::move, Protect::no).ok());
    EXPECT_TRUE(is_huge(region)) << (store ? "after a store" : "after a load");
    toucher.join();
    EXPECT_TRUE(trap->take(region, kSize, huge, Transfer::move).ok());
    EXPECT_TRUE(is_huge(huge));
  }
  EXPECT_TRUE(trap->detach(region, kSize).ok());
  EXPECT_TRUE(trap->unmap(region, kSize).ok());
  munmap(huge, kSize);
  munmap(small, kSize);
  close(probed.pagemap);
}

// Pages that the kernel has swapped out keep their write protection when they move. Without swap,
// the step hook does to the frame what the kernel would.
struct Protector {
  Trap* trap;
  void* frame;
  size_t size;
} protector;

TEST(TrapTransfer, AFrameTakesNoWriteProtectionAlong) {
  Probed probed;
  if (const core::Status s = probe({}, &probed); !s.ok()) GTEST_SKIP() << s.text();
  close(probed.fd);
  if (probed.self >= 0) close(probed.self);
  if (!probed.caps.move || !probed.caps.write_protect || probed.pagemap < 0) {
    if (probed.pagemap >= 0) close(probed.pagemap);
    GTEST_SKIP() << "this kernel moves no pages (Linux 6.8 does), or /proc/self/pagemap is out of reach";
  }
  std::unique_ptr<Trap> trap;
  ASSERT_TRUE(make_userfault_trap({}, &trap).ok());
  constexpr size_t kSize = size_t{2} << 20;
  void *region, *frame;
  ASSERT_TRUE(trap->attach(kSize, kSize, Transfer::move, &region).ok());
  ASSERT_TRUE(trap->reserve_frames(kSize, false, &frame).ok());
  const auto is_protected = [&](void* at) {
    return os::any_page(probed.pagemap, reinterpret_cast<uintptr_t>(at), kSize, os::kScanPresent | os::kScanSwapped,
                        os::kScanWritten);
  };
  for (const bool by_swap : {true, false}) {
    SCOPED_TRACE(by_swap ? "swapped out" : "by the step hook");
    testing::write_pattern(frame, kSize, 1);
    ASSERT_TRUE(trap->fill(region, kSize, frame, Transfer::move, Protect::no).ok());
    ASSERT_TRUE(trap->protect(region, kSize).ok());
    ASSERT_EQ(is_protected(region), 1);
    if (by_swap) madvise(region, kSize, MADV_PAGEOUT);  // without swap this does nothing
    protector = {trap.get(), frame, kSize};
    if (!by_swap) {
      core::step_hook = [](const char* step) {
        if (std::string_view(step) != "trap.take.moved") return;
        EXPECT_TRUE(protector.trap->protect(protector.frame, protector.size).ok());
      };
    }
    const core::Status s = trap->take(region, kSize, frame, Transfer::move);
    core::step_hook = nullptr;
    ASSERT_TRUE(s.ok()) << s.text();
    ASSERT_EQ(is_protected(frame), 0) << "a store to it would wait for ever";
    EXPECT_EQ(testing::first_wrong(frame, kSize, 1), -1);
  }
  EXPECT_TRUE(trap->detach(region, kSize).ok());
  EXPECT_TRUE(trap->unmap(region, kSize).ok());
  munmap(frame, kSize);
  close(probed.pagemap);
}

// Linux 6.18 can move pages and then report that they are in its own way; only the page map tells
// that from a real obstacle.
TEST(TrapTransfer, PagesThatTheKernelMovedWithoutCountingAreRecognized) {
  const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) GTEST_SKIP() << "no /proc/self/pagemap";
  constexpr size_t kPages = 100, kPage = 4096;
  const auto map = [] {
    void* at = mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(at, kPages * kPage, MADV_NOHUGEPAGE);
    return reinterpret_cast<uintptr_t>(at);
  };
  const uintptr_t dst = map(), src = map();
  const auto touch = [](uintptr_t start, size_t page) { *reinterpret_cast<volatile char*>(start + page * kPage) = 1; };
  const auto moved = [&] { return moved_already(pagemap, dst, src, kPages * kPage) / kPage; };
  EXPECT_EQ(moved(), 0u);  // absent on both sides
  for (size_t i = 0; i < kPages; ++i) touch(dst, i);
  EXPECT_EQ(moved(), kPages);
  touch(src, 70);
  EXPECT_EQ(moved(), 70u);
  touch(src, 0);  // present on both sides: a real obstacle
  EXPECT_EQ(moved(), 0u);
  EXPECT_EQ(moved_already(-1, dst, src, kPages * kPage), 0u);
  munmap(reinterpret_cast<void*>(dst), kPages * kPage);
  munmap(reinterpret_cast<void*>(src), kPages * kPage);
  close(pagemap);
}

}  // namespace
}  // namespace vmem::trap
