// Setting device as a program sets it: which backend it selects, and which call reports it.
#include <cstddef>

#include "sim_support.h"

namespace {

using systest::kBlock;
constexpr size_t kWords = kBlock / sizeof(uint64_t);

class DeviceSetting : public systest::SystemTest {
 protected:
  void TearDown() override {
    SystemTest::TearDown();
    EXPECT_EQ(vmem_set("device", "auto"), 0);
    EXPECT_EQ(vmem_set("device_budget", "32MiB"), 0);
  }
  static void start(const char* device) { configure({{"device", device}, {"device_budget", "32MiB"}}); }
  static uint64_t backend() { return device_stats().backend; }
};

TEST_F(DeviceSetting, SimIsLikeManagedMemoryAndSimHandlesLikePhysicalHandles) {
  for (const bool handles : {false, true}) {
    vmem_shutdown();
    start(handles ? "sim-handles" : "sim");
    if (IsSkipped()) return;
    EXPECT_EQ(backend(), handles ? VMEM_BACKEND_HANDLES : VMEM_BACKEND_MANAGED);
    // A caller with the struct of an older header gets only that struct's fields.
    struct vmem_device_stats old = {};
    old.size = offsetof(struct vmem_device_stats, backend);
    old.backend = 77;
    EXPECT_EQ(vmem_device_stats(0, &old), 0) << vmem_last_error();
    EXPECT_EQ(old.backend, 77u);
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

// On a machine whose GPU supports the size, it is used.
TEST_F(DeviceSetting, BlocksAreAsLargeAsItSays) {
  const auto block_size = [](const char* size) { EXPECT_EQ(vmem_set("device_block_size", size), 0) << size; };
  vmem_shutdown();
  EXPECT_EQ(vmem_set("device_block_size", "3MiB"), -EINVAL);
  EXPECT_EQ(vmem_set("device_block_size", "128MiB"), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("a power of two from 2 MiB to 64 MiB"), std::string::npos)
      << vmem_last_error();
  block_size("64MiB");
  block_size("8MiB");
  start("sim-handles");
  if (IsSkipped()) return block_size("auto");
  {
    vmem::region r(5 * kBlock);  // 2 MiB each: two blocks
    auto* const words = static_cast<volatile uint64_t*>(r.data());
    EXPECT_EQ(vmem_set("device_block_size", "2MiB"), -EBUSY) << "there is a region";
    for (size_t i = 0; i < 5; ++i) words[i * kWords] = i + 1;
    void* const stream = vmem::device::current_sim()->create_stream(0);
    ASSERT_EQ(vmem_acquire(r.data(), 1, VMEM_READ | VMEM_WRITE, 0, stream), 0) << vmem_last_error();
    EXPECT_EQ(r.query().device_bytes, 4 * kBlock) << "a lease has whole blocks";
    EXPECT_EQ(vmem_set("device_budget", "4MiB"), -EINVAL) << "less than a block";
    EXPECT_NE(std::string(vmem_last_error()).find("8 MiB"), std::string::npos) << vmem_last_error();
    EXPECT_EQ(vmem_release(r.data(), 1, stream), 0) << vmem_last_error();
    ASSERT_TRUE(vmem::device::current_sim()->synchronize(stream).ok());
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(words[i * kWords], i + 1);
    vmem::device::current_sim()->destroy_stream(stream);
    EXPECT_EQ(r.query().block_size, 4 * kBlock);
  }
  vmem::attributes wanted;
  wanted.block_size = kBlock;
  EXPECT_EQ(vmem::region(kBlock, wanted).query().block_size, kBlock) << "a region's own wish comes first";
  vmem_shutdown();
  block_size("auto");
}

TEST_F(DeviceSetting, ABodyThatCannotBeHadIsAnErrorThatSaysWhatElseToSet) {
  for (const char* device : {"handles", "managed"}) {
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
