// Between two turns of the exit work, a device's context goes away with the data that only the
// device has. Data that the file has by then is not lost, and lost data is reported.
#include <cstring>
#include <thread>

#include "core/step.h"
#include "exit_child.h"

namespace systest {
namespace {

using vmem::device::SimKernel;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;

char* held;
void* stream;

void store_there(int value) {
  const auto status = vmem::device::current_sim()->launch(stream, [value](SimKernel& k) {
    if (std::byte* at = k.at(held, 1, true); at != nullptr) *at = static_cast<std::byte>(value);
  });
  if (!status.ok() || !vmem::device::current_sim()->synchronize(stream).ok()) dprintf(STDERR_FILENO, "no kernel\n");
}

void lose_context() {
  vmem::device::current_sim()->reset("its context was destroyed");
}

void say(const char* call, int answer) {
  dprintf(STDERR_FILENO, "%s: %d\n", call, answer);
}

// Makes an acquire after the first turn's last copy, that of a leased block, and before that copy
// is written.
class LateLease {
 public:
  static void on_step(const char* step) {
    if (strcmp(step, "exit.streams") == 0) last_ = true;
    if (!last_ || strcmp(step, "device.written") != 0 || begun_.exchange(true)) return;
    acquirer_ = std::thread([] { say("acquire", vmem_acquire(held, 2 * kExitBlock, kBoth, 0, stream)); });
    std::thread([] {  // a thread of the library makes no calls at exit
      struct vmem_device_stats stats = {};
      for (stats.size = sizeof stats; stats.leased_bytes < 2 * kExitBlock; usleep(1000)) vmem_device_stats(0, &stats);
    })
        .join();
  }
  static void join() { acquirer_.join(); }

 private:
  static inline std::atomic<bool> last_, begun_;
  static inline std::thread acquirer_;
};

void between() {
  const std::string what = path_of("VMEM_TEST_WHAT");
  if (what == "late lease") {
    LateLease::join();
    store_there(9);
  } else if (what == "cpu store") {
    held[0] = 9;
  } else if (what == "kernel, release") {
    store_there(9);
    say("release", vmem_release(held, kExitBlock, stream));
  }
  lose_context();
  if (what == "sync") {
    say("sync", vmem_sync(held, kExitBlock));
  } else if (what == "release") {
    say("release", vmem_release(held, kExitBlock, stream));
  } else if (what == "release, free") {
    say("release", vmem_release(held, kExitBlock, stream));
    say("free", vmem_free(held));
  }
}

TEST(ExitContextChild, DISABLED_LosesItsContext) {
  start_device(path_of("VMEM_TEST_HOW") == "handles", [] { std::atexit(between); });
  held = map_shared("VMEM_TEST_FILE", 4 * kExitBlock);
  stream = vmem::device::current_sim()->create_stream(0);
  // The second block must be present already: if it arrived while the first is written, the first
  // would be written again.
  ASSERT_EQ(vmem_acquire(held, 2 * kExitBlock, kBoth, 0, stream), 0) << vmem_last_error();
  store_there(7);
  ASSERT_EQ(vmem_release(held + kExitBlock, kExitBlock, stream), 0) << vmem_last_error();
  ASSERT_TRUE(vmem::device::current_sim()->synchronize(stream).ok());
  log_to_file();
  if (path_of("VMEM_TEST_WHAT") == "late lease") vmem::core::step_hook = LateLease::on_step;
}

class ExitContext : public testing::TestWithParam<const char*> {
 protected:
  // Runs the child. Returns false if it cannot.
  bool run(const char* what) {
    log_ = run_to_exit("ExitContextChild.DISABLED_LosesItsContext",
                       {{"VMEM_TEST_HOW", GetParam()}, {"VMEM_TEST_WHAT", what}, {"VMEM_TEST_FILE", file_.path()}});
    return log_ != "skip";
  }
  bool logged(const char* words) const { return log_.find(words) != std::string::npos; }
  int in_file() const { return file_.read()[0]; }

  const TempFile file_{4 * kExitBlock};
  std::string log_;
};

TEST_P(ExitContext, ASyncDoesNotAnswerForWhatKernelsMayHaveStoredSince) {
  if (!run("sync")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(in_file(), 7);
  EXPECT_EQ(log_, "sync: " + std::to_string(-EBUSY) + "\n");
}

TEST_P(ExitContext, WhatIsLeasedWhileTheFileIsWrittenIsNotTakenForWritten) {
  if (!run("late lease")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_TRUE(logged("acquire: 0\n")) << log_;
  EXPECT_TRUE(logged("changes of a shared file did not reach it")) << log_;
}

// Only if the CPU and kernels see the same memory: with page tables of their own, exit waits for
// the lease's end.
TEST_P(ExitContext, WhatTheCpuStoresLaterIsSaidToBeLost) {
  if (GetParam() == std::string("handles")) GTEST_SKIP() << "the CPU cannot store under the lease";
  if (!run("cpu store")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_TRUE(logged("changes of a shared file did not reach it")) << log_;
}

TEST_P(ExitContext, WhatAKernelStoresLaterAndIsReleasedIsSaidToBeLost) {
  if (!run("kernel, release")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_TRUE(logged("release: 0\n")) << log_;
  EXPECT_TRUE(logged("the contents are lost")) << log_;
}

TEST_P(ExitContext, NothingIsSaidOfWhatTheFileHasWhenItsLeaseGoesLate) {
  if (!run("release")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(in_file(), 7);
  EXPECT_EQ(log_, "release: 0\n");
}

TEST_P(ExitContext, NorWhenItsRegionGoesLate) {
  if (!run("release, free")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(in_file(), 7);
  EXPECT_EQ(log_, "release: 0\nfree: 0\n");
}
INSTANTIATE_TEST_SUITE_P(Backends, ExitContext, testing::Values("managed", "handles"));

}  // namespace
}  // namespace systest
