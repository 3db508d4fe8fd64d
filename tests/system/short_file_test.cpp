// Files that are shorter than their regions, and that shrink and grow; and regions in a reservation
// of the program.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBlock = 64 << 10;
constexpr size_t kSize = 8 * kMiB;

int create(void** at, unsigned flags, size_t block, const std::string& path) {
  vmem_region_attr attr = {};
  attr.size = sizeof attr;
  attr.block_size = block;
  attr.flags = flags | VMEM_HOST_ONLY;
  attr.fd = -1;
  attr.path = path.c_str();
  return vmem_create(at, kSize, &attr);
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
    ASSERT_EQ(create(&at, how, GetParam(), file.path()), 0) << vmem_last_error();
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
  ASSERT_EQ(create(&at, VMEM_MAP_SHARED, GetParam(), file.path()), 0) << vmem_last_error();
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
  ASSERT_EQ(create(&at, VMEM_MAP_SHARED, GetParam(), file.path()), 0) << vmem_last_error();
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

// Regions at fixed addresses in a reservation.

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
    // The reservation may have holes: fill them.
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
