// How blocks move to and from devices with page tables of their own, and which steps overlap. On
// simulated devices.
#include <algorithm>
#include <fstream>
#include <mutex>

#include "sim_support.h"

namespace {

using systest::kBlock;
using vmem::core::Status;
using vmem::device::SimOp;

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;
constexpr size_t kWords = kBlock / 8;

class DeviceMoves : public systest::SimTest {
 protected:
  void SetUp() override { start(1, {}, true); }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  static uint64_t* words(const vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  static bool asleep(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string line;
    std::getline(file, line);
    const size_t name = line.rfind(") ");
    return name != std::string::npos && line[name + 2] == 'S';
  }
  // Blocks 0 to n - 1 are on the device, and contain 100 + their number.
  void fill(vmem::region& r, size_t n) {
    for (size_t b = 0; b < n; ++b) store_on_device(words(r) + b * kWords, 100 + b);
    ASSERT_EQ(r.query().device_bytes, n * kBlock);
  }
};

// Blocks leave because a call waits for that, or because workers bring them away.
enum class By : uint8_t { evict, prefetch };

class DeviceLeaves : public DeviceMoves, public testing::WithParamInterface<By> {
 protected:
  int leave(vmem::region& r) {
    return GetParam() == By::evict ? vmem_evict(r.data(), r.size(), VMEM_HOST)
                                   : vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr);
  }
};
INSTANTIATE_TEST_SUITE_P(By, DeviceLeaves, testing::Values(By::evict, By::prefetch),
                         [](const auto& p) { return p.param == By::evict ? "evict" : "prefetch"; });

// The first copy ends only after the second block has been unmapped.
TEST_P(DeviceLeaves, ABlockIsUnmappedWhileTheOneBeforeItIsCopied) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  fill(r, 4);
  const auto first = reinterpret_cast<uintptr_t>(words(r)), second = first + kBlock;
  std::mutex mutex;
  std::vector<SimOp> order;
  std::atomic<bool> unmapped{false}, in_time{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op == SimOp::hold || op == SimOp::issue_out) {
      std::lock_guard lock(mutex);
      order.push_back(op);
    }
    if (op == SimOp::hold && at == second) unmapped = true;
    if (op == SimOp::copy_out && at == first) in_time = until([&] { return unmapped.load(); });
    return Status();
  });
  EXPECT_EQ(leave(r), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 0; }));
  sim().set_hook(nullptr);
  EXPECT_TRUE(in_time);
  ASSERT_EQ(std::count(order.begin(), order.end(), SimOp::hold), 4);
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % 2 == 0 ? SimOp::hold : SimOp::issue_out) << i;
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
}

// The first copy ends only after the last has been issued. The last ends only after the first
// block's memory has been returned.
TEST_P(DeviceLeaves, ABlockIsGivenBackWhileTheOnesAfterItAreCopied) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  fill(r, 4);
  const auto first = reinterpret_cast<uintptr_t>(words(r)), last = first + 3 * kBlock;
  std::atomic<bool> issued{false}, back{false}, beside{false}, in_time{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op == SimOp::issue_out && at == last) issued = true;
    if (op == SimOp::copy_out && at == first) beside = until([&] { return issued.load(); });
    if (op == SimOp::unmapped && at == first) back = true;
    if (op == SimOp::copy_out && at == last) in_time = until([&] { return back.load(); });
    return Status();
  });
  EXPECT_EQ(leave(r), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 0; }));
  sim().set_hook(nullptr);
  EXPECT_TRUE(beside);
  EXPECT_TRUE(in_time);
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
}

