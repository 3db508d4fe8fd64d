// Scheduling of the library's threads. A new thread inherits a real-time priority, a nice value and
// a CPU mask from its creator. The thread that makes the first call should not decide this for
// threads that serve all others, so each library thread sets all of it anew.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "core/status.h"

namespace vmem::core {

// A set of CPUs, as many as any kernel can have.
struct CpuMask {
  static constexpr size_t kCpus = 8192, kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kCpus / kBits> words;
  size_t bytes;  // bytes that the kernel filled in; 0: unknown
};

// Parses a list of CPUs such as "0", "0,2" or "0-3,8". Returns 0, or -EINVAL naming the accepted
// form.
Status parse_cpus(const std::string& text, CpuMask* out);
// Runs this thread on these CPUs. Returns 0 or the kernel's errno.
int run_on(const CpuMask& mask);
// Sets the CPUs of threads started from now on (set_thread_cpus() of core/thread.h checks them).
// nullptr: those that the main thread had when the library was loaded.
void choose_cpus(std::unique_ptr<const CpuMask> mask);
// CPUs of threads started now, also for workers that the kernel starts for them. nullptr: unknown.
const CpuMask* thread_cpus();

// Called first by each library thread: sets SCHED_OTHER, nice 0, thread_cpus(), the default timer
// slack and I/O priority. A setting that the kernel refuses stays as it is. If policy or nice value
// stay, the log says so once.
void schedule_as_ours();

}  // namespace vmem::core
