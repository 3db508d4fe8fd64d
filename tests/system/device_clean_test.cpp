// When a block on a device counts as clean: never while a stream may still store to it, and not if
// a write did not complete. On simulated devices.
#include <fcntl.h>

#include <cstring>

#include "child.h"
#include "core/process/map_over.h"
#include "device/managed/fault_gate.h"
#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;

class DeviceClean : public systest::SimTest {
 protected:
  static uint64_t in_file(const TempFile& file, size_t offset) {
    uint64_t value = 0;
    const auto bytes = file.read();
    if (offset + 8 <= bytes.size()) memcpy(&value, bytes.data() + offset, 8);
    return value;
  }
  // Maps both blocks of the file, and makes the second show its file, which has a 7 there then.
  static void show_second(const TempFile& file, void** p) {
    ASSERT_EQ(vmem_map(p, 2 * kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << said();
    auto* const word = static_cast<uint64_t*>(*p) + kBlock / 8;
    ASSERT_EQ(truncate(file.path().c_str(), kBlock), 0);
    EXPECT_TRUE(bus(word));
    // SIGBUS may come before the block's state says why.
    EXPECT_TRUE(until([&] { return residency(word, kBlock).host_bytes == 0; }));
    ASSERT_EQ(truncate(file.path().c_str(), 2 * kBlock), 0);
    *static_cast<volatile uint64_t*>(word) = 7;  // in the mapping of the file
  }
};

// The module cannot map a file in place of a block.
class DeviceCleanOnUserfault : public DeviceClean {
 protected:
  void SetUp() override { start(1, {{"trap", "uffd"}}); }
  void TearDown() override {
    DeviceClean::TearDown();
    vmem_set("trap", "auto");
  }
};

constexpr unsigned kBoth = VMEM_READ | VMEM_WRITE;

// The release and the next acquire are queued on the stream, which has yet to store. A sync in
// progress must not take the block's current contents as final.
TEST_F(DeviceClean, AReadLeaseBehindAReleasedWriteLeaseHidesNoStore) {
  if (IsSkipped()) return;
  ASSERT_EQ(vmem_set("device_budget", "64MiB"), 0) << vmem_last_error();
  constexpr size_t kBlocks = 18;  // more than one batch
  vmem::region r(kBlocks * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  uint64_t* const last = words + (kBlocks - 1) * kBlock / 8;
  ASSERT_EQ(vmem_acquire(words, r.size(), kBoth, 0, stream_), 0) << vmem_last_error();
  for (size_t b = 0; b < kBlocks; ++b) launch_store(stream_, words + b * kBlock / 8, 1);
  ASSERT_EQ(vmem_release(words, r.size(), stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  stop_at("device.leaving");  // with the first blocks; from here on the sync can reach the last one
  int synced = 1;
  std::thread syncing([&] { synced = vmem_sync(words, kBlocks * kBlock); });
  const bool stopped_there = stopped();
  std::atomic<bool> store{false};
  EXPECT_EQ(vmem_acquire(last, kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_store(stream_, last, 2, &store);
  EXPECT_EQ(vmem_release(last, kBlock, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_acquire(last, kBlock, VMEM_READ, 0, stream_), 0) << vmem_last_error();
  go_on();
  syncing.join();
  store = true;
  ASSERT_TRUE(stopped_there);
  EXPECT_EQ(synced, -EBUSY) << "one block was not to be synced";
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(vmem_release(last, kBlock, stream_), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(words, r.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(*last, 2u);
  EXPECT_EQ(words[0], 1u);
}

// exit() also writes blocks under a live lease, and the program may continue. Run in a process of
// its own: after exit() begins, calls from inside other calls are refused, and the hooks of some
// tests make such calls.
TEST_F(DeviceClean, ABlockThatIsWrittenUnderAWriteLeaseIsWrittenAgain) {
  if (IsSkipped()) return;
  const pid_t child =
      systest::start_child("DeviceCleanChild.DISABLED_ABlockThatIsWrittenUnderAWriteLeaseIsWrittenAgain");
  EXPECT_EQ(systest::wait_for_child(child, 120), 0);
}

class DeviceCleanChild : public DeviceClean {};

TEST_F(DeviceCleanChild, DISABLED_ABlockThatIsWrittenUnderAWriteLeaseIsWrittenAgain) {
  ASSERT_FALSE(IsSkipped());
  TempFile file(2 * kBlock);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  auto* words = static_cast<uint64_t*>(r.data());
  ASSERT_EQ(vmem_acquire(words, kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_store(stream_, words, 7);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  vmem::api::Runtime::get().finish();
  EXPECT_EQ(in_file(file, 0), 7u);
  launch_store(stream_, words, 8);
  ASSERT_EQ(vmem_release(words, kBlock, stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(vmem_sync(words, r.size()), 0) << vmem_last_error();
  EXPECT_EQ(in_file(file, 0), 8u);
}

TEST_F(DeviceClean, WhatAFileThatWasCutDidNotTakeIsStillAChange) {
  if (IsSkipped()) return;
  TempFile file(2 * kBlock);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED);
  uint64_t* const second = static_cast<uint64_t*>(r.data()) + kBlock / 8;
  ASSERT_EQ(vmem_acquire(second, kBlock, kBoth, 0, stream_), 0) << vmem_last_error();
  launch_store(stream_, second, 7);
  launch_store(stream_, second + 4096, 8);
  ASSERT_EQ(vmem_release(second, kBlock, stream_), 0) << vmem_last_error();
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  ASSERT_EQ(truncate(file.path().c_str(), kBlock + 4096), 0);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
  EXPECT_EQ(r.query().device_bytes, kBlock);
  EXPECT_EQ(in_file(file, kBlock), 7u);
  EXPECT_EQ(file.read().size(), kBlock + 4096) << "it is not made longer";
  ASSERT_EQ(truncate(file.path().c_str(), 2 * kBlock), 0);
  // The block is unchanged on its device, and the file lacks a part of it.
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
  EXPECT_EQ(in_file(file, kBlock + 4096 * 8), 8u);
  EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(second[0], 7u);
  EXPECT_EQ(second[4096], 8u);
}

// If the file ends before the block does, the file's own pages are mapped, and the data stored
// there exists nowhere else.
TEST_F(DeviceCleanOnUserfault, AnAcquireLeavesWhatOnlyTheMappingOfAShortFileHas) {
  if (IsSkipped()) return;
  TempFile file(2 * kBlock);
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_PRIVATE);
  auto* words = static_cast<volatile uint64_t*>(r.data());
  ASSERT_EQ(truncate(file.path().c_str(), 4096), 0);
  words[3] = 5;
  ASSERT_EQ(words[3], 5u);
  EXPECT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 0, stream_), -EIO);
  EXPECT_NE(said().find("shorter"), std::string::npos) << said();
  EXPECT_EQ(words[3], 5u);
  EXPECT_EQ(vmem_release(r.data(), kBlock, stream_), -EINVAL) << "nothing was leased";
}

// Host memory is full of blocks that cannot leave, and staging frames are full of blocks that only
// the SSD can take.
TEST_F(DeviceClean, StagingFramesAreWrittenThoughHostMemoryHasNobodyToEvict) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 40;
  // With blocks of this size, the memory to keep free exceeds the part that leases cannot use.
  ASSERT_EQ(vmem_set("block_size", "8MiB"), 0);
  vmem::region large(4 * kBlock, VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_set("block_size", "2MiB"), 0);
  vmem::region r(kBlocks * kBlock), host(64 * kBlock, VMEM_HOST_ONLY);
  auto* const bytes = static_cast<char*>(host.data());
  size_t leased = 0;
  while (vmem_acquire(bytes + leased * kBlock, kBlock, VMEM_READ, VMEM_HOST, nullptr) == 0) ++leased;
  ASSERT_GT(leased, 0u);
  const uint64_t written = vmem::stats().write_bytes;
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t b = 0; b < kBlocks; ++b) {
    store_on_device(words + b * kBlock / 8, b + 1);
    ASSERT_EQ(vmem_evict(words + b * kBlock / 8, kBlock, VMEM_HOST), 0) << b << ": " << vmem_last_error();
  }
  EXPECT_GT(vmem::stats().write_bytes, written);
  EXPECT_EQ(vmem_release(bytes, leased * kBlock, nullptr), 0) << vmem_last_error();
  host.free();
  for (size_t b = 0; b < kBlocks; ++b) EXPECT_EQ(words[b * kBlock / 8], b + 1);
}

// A file system may have to write a file's pages before it removes them. All other threads continue
// during that time.
TEST_F(DeviceCleanOnUserfault, AShownFileIsTakenAwayWithoutTheLock) {
  if (IsSkipped()) return;
  const TempFile file(4 * kBlock);
  const auto content = file.read();
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, 4 * kBlock, file.path().c_str(), 0, VMEM_MAP_PRIVATE | VMEM_HOST_ONLY), 0) << said();
  auto* const words = static_cast<volatile uint64_t*>(p);
  constexpr size_t kWords = kBlock / 8;
  ASSERT_EQ(truncate(file.path().c_str(), kBlock), 0);
  EXPECT_TRUE(bus(const_cast<uint64_t*>(words + 2 * kWords)));
  ASSERT_EQ(truncate(file.path().c_str(), 4 * kBlock), 0);
  words[2 * kWords] = 7;  // in the mapping of the file
  stop_at("file.hiding");
  aside(
      [&] { EXPECT_EQ(vmem_advise(const_cast<uint64_t*>(words + 2 * kWords), kBlock, VMEM_ADVISE_DONT_NEED, 0), 0); });
  ASSERT_TRUE(stopped());
  uint64_t first = 0;
  memcpy(&first, content.data(), sizeof first);
  EXPECT_EQ(words[0], first);  // by a fault
  EXPECT_EQ(vmem_sync(p, kBlock), 0) << said();
  std::atomic<bool> dropped{false};
  aside([&] {  // waits for the first block
    EXPECT_EQ(vmem_advise(const_cast<uint64_t*>(words + 2 * kWords), kBlock, VMEM_ADVISE_DONT_NEED, 0), 0);
    dropped = true;
  });
  go_on();
  EXPECT_TRUE(until([&] { return dropped.load(); }));
  EXPECT_EQ(words[2 * kWords], 0u);
  words[2 * kWords] = 8;
  EXPECT_EQ(vmem_evict(p, 4 * kBlock, VMEM_SSD), 0) << said();
  EXPECT_EQ(words[2 * kWords], 8u);
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  EXPECT_EQ(vmem_free(p), 0) << said();
}

// The file's pages are gone, and the trap is not in place yet.
TEST_F(DeviceCleanOnUserfault, WhoReadsAShownFileThatIsTakenAwayWaits) {
  if (IsSkipped()) return;
  const TempFile file(2 * kBlock);
  void* p = nullptr;
  ASSERT_NO_FATAL_FAILURE(show_second(file, &p));
  auto* const word = static_cast<uint64_t*>(p) + kBlock / 8;
  stop_at("trap.anew.shut");
  std::atomic<int> acquired{1};
  aside([&] { acquired = vmem_acquire(word, kBlock, VMEM_READ, 0, stream_); });
  const bool taken = stopped();
  const uint64_t parked = vmem::device::fault_gate::stats().parked;
  std::atomic<uint64_t> value{0};
  if (taken) aside([&] { value = *static_cast<volatile uint64_t*>(word); });
  EXPECT_TRUE(taken && until([&] { return vmem::device::fault_gate::stats().parked > parked; }));
  EXPECT_EQ(value, 0u);
  go_on();
  EXPECT_TRUE(until([&] { return acquired != 1 && value != 0; }));
  EXPECT_EQ(acquired, 0);
  EXPECT_EQ(value, 7u);
  EXPECT_EQ(vmem_release(word, kBlock, stream_), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
}

// The kernel refuses the trap after the file's pages are gone, here because another file now lies
// there. The region's own file is then mapped again.
TEST_F(DeviceCleanOnUserfault, AShownFileThatCannotBeTakenAwayIsThereAsBefore) {
  if (IsSkipped()) return;
  const TempFile file(2 * kBlock);
  void* p = nullptr;
  ASSERT_NO_FATAL_FAILURE(show_second(file, &p));
  auto* const word = static_cast<uint64_t*>(p) + kBlock / 8;
  static std::atomic<uintptr_t> block;
  static const int other = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(other, 0);
  block = reinterpret_cast<uintptr_t>(word);
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "trap.anew.shut") == 0) vmem::core::map_over(block, kBlock, PROT_NONE, MAP_SHARED, other, 0);
  });
  EXPECT_LT(vmem_acquire(word, kBlock, VMEM_READ, 0, stream_), 0);
  vmem::core::step_hook.store(nullptr);
  EXPECT_EQ(vmem_release(word, kBlock, stream_), -EINVAL) << "nothing was leased";
  EXPECT_EQ(*static_cast<volatile uint64_t*>(word), 7u);
  *static_cast<volatile uint64_t*>(word) = 8;
  EXPECT_EQ(vmem_acquire(word, kBlock, VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(*static_cast<volatile uint64_t*>(word), 8u);
  EXPECT_EQ(vmem_release(word, kBlock, stream_), 0) << said();
  // waits until it has arrived
  EXPECT_EQ(vmem_advise(word, kBlock, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << said();
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  EXPECT_EQ(vmem_free(p), 0) << said();
}

// In a region without a device tier no thread can park: its pages are dropped in place.
TEST_F(DeviceCleanOnUserfault, WhoReadsAShownFileThatIsDroppedReadsOn) {
  if (IsSkipped()) return;
  const TempFile file(2 * kBlock);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, 2 * kBlock, file.path().c_str(), 0, VMEM_MAP_PRIVATE | VMEM_HOST_ONLY), 0) << said();
  auto* const word = static_cast<uint64_t*>(p) + kBlock / 8;
  ASSERT_EQ(truncate(file.path().c_str(), kBlock), 0);
  EXPECT_TRUE(bus(word));
  ASSERT_EQ(truncate(file.path().c_str(), 2 * kBlock), 0);
  *static_cast<volatile uint64_t*>(word) = 7;
  static std::atomic<uint64_t> reads;
  reads = 0;
  std::atomic<bool> end{false};
  std::thread reader([&] {
    for (; !end; ++reads) (void)*static_cast<volatile uint64_t*>(word);
  });
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "trap.anew.shut") != 0) return;
    const uint64_t before = reads;
    EXPECT_TRUE(until([&] { return reads > before + 1; }));
  });
  EXPECT_EQ(vmem_advise(word, kBlock, VMEM_ADVISE_DONT_NEED, 0), 0) << said();
  vmem::core::step_hook.store(nullptr);
  end = true;
  reader.join();
  EXPECT_EQ(*static_cast<volatile uint64_t*>(word), 0u) << "what was stored there is dropped";
  EXPECT_EQ(vmem_acquire(word, kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0) << said();
  *static_cast<volatile uint64_t*>(word) = 8;
  EXPECT_EQ(vmem_release(word, kBlock, nullptr), 0) << said();
  EXPECT_EQ(*static_cast<volatile uint64_t*>(word), 8u);
  EXPECT_EQ(vmem_free(p), 0) << said();
}

class StagingFrames : public systest::SimTest {
 protected:
  void SetUp() override { start(1, {{"host_budget", "40MiB"}}); }
};

// Host memory is full of blocks that the CPU uses. They leave to make room for the staging frames
// of the first region with a device tier.
TEST_F(StagingFrames, HaveRoomMadeForTheFirst) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 32, kMore = 8, kWords = kBlock / 8;
  vmem::region host(kBlocks * kBlock, VMEM_HOST_ONLY);
  auto* const words = static_cast<uint64_t*>(host.data());
  for (size_t i = 0; i < kBlocks * kWords; ++i) words[i] = systest::stamp(i, 1);
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kMore * kBlock, 0), 0) << said();
  auto* const more = static_cast<uint64_t*>(p);
  for (size_t b = 0; b < kMore; ++b) store_on_device(more + b * kWords, b + 1);
  for (size_t b = 0; b < kMore; ++b) EXPECT_EQ(more[b * kWords], b + 1);
  for (size_t i = 0; i < kBlocks * kWords; ++i) ASSERT_EQ(words[i], systest::stamp(i, 1)) << i;
  EXPECT_LE(vmem::stats().host_bytes, size_t{40} << 20);
  EXPECT_EQ(vmem_free(p), 0) << said();
}

}  // namespace
