// Disks that fail, lie, are slow or full, seen through the C API: either an error with a message or
// the right bytes.
#include <sys/mman.h>
#include <sys/utsname.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "common/patience.h"
#include "core/step.h"
#include "faulty_disk.h"
#include "support.h"

namespace systest {
namespace {

using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

// If the kernel has none, only an acquire removes the SIGBUS: nothing else could replace the page
// in one step.
bool kernel_has_poison() {
  utsname name = {};
  unsigned major = 0, minor = 0;
  EXPECT_EQ(uname(&name), 0);
  EXPECT_EQ(sscanf(name.release, "%u.%u", &major, &minor), 2);
  return major > 6 || (major == 6 && minor >= 6);
}

constexpr size_t kBlock = 2 << 20;
constexpr size_t kWords = kBlock / sizeof(uint64_t);

class FaultInjection : public SystemTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // The parameter: the way that blocks are transferred, which decides whose memory is written and
  // whose is dropped.
  void start(Settings more = {}) {
    wrap_engine(&disk);
    Settings settings{{"transfer", GetParam()}, {"readahead", "0"}};
    settings.insert(settings.end(), more.begin(), more.end());
    configure(settings);
  }
  static Fault fault(Fault::Action action, Io::Op op) {
    Fault f;
    f.action = action;
    f.op = op;
    return f;
  }
  static void write(const vmem::region& r, size_t block, uint64_t round) {
    uint64_t* words = r.view<uint64_t>().data() + block * kWords;
    for (size_t i = 0; i < kWords; ++i) words[i] = stamp(block * kWords + i, round);
  }
  static bool right(const vmem::region& r, size_t block, uint64_t round) {
    const uint64_t* words = r.view<uint64_t>().data() + block * kWords;
    for (size_t i = 0; i < kWords; ++i) {
      if (words[i] != stamp(block * kWords + i, round)) return false;
    }
    return true;
  }
  static bool bus(const vmem::region& r, size_t block) {
    return raises_sigbus([&] { (void)*static_cast<volatile uint64_t*>(r.view<uint64_t>().data() + block * kWords); });
  }
  static void* at(const vmem::region& r, size_t block) { return static_cast<char*>(r.data()) + block * kBlock; }

  FaultyEngine* disk = nullptr;
};

TEST_P(FaultInjection, AReadErrorIsSigbusWithWordsAndMendsWithTheDisk) {
  LogLines log;
  start();
  if (IsSkipped()) return;
  vmem::region r(3 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 3; ++b) write(r, b, 1);
  r.evict();
  disk->add_rule(fault(Fault::Action::error, Io::Op::read));
  EXPECT_TRUE(bus(r, 1));
  EXPECT_TRUE(log.contains("block 1")) << "the block is named";
  EXPECT_TRUE(log.contains("path ")) << "and where it lies";
  EXPECT_EQ(vmem_acquire(r.data(), r.size(), VMEM_READ, VMEM_HOST, nullptr), -EIO);
  EXPECT_NE(std::string(vmem_last_error()).find("offset"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_release(r.data(), r.size(), nullptr), -EINVAL) << "nothing was leased";
  EXPECT_GE(vmem::stats().io_errors, 2u);
  disk->clear_rules();
  {
    vmem::lease lease(r.data(), r.size(), VMEM_READ);
    for (size_t b = 0; b < 3; ++b) EXPECT_TRUE(right(r, b, 1)) << b;
  }
}

TEST_P(FaultInjection, AnAccessAfterAReadErrorReadsAgain) {
  start();
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 2; ++b) write(r, b, 1);
  r.evict();
  disk->add_rule(fault(Fault::Action::error, Io::Op::read));
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(bus(r, 1));
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO);
  EXPECT_EQ(vmem_sync(r.data(), kBlock), 0);
  disk->clear_rules();
  if (!vmem::test::eventually([&] { return !bus(r, 1); })) {
    EXPECT_FALSE(kernel_has_poison());
    GTEST_SKIP() << "this kernel has no UFFDIO_POISON";
  }
  for (size_t b = 0; b < 2; ++b) EXPECT_TRUE(right(r, b, 1)) << b;
  EXPECT_EQ(vmem_sync(r.data(), r.size()), 0);
}

TEST_P(FaultInjection, AReadErrorOfAMappedFileNamesTheFile) {
  LogLines log;
  TempFile file(2 * kBlock);
  start();
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
  disk->add_rule(fault(Fault::Action::error, Io::Op::read));
  EXPECT_TRUE(bus(r, 0));
  EXPECT_TRUE(log.contains(file.path()));
}

TEST_P(FaultInjection, AFlippedBitIsNeverShown) {
  start();
  if (IsSkipped()) return;
  vmem::region r(kBlock, VMEM_HOST_ONLY);
  write(r, 0, 1);
  r.evict();
  disk->add_rule(fault(Fault::Action::flip_bit, Io::Op::read));
  EXPECT_TRUE(bus(r, 0));
  EXPECT_EQ(vmem::stats().checksum_errors, 1u);
  disk->clear_rules();
  vmem::lease lease(r.data(), r.size(), VMEM_READ);
  EXPECT_TRUE(right(r, 0, 1));
}

