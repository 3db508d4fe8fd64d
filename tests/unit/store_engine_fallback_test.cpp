// The engine without permission for io_uring, and kernel hazards that shaped its design. The
// forbidding tests run in their own child: a seccomp filter cannot be removed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>

#include "common/forbid.h"
#include "core/log.h"
#include "store/engine.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

using core::kPage;
using vmem::test::forbid;

#if defined(__SANITIZE_THREAD__)
constexpr bool kForksWell = false;
#else
constexpr bool kForksWell = true;
#endif

int warnings = 0;
void count_warnings(int, const char* line, void*) {
  ++warnings;
  fprintf(stderr, "%s\n", line);
}

// Exit code 0: I/O works through threads, and exactly one line said so; 77: filters are refused.
[[noreturn]] void run_where_one_fails(unsigned call, unsigned error) {
  if (!forbid(call, error)) _exit(77);
  core::set_log_sink(count_warnings, nullptr);
  EngineOptions options;
  for (int n = 0; n < 3; ++n) {
    std::unique_ptr<Engine> engine;
    if (!make_engine(options, &engine).ok() || strcmp(engine->name(), "threads") != 0) _exit(2);
    TempFile file(4 * kPage, true);
    Buffer buffer(4 * kPage);
    FileId id = 0;
    if (!engine->add_file(file.fd(), &id).ok()) _exit(3);
    Batch batch;
    batch.add(Io::Op::read, id, 0, buffer.data(), buffer.size());
    batch.submit(*engine);
    batch.wait();
    if (batch.ios()[0].result != 0 || !file.matches(0, buffer.data(), buffer.size())) _exit(4);
  }
  options.kind = EngineKind::io_uring;
  std::unique_ptr<Engine> engine;
  if (make_engine(options, &engine).code() != -static_cast<int>(error)) _exit(5);
  core::flush_log();
  _exit(warnings == 1 ? 0 : 6);
}

