// Waits of the fakes of the pager's tests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "common/patience.h"

namespace vmem::pager::test {

// A test that waits for an event that never comes ends with a message instead of hanging.
template <typename Condition>
void wait_or_die(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const char* what,
                 Condition condition) {
  if (changed.wait_for(lock, vmem::test::patiently(std::chrono::seconds(60)), condition)) return;
  fprintf(stderr, "pager_fakes: waited %u s for %s\n", 60 * vmem::test::patience(), what);
  abort();
}

}  // namespace vmem::pager::test