// The first block is refused, and mapped again only after the memory of the others has been
// returned.
TEST_P(DeviceLeaves, ABlockThatCannotBeMappedAgainDoesNotHoldTheOthers) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  fill(r, 4);
  const auto first = reinterpret_cast<uintptr_t>(words(r));
  std::atomic<unsigned> back{0};
  std::atomic<bool> may_be_mapped{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op == SimOp::unmapped && at != first) ++back;
    const bool refused = at == first && (op == SimOp::issue_out || (op == SimOp::map && !may_be_mapped));
    return refused ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
  });
  aside([&] { EXPECT_EQ(leave(r), GetParam() == By::evict ? -ENOMEM : 0); });
  EXPECT_TRUE(until([&] { return back == 3; }));
  may_be_mapped = true;
  join();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == kBlock; }));
  sim().set_hook(nullptr);
  store_on_device(words(r) + 1, 7);  // it is mapped there
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
  EXPECT_EQ(load(words(r) + 1), 7u);
}

// A refused wait says nothing about the copy, which continues. The copy ends only after the wait
// has been retried, or when the library does something with the block too early.
class RefusedWaits : public DeviceMoves {
 protected:
  static constexpr unsigned kRefused = 3;
  // `copy`: the operation that is waited for. `hasty`: operations that must not happen during the
  // wait.
  void refuse_waits(SimOp copy, std::initializer_list<SimOp> hasty) {
    sim().set_hook([this, copy, hasty = std::vector<SimOp>(hasty)](SimOp op, int, uintptr_t, size_t) {
      if (op == copy) until([&] { return waits_ >= kRefused || early_ != 0; });
      if (waits_ != 0 && waits_ < kRefused && std::count(hasty.begin(), hasty.end(), op) != 0) ++early_;
      if (op == SimOp::wait && waits_ < kRefused) {
        ++waits_;
        return vmem::core::error(EIO, "as the test wants it");
      }
      return Status();
    });
  }
  std::atomic<unsigned> waits_{0}, early_{0};
};

TEST_F(RefusedWaits, WhatComesStaysWhileAKernelHasIt) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  fill(r, 1);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
  refuse_waits(SimOp::copy_in, {SimOp::hold, SimOp::unmapped});
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  launch_store(stream_, words(r) + 1, 7);
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return waits_ >= kRefused || early_ != 0; }));
  EXPECT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(early_, 0u);
  sim().set_hook(nullptr);
  EXPECT_EQ(load(words(r)), 100u);
  EXPECT_EQ(load(words(r) + 1), 7u);
  EXPECT_EQ(vmem::stats().lost_blocks, 0u);
}

// A copy whose waits always fail has ended when all the device's work has.
class NeverTold : public RefusedWaits {
 protected:
  // Runs `what` while every wait is refused.
  void ends(const std::function<void()>& what) {
    static std::atomic<bool> refused;
    refused = true;
    sim().set_hook([](SimOp op, int, uintptr_t, size_t) {
      return op == SimOp::wait && refused ? vmem::core::error(EIO, "as the test wants it") : Status();
    });
    std::atomic<bool> over{false};
    aside([&] {
      what();
      over = true;
    });
    EXPECT_TRUE(until([&] { return over.load(); })) << "it waits for ever";
    refused = false;
    join();
    sim().set_hook(nullptr);
  }
};

TEST_F(NeverTold, WhatLeavesEndsWithTheDevicesWork) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  fill(r, 1);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
  EXPECT_TRUE(sim().synchronize(stream_).ok());
  ends([&] { EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error(); });
  EXPECT_EQ(load(words(r)), 100u);
}

TEST_F(NeverTold, WhatTheCpuIsShownEndsWithTheDevicesWork) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  fill(r, 1);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  ends([&] { EXPECT_EQ(load(words(r)), 100u); });
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
}

TEST_F(NeverTold, WhatGoesToAnotherDeviceEndsWithTheDevicesWork) {
  vmem_shutdown();
  start(2, {}, true);
  if (IsSkipped()) return;
  void* const other = stream(1);
  vmem::region r(kBlock);
  fill(r, 1);
  ends([&] { EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other), 0) << vmem_last_error(); });
  EXPECT_EQ(vmem_release(r.data(), r.size(), other), 0) << vmem_last_error();
  EXPECT_EQ(load(words(r)), 100u);
}

