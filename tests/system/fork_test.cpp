// What a forked child keeps of its parent, and what not.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>

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

// What a program does before it forks may access blocks, while other threads make calls.
volatile char* touched = nullptr;
std::atomic<bool> goes_on{true};

// Each child is refused, with words.
void fork_often(int times) {
  for (int i = 0; i < times; ++i) {
    EXPECT_EQ(systest::status_of_fork([] { return vmem_init() == -ECHILD && vmem_last_error()[0] != 0 ? 0 : 1; }), 0);
  }
}

TEST(ForkChild, DISABLED_AccessesBlocksBeforeItForks) {
  constexpr size_t kRegion = 64 << 20;
  // Registered before the library's own, and so run after them.
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
  fork_often(100);
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

// A variable of the environment is bad: nothing ever starts, and every call fails with words.
TEST(ForkChild, DISABLED_ForksWhileCallsFail) {
  EXPECT_EQ(vmem_init(), -EINVAL);
  std::thread caller([] {
    while (goes_on) EXPECT_EQ(vmem_init(), -EINVAL);
  });
  fork_often(200);
  goes_on = false;
  caller.join();
}

TEST_F(Fork, AChildIsRefusedAlsoWhereNothingHasStarted) {
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

// No handler runs in such a child, neither of ours nor of the C library; its end runs all of exit()'s.
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

// Descriptors of this process but those in `known`, by what they are open on.
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

// With a descriptor of the trap a child that gave up its rights could write to its parent's memory.
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

}  // namespace
