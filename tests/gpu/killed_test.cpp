// Programs that end in the middle of their work: killed at any moment, ended by a kernel's wild
// pointer (error 700), or by cudaDeviceReset. Each time all of the device's memory is free again,
// as this process sees it; nothing hangs, no file is left, and the next program starts. No other
// process may allocate or free device memory during the test.
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../system/child.h"
#include "kernels.h"
#include "vmem/vmem.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBlock = 2 * kMiB;
constexpr int kWaves = 10;
constexpr int kAtOnce = 5;         // programs in a wave
constexpr unsigned kSeconds = 20;  // a program that runs longer hangs

// ---- the program that is to end ----

thread_local sigjmp_buf jump;
thread_local volatile sig_atomic_t armed = 0;

void on_signal(int number) {
  if (armed == 0) {
    // `addr2line -e killed_test` finds the lines.
    void* frames[64];
    constexpr char kSays[] = "a signal that no access of this test's was meant to get:\n";
    if (write(STDERR_FILENO, kSays, sizeof kSays - 1) > 0)
      backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  armed = 0;
  siglongjmp(jump, 1);
}

// Returns false if the access raised a signal, which is the answer of blocks that were on a lost
// device.
template <typename Access>
bool reaches(Access access) {
  if (sigsetjmp(jump, 1) != 0) return false;
  armed = 1;
  access();
  armed = 0;
  return true;
}

struct Soak {
  explicit Soak(unsigned number) : seed(number) {}
  unsigned seed;
  uint64_t* words = nullptr;
  static constexpr size_t kBlocks = 96;
  static constexpr size_t kWords = kBlock / 8;
  std::atomic<bool> launching{true}, stop{false};

  // Once the device is lost, calls may return any error, but they must return.
  void kernels(unsigned number) {
    std::mt19937 random(seed * 100 + number);
    cudaStream_t s = nullptr;
    if (cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) != cudaSuccess) return;
    while (launching && !stop) {
      uint64_t* const w = words + random() % (kBlocks - 4) * kWords;
      const size_t blocks = 1 + random() % 4;
      if (vmem_acquire(w, blocks * kBlock, VMEM_READ | VMEM_WRITE, 0, s) != 0) {
        if (cudaStreamQuery(s) != cudaSuccess) return;
        continue;
      }
      vmem::gpu::add(s, w, blocks * kWords, 1);
      vmem_release(w, blocks * kBlock, s);
      if (random() % 4 == 0 && cudaStreamSynchronize(s) != cudaSuccess) return;
    }
    if (!stop) cudaStreamSynchronize(s);
  }
  void accesses() {
    std::mt19937 random(seed * 100 + 50);
    while (!stop) {
      volatile uint64_t* const at = words + random() % (kBlocks * kWords);
      if (!reaches([&] { *at = *at + 1; })) return;
    }
  }
  void hints() {
    std::mt19937 random(seed * 100 + 60);
    while (!stop) {
      uint64_t* const w = words + random() % kBlocks * kWords;
      vmem_prefetch(w, kBlock, 0, nullptr);
      vmem_evict(words + random() % kBlocks * kWords, kBlock, random() % 2 == 0 ? VMEM_SSD : VMEM_HOST);
    }
  }
};

// "kill": runs until it is killed. "700" and "reset": soon exits with 0.
TEST(KilledChild, DISABLED_Program) {
  const char* const how = getenv("VMEM_TEST_END");
  ASSERT_NE(how, nullptr);
  const std::string end(how);
  const auto seed = static_cast<unsigned>(atoi(getenv("VMEM_TEST_SEED")));
  const int running = atoi(getenv("VMEM_TEST_RUNNING"));
  void* none[1];
  backtrace(none, 1);  // loads libraries, which a signal handler may not
  for (const int s : {SIGBUS, SIGSEGV}) {
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_NODEFER;
    sigaction(s, &action, nullptr);
  }
  Soak soak(seed);
  ASSERT_EQ(vmem_set("device", "handles"), 0);
  ASSERT_EQ(vmem_set("host_budget", "192MiB"), 0);
  ASSERT_EQ(vmem_set("device_budget", "96MiB"), 0);
  ASSERT_EQ(vmem_set("device_block_size", "2MiB"), 0);
  ASSERT_EQ(vmem_set("log", "error"), 0);
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, Soak::kBlocks * kBlock, 0), 0) << vmem_last_error();
  soak.words = static_cast<uint64_t*>(p);
  vmem::gpu::load_all();
  std::vector<std::thread> launchers, others;
  for (unsigned i = 0; i < 2; ++i) launchers.emplace_back([&, i] { soak.kernels(i); });
  others.emplace_back([&] { soak.accesses(); });
  others.emplace_back([&] { soak.hints(); });
  ASSERT_EQ(write(running, "r", 1), 1);
  std::mt19937 random(seed);
  if (end == "kill") {
    for (;;) pause();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
  if (end == "700") {
    vmem::gpu::add(nullptr, reinterpret_cast<uint64_t*>(0x10000), 1, 1);
    EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
  } else {
    // Streams die with the context, so our own threads stop using theirs. The library is in the
    // middle of using its own.
    soak.launching = false;
    for (std::thread& t : launchers) t.join();
    launchers.clear();
    EXPECT_EQ(cudaDeviceReset(), cudaSuccess);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(random() % 50));
  EXPECT_EQ(vmem_acquire(p, kBlock, VMEM_READ, 0, nullptr), -EIO);
  soak.stop = true;
  for (auto* threads : {&launchers, &others})
    for (std::thread& t : *threads) t.join();
  vmem_shutdown();
}

