// How threads of the library are scheduled. The kernel gives a new thread what its maker has: a real-time priority, a
// nice value, one CPU. Whoever makes the first call says nothing by that of the threads that serve all others, so each
// thread of ours sets all of it anew.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "core/status.h"

namespace vmem::core {

// As many CPUs as any kernel can have.
struct CpuMask {
  static constexpr size_t kCpus = 8192, kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kCpus / kBits> words;
  size_t bytes;  // that the kernel filled in; 0: nothing is known
};

// A list of CPUs as "0", "0,2" or "0-3,8". -EINVAL with the accepted form.
Status parse_cpus(const std::string& text, CpuMask* out);
// Where threads run that start from now on: on these CPUs; "": on those that the main thread had when the library was
// loaded. -EINVAL where the list is none, or has no CPU that the kernel lets this process have.
Status set_thread_cpus(const std::string& text);
// The same as a mask, for workers that the kernel starts for a thread of ours. nullptr: it is not known.
const CpuMask* thread_cpus();

// For a thread of the library, before anything else: SCHED_OTHER, nice 0, the CPUs of above, the default timer slack
// and I/O priority. What the kernel refuses stays as it is; the log says so once.
void schedule_as_ours();

}  // namespace vmem::core