// The advice comes when a block that was in host memory moves from one device to another, and is
// mapped for neither.
TEST_F(DeviceMoves, AdviceForABlockThatHasComeMeanwhileAndMovesIsFollowed) {
  vmem_shutdown();
  start(3, {}, true);
  if (IsSkipped()) return;
  void* const other = stream(1);
  void* const third = stream(2);
  vmem::region r(kBlock);
  words(r)[0] = 100;
  stop_at("advise.device");
  aside([&] { EXPECT_EQ(vmem_advise(r.data(), kBlock, VMEM_ADVISE_SET_ACCESSED_BY, 2), 0) << vmem_last_error(); });
  ASSERT_TRUE(stopped());
  ASSERT_EQ(vmem_acquire(r.data(), kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), kBlock, stream_), 0) << vmem_last_error();
  std::atomic<bool> advised{false};
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op == SimOp::advise) advised = true;
    if (op != SimOp::migrate) return Status();
    go_on();
    EXPECT_TRUE(until([&] { return advised.load(); }));
    return Status();
  });
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 1, other), 0) << vmem_last_error();
  join();
  sim().set_hook(nullptr);
  std::atomic<uint64_t> found{0};
  const Status launched = sim().launch(third, [&, at = words(r)](vmem::device::SimKernel& k) {
    if (const auto* w = reinterpret_cast<const uint64_t*>(k.at(at, 8, false)); w != nullptr) found = *w;
  });
  EXPECT_TRUE(launched.ok());
  EXPECT_TRUE(sim().synchronize(third).ok());
  EXPECT_EQ(found, 100u);
  EXPECT_EQ(vmem_release(r.data(), kBlock, other), 0) << vmem_last_error();
}

TEST_F(RefusedWaits, WhatLeavesKeepsItsFrameUntilItsCopyHasEnded) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  fill(r, 1);
  refuse_waits(SimOp::copy_out, {SimOp::map});
  // Use a worker: a call would only poll the copy, which here ends after enough refused waits or a
  // time-out.
  ASSERT_EQ(vmem_prefetch(r.data(), r.size(), VMEM_HOST, nullptr), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 0; }));
  EXPECT_EQ(waits_, kRefused);
  EXPECT_EQ(early_, 0u);
  sim().set_hook(nullptr);
  EXPECT_EQ(load(words(r)), 100u);
}

// The same for a copy that the CPU reads.
TEST_F(RefusedWaits, WhatIsShownToTheCpuIsWhatWasCopied) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  fill(r, 1);
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  refuse_waits(SimOp::copy_out, {});
  EXPECT_EQ(load(words(r)), 100u);
  EXPECT_EQ(waits_, kRefused);
  sim().set_hook(nullptr);
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << vmem_last_error();
}

TEST_F(DeviceMoves, OfABatchThatLeavesTheBlockStaysThatIsRefused) {
  if (IsSkipped()) return;
  for (const SimOp refused : {SimOp::hold, SimOp::issue_out}) {
    vmem::region r(4 * kBlock);
    fill(r, 4);
    const auto third = reinterpret_cast<uintptr_t>(words(r) + 2 * kWords);
    sim().set_hook([=](SimOp op, int, uintptr_t at, size_t) {
      return op == refused && at == third ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
    });
    EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), -ENOMEM);
    EXPECT_EQ(r.query().device_bytes, kBlock);
    sim().set_hook(nullptr);
    store_on_device(words(r) + 2 * kWords + 1, 7);  // it is mapped there
    EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
    for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
    EXPECT_EQ(load(words(r) + 2 * kWords + 1), 7u);
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
}

