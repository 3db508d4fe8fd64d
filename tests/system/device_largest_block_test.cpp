// The largest blocks, 64 MiB, on devices with page tables of their own, with budgets as small as
// possible. Checks every word, on the way to the device, to the SSD and back. Simulated devices.
#include <atomic>
#include <string>
#include <vector>

#include "faulty_disk.h"
#include "sim_support.h"

namespace {

using systest::TempFile;
using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

constexpr size_t kMiB = size_t{1} << 20, kLargest = 64 * kMiB, kWords = kLargest / 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
// With a sanitizer, checks one word of eight cache lines.
const size_t kStride = systest::kSanitized ? 64 : 1;

uint64_t word(size_t i, uint64_t round) {
  return (i + 1) * kOdd + round;
}
size_t wrong(const uint64_t* at, size_t first, size_t count, uint64_t round) {
  size_t sum = 0;
  for (size_t i = 0; i < count; i += kStride) sum += at[i] != word(first + i, round);
  return sum;
}

class LargestBlocks : public systest::SimTest {
 protected:
  void SetUp() override { start_small({}); }
  // The device budget holds two blocks. The host budget holds four staging frames, one frame for
  // faults, a buffer, and tables.
  void start_small(const systest::Settings& more) {
    memory_bytes_ = 160 * kMiB;
    systest::Settings settings{{"device_budget", "128MiB"}, {"host_budget", "392MiB"}, {"staging_share", "90"}};
    settings.insert(settings.end(), more.begin(), more.end());
    systest::wrap_engine(&disk_);
    start(1, settings, true);
  }
  void TearDown() override {
    vmem_shutdown();
    vmem_set("staging_share", "50");
    vmem::api::test_hooks().wrap_engine = nullptr;
    SimTest::TearDown();
  }
  static vmem::region make(size_t blocks, const char* codec = nullptr) {
    vmem::attributes wanted;
    wanted.block_size = kLargest;
    if (codec != nullptr) wanted.codec = codec;
    return vmem::region(blocks * kLargest, wanted);
  }
  static uint64_t* words(const vmem::region& r, size_t b = 0) { return static_cast<uint64_t*>(r.data()) + b * kWords; }
  static void fill(const vmem::region& r, uint64_t round) {
    for (size_t i = 0; i < r.size() / 8; i += kStride) words(r)[i] = word(i, round);
  }
  // Under a lease, a kernel checks the words of a round in block b and stores those of the next.
  void next_round(const vmem::region& r, size_t b, uint64_t round) {
    uint64_t* const at = words(r, b);
    ASSERT_EQ(vmem_acquire(at, kLargest, VMEM_READ | VMEM_WRITE, 0, stream_), 0) << said();
    const auto s = sim().launch(stream_, [=, this](vmem::device::SimKernel& k) {
      auto* const w = reinterpret_cast<uint64_t*>(k.at(at, kLargest, true));
      if (w == nullptr) return;
      wrong_ += wrong(w, b * kWords, kWords, round);
      for (size_t i = 0; i < kWords; i += kStride) w[i] = word(b * kWords + i, round + 1);
      ++ran_;
    });
    ASSERT_TRUE(s.ok()) << s.text();
    ASSERT_EQ(vmem_release(at, kLargest, stream_), 0) << said();
    ASSERT_TRUE(sim().synchronize(stream_).ok());
  }

