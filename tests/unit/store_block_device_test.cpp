// Block devices serve as store up to their size, and never while they are in other use.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "store/file.h"
#include "store/open.h"
#include "store/space.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

using core::kPage;

constexpr size_t kDeviceBytes = size_t{16} << 20;
constexpr size_t kHeadBytes = size_t{1} << 20;  // before the first block

class SignatureTest : public testing::Test {
 protected:
  SignatureTest() { EXPECT_EQ(ftruncate(file_.fd(), kDeviceBytes), 0); }
  // Runs check_block_device_unused on a device that carries these bytes at `offset`.
  core::Status check(std::string_view bytes, off_t offset) {
    EXPECT_EQ(ftruncate(file_.fd(), 0), 0);
    EXPECT_EQ(ftruncate(file_.fd(), kDeviceBytes), 0);
    EXPECT_EQ(pwrite(file_.fd(), bytes.data(), bytes.size(), offset), static_cast<ssize_t>(bytes.size()));
    return check_block_device_unused("/dev/thing", file_.fd());
  }
  // The same; the refusal must name the use and a way out.
  void expect_known(std::string_view bytes, off_t offset, const char* word) {
    const core::Status status = check(bytes, offset);
    EXPECT_EQ(status.code(), -EEXIST) << word;
    EXPECT_NE(status.text().find(word), std::string_view::npos) << status.text();
    EXPECT_NE(status.text().find("wipefs"), std::string_view::npos) << status.text();
  }
  TempDir dir_;
  TempFile file_{dir_.path()};
};

TEST_F(SignatureTest, ABlankDeviceIsAccepted) {
  EXPECT_TRUE(check("", 0).ok());
}

TEST_F(SignatureTest, ADeviceShorterThanTheProbeIsAccepted) {
  ASSERT_EQ(ftruncate(file_.fd(), 100), 0);
  EXPECT_TRUE(check_block_device_unused("/dev/thing", file_.fd()).ok());
}

TEST_F(SignatureTest, WhatIsNotBlankIsSomebodys) {
  for (const off_t offset : {0, 1, 4095, 300000, (1 << 20) - 1}) {
    const core::Status status = check("?", offset);
    EXPECT_EQ(status.code(), -EEXIST) << offset;
    EXPECT_NE(status.text().find("dd if=/dev/zero of=/dev/thing"), std::string_view::npos) << status.text();
  }
}

TEST_F(SignatureTest, KnownContentsAreRefusedByNameWithAWayOut) {
  using std::string_view_literals::operator""sv;
  const struct {
    std::string_view bytes;
    off_t offset;
    const char* word;
  } cases[] = {
      {"XFSB"sv, 0, "XFS"},
      {"_BHRfS_M"sv, 65600, "Btrfs"},
      {"\x10\x20\xf5\xf2"sv, 1024, "F2FS"},
      {"NTFS    "sv, 3, "NTFS"},
      {"FAT32   "sv, 82, "FAT"},
      {"CD001"sv, 32769, "ISO"},
      {"SWAPSPACE2"sv, 4086, "swap"},
      {"LUKS\xba\xbe"sv, 0, "LUKS"},
      {"LABELONE"sv, 512, "LVM"},
      {"\xfc\x4e\x2b\xa9"sv, 4096, "RAID"},
      {"EFI PART"sv, 512, "partition"},
      {"\x0c\xb1\xba\x00\x00\x00\x00\x00"sv, (128 << 10) + 4096, "ZFS"},
      {"\x53\xef"sv, 1080, "ext4"},
  };
  for (const auto& known : cases) expect_known(known.bytes, known.offset, known.word);
  std::string table(66, '\0');
  table[4] = '\x83';
  table[64] = '\x55';
  table[65] = '\xaa';
  EXPECT_EQ(check(table, 446).code(), -EEXIST);
  EXPECT_NE(check(table, 446).text().find("partition"), std::string_view::npos);
  table[0] = '\x12';  // no boot flag has that value
  EXPECT_EQ(check(table, 446).text().find("partition"), std::string_view::npos);
}

TEST_F(SignatureTest, WhatLiesAtTheEndIsFoundThoughTheStartIsBlank) {
  using std::string_view_literals::operator""sv;
  const struct {
    std::string_view bytes;
    off_t before_end;
    const char* word;
  } cases[] = {
      {"\xfc\x4e\x2b\xa9"sv, 8192, "software RAID"},
      {"\xfc\x4e\x2b\xa9"sv, 65536, "software RAID"},
      {"Intel Raid ISM Cfg Sig. 1.3.00"sv, 1024, "firmware"},
      {"\xde\x11\xde\x11"sv, 512, "firmware"},
      {"EFI PART"sv, 512, "partition"},
      {"EFI PART"sv, 4096, "partition"},
  };
  for (const auto& known : cases)
    expect_known(known.bytes, static_cast<off_t>(kDeviceBytes) - known.before_end, known.word);
  EXPECT_TRUE(check("EFI PART", static_cast<off_t>(kDeviceBytes) - 1000).ok()) << "what a store left is no signature";
}