// A block that cannot come gives up its device memory, however often that is refused. Otherwise it
// could never be made there again.
TEST_F(DeviceMoves, WhatCannotComeGivesItsMemoryUpAndComesWhenItCan) {
  if (IsSkipped()) return;
  const vmem::region r(kBlock);
  *words(r) = 100;
  std::atomic<int> issues{0}, refusals{0};
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t) {
    const bool refused = (op == SimOp::issue_in && issues++ == 0) || (op == SimOp::punch && refusals++ < 3);
    return refused ? vmem::core::error(EIO, "as the test wants it") : Status();
  });
  ASSERT_EQ(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0) << said();
  launch_store(stream_, words(r) + 1, 7);
  ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
  EXPECT_TRUE(sim().synchronize(stream_).ok());
  sim().set_hook(nullptr);
  EXPECT_GT(refusals, 3);
  EXPECT_EQ(load(words(r)), 100u);
  EXPECT_EQ(load(words(r) + 1), 7u);
}

class LargeBlocksMove : public DeviceMoves {
 protected:
  void SetUp() override {
    start(1, {{"device_block_size", "8MiB"}, {"device_budget", "64MiB"}, {"host_budget", "256MiB"}}, true);
  }
  void TearDown() override {
    DeviceMoves::TearDown();
    vmem_set("device_block_size", "2MiB");  // the default, for later tests in this process
  }
};

// Four blocks move together. The copy of the fourth ends only after that of the fifth has been
// issued.
TEST_F(LargeBlocksMove, WhatLeavesGoesOnWhileTheLastOfABatchIsCopied) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 6, kLarge = 4 * kBlock;
  vmem::region r(kBlocks * kLarge);
  for (size_t b = 0; b < kBlocks; ++b) store_on_device(words(r) + b * kLarge / 8, 100 + b);
  ASSERT_EQ(r.query().device_bytes, r.size());
  const auto fourth = reinterpret_cast<uintptr_t>(words(r)) + 3 * kLarge, fifth = fourth + kLarge;
  std::atomic<bool> issued{false}, in_time{false};
  sim().set_hook([&](SimOp op, int, uintptr_t at, size_t) {
    if (op == SimOp::issue_out && at == fifth) issued = true;
    if (op == SimOp::copy_out && at == fourth) in_time = until([&] { return issued.load(); });
    return Status();
  });
  EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
  sim().set_hook(nullptr);
  EXPECT_TRUE(in_time);
  for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(load(words(r) + b * kLarge / 8), 100 + b);
}

// The blocks that make room leave only after the read has begun.
TEST_F(DeviceMoves, WhatAnAcquireWaitsForIsReadWhileRoomIsMade) {
  if (IsSkipped()) return;
  constexpr size_t kRoom = 16;
  vmem::region r(kBlock), others(kRoom * kBlock);
  store_on_device(words(r), 7);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  fill(others, kRoom);
  static std::atomic<uint64_t> before;
  static std::atomic<bool> in_time;
  before = vmem::stats().read_bytes;
  in_time = false;
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.leaving") != 0) return;
    in_time = until([] { return vmem::stats().read_bytes != before; });
  });
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << said();
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(in_time);
  EXPECT_EQ(vmem::stats().read_bytes - before, kBlock) << "it is read once";
  EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(load(words(r)), 7u);
}

// A failed read does no harm: the acquire retries, and reports the reason.
TEST_F(DeviceMoves, WhatCannotBeReadWhileRoomIsMadeIsReadByTheNextTry) {
  if (IsSkipped()) return;
  constexpr size_t kRoom = 16;
  systest::TempFile file(kBlock);
  vmem::region r(kBlock, file.path(), 0, VMEM_MAP_READ), others(kRoom * kBlock);
  fill(others, kRoom);
  ASSERT_EQ(truncate(file.path().c_str(), 4096), 0);
  systest::LogLines log;
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), -EIO);
  ASSERT_EQ(truncate(file.path().c_str(), kBlock), 0);
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
}

// The read ends only when the acquiring thread sleeps. That thread continues the transition itself,
// without waking another.
TEST_F(DeviceMoves, WhoWaitsForABlockBeginsItsCopy) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  store_on_device(words(r), 7);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  static std::atomic<pid_t> self, began;
  self = gettid();
  began = 0;
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.preparing") == 0) began = gettid();
    if (std::strcmp(step, "device.read") != 0) return;
    int looks = 0;
    until([&] { return (looks = asleep(self) ? looks + 1 : 0) == 5; });
  });
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << said();
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(began, self);
  EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(load(words(r)), 7u);
}

