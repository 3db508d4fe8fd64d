// The other half of a test, in a process of its own: this binary again, with one of its disabled tests.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>

#include "common/patience.h"

namespace systest {

// Sanitizers make every access of the test's own loops ten times slower, and every start and end of a process.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

using Environment = std::initializer_list<std::pair<const char*, std::string>>;

// A child of which no test runs has not passed; with VMEM_TEST_MUST_PASS in its environment, neither has one that
// skips.
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

// ASAN_OPTIONS for a child whose end LeakSanitizer must not look at: its thread sets signals up, and where that is
// watched for, it is ended and the child waits for it for ever.
inline std::string without_leak_check() {
  const char* now = getenv("ASAN_OPTIONS");
  return std::string(now == nullptr ? "" : now) + ":detect_leaks=0";
}

inline pid_t start_child(const std::string& test, Environment environment = {}) {
  const pid_t child = fork();
  if (child != 0) return child;
  setenv("VMEM_TEST_CHILD", "1", 1);
  for (const auto& [name, value] : environment) setenv(name, value.c_str(), 1);
  unsetenv("GTEST_OUTPUT");
  execl("/proc/self/exe", "child", ("--gtest_filter=" + test).c_str(), "--gtest_also_run_disabled_tests",
        "--gtest_brief=1", nullptr);
  _exit(98);
}

// The child's wait status; one that has not ended after so many seconds, times patience, hangs: it is killed and the
// status is -1.
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

}  // namespace systest