// ---- the program that ends it ----

uint64_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const d = opendir(folder.c_str());
  if (d == nullptr) return names;
  while (const dirent* e = readdir(d))
    if (e->d_name[0] != '.') names.emplace_back(e->d_name);
  closedir(d);
  return names;
}

struct Program {
  const char* how;
  bool early;  // killed before it runs
  pid_t pid;
  int running;  // readable once it runs
  int status = -1;
  bool started = false;
};

TEST(Killed, AtAnyMomentAllMemoryComesBackAndTheNextOneStarts) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  ASSERT_EQ(cudaFree(nullptr), cudaSuccess);  // this process's own context, which must survive
  const char* tmp = getenv("TMPDIR");
  std::string folder = std::string(tmp != nullptr ? tmp : "/var/tmp") + "/vmem-killed.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const uint64_t at_first = free_bytes();
  std::mt19937 random(static_cast<unsigned>(getpid()));
  const auto start = Clock::now();
  int killed = 0, early = 0, lost = 0, reset = 0;
  uint64_t least = at_first;
  for (int wave = 0; wave < kWaves; ++wave) {
    std::vector<Program> programs;
    for (int i = 0; i < kAtOnce; ++i) {
      static constexpr const char* kHow[kAtOnce] = {"kill", "kill", "700", "reset", "kill"};
      int ends[2];
      ASSERT_EQ(pipe(ends), 0);
      const bool is_early = i == kAtOnce - 1 && wave % 2 == 0;
      const pid_t pid =
          systest::start_child("KilledChild.DISABLED_Program", {{"VMEM_TEST_END", kHow[i]},
                                                                {"VMEM_TEST_SEED", std::to_string(random() % 1000000)},
                                                                {"VMEM_TEST_RUNNING", std::to_string(ends[1])},
                                                                {"VMEM_SSD_PATH", folder}});
      close(ends[1]);
      programs.push_back({kHow[i], is_early, pid, ends[0]});
    }
    for (Program& p : programs) {
      if (p.early) {
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
        kill(p.pid, SIGKILL);
      }
    }
    for (Program& p : programs) {
      pollfd one{p.running, POLLIN, 0};
      char c = 0;
      p.started = poll(&one, 1, kSeconds * 1000) == 1 && read(p.running, &c, 1) == 1;
      EXPECT_TRUE(p.started || p.early) << p.how << " of wave " << wave << " did not start";
      least = std::min(least, free_bytes());
      if (std::string(p.how) != "kill" || p.early) continue;
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 120));
      kill(p.pid, SIGKILL);
    }
    for (Program& p : programs) {
      p.status = systest::wait_for_child(p.pid, kSeconds);
      close(p.running);
      const bool by_us = std::string(p.how) == "kill";
      EXPECT_NE(p.status, -1) << p.how << " of wave " << wave << " hung";
      EXPECT_TRUE(by_us ? WIFSIGNALED(p.status) && WTERMSIG(p.status) == SIGKILL : p.status == 0)
          << p.how << " of wave " << wave << ": status " << p.status;
      ++(p.early ? early : by_us ? killed : std::string(p.how) == "700" ? lost : reset);
    }
    uint64_t now = 0;
    EXPECT_TRUE(vmem::test::eventually([&] { return (now = free_bytes()) + 16 * kMiB >= at_first; }, 5s))
        << "wave " << wave << ": " << (at_first - now) / kMiB << " MiB are missing";
    for (const std::string& name : names_in(folder)) ADD_FAILURE() << "left behind: " << name;
  }
  rmdir(folder.c_str());
  std::printf(
      "%d killed, %d of them before they ran, %d by error 700, %d by cudaDeviceReset, in "
      "%.1f s; at most %llu MiB were theirs, %llu MiB are missing\n",
      killed + early, early, lost, reset, std::chrono::duration<double>(Clock::now() - start).count(),
      static_cast<unsigned long long>((at_first - least) / kMiB),
      static_cast<unsigned long long>((at_first - std::min(at_first, free_bytes())) / kMiB));
}

}  // namespace
