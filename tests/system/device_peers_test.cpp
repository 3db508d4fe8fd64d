// Blocks that spill from a full device to another one: their bytes are right on both, whichever
// thread needs them during the transition, and the other device can use the memory for its own
// blocks at any time. On simulated devices.
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
// blocks of a device's budget; how many of them may be spilled blocks
constexpr size_t kRoom = 16, kGuests = 8;

struct Backend {
  const char* name;
  bool handles;                         // page tables of their own
  const char* way = "device.spilling";  // the step at which a block is in transition
};
void PrintTo(const Backend& backend, std::ostream* os) {
  *os << backend.name;
}

class Peers : public systest::SimTest, public ::testing::WithParamInterface<Backend> {
 protected:
  void SetUp() override { begin(2); }
  void begin(int devices, const systest::Settings& more = {}) {
    systest::Settings settings{{"peer_spill_percent", "50"}, {"device_block_size", "2MiB"}};
    settings.insert(settings.end(), more.begin(), more.end());
    start(devices, settings, GetParam().handles);
    if (IsSkipped()) return;
    streams_of_ = {stream_};
    for (int d = 1; d < devices; ++d) {
      streams_of_.push_back(stream(d));
      device(d);  // marks it as used from now on
    }
  }
  void TearDown() override {
    vmem_set("peer_spill_percent", "50");
    SimTest::TearDown();
  }
  static struct vmem_device_stats device(int d) {
    const auto s = device_stats(d);
    EXPECT_LE(s.guest_bytes, s.used_bytes);
    return s;
  }
  static size_t guests(int d) { return device(d).guest_bytes / kBlock; }
  // Makes these blocks the first to leave.
  static void cold(const vmem::region& r, size_t blocks) {
    EXPECT_EQ(vmem_advise(r.data(), blocks * kBlock, VMEM_ADVISE_COLD, 0), 0) << said();
  }
  static uint64_t* word(const vmem::region& r, size_t b) { return static_cast<uint64_t*>(r.data()) + b * kWords; }
  // A kernel of the device stores to the block's first word (put), or reads it (seen).
  void put(const vmem::region& r, size_t b, uint64_t value, int d = 0) {
    void* const s = streams_of_[static_cast<size_t>(d)];
    ASSERT_EQ(vmem_acquire(word(r, b), kBlock, kBoth, d, s), 0) << said();
    launch_store(s, word(r, b), value);
    ASSERT_EQ(vmem_release(word(r, b), kBlock, s), 0) << said();
    ASSERT_TRUE(sim().synchronize(s).ok());
    at_rest(word(r, b));
  }
  uint64_t seen(const vmem::region& r, size_t b, int d = 0) {
    void* const s = streams_of_[static_cast<size_t>(d)];
    EXPECT_EQ(vmem_acquire(word(r, b), kBlock, VMEM_READ, d, s), 0) << said();
    uint64_t value = 0;
    uint64_t* const at = word(r, b);
    const Status launched = sim().launch(s, [at, &value](vmem::device::SimKernel& k) {
      if (auto* w = reinterpret_cast<uint64_t*>(k.at(at, 8, false)); w != nullptr) value = *w;
    });
    EXPECT_TRUE(launched.ok());
    EXPECT_EQ(vmem_release(word(r, b), kBlock, s), 0) << said();
    EXPECT_TRUE(sim().synchronize(s).ok());
    return value;
  }
  static uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
  void fill(const vmem::region& r, int d = 0) {
    for (size_t b = 0; b < r.size() / kBlock; ++b) put(r, b, 100 + b, d);
  }
  static void expect_all(const vmem::region& r) {
    for (size_t b = 0; b < r.size() / kBlock; ++b) EXPECT_EQ(load(word(r, b)), 100 + b) << b;
    EXPECT_EQ(vmem::stats().lost_blocks, 0u);
  }
  // Returns the number of spilled blocks on all devices; all are of one region.
  static size_t guests_somewhere(int devices) {
    size_t sum = 0;
    for (int d = 0; d < devices; ++d) sum += guests(d);
    return sum;
  }
  std::vector<void*> streams_of_;  // by device
};