class EngineFallback : public testing::Test {
 protected:
  EngineFallback() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

bool filters_work() {
  const pid_t pid = fork();
  if (pid == 0) _exit(forbid(SYS_io_uring_setup, EPERM) ? 0 : 1);
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#define NEEDS_FILTERS()                                                         \
  if (!kForksWell) GTEST_SKIP() << "ThreadSanitizer does not survive the fork"; \
  if (!filters_work()) GTEST_SKIP() << "seccomp filters are refused here"

TEST_F(EngineFallback, WhereIoUringIsForbiddenThreadsDoTheWorkAndOneLineSaysWhy) {
  NEEDS_FILTERS();
  EXPECT_EXIT(run_where_one_fails(SYS_io_uring_setup, EPERM), testing::ExitedWithCode(0), "slower.*seccomp profile");
}

TEST_F(EngineFallback, WhereIoUringIsUnknownThreadsDoTheWorkAndOneLineSaysWhy) {
  NEEDS_FILTERS();
  EXPECT_EXIT(run_where_one_fails(SYS_io_uring_setup, ENOSYS), testing::ExitedWithCode(0), "slower.*kernel lacks it");
}

TEST_F(EngineFallback, WhereRingsCanBeMadeAndNotEnteredThreadsDoTheWork) {
  NEEDS_FILTERS();
  EXPECT_EXIT(run_where_one_fails(SYS_io_uring_enter, EPERM), testing::ExitedWithCode(0), "slower.*seccomp profile");
}

[[noreturn]] void run_where_enter_fails_later() {
  EngineOptions options;
  options.kind = EngineKind::io_uring;
  std::unique_ptr<Engine> engine;
  if (!make_engine(options, &engine).ok()) _exit(77);
  TempFile file(4 * kPage, true);
  Buffer buffer(4 * kPage);
  FileId id = 0;
  if (!engine->add_file(file.fd(), &id).ok()) _exit(3);
  for (int round = 0; round < 4; ++round) {
    Batch batch;
    for (size_t n = 0; n < 4; ++n) {
      // Two adjacent ones, so that a merged run fails, too.
      batch.add(Io::Op::read, id, n / 2 * 3 * kPage + n % 2 * kPage, buffer.data() + n * kPage, kPage)
          .short_read_is_zero = true;
    }
    batch.submit(*engine);
    batch.wait();
    for (const Io& io : batch.ios()) {
      if (io.result != (round == 0 ? 0 : -EPERM)) _exit(4);
    }
    if (round == 0 && !forbid(SYS_io_uring_enter, EPERM)) _exit(5);
  }
  engine.reset();
  core::flush_log();
  _exit(0);
}

// Becomes a user without other processes, so that the limit counts this process only. Returns false
// if a change of user is refused.
bool may_make_no_thread() {
  const rlimit none{1, 1};
  return (geteuid() != 0 || setuid(static_cast<uid_t>(1000000000 + getpid())) == 0) &&
         setrlimit(RLIMIT_NPROC, &none) == 0;
}

// A worker of the ring makes a read into a buffer without memory, if a worker can be created.
[[noreturn]] void run_where_no_thread_can_be_made() {
  constexpr size_t kSize = 2 << 20;
  EngineOptions options;
  options.kind = EngineKind::io_uring;
  std::unique_ptr<Engine> engine;
  if (!make_engine(options, &engine).ok()) _exit(77);
  TempFile file(kSize, true);
  Buffer buffer(kSize), expected(kSize);
  if (pread(file.fd(), expected.data(), kSize, 0) != static_cast<ssize_t>(kSize)) _exit(2);
  FileId id = 0;
  if (!engine->add_file(file.fd(), &id).ok()) _exit(3);
  if (!may_make_no_thread()) _exit(6);
  Batch batch;
  batch.add(Io::Op::read, id, 0, buffer.data(), buffer.size());
  batch.ios()[0].unpopulated = true;
  batch.submit(*engine);
  batch.wait();
  if (batch.ios()[0].result != 0) _exit(4);
  if (memcmp(buffer.data(), expected.data(), kSize) != 0 || engine->stats().retries > 2) _exit(5);
  // A worker also makes a write where the file has no blocks yet, and every flush.
  if (ftruncate(file.fd(), 2 * kSize) != 0) _exit(7);
  for (const Io::Op op : {Io::Op::write, Io::Op::flush}) {
    Batch more;
    more.add(op, id, kSize, op == Io::Op::write ? buffer.data() : nullptr, op == Io::Op::write ? kSize : 0);
    more.submit(*engine);
    more.wait();
    if (more.ios()[0].result != 0) _exit(8);
  }
  if (pread(file.fd(), expected.data(), kSize, kSize) != static_cast<ssize_t>(kSize)) _exit(9);
  _exit(memcmp(buffer.data(), expected.data(), kSize) == 0 ? 0 : 10);
}

TEST_F(EngineFallback, WhereNoThreadCanBeMadeTransfersAreMadeByTheOneThereIs) {
  if (!kForksWell) GTEST_SKIP() << "ThreadSanitizer does not survive the fork";
  std::unique_ptr<Engine> engine;
  if (!make_named_engine("io_uring", 1, 1, &engine).ok()) GTEST_SKIP() << "io_uring is not permitted here";
  engine.reset();
  const pid_t pid = fork();
  if (pid == 0) _exit(may_make_no_thread() ? 0 : 1);
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0) GTEST_SKIP() << "a process may not become another user here";
  EXPECT_EXIT(run_where_no_thread_can_be_made(), testing::ExitedWithCode(0), "");
}

// A process that may create threads in spite of the limit (root) would wait for ever for a worker
// of the ring.
bool may_make_threads_beyond_the_limit() {
  rlimit none{};
  if (getrlimit(RLIMIT_NPROC, &none) != 0) return false;
  none.rlim_cur = 0;
  if (setrlimit(RLIMIT_NPROC, &none) != 0) return false;
  try {
    std::thread([] {}).join();
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

[[noreturn]] void run_where_the_limit_of_processes_is_none() {
  if (!may_make_threads_beyond_the_limit()) _exit(2);
  core::set_log_sink(count_warnings, nullptr);
  std::unique_ptr<Engine> engine;
  if (!make_engine({}, &engine).ok()) _exit(3);
  constexpr size_t kSize = 2 << 20;
  TempFile file(kSize, true);
  Buffer buffer(kSize);
  FileId id = 0;
  if (!engine->add_file(file.fd(), &id).ok()) _exit(4);
  alarm(30);
  Batch batch;
  batch.add(Io::Op::read, id, 0, buffer.data(), kSize).unpopulated = true;
  batch.submit(*engine);
  batch.wait();
  if (batch.ios()[0].result != 0 || !file.matches(0, buffer.data(), kSize)) _exit(5);
  core::flush_log();
  _exit(0);
}

TEST_F(EngineFallback, WhereTheLimitOfProcessesIsNoneThreadsDoTheWork) {
  if (!kForksWell) GTEST_SKIP() << "ThreadSanitizer does not survive the fork";
  const pid_t pid = fork();
  if (pid == 0) _exit(may_make_threads_beyond_the_limit() ? 0 : 1);
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0) GTEST_SKIP() << "nobody may make threads beyond the limit here, as root may elsewhere";
  std::unique_ptr<Engine> engine;
  if (!make_named_engine("io_uring", 1, 1, &engine).ok()) GTEST_SKIP() << "io_uring is not permitted here";
  engine.reset();
  EXPECT_EXIT(run_where_the_limit_of_processes_is_none(), testing::ExitedWithCode(0), "slower.*RLIMIT_NPROC is 0");
}

TEST_F(EngineFallback, WhenIoUringIsForbiddenLaterRequestsFailLoudlyAndNothingHangs) {
  NEEDS_FILTERS();
  std::unique_ptr<Engine> engine;
  if (!make_named_engine("io_uring", 1, 1, &engine).ok()) GTEST_SKIP() << "io_uring is not permitted here";
  engine.reset();
  EXPECT_EXIT(run_where_enter_fails_later(), testing::ExitedWithCode(0), "io_uring_enter failed for good");
}

TEST(EngineRegistry, EachNameMeansTheEngineThatCarriesIt) {
  for (const EngineEntry& entry : kEngines) {
    EXPECT_EQ(engine_kind(entry.name), entry.kind);
    std::unique_ptr<Engine> engine;
    if (!make_engine({.kind = entry.kind}, &engine).ok()) continue;  // not permitted here
    if (entry.kind == EngineKind::automatic) continue;
    EXPECT_EQ(engine->name(), entry.name);
  }
  EXPECT_EQ(engine_kind("no such engine"), EngineKind::automatic);
}

// A thread submits reads and then waits in the kernel, in a fault that only a thread that sees the
// reads complete resolves: an application that prefetches a block and calls read(2) into it does
// that.
TEST(EngineHazard, CompletionsDoNotNeedTheSubmittingThread) {
  const int uffd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
  if (uffd < 0) GTEST_SKIP() << "userfaultfd with kernel-mode faults is not permitted: " << strerror(errno);
  uffdio_api api{UFFD_API, 0, 0};
  ASSERT_EQ(ioctl(uffd, UFFDIO_API, &api), 0);
  for (const char* name : engine_names()) {
    std::unique_ptr<Engine> engine;
    if (!make_named_engine(name, 16, 1, &engine).ok()) continue;
    void* absent = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uffdio_register area{};
    area.range = {reinterpret_cast<uint64_t>(absent), kPage};
    area.mode = UFFDIO_REGISTER_MODE_MISSING;
    ASSERT_EQ(ioctl(uffd, UFFDIO_REGISTER, &area), 0);
    TempFile file(4 << 20, true);
    Buffer buffer(4 << 20), page(kPage);
    FileId id = 0;
    ASSERT_TRUE(engine->add_file(file.fd(), &id).ok());
    Batch batch;
    for (size_t n = 0; n < 16; ++n) {
      batch.add(Io::Op::read, id, n << 18, buffer.data() + (n << 18), 1 << 18);
    }
    std::atomic<bool> submitted{false};
    ssize_t got = 0;
    std::thread submitter([&] {
      const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
      batch.submit(*engine);
      submitted = true;
      got = read(zeros, absent, 8);
      close(zeros);
    });
    while (!submitted) std::this_thread::yield();
    batch.wait();  // hangs when the engine submits on the caller's thread
    uffdio_copy copy{reinterpret_cast<uint64_t>(absent), reinterpret_cast<uint64_t>(page.data()), kPage, 0, 0};
    ASSERT_EQ(ioctl(uffd, UFFDIO_COPY, &copy), 0);
    submitter.join();
    EXPECT_EQ(got, 8);
    munmap(absent, kPage);
  }
  close(uffd);
}

TEST(EngineHazard, AThreadMaySubmitAndExit) {
  for (const char* name : engine_names()) {
    std::unique_ptr<Engine> engine;
    if (!make_named_engine(name, 4, 1, &engine).ok()) continue;
    TempFile file(64 * kPage, false);
    Buffer buffer(64 * kPage);
    FileId id = 0;
    ASSERT_TRUE(engine->add_file(file.fd(), &id).ok());
    Batch batch;
    for (size_t n = 0; n < 32; ++n) batch.add(Io::Op::write, id, n * 2 * kPage, buffer.data() + n * 2 * kPage, kPage);
    batch.add(Io::Op::flush, id, 0, nullptr, 0);
    std::thread([&] { batch.submit(*engine); }).join();
    batch.wait();
    for (const Io& io : batch.ios()) EXPECT_EQ(io.result, 0);
  }
}

// A pipe cannot be flushed. The kernel reports lost bytes once, and so does this descriptor.
TEST(ThreadEngine, AFlushThatFailsIsToldToEachFileOfTheDescriptor) {
  std::unique_ptr<Engine> engine;
  ASSERT_TRUE(make_thread_engine({}, &engine).ok());
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  FileId one = 0, other = 0;
  ASSERT_TRUE(engine->add_file(ends[1], &one).ok());
  ASSERT_TRUE(engine->add_file(ends[1], &other).ok());
  const auto flush = [&](FileId id) {
    Batch batch;
    const Io& io = batch.add(Io::Op::flush, id, 0, nullptr, 0);
    batch.submit(*engine);
    batch.wait();
    return io.result;
  };
  EXPECT_EQ(flush(one), -EINVAL);
  const TempFile file(core::kPage, false);
  ASSERT_EQ(dup2(file.fd(), ends[1]), ends[1]);
  EXPECT_EQ(flush(one), 0);
  EXPECT_EQ(flush(other), -EINVAL);
  EXPECT_EQ(flush(other), 0);
  engine.reset();
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace vmem::store::test
