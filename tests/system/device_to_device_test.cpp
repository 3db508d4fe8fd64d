// Many blocks at once in transition from one device to another. If one is blocked or refused, or a
// device is lost during it, the others arrive, and each is intact on one of the two. On simulated
// devices with page tables of their own.
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "sim_support.h"

namespace {

using systest::kBlock;
using vmem::core::Status;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;
constexpr size_t kBlocks = 24;  // more than the 16 that may be in transition at once

class DeviceToDevice : public systest::SimTest {
 protected:
  void SetUp() override {
    start(2, {{"device_budget", "64MiB"}, {"device_block_size", "2MiB"}, {"peer_spill_percent", "0"}}, true);
    if (!IsSkipped()) other_ = stream(1);
  }
  void TearDown() override {
    vmem_set("peer_spill_percent", "50");
    SimTest::TearDown();
  }
  static uint64_t* word(const vmem::region& r, size_t b) { return static_cast<uint64_t*>(r.data()) + b * kWords; }
  static size_t index(const vmem::region& r, uintptr_t at) {
    return (at - reinterpret_cast<uintptr_t>(r.data())) / kBlock;
  }
  // Changed on device 0 only.
  void fill(const vmem::region& r) {
    ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << said();
    for (size_t b = 0; b < r.size() / kBlock; ++b) launch_store(stream_, word(r, b), 100 + b);
    ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    at_rest(word(r, 0));
  }
  static uint64_t used(int d) { return device_stats(d).used_bytes; }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  static void expect_all(const vmem::region& r) {
    for (size_t b = 0; b < r.size() / kBlock; ++b) EXPECT_EQ(load(word(r, b)), 100 + b) << b;
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
  void* other_ = nullptr;  // a stream of device 1
};

// A thread does not wait for blocks behind its own, however many there are.
TEST_F(DeviceToDevice, OneThatHasArrivedIsThereWhileTheNextIsStuck) {
  if (IsSkipped()) return;
  const vmem::region r(kBlocks * kBlock);
  fill(r);
  std::atomic<bool> later_sent{false}, leased{false}, stuck_long_enough{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    const size_t b = index(r, at);
    if (op == SimOp::send && b == 1) stuck_long_enough = until([&] { return leased.load(); });
    // This block uses the stream of block 0, which therefore has been copied before block 4 begins.
    if (op == SimOp::send && b == 2) later_sent = true;
    if (op == SimOp::migrate && b == 4) until([&] { return later_sent.load(); });
    return Status();
  });
  ASSERT_EQ(vmem_prefetch(r.data(), r.size(), 1, nullptr), 0) << said();
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 1, other_), 0) << said();
  leased = true;
  EXPECT_EQ(vmem_release(r.data(), kBlock, other_), 0) << said();
  EXPECT_TRUE(until([] { return used(0) == 0; }));
  sim().set_hook(nullptr);
  EXPECT_TRUE(stuck_long_enough);
  EXPECT_EQ(used(1), r.size());
  expect_all(r);
}

// Any step of any of them is refused once: that block stays, and comes when it is requested again.
TEST_F(DeviceToDevice, OneThatIsRefusedStaysAndTheOthersArrive) {
  if (IsSkipped()) return;
  const vmem::region r(kBlocks * kBlock);
  for (const SimOp step : {SimOp::hold, SimOp::migrate, SimOp::map}) {
    for (const size_t stays : {size_t{0}, size_t{1}, kBlocks / 2, kBlocks - 1}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(step)) + ", block " + std::to_string(stays));
      fill(r);
      systest::LogLines log;
      std::atomic<bool> refused{false};
      sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
        if (op != step || index(r, at) != stays || refused.exchange(true)) return Status();
        return vmem::core::error(EBUSY, "as the test wants it");  // after ENOMEM a device counts as full
      });
      ASSERT_EQ(vmem_prefetch(r.data(), r.size(), 1, nullptr), 0) << said();
      EXPECT_TRUE(until([] { return used(1) == (kBlocks - 1) * kBlock && used(0) == kBlock; }));
      EXPECT_TRUE(refused);
      sim().set_hook(nullptr);
      ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other_), 0) << said();
      ASSERT_EQ(vmem_release(r.data(), r.size(), other_), 0) << said();
      EXPECT_EQ(used(0), 0u);
      EXPECT_EQ(used(1), r.size());
      expect_all(r);
    }
  }
}

