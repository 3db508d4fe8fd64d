// State that a lost or refusing device leaves behind: marks that calls report, and never older
// bytes. On simulated devices.
#include <atomic>
#include <thread>

#include "sim_support.h"

namespace {

using systest::kBlock;
using systest::TempFile;
using vmem::core::Status;
using vmem::device::SimOp;

class DeviceMarks : public systest::SimTest {};

TEST_F(DeviceMarks, AChangeOfASharedFileLostInTheBackgroundIsToldBySync) {
  if (IsSkipped()) return;
  TempFile file(4 * kBlock);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, 4 * kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  auto* words = static_cast<uint64_t*>(p);
  store_on_device(words, 7);
  words[kBlock / 8] = 8;
  sim().lose(0, "the test took it away");
  ASSERT_EQ(vmem_prefetch(p, kBlock, VMEM_SSD, nullptr), 0) << "a hint tells nobody";
  ASSERT_TRUE(until([&] {
    vmem_residency where{sizeof where, 0, 0, 0, 0, 0};
    return vmem_query(p, kBlock, &where) == 0 && where.device_bytes == 0;
  }));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(vmem_sync(p, 4 * kBlock), -EIO);
    EXPECT_NE(said().find(file.path()), std::string::npos) << said();
    EXPECT_NE(said().find("offset 0"), std::string::npos) << said();
  }
  uint64_t other = 0;
  memcpy(&other, file.read().data() + kBlock, 8);
  EXPECT_EQ(other, 8u) << "the rest of the range is synced";
  EXPECT_EQ(vmem_evict(p, kBlock, VMEM_SSD), -EIO);
  EXPECT_TRUE(bus(words));
  EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
}

TEST_F(DeviceMarks, FreeTellsOfALostChangeWhenNobodyHas) {
  if (IsSkipped()) return;
  TempFile file(4 * kBlock);
  void* p = nullptr;
  ASSERT_EQ(vmem_map(&p, 4 * kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
  auto* words = static_cast<uint64_t*>(p);
  store_on_device(words, 7);
  words[kBlock / 8] = 8;
  sim().lose(0, "the test took it away");
  int rc = 0, tries = 0;
  while ((rc = vmem_free(p)) == -EIO && ++tries < 10) EXPECT_NE(said().find("offset 0"), std::string::npos) << said();
  EXPECT_EQ(rc, 0) << vmem_last_error();
  EXPECT_GE(tries, 1) << "it said so";
  EXPECT_LE(tries, 2) << "the region can be freed";
  uint64_t other = 0;
  memcpy(&other, file.read().data() + kBlock, 8);
  EXPECT_EQ(other, 8u) << "what was elsewhere reached the file";
}

TEST_F(DeviceMarks, ALostBlockNeverShowsWhatTheSsdHadBefore) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  words[0] = 6;
  r.evict();
  store_on_device(words, 7);
  sim().lose(0, "the test took it away");
  EXPECT_EQ(vmem_evict(words, kBlock, VMEM_SSD), -EIO);
  EXPECT_NE(said().find("block 0"), std::string::npos) << said();
  EXPECT_TRUE(bus(words));
  EXPECT_EQ(vmem_acquire(words, 8, VMEM_READ, VMEM_HOST, nullptr), -EIO);
  EXPECT_TRUE(bus(words)) << "6 would be older than the 7 that was lost";
  EXPECT_EQ(vmem_sync(words, 8), -EIO);
  EXPECT_EQ(vmem_advise(words, kBlock, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(vmem_sync(words, 8), 0) << vmem_last_error();
  EXPECT_EQ(words[0], 0u);
  words[0] = 9;
  r.evict();
  EXPECT_EQ(words[0], 9u);
}

TEST_F(DeviceMarks, ABlockThatItsDeviceWillNotLetGoStaysThereWhole) {
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  store_on_device(words, 7);
  sim().set_hook(
      [](SimOp op, int, uintptr_t, size_t) { return op == SimOp::punch ? vmem::core::error(ENOMEM, "no") : Status(); });
  EXPECT_EQ(vmem_evict(words, kBlock, VMEM_HOST), -ENOMEM);
  EXPECT_NE(said().find("block 0"), std::string::npos) << said();
  EXPECT_EQ(vmem_advise(words, kBlock, VMEM_ADVISE_DONT_NEED, 0), -ENOMEM) << "not dropped, and not said to be";
  EXPECT_EQ(words[0], 7u);
  EXPECT_EQ(r.query().device_bytes, kBlock);
  sim().set_hook(nullptr);
  EXPECT_EQ(vmem_evict(words, kBlock, VMEM_HOST), 0) << vmem_last_error();
  EXPECT_EQ(words[0], 7u);
  EXPECT_EQ(r.query().device_bytes, 0u);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0) << vmem_last_error();
}

// The copy in fails after the lease was granted: by then a kernel may have stored, or only loaded.
TEST_F(DeviceMarks, ACopyInThatFailsUnderALeaseLosesOnlyWhatAKernelMayHaveChanged) {
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock);
  auto* words = static_cast<uint64_t*>(r.data());
  for (size_t b = 0; b < 4; ++b) words[b * kBlock / 8] = b + 1;
  std::atomic<bool> go{false};
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op != SimOp::copy_in) return Status();
    while (!go) std::this_thread::yield();
    return vmem::core::error(EIO, "the link is down");
  });
  const vmem_range both[] = {{words, kBlock, VMEM_READ | VMEM_WRITE, 0},
                             {words + 2 * kBlock / 8, kBlock, VMEM_READ, 0}};
  ASSERT_EQ(vmem_acquire_ranges(both, 2, 0, stream_), 0) << vmem_last_error();
  go = true;
  EXPECT_TRUE(until([&] { return r.query().device_bytes == 0; }));
  sim().set_hook(nullptr);
  vmem_release_ranges(both, 2, stream_);
  EXPECT_EQ(words[2 * kBlock / 8], 3u) << "nobody stored there: the bytes never left host memory";
  EXPECT_TRUE(bus(words));
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  EXPECT_NE(said().find("block 0"), std::string::npos) << said();
  EXPECT_EQ(words[kBlock / 8], 2u);
}

}  // namespace
