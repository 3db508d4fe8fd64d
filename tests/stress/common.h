// Shared by the stress programs: random numbers that a seed reproduces, delays at the library's
// step points, accesses that may raise SIGBUS, and the exit of a program that found a difference.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/patience.h"
#include "core/outside_lock.h"
#include "core/step.h"
#include "vmem/vmem.h"

namespace stress {

// A call to the outside under the pager's lock ends the program.
inline const bool strict = (vmem::core::be_strict_about_big_locks(true), true);

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state((seed + 1) * 0x9e3779b97f4a7c15u ^ 0xbf58476d1ce4e5b9u) {
    for (int i = 0; i < 4; ++i) operator()();
  }
  uint64_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1du >> 8;
  }
  uint64_t below(uint64_t n) { return operator()() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <typename T, size_t N>
  const T& of(const T (&list)[N]) {
    return list[below(N)];
  }
};

// A step hook that delays transitions: mostly nothing, sometimes a yield, rarely a millisecond.
inline std::atomic<uint64_t> delay_state{1};
inline void delay(const char*) {
  const uint64_t n = delay_state.fetch_add(0x9e3779b97f4a7c15u);
  const unsigned draw = static_cast<unsigned>((n ^ (n >> 31)) >> 20) % 64;
  if (draw == 0) {
    usleep(1500);
  } else if (draw < 4) {
    usleep(50);
  } else if (draw < 12) {
    std::this_thread::yield();
  }
}

inline thread_local sigjmp_buf bus_jump;
inline thread_local volatile sig_atomic_t bus_armed = 0;

// Call before the first access that may raise SIGBUS.
inline void catch_sigbus() {
  struct sigaction action = {};
  action.sa_handler = [](int number) {
    if (bus_armed == 0) {
      signal(number, SIG_DFL);
      raise(number);
      return;
    }
    bus_armed = 0;
    siglongjmp(bus_jump, 1);
  };
  action.sa_flags = SA_NODEFER;
  sigaction(SIGBUS, &action, nullptr);
}

// Returns true if an access of `body` raised SIGBUS. The signal leaves `body` by a jump, so it must
// not hold anything that needs a destructor.
template <typename Body>
bool raises_sigbus(Body body) {
  if (sigsetjmp(bus_jump, 1) != 0) return true;
  bus_armed = 1;
  body();
  bus_armed = 0;
  return false;
}

// Called once, by the thread that finds the first difference: adds information to the message.
inline std::function<void()> on_difference = [] {};
inline std::atomic<bool> found{false};

// Prints the difference and ends the process with status 1, before other threads can bury the
// message.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void differs(const char* format, ...) {
  if (found.exchange(true)) {
    for (;;) pause();
  }
  va_list arguments;
  va_start(arguments, format);
  fputs("FAILED: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  fflush(stderr);
  on_difference();
  fflush(stderr);
  _exit(1);
}

// Sets a setting; ends the program if it is refused.
inline void configure(const char* name, const std::string& value) {
  if (vmem_set(name, value.c_str()) != 0) differs("vmem_set %s=%s: %s", name, value.c_str(), vmem_last_error());
}

// Calls vmem_init; exits with 77 if the kernel offers no trap.
inline void start() {
  const int rc = vmem_init();
  if (rc == -EPERM || rc == -ENOSYS || rc == -ENOTSUP) {
    printf("skipped: %s\n", vmem_last_error());
    exit(77);
  }
  if (rc != 0) differs("vmem_init: %d %s", rc, vmem_last_error());
}

// Reads the library's statistics. Returns false if it does not answer within 5 s: some thread keeps
// its lock.
inline bool done_so_far(struct vmem_stats* out) {
  struct Answer {
    struct vmem_stats stats = {};
    std::atomic<bool> there{false};
  };
  const auto answer = std::make_shared<Answer>();
  std::thread([answer] {
    answer->stats.size = sizeof answer->stats;
    vmem_stats(&answer->stats);
    answer->there = true;
  }).detach();
  for (int i = 0; i < 50 && !answer->there; ++i) usleep(100000);
  if (!answer->there) return false;
  *out = answer->stats;
  return true;
}

