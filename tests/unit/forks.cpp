// No test forks while other threads run, where that may hang: the allocator of GCC 12's AddressSanitizer does not
// survive a fork while another thread is inside it, and a child that uses memory then waits for ever. On a busy machine
// only, and once in many runs: so the fork itself is a failure.
#if defined(__SANITIZE_ADDRESS__)

#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>

#include "common/patience.h"

namespace {

size_t threads() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  return static_cast<size_t>(std::distance(fs::directory_iterator("/proc/self/task", ignored), {}));
}

void before_fork() {
  // One that was joined just now is in the list for a moment more.
  if (!vmem::test::eventually([] { return threads() <= 1; }, std::chrono::seconds(1)))
    ADD_FAILURE() << "forks while " << threads() - 1 << " other threads run: the child may wait for ever";
}

[[maybe_unused]] const bool watched = pthread_atfork(before_fork, nullptr, nullptr) == 0;

}  // namespace

#endif
