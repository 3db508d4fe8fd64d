// Devices that refuse a step of a move, or are lost at one: what is elsewhere stays whole, what is gone is said to be,
// and nobody waits for ever. On simulated devices.
#include <array>
#include <cstring>

#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;
using vmem::core::Status;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;

class DeviceFailures : public systest::SimTest {
 protected:
  static void refuse(SimOp refused, int error) {
    sim().set_hook([=](SimOp op, int, uintptr_t, size_t) {
      return op == refused ? vmem::core::error(error, "as the test wants it") : Status();
    });
  }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
};

// Neither evicted nor synced nor dropped, and whole: a step before the block's destruction failed on a healthy device.
TEST_F(DeviceFailures, ABlockThatCannotBeHeldOrCopiedOutStaysOnItsDevice) {
  if (IsSkipped()) return;
  for (const SimOp op : {SimOp::hold, SimOp::issue_out}) {
    SCOPED_TRACE(op == SimOp::hold ? "hold" : "copy_out");
    TempFile file(4 * kBlock);
    vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
    auto* words = static_cast<uint64_t*>(r.data());
    store_on_device(words, 7);
    store_on_device(words + 2 * kWords, 9);  // not a neighbour
    refuse(op, ENOMEM);
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_HOST), -ENOMEM);
    EXPECT_NE(said().find("block"), std::string::npos) << said();
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), -ENOMEM);
    EXPECT_EQ(vmem_sync(words, r.size()), -ENOMEM);
    EXPECT_EQ(vmem_free(words), -ENOMEM) << "what is there has not reached the file";
    EXPECT_EQ(r.query().device_bytes, 2 * kBlock);
    EXPECT_EQ(load(words), 7u);
    EXPECT_EQ(load(words + 2 * kWords), 9u);
    words[1] = 8;  // stores are let in as before
    store_on_device(words + 2 * kWords + 1, 10);
    sim().set_hook(nullptr);
    EXPECT_EQ(vmem_sync(words, r.size()), 0) << vmem_last_error();
    EXPECT_EQ(r.query().device_bytes, 2 * kBlock);
    const auto bytes = file.read();
    for (const auto& [at, value] : {std::pair<size_t, uint64_t>{0, 7}, {1, 8}, {2 * kWords, 9}, {2 * kWords + 1, 10}}) {
      uint64_t is = 0;
      memcpy(&is, bytes.data() + at * 8, 8);
      EXPECT_EQ(is, value) << at;
    }
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(load(words + 2 * kWords + 1), 10u);
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
}

// The first of two ranges is held when the second is refused.
TEST_F(DeviceFailures, ARefusalHalfWayLeavesNothingHeld) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  store_on_device(words + 2 * kWords, 9);
  const auto second = reinterpret_cast<uintptr_t>(words + 2 * kWords);
  sim().set_hook([=](SimOp op, int, uintptr_t at, size_t) {
    return op == SimOp::hold && at == second ? vmem::core::error(ENOMEM, "no") : Status();
  });
  EXPECT_EQ(vmem_evict(words, r.size(), VMEM_HOST), -ENOMEM);
  sim().set_hook(nullptr);
  words[1] = 8;
  words[2 * kWords + 1] = 10;
  EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(load(words), 7u);
  EXPECT_EQ(load(words + 1), 8u);
  EXPECT_EQ(load(words + 2 * kWords), 9u);
  EXPECT_EQ(load(words + 2 * kWords + 1), 10u);
}

TEST_F(DeviceFailures, ACopyInThatIsRefusedLeavesTheBlockInHostMemory) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  words[0] = 7;
  words[kWords] = 8;
  ASSERT_EQ(vmem_evict(words + kWords, kBlock, VMEM_SSD), 0) << vmem_last_error();
  refuse(SimOp::issue_in, EIO);
  EXPECT_LT(vmem_acquire(words, 2 * kBlock, kBoth, 0, stream_), 0);
  EXPECT_EQ(vmem_release(words, 2 * kBlock, stream_), -EINVAL) << "nothing is leased";
  EXPECT_EQ(load(words), 7u);
  EXPECT_EQ(load(words + kWords), 8u);
  sim().set_hook(nullptr);
  store_on_device(words, 9);
  EXPECT_EQ(vmem_evict(words, 2 * kBlock, VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(load(words), 9u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

class TwoDevicesFail : public DeviceFailures {
 protected:
  void SetUp() override { start(2); }
};

TEST_F(TwoDevicesFail, ABlockThatCannotGoToAnotherDeviceStaysWhereItIs) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  void* other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  store_on_device(words + kWords, 8);
  refuse(SimOp::migrate, ENOMEM);
  EXPECT_LT(vmem_acquire(words, 2 * kBlock, kBoth, 1, other), 0);
  EXPECT_EQ(vmem_release(words, 2 * kBlock, other), -EINVAL) << "nothing is leased";
  EXPECT_EQ(r.query().device_bytes, 2 * kBlock);
  store_on_device(words + 1, 9);  // on device 0, still
  EXPECT_EQ(load(words), 7u);
  sim().set_hook(nullptr);
  ASSERT_EQ(vmem_acquire(words, 2 * kBlock, kBoth, 1, other), 0) << vmem_last_error();
  launch_store(other, words + kWords, 10);
  ASSERT_EQ(vmem_release(words, 2 * kBlock, other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(load(words), 7u);
  EXPECT_EQ(load(words + 1), 9u);
  EXPECT_EQ(load(words + kWords), 10u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

}  // namespace
