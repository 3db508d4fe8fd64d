// Folders of publications, and names in them, that a user blocks: by a mounted file system that
// never answers, or by a lock.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "common/forbid.h"
#include "common/kept_lock.h"
#include "common/patience.h"
#include "common/silent_fuse.h"
#include "publish/lookup.h"
#include "publish/place.h"

namespace {

using vmem::core::Status;
using namespace vmem::publish;

constexpr int kNoMounts = 77, kNoFilters = 78;
constexpr char kName[] = "123-00000000000000ff";

// Runs `look` in a process with its own mounts and a silent file system on `place`; returns its
// result, or 142 if it waited until the file system was gone. old: without openat2.
int beside_silent(const std::string& place, mode_t kind, bool old, const std::function<int()>& look) {
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) _exit(kNoMounts);
    const int fuse = vmem::test::mount_fuse(place, kind, geteuid());
    if (fuse < 0) _exit(kNoMounts);
    const auto seconds = static_cast<unsigned>(5 * vmem::test::patience());
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(seconds + 2);
      vmem::test::serve_nothing(fuse, kind | 0700, geteuid());
    }
    close(fuse);
    alarm(seconds);
    if (old && !vmem::test::forbid(SYS_openat2, ENOSYS)) _exit(kNoFilters);
    _exit(look());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

class PublishMount : public ::testing::TestWithParam<bool> {  // true: openat2 is missing
 protected:
  PublishMount() : path_(std::filesystem::temp_directory_path().string() + "/vmem-mount-test.XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~PublishMount() override {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path_;
};

TEST_P(PublishMount, AFolderOnASilentFileSystemIsRefusedAndNotWaitedFor) {
  const std::string run = path_ + "/run";
  ASSERT_EQ(mkdir(run.c_str(), 0700), 0);
  const int rc = beside_silent(run, S_IFDIR, GetParam(), [&] {
    Fd fd;
    for (const bool make : {false, true}) {  // by a reader, and by a publisher
      for (const std::string& folder : {run, run + "/vmem"}) {
        if (open_folder(folder, geteuid(), make, &fd).code() != -EXDEV) return 1;
      }
    }
    return folders(geteuid(), run.c_str()).front() == run + "/vmem" ? 2 : 0;
  });
  if (rc == kNoMounts || rc == kNoFilters) GTEST_SKIP() << "no mounts, no FUSE, or no filters, here";
  EXPECT_EQ(rc, 0);
}

TEST_P(PublishMount, ASilentFileSystemOnAPublicationIsNoPublication) {
  for (const std::string& name : {std::string(kName), socket_name(kName)}) {
    const std::string file = path_ + "/" + name;
    close(open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const int rc = beside_silent(file, S_IFREG, GetParam(), [&] {
      Fd folder, fd;
      if (!open_folder(path_, geteuid(), false, &folder).ok()) return 1;
      const Status s = name == kName ? open_file(folder.get(), kName, geteuid(), &fd)
                                     : open_socket(folder.get(), kName, geteuid(), &fd);
      return s.code() == -EXDEV ? 0 : 2;
    });
    if (rc == kNoMounts || rc == kNoFilters) GTEST_SKIP() << "no mounts, no FUSE, or no filters, here";
    EXPECT_EQ(rc, 0) << name;
  }
}

// A thread that waits for a folder's lock cannot be killed, either.
TEST(PublishLock, ANameThatIsNotThereIsMissedWithoutTheFoldersLock) {
  std::string path = "/dev/shm/vmem-lock-test.XXXXXX";
  ASSERT_NE(mkdtemp(path.data()), nullptr);
  int said[2];
  ASSERT_EQ(pipe2(said, O_CLOEXEC), 0);
  const auto limit = static_cast<unsigned>(4 * vmem::test::patience());  // measured once, for both
  const pid_t keeper = fork();
  if (keeper == 0) {
    alarm(limit + 8);
    const int absent = vmem::test::absent_memory(), fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const char kept = absent >= 0 && vmem::test::keep_lock(absent, fd, path) ? 1 : 0;
    (void)!write(said[1], &kept, 1);
    for (;;) pause();
  }
  close(said[1]);
  char kept = 0;
  if (read(said[0], &kept, 1) != 1) kept = 0;  // instruments end a child that makes threads
  close(said[0]);
  if (kept == 1) {
    Fd folder, fd;
    EXPECT_TRUE(open_folder(path, geteuid(), false, &folder).ok());
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(open_file(folder.get(), kName, geteuid(), &fd).code(), -ENOENT);
    EXPECT_EQ(open_folder(path + "/vmem", geteuid(), false, &fd).code(), -ENOENT);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took.count(), limit) << "it waited until who kept the lock was gone";
  }
  kill(keeper, SIGKILL);
  waitpid(keeper, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
  if (kept != 1) GTEST_SKIP() << "no userfaultfd that holds system calls here";
}

INSTANTIATE_TEST_SUITE_P(Publish, PublishMount, ::testing::Bool(),
                         [](const auto& i) { return i.param ? "WithoutOpenat2" : "WithOpenat2"; });

}  // namespace
