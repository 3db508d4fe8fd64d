// Makes a fork a test failure if other threads are at work and the fork could hang. GCC 12's
// AddressSanitizer does not survive a fork while another thread is inside its allocator: a child
// that uses memory then waits for ever. That happens rarely, and only on a busy machine; so the
// fork itself is the failure.
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

// Sleeping threads are not in the allocator.
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
  // A thread that was just joined, or is about to sleep, may still count for a moment.
  if (!vmem::test::eventually([] { return threads_at_work() <= 1; }, std::chrono::seconds(1)))
    ADD_FAILURE() << "forks beside " << threads_at_work() - 1 << " threads at work: the child may wait for ever";
}

[[maybe_unused]] const bool watched = pthread_atfork(before_fork, nullptr, nullptr) == 0;

}  // namespace

#endif
