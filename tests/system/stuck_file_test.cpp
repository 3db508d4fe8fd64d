// Regions whose files refuse changes after they were mapped: a way out for each, and nobody else suffers. Files that
// are shorter than their regions, and that grow.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBlock = 64 << 10;
constexpr size_t kSize = 8 * kMiB;

int create(void** at, size_t size, unsigned flags, int fd = 0, size_t block = kBlock, const char* path = nullptr) {
  vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = block;
  attr.flags = flags | VMEM_HOST_ONLY;
  attr.fd = path == nullptr ? fd : -1;
  attr.path = path;
  return vmem_create(at, size, &attr);
}

// A file in memory that takes no write(2) from refuse() on, though it is mapped, until take_again().
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
  // A region over it, all of it changed.
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
  vmem_residency in = {};
  in.size = sizeof in;
  ASSERT_EQ(vmem_query(at_, kSize, &in), 0);
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

// A file system that is full, and has room later.
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
  // Others need the memory: what can be written by now leaves for them.
  EXPECT_TRUE(vmem::test::eventually([&] {
    memset(next, 3, 48 * kMiB);
    return vmem_query(at_, kSize, &in) == 0 && in.host_bytes < kSize / 2;
  }));
  EXPECT_EQ(vmem_free(next), 0);
}

// All of the budget is taken by what its file refuses.
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

// Regions that are longer than their files.

class ShortFile : public SystemTest, public ::testing::WithParamInterface<size_t> {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "16MiB"}, {"log", "warning"}});
  }
};

TEST_P(ShortFile, IsRightInsideAndGrowsWithItsFile) {
  for (const unsigned how : {VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE}) {
    SCOPED_TRACE(how);
    TempFile file(10000, 5);
    const auto want = TempFile::content(10000, 5);
    const int fd = open(file.path().c_str(), O_RDWR | O_CLOEXEC);
    systest::LogLines lines;
    void* at = nullptr;
    ASSERT_EQ(create(&at, kSize, how, 0, GetParam(), file.path().c_str()), 0) << vmem_last_error();
    auto* const bytes = static_cast<volatile unsigned char*>(at);
    for (size_t i = 0; i < 12288; i += 7) ASSERT_EQ(int{bytes[i]}, i < 10000 ? want[i] : 0) << i;
    EXPECT_FALSE(lines.contains(file.path())) << "no access has failed, and none is said to have";
    EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[12288]; }));
    EXPECT_TRUE(systest::raises_sigbus([&] { (void)bytes[kSize - 1]; }));
    EXPECT_TRUE(lines.contains("beyond its end")) << "this one has";
    ASSERT_EQ(ftruncate(fd, kSize), 0);
    ASSERT_EQ(pwrite(fd, "there", 5, 20000), 5);
    EXPECT_EQ(bytes[20000], 't');
    EXPECT_EQ(bytes[kSize - 1], 0);
    EXPECT_EQ(bytes[100], want[100]);
    if (how == VMEM_MAP_SHARED) {
      bytes[5 * kMiB] = 9;
      bytes[200] = 8;
      ASSERT_EQ(vmem_sync(at, kSize), 0) << vmem_last_error();
      EXPECT_EQ(file.read()[5 * kMiB], 9);
      EXPECT_EQ(file.read()[200], 8);
    }
    EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
    close(fd);
  }
}

TEST_P(ShortFile, AnEmptyFileIsTakenAndFilledThroughItsRegion) {
  TempFile file(0);
  void* at = nullptr;
  const int fd = open(file.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(create(&at, kSize, VMEM_MAP_SHARED, 0, GetParam(), file.path().c_str()), 0) << vmem_last_error();
  auto* const bytes = static_cast<unsigned char*>(at);
  systest::LogLines lines;
  for (size_t end = kBlock; end <= kSize; end += kBlock) {  // as a database grows its file
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(end)), 0);
    memset(bytes + end - kBlock, static_cast<int>(end / kBlock), kBlock);
  }
  EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
  EXPECT_FALSE(lines.contains(file.path()));
  const auto is = file.read();
  ASSERT_EQ(is.size(), kSize);
  for (size_t i = 0; i < kSize; i += 511) ASSERT_EQ(int{is[i]}, static_cast<unsigned char>(i / kBlock + 1)) << i;
  close(fd);
}

