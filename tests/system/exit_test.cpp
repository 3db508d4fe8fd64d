#include "core/log.h"
#include "core/process/at_exit.h"
#include "core/step.h"
#include "system/exit_suite.h"

namespace {

using namespace exit_suite;

std::atomic<const char*> step_to_end_at{nullptr};

// Ends like a signal handler that calls exit() in the middle of a call, with locks held.
TEST(ExitChild, DISABLED_EndsInsideACall) {
  const std::string how = getenv("VMEM_TEST_HOW");
  start_storing();
  if (HasFatalFailure()) return;
  late_stores = false;
  static std::atomic<pthread_t> caller;
  caller = pthread_self();
  static std::atomic<bool> shutdown;
  shutdown = how == "shutdown";
  step_to_end_at = how == "acquire" ? "acquire.started" : "free.quiet";
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, step_to_end_at) != 0 || pthread_self() != caller) return;
    vmem::core::step_hook = nullptr;
    if (!shutdown) note_what_is_finished();
    exit(0);
  };
  // The gate is open, or this thread has closed it and holds the settings too.
  if (how == "free") vmem_free(anonymous);
  if (shutdown) {
    note_what_is_finished();
    vmem_shutdown();
  }
  for (size_t at = 0; how == "acquire"; at = (at + kSize / 4 + kPage) % kSize / kPage * kPage) {
    // some acquires have to wait for memory and start nothing
    char* block = static_cast<char*>(anonymous) + at;
    ASSERT_EQ(vmem_acquire(block, kPage, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(block, kPage, nullptr), 0) << vmem_last_error();
  }
  FAIL() << "the step was never reached";
}

class ExitInsideACall : public testing::TestWithParam<const char*> {};
TEST_P(ExitInsideACall, NeitherCrashesNorHangsNorLoses) {
  check_runs("ExitChild.DISABLED_EndsInsideACall", GetParam(), false);
}
INSTANTIATE_TEST_SUITE_P(Steps, ExitInsideACall, testing::Values("acquire", "free", "shutdown"));

// A thread that blocks forever holds the lock: exit() waits for locks of calls only for a limited
// time.
std::atomic<bool> held{false};
TEST(ExitChild, DISABLED_EndsBesideACallThatNeverReturns) {
  start_storing();
  if (HasFatalFailure()) return;
  late_stores = false;
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "free.quiet") != 0) return;
    held = true;
    for (;;) pause();
  };
  std::thread([] { vmem_free(anonymous); }).detach();
  while (!held) usleep(100);
  std::thread([] { vmem_set("io_depth", "8"); }).detach();  // needs exclusive access
  note_what_is_finished();
}

TEST(Exit, ACallThatNeverReturnsDoesNotHoldItUp) {
  check_runs("ExitChild.DISABLED_EndsBesideACallThatNeverReturns", "", false);
}

// The child has only the thread that forks, and none that does the exit work.
TEST(ExitChild, DISABLED_ForksWhileItExits) {
  start_storing();
  if (HasFatalFailure()) return;
  late_stores = false;
  static std::atomic<bool> writes{false}, forked{false};
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "evict.decided") != 0 || !vmem::core::exiting()) return;
    writes = true;
    while (!forked) usleep(100);
  };
  std::thread([] {
    note_what_is_finished();
    exit(0);
  }).detach();
  while (!writes) usleep(100);
  const int status = systest::status_of_fork([] {
    exit(0);
    return 1;
  });
  if (status != 0) _exit(25);
  forked = true;
  for (;;) pause();
}

TEST(Exit, AChildForkedMeanwhileEndsAtOnce) {
  if (!check_run("ExitChild.DISABLED_ForksWhileItExits", "", false))
    GTEST_SKIP() << "no way to trap absent blocks here";
}

// No lock is held in the log's sink: files are written, and calls by destructors work.
TEST(ExitChild, DISABLED_EndsInASink) {
  const std::string how = getenv("VMEM_TEST_HOW");
  start_storing();
  if (HasFatalFailure()) return;
  late_stores = true;
  vmem_log(
      [](int, const char*, void*) {
        note_what_is_finished();
        exit(0);
      },
      nullptr);
  if (how == "call") {
    vmem::core::step_hook = [](const char* step) {
      if (strcmp(step, "free.quiet") != 0) return;
      vmem::core::step_hook = nullptr;
      vmem::core::log(vmem::core::Level::error, "line");
    };
    void* p = nullptr;
    ASSERT_EQ(vmem_alloc(&p, kPage, VMEM_HOST_ONLY), 0) << vmem_last_error();
    vmem_free(p);
  } else {
    vmem::core::log(vmem::core::Level::error, "line");
  }
  for (;;) pause();
}

class ExitInASink : public testing::TestWithParam<const char*> {};
TEST_P(ExitInASink, IsAnExitLikeAnyOther) {
  check_runs("ExitChild.DISABLED_EndsInASink", GetParam(), true);
}
INSTANTIATE_TEST_SUITE_P(Threads, ExitInASink, testing::Values("call", "thread"));

}  // namespace
