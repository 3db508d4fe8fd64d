// Devices that refuse a step of a transition, or are lost at one. Data elsewhere stays intact, lost
// data is reported, and no thread waits forever. On simulated devices.
#include <array>
#include <cstring>
#include <span>
#include <vector>

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

// The block is neither evicted nor synced nor dropped, and stays intact: a step before its removal
// failed on a healthy device.
TEST_F(DeviceFailures, ABlockThatCannotBeHeldOrCopiedOutStaysOnItsDevice) {
  if (IsSkipped()) return;
  for (const SimOp op : {SimOp::hold, SimOp::issue_out}) {
    SCOPED_TRACE(op == SimOp::hold ? "hold" : "copy_out");
    TempFile file(4 * kBlock);
    vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
    auto* words = static_cast<uint64_t*>(r.data());
    // The driver takes host pages for blocks that the CPU accesses here, and a worker looks for
    // such blocks.
    ASSERT_EQ(vmem_advise(words, r.size(), VMEM_ADVISE_PIN, 0), 0) << vmem_last_error();
    store_on_device(words, 7);
    store_on_device(words + 2 * kWords, 9);  // not an adjacent one
    refuse(op, ENOMEM);
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_HOST), -ENOMEM);
    EXPECT_NE(said().find("block"), std::string::npos) << said();
    EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), -ENOMEM);
    EXPECT_EQ(vmem_sync(words, r.size()), -ENOMEM);
    EXPECT_EQ(vmem_free(words), -ENOMEM) << "what is there has not reached the file";
    EXPECT_EQ(r.query().device_bytes, 2 * kBlock);
    EXPECT_EQ(load(words), 7u);
    EXPECT_EQ(load(words + 2 * kWords), 9u);
    words[1] = 8;  // stores are allowed as before
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
  store_on_device(words + 1, 9);  // still on device 0
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

// Devices with page tables of their own: a block that stays must be mapped again for kernels that
// lease it.
class HandlesFail : public DeviceFailures {
 protected:
  void SetUp() override { start(2, {{"fault_timeout_ms", "300"}}, true); }
  // Refuses a step, and the first attempt to undo the steps before it.
  static void refuse_and_once(SimOp refused, SimOp once) {
    left_ = 1;
    sim().set_hook([=](SimOp op, int, uintptr_t, size_t) {
      return op == refused || (op == once && left_-- > 0) ? vmem::core::error(ENOMEM, "as the test wants it")
                                                          : Status();
    });
  }
  // Also checks that kernels under a lease find the block with 7 in its first word.
  void expect_mapped_again(uint64_t* words) {
    EXPECT_LT(left_, 1) << "nothing was mapped again";
    sim().set_hook(nullptr);
    store_on_device(words + 1, 8);
    ASSERT_TRUE(sim().health(0).ok()) << "a kernel under a lease has lost the device";
    EXPECT_EQ(load(words), 7u);
    EXPECT_EQ(load(words + 1), 8u);
  }
  static uint64_t used(int d) { return device_stats(d).used_bytes; }
  static inline std::atomic<int> left_{0};
};

TEST_F(HandlesFail, ABlockThatIsNotCopiedOutIsMappedWhereItStays) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  refuse_and_once(SimOp::issue_out, SimOp::map);
  EXPECT_EQ(vmem_evict(words, kBlock, VMEM_HOST), -ENOMEM);
  expect_mapped_again(words);
}

TEST_F(HandlesFail, ABlockThatIsNotMovedToAnotherDeviceIsMappedWhereItStays) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  refuse_and_once(SimOp::migrate, SimOp::map);
  EXPECT_LT(vmem_acquire(words, kBlock, kBoth, 1, stream(1)), 0);
  expect_mapped_again(words);
}