class FewStagingFrames : public DeviceMoves {
 protected:
  // as many frames, of which two are reserved for blocks that leave
  static constexpr size_t kLarge = 32 << 20, kBlocks = 4;
  void SetUp() override {
    start(1,
          {{"device_block_size", "32MiB"},
           {"device_budget", "128MiB"},
           {"host_budget", "512MiB"},
           {"staging_share", "28"}},
          true);
  }
  void TearDown() override {
    DeviceMoves::TearDown();
    vmem_set("device_block_size", "2MiB");  // the defaults, for later tests in this process
    vmem_set("staging_share", "50");
  }
};

// A block that is read while room is made waits in its frame for the blocks before it. The first of
// those needs a frame too.
TEST_F(FewStagingFrames, WhatIsReadWhileRoomIsMadeLeavesAFrameForWhatIsToMoveFirst) {
  if (IsSkipped()) return;
  vmem::region r(kBlocks * kLarge), others(kBlocks * kLarge);
  for (size_t b = 0; b < kBlocks; ++b) store_on_device(words(r) + b * kLarge / 8, 100 + b);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  EXPECT_EQ(load(words(r)), 100u);
  EXPECT_EQ(r.query().host_bytes, kLarge) << "the first one is the CPU's";
  for (int turn = 0; turn < 4; ++turn) {
    for (size_t b = 0; b < kBlocks; ++b) store_on_device(words(others) + b * kLarge / 8, 200 + b);
    ASSERT_EQ(others.query().device_bytes, others.size());
    ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << said();
    EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(load(words(r) + b * kLarge / 8), 100 + b);
  }
}

// A frame reserved for blocks that leave has gone to a block that is leased by the time it arrives.
TEST_F(FewStagingFrames, WhatIsLeasedWhileItLeavesGivesItsFrameBack) {
  if (IsSkipped()) return;
  vmem::region r(3 * kLarge), others(kBlocks * kLarge);
  for (size_t b = 0; b < 3; ++b) store_on_device(words(r) + b * kLarge / 8, 100 + b);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  EXPECT_EQ(load(words(r)), 100u);
  for (size_t b = 0; b < kBlocks; ++b) store_on_device(words(others) + b * kLarge / 8, 200 + b);
  void* const second = stream(0);
  const uint64_t read = vmem::stats().read_bytes;
  stop_at("device.leaving");
  aside([&] { EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 0, stream_), 0) << said(); });
  ASSERT_TRUE(stopped());
  EXPECT_TRUE(until([&] { return vmem::stats().read_bytes == read + 2 * kLarge; }));
  aside([&] { EXPECT_EQ(vmem_acquire(others.data(), kLarge, VMEM_READ, 0, second), 0) << said(); });
  std::this_thread::sleep_for(
      std::chrono::milliseconds(300));  // by now it has leased the block that leaves first, or does no harm
  go_on();
  join();
  EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
  EXPECT_EQ(vmem_release(others.data(), kLarge, second), 0) << said();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  for (size_t b = 0; b < 3; ++b) EXPECT_EQ(load(words(r) + b * kLarge / 8), 100 + b);
  for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(load(words(others) + b * kLarge / 8), 200 + b);
}

class TwoDevicesMove : public DeviceMoves {
 protected:
  void SetUp() override { start(2, {}, true); }
};