TEST_F(SignatureTest, TheCallersOwnBytesHideNothingBehindThem) {
  ASSERT_TRUE(check("libvmem's", 0).code() == -EEXIST);
  EXPECT_TRUE(check_block_device_unused("/dev/thing", file_.fd(), 512).ok());
  for (const off_t offset : {off_t{4096}, static_cast<off_t>(kDeviceBytes) - 8192}) {
    ASSERT_TRUE(check("libvmem's", 0).code() == -EEXIST);
    ASSERT_EQ(pwrite(file_.fd(), "\xfc\x4e\x2b\xa9", 4, offset), 4);
    const core::Status status = check_block_device_unused("/dev/thing", file_.fd(), 512);
    EXPECT_EQ(status.code(), -EEXIST) << offset;
    EXPECT_NE(status.text().find("RAID"), std::string_view::npos) << status.text();
  }
}

// A loop device over a sparse file. Needs root.
class LoopDevice {
 public:
  LoopDevice() : backing_(dir_.path()) {
    if (ftruncate(backing_.fd(), kDeviceBytes) != 0) return;
    const int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    for (int n = 0; control >= 0 && n < 8 && fd_ < 0; ++n) {
      const int number = ioctl(control, LOOP_CTL_GET_FREE);
      path_ = core::strprintf("/dev/loop%d", number);
      fd_ = number < 0 ? -1 : open(path_.c_str(), O_RDWR | O_CLOEXEC);
      // Another process may have taken the number in between.
      if (fd_ >= 0 && ioctl(fd_, LOOP_SET_FD, backing_.fd()) != 0) {
        close(fd_);
        fd_ = -1;
      }
    }
    if (control >= 0) close(control);
  }
  ~LoopDevice() {
    if (fd_ < 0) return;
    ioctl(fd_, LOOP_CLR_FD);
    close(fd_);
  }
  bool ok() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

 private:
  TempDir dir_;
  TempFile backing_;
  int fd_ = -1;
  std::string path_;
};

class BlockDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!device_.ok()) GTEST_SKIP() << "no loop device can be had here";
    ASSERT_TRUE(make_engine(EngineOptions{}, &engine_).ok());
  }
  std::unique_ptr<Space> make() {
    SpaceOptions options;
    options.trim_delay = std::chrono::milliseconds(20);
    options.paths = device_.path();
    std::unique_ptr<Space> space;
    status_ = make_space(options, *engine_, &space);
    return space;
  }
  LoopDevice device_;
  std::unique_ptr<Engine> engine_;
  core::Status status_;
};

TEST_F(BlockDeviceTest, IsUsedToItsLastPageAndNoFurther) {
  auto space = make();
  ASSERT_NE(space, nullptr) << status_.text();
  std::vector<core::Extent> all((kDeviceBytes - kHeadBytes) / kPage);
  ASSERT_TRUE(space->allocate(kPage, 0, all).ok());
  core::Extent one;
  const core::Status full = space->allocate(kPage, 0, {&one, 1});
  EXPECT_EQ(full.code(), -ENOSPC);
  EXPECT_NE(full.text().find(device_.path()), std::string_view::npos) << full.text();
  Buffer written(kDeviceBytes - kHeadBytes), read(kDeviceBytes - kHeadBytes);
  std::mt19937_64 random(4);
  written.fill(random);
  for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
    Batch batch;
    char* base = op == Io::Op::write ? written.data() : read.data();
    for (const core::Extent extent : all) {
      batch.add(op, space->file(extent), extent.offset(), base + extent.offset() - kHeadBytes, kPage);
    }
    batch.submit(*engine_);
    batch.wait();
    for (const Io& io : batch.ios()) ASSERT_EQ(io.result, 0);
  }
  EXPECT_EQ(memcmp(written.data(), read.data(), written.size()), 0);
  // Beyond its end: an error for a read that needs the bytes, zeros for one that permits them.
  Batch past;
  past.add(Io::Op::read, space->file(all[0]), kDeviceBytes - kPage, read.data(), 2 * kPage);
  past.add(Io::Op::read, space->file(all[0]), kDeviceBytes + kPage, read.data() + 2 * kPage, kPage).short_read_is_zero =
      true;
  past.submit(*engine_);
  past.wait();
  EXPECT_EQ(past.ios()[0].result, -EIO);
  EXPECT_EQ(past.ios()[1].result, 0);
}

TEST_F(BlockDeviceTest, WhatAnEarlierStoreLeftIsTakenAgain) {
  std::vector<core::Extent> all((kDeviceBytes - kHeadBytes) / kPage);
  for (int round = 0; round < 2; ++round) {
    auto space = make();
    ASSERT_NE(space, nullptr) << status_.text();
    ASSERT_TRUE(space->allocate(kPage, 0, all).ok());
    ASSERT_EQ(pwrite(device_.fd(), "somebody's memory", 17, kHeadBytes), 17);
  }
  ASSERT_EQ(pwrite(device_.fd(), "?", 1, 0), 1);  // our signature is damaged
  EXPECT_EQ(make(), nullptr);
  EXPECT_EQ(status_.code(), -EEXIST);
}

