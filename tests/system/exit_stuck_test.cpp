// exit() beside a device that does not answer: data that is unrelated to the device is in the
// files.
#include <cstring>

#include "core/step.h"
#include "device/paging_host.h"
#include "exit_child.h"
#include "vmem/detail/paging_view.h"

namespace systest {
namespace {

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;

char* above;

// Maps a host-only file below or above an address; the distance depends on existing mappings.
char* map_beside(const char* variable, const char* there, bool below) {
  const std::string path = path_of(variable);
  for (size_t far = 8 * kExitBlock; far < 65536 * kExitBlock; far *= 2) {
    vmem_region_attr what = {};
    what.size = sizeof what;
    what.path = path.c_str();
    what.flags = VMEM_MAP_SHARED | VMEM_HOST_ONLY;
    what.address = const_cast<char*>(below ? there - far : there + far);
    void* p = nullptr;
    EXPECT_EQ(vmem_create(&p, kExitBlock, &what), 0) << vmem_last_error();
    if ((p < there) == below) return static_cast<char*>(p);
    EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
  }
  return nullptr;
}

void on_step(const char* step) {
  if (strcmp(step, "asking.taking_back") == 0)
    for (;;) pause();
}

TEST(ExitStuckChild, DISABLED_BesideWhatDoesNotAnswer) {
  const bool service = path_of("VMEM_TEST_WHAT") == "service";
  // Runs between two turns of the exit work.
  start_device(true, [] { std::atexit([] { above[1] = 6; }); });
  char* const there = map_shared("VMEM_TEST_FILE", 2 * kExitBlock);
  char* const below = map_beside("VMEM_TEST_BELOW", there, true);
  above = map_beside("VMEM_TEST_ABOVE", there, false);
  ASSERT_TRUE(below != nullptr && above != nullptr);
  below[0] = above[0] = 5;
  void* stream = vmem::device::current_sim()->create_stream(0);
  ASSERT_EQ(vmem_acquire(there, kExitBlock, kBoth, 0, stream), 0) << vmem_last_error();
  const auto status = vmem::device::current_sim()->launch(stream, [there](vmem::device::SimKernel& k) {
    if (std::byte* at = k.at(there, 1, true); at != nullptr) *at = std::byte{7};
  });
  ASSERT_TRUE(status.ok() && vmem::device::current_sim()->synchronize(stream).ok());
  log_to_file();
  if (service) {
    struct vmem_kernel* open = nullptr;
    vmem_kernel_view view;
    ASSERT_EQ(vmem_kernel_begin(&open, there + kExitBlock, kExitBlock, kBoth, 0, 0, &view), 0) << vmem_last_error();
    vmem::core::step_hook = on_step;
  } else {
    vmem::device::current_sim()->set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
      static std::atomic<bool> leaving;  // waits for arriving blocks succeed
      if (op == vmem::device::SimOp::issue_out) leaving = true;
      if (op == vmem::device::SimOp::wait && leaving)
        for (;;) pause();
      return vmem::core::Status();
    });
  }
}

class ExitStuck : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "ThreadSanitizer maps at 0 what is asked for outside its ranges, and ends the process";
#endif
  }
  bool run(const char* what) {
    log_ = run_to_exit("ExitStuckChild.DISABLED_BesideWhatDoesNotAnswer", {{"VMEM_TEST_WHAT", what},
                                                                           {"VMEM_TEST_FILE", there_.path()},
                                                                           {"VMEM_TEST_BELOW", below_.path()},
                                                                           {"VMEM_TEST_ABOVE", above_.path()}});
    return log_ != "skip";
  }

  const TempFile there_{2 * kExitBlock}, below_{kExitBlock}, above_{kExitBlock};
  std::string log_;
};

// The thread that serves kernels is in a call that does not return; the device answers other
// threads.
TEST_F(ExitStuck, AThreadThatServesKernelsKeepsNothingElseFromItsFile) {
  if (!run("service")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(below_.read()[0], 5) << log_;
  EXPECT_EQ(above_.read()[0], 5) << log_;
  EXPECT_EQ(there_.read()[0], 7) << log_;
  EXPECT_NE(log_.find("open to kernels were not given back"), std::string::npos) << log_;
}

// Nor does a device that answers no thread. Data stored after exit has given the device up is
// written too.
TEST_F(ExitStuck, ADeviceKeepsNothingFromItsFileThatItHasNot) {
  if (!run("device")) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(below_.read()[0], 5) << log_;
  EXPECT_EQ(above_.read()[0], 5) << log_;
  EXPECT_EQ(above_.read()[1], 6) << log_;
  EXPECT_NE(log_.find("made progress for 30 s"), std::string::npos) << log_;
}

}  // namespace
}  // namespace systest
