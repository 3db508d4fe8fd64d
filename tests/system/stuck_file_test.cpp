// Regions whose files refuse changes after they were mapped: each has a way out, and other regions
// are not affected.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBlock = 64 << 10;
constexpr size_t kSize = 8 * kMiB;

int create(void** at, size_t size, unsigned flags, int fd = 0, size_t block = kBlock) {
  vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = block;
  attr.flags = flags | VMEM_HOST_ONLY;
  attr.fd = fd;
  return vmem_create(at, size, &attr);
}

// A file in memory that is mapped but refuses write(2) from refuse() until take_again().
class StuckFile : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "16MiB"}, {"fault_timeout_ms", "2000"}, {"log", "warning"}});
  }
  void TearDown() override {
    if (fd_ >= 0) close(fd_);
    SystemTest::TearDown();
  }
  // Maps the file and changes all of it.
  void map_and_change() {
    fd_ = memfd_create("stuck", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(fd_, kSize), 0);
    ASSERT_EQ(create(&at_, kSize, VMEM_MAP_SHARED, fd_), 0) << vmem_last_error();
    memset(at_, 1, kSize);
  }
  void seal() { ASSERT_EQ(fcntl(fd_, F_ADD_SEALS, 0x10 /* F_SEAL_FUTURE_WRITE */), 0) << strerror(errno); }

  int fd_ = -1;
  void* at_ = nullptr;
};

TEST_F(StuckFile, AMappedFileCannotBeSealedAgainstWriting) {
  map_and_change();
  EXPECT_NE(fcntl(fd_, F_ADD_SEALS, F_SEAL_WRITE), 0) << "as where it is mapped by mmap";
  EXPECT_EQ(errno, EBUSY);
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
  EXPECT_EQ(fcntl(fd_, F_ADD_SEALS, F_SEAL_WRITE), 0) << "the region is gone";
}

TEST_F(StuckFile, DiscardEndsItAndSaysOnceWhatIsLost) {
  map_and_change();
  seal();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(vmem_free(at_), -EPERM);
  EXPECT_EQ(vmem_discard(at_), -EIO);
  EXPECT_NE(std::string(vmem_last_error()).find("128 blocks of 64 KiB"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_discard(at_), -EINVAL) << "it is gone";
  EXPECT_EQ(vmem::stats().regions, 0u);
  void* next = nullptr;
  ASSERT_EQ(create(&next, 64 * kMiB, 0), 0);
  memset(next, 2, 64 * kMiB);
  EXPECT_EQ(vmem_free(next), 0);
  EXPECT_EQ(vmem_discard(nullptr), 0);
}

TEST_F(StuckFile, DiscardOfWhatItsFileTakesIsAFree) {
  map_and_change();
  EXPECT_EQ(vmem_discard(at_), 0) << vmem_last_error();
  unsigned char last = 0;
  EXPECT_EQ(pread(fd_, &last, 1, kSize - 1), 1);
  EXPECT_EQ(last, 1);
}

TEST_F(StuckFile, DiscardIsRefusedByALease) {
  map_and_change();
  seal();
  ASSERT_EQ(vmem_acquire(at_, kBlock, VMEM_READ, VMEM_HOST, nullptr), 0);
  EXPECT_EQ(vmem_discard(at_), -EBUSY);
  EXPECT_EQ(*static_cast<char*>(at_), 1) << "and nothing of it is lost";
  ASSERT_EQ(vmem_release(at_, kBlock, nullptr), 0);
  EXPECT_EQ(vmem_discard(at_), -EIO);
}

TEST_F(StuckFile, DontNeedDropsWhatTheFileRefusesForGood) {
  map_and_change();
  seal();
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), -EIO);
  EXPECT_NE(std::string(vmem_last_error()).find("128 blocks"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << "said once: " << vmem_last_error();
  const auto in = residency(at_, kSize);
  EXPECT_EQ(in.host_bytes, 0u) << "the budget is back";
  EXPECT_EQ(static_cast<char*>(at_)[kSize - 1], 0) << "what the file has";
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
}

TEST_F(StuckFile, OthersGoOnInTheRoomThatIsLeft) {
  map_and_change();
  seal();
  EXPECT_EQ(vmem_evict(at_, kSize, VMEM_SSD), -EPERM);
  for (const size_t block : {kBlock, size_t{2} * kMiB}) {
    void* next = nullptr;
    ASSERT_EQ(create(&next, 48 * kMiB, 0, 0, block), 0) << vmem_last_error();
    auto* const words = static_cast<volatile uint64_t*>(next);
    for (uint64_t i = 0; i < 48 * kMiB / 8; i += 512) words[i] = systest::stamp(i, 1);
    for (uint64_t i = 0; i < 48 * kMiB / 8; i += 512) ASSERT_EQ(words[i], systest::stamp(i, 1)) << i;
    EXPECT_EQ(vmem_sync(next, 48 * kMiB), 0) << "what another file refuses is not said here: " << vmem_last_error();
    EXPECT_EQ(vmem_free(next), 0);
  }
  EXPECT_EQ(static_cast<char*>(at_)[0], 1);
  EXPECT_EQ(vmem_discard(at_), -EIO);
}

// A file system that is full, and later has room.
class FullFile : public StuckFile {
 protected:
  void SetUp() override {
    StuckFile::SetUp();
    folder_ = systest::temp_folder() + "/vmem-full.XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    if (mount("none", folder_.c_str(), "tmpfs", 0, "size=10m") != 0) GTEST_SKIP() << "mount: " << strerror(errno);
    mounted_ = true;
    fd_ = open((folder_ + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(ftruncate(fd_, kSize), 0);
    ASSERT_EQ(create(&at_, kSize, VMEM_MAP_SHARED, fd_), 0) << vmem_last_error();
    memset(at_, 1, kSize);
    fill_ = open((folder_ + "/fill").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(posix_fallocate(fill_, 0, 10 * kMiB - kBlock), 0);
  }
  void TearDown() override {
    if (at_ != nullptr) vmem_discard(at_);
    close(fill_);
    StuckFile::TearDown();
    if (mounted_) umount2(folder_.c_str(), MNT_DETACH);
    rmdir(folder_.c_str());
  }
  std::string folder_;
  int fill_ = -1;
  bool mounted_ = false;
};

TEST_F(FullFile, TheFirstDontNeedKeepsWhatAFullDiskRefusesAndTheNextDropsIt) {
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), -ENOSPC);
  EXPECT_EQ(static_cast<char*>(at_)[kSize - 1], 1) << "nothing is lost";
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), -EIO);
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(static_cast<char*>(at_)[kSize - 1], 0);
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
  at_ = nullptr;
}

