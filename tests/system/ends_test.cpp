// Processes that end without exit(), and the contents of their shared files then.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "core/step.h"
#include "exit_child.h"

namespace systest {
namespace {

using vmem::test::eventually;

constexpr size_t kSize = 8 << 20;

class Ends : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    configure({});
  }
  // Waits until the child has done its part: it writes so into the second file.
  static bool says(const TempFile& note, const char* word) {
    return eventually([&] { return text_of(note.path()).find(word) != std::string::npos; }, std::chrono::seconds(60));
  }
  static Environment environment(const TempFile& file, const TempFile& note, const char* how) {
    setenv("VMEM_TEST_FILE", file.path().c_str(), 1);
    setenv("VMEM_TEST_NOTE", note.path().c_str(), 1);
    setenv("VMEM_TEST_HOW", how, 1);
    return {};
  }
  static int run(const TempFile& file, const TempFile& note, const char* how) {
    return wait_for_child(start_child("EndsChild.DISABLED_Stores", environment(file, note, how)), 120);
  }
};

bool is(const char* how) {
  return strcmp(getenv("VMEM_TEST_HOW"), how) == 0;
}

void note(const char* word) {
  const int fd = open(getenv("VMEM_TEST_NOTE"), O_WRONLY | O_APPEND | O_CLOEXEC);
  ASSERT_EQ(write(fd, word, strlen(word)), static_cast<ssize_t>(strlen(word)));
  close(fd);
}

void on_term(int) {}

void set_flush_on(std::initializer_list<int> signals) {
  ASSERT_EQ(vmem_flush_on(signals.begin(), signals.size()), 0) << vmem_last_error();
}

// Loses /proc or all free descriptors, and stores on. Each stored block must become clean: a thread of
// the library looks at it without a fault, through /proc/self/mem, which it has open since before.
TEST(EndsChild, DISABLED_LosesProc) {
  char* p = nullptr;
  const auto begin = [&p] {
    for (const auto& [name, value] :
         {std::pair{"host_budget", "64MiB"}, {"device", "none"}, {"block_size", "64KiB"}, {"writeback_interval", "1"}})
      ASSERT_EQ(vmem_set(name, value), 0);
    if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
    p = map_shared("VMEM_TEST_FILE", kSize, VMEM_HOST_ONLY);
    memset(p, 'a', kSize);
  };
  const auto store_on = [&p] {
    memset(p, 'b', kSize);
    const bool clean = eventually([] { return vmem::stats().dirty_bytes == 0; }, std::chrono::seconds(60));
    if (!clean || vmem::stats().background_write_bytes > 4 * kSize) _exit(1);
    _exit(vmem_evict(p, kSize, VMEM_SSD) == 0 && p[kSize - 1] == 'b' ? 0 : 2);
  };
  if (is("main thread before")) {
    std::thread([&] {
      begin();
      store_on();
    }).detach();
    syscall(SYS_exit, 0);
  }
  begin();
  if (is("descriptors")) {
    const rlimit none{0, 0};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  } else if (is("root")) {
    if (chroot(getenv("VMEM_TEST_ROOT")) != 0) _exit(77);
  } else {
    std::thread(store_on).detach();
    syscall(SYS_exit, 0);  // the main thread alone; /proc/self is that of a zombie from here on
  }
  store_on();
}

