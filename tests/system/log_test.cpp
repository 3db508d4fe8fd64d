// Log sinks that do everything they may: access absent blocks, call the library, take their time,
// end the process. And the lines of the default sink before a signal ends the process.
#include "core/log.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <mutex>
#include <thread>

#include "child.h"
#include "common/faulty_engine.h"
#include "common/patience.h"
#include "core/step.h"
#include "core/thread.h"
#include "faulty_disk.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20, kBlock = 2 * kMiB;

// Makes a thread of the library log once, at the next `step`, while it serves a fault or an
// acquire.
std::atomic<const char*> log_at{nullptr};
void log_at_step(const char* step) {
  const char* wanted = log_at;
  if (wanted != nullptr && strcmp(step, wanted) == 0 && log_at.compare_exchange_strong(wanted, nullptr)) {
    vmem::core::log(vmem::core::Level::error, "at step %s", step);
  }
}

class Log : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    vmem_log(
        [](int, const char* line, void* user) {
          auto* self = static_cast<Log*>(user);
          {
            std::lock_guard lock(self->mutex_);
            self->lines_.emplace_back(line);
          }
          if (self->in_sink) self->in_sink(line);
        },
        this);
    vmem::core::step_hook = log_at_step;
  }
  void TearDown() override {
    vmem::core::step_hook = nullptr;
    SystemTest::TearDown();
  }
  std::vector<std::string> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }
  static void fill(const vmem::region& r) {
    auto words = r.view<uint64_t>();
    for (size_t i = 0; i < words.size(); ++i) words[i] = stamp(i, 1);
  }
  std::function<void(const char*)> in_sink;

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// The line comes from the thread that reads the block that another thread waits for; the sink needs
// another block.
TEST_F(Log, ASinkMayAccessABlockThatIsNotPresent) {
  configure({{"host_budget", "16MiB"}, {"readahead", "0"}, {"device", "none"}});
  if (IsSkipped()) return;
  vmem::region r(32 * kMiB, VMEM_HOST_ONLY);
  fill(r);
  r.evict();
  const auto words = r.view<uint64_t>();
  std::atomic<int> right{0};
  in_sink = [&](const char*) {
    for (size_t i = 0; i < words.size(); i += kBlock / 8) right += words[i] == stamp(i, 1) ? 1 : 0;
    words[kBlock / 8] = 7;
  };
  log_at = "fill.read";
  EXPECT_EQ(words[0], stamp(0, 1));
  vmem::core::flush_log();
  EXPECT_EQ(lines(), std::vector<std::string>{"at step fill.read"});
  EXPECT_EQ(right, 16);
  EXPECT_EQ(words[kBlock / 8], 7u);
}

// Returns how many failures the lines report: each is logged, or counted.
uint64_t told(const std::vector<std::string>& lines) {
  uint64_t all = 0;
  for (const std::string& line : lines) {
    unsigned long long more = 0;
    all += sscanf(line.c_str(), ".. and %llu more since, like: reading failed", &more) == 1 ? more : 1;
  }
  return all;
}