TEST_F(FullFile, WithRoomAgainNothingIsLost) {
  EXPECT_EQ(vmem_free(at_), -ENOSPC);
  ASSERT_EQ(ftruncate(fill_, 0), 0);
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
  EXPECT_EQ(static_cast<char*>(at_)[kSize - 1], 1);
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
  at_ = nullptr;
}

TEST_F(FullFile, ItIsAskedAgainInTheBackground) {
  EXPECT_EQ(vmem_evict(at_, kSize, VMEM_SSD), -ENOSPC);
  ASSERT_EQ(ftruncate(fill_, 0), 0);
  void* next = nullptr;
  ASSERT_EQ(create(&next, 48 * kMiB, 0), 0);
  vmem_residency in = {};
  in.size = sizeof in;
  // Other regions need the memory: blocks that can be written by now leave for them.
  EXPECT_TRUE(vmem::test::eventually([&] {
    memset(next, 3, 48 * kMiB);
    return vmem_query(at_, kSize, &in) == 0 && in.host_bytes < kSize / 2;
  }));
  EXPECT_EQ(vmem_free(next), 0);
}

// Blocks that the file refuses fill the whole budget.
TEST_F(StuckFile, WhereNothingIsLeftTheLogNamesTheRegionAndTheWayOut) {
  vmem_shutdown();
  configure({{"host_budget", "8MiB"}, {"fault_timeout_ms", "500"}});
  fd_ = memfd_create("stuck", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd_, kSize), 0);
  ASSERT_EQ(create(&at_, kSize, VMEM_MAP_SHARED, fd_), 0) << vmem_last_error();
  ASSERT_EQ(vmem_name(at_, "accounts"), 0);
  systest::LogLines lines;
  auto* const bytes = static_cast<volatile char*>(at_);
  bytes[0] = 1;
  seal();
  size_t stored = 0;
  EXPECT_TRUE(systest::raises_sigbus([&] {
    for (; stored < kSize; stored += 4096) bytes[stored] = 1;
  }));
  EXPECT_TRUE(lines.contains("region accounts #1 keeps")) << "the log names it";
  EXPECT_TRUE(lines.contains("vmem_discard")) << "and the way out";
  EXPECT_EQ(vmem_advise(at_, kSize, VMEM_ADVISE_DONT_NEED, 0), -EIO);
  EXPECT_EQ(bytes[stored], 0) << "an access is served again";
  EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
}

}  // namespace
