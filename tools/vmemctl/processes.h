// The processes that use libvmem: finding them, reading what they publish, asking them.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "common.h"
#include "publications.h"
#include "publish/layout.h"

namespace vmemctl {

// Those that the caller may see, by pid; root sees everybody's. What dead processes left in the caller's own folders is
// removed on the way. Each is asked to write what is true now. Users are asked side by side: one whose processes are
// silent, or who has hundreds of publications, delays this by less than half a second and hides nobody else's. pid: 0,
// or the only one that is wanted, beside which are those that may be it: with a number that nobody here knows.
Found look(const Common& common, pid_t pid);

// The same, with what is forged told among the problems.
std::vector<Process> find_processes(const Common& common, bool refresh, pid_t pid, std::vector<std::string>* problems);

// A line for each user and reason, the three of a user that most of his publications have, and one for the rest;
// of 16 users, and one line for the rest of them.
std::vector<std::string> words_of(const std::vector<Refused>& forged);

// The one process that has this number, as the kernel says; fails with kAbsent or kForbidden, and why.
Process find_process(const Common& common, pid_t pid);

// Asks it. Fails with libvmem's words, or because it does not answer.
std::string ask(const Process& process, vmem::publish::Ask what, const std::string& name, const std::string& value);

struct Rates {
  bool known = false;  // false: seen once only
  double seconds = 0;
  double faults = 0, ssd_read = 0, ssd_written = 0, to_device = 0, from_device = 0, evictions = 0;  // a second
};
Rates rates(const Process& before, const Process& now);
// The earlier look at the same process, or null.
const Process* same_process(const std::vector<Process>& before, const Process& now);

// Every field of publish::Stats, once: for JSON and for Prometheus.
struct Field {
  const char* name;
  uint64_t vmem::publish::Stats::*member;
};
extern const std::vector<Field> kFields;

void write_process(Json& json, const Process& process, const Rates& rates);

}  // namespace vmemctl