// The disk corrupts any part of a long block, whose digest is computed while it arrives.
TEST_P(FaultInjection, AFlippedBitInAnyPartOfALongBlockIsFound) {
  constexpr size_t kLong = 8 << 20;
  TempFile store;
  start({{"ssd_path", store.path()}});
  if (IsSkipped()) return;
  vmem::region r(2 * kLong, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = kLong, .codec = "none"});
  for (size_t b = 0; b < 2 * kLong / kBlock; ++b) write(r, b, 1);
  r.evict();
  const auto* first = reinterpret_cast<const char*>(r.view<uint64_t>().data());
  const uint64_t word = stamp(kLong / sizeof(uint64_t), 1);  // the second block begins with this word
  const std::vector<unsigned char> bytes = store.read();
  size_t begin = 0;
  while (begin < bytes.size() && memcmp(bytes.data() + begin, &word, sizeof word) != 0) begin += 4096;
  ASSERT_LE(begin + kLong, bytes.size());
  const int fd = open(store.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  uint64_t errors = 0;
  for (const size_t at : {size_t{0}, kBlock - 1, kBlock, 2 * kBlock + 9, 3 * kBlock, kLong - 1}) {
    const unsigned char was = bytes[begin + at], is = was ^ 4;
    ASSERT_EQ(pwrite(fd, &is, 1, static_cast<off_t>(begin + at)), 1);
    EXPECT_TRUE(raises_sigbus([&] { (void)*reinterpret_cast<const volatile char*>(first + kLong); })) << at;
    EXPECT_EQ(vmem::stats().checksum_errors, ++errors);
    ASSERT_EQ(pwrite(fd, &was, 1, static_cast<off_t>(begin + at)), 1);
    {
      const vmem::lease lease(first + kLong, kLong, VMEM_READ);
      for (size_t b = kLong / kBlock; b < 2 * kLong / kBlock; ++b) EXPECT_TRUE(right(r, b, 1));
    }
    vmem::check(vmem_evict(first + kLong, kLong, VMEM_SSD));
  }
  close(fd);
  // Short transfers, each of which is continued.
  Fault halved = fault(Fault::Action::short_transfer, Io::Op::read);
  halved.limit = 12;
  const auto rule = disk->add_rule(halved);
  for (size_t b = 0; b < kLong / kBlock; ++b) EXPECT_TRUE(right(r, b, 1));
  EXPECT_EQ(disk->fired(rule), 12u);
  EXPECT_EQ(vmem::stats().checksum_errors, errors);
}

// At a depth of one, each part but the last is complete before the next one arrives.
TEST_P(FaultInjection, TheDigestOfALongBlockIsTakenWhileItComes) {
  constexpr size_t kLong = 8 << 20;
  start({{"io_depth", "1"}, {"io_threads", "1"}});
  if (IsSkipped()) return;
  vmem::region r(kLong, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = kLong, .codec = "none"});
  for (size_t b = 0; b < kLong / kBlock; ++b) write(r, b, 1);
  r.evict();
  static std::atomic<int> digested;
  digested = 0;
  vmem::core::step_hook.store([](const char* step) { digested += std::strcmp(step, "fill.digest") == 0; });
  for (size_t b = 0; b < kLong / kBlock; ++b) EXPECT_TRUE(right(r, b, 1));
  vmem::core::step_hook.store(nullptr);
  EXPECT_GE(digested.load(), 1);
}

// Drops pages as an allocator does, whatever they contain.
TEST_P(FaultInjection, ADroppedPageOfAFailedBlockGetsSigbusAllTheSame) {
  start();
  if (IsSkipped()) return;
  vmem::region r(kBlock, VMEM_HOST_ONLY);
  write(r, 0, 1);
  r.evict();
  disk->add_rule(fault(Fault::Action::error, Io::Op::read));
  EXPECT_TRUE(bus(r, 0));
  ASSERT_EQ(madvise(at(r, 0), 4096, MADV_DONTNEED), 0);
  EXPECT_TRUE(bus(r, 0));
  disk->clear_rules();
  vmem::lease lease(r.data(), r.size(), VMEM_READ);
  EXPECT_TRUE(right(r, 0, 1));
}

// The region's attribute decides whether it is verified, if it is set.
TEST_P(FaultInjection, ARegionIsVerifiedAsItsAttributeSays) {
  start();
  if (IsSkipped()) return;
  for (const bool verified : {false, true}) {
    ASSERT_EQ(vmem_set("checksum", verified ? "off" : "on"), 0);
    vmem::region r(kBlock, vmem::attributes{.flags = VMEM_HOST_ONLY, .codec = "none", .checksum = verified ? 1 : -1});
    write(r, 0, 1);
    r.evict();
    disk->add_rule(fault(Fault::Action::flip_bit, Io::Op::read));
    EXPECT_EQ(bus(r, 0), verified);
    EXPECT_EQ(vmem::stats().checksum_errors, verified ? 1u : 0u);
    disk->clear_rules();
  }
}

