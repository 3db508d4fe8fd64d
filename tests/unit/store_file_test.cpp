// open_mapped: what it accepts and refuses, and its messages.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/step.h"
#include "store/file.h"
#include "store_test_util.h"

namespace vmem::store {
namespace {

using core::kPage;

class MappedFileTest : public testing::Test {
 protected:
  std::string make(const char* name, size_t size, mode_t mode = 0644) {
    const std::string path = dir_.path() + "/" + name;
    std::ofstream(path) << std::string(size, 'x');
    chmod(path.c_str(), mode);
    return path;
  }
  core::Status open_and_close(const std::string& path, bool write = false) {
    MappedFile file;
    core::Status status = open_mapped(path, write, true, &file);
    EXPECT_EQ(status.ok(), file.file.fd >= 0);
    if (!status.ok()) {
      EXPECT_NE(status.text().find(path), std::string_view::npos) << status.text();
    }
    close_mapped(&file);
    return status;
  }
  test::TempDir dir_;
};

TEST_F(MappedFileTest, TellsSizeAndWhetherItIsDirect) {
  const std::string path = make("data", 3 * kPage + 5);
  for (const bool direct : {false, true}) {
    MappedFile file;
    const core::Status status = open_mapped(path, true, direct, &file);
    ASSERT_TRUE(status.ok()) << status.text();
    EXPECT_EQ(file.path, path);
    EXPECT_EQ(file.file.size, 3 * kPage + 5);
    EXPECT_FALSE(file.file.block_device);
    EXPECT_EQ(file.file.direct, (fcntl(file.file.fd, F_GETFL) & O_DIRECT) != 0);
    EXPECT_NE(fcntl(file.file.fd, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(fcntl(file.file.fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(fcntl(file.file.fd, F_GETFL) & O_ACCMODE, O_RDWR);
    if (!direct) {
      EXPECT_FALSE(file.file.direct);
    }
    if (file.file.direct) {
      EXPECT_LE(file.file.offset_align, kPage);
      EXPECT_LE(file.file.memory_align, kPage);
    }
    ASSERT_EQ(truncate(path.c_str(), 100), 0);
    uint64_t size = 0;
    EXPECT_TRUE(current_size(file, &size).ok());
    EXPECT_EQ(size, 100u);
    ASSERT_EQ(truncate(path.c_str(), 3 * kPage + 5), 0);
    close_mapped(&file);
    EXPECT_EQ(file.file.fd, -1);
  }
}

TEST_F(MappedFileTest, AWriterIsAloneUntilItCloses) {
  const std::string path = make("data", kPage);
  MappedFile writer;
  ASSERT_TRUE(open_mapped(path, true, true, &writer).ok());
  EXPECT_EQ(open_and_close(path, true).code(), -EBUSY);
  EXPECT_TRUE(open_and_close(path, false).ok()) << "readers take no lock";
  close_mapped(&writer);
  EXPECT_TRUE(open_and_close(path, true).ok());
}

TEST_F(MappedFileTest, DisjointRangesOfOneFileShareADescriptorAndTheLock) {
  const std::string path = make("data", 8 * kPage);
  const std::string second_name = dir_.path() + "/link";
  ASSERT_EQ(link(path.c_str(), second_name.c_str()), 0);
  MappedFile first, second, third;
  ASSERT_TRUE(open_mapped(path, true, true, &first, 2 * kPage, 2 * kPage).ok());
  ASSERT_TRUE(open_mapped(second_name, true, true, &second, 4 * kPage, 100).ok());
  EXPECT_EQ(first.file.fd, second.file.fd);
  EXPECT_EQ(second.file.direct, first.file.direct);
  EXPECT_EQ(second.file.size, 8 * kPage);
  const struct {
    uint64_t offset, length;
  } taken[] = {{0, 8 * kPage}, {0, 2 * kPage + 1}, {3 * kPage, 1}, {2 * kPage, 2 * kPage}, {3 * kPage, 2 * kPage}};
  for (const auto& range : taken) {
    const core::Status refused = open_mapped(path, true, true, &third, range.offset, range.length);
    EXPECT_EQ(refused.code(), -EBUSY) << range.offset;
    EXPECT_NE(refused.text().find("bytes 8192 to 16384"), std::string_view::npos) << refused.text();
    EXPECT_NE(refused.text().find(core::strprintf("bytes %lu to", range.offset)), std::string_view::npos);
  }
  ASSERT_TRUE(open_mapped(path, true, true, &third, 0, 2 * kPage).ok()) << "up to where another begins";
  close_mapped(&first);
  ASSERT_TRUE(open_mapped(path, true, true, &first, 3 * kPage, kPage).ok()) << "what was closed is free";
  // The lock is held until the last user closes.
  const int other = open(path.c_str(), O_RDWR | O_CLOEXEC);
  close_mapped(&first);
  close_mapped(&third);
  EXPECT_NE(flock(other, LOCK_EX | LOCK_NB), 0);
  close_mapped(&second);
  EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
  close(other);
}

int busy_fd = -1;

TEST_F(MappedFileTest, ALockThatItsOwnerIsAboutToLoseIsWaitedFor) {
  const std::string path = make("data", kPage);
  busy_fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(busy_fd, LOCK_EX), 0);
  // The holder goes after its lock was found taken, as a process that ended with I/O in flight
  // does.
  core::step_hook = [](const char* step) {
    if (strcmp(step, "store.busy") == 0 && busy_fd >= 0) close(std::exchange(busy_fd, -1));
  };
  EXPECT_TRUE(open_and_close(path, true).ok());
  core::step_hook = nullptr;
  EXPECT_EQ(busy_fd, -1);
}

TEST_F(MappedFileTest, RefusesWhatIsNoFileByKind) {
  EXPECT_EQ(open_and_close(dir_.path()).code(), -EISDIR);
  EXPECT_EQ(open_and_close(dir_.path(), true).code(), -EISDIR);
  EXPECT_EQ(open_and_close(dir_.path() + "/missing").code(), -ENOENT);
  EXPECT_EQ(open_and_close("/dev/null").code(), -EINVAL);
  const std::string fifo = dir_.path() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(open_and_close(fifo).code(), -EINVAL);
  EXPECT_EQ(open_and_close(fifo, true).code(), -EINVAL);
  const std::string loop = dir_.path() + "/loop";
  ASSERT_EQ(symlink(loop.c_str(), loop.c_str()), 0);
  EXPECT_EQ(open_and_close(loop).code(), -ELOOP);
  const std::string name = dir_.path() + "/socket";
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{AF_UNIX, {}};
  name.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(open_and_close(name).code(), -EINVAL);
  close(fd);
}

TEST_F(MappedFileTest, WithoutPermissionItSaysSo) {
  if (geteuid() == 0) GTEST_SKIP() << "root may open everything";
  EXPECT_EQ(open_and_close(make("secret", 10, 0000)).code(), -EACCES);
  const std::string read_only = make("read-only", 10, 0444);
  EXPECT_EQ(open_and_close(read_only, true).code(), -EACCES);
  EXPECT_TRUE(open_and_close(read_only, false).ok());
}

TEST_F(MappedFileTest, AReadOnlyFileIsOpenedForReadingOnly) {
  const std::string path = make("data", kPage);
  MappedFile file;
  ASSERT_TRUE(open_mapped(path, false, true, &file).ok());
  EXPECT_EQ(pwrite(file.file.fd, "x", 1, 0), -1);
  close_mapped(&file);
}

TEST_F(MappedFileTest, AnEmptyFileOpens) {
  EXPECT_TRUE(open_and_close(make("empty", 0), true).ok());
}

TEST_F(MappedFileTest, ARefusalLeaksNoDescriptor) {
  const std::string path = make("data", kPage);
  MappedFile writer;
  ASSERT_TRUE(open_mapped(path, true, true, &writer).ok());
  const int before = dup(0);
  close(before);
  for (int n = 0; n < 5; ++n) {
    EXPECT_FALSE(open_and_close(path, true).ok());
    EXPECT_FALSE(open_and_close(dir_.path()).ok());
  }
  const int after = dup(0);
  close(after);
  EXPECT_EQ(before, after);
  close_mapped(&writer);
}

}  // namespace
}  // namespace vmem::store