// Stores, tells the parent, and ends in the requested way.
TEST(EndsChild, DISABLED_Stores) {
  for (const auto& [name, value] : {std::pair{"host_budget", "64MiB"}, {"device", "none"}})
    ASSERT_EQ(vmem_set(name, value), 0);
  ASSERT_EQ(vmem_set("writeback_interval", is("kill") ? "1" : "0"), 0);
  ASSERT_EQ(vmem_set("block_size", getenv("VMEM_TEST_BLOCK") != nullptr ? getenv("VMEM_TEST_BLOCK") : "2MiB"), 0);
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
  char* const p = map_shared("VMEM_TEST_FILE", kSize, VMEM_HOST_ONLY);
  memset(p, 'k', kSize);
  if (is("kill")) {
    // The statistic shows when all data is in the file.
    ASSERT_TRUE(eventually([] { return vmem::stats().dirty_bytes == 0; }, std::chrono::seconds(60)));
    ASSERT_GE(vmem::stats().background_write_bytes, kSize);
    note("written");
    for (;;) pause();
  }
  if (is("flush")) {
    ASSERT_EQ(vmem_flush(), 0) << vmem_last_error();
    _exit(7);
  }
  set_flush_on({SIGTERM, SIGHUP});
  if (is("child")) {
    const int status = wait_for_child(fork_child([] { return raise(SIGTERM); }), 60);
    _exit(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM ? 7 : 8);
  }
  if (is("closed")) {
    vmem_shutdown();  // from here on the program may close any descriptor
    for (int fd = STDERR_FILENO + 1; fd < 256; ++fd) close(fd);
    for (int i = 0; i < 64; ++i) open(getenv("VMEM_TEST_NOTE"), O_RDWR | O_CLOEXEC);
    kill(getpid(), SIGTERM);
    for (;;) pause();
  }
  note("ready");
  for (;;) pause();
}

TEST_F(Ends, BackgroundWritesEndWithoutProcAndWithoutADescriptor) {
  const std::string empty = testing::TempDir() + "vmem-empty-root";
  std::filesystem::create_directory(empty);
  setenv("VMEM_TEST_ROOT", empty.c_str(), 1);
  for (const char* lost : {"descriptors", "root", "main thread", "main thread before"}) {
    const TempFile file(kSize, 1), note;
    const int status = wait_for_child(start_child("EndsChild.DISABLED_LosesProc", environment(file, note, lost)), 120);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) continue;  // no trap, or no right to change the root
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << lost << ": status " << status;
    EXPECT_EQ(file.read()[kSize - 1], 'b') << lost;
  }
  std::filesystem::remove(empty);
}

TEST_F(Ends, ByKillNothingIsLostThatHasBeenWritten) {
  for (const char* block : {"2MiB", "64KiB", "4KiB"}) {
    const TempFile file(kSize), note;
    setenv("VMEM_TEST_BLOCK", block, 1);
    const pid_t child = start_child("EndsChild.DISABLED_Stores", environment(file, note, "kill"));
    ASSERT_TRUE(says(note, "written")) << block;
    kill(child, SIGKILL);
    const int status = wait_for_child(child, 60);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'k')) << block;
  }
  unsetenv("VMEM_TEST_BLOCK");
}

// More than one write's worth of data, and no other event that would wake the writing threads.
TEST_F(Ends, AllOfALotThatWasStoredIsWrittenInTime) {
  configure({{"host_budget", "512MiB"}, {"writeback_interval", "1"}});
  const TempFile file(size_t{60} << 20);
  vmem::region region(size_t{60} << 20, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  memset(region.data(), 'w', size_t{60} << 20);
  EXPECT_TRUE(eventually([] { return vmem::stats().dirty_bytes == 0; }, std::chrono::seconds(20)));
}

TEST_F(Ends, BySignalsThatFlushNothingIsLost) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    const TempFile file(kSize), note;
    const pid_t child = start_child("EndsChild.DISABLED_Stores", environment(file, note, "signal"));
    ASSERT_TRUE(says(note, "ready"));
    kill(child, signal);
    const int status = wait_for_child(child, 60);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << "its default action: " << status;
    EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'k'));
  }
}

// A daemon closes all descriptors and opens others in their place.
TEST_F(Ends, ASignalThatFlushesNeedsNoDescriptor) {
  const TempFile file(kSize), note;
  const std::string before = text_of(note.path());
  const int status = run(file, note, "closed");
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_EQ(text_of(note.path()), before);
  EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'k'));
}

// The kernel takes no default action in process 1.
TEST_F(Ends, ASignalThatFlushesEndsProcessOneOfAContainer) {
  if (!kForksWell) GTEST_SKIP() << "AddressSanitizer does not survive the fork";
  const TempFile file(kSize), note;
  const int status = status_of_fork([&] {
    if (unshare(CLONE_NEWPID) != 0) return 77;
    const pid_t first = start_child("EndsChild.DISABLED_Stores", environment(file, note, "signal"));
    if (!says(note, "ready")) return 1;
    kill(first, SIGTERM);
    const int ended = wait_for_child(first, 60);
    return WIFEXITED(ended) && WEXITSTATUS(ended) == 128 + SIGTERM ? 0 : 2;
  });
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no namespace of processes can be made here";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'k'));
}