TEST_P(FaultInjection, ATornWriteIsFoundByItsChecksum) {
  start();
  if (IsSkipped()) return;
  vmem::region r(kBlock, VMEM_HOST_ONLY);
  write(r, 0, 1);
  disk->add_rule(fault(Fault::Action::torn_write, Io::Op::write));
  r.evict();
  EXPECT_TRUE(bus(r, 0));
  EXPECT_EQ(vmem::stats().checksum_errors, 1u);
}

TEST_P(FaultInjection, AFlushOfTheFileThatFailsIsReportedBySync) {
  TempFile file(2 * kBlock);
  start();
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  write(r, 0, 1);
  disk->add_rule(fault(Fault::Action::error, Io::Op::flush));
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -EIO) << "written, but not durable";
  disk->clear_rules();
}

TEST_P(FaultInjection, AFullDiskKeepsDataInMemoryAndSyncSaysSo) {
  start();
  if (IsSkipped()) return;
  vmem::region r(8 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 8; ++b) write(r, b, 1);
  Fault full = fault(Fault::Action::error, Io::Op::write);
  full.error = ENOSPC;
  disk->add_rule(full);
  EXPECT_EQ(vmem_sync(r.data(), r.size()), -ENOSPC);
  EXPECT_EQ(vmem_evict(r.data(), r.size(), VMEM_SSD), -ENOSPC);
  for (size_t b = 0; b < 8; ++b) {
    EXPECT_TRUE(right(r, b, 1)) << b;
    write(r, b, 2);
  }
  disk->clear_rules();
  r.sync();
  r.evict();
  for (size_t b = 0; b < 8; ++b) EXPECT_TRUE(right(r, b, 2)) << b;
}

TEST_P(FaultInjection, AFullBudgetEndsInSigbusAndTheSameBytesAreReadableLater) {
  start({{"host_budget", "32MiB"}, {"ssd_budget", "0"}, {"fault_timeout_ms", "100"}});
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock, VMEM_HOST_ONLY);
  size_t b = 0;
  while (b < 32 && !raises_sigbus([&] { write(r, b, 1); })) ++b;
  ASSERT_GT(b, 4u);
  ASSERT_LT(b, 32u) << "there is no room for all";
  EXPECT_LE(vmem::stats().host_bytes, vmem::stats().host_budget);
  EXPECT_EQ(vmem_sync(r.data(), b * kBlock), -ENOSPC);
  for (size_t i = 0; i < b; ++i) EXPECT_TRUE(right(r, i, 1)) << i;
  vmem::set("ssd_budget", "1T");
  // waits for memory, and makes the block usable again
  vmem::lease lease(at(r, b), kBlock, VMEM_READ | VMEM_WRITE);
  write(r, b, 1);
  for (size_t i = 0; i <= b; ++i) EXPECT_TRUE(right(r, i, 1)) << i;
}

TEST_P(FaultInjection, ShortTransfersAreContinued) {
  start();
  if (IsSkipped()) return;
  vmem::region r(4 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 4; ++b) write(r, b, 1);
  Fault half;
  half.action = Fault::Action::short_transfer;
  half.probability = 0.7;
  const auto rule = disk->add_rule(half);
  r.evict();
  for (size_t b = 0; b < 4; ++b) EXPECT_TRUE(right(r, b, 1)) << b;
  EXPECT_GT(disk->fired(rule), 0u);
  EXPECT_EQ(vmem::stats().io_errors, 0u);
}

TEST_P(FaultInjection, SlowWritesFailNoFault) {
  start({{"host_budget", "32MiB"}, {"fault_timeout_ms", "20"}});
  if (IsSkipped()) return;
  vmem::region r(32 * kBlock, VMEM_HOST_ONLY);
  Fault slow;
  slow.action = Fault::Action::delay;
  slow.delay_ms = 60;
  disk->add_rule(slow);
  for (size_t b = 0; b < 32; ++b) write(r, b, 1);
  for (size_t b = 0; b < 32; ++b) EXPECT_TRUE(right(r, b, 1)) << b;
}

TEST_P(FaultInjection, AHangingWriteHoldsUpNoOtherBlock) {
  start();
  if (IsSkipped()) return;
  vmem::region r(3 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 3; ++b) write(r, b, 1);
  vmem::check(vmem_evict(at(r, 0), kBlock, VMEM_SSD));
  Fault hang = fault(Fault::Action::hang, Io::Op::write);
  hang.limit = 1;
  disk->add_rule(hang);
  std::thread syncing([&] { EXPECT_EQ(vmem_sync(at(r, 1), kBlock), 0); });
  ASSERT_TRUE(disk->wait_hanging(1, 60000));
  EXPECT_TRUE(right(r, 0, 1)) << "read meanwhile";
  write(r, 2, 2);
  vmem::check(vmem_evict(at(r, 2), kBlock, VMEM_SSD));
  EXPECT_TRUE(right(r, 2, 2));
  disk->release();
  syncing.join();
  EXPECT_TRUE(right(r, 1, 1));
}

INSTANTIATE_TEST_SUITE_P(, FaultInjection, ::testing::Values("auto", "copy"),
                         [](const auto& p) { return std::string(p.param); });

}  // namespace
}  // namespace systest