// The target device has no memory: nothing has been unmapped yet.
TEST_F(HandlesFail, ABlockIsMappedUntilThereIsMemoryForItElsewhere) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  // its budget is settled
  ASSERT_EQ(vmem_acquire(words + kWords, kBlock, kBoth, 1, other), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(words + kWords, kBlock, other), 0) << vmem_last_error();
  ASSERT_EQ(vmem_evict(words + kWords, kBlock, VMEM_HOST), 0) << vmem_last_error();
  sim().leave_to_others(1, 128 << 20);
  static std::atomic<int> hidden;
  hidden = 0;
  sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
    hidden += op == SimOp::hold ? 1 : 0;
    return Status();
  });
  EXPECT_EQ(vmem_acquire(words, kBlock, kBoth, 1, other), -ENOMEM);
  sim().set_hook(nullptr);
  EXPECT_EQ(hidden, 0);
  sim().leave_to_others(1, 0);
  EXPECT_EQ(load(words), 7u);
}

// The block is made and mapped, and then its copy is refused: nothing would ever make it again.
TEST_F(HandlesFail, ABlockThatDoesNotComeIsUnmappedAndCanComeLater) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  const auto second = reinterpret_cast<uintptr_t>(words + 2 * kWords);
  left_ = 3;
  // Fails to map the second of two ranges, and at first to unmap the first one.
  sim().set_hook([=](SimOp op, int, uintptr_t at, size_t) {
    const bool no = (op == SimOp::map && at == second) || (op == SimOp::hold && left_-- > 0);
    return no ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
  });
  const vmem_range ranges[] = {{words, kBlock, kBoth, 0}, {words + 2 * kWords, kBlock, kBoth, 0}};
  EXPECT_LT(vmem_acquire_ranges(ranges, 2, 0, stream_), 0);
  EXPECT_LT(left_, 1) << "nothing was unmapped again";
  sim().set_hook(nullptr);
  store_on_device(words + 1, 8);
  store_on_device(words + 2 * kWords, 9);
  EXPECT_EQ(load(words), 0u);
  EXPECT_EQ(load(words + 1), 8u);
  EXPECT_EQ(load(words + 2 * kWords), 9u);
}

// A copy fails at its end: the copying device is lost, and the source block stays where it was.
TEST_F(HandlesFail, ABlockWhoseCopyToAnotherDeviceFailsAtItsEndStaysWhereItIs) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t b = 0; b < 4; ++b) store_on_device(words + b * kWords, 7 + b);
  systest::LogLines log;
  refuse(SimOp::send, EIO);
  EXPECT_EQ(vmem_acquire(words, r.size(), kBoth, 1, other), -EIO);
  sim().set_hook(nullptr);
  EXPECT_FALSE(sim().health(1).ok());
  EXPECT_EQ(vmem_release(words, r.size(), other), -EINVAL) << "nothing is leased";
  for (size_t b = 0; b < 4; ++b) store_on_device(words + b * kWords + 1, 8);
  ASSERT_TRUE(sim().health(0).ok()) << "a kernel under a lease has lost the device";
  for (size_t b = 0; b < 4; ++b) {
    EXPECT_EQ(load(words + b * kWords), 7 + b);
    EXPECT_EQ(load(words + b * kWords + 1), 8u);
  }
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

// The second device maps blocks before their copies are issued.
TEST_F(HandlesFail, ACopyInThatIsRefusedBehindItsMappingLeavesTheBlockInHostMemory) {
  if (IsSkipped()) return;
  void* other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t i = 0; i < 2; ++i) words[i * kWords] = 7 + i;
  ASSERT_EQ(vmem_evict(words + kWords, kBlock, VMEM_SSD), 0) << vmem_last_error();
  for (const SimOp op : {SimOp::issue_in, SimOp::map}) {
    refuse(op, EIO);
    EXPECT_LT(vmem_acquire(words, 2 * kBlock, kBoth, 1, other), 0);
    EXPECT_EQ(vmem_release(words, 2 * kBlock, other), -EINVAL) << "nothing is leased";
    sim().set_hook(nullptr);
    EXPECT_EQ(r.query().device_bytes, 0u);
    EXPECT_TRUE(until([] { return used(1) == 0; }));
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(load(words + i * kWords), 7u + i);
  }
  ASSERT_EQ(vmem_acquire(words, 2 * kBlock, kBoth, 1, other), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(words, 2 * kBlock, other), 0);
  ASSERT_EQ(vmem_evict(words, 2 * kBlock, VMEM_SSD), 0) << vmem_last_error();
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(load(words + i * kWords), 7u + i);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