TEST_P(Peers, WhatHasNoRoomGoesThereAndComesBackOverTheLink) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  fill(r);
  EXPECT_TRUE(until([] { return guests(1) == kGuests; }));
  EXPECT_EQ(r.query().device_bytes, r.size()) << "nothing is in host memory";
  EXPECT_EQ(device(0).to_peers, kGuests * kBlock);
  EXPECT_EQ(vmem::stats().device_to_host_bytes, 0u);
  const auto before = vmem::stats();
  for (size_t b = 0; b < kRoom + kGuests; ++b) EXPECT_EQ(seen(r, b), 100 + b) << b;
  EXPECT_GE(device(0).from_peers, kGuests * kBlock);
  EXPECT_EQ(vmem::stats().read_bytes, before.read_bytes);
  expect_all(r);
}

TEST_P(Peers, WhatIsBeyondTheirShareGoesToHostMemory) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests + 4) * kBlock);
  fill(r);
  EXPECT_TRUE(until([] { return guests(1) == kGuests; }));
  EXPECT_GT(vmem::stats().device_to_host_bytes, 0u);
  expect_all(r);
}

TEST_P(Peers, TheirRoomIsTheDevicesOwnWhenItIsNeeded) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock), own(kRoom * kBlock);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  void* const s = streams_of_[1];
  ASSERT_EQ(vmem_acquire(own.data(), own.size(), kBoth, 1, s), 0) << said();
  EXPECT_EQ(guests(1), 0u);
  EXPECT_EQ(device(1).leased_bytes, own.size());
  ASSERT_EQ(vmem_release(own.data(), own.size(), s), 0) << said();
  ASSERT_TRUE(sim().synchronize(s).ok());
  expect_all(r);
}

// Spilled blocks leave before any of the device's own blocks.
TEST_P(Peers, TheyLeaveFirst) {
  if (IsSkipped()) return;
  const vmem::region own((kRoom - kGuests) * kBlock), r((kRoom + kGuests) * kBlock), more(2 * kBlock);
  fill(own, 1);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  fill(more, 1);
  EXPECT_LE(guests(1), kGuests - 2);
  EXPECT_EQ(own.query().device_bytes, own.size());
  expect_all(r);
}

TEST_P(Peers, OneThatIsLeasedWhereItIsIsTheDevicesOwn) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  cold(r, kGuests);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  const uint64_t moved = device(1).in_bytes;
  EXPECT_EQ(seen(r, 0, 1), 100u);
  EXPECT_EQ(device(1).in_bytes, moved) << "it was there";
  EXPECT_EQ(guests(1), kGuests - 1);
  ASSERT_EQ(vmem_prefetch(word(r, 1), kBlock, 1, nullptr), 0) << said();
  EXPECT_EQ(guests(1), kGuests - 2);
  expect_all(r);
}

TEST_P(Peers, OfADeviceThatWasNotUsedNothingIsTaken) {
  if (IsSkipped()) return;
  vmem_shutdown();
  go_on();
  start(2, {{"peer_spill_percent", "50"}, {"device_block_size", "2MiB"}}, GetParam().handles);
  streams_of_ = {stream_};
  const vmem::region r((kRoom + kGuests) * kBlock);
  fill(r);
  EXPECT_EQ(r.query().device_bytes, kRoom * kBlock);
  EXPECT_EQ(guests(1), 0u);
  expect_all(r);
}

TEST_P(Peers, TheSettingTakesEffectAtOnce) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  ASSERT_EQ(vmem_set("peer_spill_percent", "0"), 0) << said();
  fill(r);
  EXPECT_EQ(guests(1), 0u);
  ASSERT_EQ(vmem_set("peer_spill_percent", "50"), 0) << said();
  fill(r);
  EXPECT_TRUE(until([] { return guests(1) >= kGuests - 1; })) << "one may just have gone back";
  ASSERT_EQ(vmem_set("peer_spill_percent", "25"), 0) << said();
  EXPECT_TRUE(until([] { return guests(1) == kGuests / 2; }));
  ASSERT_EQ(vmem_set("peer_spill_percent", "0"), 0) << said();
  EXPECT_TRUE(until([] { return guests(1) == 0; }));
  EXPECT_EQ(vmem_set("peer_spill_percent", "91"), -EINVAL);
  expect_all(r);
}

TEST_P(Peers, TheyLeaveForALoweredBudgetAndForOthersOnTheDevice) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  ASSERT_EQ(vmem_set("device_budget", "16MiB"), 0) << said();
  EXPECT_TRUE(until([] { return guests(1) <= kGuests / 2 && device(0).used_bytes <= 16u << 20; }));
  ASSERT_EQ(vmem_set("device_budget", "32MiB"), 0) << said();
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) >= kGuests - 1; }));
  // Less than 1/32 of the device's 128 MiB is left for others.
  sim().leave_to_others(1, (uint64_t{128} << 20) - device(1).used_bytes);
  EXPECT_TRUE(until([] { return guests(1) == 0; }));
  sim().leave_to_others(1, 0);
  expect_all(r);
}

