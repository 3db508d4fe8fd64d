// Which objects of its parent a forked child keeps, and which not.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "child.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kSize = 1 << 20;

// Uses a store and a SHARED file, makes a child that lives on without exec, and is killed.
TEST(ForkChild, DISABLED_DiesAndLeavesAChild) {
  for (const auto& [name, value] : {std::pair{"device", "none"}, {"ssd_path", getenv("VMEM_TEST_STORE")}}) {
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  }
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  void *shared = nullptr, *anonymous = nullptr;
  ASSERT_EQ(vmem_map(&shared, kSize, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0)
      << vmem_last_error();
  ASSERT_EQ(vmem_alloc(&anonymous, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(shared, 3, kSize);
  memset(anonymous, 4, kSize);
  ASSERT_EQ(vmem_sync(shared, kSize), 0) << vmem_last_error();
  ASSERT_EQ(vmem_evict(anonymous, kSize, VMEM_SSD), 0) << vmem_last_error();
  const pid_t child = systest::fork_child([] {
    alarm(300);
    pause();
    return 0;
  });
  ASSERT_GE(child, 0);
  std::ofstream(getenv("VMEM_TEST_PID")) << child << std::flush;
  kill(getpid(), SIGKILL);
}

// The program's own handler before a fork accesses blocks, while other threads make calls.
volatile char* touched = nullptr;
std::atomic<bool> goes_on{true};

// In a child: returns 0 if a runtime of its own serves regions of its own, with more data than its
// budget.
int uses_regions() {
  constexpr size_t kRegion = 24 << 20;
  void *first = nullptr, *second = nullptr;
  if (vmem_set("log", "error") != 0) return 10;
  if (vmem_set("host_budget", "16MiB") != 0 || vmem_set("block_size", "64KiB") != 0) return 11;
  if (vmem_alloc(&first, kRegion, VMEM_HOST_ONLY) != 0) return fprintf(stderr, "%s\n", vmem_last_error()), 12;
  if (vmem_alloc(&second, kSize, VMEM_HOST_ONLY) != 0) return 13;
  memset(second, 1, kSize);
  auto* const words = static_cast<volatile uint64_t*>(first);
  for (size_t i = 0; i < kRegion / 8; i += 512) words[i] = i ^ 0x5a5a;
  if (vmem_evict(first, kRegion, VMEM_SSD) != 0) return fprintf(stderr, "%s\n", vmem_last_error()), 14;
  for (size_t i = 0; i < kRegion / 8; i += 512) {
    if (words[i] != (i ^ 0x5a5a)) return 15;
  }
  return vmem_free(first) == 0 ? 0 : 16;
}

// Forks repeatedly; each child starts with a new runtime.
void fork_often(int times, int (*body)()) {
  for (int i = 0; i < times; ++i) EXPECT_EQ(systest::status_of_fork(body), 0) << i;
}

TEST(ForkChild, DISABLED_AccessesBlocksBeforeItForks) {
  constexpr size_t kRegion = 64 << 20;
  // Register these before the library's handlers, so that they run after them.
  ASSERT_EQ(pthread_atfork(
                [] {
                  static size_t n = 0;
                  for (int i = 0; touched != nullptr && i < 4; ++i) touched[++n * 7919 * 4096 % kRegion] = 1;
                },
                nullptr, nullptr),
            0);
  for (const auto& [name, value] : {std::pair{"device", "none"}, {"host_budget", "32MiB"}, {"block_size", "64KiB"}})
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  vmem::region region(kRegion, VMEM_HOST_ONLY), other(2 << 20, VMEM_HOST_ONLY);
  std::thread caller([&] {
    while (goes_on) {
      EXPECT_EQ(vmem_acquire(other.data(), 4096, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
      EXPECT_EQ(vmem_release(other.data(), 4096, nullptr), 0) << vmem_last_error();
    }
  });
  touched = static_cast<volatile char*>(region.data());
  fork_often(systest::kChildrenStart ? 30 : 0, uses_regions);
  fork_often(70, [] { return 0; });
  goes_on = false;
  caller.join();
  touched = nullptr;
}

class Fork : public SystemTest {};
TEST_F(Fork, WhatRunsBeforeAForkMayAccessBlocks) {
  if (IsSkipped()) return;
  const int status =
      systest::wait_for_child(systest::start_child("ForkChild.DISABLED_AccessesBlocksBeforeItForks", {}), 240);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
}

// An environment variable is invalid: nothing ever starts, and every call fails with a message.
TEST(ForkChild, DISABLED_ForksWhileCallsFail) {
  EXPECT_EQ(vmem_init(), -EINVAL);
  std::thread caller([] {
    while (goes_on) EXPECT_EQ(vmem_init(), -EINVAL);
  });
  fork_often(200, [] { return vmem_init() == -EINVAL && vmem_last_error()[0] != 0 ? 0 : 1; });
  goes_on = false;
  caller.join();
}

TEST_F(Fork, AChildIsToldTheSameWhereNothingHasStarted) {
  if (!systest::kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  const int status = systest::wait_for_child(
      systest::start_child("ForkChild.DISABLED_ForksWhileCallsFail", {{"VMEM_BLOCK_SIZE", "nonsense"}}), 240);
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
}

TEST_F(Fork, AChildOfADeadParentKeepsNeitherItsStoreNorItsFile) {
  if (IsSkipped()) return;
  const TempFile file(kSize), store(0), pid(0);
  ASSERT_EQ(chmod(store.path().c_str(), 0600), 0);
  const pid_t parent = systest::start_child(
      "ForkChild.DISABLED_DiesAndLeavesAChild",
      {{"VMEM_TEST_STORE", store.path()}, {"VMEM_TEST_FILE", file.path()}, {"VMEM_TEST_PID", pid.path()}});
  const int status = systest::wait_for_child(parent, 120);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  pid_t child = 0;
  std::ifstream(pid.path()) >> child;
  ASSERT_GT(child, 0);
  EXPECT_EQ(kill(child, 0), 0) << "it lives";
  configure({{"ssd_path", store.path()}});
  void* p = nullptr;
  EXPECT_EQ(vmem_map(&p, kSize, file.path().c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0) << vmem_last_error();
  if (p != nullptr) {
    EXPECT_EQ(static_cast<const volatile char*>(p)[kSize / 2], 3);
    EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
  }
  EXPECT_EQ(vmem_alloc(&p, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  vmem_shutdown();
  kill(child, SIGKILL);
}

// Such a child runs no handler, neither ours nor the C library's; at its end it runs all handlers
// of exit().
TEST(ForkChild, DISABLED_MakesAChildByASystemCall) {
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  vmem::region region(kSize, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  memset(region.data(), 5, kSize);
  const std::string published = vmem::api::Runtime::get().published_at();
  ASSERT_NE(published, "");
  const pid_t child = static_cast<pid_t>(syscall(SYS_fork));
  ASSERT_GE(child, 0);
  if (child == 0) exit(vmem_init() == -ECHILD ? 0 : 1);
  EXPECT_EQ(systest::wait_for_child(child, 60), 0) << "the child did not end well";
  EXPECT_TRUE(std::filesystem::exists(published)) << "it took its parent out of sight";
  region.sync();
}

TEST_F(Fork, AChildByASystemCallIsRefusedAndMayExit) {
  if (IsSkipped()) return;
  if (systest::kSanitized) GTEST_SKIP() << "a sanitizer has to know of a fork";
  const TempFile file(kSize);
  std::string folder = systest::temp_folder() + "/vmem-runtime.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const int status = systest::wait_for_child(
      systest::start_child("ForkChild.DISABLED_MakesAChildByASystemCall", {{"VMEM_TEST_FILE", file.path()},
                                                                           {"VMEM_PUBLISH", "on"},
                                                                           {"VMEM_DEVICE", "none"},
                                                                           {"XDG_RUNTIME_DIR", folder}}),
      240);
  std::filesystem::remove_all(folder);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
  EXPECT_EQ(file.read()[kSize / 2], 5);
}

// Returns the descriptors of this process except those in `known`, by what they are open on.
std::string descriptors(const std::set<int>& known, std::set<int>* all) {
  std::string text;
  DIR* const d = opendir("/proc/self/fd");
  while (const dirent* const e = readdir(d)) {
    const int fd = atoi(e->d_name);
    if (e->d_name[0] == '.' || fd == dirfd(d)) continue;
    if (all != nullptr) all->insert(fd);
    if (known.count(fd) != 0) continue;
    char target[256] = {};
    if (readlinkat(dirfd(d), e->d_name, target, sizeof target - 1) > 0) text += std::string(target) + "\n";
  }
  closedir(d);
  return text;
}

// With a descriptor of the trap, a child that gave up its rights could write to its parent's
// memory.
TEST_F(Fork, AChildHasNoDescriptorOfTheLibrary) {
  if (IsSkipped()) return;
  if (!systest::kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  vmem_shutdown();
  const TempFile file(kSize);
  int told[2];
  ASSERT_EQ(pipe2(told, O_CLOEXEC), 0);
  std::set<int> before;
  descriptors({}, &before);
  for (const char* engine : {"auto", "threads"}) {
    configure({{"device", "none"}, {"io_engine", engine}});
    vmem::region mapped(kSize, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), anonymous(kSize, VMEM_HOST_ONLY);
    memset(mapped.data(), 3, kSize);
    memset(anonymous.data(), 4, kSize);
    anonymous.evict();
    ASSERT_NE(descriptors(before, nullptr), "") << "the parent has some";
    EXPECT_EQ(systest::status_of_fork([&] {
                const std::string kept = descriptors(before, nullptr) + "-";
                return write(told[1], kept.data(), kept.size()) == static_cast<ssize_t>(kept.size()) ? 0 : 1;
              }),
              0);
    char kept[4096] = {};
    ASSERT_GT(read(told[0], kept, sizeof kept - 1), 0);
    EXPECT_STREQ(kept, "-") << engine;
    EXPECT_EQ(anonymous.view<unsigned char>()[5], 4);
  }
  vmem_shutdown();
  EXPECT_EQ(descriptors(before, nullptr), "") << "and none is left";
  close(told[0]);
  close(told[1]);
}

// When the child is made, threads of the parent are in every kind of call, and hold any lock of the
// library.
TEST(ForkChild, DISABLED_ForksBesideCalls) {
  for (const auto& [name, value] : {std::pair{"host_budget", "24MiB"}, {"compression", "zstd"}, {"log", "info"}})
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  vmem_log([](int, const char*, void*) {}, nullptr);
  const TempFile file(kSize);
  std::vector<std::thread> callers;
  for (int n = 0; n < 3; ++n) {
    callers.emplace_back([&, n] {
      for (unsigned round = 0; goes_on; ++round) {
        vmem::region region(32 << 20, VMEM_HOST_ONLY);
        memset(region.data(), static_cast<int>(round), region.size());
        if (n == 0) {
          vmem::region shared(kSize, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
          memset(shared.data(), 1, kSize);
        }
        EXPECT_EQ(vmem_set("fault_timeout_ms", round % 2 != 0 ? "10000" : "20000"), 0) << vmem_last_error();
        region.evict();
        EXPECT_EQ(region.view<const unsigned char>()[region.size() / 2], round & 0xff);
      }
    });
  }
  fork_often(40, uses_regions);
  goes_on = false;
  for (auto& caller : callers) caller.join();
}

TEST_F(Fork, AChildBeginsAnewWhateverThreadsOfItsParentDo) {
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  const int status = systest::wait_for_child(
      systest::start_child("ForkChild.DISABLED_ForksBesideCalls", {{"VMEM_DEVICE", "none"}}), 240);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "accesses cannot be trapped here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
}

// Makes descendants of several generations; each ends by exit().
[[noreturn]] void begin_again(int generations, const std::string& folder) {
  const std::string path = folder + "/" + std::to_string(generations);
  vmem::region shared(kSize, path, 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  memset(shared.data(), generations, kSize);
  if (generations == 0) exit(uses_regions());
  const pid_t child = systest::fork_child([&] {
    if (vmem_free(shared.data()) != -ECHILD) return 21;
    char budget[32];
    if (vmem_get("host_budget", budget, sizeof budget) != 0 || strcmp(budget, "16777216") != 0) return 22;
    begin_again(generations - 1, folder);
  });
  exit(systest::wait_for_child(child, 60) != 0 ? 23 : uses_regions());
}

TEST_F(Fork, ChildrenOfChildrenHaveRuntimesAndFilesOfTheirOwn) {
  if (IsSkipped()) return;
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  configure({{"device", "none"}, {"host_budget", "16MiB"}});
  vmem::region own(kSize, VMEM_HOST_ONLY);
  memset(own.data(), 9, kSize);
  std::string folder = systest::temp_folder() + "/vmem-test.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  for (int i = 0; i < 4; ++i) {
    std::ofstream(folder + "/" + std::to_string(i));
    std::filesystem::resize_file(folder + "/" + std::to_string(i), kSize);
  }
  const pid_t child = systest::fork_child([&]() -> int { begin_again(3, folder); });
  EXPECT_EQ(systest::wait_for_child(child, 120), 0);
  for (int i = 0; i < 4; ++i) {
    std::string bytes(kSize, 'x');
    std::ifstream(folder + "/" + std::to_string(i)).read(bytes.data(), kSize);
    EXPECT_EQ(bytes, std::string(kSize, static_cast<char>(i))) << i;
  }
  std::filesystem::remove_all(folder);
  EXPECT_EQ(own.view<const unsigned char>()[5], 9);
}

// Many workers at once, as in a server.
TEST_F(Fork, ManyWorkersServeBesideTheirParent) {
  if (IsSkipped()) return;
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  configure({{"device", "none"}});
  vmem::region own(kSize, VMEM_HOST_ONLY);
  memset(own.data(), 9, kSize);
  pid_t workers[6];
  for (pid_t& worker : workers) worker = systest::fork_child(uses_regions);
  own.evict();
  EXPECT_EQ(own.view<const unsigned char>()[5], 9);
  for (const pid_t worker : workers) EXPECT_EQ(systest::wait_for_child(worker, 120), 0);
}

TEST_F(Fork, CallsOfAChildWithItsParentsRegionsAreRefusedAndStartNothing) {
  if (IsSkipped()) return;
  if (!systest::kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  configure({{"device", "none"}});
  vmem::region region(kSize, VMEM_HOST_ONLY);
  struct vmem_lease* lease = nullptr;
  const vmem_range range{region.data(), kSize, VMEM_READ, 0};
  ASSERT_EQ(vmem_lease(&lease, &range, 1, VMEM_HOST, nullptr), 0);
  EXPECT_EQ(systest::status_of_fork([&] {
              auto* const p = static_cast<char*>(region.data()) + 5;
              struct vmem_lease* other = nullptr;
              vmem_residency found = {sizeof found, 0, 0, 0, 0, 0};
              const int answers[] = {vmem_free(region.data()),
                                     vmem_name(p, "x"),
                                     vmem_prefetch(p, 1, VMEM_HOST, nullptr),
                                     vmem_advise(p, 1, VMEM_ADVISE_COLD, VMEM_HOST),
                                     vmem_acquire(p, 1, VMEM_READ, VMEM_HOST, nullptr),
                                     vmem_release(p, 1, nullptr),
                                     vmem_acquire_ranges(&range, 1, VMEM_HOST, nullptr),
                                     vmem_release_ranges(&range, 1, nullptr),
                                     vmem_lease(&other, &range, 1, VMEM_HOST, nullptr),
                                     vmem_lease_poll(lease),
                                     vmem_lease_end(lease, nullptr),
                                     vmem_evict(p, 1, VMEM_SSD),
                                     vmem_sync(p, 1),
                                     vmem_query(p, 1, &found)};
              int which = 1;
              for (const int answer : answers) {
                if (answer != -ECHILD) return which;
                ++which;
              }
              return vmem::api::Runtime::get().check().empty() && vmem_last_error()[0] != 0 ? 0 : 100;
            }),
            0);
  ASSERT_EQ(vmem_lease_end(lease, nullptr), 0);
}

// Returns the standard error of a child that accesses this address, and its wait status.
std::string end_by_access(const volatile char* at, bool handles, int* status) {
  int said[2];
  EXPECT_EQ(pipe2(said, O_CLOEXEC), 0);
  const pid_t child = systest::fork_child([&] {
    dup2(said[1], STDERR_FILENO);
    if (handles) signal(SIGSEGV, [](int) { _exit(55); });
    return *at;
  });
  close(said[1]);
  *status = systest::wait_for_child(child, 60);
  std::string text(4096, '\0');
  const ssize_t n = read(said[0], text.data(), text.size());
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  close(said[0]);
  return text;
}

TEST_F(Fork, AnAccessOfAnInheritedRegionSaysWhyItEndsTheChild) {
  if (IsSkipped()) return;
  if (systest::kSanitized) GTEST_SKIP() << "a sanitizer handles SIGSEGV itself";
  configure({{"device", "none"}});
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto* const bytes = static_cast<volatile char*>(region.data());
  bytes[5] = 1;
  int status = 0;
  std::string text = end_by_access(bytes + 5, false, &status);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  char address[32];
  snprintf(address, sizeof address, "%016zx", reinterpret_cast<size_t>(bytes + 5));
  EXPECT_NE(text.find(address), std::string::npos) << text;
  EXPECT_NE(text.find("not inherited"), std::string::npos) << text;
  text = end_by_access(nullptr, false, &status);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  EXPECT_EQ(text, "") << "that was no region";
  text = end_by_access(bytes, true, &status);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 55) << status;
  EXPECT_EQ(text, "") << "the program's handler comes first";
  status = systest::status_of_fork([] { return raise(SIGSEGV); });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
}

// An old pointer never points to another object, whatever the child maps.
TEST_F(Fork, TheAddressesOfInheritedRegionsStayFree) {
  if (IsSkipped()) return;
  if (!systest::kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  configure({{"device", "none"}});
  vmem::region region(kSize, VMEM_HOST_ONLY);
  EXPECT_EQ(systest::status_of_fork([&] {
              void* const p = mmap(region.data(), kSize, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
              return p != region.data() && p != MAP_FAILED ? 0 : 1;
            }),
            0);
}

std::atomic<int> status_of_inner{-2};

// A signal handler forks while the call waits: the child would continue with its parent's objects.
TEST_F(Fork, AChildMadeInsideACallIsRefused) {
  if (IsSkipped()) return;
  if (!systest::kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  configure({{"device", "none"}});
  status_of_inner = -2;
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) {
    status_of_inner = systest::status_of_fork([] { return vmem_init() == -ECHILD ? 0 : 1; });
  };
  sigaction(SIGUSR2, &action, &before);
  vmem::region region(kSize, VMEM_HOST_ONLY);
  const vmem_range range{region.data(), kSize, VMEM_READ, 0};
  struct Waiter {
    pthread_t thread = pthread_self();
    std::string path = "/proc/self/task/" + std::to_string(gettid()) + "/status";
    // The lease may be ready before the call that requests it returns. A signal that comes then
    // runs after that call.
    std::atomic<bool> ends{false};
    // All signals are blocked in a call, except for short moments.
    bool is_in_call() const {
      if (!ends) return false;
      std::ifstream in(path);
      for (std::string line; std::getline(in, line);) {
        if (line.rfind("SigBlk:\t", 0) == 0)
          return (std::stoull(line.substr(8), nullptr, 16) >> (SIGUSR2 - 1) & 1) != 0;
      }
      return false;
    }
  } waiter;
  struct vmem_lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(
                &lease, &range, 1, VMEM_HOST, nullptr,
                [](struct vmem_lease*, int, void* user) {
                  auto& w = *static_cast<Waiter*>(user);
                  EXPECT_TRUE(vmem::test::eventually([&] { return w.is_in_call(); }));
                  pthread_kill(w.thread, SIGUSR2);
                  EXPECT_TRUE(vmem::test::eventually([] { return status_of_inner != -2; }));
                },
                &waiter),
            0)
      << vmem_last_error();
  waiter.ends = true;
  EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(status_of_inner, 0);
  sigaction(SIGUSR2, &before, nullptr);
}

TEST_F(Fork, AChildDoesNotGetTheFileThatItsParentHasNorFreesIt) {
  if (IsSkipped()) return;
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  const TempFile file(kSize), store(0);
  ASSERT_EQ(chmod(store.path().c_str(), 0600), 0);
  configure({{"device", "none"}, {"ssd_path", store.path()}});
  vmem::region region(kSize, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), anonymous(kSize, VMEM_HOST_ONLY);
  memset(region.data(), 3, kSize);
  memset(anonymous.data(), 4, kSize);
  anonymous.evict();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(systest::status_of_fork([&] {
                if (vmem_init() != -EBUSY) return 1;  // a store serves only one process
                if (vmem_set("ssd_path", systest::temp_folder().c_str()) != 0 || vmem_init() != 0) return 2;
                void* p = nullptr;
                return vmem_map(&p, kSize, file.path().c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY) == -EBUSY ? 0 : 3;
              }),
              0);
  }
  EXPECT_EQ(anonymous.view<const unsigned char>()[5], 4);
  region.sync();
  EXPECT_EQ(file.read()[5], 3);
}

TEST_F(Fork, AChildHasNoDevicesAndSaysSo) {
  if (IsSkipped()) return;
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  const int rc = vmem_set("device", "sim");
  ASSERT_EQ(rc, 0);
  if (vmem_init() != 0) GTEST_SKIP() << vmem_last_error();
  EXPECT_EQ(systest::status_of_fork([] {
              if (vmem_init() != -ENOTSUP || strstr(vmem_last_error(), "fork") == nullptr) return 1;
              if (vmem_set("device", "auto") != 0 || vmem_init() != 0) return 2;
              return uses_regions();
            }),
            0);
  vmem_shutdown();
  ASSERT_EQ(vmem_set("device", "auto"), 0);
}

TEST_F(Fork, AChildIsPublishedBesideItsParent) {
  if (IsSkipped()) return;
  if (!systest::kChildrenStart) GTEST_SKIP() << "sanitizers know of no threads that such a child starts";
  configure({{"device", "none"}, {"publish", "on"}});
  const std::string parents = vmem::api::Runtime::get().published_at();
  ASSERT_NE(parents, "");
  const pid_t child = systest::fork_child([&]() -> int {
    const int rc = vmem_init();
    const std::string mine = vmem::api::Runtime::get().published_at();
    exit(rc == 0 && mine != "" && mine != parents && std::filesystem::exists(parents) ? 0 : 1);
  });
  EXPECT_EQ(systest::wait_for_child(child, 60), 0);
  EXPECT_TRUE(std::filesystem::exists(parents));
}

}  // namespace
