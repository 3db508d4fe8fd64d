// Signals of the application and the library's threads: no handler ever runs on one of those,
// whatever it accesses.
#include <dirent.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "child.h"
#include "common/patience.h"
#include "support.h"

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kMiB = 1 << 20;

// The signals that a thread may block: all but SIGKILL, SIGSTOP and the two that the C library
// keeps for itself.
constexpr uint64_t kAllSignals = ~(uint64_t{1} << (SIGKILL - 1) | uint64_t{1} << (SIGSTOP - 1) | uint64_t{3} << 31);

// Returns the threads of this process by id: name and blocked signals. Skips the kernel's io_uring
// workers, which take no signals.
std::map<int, std::pair<std::string, uint64_t>> threads() {
  std::map<int, std::pair<std::string, uint64_t>> out;
  DIR* folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    std::ifstream in(std::string("/proc/self/task/") + entry->d_name + "/status");
    std::string name;
    uint64_t blocked = 0;
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("Name:\t", 0) == 0) name = line.substr(6);
      if (line.rfind("SigBlk:\t", 0) == 0) blocked = std::stoull(line.substr(8), nullptr, 16);
    }
    if (name.rfind("iou-", 0) != 0) out[atoi(entry->d_name)] = {name, blocked};
  }
  closedir(folder);
  return out;
}

class Signals : public SystemTest {};

TEST_F(Signals, EveryThreadOfTheLibraryHasANameAndBlocksThemAll) {
  for (const char* engine : {"io_uring", "threads"}) {
    for (const char* device : {"none", "sim"}) {
      vmem_shutdown();
      const auto before = threads();
      ASSERT_EQ(vmem_set("device", device), 0) << vmem_last_error();
      ASSERT_EQ(vmem_set("io_engine", engine), 0) << vmem_last_error();
      if (vmem_init() != 0 && std::string(engine) == "io_uring") continue;  // forbidden here
      configure({{"host_budget", "64MiB"}, {"publish", "on"}, {"evict_threads", "2"}});
      if (IsSkipped()) return;
      vmem::region region(128 * kMiB, std::string(device) == "sim" ? 0 : VMEM_HOST_ONLY);
      if (std::string(device) == "sim") {
        ASSERT_EQ(vmem_acquire(region.data(), 4 * kMiB, VMEM_WRITE, 0, nullptr), 0) << vmem_last_error();
        ASSERT_EQ(vmem_release(region.data(), 4 * kMiB, nullptr), 0) << vmem_last_error();
      }
      memset(region.data(), 1, region.size());
      size_t ours = 0;
      for (const auto& [id, thread] : threads()) {
        if (before.count(id) != 0) continue;
        ++ours;
        EXPECT_EQ(thread.first.rfind("vmem-", 0), 0u) << "a thread is called " << thread.first;
        EXPECT_EQ(thread.second & kAllSignals, kAllSignals) << thread.first << " takes signals";
      }
      EXPECT_GE(ours, 4u) << "reclaim threads, I/O threads, the trimmer, the publisher";
    }
  }
  vmem_shutdown();
  EXPECT_EQ(vmem_set("device", "auto"), 0);
}

TEST_F(Signals, StartingTheLibraryLeavesTheCallersMaskAlone) {
  sigset_t usr, before, after;
  sigemptyset(&usr);
  sigaddset(&usr, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &usr, &before);
  pthread_sigmask(SIG_BLOCK, nullptr, &usr);
  configure({{"host_budget", "64MiB"}});
  if (!IsSkipped()) vmem_shutdown();
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (int s = 1; s <= SIGRTMAX; ++s) EXPECT_EQ(sigismember(&after, s), sigismember(&usr, s)) << s;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST_F(Signals, HandlersMayAccessBlocksThatAreNotPresent) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const char* seconds = getenv("VMEM_LONG") != nullptr ? "120" : "1";
  for (const char* engine : {"auto", "threads"}) {
    const pid_t child = systest::start_child("SignalsChild.DISABLED_SendsItselfEverySignal",
                                             {{"VMEM_IO_ENGINE", engine}, {"VMEM_TEST_SECONDS", seconds}});
    const int status = systest::wait_for_child(child, static_cast<unsigned>(atoi(seconds)) + 240);
    EXPECT_EQ(status, 0) << (status == -1 ? "hung, engine " : "ended by itself, engine ") << engine;
  }
}