// A kernel may have changed a block that it got before the copy failed.
TEST_F(HandlesFail, ACopyInThatFailsAtItsEndBehindItsMappingLosesOnlyWhatAKernelMayHaveChanged) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t i = 0; i < 4; ++i) words[i * kWords] = 7 + i;
  systest::LogLines log;
  refuse(SimOp::copy_in, EIO);
  const vmem_range ranges[] = {{words, 2 * kBlock, VMEM_READ, 0}, {words + 2 * kWords, kBlock, kBoth, 0}};
  const int acquired = vmem_acquire_ranges(ranges, 2, 1, other);
  EXPECT_TRUE(until([] { return !sim().health(1).ok(); }));
  sim().set_hook(nullptr);
  if (acquired == 0) {
    EXPECT_EQ(vmem_release_ranges(ranges, 2, other), 0) << vmem_last_error();
  }
  const bool lost = bus(words + 2 * kWords);
  EXPECT_EQ(lost, acquired == 0) << "it says so where nobody was let at it";
  for (const size_t i : {0, 1, 3}) EXPECT_EQ(load(words + i * kWords), 7 + i);
  EXPECT_EQ(vmem::stats().lost_blocks, lost ? 1 : 0);
  store_on_device(words, 9);  // on device 0
  EXPECT_EQ(load(words), 9u);
}

// A step of the block's way back is refused, and at that moment the device is lost.
class HandlesFailAndAreLost : public HandlesFail, public ::testing::WithParamInterface<SimOp> {
 protected:
  // Refuses `step` always, and the parameter's step once; at that moment the second device is lost.
  void refuse_and_lose(SimOp step) {
    refused_ = false;
    sim().set_hook([step, way_back = GetParam()](SimOp op, int, uintptr_t, size_t) {
      if (op == step) return vmem::core::error(EIO, "as the test wants it");
      if (op != way_back || refused_.exchange(true)) return Status();
      sim().lose(1, "the test took it away");
      return vmem::core::error(EIO, "as the test wants it");
    });
  }
  // Checks the block with 7 in its first word.
  void expect_on_the_other(uint64_t* words) {
    EXPECT_TRUE(refused_);
    sim().set_hook(nullptr);
    EXPECT_EQ(load(words), 7u);
    store_on_device(words + 1, 8);
    EXPECT_EQ(load(words), 7u);
    EXPECT_EQ(load(words + 1), 8u);
    EXPECT_EQ(vmem_evict(words, kBlock, VMEM_SSD), 0) << vmem_last_error();
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
  systest::LogLines log_;
  static inline std::atomic<bool> refused_{false};
};
INSTANTIATE_TEST_SUITE_P(, HandlesFailAndAreLost, ::testing::Values(SimOp::hold, SimOp::punch),
                         [](const auto& p) { return p.param == SimOp::hold ? "unmapped" : "given_up"; });
TEST_P(HandlesFailAndAreLost, ABlockThatDoesNotComeCanGoToAnotherDevice) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  words[0] = 7;
  refuse_and_lose(SimOp::issue_in);
  EXPECT_LT(vmem_acquire(words, kBlock, kBoth, 1, other), 0);
  expect_on_the_other(words);
}

