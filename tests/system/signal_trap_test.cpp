// The library with faults served in a handler of SIGBUS (trap=signal). Each test runs in a process of
// its own: a handler belongs to a process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "system/child.h"
#include "system/exit_child.h"
#include "vmem/vmem.h"

namespace {

using namespace systest;

constexpr size_t kPage = 4096, kBytes = size_t{32} << 20, kWords = kBytes / sizeof(uint64_t), kThreads = 4;

void start(const char* budget) {
  ASSERT_EQ(vmem_set("trap", "signal"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_set("host_budget", budget), 0) << vmem_last_error();
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  ASSERT_EQ(rc, 0) << vmem_last_error();
}

std::atomic<uint64_t*> touched{nullptr};
std::atomic<unsigned> alarms{0};

// Stores and loads by several threads, each in pages of its own, compared with a copy. Blocks leave
// and come back meanwhile, pages are dropped, and the handler of a timer accesses the region.
TEST(SignalTrapChild, DISABLED_StoresAndLoads) {
  const size_t block = strtoull(getenv("VMEM_TEST_HOW"), nullptr, 0);
  const bool file = !path_of("VMEM_TEST_FILE").empty();
  start("8MiB");
  void* p = nullptr;
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = block;
  attr.flags = VMEM_HOST_ONLY;
  if (file) {
    p = map_shared("VMEM_TEST_FILE", kBytes, VMEM_HOST_ONLY);
  } else {
    ASSERT_EQ(vmem_create(&p, kBytes, &attr), 0) << vmem_last_error();
  }
  auto* const words = static_cast<uint64_t*>(p);
  std::vector<uint64_t> copy(kWords);
  touched = words + kPage / sizeof(uint64_t) - 1;  // a word that no thread uses
  signal(SIGALRM, [](int) {
    ++*touched;
    ++alarms;
  });
  const itimerval often{{0, 2000}, {0, 2000}};
  setitimer(ITIMER_REAL, &often, nullptr);
  std::atomic<size_t> wrong{0};
  const unsigned accesses = block != 0 && block <= 65536 ? 6000 : 300;  // large blocks come and go at each
  const auto work = [&](size_t mine) {
    std::minstd_rand random(static_cast<unsigned>(mine + 1));
    constexpr size_t kOfPage = kPage / sizeof(uint64_t);
    for (unsigned n = 0; n < accesses; ++n) {
      const size_t page = random() % (kBytes / kPage / kThreads) * kThreads + mine,
                   at = page * kOfPage + random() % 500;
      if (words[at] != copy[at]) ++wrong;
      if (n % 3 != 0) words[at] = copy[at] = n + 1;
      if (n % 500 == 0 && vmem_evict(words + page * kOfPage, kPage, VMEM_SSD) == -EINVAL) ++wrong;
      if (n % 700 == 0 && !file && madvise(words + page * kOfPage, kPage, MADV_DONTNEED) == 0) {
        for (size_t i = page * kOfPage; i < (page + 1) * kOfPage; ++i) {
          if (i < page * kOfPage + 500 && words[i] != 0 && words[i] != copy[i]) ++wrong;
          if (i < page * kOfPage + 500) words[i] = copy[i] = 7;
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
  setitimer(ITIMER_REAL, nullptr, nullptr);
  for (size_t i = 0; i < kWords; ++i) wrong += words[i] != copy[i] && words + i != touched ? 1 : 0;
  EXPECT_EQ(wrong, 0u);
  EXPECT_NE(alarms, 0u);
  struct vmem_stats stats = {};
  stats.size = sizeof stats;
  ASSERT_EQ(vmem_stats(&stats), 0);
  EXPECT_NE(stats.evictions, 0u);
  if (file) {
    ASSERT_EQ(vmem_sync(p, kBytes), 0) << vmem_last_error();
    const int fd = open(path_of("VMEM_TEST_FILE").c_str(), O_RDONLY | O_CLOEXEC);
    std::vector<uint64_t> written(kWords);
    for (size_t at = 0; at < kBytes; at += size_t{1} << 20)
      ASSERT_EQ(pread(fd, written.data() + at / sizeof(uint64_t), size_t{1} << 20, static_cast<off_t>(at)), 1 << 20);
    written[kPage / sizeof(uint64_t) - 1] = copy[kPage / sizeof(uint64_t) - 1];
    EXPECT_TRUE(written == copy);
    close(fd);
  }
  EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
}

void run_child(const char* child, Environment environment) {
  const int status = wait_for_child(start_child(child, environment), 120);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no userfaultfd, or a kernel before Linux 6.6";
  EXPECT_EQ(status, 0) << (status == -1 ? "it hangs" : "");
}

class SignalTrap : public testing::TestWithParam<const char*> {};

TEST_P(SignalTrap, ThreadsStoreAndLoad) {
  run_child("SignalTrapChild.DISABLED_StoresAndLoads", {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_FILE", ""}});
}

TEST_P(SignalTrap, ThreadsStoreAndLoadInAFile) {
  const TempFile file(0);
  ASSERT_EQ(truncate(file.path().c_str(), kBytes), 0);
  const std::string block = GetParam() == std::string("0") ? "auto" : GetParam();
  run_child("SignalTrapChild.DISABLED_StoresAndLoads",
            {{"VMEM_TEST_HOW", block}, {"VMEM_TEST_FILE", file.path()}, {"VMEM_BLOCK_SIZE", block}});
}
INSTANTIATE_TEST_SUITE_P(Blocks, SignalTrap, testing::Values("4096", "65536", "2097152", "0"));

// A system call gets EFAULT, a lease makes it right, and a SIGBUS of another mapping is the program's.
TEST(SignalTrapChild, DISABLED_CallsAndOthers) {
  static std::atomic<unsigned> others;
  static void* beyond;
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int, siginfo_t* info, void*) {
    ++others;
    if (info->si_addr != beyond) _exit(31);
    mmap(beyond, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  };
  sigaction(SIGBUS, &action, nullptr);
  start("8MiB");
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kBytes, VMEM_HOST_ONLY), 0) << vmem_last_error();
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(read(zeros, p, kPage), -1);
  EXPECT_EQ(errno, EFAULT);
  ASSERT_EQ(vmem_acquire(p, kPage, VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(read(zeros, p, kPage), static_cast<ssize_t>(kPage));
  EXPECT_EQ(vmem_release(p, kPage, nullptr), 0);
  const int empty = memfd_create("empty", MFD_CLOEXEC);
  beyond = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, empty, 0);
  EXPECT_EQ(*static_cast<volatile char*>(beyond), 0);
  EXPECT_EQ(others, 1u);
  memset(p, 3, kBytes);
  EXPECT_EQ(status_of_fork([] {  // it starts anew
              void* its = nullptr;
              if (!kChildrenStart) return 0;
              if (vmem_alloc(&its, kBytes, VMEM_HOST_ONLY) != 0) return 41;
              memset(its, 5, kBytes);
              return static_cast<char*>(its)[kBytes / 2] == 5 && vmem_free(its) == 0 ? 0 : 42;
            }),
            0);
  EXPECT_EQ(vmem_free(p), 0);
  vmem_shutdown();
  ASSERT_EQ(vmem_set("trap", "uffd"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_alloc(&p, kBytes, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(p, 4, kBytes);
  EXPECT_EQ(vmem_free(p), 0);
}

TEST(SignalTrapCalls, SystemCallsNeedLeasesAndOtherSignalsAreTheProgramsOwn) {
  run_child("SignalTrapChild.DISABLED_CallsAndOthers", {});
}

}  // namespace