// The device was a store, and later became part of an array, whose mark lies behind ours or at the
// end.
TEST_F(BlockDeviceTest, ThatBecameAPartOfAnArrayIsRefusedAndUntouched) {
  for (const off_t offset : {off_t{4096}, static_cast<off_t>(kDeviceBytes) - 8192}) {
    ASSERT_NE(make(), nullptr) << status_.text();
    ASSERT_EQ(pwrite(device_.fd(), "\xfc\x4e\x2b\xa9", 4, offset), 4);
    EXPECT_EQ(make(), nullptr);
    EXPECT_EQ(status_.code(), -EEXIST);
    EXPECT_NE(status_.text().find("RAID"), std::string_view::npos) << status_.text();
    char bytes[4];
    ASSERT_EQ(pread(device_.fd(), bytes, 4, offset), 4);
    EXPECT_EQ(memcmp(bytes, "\xfc\x4e\x2b\xa9", 4), 0);
    ASSERT_EQ(pwrite(device_.fd(), "\0\0\0\0", 4, offset), 4);  // wipefs
  }
  EXPECT_NE(make(), nullptr) << status_.text();
}

TEST_F(BlockDeviceTest, ThatEverybodyMayOpenIsRefused) {
  struct stat st;
  ASSERT_EQ(fstat(device_.fd(), &st), 0);
  ASSERT_EQ(fchmod(device_.fd(), 0666), 0);
  EXPECT_EQ(make(), nullptr);
  EXPECT_EQ(status_.code(), -EPERM);
  ASSERT_EQ(fchmod(device_.fd(), st.st_mode & 07777), 0);
}

TEST_F(BlockDeviceTest, ALinkOfTheSystemLeadsToIt) {
  TempDir dir;
  const std::string link = dir.path() + "/by-id";
  ASSERT_EQ(symlink(device_.path().c_str(), link.c_str()), 0);
  SpaceOptions options;
  options.paths = link;
  std::unique_ptr<Space> space;
  EXPECT_TRUE(make_space(options, *engine_, &space).ok());
  space.reset();
  ASSERT_EQ(lchown(link.c_str(), 65534, 65534), 0);
  EXPECT_EQ(make_space(options, *engine_, &space).code(), -ELOOP);
}

TEST_F(BlockDeviceTest, TwoStoresCannotShareIt) {
  auto space = make();
  ASSERT_NE(space, nullptr) << status_.text();
  EXPECT_EQ(make(), nullptr);
  EXPECT_EQ(status_.code(), -EBUSY);
  MappedFile file;
  EXPECT_EQ(open_mapped(device_.path(), true, true, &file).code(), -EBUSY);
}

TEST_F(BlockDeviceTest, WithAFileSystemItIsRefusedAndUntouched) {
  ASSERT_EQ(pwrite(device_.fd(), "XFSB", 4, 0), 4);
  ASSERT_EQ(fsync(device_.fd()), 0);
  EXPECT_EQ(make(), nullptr);
  EXPECT_EQ(status_.code(), -EEXIST);
  char bytes[4];
  ASSERT_EQ(pread(device_.fd(), bytes, 4, 0), 4);
  EXPECT_EQ(memcmp(bytes, "XFSB", 4), 0);
}

TEST_F(BlockDeviceTest, MountedItIsBusy) {
  const std::string command = "mkfs.ext4 -q -F " + device_.path() + " >/dev/null 2>&1";
  if (WEXITSTATUS(system(command.c_str())) != 0) GTEST_SKIP() << "no mkfs.ext4";
  TempDir dir;
  if (mount(device_.path().c_str(), dir.path().c_str(), "ext4", 0, nullptr) != 0) GTEST_SKIP() << strerror(errno);
  EXPECT_EQ(make(), nullptr);
  EXPECT_EQ(status_.code(), -EBUSY);
  const core::Status found = check_block_device_unused(device_.path(), device_.fd());
  EXPECT_EQ(found.code(), -EBUSY);
  EXPECT_NE(found.text().find(dir.path()), std::string_view::npos) << found.text();
  umount2(dir.path().c_str(), MNT_DETACH);
}

TEST_F(BlockDeviceTest, CanBeMappedByARegion) {
  MappedFile file;
  const core::Status status = open_mapped(device_.path(), true, true, &file);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_TRUE(file.file.block_device);
  EXPECT_EQ(file.file.size, kDeviceBytes);
  uint64_t size = 0;
  EXPECT_TRUE(current_size(file, &size).ok());
  EXPECT_EQ(size, kDeviceBytes);
  close_mapped(&file);
}

}  // namespace
}  // namespace vmem::store::test