// Refused for want of memory, which makes the device count as full. Blocks there, or moving
// elsewhere, stay intact, and all come when they are requested.
TEST_F(DeviceToDevice, OneThatIsRefusedForWantOfMemoryComesWhenItIsAskedFor) {
  if (IsSkipped()) return;
  const vmem::region r(kBlocks * kBlock);
  for (const SimOp step : {SimOp::hold, SimOp::migrate, SimOp::map}) {
    SCOPED_TRACE(static_cast<int>(step));
    fill(r);
    systest::LogLines log;
    std::atomic<bool> refused{false};
    sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
      if (op != step || index(r, at) != 0 || refused.exchange(true)) return Status();
      return vmem::core::error(ENOMEM, "as the test wants it");
    });
    ASSERT_EQ(vmem_prefetch(r.data(), r.size(), 1, nullptr), 0) << said();
    EXPECT_TRUE(until([&] { return refused.load(); }));
    EXPECT_TRUE(until([&] {
      if (vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other_) != 0) return false;
      return vmem_release(r.data(), r.size(), other_) == 0;
    })) << said();
    sim().set_hook(nullptr);
    EXPECT_EQ(used(0), 0u);
    EXPECT_EQ(used(1), r.size());
    expect_all(r);
  }
}

// If all blocks from one on are refused, the caller gets an error, and the blocks before have
// arrived.
TEST_F(DeviceToDevice, WhereThereIsNoMemoryForTheRestThatStays) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  const vmem::region r(kBlocks * kBlock);
  constexpr size_t kFit = 10;
  fill(r);
  systest::LogLines log;
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    return op == SimOp::migrate && index(r, at) >= kFit ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
  });
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other_), -ENOMEM);
  EXPECT_TRUE(until([] { return used(1) == kFit * kBlock && used(0) == (kBlocks - kFit) * kBlock; }));
  sim().set_hook(nullptr);
  EXPECT_TRUE(until([&] {
    if (vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other_) != 0) return false;
    return vmem_release(r.data(), r.size(), other_) == 0;
  })) << said();
  EXPECT_EQ(used(1), r.size());
  expect_all(r);
}

// Calls made when the first blocks have arrived, one is blocked, and others have not begun.
TEST_F(DeviceToDevice, CallsThatComeMeanwhileWaitForThoseThatTheyNeed) {
  if (IsSkipped()) return;
  enum Call { evict, host, sync, free, dropped, lower, back, store, ended };
  for (int call = evict; call != ended; ++call) {
    SCOPED_TRACE(call);
    vmem::region r(kBlocks * kBlock);
    fill(r);
    std::atomic<bool> go{false}, stuck{false};
    sim().set_hook([&, begin = reinterpret_cast<uintptr_t>(r.data())](SimOp op, int, uintptr_t at, size_t) {
      if (op != SimOp::send || at != begin + kBlocks / 2 * kBlock) return Status();
      stuck = true;
      until([&] { return go.load(); });
      return Status();
    });
    ASSERT_EQ(vmem_prefetch(r.data(), r.size(), 1, nullptr), 0) << said();
    ASSERT_TRUE(until([&] { return stuck.load(); }));
    const size_t half = r.size() / 2;
    auto* const second = static_cast<char*>(r.data()) + half;
    const auto make_call = [&] {
      switch (call) {
        case evict:
          return vmem_evict(r.data(), r.size(), VMEM_SSD);
        case host:
          return vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr);
        case sync:
          return vmem_sync(r.data(), r.size());
        case dropped:
          return vmem_advise(second, half, VMEM_ADVISE_DONT_NEED, 0);
        case lower:
          return vmem_set("device_budget", "16MiB");
        case back: {
          const int rc = vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_);
          return rc != 0 ? rc : vmem_release(r.data(), r.size(), stream_);
        }
        case store:
          *word(r, kBlocks - 1) = 100 + kBlocks - 1;
          return 0;
        default:
          r = vmem::region();
          return 0;
      }
    };
    aside([&] { EXPECT_EQ(make_call(), 0) << said(); });
    usleep(20000);  // enough for a call that does not wait
    go = true;
    join();
    sim().set_hook(nullptr);
    if (call == lower) {
      EXPECT_TRUE(until([] { return used(0) <= 16u << 20 && used(1) <= 16u << 20; }));
    }
    ASSERT_EQ(vmem_set("device_budget", "64MiB"), 0) << said();
    if (call == dropped) {
      EXPECT_EQ(load(word(r, 0)), 100u);
      EXPECT_EQ(load(word(r, kBlocks / 2)), 0u);
    } else if (call != free) {
      expect_all(r);
    }
    r = vmem::region();
    EXPECT_EQ(used(0), 0u);
    EXPECT_EQ(used(1), 0u);
  }
}