// Device 0 has more unfinished operations than there are workers, and none of them ends.
TEST_F(TwoDevicesMove, WhatComesToOneDeviceGoesOnWhileTheOtherIsBusy) {
  if (IsSkipped()) return;
  constexpr size_t kBegun = 6;
  vmem::region busy(kBegun * kBlock), r(kBlock);
  fill(busy, kBegun);
  ASSERT_EQ(vmem_evict(busy.data(), busy.size(), VMEM_HOST), 0) << vmem_last_error();
  *words(r) = 7;
  void* const other = stream(1);
  std::atomic<bool> opened{false};
  sim().set_hook([&](SimOp op, int device, uintptr_t, size_t) {
    while (op == SimOp::copy_in && device == 0 && !opened) usleep(1000);
    return Status();
  });
  for (size_t b = 0; b < kBegun; ++b)
    ASSERT_EQ(vmem_acquire(words(busy) + b * kWords, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  std::atomic<bool> there{false};
  aside([&] {
    EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other), 0) << vmem_last_error();
    there = true;
  });
  EXPECT_TRUE(until([&] { return there.load(); }));
  opened = true;
  join();
  EXPECT_EQ(vmem_release(r.data(), r.size(), other), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(busy.data(), busy.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  ASSERT_TRUE(sim().synchronize(other).ok());
  sim().set_hook(nullptr);
}

// The work begun on device 0 never ends, and occupies as many workers as may handle one device.
TEST_F(TwoDevicesMove, WhatWasBegunOnOneDeviceEndsWhileTheOtherIsBusy) {
  if (IsSkipped()) return;
  constexpr size_t kBegun = 6;
  const vmem::region busy(kBegun * kBlock), r(kBlock);
  void* const other = stream(1);
  static std::atomic<int> waiting;
  std::atomic<bool> opened{false}, seen{false};
  waiting = 0;
  sim().set_hook([&](SimOp op, int device, uintptr_t, size_t) {
    while (op == SimOp::copy_in && device == 0 && !opened) usleep(1000);
    return Status();
  });
  vmem::core::step_hook.store([](const char* step) { waiting += std::strcmp(step, "device.issued") == 0; });
  for (size_t b = 0; b < kBegun; ++b)
    ASSERT_EQ(vmem_acquire(words(busy) + b * kWords, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  EXPECT_TRUE(until([] { return waiting == 2; }));
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, 1, other), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(r.data(), r.size(), other), 0) << vmem_last_error();
  aside([&] {
    EXPECT_EQ(load(words(r)), 0u);
    seen = true;
  });
  EXPECT_TRUE(until([&] { return seen.load(); }));
  opened = true;
  join();
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(vmem_release(busy.data(), busy.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  sim().set_hook(nullptr);
}

// Holds three workers at a block each, until enough blocks are ready on device 0 to keep all
// workers busy with them.
class MuchComes : public TwoDevicesMove {
 protected:
  static constexpr size_t kHeld = 3, kReady = 34, kAll = kHeld + kReady;  // batches of 16, 16 and 2
  void SetUp() override { start(2, {{"device_budget", "112MiB"}, {"device_block_size", "2MiB"}}, true); }
  void TearDown() override {
    ready_ = done_ = true;  // after any failure, nothing stays blocked
    TwoDevicesMove::TearDown();
  }
  void begin(const vmem::region& r) {
    ready_ = done_ = false;
    held_ = 0;
    self_ = gettid();
    vmem::core::step_hook.store([](const char* step) {
      if (std::strcmp(step, "device.preparing") != 0 || gettid() == self_) return;
      if (!ready_) {
        ++held_;
        until([] { return ready_.load(); });
      } else {
        until([] { return done_.load(); });
      }
    });
    for (size_t b = 0; b < kHeld; ++b) {
      ASSERT_EQ(vmem_prefetch(words(r) + b * kWords, kBlock, 0, nullptr), 0) << vmem_last_error();
      ASSERT_TRUE(until([&] { return held_ == b + 1; }));
    }
    ASSERT_EQ(vmem_prefetch(words(r) + kHeld * kWords, kReady * kBlock, 0, nullptr), 0) << vmem_last_error();
  }
  void end(const vmem::region& r) {
    ready_ = done_ = true;
    join();
    EXPECT_TRUE(until([&] { return r.query().device_bytes == r.size(); }));
    vmem::core::step_hook.store(nullptr);
    sim().set_hook(nullptr);
  }
  static inline std::atomic<bool> ready_{false}, done_{false};
  static inline std::atomic<size_t> held_{0};
  static inline std::atomic<pid_t> self_{0};
};

// None of these blocks continues until a block that an acquire has begun is there.
TEST_F(MuchComes, WhatAnAcquireHasBegunEnds) {
  if (IsSkipped()) return;
  const vmem::region r(kAll * kBlock), one(kBlock);
  begin(r);
  EXPECT_EQ(vmem_acquire(one.data(), one.size(), VMEM_READ, 0, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_release(one.data(), one.size(), stream_), 0) << vmem_last_error();
  std::atomic<bool> seen{false};
  aside([&] {
    EXPECT_EQ(load(words(one)), 0u);
    seen = true;
  });
  ready_ = true;
  EXPECT_TRUE(until([&] { return seen.load(); }));
  end(r);
}

// The thread that waits for blocks brings them itself, and no other thread has to wake first.
TEST_F(DeviceMoves, AnAcquireBeginsItsCopiesItself) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  fill(r, 4);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
  static std::atomic<pid_t> brought_by;
  const auto look = [](const char* step) {
    if (std::strcmp(step, "device.preparing") == 0) brought_by = gettid();
  };
  vmem::core::step_hook.store(look);
  for (size_t b = 0; b < 4; ++b) {
    brought_by = 0;
    ASSERT_EQ(vmem_acquire(words(r) + b * kWords, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
    EXPECT_EQ(brought_by, gettid()) << b;
    ASSERT_EQ(vmem_release(words(r) + b * kWords, kBlock, stream_), 0) << vmem_last_error();
  }
  vmem::core::step_hook.store(nullptr);
  EXPECT_TRUE(until([&] { return vmem_evict(r.data(), r.size(), VMEM_HOST) == 0; })) << vmem_last_error();
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
}

TEST_F(DeviceMoves, WhatAnAcquireCannotBringItselfStaysWhereItIs) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("fault_timeout_ms", "300"), 0);
  for (const SimOp refused : {SimOp::populate, SimOp::issue_in, SimOp::map}) {
    vmem::region r(4 * kBlock);
    fill(r, 4);
    ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_HOST), 0) << vmem_last_error();
    sim().set_hook([=](SimOp op, int, uintptr_t, size_t) {
      return op == refused ? vmem::core::error(EIO, "as the test wants it") : Status();
    });
    EXPECT_LT(vmem_acquire(r.data(), r.size(), kBoth, 0, stream_), 0);
    EXPECT_EQ(vmem_release(r.data(), r.size(), stream_), -EINVAL) << "nothing is leased";
    sim().set_hook(nullptr);
    for (size_t b = 0; b < 4; ++b) EXPECT_EQ(load(words(r) + b * kWords), 100 + b);
    store_on_device(words(r) + 1, 7);
    EXPECT_EQ(load(words(r) + 1), 7u);
    EXPECT_EQ(load(words(r)), 100u);
  }
}

// An acquire has begun the transition, and no thread has finished it.
TEST_F(DeviceMoves, ARegionIsFreedWhileAWorkerEndsWhatAnAcquireBegan) {
  if (IsSkipped()) return;
  static std::atomic<bool> stands, goes_on;
  stands = goes_on = false;
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 2 * kBlock, 0), 0) << vmem_last_error();
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.issued") != 0) return;
    stands = true;
    while (!goes_on) usleep(1000);
  });
  ASSERT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(p, 2 * kBlock, stream_), 0) << vmem_last_error();
  std::atomic<bool> freed{false};
  std::thread freeing([&] {
    EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
    freed = true;
  });
  EXPECT_TRUE(until([] { return stands.load(); }));
  EXPECT_FALSE(freed);
  goes_on = true;
  freeing.join();
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(vmem::stats().device_bytes, 0u);
}

}  // namespace