TEST_P(HandlesFailAndAreLost, ABlockThatDoesNotLeaveCanGoToAnotherDevice) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  words[0] = 7;
  ASSERT_EQ(vmem_evict(words, kBlock, VMEM_SSD), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(words, kBlock, VMEM_READ, 1, other), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(words, kBlock, other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  at_rest(words);
  refuse_and_lose(SimOp::hold_units);
  EXPECT_EQ(vmem_evict(words, kBlock, VMEM_SSD), 0) << vmem_last_error();
  expect_on_the_other(words);
}

// The parameter: page tables of their own.
class FirstDeviceIsLost : public DeviceFailures, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { start(2, {}, GetParam()); }
};

TEST_P(FirstDeviceIsLost, RegionsAndBudgetsAreForTheOther) {
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region before(2 * kBlock);
  store_on_device(static_cast<uint64_t*>(before.data()), 7);
  ASSERT_EQ(vmem_evict(before.data(), before.size(), VMEM_HOST), 0) << vmem_last_error();
  sim().lose(0, "the test took it away");
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 4 * kBlock, 0), 0) << vmem_last_error();
  auto* words = static_cast<uint64_t*>(p);
  EXPECT_EQ(vmem_set("device_budget", "16MiB"), 0) << vmem_last_error();
  ASSERT_EQ(vmem_acquire(words, 4 * kBlock, kBoth, 1, other), 0) << vmem_last_error();
  launch_store(other, words, 9);
  ASSERT_EQ(vmem_release(words, 4 * kBlock, other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  EXPECT_EQ(load(words), 9u);
  EXPECT_EQ(load(static_cast<uint64_t*>(before.data())), 7u);
  EXPECT_EQ(device_stats(1).budget, 8 * kBlock);
  EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
}
INSTANTIATE_TEST_SUITE_P(, FirstDeviceIsLost, ::testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "handles" : "shared"); });

// The device is lost when some block reaches a step of its transition, while others are on theirs:
// to the device, from it, to another device, or written in place. Afterwards each block is right or
// lost, and all calls agree which.
struct LostAt {
  const char* step;
  bool handles;  // page tables of their own
};
void PrintTo(const LostAt& at, std::ostream* os) {
  *os << at.step << (at.handles ? ", handles" : "");
}

