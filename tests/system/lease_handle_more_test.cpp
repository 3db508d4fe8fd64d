// Lease handles that are cancelled, refused, or outlive their region.
#include <atomic>
#include <cerrno>

#include "faulty_disk.h"
#include "sim_support.h"

namespace systest {
namespace {

using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;
using Lease = struct vmem_lease;

class LeasesThatEnd : public SimTest {
 protected:
  void SetUp() override {
    vmem::api::test_hooks().wrap_engine = nullptr;
    SimTest::start(1);
    if (IsSkipped()) return;
    vmem_shutdown();
    wrap_engine(&disk);
    SimTest::start(1);
  }
  static uint64_t leased_at_device() { return device_stats().leased_bytes; }
  FaultyEngine* disk = nullptr;
};

// The requests of the refused acquire are dropped with its leases. A lease that another thread gets
// at that moment keeps its block.
TEST_F(LeasesThatEnd, ARefusedAcquireAtADeviceTakesNoBlockFromWhoLeasesItNext) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  auto* const words = r.view<uint64_t>().data();
  auto* const second = words + kBlock / 8;
  words[0] = stamp(0, 1), *second = stamp(1, 1);
  r.evict();
  EXPECT_EQ(*second, stamp(1, 1));  // is in host memory
  Fault hang;
  hang.action = Fault::Action::hang;
  hang.op = Io::Op::read;
  disk->add_rule(hang);
  std::atomic<bool> read{false};
  aside([&] {
    EXPECT_EQ(words[0], stamp(0, 1));
    read = true;
  });
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  const vmem_range both{words, 2 * kBlock, VMEM_READ, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &both, 1, 0, stream_, nullptr, nullptr), 0) << said();
  ASSERT_TRUE(until([] { return leased_at_device() == 2 * kBlock; }));
  stop_at("lock.given");
  std::atomic<bool> ended{false};
  aside([&] {
    EXPECT_EQ(vmem_lease_end(lease, stream_), 0) << said();
    ended = true;
  });
  ASSERT_TRUE(stopped());
  EXPECT_EQ(leased_at_device(), 0u);
  ASSERT_EQ(vmem_acquire(second, kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << said();
  disk->clear_rules();
  disk->release();
  EXPECT_TRUE(until([&] { return read.load(); }));
  go_on();
  EXPECT_TRUE(until([&] { return ended.load(); }));
  const auto where = residency(second, kBlock);
  EXPECT_EQ(where.host_bytes, kBlock);
  EXPECT_EQ(where.device_bytes, 0u);
  *second = 5;
  ASSERT_EQ(vmem_release(second, kBlock, nullptr), 0);
  EXPECT_EQ(*second, 5u);
}

TEST_F(LeasesThatEnd, AHandleEndsTheAccessThatItTook) {
  if (IsSkipped()) return;
  for (const int location : {VMEM_HOST, 0}) {
    vmem::region r(kBlock);
    *r.view<uint64_t>().data() = 3;
    void* const at = location == 0 ? stream_ : nullptr;
    const vmem_range reads{r.data(), kBlock, VMEM_READ, 0}, writes{r.data(), kBlock, VMEM_WRITE, 0};
    Lease *reader = nullptr, *writer = nullptr;
    ASSERT_EQ(vmem_lease(&reader, &reads, 1, location, at), 0) << said();
    ASSERT_EQ(vmem_lease(&writer, &writes, 1, location, at), 0) << said();
    EXPECT_EQ(vmem_sync(r.data(), r.size()), -EBUSY);
    ASSERT_EQ(vmem_lease_end(writer, at), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
    EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << said();
    ASSERT_EQ(vmem_lease_end(reader, at), 0) << said();
  }
}

TEST_F(LeasesThatEnd, ACancelledOneStopsFillingItsRange) {
  if (IsSkipped()) return;
  static std::atomic<int> turns;
  static std::atomic<bool> go;
  turns = 0, go = false;
  constexpr size_t kSmall = 4096, kBlocks = 8192;
  vmem::region r(kBlocks * kSmall, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = kSmall});
  const vmem_range all{r.data(), r.size(), VMEM_READ, 0};
  vmem::core::step_hook.store([](const char* s) {
    if (std::strcmp(s, "acquire.started") != 0) return;
    if (++turns != 1) return std::this_thread::sleep_for(std::chrono::milliseconds(20));
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(&lease, &all, 1, VMEM_HOST, nullptr, nullptr, nullptr), 0) << said();
  ASSERT_TRUE(until([] { return turns != 0; }));
  std::atomic<bool> ended{false};
  aside([&] {
    EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << said();
    ended = true;
  });
  ASSERT_TRUE(until([&] { return vmem_lease_poll(lease) == -EINVAL; }));
  go = true;
  EXPECT_TRUE(until([&] { return ended.load(); }));
  vmem::core::step_hook.store(nullptr);
  EXPECT_LT(turns, static_cast<int>(kBlocks / 128)) << "it went on to the end";
}

TEST_F(LeasesThatEnd, OnALostDeviceALeaseEndsOnWhateverStream) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  void* const other = stream(0);
  const vmem_range one{r.data(), kBlock, VMEM_READ, 0};
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease(&lease, &one, 1, 0, stream_), 0) << said();
  sim().lose(0, "the test took it away");
  EXPECT_EQ(vmem_lease_end(lease, other), 0) << said();
  EXPECT_EQ(vmem_lease_poll(lease), -EINVAL);
}

TEST_F(LeasesThatEnd, ReadyIsToldThatShutdownFreedTheRegions) {
  if (IsSkipped()) return;
  static std::atomic<int> told;
  told = 1;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, kBlock, VMEM_HOST_ONLY), 0) << said();
  const vmem_range one{at, kBlock, VMEM_READ, 0};
  stop_at("lease.settled");
  Lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(
                &lease, &one, 1, VMEM_HOST, nullptr, [](Lease*, int result, void*) { told = result; }, nullptr),
            0)
      << said();
  ASSERT_TRUE(stopped());
  aside([] { vmem_shutdown(); });
  EXPECT_TRUE(until([&] { return vmem_lease_poll(lease) == -ECANCELED; }));
  go_on();
  EXPECT_TRUE(until([] { return told != 1; }));
  EXPECT_EQ(told, -ECANCELED);
  EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << said();
}

}  // namespace
}  // namespace systest