TEST_F(Log, AFailingDiskIsSaidOnceASecondAndWhatWasLeftOutIsCounted) {
  vmem::store::FaultyEngine* disk = nullptr;
  systest::wrap_engine(&disk);
  configure({{"host_budget", "16MiB"}, {"readahead", "0"}, {"block_size", "64KiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  vmem::region r(8 * kMiB, VMEM_HOST_ONLY);
  fill(r);
  r.evict();
  vmem::store::Fault fault;
  fault.op = vmem::store::Io::Op::read;
  disk->add_rule(fault);
  const auto begun = std::chrono::steady_clock::now();
  const auto words = r.view<uint64_t>();
  for (size_t i = 0; i < words.size(); i += kMiB / 16 / 8)
    EXPECT_TRUE(systest::raises_sigbus([&] { (void)*static_cast<volatile uint64_t*>(&words[i]); }));
  // The count is complete even if no further failure comes.
  EXPECT_TRUE(vmem::test::eventually([&] { return told(lines()) == vmem::stats().io_errors; }));
  EXPECT_GE(told(lines()), 128u);
  const auto took = std::chrono::steady_clock::now() - begun;
  EXPECT_LE(lines().size(), 2 + 2 * static_cast<size_t>(took / std::chrono::seconds(1)));
}

TEST_F(Log, ASinkThatTakesItsTimeHoldsUpNeitherFaultsNorCallsNorShutdown) {
  configure({{"host_budget", "16MiB"}, {"readahead", "0"}, {"device", "none"}});
  if (IsSkipped()) return;
  std::atomic<bool> entered{false}, go_on{false};
  in_sink = [&](const char*) {
    entered = true;
    while (!go_on) usleep(1000);
  };
  {
    vmem::region r(32 * kMiB, VMEM_HOST_ONLY);
    fill(r);
    r.evict();
    const auto words = r.view<uint64_t>();
    log_at = "fill.read";
    EXPECT_EQ(words[0], stamp(0, 1));
    while (!entered) usleep(100);
    for (const char* step : {"fill.read", "evict.taken", "evict.written", "acquire.started"}) {
      log_at = step;  // more lines, from other threads
      for (size_t i = 0; i < words.size(); i += kBlock / 8) {
        EXPECT_EQ(words[i], stamp(i, 1));
        ++words[i + 1];
      }
      r.evict();
      ASSERT_EQ(vmem_acquire(r.data(), kBlock, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
      ASSERT_EQ(vmem_release(r.data(), kBlock, nullptr), 0) << vmem_last_error();
    }
    EXPECT_EQ(lines().size(), 1u);
  }
  vmem_shutdown();
  EXPECT_EQ(lines().size(), 1u);
  go_on = true;
  vmem::core::flush_log();
  EXPECT_EQ(lines(), (std::vector<std::string>{"at step fill.read", "at step fill.read", "at step evict.taken",
                                               "at step evict.written", "at step acquire.started"}));
}

TEST_F(Log, ASinkMayCallTheLibrary) {
  configure({{"host_budget", "16MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  void* mine = nullptr;
  ASSERT_EQ(vmem_alloc(&mine, 8 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  memset(mine, 5, 8 * kMiB);
  int called = 0;
  in_sink = [&](const char*) {
    if (++called != 1) return;
    EXPECT_EQ(vmem::stats().regions, 2u);
    EXPECT_EQ(vmem_free(mine), 0) << vmem_last_error();
    void* other = nullptr;
    EXPECT_EQ(vmem_alloc(&other, 32 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
    memset(other, 1, 32 * kMiB);
    EXPECT_EQ(vmem_free(other), 0) << vmem_last_error();
    log_at = "free.quiet";  // a call that logs: its line waits until the sink returns
    void* third = nullptr;
    EXPECT_EQ(vmem_alloc(&third, kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
    EXPECT_EQ(vmem_free(third), 0) << vmem_last_error();
    EXPECT_EQ(called, 1);
    EXPECT_EQ(vmem_set("no_such_setting", "1"), -ENOENT);
    EXPECT_EQ(vmem_set("fault_timeout_ms", "9000"), 0) << vmem_last_error();
  };
  vmem::region r(4 * kMiB, VMEM_HOST_ONLY);
  log_at = "acquire.started";
  ASSERT_EQ(vmem_acquire(r.data(), kMiB, VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_release(r.data(), kMiB, nullptr), 0) << vmem_last_error();
  vmem::core::flush_log();
  EXPECT_EQ(lines(), (std::vector<std::string>{"at step acquire.started", "at step free.quiet"}));
}

TEST_F(Log, ASinkMayShutTheLibraryDownAndTakeItselfAway) {
  configure({{"host_budget", "16MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  static std::atomic<int> later;
  later = 0;
  std::atomic<bool> served{false};
  in_sink = [&](const char*) {
    while (!served) usleep(100);
    vmem_log([](int, const char*, void*) { ++later; }, nullptr);
    vmem_shutdown();
  };
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, 4 * kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
  log_at = "fill.read";  // on a thread of the library, so the sink runs on the log's thread
  static_cast<volatile char*>(p)[0] = 1;
  served = true;
  vmem::core::flush_log();
  EXPECT_EQ(lines().size(), 1u);
  EXPECT_EQ(vmem_free(p), -EINVAL) << "it was shut down";
  vmem::core::log(vmem::core::Level::error, "one more");
  vmem::core::flush_log();
  EXPECT_EQ(later, 1);
}

// The child gets neither the parent's pending lines nor its busy sink.
TEST_F(Log, AForkedChildStartsWithAnEmptyLog) {
  configure({{"host_budget", "16MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  std::atomic<bool> entered{false}, go_on{false};
  in_sink = [&](const char*) {
    entered = true;
    while (!go_on) usleep(1000);
  };
  for (int i = 0; i < 3; ++i) vmem::core::log(vmem::core::Level::error, "the parent's");
  while (!entered) usleep(100);
  int out[2];
  ASSERT_EQ(pipe(out), 0);
  EXPECT_EQ(systest::status_of_fork([&] {
              dup2(out[1], STDERR_FILENO);
              vmem::core::log(vmem::core::Level::error, "the child's");
              vmem::core::flush_log();
              return 0;
            }),
            0);
  close(out[1]);
  std::string said(200, '\0');
  const ssize_t n = read(out[0], said.data(), said.size());
  said.resize(n > 0 ? static_cast<size_t>(n) : 0);
  close(out[0]);
  EXPECT_EQ(said, systest::kForksWell ? "libvmem: error: the child's\n" : "");
  go_on = true;
  vmem::core::flush_log();
  EXPECT_EQ(lines().size(), 3u);
}

// --- the end of a process -------------------------------------------------------------------------------------------

// A child process whose stderr is a file.
class Ending {
 public:
  Ending(const std::string& test, const std::string& how) {
    const pid_t pid = systest::start_child(test, {{"VMEM_TEST_HOW", how}, {"VMEM_TEST_FILE", file_.path()}});
    status = systest::wait_for_child(pid, 120);
    const auto bytes = file_.read();
    said.assign(bytes.begin(), bytes.end());
  }
  bool skipped() const { return WIFEXITED(status) && WEXITSTATUS(status) == 77; }
  int status = 0;
  std::string said;

 private:
  systest::TempFile file_;
};

void write_errors_to_the_file() {
  const int fd = open(getenv("VMEM_TEST_FILE"), O_WRONLY | O_APPEND | O_CLOEXEC);
  dup2(fd, STDERR_FILENO);
  close(fd);
}

void start_or_skip() {
  for (const auto& [name, value] :
       {std::pair{"host_budget", "16MiB"}, {"device", "none"}, {"readahead", "0"}, {"fault_timeout_ms", "200"}}) {
    ASSERT_EQ(vmem_set(name, value), 0) << vmem_last_error();
  }
  if (const int rc = vmem_init(); rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) _exit(77);
}

TEST(LogChild, DISABLED_DiesOfSigbus) {
  write_errors_to_the_file();
  const std::string how = getenv("VMEM_TEST_HOW");
  static vmem::store::FaultyEngine* disk = nullptr;
  vmem::api::test_hooks().wrap_engine = [](std::unique_ptr<vmem::store::Engine> inner) {
    std::unique_ptr<vmem::store::FaultyEngine> made;
    if (!vmem::store::FaultyEngine::wrap(std::move(inner), 1, &made).ok()) _exit(20);
    disk = made.get();
    return std::unique_ptr<vmem::store::Engine>(std::move(made));
  };
  start_or_skip();
  if (HasFatalFailure()) _exit(21);
  if (how.find("sink") != std::string::npos) {
    vmem_log(
        [](int, const char* line, void*) {
          if (dprintf(STDERR_FILENO, "sink: %s\n", line) < 0) _exit(22);
        },
        nullptr);
  }
  void* p = nullptr;
  if (vmem_alloc(&p, 64 * kMiB, VMEM_HOST_ONLY) != 0) _exit(23);
  auto* bytes = static_cast<volatile char*>(p);
  signal(SIGBUS, SIG_DFL);
  if (how.find("read") != std::string::npos) {
    memset(p, 1, 64 * kMiB);
    if (vmem_evict(p, 64 * kMiB, VMEM_SSD) != 0) _exit(24);
    vmem::store::Fault fault;
    fault.action = vmem::store::Fault::Action::error;
    fault.op = vmem::store::Io::Op::read;
    disk->add_rule(fault);
    bytes[kBlock] = 1;
  }
  vmem::store::Fault fault;  // nothing can leave, so there is no memory
  fault.action = vmem::store::Fault::Action::error;
  fault.op = vmem::store::Io::Op::write;
  disk->add_rule(fault);
  for (size_t at = 0; at < 64 * kMiB; at += 4096) bytes[at] = static_cast<char>(at >> 12 | 1);
  _exit(25);
}

TEST(LogAtTheEnd, TheReasonOfASignalIsSaidBeforeIt) {
  for (const char* how : {"read", "memory", "read, to a sink", "memory, to a sink"}) {
    for (int run = 0; run < 3; ++run) {
      const Ending child("LogChild.DISABLED_DiesOfSigbus", how);
      if (child.skipped()) GTEST_SKIP() << "no way to trap absent blocks here";
      EXPECT_TRUE(WIFSIGNALED(child.status) && WTERMSIG(child.status) == SIGBUS) << how << ": " << child.status;
      EXPECT_NE(child.said.find("an access gets SIGBUS"), std::string::npos) << how << ": " << child.said;
    }
  }
}

// A first call that logs and fails. Nothing has been started, so only this thread can deliver.
TEST(LogChild, DISABLED_LogsInACallThatFails) {
  static int called = 0;
  vmem_log(
      [](int, const char*, void*) {
        ++called;
        if (vmem_set("another", "1") != -ENOENT) _exit(20);
        if (std::string(vmem_last_error()).find("another") == std::string::npos) _exit(21);
      },
      nullptr);
  if (vmem_set("no_such_setting", "1") != -ENOENT) _exit(22);
  if (called != 1) _exit(23);
  _exit(std::string(vmem_last_error()).find("no_such_setting") != std::string::npos ? 0 : 24);
}

TEST(LogOfACall, IsDeliveredBeforeItReturnsAndLeavesItsMessage) {
  const pid_t child = systest::start_child("LogChild.DISABLED_LogsInACallThatFails", {{"VMEM_HOST_BUGDET", "1G"}});
  EXPECT_EQ(systest::wait_for_child(child, 60), 0);
}

// A sink set before anything starts does not pass to the forked child either.
TEST(LogChild, DISABLED_ForksBeforeAnythingStarts) {
  static std::atomic<int> called{0};
  vmem_log([](int, const char*, void*) { ++called; }, nullptr);
  const pid_t child = systest::fork_child([] {  // of one thread
    vmem::core::log(vmem::core::Level::error, "the child's");
    vmem::core::flush_log();
    return called.load();
  });
  _exit(systest::wait_for_child(child, 60) == 0 ? 0 : 20);
}

TEST(LogOfACall, IsNotDeliveredToTheParentsSinkInAChild) {
  const pid_t child = systest::start_child("LogChild.DISABLED_ForksBeforeAnythingStarts", {});
  EXPECT_EQ(systest::wait_for_child(child, 60), 0);
}

TEST(LogChild, DISABLED_LeavesLines) {
  write_errors_to_the_file();
  const std::string how = getenv("VMEM_TEST_HOW");
  start_or_skip();
  if (HasFatalFailure()) _exit(21);
  static std::atomic<bool> stuck, entered;
  stuck = how == "stuck";
  if (how != "stderr") {
    vmem_log(
        [](int, const char* line, void*) {
          entered = true;
          while (stuck) pause();
          if (dprintf(STDERR_FILENO, "sink: %s\n", line) < 0) _exit(22);
        },
        nullptr);
  }
  std::thread thread;  // the log's own thread has to deliver them
  ASSERT_TRUE(vmem::core::start_thread(
                  "vmem-test",
                  [] {
                    for (int i = 0; i < 100; ++i) vmem::core::log(vmem::core::Level::error, "line %d", i);
                  },
                  &thread)
                  .ok());
  thread.join();
  while (stuck && !entered) usleep(100);
  exit(0);
}

TEST(LogAtTheEnd, ExitDeliversWhatIsLeftInOrder) {
  for (const auto& [how, before] : {std::pair{"sink", "sink: "}, {"stderr", "libvmem: error: "}}) {
    const Ending child("LogChild.DISABLED_LeavesLines", how);
    if (child.skipped()) GTEST_SKIP() << "no way to trap absent blocks here";
    EXPECT_EQ(child.status, 0);
    std::string want;
    for (int i = 0; i < 100; ++i) want += before + std::string("line ") + std::to_string(i) + "\n";
    EXPECT_EQ(child.said, want) << how;
  }
}

TEST(LogAtTheEnd, ExitDoesNotWaitForEverForASinkAndTheRestGoesToStderr) {
  const Ending child("LogChild.DISABLED_LeavesLines", "stuck");
  if (child.skipped()) GTEST_SKIP() << "no way to trap absent blocks here";
  EXPECT_EQ(child.status, 0);
  std::string want;
  for (int i = 1; i < 100; ++i) want += "libvmem: error: line " + std::to_string(i) + "\n";
  EXPECT_EQ(child.said, want) << "the first one is in the sink for ever";
}

}  // namespace
