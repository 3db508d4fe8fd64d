// However a program ends, nothing crashes or hangs, and shared files have the data stored before.
// Tested with the static library and with the shared one; each test program includes this once. The
// other half, ExitChild, runs in processes of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "system/child.h"
#include "vmem/vmem.hpp"

namespace exit_suite {

constexpr size_t kPage = 4096, kWordsOfPage = kPage / sizeof(uint64_t);
constexpr size_t kPages = 6144, kSize = kPages * kPage;  // three times the budget
constexpr size_t kLatePages = kPages / 8;                // the last pages are for the destructor
constexpr size_t kThreads = 3;
constexpr uint64_t kLate = 0xfffffe;

// Word `index` in state `round`: identifies its place and when it was stored. 0: as the file was
// made.
constexpr uint64_t word(size_t index, uint64_t round) {
  return (index * 0x9e3779b1u) << 24 | round;
}

// The rounds that the child's threads have finished when it ends: at least these must be in the
// file.
using Finished = std::array<uint64_t, kThreads>;

inline std::vector<uint64_t> contents(int fd) {
  std::vector<uint64_t> words(kSize / sizeof(uint64_t));
  for (size_t at = 0; at < kSize;) {
    const ssize_t n = pread(fd, reinterpret_cast<char*>(words.data()) + at, kSize - at, static_cast<off_t>(at));
    if (n <= 0) return {};
    at += static_cast<size_t>(n);
  }
  return words;
}

// Returns "" if every byte is right.
inline std::string check(const std::vector<uint64_t>& words, const Finished& finished, bool late) {
  if (words.empty()) return "the file cannot be read";
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t page = i / kWordsOfPage;
    const uint64_t round = words[i] & 0xffffff;
    bool good = round == 0;
    if (i % kWordsOfPage == 0) {
      if (page < kPages - kLatePages) {
        good = round >= finished[page % kThreads] && round != kLate;
      } else if (late) {
        good = round == kLate;
      }
    }
    if (words[i] != word(i, round) || !good) {
      return "page " + std::to_string(page) + ", word " + std::to_string(i % kWordsOfPage) + " is of round " +
             std::to_string(round) + (words[i] != word(i, round) ? " and another place" : "");
    }
  }
  return "";
}

inline unsigned runs() {
  if (const char* set = getenv("VMEM_EXIT_RUNS"); set != nullptr) return static_cast<unsigned>(atoi(set));
  return getenv("VMEM_LONG") != nullptr ? 1000 : getenv("VMEM_QUICK") != nullptr ? 3 : systest::kSanitized ? 4 : 25;
}

// Runs `child` once with VMEM_TEST_HOW=how, on a file of its own: I/O that a process had in
// progress at its end may still be written. late: its destructor stores. Returns false if it cannot
// run here.
inline bool check_run(const std::string& child, const std::string& how, bool late) {
  const char* tmp = getenv("TMPDIR");
  std::string path = std::string(tmp != nullptr ? tmp : "/var/tmp") + "/vmem-exit.XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  EXPECT_GE(fd, 0) << path;
  std::vector<uint64_t> fresh(kSize / sizeof(uint64_t));
  for (size_t i = 0; i < fresh.size(); ++i) fresh[i] = word(i, 0);
  EXPECT_EQ(pwrite(fd, fresh.data(), kSize, 0), static_cast<ssize_t>(kSize));
  const pid_t pid = systest::start_child(child, {{"VMEM_TEST_HOW", how}, {"VMEM_TEST_FILE", path}});
  const int status = systest::wait_for_child(pid, 120);
  const bool possible = !WIFEXITED(status) || WEXITSTATUS(status) != 77;
  if (possible) {
    EXPECT_EQ(status, 0) << how << (status == -1 ? ": hung" : "");
    Finished finished{};
    EXPECT_EQ(pread(fd, finished.data(), sizeof finished, kSize), static_cast<ssize_t>(sizeof finished));
    EXPECT_EQ(check(contents(fd), finished, late), "") << how;
  }
  unlink(path.c_str());
  close(fd);
  return possible;
}

inline void check_runs(const std::string& child, const std::string& how, bool late) {
  for (unsigned run = 0; run < runs() && !testing::Test::HasFailure(); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    if (!check_run(child, how, late)) GTEST_SKIP() << "no way to trap absent blocks here";
  }
}