class DeviceLostAt : public DeviceFailures, public ::testing::WithParamInterface<LostAt> {
 protected:
  void SetUp() override { start(2, {{"fault_timeout_ms", "2000"}}, GetParam().handles); }
  static void lose_at_step(const char* step) {
    if (std::strcmp(step, at_) != 0 || came_.exchange(true)) return;
    if (resets_) {
      sim().reset("reset by the test");
    } else {
      sim().lose(0, "the test took it away");
    }
  }
  // Blocks 0 and 1 are on device 0 (changed there; equal to the SSD), 2 and 3 in host memory, 4 to
  // 7 on the SSD.
  void prepare(uint64_t* words) {
    for (size_t b = 0; b < 8; ++b) words[b * kWords] = b + 1;
    ASSERT_EQ(vmem_evict(words, 8 * kBlock, VMEM_SSD), 0) << vmem_last_error();
    words[2 * kWords] = 3, words[3 * kWords] = 4;
    store_on_device(words, 51);
    ASSERT_EQ(vmem_acquire(words + kWords, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(words + kWords, kBlock, stream_), 0) << vmem_last_error();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  }
  // Runs everything at once and loses the device during it. Stores the return values in `evicted`,
  // `synced` and `acquired`.
  void everything(uint64_t* words, uint64_t* file, const char* step, bool resets) {
    void* const mine = stream(0);
    void* const other = stream(1);
    at_ = step;
    came_ = false;
    resets_ = resets;
    vmem::core::step_hook.store(&lose_at_step);
    std::array<std::thread, 4> threads{std::thread([&] {
                                         acquired = vmem_acquire(words + 2 * kWords, 4 * kBlock, kBoth, 0, mine);
                                         if (acquired != 0) return;
                                         for (size_t b = 2; b < 6; ++b) {
                                           sim()
                                               .launch(mine,
                                                       [this, at = words + b * kWords, b](vmem::device::SimKernel& k) {
                                                         if (auto* w = reinterpret_cast<uint64_t*>(k.at(at, 8, true));
                                                             w != nullptr) {
                                                           *w = 60 + b;
                                                           stored[b] = true;
                                                         }
                                                       })
                                               .ignore();
                                         }
                                         vmem_release(words + 2 * kWords, 4 * kBlock, mine);
                                       }),
                                       std::thread([&] { evicted = vmem_evict(words, kBlock, VMEM_HOST); }),
                                       std::thread([&] { synced = vmem_sync(file, 2 * kBlock); }), std::thread([&] {
                                         if (vmem_acquire(words + kWords, kBlock, VMEM_READ, 1, other) == 0)
                                           vmem_release(words + kWords, kBlock, other);
                                       })};
    for (std::thread& t : threads) t.join();
    sim().synchronize(mine).ignore();
    sim().synchronize(other).ignore();
    vmem::core::step_hook.store(nullptr);
  }
  int acquired = 1, evicted = 1, synced = 1;
  std::array<std::atomic<bool>, 8> stored{};
  static inline std::atomic<const char*> at_{""};
  static inline std::atomic<bool> came_{false}, resets_{false};
};

TEST_P(DeviceLostAt, EachBlockIsRightOrLostAndAllCallsAgree) {
  if (IsSkipped()) return;
  TempFile data(2 * kBlock);
  vmem::region r(8 * kBlock), f(2 * kBlock, data.path(), 0, VMEM_MAP_SHARED);
  auto *words = static_cast<uint64_t*>(r.data()), *file = static_cast<uint64_t*>(f.data());
  prepare(words);
  store_on_device(file, 101);
  everything(words, file, GetParam().step, false);
  EXPECT_TRUE(came_) << "no block came to " << GetParam().step;
  sim().lose(0, "the test took it away");  // for the steps that are never reached

  // Only data that was on the device alone may be lost, and no old data may appear.
  size_t lost = 0;
  for (size_t b = 0; b < 8; ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    uint64_t* const at = words + b * kWords;
    const int told = vmem_evict(at, kBlock, VMEM_SSD);
    if (bus(at)) {
      ++lost;
      EXPECT_TRUE(b == 0 || (b >= 2 && b < 6 && acquired == 0)) << "what nobody was let at is in host memory";
      EXPECT_EQ(told, -EIO) << vmem_last_error();
      EXPECT_EQ(vmem_sync(at, kBlock), -EIO);
      EXPECT_EQ(vmem_acquire(at, 8, VMEM_READ, VMEM_HOST, nullptr), -EIO);
      EXPECT_EQ(vmem_advise(at, kBlock, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
      EXPECT_EQ(load(at), 0u);
      continue;
    }
    EXPECT_EQ(told, 0) << vmem_last_error();
    EXPECT_EQ(load(at), b == 0 ? 51 : stored[b] ? 60 + b : b + 1);
  }
  // until a call reports the loss, the block may be read where it was
  const int told = vmem_sync(file, 2 * kBlock);
  const bool file_lost = bus(file);
  EXPECT_EQ(told, file_lost ? -EIO : 0) << vmem_last_error();
  if (!file_lost) {
    EXPECT_EQ(load(file), 101u);
  }
  uint64_t written = 0;
  memcpy(&written, data.read().data(), 8);
  EXPECT_TRUE(written == 101 || (file_lost && synced != 0)) << written << ", sync said " << synced;
  EXPECT_EQ(vmem::stats().lost_blocks, lost + file_lost);
  // All other blocks work, and so does the other device.
  void* const other = stream(1);
  for (size_t b = 0; b < 8; ++b) words[b * kWords] = 70 + b;
  ASSERT_EQ(vmem_acquire(words, r.size(), kBoth, 1, other), 0) << vmem_last_error();
  launch_store(other, words + kWords, 80);
  ASSERT_EQ(vmem_release(words, r.size(), other), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(other).ok());
  EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0) << vmem_last_error();
  for (size_t b = 0; b < 8; ++b) EXPECT_EQ(load(words + b * kWords), b == 1 ? 80 : 70 + b);
}

// The same with a reset of all devices. The addresses then belong to nothing, so the test only
// checks what calls return.
TEST_P(DeviceLostAt, AResetIsToldAndHangsNobody) {
  if (IsSkipped()) return;
  TempFile data(2 * kBlock);
  vmem::region host(4 * kBlock, VMEM_HOST_ONLY);
  void *r = nullptr, *f = nullptr;
  ASSERT_EQ(vmem_alloc(&r, 8 * kBlock, 0), 0) << vmem_last_error();
  ASSERT_EQ(vmem_map(&f, 2 * kBlock, data.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  auto *words = static_cast<uint64_t*>(r), *file = static_cast<uint64_t*>(f);
  memset(host.data(), 5, host.size());
  prepare(words);
  store_on_device(file, 101);
  everything(words, file, GetParam().step, true);
  EXPECT_TRUE(came_) << "no block came to " << GetParam().step;
  EXPECT_NE(vmem_acquire(words, kBlock, VMEM_READ, 0, stream_), 0);
  const int rest = vmem_sync(words, 8 * kBlock);
  EXPECT_TRUE(rest == 0 || rest == -EIO) << vmem_last_error();
  const int told = vmem_sync(file, 2 * kBlock);
  EXPECT_TRUE(told == 0 || told == -EIO) << vmem_last_error();
  uint64_t written = 0;
  memcpy(&written, data.read().data(), 8);
  EXPECT_TRUE(written == 101 || (synced != 0 && told != 0)) << written << ", syncs said " << synced << ", " << told;
  // Regions that were never on a device are unaffected.
  host.evict();
  EXPECT_EQ(static_cast<const volatile char*>(host.data())[3 * kBlock], 5);
  for (void* one : {r, f}) {
    const int rc = vmem_free(one);
    EXPECT_TRUE(rc == 0 || rc == -EIO) << vmem_last_error();
    if (rc != 0) {
      EXPECT_EQ(vmem_free(one), 0) << vmem_last_error();
    }
  }
}

constexpr const char* kSteps[] = {"acquire.started",    "device.read",     "device.taking",     "device.preparing",
                                  "device.populate",    "device.prepared", "device.copying_in", "device.issued",
                                  "device.entered",     "device.leaving",  "device.hold",       "device.copy_out",
                                  "device.copying_out", "device.punching", "device.punched",    "device.left",
                                  "device.written",     "device.opened",   "device.migrating",  "device.migrate"};
constexpr const char* kHandlesSteps[] = {
    "acquire.started",  "device.read",       "device.taking",  "device.preparing", "device.populate",
    "device.prepared",  "device.copying_in", "device.issued",  "device.entered",   "device.leaving",
    "device.map",       "device.unmap",      "device.copy_in", "device.copy_out",  "device.copying_out",
    "device.punching",  "device.punch",      "device.punched", "device.left",      "device.written",
    "device.migrating", "device.migrate"};
std::vector<LostAt> at(std::span<const char* const> steps, bool handles) {
  std::vector<LostAt> all;
  for (const char* step : steps) all.push_back({step, handles});
  return all;
}
const auto name_of = [](const auto& p) {
  std::string name = p.param.step;
  name[name.find('.')] = '_';
  return name;
};
INSTANTIATE_TEST_SUITE_P(Steps, DeviceLostAt, ::testing::ValuesIn(at(kSteps, false)), name_of);
INSTANTIATE_TEST_SUITE_P(HandlesSteps, DeviceLostAt, ::testing::ValuesIn(at(kHandlesSteps, true)), name_of);

}  // namespace