TEST_P(Peers, SyncAndEvictFindThem) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = kRoom + kGuests;
  TempFile file(kBlocks * kBlock);
  const vmem::region r(kBlocks * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  ASSERT_EQ(vmem_sync(r.data(), r.size()), 0) << said();
  EXPECT_EQ(guests(1), kGuests) << "what is written stays where it is";
  const auto bytes = file.read();
  for (size_t b = 0; b < kBlocks; ++b) {
    uint64_t is = 0;
    memcpy(&is, bytes.data() + b * kBlock, sizeof is);
    EXPECT_EQ(is, 100 + b) << b;
  }
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  EXPECT_EQ(guests(1), 0u);
  EXPECT_EQ(device(1).used_bytes, 0u);
  expect_all(r);
}

TEST_P(Peers, AFreedRegionTakesItsGuestsAlong) {
  if (IsSkipped()) return;
  {
    const vmem::region r((kRoom + kGuests) * kBlock);
    fill(r);
    ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  }
  EXPECT_EQ(device(1).used_bytes, 0u);
  EXPECT_EQ(guests(1), 0u);
}

TEST_P(Peers, ADeviceThatCannotTakeOneIsLeftAloneForAWhile) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  std::atomic<int> tries{0};
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t) {
    return op == SimOp::migrate && ++tries > 0 ? vmem::core::error(ENOMEM, "as the test wants it") : Status();
  });
  fill(r);
  EXPECT_GT(tries, 0);
  EXPECT_EQ(guests(1), 0u);
  sim().set_hook(nullptr);
  expect_all(r);
}

// Blocks that were only there are lost, and calls report that.
TEST_P(Peers, ALostPeerTakesWhatOnlyItHad) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  systest::LogLines log;
  sim().lose(1, "lost by the test");
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  EXPECT_EQ(vmem::stats().lost_blocks, kGuests);
  size_t lost = 0;
  for (size_t b = 0; b < kRoom + kGuests; ++b) {
    if (bus(word(r, b))) {
      ++lost;
    } else {
      EXPECT_EQ(load(word(r, b)), 100 + b) << b;
    }
  }
  EXPECT_EQ(lost, kGuests);
  ASSERT_EQ(vmem_advise(r.data(), r.size(), VMEM_ADVISE_DONT_NEED, 0), 0) << said();
  put(r, 0, 7);  // the remaining device works
  EXPECT_EQ(load(word(r, 0)), 7u);
}

TEST_P(Peers, ALostPeerTakesNothingThatIsWritten) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = kRoom + kGuests;
  TempFile file(kBlocks * kBlock);
  const vmem::region r(kBlocks * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  ASSERT_EQ(vmem_sync(r.data(), r.size()), 0) << said();
  EXPECT_EQ(guests(1), kGuests);
  systest::LogLines log;
  sim().lose(1, "lost by the test");
  expect_all(r);
}

TEST_P(Peers, WhereTheirOwnDeviceIsLostGuestsAreRight) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + kGuests) * kBlock);
  cold(r, kGuests);
  fill(r);
  ASSERT_TRUE(until([] { return guests(1) == kGuests; }));
  systest::LogLines log;
  sim().lose(0, "lost by the test");
  for (size_t b = 0; b < kGuests; ++b) EXPECT_EQ(load(word(r, b)), 100 + b) << b;
}

// Two devices that are full of leases except for one block each, which the other device waits for.
TEST_P(Peers, TwoDevicesThatWaitForEachOthersBlocksChangeThem) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("peer_spill_percent", "0"), 0) << said();
  const vmem::region a((kRoom - 1) * kBlock), b((kRoom - 1) * kBlock), x(kBlock), y(kBlock);
  ASSERT_EQ(vmem_acquire(a.data(), a.size(), VMEM_READ, 0, streams_of_[0]), 0) << said();
  ASSERT_EQ(vmem_acquire(b.data(), b.size(), VMEM_READ, 1, streams_of_[1]), 0) << said();
  put(x, 0, 7, 0);
  put(y, 0, 8, 1);
  std::atomic<int> there{0};
  const auto want = [&](const vmem::region& r, int d) {
    EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, d, streams_of_[static_cast<size_t>(d)]), 0) << said();
    ++there;
  };
  aside([&] { want(x, 1); });
  aside([&] { want(y, 0); });
  join();
  EXPECT_EQ(there, 2);
  for (const auto* r : {&a, &y}) EXPECT_EQ(vmem_release(r->data(), r->size(), streams_of_[0]), 0) << said();
  for (const auto* r : {&b, &x}) EXPECT_EQ(vmem_release(r->data(), r->size(), streams_of_[1]), 0) << said();
  for (void* s : streams_of_) ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(load(word(x, 0)), 7u);
  EXPECT_EQ(load(word(y, 0)), 8u);
}

