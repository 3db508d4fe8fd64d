// mlockall() and regions larger than the budget.
#include <sys/mman.h>

#include "child.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

class Mlock : public SystemTest, public testing::WithParamInterface<std::tuple<const char*, const char*>> {};

TEST_P(Mlock, RegionsArePagedAllTheSame) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const auto& [when, block] = GetParam();
  const pid_t child = systest::start_child(
      "MlockChild.DISABLED_Locks",
      {{"VMEM_TEST_WHEN", when}, {"VMEM_BLOCK_SIZE", block}, {"VMEM_HOST_BUDGET", "32MiB"}, {"VMEM_DEVICE", "none"}});
  const int status = systest::wait_for_child(child, 120);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "mlockall is not permitted here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "");
}
INSTANTIATE_TEST_SUITE_P(Whens, Mlock,
                         testing::Combine(testing::Values("before", "after", "both"),
                                          testing::Values("4KiB", "64KiB", "2MiB")));

TEST(MlockChild, DISABLED_Locks) {
  const std::string when = getenv("VMEM_TEST_WHEN");
  if (when != "after" && mlockall(MCL_CURRENT | MCL_FUTURE) != 0) _exit(77);
  vmem::region region(96 << 20, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  for (size_t i = 0; i < words.size() / 8; i += 512) words[i] = stamp(i, 1);
  if (when != "before" && mlockall(MCL_CURRENT) != 0 && errno == EPERM) _exit(77);
  for (size_t i = 0; i < words.size(); i += 512) words[i] = stamp(i, 2);
  for (size_t i = 0; i < words.size(); i += 512) ASSERT_EQ(words[i], stamp(i, 2)) << i;
  EXPECT_LE(region.query().host_bytes, size_t{32} << 20);
  ASSERT_EQ(vmem_sync(region.data(), region.size()), 0) << vmem_last_error();
  ASSERT_EQ(vmem_evict(region.data(), region.size(), VMEM_SSD), 0) << vmem_last_error();
  for (size_t i = 0; i < words.size(); i += 512) ASSERT_EQ(words[i], stamp(i, 2)) << i;
}

// Under mlockall() the kernel also populates the empty frame that it should move pages into. A move
// passes leading guard pages before it finds that.
TEST_P(Mlock, BlocksThatBeginWithAGuardPageLeave) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const auto& [when, block] = GetParam();
  const pid_t child = systest::start_child(
      "MlockChild.DISABLED_LocksGuards",
      {{"VMEM_TEST_WHEN", when}, {"VMEM_BLOCK_SIZE", block}, {"VMEM_HOST_BUDGET", "32MiB"}, {"VMEM_DEVICE", "none"}});
  const int status = systest::wait_for_child(child, 120);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no guard pages, or no mlockall here";
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "");
}

TEST(MlockChild, DISABLED_LocksGuards) {
  constexpr int kGuard = 102, kUnguard = 103;  // MADV_GUARD_INSTALL, MADV_GUARD_REMOVE; Linux 6.13
  constexpr size_t kStep = 2 << 20;
  const std::string when = getenv("VMEM_TEST_WHEN");
  if (when != "after" && mlockall(MCL_CURRENT | MCL_FUTURE) != 0) _exit(77);
  vmem::region region(16 << 20, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  auto* const at = static_cast<char*>(region.data());
  for (size_t i = 0; i < words.size(); i += 512) words[i] = stamp(i, 1);
  for (size_t from = 0; from < region.size(); from += kStep) {
    if (munlock(at + from, 4096) != 0 || madvise(at + from, 4096, kGuard) != 0) _exit(77);
  }
  if (when != "before" && mlockall(MCL_CURRENT | MCL_FUTURE) != 0) _exit(77);
  ASSERT_EQ(vmem_evict(at, region.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(region.query().host_bytes, 0u);
  for (size_t i = 0; i < words.size(); i += 512) {
    if (i * 8 % kStep != 0) {
      ASSERT_EQ(words[i], stamp(i, 1)) << i;
    }
  }
  munlockall();
  ASSERT_EQ(madvise(at, region.size(), kUnguard), 0);
  for (size_t i = 0; i < words.size(); i += 512) {
    ASSERT_EQ(words[i], i * 8 % kStep != 0 ? stamp(i, 1) : 0) << i;
  }
}

}  // namespace
