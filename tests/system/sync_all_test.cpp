// vmem_sync(NULL, 0): syncs every region, tries all of them, and returns the first error.
#include <cerrno>

#include "common/patience.h"
#include "faulty_disk.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;
using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

constexpr size_t kBlock = 2 << 20;

class SyncAll : public SystemTest {
 protected:
  void start() {
    systest::wrap_engine(&disk);
    configure({{"device", "none"}, {"readahead", "0"}});
  }
  static unsigned char first_byte(const TempFile& file) { return file.read().at(0); }
  static vmem::region shared(const TempFile& file) {
    vmem::region r(kBlock, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    r.view<unsigned char>()[0] = static_cast<unsigned char>(~TempFile::content(8, 1)[0]);
    return r;
  }

  const unsigned char changed = static_cast<unsigned char>(~TempFile::content(8, 1)[0]);
  FaultyEngine* disk = nullptr;
};

TEST_F(SyncAll, WritesEveryRegion) {
  TempFile one(kBlock), two(kBlock);
  start();
  if (IsSkipped()) return;
  const vmem::region first = shared(one), second = shared(two), zeros(4 * kBlock, VMEM_HOST_ONLY);
  for (size_t b = 0; b < 4; ++b) zeros.view<uint64_t>()[b * kBlock / 8] = b + 1;
  const uint64_t written = vmem::stats().write_bytes;
  vmem::sync();
  EXPECT_EQ(first_byte(one), changed);
  EXPECT_EQ(first_byte(two), changed);
  EXPECT_GE(vmem::stats().write_bytes - written, 6 * kBlock);
  zeros.evict();
  EXPECT_GE(vmem::stats().clean_drops, 4u) << "what was synced has its copy";
}

TEST_F(SyncAll, TriesAllAndTellsTheFirstError) {
  TempFile one(kBlock), two(kBlock), three(kBlock);
  start();
  if (IsSkipped()) return;
  const vmem::region regions[] = {shared(one), shared(two), shared(three)};
  Fault fails;
  fails.op = Io::Op::flush;
  fails.error = ENOSPC;
  fails.limit = 1;
  Fault later = fails;
  later.error = EIO;
  disk->add_rule(fails);
  const auto rule = disk->add_rule(later);
  EXPECT_EQ(vmem_sync(nullptr, 0), -ENOSPC) << vmem_last_error();
  EXPECT_EQ(disk->fired(rule), 1u) << "the second was tried too";
  for (const TempFile* file : {&one, &two, &three}) EXPECT_EQ(first_byte(*file), changed);
  disk->clear_rules();
  EXPECT_EQ(vmem_sync(nullptr, 0), 0) << vmem_last_error();
}

TEST_F(SyncAll, WithoutRegionsThereIsNothingToSyncWhateverFailedBefore) {
  start();
  if (IsSkipped()) return;
  Fault fails;
  fails.op = Io::Op::write;
  fails.error = ENOSPC;
  disk->add_rule(fails);
  {
    vmem::region r(kBlock, VMEM_HOST_ONLY);
    r.view<uint64_t>()[0] = 1;
    r.prefetch(VMEM_SSD);
    EXPECT_TRUE(vmem::test::eventually([] { return vmem::stats().io_errors != 0; }));
  }
  disk->clear_rules();
  EXPECT_EQ(vmem_sync(nullptr, 0), 0) << vmem_last_error();
}

TEST_F(SyncAll, SkipsWhatIsLeasedForWritingAndPrefersAnErrorToSayingSo) {
  TempFile one(kBlock), two(kBlock);
  start();
  if (IsSkipped()) return;
  const vmem::region first = shared(one), second = shared(two);
  const vmem::lease held(first.data(), 1, VMEM_READ | VMEM_WRITE);
  EXPECT_EQ(vmem_sync(nullptr, 0), -EBUSY);
  EXPECT_EQ(first_byte(two), changed) << "the other region is synced all the same";
  Fault fails;
  fails.op = Io::Op::flush;
  disk->add_rule(fails);
  EXPECT_EQ(vmem_sync(nullptr, 0), -EIO);
  disk->clear_rules();
}

TEST_F(SyncAll, WithoutARuntimeStartsNone) {
  EXPECT_EQ(vmem_sync(nullptr, 0), 0) << vmem_last_error();
  vmem::api::Runtime::Use pager;
  EXPECT_TRUE(vmem::api::Runtime::get().use_if_running(&pager).ok());
  EXPECT_FALSE(pager);
}

TEST_F(SyncAll, IsAskedForByBothArguments) {
  start();
  if (IsSkipped()) return;
  const vmem::region region(kBlock, VMEM_HOST_ONLY);
  EXPECT_EQ(vmem_sync(nullptr, 1), -EINVAL);
  EXPECT_EQ(vmem_sync(region.data(), 0), -EINVAL);
  EXPECT_EQ(vmem_version(), VMEM_VERSION_MAJOR * 1000 + VMEM_VERSION_MINOR);
}

}  // namespace