// ---- other operations while a block spills

class PeersMeanwhile : public Peers {
 protected:
  // The device is full, and its first block is in transition to the other one.
  void spill(const vmem::region& r) {
    cold(r, 1);
    for (size_t b = 0; b < kRoom; ++b) put(r, b, 100 + b);
    stop_at(GetParam().way);
    aside([&] { put(r, kRoom, 100 + kRoom); });
    ASSERT_TRUE(stopped());
    EXPECT_EQ(guests(1), 1u);
    EXPECT_EQ(device(1).used_bytes, kBlock) << "it counts on both";
  }
  // Runs `what` during the transition on its own thread, which may have to wait until the block
  // arrives.
  void meanwhile(std::function<void()> what) {
    aside(std::move(what));
    usleep(20000);
    go_on();
    join();
  }
};

TEST_P(PeersMeanwhile, ItsOwnDeviceLeasesIt) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  spill(r);
  meanwhile([&] { EXPECT_EQ(seen(r, 0), 100u); });
  expect_all(r);
}

TEST_P(PeersMeanwhile, TheOtherDeviceLeasesIt) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  spill(r);
  meanwhile([&] { EXPECT_EQ(seen(r, 0, 1), 100u); });
  EXPECT_TRUE(until([] { return guests(1) == 0; })) << "it is the device's own";
  expect_all(r);
}

TEST_P(PeersMeanwhile, TheOtherDeviceNeedsAllOfItsRoom) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock), own(kRoom * kBlock);
  spill(r);
  meanwhile([&] {
    EXPECT_EQ(vmem_acquire(own.data(), own.size(), VMEM_READ, 1, streams_of_[1]), 0) << said();
    EXPECT_EQ(vmem_release(own.data(), own.size(), streams_of_[1]), 0) << said();
  });
  EXPECT_EQ(guests(1), 0u);
  expect_all(r);
}

TEST_P(PeersMeanwhile, TheCpuWantsIt) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  spill(r);
  meanwhile([&] {
    EXPECT_EQ(load(word(r, 0)), 100u);
    *word(r, 0) = 100;
  });
  expect_all(r);
}

TEST_P(PeersMeanwhile, ItIsEvictedOrSyncedOrFreed) {
  if (IsSkipped()) return;
  for (const int what : {0, 1, 2}) {
    SCOPED_TRACE(what);
    TempFile file((kRoom + 1) * kBlock);
    vmem::region r((kRoom + 1) * kBlock, file.path(), 0, VMEM_MAP_SHARED);
    spill(r);
    meanwhile([&] {
      if (what == 0) {
        EXPECT_EQ(vmem_evict(word(r, 0), kBlock, VMEM_SSD), 0) << said();
      } else if (what == 1) {
        EXPECT_EQ(vmem_sync(word(r, 0), kBlock), 0) << said();
      }
    });
    if (what == 2) r = vmem::region();
    if (what != 2) expect_all(r);
    r = vmem::region();
    uint64_t is = 0;
    const auto bytes = file.read();
    memcpy(&is, bytes.data(), sizeof is);
    EXPECT_EQ(is, 100u);
  }
}

TEST_P(PeersMeanwhile, TheOtherDeviceIsLost) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  spill(r);
  systest::LogLines log;
  sim().lose(1, "lost by the test");
  go_on();
  join();
  expect_all(r);  // it is where it was, or has moved on to host memory
}

TEST_P(PeersMeanwhile, ItsOwnDeviceIsLost) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  cold(r, 1);
  for (size_t b = 0; b < kRoom; ++b) put(r, b, 100 + b);
  stop_at(GetParam().way);
  aside([&] { EXPECT_NE(vmem_acquire(word(r, kRoom), kBlock, kBoth, 0, stream_), 0); });
  ASSERT_TRUE(stopped());
  systest::LogLines log;
  sim().lose(0, "lost by the test");
  go_on();
  join();
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  uint64_t lost = 0;
  for (size_t b = 0; b < kRoom; ++b) {
    const bool gone = bus(word(r, b));
    EXPECT_TRUE(gone || load(word(r, b)) == 100 + b) << b;
    lost += gone ? 1 : 0;
  }
  EXPECT_EQ(vmem::stats().lost_blocks, lost);
}