std::atomic<uint64_t*> words{nullptr};
constexpr size_t kWords = 128 * kMiB / sizeof(uint64_t);
std::atomic<uint64_t> begun{0}, ended{0}, wrong{0};

void handler(int) {
  const uint64_t n = begun.fetch_add(1);
  for (uint64_t k = 0; k < 4; ++k) {
    const size_t i = stamp(n, k) % kWords;
    // Even words never change; only handlers store to odd words, always the same value.
    if (words[i & ~size_t{1}] != stamp(i & ~size_t{1}, 1)) wrong.fetch_add(1);
    const_cast<volatile uint64_t*>(words.load())[i | 1] = stamp(i | 1, 2);
  }
  ended.fetch_add(1);
}

TEST(SignalsChild, DISABLED_SendsItselfEverySignal) {
  sigset_t all, before;
  sigfillset(&all);
  for (int s = 1; s <= SIGRTMAX; ++s) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_mask = all;
    sigaction(s, &action, nullptr);  // fails for those that cannot be caught
  }
  // As in programs that leave signals to some of their threads: here none is unblocked when the
  // library starts.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0);
  ASSERT_EQ(vmem_set("device", "none"), 0);
  ASSERT_EQ(vmem_set("evict_threads", "2"), 0);
#ifndef __SANITIZE_THREAD__
  // Huge pages take minutes on a busy disk. Small blocks are copied in place. ThreadSanitizer takes
  // this for a race with the stores to them, and looks up what to report of each, only to suppress
  // it.
  ASSERT_EQ(vmem_set("block_size", "64KiB"), 0);
#endif
  vmem::region region(128 * kMiB, VMEM_HOST_ONLY);
  words = region.view<uint64_t>().data();
  for (size_t i = 0; i < kWords; i += 2) words[i] = stamp(i, 1);
  std::atomic<bool> stop{false};
  std::vector<std::thread> accessing;
  for (unsigned t = 0; t < 3; ++t) {
    accessing.emplace_back([&, t] {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      for (uint64_t n = 0; !stop; ++n) {
        const size_t i = stamp(n, t + 7) % kWords & ~size_t{1};
        if (words[i] != stamp(i, 1)) wrong.fetch_add(1);
      }
    });
  }
  const time_t end = time(nullptr) + atoi(getenv("VMEM_TEST_SECONDS")) + 1;
  uint64_t sent = 0;
  while (time(nullptr) < end || sent < 200) {
    for (int s = 1; s <= SIGRTMAX; ++s) {
      if (s == SIGKILL || s == SIGSTOP || s == 32 || s == 33) continue;
      sent += kill(getpid(), s) == 0;
    }
    // Some signals merge while they are pending; handlers that run must end.
    while (begun != ended) usleep(100);
  }
  stop = true;
  for (std::thread& t : accessing) t.join();
  EXPECT_GT(ended, 0u);
  EXPECT_EQ(begun, ended);
  EXPECT_EQ(wrong, 0u);
}

// A handler may interrupt a thread anywhere in a call, even while the thread holds what the
// handler's access needs.
TEST_F(Signals, HandlersMayInterruptCalls) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const char* seconds = getenv("VMEM_LONG") != nullptr ? "120" : "1";
  const pid_t child =
      systest::start_child("SignalsChild.DISABLED_IsInterruptedInCalls", {{"VMEM_TEST_SECONDS", seconds}});
  const int status = systest::wait_for_child(child, static_cast<unsigned>(atoi(seconds)) + 240);
  EXPECT_EQ(status, 0) << (status == -1 ? "hung" : "ended by itself");
}

