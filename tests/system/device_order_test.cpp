// Calls that meet blocks on their way to a device wait for them. A worker that is told to end while
// it has dropped the lock ends. On simulated devices.
#include <chrono>
#include <cstring>
#include <thread>

#include "child.h"
#include "core/thread.h"
#include "sim_support.h"

namespace systest {
namespace {

constexpr size_t kWords = kBlock / 8;

class DeviceOrder : public SimTest {
 protected:
  // Makes `call` when block 0 of the region, changed in host memory, is claimed for the device but
  // has not left. The call returns only after the block has arrived and been processed.
  static void call_while_it_leaves(uint64_t* words, int (*call)(void* at)) {
    words[0] = 7;
    stop_at("device.taking");
    ASSERT_EQ(vmem_prefetch(words, kBlock, 0, nullptr), 0) << vmem_last_error();
    const bool there = stopped();
    std::atomic<bool> over{false};
    std::thread calling([&] {
      EXPECT_EQ(call(words), 0) << vmem_last_error();
      over = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // enough for a call that does not wait
    EXPECT_FALSE(over);
    go_on();
    calling.join();
    ASSERT_TRUE(there);
  }
  static uint64_t in_file(const TempFile& file, size_t offset) {
    uint64_t value = 0;
    const auto bytes = file.read();
    if (offset + 8 <= bytes.size()) memcpy(&value, bytes.data() + offset, 8);
    return value;
  }
};

// Otherwise the block would come to the device afterwards, and a thread could access it while it is
// being mapped.
TEST_F(DeviceOrder, EvictTakesABlockAlongThatWasAboutToLeaveForTheDevice) {
  if (IsSkipped()) return;
  for (const bool to_host : {true, false}) {
    SCOPED_TRACE(to_host ? "host" : "SSD");
    vmem::region r(4 * kBlock);
    auto* const words = static_cast<uint64_t*>(r.data());
    call_while_it_leaves(
        words, to_host ? +[](void* at) { return vmem_evict(at, kBlock, VMEM_HOST); }
                       : +[](void* at) { return vmem_evict(at, kBlock, VMEM_SSD); });
    EXPECT_EQ(r.query().device_bytes, 0u);
    EXPECT_EQ(r.query().host_bytes, to_host ? kBlock : 0u);
    EXPECT_EQ(words[0], 7u);
    // Advice waits for blocks in transition, whose state may change later than the access succeeds.
    EXPECT_EQ(vmem_advise(words, kBlock, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();
    EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  }
}

TEST_F(DeviceOrder, AHintToTheSsdTakesABlockAlongThatWasAboutToLeaveForTheDevice) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* const words = static_cast<uint64_t*>(r.data());
  words[0] = 7;
  stop_at("device.taking");
  ASSERT_EQ(vmem_prefetch(words, kBlock, 0, nullptr), 0) << vmem_last_error();
  ASSERT_TRUE(stopped());
  ASSERT_EQ(vmem_prefetch(words, kBlock, VMEM_SSD, nullptr), 0) << vmem_last_error();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // enough for a worker that does not wait
  go_on();
  EXPECT_TRUE(until([&] { return r.query().ssd_bytes == kBlock; }));
  EXPECT_EQ(words[0], 7u);
}

TEST_F(DeviceOrder, SyncWritesABlockThatWasAboutToLeaveForTheDevice) {
  if (IsSkipped()) return;
  const TempFile file(4 * kBlock);
  vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  call_while_it_leaves(static_cast<uint64_t*>(r.data()), [](void* at) { return vmem_sync(at, 4 * kBlock); });
  EXPECT_EQ(in_file(file, 0), 7u);
  EXPECT_EQ(r.query().device_bytes, kBlock);
}

// The sync has visited blocks on devices, but not yet those in host memory, when one of these moves
// to the device.
TEST_F(DeviceOrder, SyncWritesABlockThatComesToTheDeviceBehindItsBack) {
  if (IsSkipped()) return;
  const TempFile file(4 * kBlock);
  vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  auto* const words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  words[kWords] = 8;
  stop_at("device.leaving");  // with block 0
  std::thread syncing([&] { EXPECT_EQ(vmem_sync(words, r.size()), 0) << vmem_last_error(); });
  const bool there = stopped();
  EXPECT_EQ(vmem_prefetch(words + kWords, kBlock, 0, nullptr), 0) << vmem_last_error();
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 2 * kBlock; }));
  // Advice waits for blocks in transition.
  EXPECT_EQ(vmem_advise(words + kWords, kBlock, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();
  go_on();
  syncing.join();
  ASSERT_TRUE(there);
  EXPECT_EQ(in_file(file, 0), 7u);
  EXPECT_EQ(in_file(file, kBlock), 8u);
  EXPECT_EQ(r.query().device_bytes, 2 * kBlock) << "what is synced stays";
}

// A worker has dropped the lock to check whether a stream has reached a release, and finds no work
// afterwards.
class DeviceWorker : public SystemTest {};

TEST_F(DeviceWorker, EndsThoughItIsToldSoWhileItHasGivenTheLockAway) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const pid_t child = start_child("DeviceWorkerChild.DISABLED_IsToldToStop", {{"VMEM_DEVICE", "sim"}});
  EXPECT_EQ(wait_for_child(child, 60), 0);
}

std::atomic<bool> looking{false}, stopping{false};

TEST(DeviceWorkerChild, DISABLED_IsToldToStop) {
  const auto wait_for = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, kBlock, 0), 0) << vmem_last_error();
  void* const stream = vmem::device::current_sim()->create_stream(0);
  std::atomic<bool> go_on{false};
  ASSERT_EQ(vmem_acquire(at, kBlock, VMEM_READ, 0, stream), 0) << vmem_last_error();
  ASSERT_TRUE(vmem::device::current_sim()->launch(stream, [&](vmem::device::SimKernel&) { wait_for(go_on); }).ok());
  ASSERT_EQ(vmem_release(at, kBlock, stream), 0) << vmem_last_error();
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "devices.stopping") == 0) stopping = true;
    if (std::strcmp(step, "reap.looking") != 0 || !vmem::core::on_library_thread() || looking.exchange(true)) return;
    while (!stopping) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  // makes a worker query the lease
  ASSERT_EQ(vmem_prefetch(at, kBlock, VMEM_HOST, nullptr), 0) << vmem_last_error();
  wait_for(looking);
  vmem_shutdown();  // with the hint
  vmem::core::step_hook.store(nullptr);
  go_on = true;
  std::unique_ptr<vmem::device::SimDevices> others;
  ASSERT_TRUE(vmem::device::make_sim_devices({}, &others).ok());
  others->destroy_stream(stream);
}