TEST_F(DeviceToDevice, ShutdownWaitsForThoseThatAreUnderWay) {
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kBlocks * kBlock, 0), 0) << said();
  ASSERT_EQ(vmem_acquire(p, kBlocks * kBlock, kBoth, 0, stream_), 0) << said();
  ASSERT_EQ(vmem_release(p, kBlocks * kBlock, stream_), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  std::atomic<bool> go{false}, stuck{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op != SimOp::send || at != reinterpret_cast<uintptr_t>(p) + kBlock) return Status();
    stuck = true;
    until([&] { return go.load(); });
    return Status();
  });
  ASSERT_EQ(vmem_prefetch(p, kBlocks * kBlock, 1, nullptr), 0) << said();
  ASSERT_TRUE(until([&] { return stuck.load(); }));
  aside([] { vmem_shutdown(); });
  usleep(20000);  // enough for a call that does not wait
  go = true;
  join();
  EXPECT_EQ(vmem::device::current_sim(), nullptr);
}

// Which device is lost, and at which step of which block.
struct Loss {
  int device;
  SimOp step;
  size_t block;
};
void PrintTo(const Loss& loss, std::ostream* os) {
  *os << "device " << loss.device << ", step " << static_cast<int>(loss.step) << ", block " << loss.block;
}
class DeviceToDeviceLoss : public DeviceToDevice, public ::testing::WithParamInterface<Loss> {};

// Each block is right, or was only on the lost device, which calls report; the other device
// continues.
TEST_P(DeviceToDeviceLoss, LeavesEachWholeOrSaidToBeLost) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  const auto [device, step, block] = GetParam();
  const vmem::region r(kBlocks * kBlock);
  fill(r);
  systest::LogLines log;
  std::atomic<bool> lost{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op == step && index(r, at) == block && !lost.exchange(true)) sim().lose(device, "lost by the test");
    return Status();
  });
  // If the last block had begun to leave device 0, all may have come.
  const int rc = vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other_);
  if (rc == 0) {
    EXPECT_EQ(device, 0);
    EXPECT_EQ(vmem_release(r.data(), r.size(), other_), 0) << said();
  } else {
    EXPECT_EQ(rc, -EIO);
  }
  EXPECT_TRUE(lost);
  sim().set_hook(nullptr);
  const int written = vmem_sync(r.data(), r.size());
  size_t gone = 0;
  for (size_t b = 0; b < kBlocks; ++b) {
    if (bus(word(r, b))) {
      ++gone;
    } else {
      EXPECT_EQ(load(word(r, b)), 100 + b) << b;
    }
  }
  EXPECT_EQ(vmem::stats().lost_blocks, gone);
  EXPECT_EQ(written, gone == 0 ? 0 : -EIO);
  if (rc == 0) {
    EXPECT_EQ(gone, 0u);
  }
  ASSERT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), 0) << said();
  void* const s = device == 0 ? other_ : stream_;
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 1 - device, s), 0) << said();
  ASSERT_EQ(vmem_release(r.data(), r.size(), s), 0) << said();
  EXPECT_EQ(used(1 - device), r.size());
}
std::vector<Loss> losses() {
  std::vector<Loss> all;
  for (const int device : {0, 1})
    for (const SimOp step : {SimOp::hold, SimOp::migrate, SimOp::send, SimOp::map})
      for (const size_t block : {size_t{0}, size_t{1}, size_t{16}, kBlocks - 1}) all.push_back({device, step, block});
  return all;
}
INSTANTIATE_TEST_SUITE_P(At, DeviceToDeviceLoss, ::testing::ValuesIn(losses()), [](const auto& i) {
  return "device" + std::to_string(i.param.device) + "_step" + std::to_string(static_cast<int>(i.param.step)) +
         "_block" + std::to_string(i.param.block);
});

}  // namespace