TEST(SignalsChild, DISABLED_IsInterruptedInCalls) {
  struct sigaction action = {};
  action.sa_handler = handler;
  sigaction(SIGUSR1, &action, nullptr);
  ASSERT_EQ(vmem_set("host_budget", "32MiB"), 0);
  ASSERT_EQ(vmem_set("device", "none"), 0);
  ASSERT_EQ(vmem_set("block_size", "64KiB"), 0);
  vmem::region region(128 * kMiB, VMEM_HOST_ONLY), mine(16 * kMiB, VMEM_HOST_ONLY);
  words = region.view<uint64_t>().data();
  for (size_t i = 0; i < kWords; i += 2) words[i] = stamp(i, 1);
  std::atomic<bool> stop{false};
  const pthread_t called = pthread_self();
  std::thread sender([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    // One at a time, or the thread would only run handlers.
    for (uint64_t sent = 0; !stop; usleep(20)) {
      if (ended != sent) continue;
      pthread_kill(called, SIGUSR1);
      ++sent;
    }
  });
  char* const at = static_cast<char*>(mine.data());
  const time_t end = time(nullptr) + atoi(getenv("VMEM_TEST_SECONDS")) + 1;
  for (uint64_t n = 0; time(nullptr) < end || n < 500 || ended < 500; ++n) {
    const size_t first = stamp(n, 11) % (14 * kMiB), size = 1 + stamp(n, 12) % (2 * kMiB);
    struct vmem_residency where = {};
    where.size = sizeof where;
    struct vmem_stats stats = {};
    stats.size = sizeof stats;
    at[first] = 1;
    ASSERT_EQ(vmem_prefetch(at + first, size, VMEM_HOST, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(vmem_query(at + first, size, &where), 0) << vmem_last_error();
    ASSERT_EQ(vmem_acquire(at + first, size, VMEM_READ, VMEM_HOST, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(vmem_release(at + first, size, nullptr), 0) << vmem_last_error();
    ASSERT_EQ(vmem_sync(at + first, size), 0) << vmem_last_error();
    ASSERT_EQ(vmem_evict(at + first, size, VMEM_SSD), 0) << vmem_last_error();
    ASSERT_EQ(vmem_advise(at + first, size, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
    ASSERT_EQ(vmem_stats(&stats), 0) << vmem_last_error();
    ASSERT_EQ(vmem_set("readahead", n % 2 == 0 ? "0" : "1"), 0) << vmem_last_error();
    void* one = nullptr;
    ASSERT_EQ(vmem_alloc(&one, kMiB, VMEM_HOST_ONLY), 0) << vmem_last_error();
    ASSERT_EQ(vmem_free(one), 0) << vmem_last_error();
  }
  stop = true;
  sender.join();
  EXPECT_EQ(begun, ended);
  EXPECT_EQ(wrong, 0u);
}

std::atomic<int> handled{0};

// A waiting call lets handlers run, since the event that it waits for may depend on one.
TEST_F(Signals, HandlersRunWhileACallWaits) {
  configure({{"host_budget", "32MiB"}});
  if (IsSkipped()) return;
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { handled.fetch_add(1); };
  sigaction(SIGUSR2, &action, &before);
  handled = 0;
  sigset_t mask, after;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  vmem::region region(2 * kMiB, VMEM_HOST_ONLY);
  const vmem_range range{region.data(), region.size(), VMEM_READ, 0};
  struct Ready {
    pthread_t waits = pthread_self();
    std::atomic<bool> ends{false};
  } ready;
  struct vmem_lease* lease = nullptr;
  ASSERT_EQ(vmem_lease_async(
                &lease, &range, 1, VMEM_HOST, nullptr,
                [](struct vmem_lease*, int, void* user) {
                  auto& r = *static_cast<Ready*>(user);
                  EXPECT_TRUE(vmem::test::eventually([&] { return r.ends.load(); }));
                  pthread_kill(r.waits, SIGUSR2);
                  EXPECT_TRUE(vmem::test::eventually([] { return handled == 1; })) << "vmem_lease_end keeps it out";
                },
                &ready),
            0)
      << vmem_last_error();
  ready.ends = true;
  EXPECT_EQ(vmem_lease_end(lease, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(handled, 1);
  EXPECT_EQ(vmem_evict(nullptr, 1, VMEM_SSD), -EINVAL);
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (int s = 1; s <= SIGRTMAX; ++s) EXPECT_EQ(sigismember(&after, s), sigismember(&mask, s)) << s;
  sigaction(SIGUSR2, &before, nullptr);
}

}  // namespace
