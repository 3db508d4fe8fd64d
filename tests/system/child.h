// Runs the other half of a test in its own process: this binary again, with one of its disabled
// tests.
#pragma once

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/patience.h"

// The sanitizers' runtimes have these.
extern "C" {
void __asan_init() __attribute__((weak));
void __tsan_init() __attribute__((weak));
}

namespace systest {

// Sanitizers make the tests' loops slower, and the start and end of processes too. This asks the
// program and not the compiler, because most tests are not compiled with the sanitizer that the
// library has (TESTS_OF in mk/sources.mk).
inline const bool kSanitized = __asan_init != nullptr || __tsan_init != nullptr;

// Whether a child of a process with threads may use memory before it execs. The allocator of GCC
// 12's AddressSanitizer does not survive a fork while another thread is inside it: the child hangs.
inline const bool kForksWell = __asan_init == nullptr;

// Whether such a child may start threads: ThreadSanitizer knows only the threads from before the
// fork.
inline const bool kChildrenStart = !kSanitized;

using Environment = std::initializer_list<std::pair<const char*, std::string>>;

// A child that runs no test has not passed; with VMEM_TEST_MUST_PASS in its environment, neither
// has one that skips.
class ChildRuns : public testing::EmptyTestEventListener {
  void OnTestProgramEnd(const testing::UnitTest& all) override {
    const bool must_pass = getenv("VMEM_TEST_MUST_PASS") != nullptr;
    if (all.test_to_run_count() == 0 || (must_pass && all.successful_test_count() == all.skipped_test_count()))
      _exit(97);
  }
};
[[maybe_unused]] inline const bool child_runs = [] {
  if (getenv("VMEM_TEST_CHILD") != nullptr) testing::UnitTest::GetInstance()->listeners().Append(new ChildRuns);
  return true;
}();

// ASAN_OPTIONS for a child that LeakSanitizer must not check at its end. LeakSanitizer's thread sets
// up signals; where that is watched for, the thread is ended and the child waits for it forever.
inline std::string without_leak_check() {
  const char* now = getenv("ASAN_OPTIONS");
  return std::string(now == nullptr ? "" : now) + ":detect_leaks=0";
}

// The differences of a child from the defaults of start_child().
struct ChildOf {
  std::string program = "/proc/self/exe";
  std::optional<uid_t> user;    // also its group, and its only one; exits with 97 if it cannot be set
  std::optional<int> output{};  // a descriptor
};

// The parent allocates all memory that the child needs before it execs: see kForksWell.
inline pid_t start_child(const std::string& test, Environment environment = {}, const ChildOf& of = {}) {
  std::vector<std::string> words;
  for (const auto& [name, value] : environment) words.push_back(std::string(name) + "=" + value);
  words.emplace_back("VMEM_TEST_CHILD=1");
  const auto given = [&words](const char* variable) {
    return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
      return word.compare(0, word.find('=') + 1, variable, strcspn(variable, "=") + 1) == 0;
    });
  };
  std::vector<char*> variables;
  for (char** v = environ; *v != nullptr; ++v) {
    if (strncmp(*v, "GTEST_OUTPUT=", 13) != 0 && !given(*v)) variables.push_back(*v);
  }
  for (std::string& word : words) variables.push_back(word.data());
  variables.push_back(nullptr);
  const std::string filter = "--gtest_filter=" + test;
  const pid_t child = fork();
  if (child != 0) return child;
  if (of.output && dup2(*of.output, STDOUT_FILENO) < 0) _exit(96);
  if (of.user && (setgroups(0, nullptr) != 0 || setgid(*of.user) != 0 || setuid(*of.user) != 0)) _exit(97);
  execle(of.program.c_str(), "child", filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr,
         variables.data());
  _exit(98);
}

// Forks a child that does not exec, and exits with the return value of `body`.
template <class Body>
pid_t fork_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  return child;
}

// Returns the child's wait status. A child that runs longer than so many seconds, times patience,
// hangs: kills it and returns -1.
inline int wait_for_child(pid_t child, unsigned seconds) {
  int status = 0;
  pid_t ended = 0;
  vmem::test::eventually([&] { return (ended = waitpid(child, &status, WNOHANG)) != 0; }, std::chrono::seconds(seconds),
                         std::chrono::milliseconds(2));
  if (ended == child) return status;
  if (ended < 0) return -1;
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

// Returns the wait status of such a child, whose body may use memory; -1: it hung. Unless
// kForksWell, the child exits with 0 at once, and the test checks only the parent and counts as
// skipped.
template <class Body>
int status_of_fork(const Body& body, unsigned seconds = 60) {
  if (!kForksWell)
    [] { GTEST_SKIP() << "AddressSanitizer does not survive the fork: what the child does is not run"; }();
  const pid_t child = fork_child([&] { return kForksWell ? body() : 0; });
  return child < 0 ? -1 : wait_for_child(child, seconds);
}

}  // namespace systest