// The program's current phase, for messages; a string literal.
inline std::atomic<const char*> at_work{"calls"};

// Set by SIGTERM; the watching thread then prints the phase and ends the program.
inline std::atomic<bool> asked_to_end{false};

// Starts a thread that watches the program:
// - It ends the process if `alive` has not changed for `quiet_seconds` times patience. The message,
//   and a core, show what is stuck.
// - The library's statistics of the second half of that time tell a hang from slow work.
// - It prints the progress once a minute, and when SIGTERM ends the program.
inline std::thread watch(const std::atomic<uint64_t>& alive, const std::atomic<bool>& stop, unsigned quiet_seconds) {
  const unsigned seconds = quiet_seconds * vmem::test::patience();
  signal(SIGTERM, [](int) { asked_to_end = true; });
  return std::thread([&alive, &stop, seconds] {
    uint64_t last = 0;
    unsigned quiet = 0;
    struct vmem_stats half = {}, end = {};
    bool answers = true;
    for (unsigned tenths = 1; !stop; ++tenths) {
      usleep(100000);
      const uint64_t now = alive.load();
      quiet = now == last ? quiet + 1 : 0;
      last = now;
      if (tenths % 600 == 0)
        fprintf(stderr, "process %d after %u s: %llu steps, the last %u s ago; it is at: %s\n", getpid(), tenths / 10,
                static_cast<unsigned long long>(now), quiet / 10, at_work.load());
      if (asked_to_end)
        differs("not ended after %u s, when it was told to: %llu steps, the last %u s ago; it is at: %s", tenths / 10,
                static_cast<unsigned long long>(now), quiet / 10, at_work.load());
      if (quiet == seconds * 5) answers = done_so_far(&half);
      if (quiet < seconds * 10) continue;
      answers = answers && done_so_far(&end);
      if (getenv("VMEM_STRESS_WAIT") != nullptr) {
        fprintf(stderr, "process %d hangs: it waits for a debugger\n", getpid());
        for (;;) pause();
      }
      if (!answers) differs("no progress for %u s (%s), and the library's lock is held", seconds, at_work.load());
      differs(
          "no progress for %u s (%s); in the second half of it %llu blocks left memory, %llu bytes were read, %llu "
          "written",
          seconds, at_work.load(), static_cast<unsigned long long>(end.evictions - half.evictions),
          static_cast<unsigned long long>(end.read_bytes - half.read_bytes),
          static_cast<unsigned long long>(end.write_bytes - half.write_bytes));
    }
  });
}

// Makes a temporary file and returns its path; *fd is its descriptor.
inline std::string temp_file(int* fd) {
  const char* tmp = getenv("TMPDIR");
  std::string path = std::string(tmp != nullptr ? tmp : "/var/tmp") + "/vmem-stress.XXXXXX";
  *fd = mkstemp(path.data());
  if (*fd < 0) differs("cannot make %s: %s", path.c_str(), strerror(errno));
  return path;
}

// Runs `body(seed)` in `processes` processes at once, each with its own seed. Call before the
// library is used.
inline int in_processes(unsigned processes, uint64_t seed, const std::function<int(uint64_t)>& body) {
  if (processes <= 1) return body(seed);
  std::vector<pid_t> children;
  for (unsigned i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (child == 0) exit(body(seed + i));
    if (child > 0) children.push_back(child);
  }
  int worst = children.size() == processes ? 0 : 1;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 77 && worst == 0) worst = 77;
    if (code != 0 && code != 77) worst = 1;
    if (WIFSIGNALED(status)) fprintf(stderr, "FAILED: a process was ended by signal %d\n", WTERMSIG(status));
  }
  return worst;
}

}  // namespace stress