TEST_F(Ends, UnderscoreExitAfterAFlushLosesNothing) {
  const TempFile file(kSize), note;
  const int status = run(file, note, "flush");
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'k'));
}

TEST_F(Ends, AForkedChildHasTheDefaultAction) {
  const TempFile file(kSize), note;
  const int status = run(file, note, "child");
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST_F(Ends, SignalsThatCannotBeTakenAreRefusedAndNothingChanges) {
  struct sigaction own = {}, now = {}, before = {};
  own.sa_handler = on_term;
  ASSERT_EQ(sigaction(SIGUSR1, &own, &before), 0);
  const int busy[] = {SIGUSR2, SIGUSR1}, bad[] = {SIGUSR2, SIGSEGV}, none[] = {SIGKILL};
  EXPECT_EQ(vmem_flush_on(busy, 2), -EBUSY);
  EXPECT_NE(std::string(vmem_last_error()).find("vmem_flush"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(vmem_flush_on(bad, 2), -EINVAL);
  EXPECT_EQ(vmem_flush_on(none, 1), -EINVAL);
  EXPECT_EQ(vmem_flush_on(none, 0), -EINVAL);
  EXPECT_EQ(vmem_flush_on(nullptr, 1), -EINVAL);
  ASSERT_EQ(sigaction(SIGUSR2, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
  ASSERT_EQ(sigaction(SIGUSR1, &before, &now), 0);
  EXPECT_EQ(now.sa_handler, on_term);
}

TEST_F(Ends, AFlushWithoutRegionsIsNothing) {
  EXPECT_EQ(vmem_flush(), 0);
  vmem_shutdown();
  EXPECT_EQ(vmem_flush(), 0);
}

// Python uses this at exit: it also writes blocks under a live lease for writing.
TEST_F(Ends, AFlushWritesWhatIsLeased) {
  configure({{"writeback_interval", "0"}});
  const TempFile file(kSize);
  vmem::region region(kSize, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(region.data(), kSize, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0);
  memset(region.data(), 'l', kSize);
  EXPECT_EQ(vmem_flush(), 0) << vmem_last_error();
  EXPECT_EQ(file.read(), std::vector<unsigned char>(kSize, 'l'));
  EXPECT_EQ(vmem_release(region.data(), kSize, nullptr), 0);
}

// The kernel may store on behalf of any thread at any moment (io_uring), also of one that is in this
// call. The lease says that such stores need nobody's help.
TEST_F(Ends, AFlushLeavesLeasedBlocksWritable) {
  configure({{"writeback_interval", "0"}});
  constexpr size_t kBytes = 64 << 10;
  const TempFile file(kBytes);
  vmem::region region(kBytes, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  ASSERT_EQ(vmem_acquire(region.data(), kBytes, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), 0);
  static unsigned char* bytes;
  static std::atomic<bool> stored, writable;
  bytes = static_cast<unsigned char*>(region.data());
  stored = writable = false;
  memset(bytes, 'l', kBytes);
  static std::thread storing;
  vmem::core::step_hook = [](const char* step) {
    if (strcmp(step, "evict.taken") != 0) return;
    vmem::core::step_hook = nullptr;
    storing = std::thread([] {
      bytes[5] = 's';
      stored = true;
    });
    writable = eventually([] { return stored.load(); });
  };
  EXPECT_EQ(vmem_flush(), 0) << vmem_last_error();
  vmem::core::step_hook = nullptr;
  ASSERT_TRUE(storing.joinable());
  storing.join();
  EXPECT_TRUE(writable);
  EXPECT_EQ(vmem_release(bytes, kBytes, nullptr), 0);
  EXPECT_EQ(vmem_sync(bytes, kBytes), 0);
  EXPECT_EQ(file.read()[5], 's');
}

}  // namespace
}  // namespace systest
