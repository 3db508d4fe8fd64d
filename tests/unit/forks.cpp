// No test forks while other threads are at work, where that may hang: the allocator of GCC 12's AddressSanitizer does
// not survive a fork while another thread is inside it, and a child that uses memory then waits for ever. On a busy
// machine only, and once in many runs: so the fork itself is a failure.
#if defined(__SANITIZE_ADDRESS__)

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "common/patience.h"

namespace {

// Those that sleep are inside nothing.
size_t threads_at_work() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::directory_iterator all("/proc/self/task", ignored);
  return static_cast<size_t>(std::count_if(begin(all), end(all), [](const fs::directory_entry& thread) {
    std::string stat;
    std::getline(std::ifstream(thread.path() / "stat"), stat);
    const size_t name_ends = stat.rfind(')');
    return name_ends != std::string::npos && stat.compare(name_ends + 1, 2, " R") == 0;
  }));
}

void before_fork() {
  // One that was joined just now, or is about to sleep, is seen for a moment more.
  if (!vmem::test::eventually([] { return threads_at_work() <= 1; }, std::chrono::seconds(1)))
    ADD_FAILURE() << "forks beside " << threads_at_work() - 1 << " threads at work: the child may wait for ever";
}

[[maybe_unused]] const bool watched = pthread_atfork(before_fork, nullptr, nullptr) == 0;

}  // namespace

#endif
