// vmem_export: another process has the memory of leased blocks, and maps it here by the descriptor.
// A simulated device's descriptor covers all of its memory; the offset is the block's place in it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "sim_support.h"

namespace {

using systest::kBlock;

constexpr size_t kWords = kBlock / 8;

class Export : public systest::SimTest {
 protected:
  void SetUp() override { start(1, {}, true); }
  static uint64_t* words(vmem::region& r) { return static_cast<uint64_t*>(r.data()); }
  int acquire(const void* at, size_t size, unsigned access) { return vmem_acquire(at, size, access, 0, stream_); }
  int release(const void* at, size_t size) { return vmem_release(at, size, stream_); }
  // Maps the importer's view of a block, until the test ends.
  uint64_t* map(int fd, size_t size = kBlock) {
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, lseek(fd, 0, SEEK_CUR));
    EXPECT_NE(at, MAP_FAILED);
    EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
    close(fd);
    return static_cast<uint64_t*>(at);
  }
  uint64_t* share(const void* at) {
    int fd = -1;
    EXPECT_EQ(vmem_export(at, 8, 0, &fd), 0) << said();
    return map(fd);
  }
};

TEST_F(Export, TheOtherOneReadsWhatKernelsStoreAndTheyReadWhatItStores) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  uint64_t* const w = words(r);
  w[kWords] = 5;
  ASSERT_EQ(acquire(w, r.size(), VMEM_READ | VMEM_WRITE), 0) << said();
  uint64_t* const seen = share(w + kWords + 7);
  EXPECT_EQ(seen[0], 5u);
  launch_store(stream_, w + kWords + 1, 6);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(seen[1], 6u);
  seen[2] = 7;
  ASSERT_EQ(release(w, r.size()), 0) << said();
  EXPECT_EQ(w[kWords + 2], 7u) << "the block came to host memory with it";
  munmap(seen, kBlock);
}

TEST_F(Export, ADmaBufIsOfAllBlocksThatHaveAByteOfTheRange) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  uint64_t* const w = words(r);
  for (size_t b = 0; b < 4; ++b) w[b * kWords] = b + 1;
  for (size_t b = 0; b < 4; ++b) {  // one by one, so that they are adjacent in device memory
    ASSERT_EQ(acquire(w + b * kWords, kBlock, VMEM_READ), 0) << said();
  }
  int fd = -1;
  ASSERT_EQ(vmem_export(w + 2 * kWords - 1, 16, VMEM_EXPORT_DMA_BUF, &fd), 0) << said();
  uint64_t* const seen = map(fd, 2 * kBlock);
  EXPECT_EQ(seen[0], 2u);
  EXPECT_EQ(seen[kWords], 3u);
  munmap(seen, 2 * kBlock);
  ASSERT_EQ(release(w, r.size()), 0) << said();
}

// The bytes stay in place for the importer, and no other block uses that memory next.
TEST_F(Export, MemoryThatWasExportedIsNoOtherBlocksAfterTheLease) {
  if (IsSkipped()) return;
  vmem::region r(kBlock), other(24 * kBlock);
  uint64_t* const w = words(r);
  for (uint64_t round = 1; round <= 3; ++round) {
    w[0] = round;
    ASSERT_EQ(acquire(w, kBlock, VMEM_READ), 0) << said();
    uint64_t* const seen = share(w);
    ASSERT_EQ(release(w, kBlock), 0) << said();
    r.evict();
    for (size_t b = 0; b < 24; ++b) {
      words(other)[b * kWords] = 100 * round + b;
      ASSERT_EQ(acquire(words(other) + b * kWords, kBlock, VMEM_READ | VMEM_WRITE), 0) << said();
      launch_store(stream_, words(other) + b * kWords + 1, 200 * round + b);
      ASSERT_EQ(release(words(other) + b * kWords, kBlock), 0) << said();
    }
    EXPECT_EQ(seen[0], round);
    EXPECT_EQ(seen[1], 0u);
    for (size_t i = 0; i < kWords; ++i) seen[i] = 99;  // no block uses this memory any more
    for (size_t b = 0; b < 24; ++b) {
      ASSERT_EQ(words(other)[b * kWords], 100 * round + b);
      ASSERT_EQ(words(other)[b * kWords + 1], 200 * round + b);
    }
    EXPECT_EQ(w[0], round);
    munmap(seen, kBlock);
  }
}