TEST_P(PeersMeanwhile, TheBudgetIsLowered) {
  if (IsSkipped()) return;
  const vmem::region r((kRoom + 1) * kBlock);
  spill(r);
  meanwhile([&] { EXPECT_EQ(vmem_set("device_budget", "8MiB"), 0) << said(); });
  EXPECT_TRUE(until([] { return device(0).used_bytes <= 8u << 20 && guests(1) <= 2; }));
  expect_all(r);
}

TEST_P(PeersMeanwhile, TheLibraryIsShutDown) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = kRoom + 1;
  TempFile file(kBlocks * kBlock);
  void* at = nullptr;
  ASSERT_EQ(vmem_map(&at, kBlocks * kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << said();
  for (size_t b = 0; b < kRoom; ++b) {
    auto* w = static_cast<uint64_t*>(at) + b * kWords;
    ASSERT_EQ(vmem_acquire(w, kBlock, kBoth, 0, stream_), 0) << said();
    launch_store(stream_, w, 100 + b);
    ASSERT_EQ(vmem_release(w, kBlock, stream_), 0) << said();
  }
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  stop_at(GetParam().way);
  ASSERT_EQ(vmem_prefetch(static_cast<uint64_t*>(at) + kRoom * kWords, kBlock, 0, nullptr), 0) << said();
  ASSERT_TRUE(stopped());
  aside([] { vmem_shutdown(); });
  usleep(20000);
  go_on();
  join();
  const auto bytes = file.read();
  for (size_t b = 0; b < kRoom; ++b) {
    uint64_t is = 0;
    memcpy(&is, bytes.data() + b * kBlock, sizeof is);
    EXPECT_EQ(is, 100 + b) << b;
  }
}

class FourPeers : public Peers {
 protected:
  void SetUp() override { begin(4, {{"host_budget", "160MiB"}}); }
};

TEST_P(FourPeers, WhatHasNoRoomGoesWhereMostIsLeft) {
  if (IsSkipped()) return;
  const vmem::region own(4 * kBlock), r((kRoom + 3 * kGuests) * kBlock);
  fill(own, 1);
  fill(r);
  EXPECT_TRUE(until([] { return guests_somewhere(4) == 3 * kGuests; }));
  EXPECT_EQ(guests(0), 0u);
  for (int d = 1; d < 4; ++d) EXPECT_EQ(guests(d), kGuests) << d;
  EXPECT_EQ(r.query().device_bytes, r.size());
  for (size_t b = 0; b < kRoom + 3 * kGuests; ++b) EXPECT_EQ(seen(r, b), 100 + b) << b;
  EXPECT_EQ(own.query().device_bytes, own.size());
  expect_all(r);
  expect_all(own);
}

// Each device has more blocks than it can hold, and all use theirs in turn.
TEST_P(FourPeers, DevicesThatAllLackRoomAreRight) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = kRoom + 4;
  std::vector<vmem::region> regions;
  for (int d = 0; d < 4; ++d) regions.emplace_back(kBlocks * kBlock);
  for (int d = 0; d < 4; ++d) {
    aside([&, d] { fill(regions[static_cast<size_t>(d)], d); });
  }
  join();
  for (int turn = 0; turn < 2; ++turn) {
    for (int d = 0; d < 4; ++d) {
      aside([&, d, turn] {
        const vmem::region& r = regions[static_cast<size_t>((d + turn) % 4)];
        for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(seen(r, b, d), 100 + b) << b;
      });
    }
    join();
  }
  for (const vmem::region& r : regions) expect_all(r);
}

constexpr Backend kManaged{"managed", false}, kHandles{"handles", true};
constexpr Backend kBeingCopied{"handles_being_copied", true, "device.sending"};
const auto kBackends = ::testing::Values(kManaged, kHandles);
const auto name = [](const auto& i) { return std::string(i.param.name); };
INSTANTIATE_TEST_SUITE_P(Sim, Peers, kBackends, name);
INSTANTIATE_TEST_SUITE_P(Sim, PeersMeanwhile, ::testing::Values(kManaged, kHandles, kBeingCopied), name);
INSTANTIATE_TEST_SUITE_P(Sim, FourPeers, kBackends, name);

}  // namespace