TEST_P(ShortFile, ShrinksAndGrowsQuietly) {
  TempFile file(kSize, 6);
  void* at = nullptr;
  const int fd = open(file.path().c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(create(&at, kSize, VMEM_MAP_SHARED, 0, GetParam(), file.path().c_str()), 0) << vmem_last_error();
  auto* const bytes = static_cast<unsigned char*>(at);
  systest::LogLines lines;
  for (int round = 0; round < 3; ++round) {
    memset(bytes, round, kSize);
    ASSERT_EQ(ftruncate(fd, kSize / 2 + 100), 0);
    ASSERT_EQ(vmem_sync(at, kSize), 0) << vmem_last_error();
    ASSERT_EQ(vmem_evict(at, kSize, VMEM_SSD), 0) << vmem_last_error();
    for (size_t i = 0; i < kSize / 2 + 100; i += 127) ASSERT_EQ(int{bytes[i]}, round) << i;
    ASSERT_EQ(ftruncate(fd, kSize), 0);
    for (size_t i = kSize / 2 + 100; i < kSize; i += 127) ASSERT_EQ(int{bytes[i]}, 0) << i;
  }
  EXPECT_FALSE(lines.contains(file.path()));
  EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
  close(fd);
}

INSTANTIATE_TEST_SUITE_P(, ShortFile, ::testing::Values(size_t{4096}, kBlock, 2 * kMiB),
                         [](const auto& p) { return std::to_string(p.param >> 10) + "KiB"; });

// Addresses in a reservation.

class FixedAddress : public SystemTest {
 protected:
  static constexpr size_t kHuge = 2 * kMiB;
  void SetUp() override {
    SystemTest::SetUp();
    configure({{"host_budget", "16MiB"}});
    void* const at = mmap(nullptr, 64 * kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    whole_ = at;
    reserved_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(at) + kHuge - 1) / kHuge * kHuge);
  }
  void TearDown() override {
    // There may be holes.
    mmap(whole_, 64 * kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    munmap(whole_, 64 * kMiB);
    SystemTest::TearDown();
  }
  static int create_at(void* address, size_t size, void** at, unsigned flags = VMEM_FIXED | VMEM_HOST_ONLY) {
    vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.flags = flags;
    attr.block_size = kBlock;
    attr.address = address;
    return vmem_create(at, size, &attr);
  }
  void* whole_ = nullptr;
  char* reserved_ = nullptr;
};

TEST_F(FixedAddress, ARegionTakesItsPlaceInAReservationAndGivesItBack) {
  for (int round = 0; round < 2; ++round) {
    void *at = nullptr, *next = nullptr;
    const int rc = create_at(reserved_ + kHuge, 8 * kMiB, &at);
    if (rc == -EOPNOTSUPP) GTEST_SKIP() << vmem_last_error();
    ASSERT_EQ(rc, 0) << vmem_last_error();
    EXPECT_EQ(at, reserved_ + kHuge);
    ASSERT_EQ(create_at(reserved_ + kHuge + 8 * kMiB, 24 * kMiB, &next), 0) << vmem_last_error();
    memset(at, 1, 8 * kMiB);
    memset(next, 2, 24 * kMiB);
    for (size_t i = 0; i < 8 * kMiB; i += 4096) ASSERT_EQ(static_cast<char*>(at)[i], 1) << i;
    EXPECT_EQ(create_at(reserved_ + kHuge, 8 * kMiB, &at), -EEXIST) << "a region is no reservation";
    EXPECT_EQ(vmem_free(at), 0) << vmem_last_error();
    EXPECT_EQ(vmem_free(next), 0) << vmem_last_error();
    EXPECT_EQ(mmap(reserved_ + kHuge, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0),
              MAP_FAILED)
        << "reserved again";
  }
}

TEST_F(FixedAddress, NothingButAReservationIsReplaced) {
  void* at = nullptr;
  EXPECT_EQ(create_at(nullptr, kHuge, &at), -EINVAL);
  EXPECT_EQ(create_at(reserved_ + 4096, kHuge, &at), -EINVAL);
  char* const used = reserved_ + 3 * kHuge;
  ASSERT_EQ(mprotect(used, 4096, PROT_READ | PROT_WRITE), 0);
  *used = 'u';
  if (create_at(reserved_, 4 * kHuge, &at) == -EOPNOTSUPP) GTEST_SKIP() << vmem_last_error();
  EXPECT_EQ(create_at(reserved_, 4 * kHuge, &at), -EEXIST);
  EXPECT_NE(std::string(vmem_last_error()).find("PROT_NONE"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(*used, 'u');
  ASSERT_EQ(munmap(reserved_ + kHuge, 4096), 0);
  EXPECT_EQ(create_at(reserved_, 2 * kHuge, &at), -EEXIST) << "a hole";
  EXPECT_NE(std::string(vmem_last_error()).find("nothing is mapped"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(create_at(reserved_ + 4 * kHuge, kHuge, &at, VMEM_HOST_ONLY), 0) << "without the flag a hint: elsewhere";
  EXPECT_NE(at, reserved_ + 4 * kHuge);
  EXPECT_EQ(vmem_free(at), 0);
}

}  // namespace
