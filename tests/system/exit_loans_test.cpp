// exit() while kernels have borrowed blocks that they never return: the CPU's changes to such a
// block are in its file, and later accesses do not wait forever.
#include <cstring>
#include <thread>

#include "core/step.h"
#include "device/paging_host.h"
#include "exit_child.h"
#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_view.h"

namespace systest {
namespace {

using vmem::device::SimKernel;
using vmem::paging::Answer;
using View = vmem::paging::View<vmem::paging::HostAtomics>;

constexpr uint32_t kBlocks = 4;

char* held;
void* stream;
struct vmem_kernel* range;
std::atomic<bool> all_are_pinned{false}, kernel_may_end{false};

// A static object of the program, which is destroyed between two turns of the exit work.
struct Late {
  bool lost = false, ends = false;
  ~Late() {
    if (!lost && !ends) return;
    kernel_may_end = true;
    if (const int rc = ends ? vmem_kernel_end(range, stream) : 0; rc != 0)
      dprintf(STDERR_FILENO, "the end of the range: %d, %s\n", rc, vmem_last_error());
    for (uint32_t b = 0; b < kBlocks; ++b) held[b * kExitBlock + 1] = 9;
  }
} late;

uint64_t device_bytes() {
  vmem_residency where = {};
  where.size = sizeof where;
  EXPECT_EQ(vmem_query(held, kBlocks * kExitBlock, &where), 0) << vmem_last_error();
  return where.device_bytes;
}

// Pins all blocks in place, permanently.
void pin_all(const View& view) {
  vmem::paging::Group<vmem::paging::HostAtomics> group(view.table, UINT64_MAX);
  for (uint32_t b = 0; b < kBlocks; ++b) {
    uint64_t home = 0;
    while (group.try_read(b, &home) != Answer::present) {
      group.request(b);
      std::this_thread::yield();
    }
    if (home == 0) dprintf(STDERR_FILENO, "block %u is not where it was\n", b);
  }
  all_are_pinned = true;
  while (!kernel_may_end) usleep(1000);
}

TEST(ExitLoansChild, DISABLED_KernelsKeepWhatIsLent) {
  const std::string what = path_of("VMEM_TEST_WHAT");
  start_device(true);
  held = map_shared("VMEM_TEST_FILE", kBlocks * kExitBlock);
  for (uint32_t b = 0; b < kBlocks; ++b) held[b * kExitBlock] = static_cast<char>(20 + b);
  ASSERT_EQ(vmem_prefetch(held, kBlocks * kExitBlock, 0, nullptr), 0) << vmem_last_error();
  while (device_bytes() != kBlocks * kExitBlock) usleep(1000);
  ASSERT_EQ(vmem_evict(held, kBlocks * kExitBlock, VMEM_HOST), 0) << vmem_last_error();
  stream = vmem::device::current_sim()->create_stream(0);
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&range, held, kBlocks * kExitBlock, VMEM_READ, 0, kExitBlock, &opaque), 0)
      << vmem_last_error();
  View view;
  memcpy(&view, &opaque, sizeof view);
  const auto status = vmem::device::current_sim()->launch(stream, [view](SimKernel&) { pin_all(view); });
  ASSERT_TRUE(status.ok()) << status.text();
  while (!all_are_pinned) usleep(1000);
  log_to_file();
  late.lost = what == "lost";
  late.ends = what == "ended";
  if (!late.lost) return;
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "asking.taking_back") == 0) vmem::device::current_sim()->lose(0, "as the test wants it");
  };
}

class ExitLoans : public testing::Test {
 protected:
  bool run(const char* what) {
    log_ = run_to_exit("ExitLoansChild.DISABLED_KernelsKeepWhatIsLent",
                       {{"VMEM_TEST_WHAT", what}, {"VMEM_TEST_FILE", file_.path()}});
    bytes_ = file_.read();
    return log_ != "skip";
  }
  void expect_what_the_cpu_stored() {
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(bytes_[b * kExitBlock], 20 + b) << b << "\n" << log_;
  }
  void expect_what_the_destructor_stored() {
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(bytes_[b * kExitBlock + 1], 9) << b << "\n" << log_;
  }

  const TempFile file_{kBlocks * kExitBlock};
  std::string log_;
  std::vector<unsigned char> bytes_;
};

TEST_F(ExitLoans, WhatIsLentForGoodIsWritten) {
  if (!run("kept")) GTEST_SKIP() << "no way to trap absent blocks here";
  expect_what_the_cpu_stored();
  EXPECT_EQ(log_, "") << "nothing was lost, so nothing is said";
}

TEST_F(ExitLoans, TheEndOfTheRangeInADestructorGivesBackWhatIsLent) {
  if (!run("ended")) GTEST_SKIP() << "no way to trap absent blocks here";
  expect_what_the_cpu_stored();
  expect_what_the_destructor_stored();
}

TEST_F(ExitLoans, ADeviceThatIsLostMeanwhileKeepsNothingThatIsLent) {
  if (!run("lost")) GTEST_SKIP() << "no way to trap absent blocks here";
  expect_what_the_cpu_stored();
  expect_what_the_destructor_stored();
}

}  // namespace
}  // namespace systest