// --- in the child ---------------------------------------------------------------------------------------------------

inline std::atomic<uint64_t*> shared{nullptr};
inline void* anonymous = nullptr;
inline std::array<std::atomic<uint64_t>, kThreads> rounds{};
inline bool late_stores = false, late_frees = false;

// A static object of the program, which is destroyed in the course of exit().
struct Late {
  ~Late() {
    if (!late_stores) return;
    for (size_t page = kPages - kLatePages; page < kPages; ++page) {
      shared[page * kWordsOfPage] = word(page * kWordsOfPage, kLate);
    }
    // Calls work as before.
    void* more = nullptr;
    if (vmem_alloc(&more, kSize, VMEM_HOST_ONLY) != 0) _exit(21);
    memset(more, 5, kSize);
    if (vmem_free(more) != 0 || vmem_free(anonymous) != 0) _exit(22);
    if (late_frees && vmem_free(shared) != 0) _exit(23);
    if (vmem_free(&late_stores) != -EINVAL || vmem_last_error()[0] == '\0') _exit(24);
  }
};
inline Late late;

inline void store_for_ever(size_t mine) {
  for (uint64_t round = 1;; ++round) {
    for (size_t page = mine; page < kPages - kLatePages; page += kThreads) {
      shared[page * kWordsOfPage] = word(page * kWordsOfPage, round);
    }
    rounds[mine] = round;
  }
}

// Maps the file, and starts threads that store to it and never end.
inline void start_storing() {
  for (const auto& [name, value] : {std::pair{"host_budget", "8MiB"}, {"block_size", "64KiB"}, {"device", "none"}}) {
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  }
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, kSize, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0) << vmem_last_error();
  shared = static_cast<uint64_t*>(p);
  ASSERT_EQ(vmem_alloc(&anonymous, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(anonymous, 3, kSize / 2);
  for (size_t t = 0; t < kThreads; ++t) std::thread(store_for_ever, t).detach();
  for (auto& round : rounds) {
    while (round == 0) usleep(200);
  }
}

// The child may end from here on: all data stored by now must be in the file.
inline void note_what_is_finished() {
  Finished finished{};
  for (size_t t = 0; t < kThreads; ++t) finished[t] = rounds[t];
  const int fd = open(getenv("VMEM_TEST_FILE"), O_WRONLY | O_CLOEXEC);
  if (pwrite(fd, finished.data(), sizeof finished, kSize) != static_cast<ssize_t>(sizeof finished)) _exit(25);
  close(fd);
}

TEST(ExitChild, DISABLED_Ends) {
  const std::string how = getenv("VMEM_TEST_HOW");
  if (how == "destructors free") {
    late_stores = late_frees = true;
    ASSERT_EQ(vmem_set("host_budget", "8MiB"), 0);
    ASSERT_EQ(vmem_set("block_size", "64KiB"), 0);
    ASSERT_EQ(vmem_set("device", "none"), 0);
    if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
    void* p = nullptr;
    ASSERT_EQ(vmem_map(&p, kSize, getenv("VMEM_TEST_FILE"), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY), 0);
    shared = static_cast<uint64_t*>(p);
    ASSERT_EQ(vmem_alloc(&anonymous, kSize, VMEM_HOST_ONLY), 0);
    return note_what_is_finished();
  }
  start_storing();
  if (HasFatalFailure()) return;
  late_stores = how != "return";
  note_what_is_finished();
  if (how == "another thread exits") {
    std::thread([] { exit(0); }).join();  // never returns
  }
}

TEST(Exit, ReturningFromMainWhileThreadsStoreLosesNothing) {
  check_runs("ExitChild.DISABLED_Ends", "return", false);
}

TEST(Exit, StoresOfStaticDestructorsReachSharedFiles) {
  check_runs("ExitChild.DISABLED_Ends", "destructors", true);
}

TEST(Exit, AnyThreadMayCallExit) {
  check_runs("ExitChild.DISABLED_Ends", "another thread exits", true);
}

TEST(Exit, StaticDestructorsMayFreeRegions) {
  check_runs("ExitChild.DISABLED_Ends", "destructors free", true);
}

}  // namespace exit_suite