TEST_F(Export, WhatIsNotLeasedAtADeviceIsRefused) {
  if (IsSkipped()) return;
  vmem::region r(3 * kBlock), host(kBlock, VMEM_HOST_ONLY);
  uint64_t* const w = words(r);
  int fd = -7;
  EXPECT_EQ(vmem_export(w, kBlock, 0, &fd), -EINVAL);
  EXPECT_NE(said().find("lease"), std::string::npos) << said();
  ASSERT_EQ(acquire(w, 2 * kBlock, VMEM_READ), 0) << said();
  EXPECT_EQ(vmem_export(w, 2 * kBlock, 0, &fd), -EINVAL) << "of one block";
  EXPECT_EQ(vmem_export(w, 3 * kBlock, VMEM_EXPORT_DMA_BUF, &fd), -EINVAL) << "the third is under no lease";
  EXPECT_EQ(vmem_export(w, kBlock, 2, &fd), -EINVAL);
  EXPECT_EQ(vmem_export(w, kBlock, 0, nullptr), -EINVAL);
  EXPECT_EQ(vmem_export(w, r.size() + 1, 0, &fd), -EINVAL);
  ASSERT_EQ(release(w, 2 * kBlock), 0);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_EQ(vmem_export(w, kBlock, 0, &fd), -EINVAL) << "the lease has ended";
  ASSERT_EQ(vmem_acquire(w, kBlock, VMEM_READ, VMEM_HOST, nullptr), 0) << said();
  EXPECT_EQ(vmem_export(w, kBlock, 0, &fd), -EINVAL);
  ASSERT_EQ(vmem_release(w, kBlock, nullptr), 0);
  EXPECT_EQ(vmem_export(host.data(), kBlock, 0, &fd), -EOPNOTSUPP);
  EXPECT_EQ(fd, -7) << "nothing is written on error";
}

TEST_F(Export, ABlockThatTheCpuStoredToUnderAReadLeaseIsRefused) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  uint64_t* const w = words(r);
  w[0] = 1;
  ASSERT_EQ(acquire(w, kBlock, VMEM_READ), 0) << said();
  w[0] = 2;
  int fd = -1;
  EXPECT_EQ(vmem_export(w, kBlock, 0, &fd), -EBUSY);
  ASSERT_EQ(release(w, kBlock), 0);
  EXPECT_EQ(w[0], 2u);
}

TEST_F(Export, WhatTheDeviceRefusesIsAnErrorAndTheBlockStays) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  uint64_t* const w = words(r);
  w[0] = 1;
  ASSERT_EQ(acquire(w, kBlock, VMEM_READ | VMEM_WRITE), 0) << said();
  sim().set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
    return op == vmem::device::SimOp::share ? vmem::core::error(EIO, "as the test wants it") : vmem::core::Status();
  });
  int fd = -1;
  EXPECT_EQ(vmem_export(w, kBlock, 0, &fd), -EIO);
  sim().set_hook(nullptr);
  launch_store(stream_, w + 1, 3);
  ASSERT_EQ(release(w, kBlock), 0);
  EXPECT_EQ(w[1], 3u);
}

// Other operations on the block wait until it has been exported, and are done then.
TEST_F(Export, ABlockIsNotMovedWhileItIsExported) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  uint64_t* const w = words(r);
  w[0] = 1;
  ASSERT_EQ(acquire(w, kBlock, VMEM_READ), 0) << said();
  stop_at("export.claimed");
  uint64_t* seen = nullptr;
  aside([&] { seen = share(w); });
  ASSERT_TRUE(until([] { return stopped(); }));
  ASSERT_EQ(release(w, kBlock), 0) << "the lease ends in the middle of it";
  uint64_t loaded = 0;
  aside([&] { loaded = w[0]; });
  aside([&] { EXPECT_EQ(vmem_evict(w, kBlock, VMEM_HOST), 0) << vmem_last_error(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(r.query().device_bytes, kBlock);
  go_on();
  join();
  EXPECT_EQ(loaded, 1u);
  EXPECT_EQ(seen[0], 1u);
  munmap(seen, kBlock);
}

using ExportManaged = systest::SimTest;

TEST_F(ExportManaged, IsRefused) {
  if (IsSkipped()) return;
  vmem::region r(kBlock);
  int fd = -1;
  ASSERT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, 0, stream_), 0) << said();
  EXPECT_EQ(vmem_export(r.data(), kBlock, 0, &fd), -EOPNOTSUPP);
  ASSERT_EQ(vmem_release(r.data(), kBlock, stream_), 0);
}

}  // namespace
