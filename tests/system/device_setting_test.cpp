// Setting device, as a program sets it: which body it gets, and who says so.
#include <cstddef>

#include "sim_support.h"

namespace {

using systest::kBlock;

class DeviceSetting : public systest::SystemTest {
 protected:
  void TearDown() override {
    SystemTest::TearDown();
    EXPECT_EQ(vmem_set("device", "auto"), 0);
    EXPECT_EQ(vmem_set("device_budget", "32MiB"), 0);
  }
  static void start(const char* device) { configure({{"device", device}, {"device_budget", "32MiB"}}); }
  static uint64_t body() {
    struct vmem_device_stats s = {};
    s.size = sizeof s;
    EXPECT_EQ(vmem_device_stats(0, &s), 0) << vmem_last_error();
    return s.body;
  }
};

TEST_F(DeviceSetting, SimIsLikeManagedMemoryAndSimHandlesLikePhysicalHandles) {
  for (const bool handles : {false, true}) {
    vmem_shutdown();
    start(handles ? "sim-handles" : "sim");
    if (IsSkipped()) return;
    EXPECT_EQ(body(), handles ? VMEM_BODY_HANDLES : VMEM_BODY_MANAGED);
    // Who asks with the struct of an older header is answered what that has.
    struct vmem_device_stats old = {};
    old.size = offsetof(struct vmem_device_stats, body);
    old.body = 77;
    EXPECT_EQ(vmem_device_stats(0, &old), 0) << vmem_last_error();
    EXPECT_EQ(old.body, 77u);
    vmem::region r(4 * kBlock);
    auto* const words = static_cast<volatile uint64_t*>(r.data());
    words[0] = 7;
    ASSERT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 0, nullptr), 0) << vmem_last_error();
    EXPECT_EQ(words[0], 7u);
    EXPECT_EQ(r.query().device_bytes, kBlock);
    ASSERT_EQ(vmem_release(r.data(), kBlock, nullptr), 0) << vmem_last_error();
    words[0] = 8;
    EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(words[0], 8u);
  }
}

// On a machine with a GPU that has it, it is had.
TEST_F(DeviceSetting, ABodyThatCannotBeHadIsAnErrorThatSaysWhatElseToSet) {
  for (const char* device : {"handles", "managed", "cuda"}) {
    SCOPED_TRACE(device);
    vmem_shutdown();
    ASSERT_EQ(vmem_set("device", device), 0) << vmem_last_error();
    const int rc = vmem_init();
    if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) GTEST_SKIP() << vmem_last_error();
    if (rc == 0) continue;
    EXPECT_EQ(rc, -ENODEV);
    const std::string said = vmem_last_error();
    EXPECT_NE(said.find(std::string("device is ") + device), std::string::npos) << said;
    ASSERT_EQ(vmem_set("device", "auto"), 0) << vmem_last_error();
    EXPECT_EQ(vmem_init(), 0) << "nothing is left behind: " << vmem_last_error();
  }
}

}  // namespace