  FaultyEngine* disk_ = nullptr;
  std::atomic<size_t> wrong_{0}, ran_{0};
};

TEST_F(LargestBlocks, EveryWordIsRightOnTheDeviceAndFromTheDisk) {
  if (IsSkipped()) return;
  constexpr size_t kBlocks = 4;
  const vmem::region r = make(kBlocks);
  ASSERT_EQ(r.query().block_size, kLargest);
  fill(r, 0);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  for (uint64_t round = 0; round < 2; ++round) {
    for (size_t b = 0; b < kBlocks; ++b) next_round(r, b, round);
    EXPECT_LE(device_stats().used_bytes, 2 * kLargest);
    EXPECT_LE(vmem::stats().host_bytes, 392 * kMiB);
  }
  EXPECT_EQ(ran_, 2 * kBlocks);
  EXPECT_EQ(wrong_, 0u);
  EXPECT_GE(device_stats().evictions, 4u) << "whichever of them leave: two hits in eight are the most";
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  EXPECT_EQ(r.query().ssd_bytes, r.size());
  EXPECT_EQ(wrong(words(r), 0, r.size() / 8, 2), 0u) << "the CPU loads";
}

TEST_F(LargestBlocks, TheCpuTakesTurnsWithKernels) {
  if (IsSkipped()) return;
  const vmem::region r = make(3);
  fill(r, 0);
  for (size_t b = 0; b < 3; ++b) next_round(r, b, 0);
  // A load under a READ lease gets a copy; the device keeps the block.
  ASSERT_EQ(vmem_acquire(words(r, 2), kLargest, VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(wrong(words(r, 2), 2 * kWords, kWords, 1), 0u);
  EXPECT_GE(r.query().device_bytes, kLargest);
  ASSERT_EQ(vmem_release(words(r, 2), kLargest, stream_), 0) << said();
  // Without a lease the block comes to host memory, and the next kernel sees stores of the CPU.
  EXPECT_EQ(wrong(words(r), 0, 3 * kWords, 1), 0u);
  for (size_t i = 0; i < kWords; i += kStride) words(r, 1)[i] = word(kWords + i, 2);
  next_round(r, 1, 2);
  EXPECT_EQ(wrong_, 0u);
  EXPECT_EQ(ran_, 4u);
  EXPECT_EQ(wrong(words(r, 1), kWords, kWords, 3), 0u);
}

TEST_F(LargestBlocks, ALeaseHasAsManyAsTheBudgetHolds) {
  if (IsSkipped()) return;
  const vmem::region r = make(3);
  ASSERT_EQ(vmem_acquire(r.data(), 2 * kLargest, VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(r.query().device_bytes, 2 * kLargest);
  ASSERT_EQ(vmem_release(r.data(), 2 * kLargest, stream_), 0) << said();
  EXPECT_EQ(vmem_acquire(words(r) + kWords - 1, kLargest + 16, VMEM_READ, 0, stream_), -ENOMEM) << "parts of three";
  for (const char* part : {"the lease of 192 MiB, in whole blocks of 64 MiB", "device_budget 128 MiB"})
    EXPECT_NE(said().find(part), std::string::npos) << said();
  EXPECT_EQ(vmem_set("device_budget", "48MiB"), -EINVAL);
  EXPECT_NE(said().find("holds no block of 64 MiB"), std::string::npos) << said();
}

TEST_F(LargestBlocks, FourStagingFramesAreTheLeast) {
  start_small({{"staging_share", "50"}, {"host_budget", "511MiB"}});
  if (IsSkipped()) return;
  struct vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = kLargest;
  void* p = nullptr;
  EXPECT_EQ(vmem_create(&p, kLargest, &attr), -ENOMEM) << "half of it is for staging frames";
  EXPECT_NE(said().find("at least 256 MiB for blocks of 64 MiB"), std::string::npos) << said();
  attr.block_size = kLargest / 2;
  ASSERT_EQ(vmem_create(&p, kLargest, &attr), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
  start_small({{"staging_share", "50"}, {"host_budget", "512MiB"}});
  attr.block_size = kLargest;
  ASSERT_EQ(vmem_create(&p, kLargest, &attr), 0) << said();
  EXPECT_EQ(vmem_free(p), 0) << said();
}

TEST_F(LargestBlocks, WhatIsCompressedIsRight) {
  for (const char* codec : {"lz4", "zstd"}) {
    SCOPED_TRACE(codec);
    start_small({{"host_budget", "512MiB"}});  // one more buffer
    if (IsSkipped()) return;
    const vmem::region r = make(2, codec);
    // Half of the words are equal, so that compression pays off.
    for (size_t i = 0; i < r.size() / 8; ++i) words(r)[i] = i % 2 == 0 ? 7 : word(i, 0);
    ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
    EXPECT_LT(vmem::stats().ssd_bytes, r.size());
    ASSERT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ | VMEM_WRITE, 0, stream_), 0) << said();
    launch_store(stream_, words(r) + 1, 5);
    ASSERT_EQ(vmem_release(r.data(), r.size(), stream_), 0) << said();
    ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
    size_t bad = words(r)[1] != 5;
    for (size_t i = 0; i < r.size() / 8; ++i) bad += i != 1 && words(r)[i] != (i % 2 == 0 ? 7 : word(i, 0));
    EXPECT_EQ(bad, 0u);
  }
}

// Encryption writes in parts of 256 KiB, and has buffers for them.
TEST_F(LargestBlocks, EveryWayToTheDiskIsRight) {
  using Setting = std::pair<const char*, const char*>;
  for (const auto& [name, value] : {Setting{"encryption", "on"}, {"io_engine", "threads"}, {"direct_io", "off"}}) {
    SCOPED_TRACE(name);
    start_small({{name, value}, {"host_budget", "420MiB"}});
    if (IsSkipped()) return;
    const vmem::region r = make(3);
    fill(r, 0);
    ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
    ran_ = 0;
    for (size_t b = 0; b < 3; ++b) next_round(r, b, 0);
    EXPECT_EQ(ran_, 3u);
    EXPECT_EQ(wrong_, 0u);
    ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
    EXPECT_EQ(wrong(words(r), 0, r.size() / 8, 1), 0u);
  }
}

// Reads and writes that complete in parts, and a single wrong bit.
TEST_F(LargestBlocks, ShortTransfersGoOnAndAWrongBitIsFound) {
  if (IsSkipped()) return;
  const vmem::region r = make(1);
  fill(r, 0);
  Fault fault;
  fault.action = Fault::Action::short_transfer;
  fault.limit = 6;
  const auto half = disk_->add_rule(fault);
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  next_round(r, 0, 0);
  EXPECT_EQ(wrong_, 0u);
  EXPECT_EQ(ran_, 1u);
  EXPECT_EQ(disk_->fired(half), 6u);
  disk_->clear_rules();
  ASSERT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), 0) << said();
  fault.action = Fault::Action::flip_bit;
  fault.op = Io::Op::read;
  fault.limit = 2;  // an acquire retries once
  disk_->add_rule(fault);
  EXPECT_EQ(vmem_acquire(r.data(), 8, VMEM_READ, 0, stream_), -EIO);
  EXPECT_NE(said().find("checksum"), std::string::npos) << said();
  disk_->clear_rules();
  ASSERT_EQ(vmem_acquire(r.data(), 8, VMEM_READ, 0, stream_), 0) << said();
  ASSERT_EQ(vmem_release(r.data(), 8, stream_), 0) << said();
  EXPECT_EQ(wrong(words(r), 0, kWords, 1), 0u);
}

TEST_F(LargestBlocks, AFileThatEndsInTheMiddleOfOneStaysAsLongAsItWas) {
  if (IsSkipped()) return;
  constexpr size_t kBytes = kLargest + 5 * kMiB + 4096 + 24;
  const TempFile file(kBytes, 3);
  {
    vmem::attributes wanted;
    wanted.block_size = kLargest;
    wanted.path = file.path();
    wanted.flags = VMEM_MAP_SHARED;
    const vmem::region r(kBytes, wanted);
    for (const size_t at : {size_t{0}, kWords - 1, kWords, kBytes / 8 - 1}) store_on_device(words(r) + at, 100 + at);
    ASSERT_EQ(vmem_sync(r.data(), r.size()), 0) << said();
  }
  const vmem::region again(kBytes, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  EXPECT_EQ(again.size(), kBytes);
  for (const size_t at : {size_t{0}, kWords - 1, kWords, kBytes / 8 - 1}) EXPECT_EQ(words(again)[at], 100 + at);
}

}  // namespace
