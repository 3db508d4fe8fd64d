// File systems that users mount where vmemctl looks for their publications.
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>

#include <chrono>
#include <csignal>
#include <memory>

#include "common/patience.h"
#include "common/silent_fuse.h"
#include "support.h"

namespace {

using namespace ctltest;

// Unused ids, which hostile_test.cpp does not use.
const uid_t kMallory = 65600 + 2 * static_cast<uid_t>(getpid() % 2000), kAlice = kMallory + 1;

// Run as root, with a private view of the folders of /run. kMallory's folder is a file system of
// his; the kernel has been told its owner if ASKED is set. Then becomes the tool.
TEST(CtlMountsChild, DISABLED_Mounted) {
  const auto user = static_cast<uid_t>(atoi(getenv("MALLORY")));
  const std::string id = std::to_string(user), run = "/run/user/" + id;
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", "/run", "tmpfs", 0, "mode=755") != 0)
    _exit(77);
  ASSERT_EQ(mkdir("/run/user", 0755), 0);
  ASSERT_EQ(mkdir(run.c_str(), 0700), 0);
  ASSERT_EQ(chown(run.c_str(), user, user), 0);
  const int fuse = vmem::test::mount_fuse(run, S_IFDIR, user);
  if (fuse < 0) _exit(77);
  const auto seconds = static_cast<unsigned>(20 * vmem::test::patience());
  if (fork() == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // dies with the tool
    alarm(seconds + 5);
    for (const int fd : {1, 2}) close(fd);
    vmem::test::serve_nothing(fuse, S_IFDIR | 0700, user);
  }
  struct stat s {};
  if (strcmp(getenv("ASKED"), "1") == 0 && stat(run.c_str(), &s) != 0) _exit(7);
  alarm(seconds);
  execl(getenv("TOOL"), getenv("TOOL"), "status", "--seconds", "0", nullptr);
  _exit(6);
}

// The mount that fusermount makes for a user if /etc/fuse.conf has user_allow_other.
TEST(CtlMounts, AFileSystemOfAUsersThatNeverAnswersHoldsNobodyUp) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become two other users";
  const TempFolder place;
  ASSERT_EQ(chmod(place.path().c_str(), 0755), 0);
  std::filesystem::copy_file("/proc/self/exe", place / "tests");
  const auto child = [&](const char* filter, uid_t user) {
    return std::make_unique<Running>(std::vector<std::string>{place / "tests", std::string("--gtest_filter=") + filter,
                                                              "--gtest_also_run_disabled_tests"},
                                     user);
  };
  unsetenv("XDG_RUNTIME_DIR");
  const auto alice = child("HostileChild.DISABLED_Alice", kAlice);  // an honest process of kAlice
  const struct Remove {
    ~Remove() {
      std::error_code ignored;
      std::filesystem::remove_all("/dev/shm/vmem-" + std::to_string(kAlice), ignored);
    }
  } remove;
  ASSERT_TRUE(alice->says("ready"));
  setenv("MALLORY", std::to_string(kMallory).c_str(), 1);
  setenv("TOOL", std::filesystem::absolute(tool()).c_str(), 1);
  for (const char* asked : {"0", "1"}) {
    setenv("ASKED", asked, 1);
    const auto start = std::chrono::steady_clock::now();
    const Ran ran = child("CtlMountsChild.DISABLED_Mounted", 0)->finish();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (ran.status == 77) GTEST_SKIP() << "no mounts, or no FUSE, here";
    ASSERT_EQ(ran.status, 0) << ran.err << " (" << 128 + SIGALRM << ": it never ended)";
    EXPECT_NE(ran.out.find(std::to_string(alice->pid()) + "  "), std::string::npos) << ran.out;
    EXPECT_LT(took.count(), 15.0 * vmem::test::patience()) << "it ended when the file system did";
    EXPECT_EQ(ran.err.find("(FUSE): not read") != std::string::npos, asked[0] == '1') << ran.err;
  }
}

}  // namespace