// All workers check whether a stream has reached a release when a block becomes ready for the
// device, so none sleeps that could be woken. The first to return begins with the block. It does
// not first check the device's memory, which it does after a sleep.
class DeviceWorkers : public SimTest {
 protected:
  void SetUp() override { start(1, {}, true); }

  static constexpr int kWorkers = 4;
  static inline std::atomic<int> looking_{0}, may_pass_{0};
  static inline std::atomic<bool> made_{false}, looked_first_{false}, free_{false}, held_{false};

  static void on_step(const char* step) {
    const auto is = [step](const char* name) { return std::strcmp(step, name) == 0; };
    const auto stay_until = [](auto over) {
      while (!free_ && !over()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    if (!vmem::core::on_library_thread()) {
      if (is("device.preparing")) {
        held_ = true;
        stay_until([] { return false; });
      }
      return;
    }
    if (is("reap.looking")) {
      const int order = looking_++;
      stay_until([=] { return order < may_pass_; });
    } else if (is("device.memory") && may_pass_ != 0 && !made_) {
      looked_first_ = true;
    } else if (is("device.preparing")) {
      made_ = true;
    }
  }
};

TEST_F(DeviceWorkers, SeeWhatBecameReadyWhileTheyHadGivenTheLockAway) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock);
  auto* const words = static_cast<uint64_t*>(r.data());
  std::atomic<bool> open{false};
  words[2 * kWords] = 9;
  ASSERT_EQ(vmem_acquire(words, kBlock, VMEM_READ | VMEM_WRITE, 0, stream_), 0) << vmem_last_error();
  launch_store(stream_, words, 7, &open);
  ASSERT_EQ(vmem_release(words, kBlock, stream_), 0) << vmem_last_error();
  looking_ = may_pass_ = 0;
  made_ = looked_first_ = free_ = held_ = false;
  vmem::core::step_hook.store(on_step);
  // A block that does not come. So the hint that asks for it elsewhere stays to the end, and every
  // worker queries the lease for it.
  void* const other = stream(0);
  aside([=] {
    EXPECT_EQ(vmem_acquire(words + kWords, kBlock, VMEM_READ, 0, other), 0) << vmem_last_error();
    EXPECT_EQ(vmem_release(words + kWords, kBlock, other), 0) << vmem_last_error();
  });
  EXPECT_TRUE(until([] { return held_.load(); }));
  EXPECT_TRUE(until([=] {
    EXPECT_EQ(vmem_prefetch(words + kWords, kBlock, VMEM_HOST, nullptr), 0) << vmem_last_error();  // wakes one
    return looking_ == kWorkers;
  }));
  EXPECT_FALSE(made_);
  EXPECT_EQ(vmem_prefetch(words + 2 * kWords, kBlock, 0, nullptr), 0) << vmem_last_error();
  may_pass_ = 1;
  EXPECT_TRUE(until([] { return made_.load(); }));
  EXPECT_FALSE(looked_first_);
  free_ = open = true;
  join();
  EXPECT_EQ(words[2 * kWords], 9u);
}

}  // namespace
}  // namespace systest
