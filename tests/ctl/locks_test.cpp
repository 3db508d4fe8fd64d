// Kernel locks that users hold on their own folders of publications, and on files in them.
#include <sys/prctl.h>

#include <chrono>
#include <csignal>
#include <memory>

#include "common/kept_lock.h"
#include "common/patience.h"
#include "publish/layout.h"
#include "support.h"

namespace {

using namespace ctltest;

// Unused ids, which other tests do not use.
const uid_t kMallory = 69700 + 2 * static_cast<uid_t>(getpid() % 2000), kAlice = kMallory + 1;
constexpr char kDead[] = "1-00000000000000aa";  // a publication left by a dead process

std::string folder_of(uid_t user) {
  return "/dev/shm/vmem-" + std::to_string(user);
}

// Locks KEEP ("file" or "folder") for KEEP_SECONDS.
TEST(CtlLocksChild, DISABLED_Keeps) {
  const auto user = static_cast<uid_t>(atoi(getenv("MALLORY")));
  const int absent = vmem::test::absent_memory();
  if (absent < 0) _exit(77);
  ASSERT_EQ(setgroups(0, nullptr), 0);
  ASSERT_EQ(setgid(user), 0);
  ASSERT_EQ(setuid(user), 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(static_cast<unsigned>(atoi(getenv("KEEP_SECONDS"))));
  ASSERT_TRUE(mkdir(folder_of(user).c_str(), 0700) == 0 || errno == EEXIST);
  const std::string name = folder_of(user) + "/" + kDead;
  const int file = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(pwrite(file, vmem::publish::kMagic, sizeof vmem::publish::kMagic, 0), ssize_t{8});
  const bool of_folder = strcmp(getenv("KEEP"), "folder") == 0;
  const int fd = of_folder ? open(folder_of(user).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : file;
  if (!vmem::test::keep_lock(absent, fd, of_folder ? folder_of(user) : "")) _exit(77);
  puts("kept");
  fflush(stdout);
  for (;;) pause();
}

TEST(CtlLocks, OneThatAUserKeepsHoldsRootUpForTwoSecondsAtMost) {
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
      for (const uid_t user : {kMallory, kAlice}) std::filesystem::remove_all(folder_of(user), ignored);
    }
  } remove;
  ASSERT_TRUE(alice->says("ready"));
  setenv("MALLORY", std::to_string(kMallory).c_str(), 1);
  const unsigned limit = 10 * vmem::test::patience();
  setenv("KEEP_SECONDS", std::to_string(limit + 10).c_str(), 1);
  for (const char* what : {"file", "folder"}) {
    setenv("KEEP", what, 1);
    const auto mallory = child("CtlLocksChild.DISABLED_Keeps", 0);
    if (!mallory->says("kept")) {
      ASSERT_EQ(mallory->finish().status, 77);
      GTEST_SKIP() << "no userfaultfd that holds system calls here";
    }
    const auto start = std::chrono::steady_clock::now();
    const Ran ran = run({tool(), "status", "--seconds", "0"});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(ran.status, 0) << ran.err;
    EXPECT_NE(ran.out.find(std::to_string(alice->pid()) + "  "), std::string::npos) << ran.out << ran.err;
    EXPECT_LT(took.count(), limit) << "it ended when Mallory did: " << what;
    EXPECT_EQ(access((folder_of(kMallory) + "/" + kDead).c_str(), F_OK), 0) << "what is hers is hers to remove";
  }
}

}  // namespace
