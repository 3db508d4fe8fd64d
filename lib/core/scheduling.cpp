#include "core/scheduling.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <memory>

#include "core/break.h"
#include "core/log.h"

namespace vmem::core {

namespace {

constexpr unsigned long kTimerSlackNs = 50000;  // the kernel's default
constexpr int kIoprioWhoProcess = 1;            // linux/ioprio.h, which older systems lack

struct SchedAttr {  // struct sched_attr of Linux 3.14; in glibc since 2.41
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};

constinit CpuMask of_main_thread{};
// Never freed: a thread or a forked child may read it while another thread sets it.
constinit std::atomic<const CpuMask*> chosen{nullptr};

// Runs before main(), which may pin its thread for its own work.
__attribute__((constructor)) void look_at_main_thread() {
  const long n = syscall(SYS_sched_getaffinity, getpid(), sizeof of_main_thread.words, of_main_thread.words.data());
  if (n > 0) of_main_thread.bytes = static_cast<size_t>(n);
}

int set_policy(int nice) {
  SchedAttr attr{};
  attr.size = sizeof attr;
  attr.policy = SCHED_OTHER;
  attr.nice = nice;
  return syscall(SYS_sched_setattr, 0, &attr, 0) == 0 ? 0 : errno;
}

}  // namespace

int run_on(const CpuMask& mask) {
  return syscall(SYS_sched_setaffinity, 0, mask.bytes, mask.words.data()) == 0 ? 0 : errno;
}

Status parse_cpus(const std::string& text, CpuMask* out) {
  *out = {};
  out->bytes = sizeof out->words;
  const char *at = text.data(), *const end = at + text.size();
  for (bool good = at != end; good;) {
    size_t first = 0;
    auto [after, err] = std::from_chars(at, end, first);
    size_t last = first;
    good = err == std::errc();
    if (good && after != end && *after == '-') {
      const auto range = std::from_chars(after + 1, end, last);
      good = range.ec == std::errc();
      after = range.ptr;
    }
    if (!good || first > last || last >= CpuMask::kCpus) break;
    for (size_t cpu = first; cpu <= last; ++cpu) out->words[cpu / CpuMask::kBits] |= 1ul << cpu % CpuMask::kBits;
    if (after == end) return {};
    good = *after == ',';
    at = after + 1;
  }
  return error(EINVAL, "cpus: \"%s\" is not accepted; give CPUs of this machine as in \"0\", \"0,2\" or \"0-3,8\"",
               text.c_str());
}

void choose_cpus(std::unique_ptr<const CpuMask> mask) {
  chosen.store(mask.release());
}

const CpuMask* thread_cpus() {
  const CpuMask* const mask = chosen.load();
  return mask != nullptr ? mask : of_main_thread.bytes != 0 ? &of_main_thread : nullptr;
}

void schedule_as_ours() {
  if (broken("scheduling")) return;
  errno = 0;
  const int nice = getpriority(PRIO_PROCESS, 0);
  int refused = set_policy(0);
  if (refused == EPERM && nice > 0) refused = set_policy(nice) != 0 ? EPERM : refused;
  if (refused == EPERM) {
    const bool all =
        // The whole program has it: its user said so.
        nice == getpriority(PRIO_PROCESS, static_cast<id_t>(getpid()));
    VMEM_LOG_ONCE(all ? Level::info : Level::warning,
                  "threads of libvmem keep nice %d and scheduling policy %d of the thread that started them, since "
                  "RLIMIT_NICE allows no more: call vmem_init from an ordinary thread first",
                  nice, sched_getscheduler(0));
  }
  // A cpuset may have removed some of these CPUs; the kernel uses the rest.
  if (const CpuMask* const mask = thread_cpus(); mask != nullptr) run_on(*mask);
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  syscall(SYS_ioprio_set, kIoprioWhoProcess, 0, 0);
}

}  // namespace vmem::core
