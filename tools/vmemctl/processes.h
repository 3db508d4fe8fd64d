// Finds the processes that use libvmem, reads what they publish, and asks them.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "common.h"
#include "publications.h"
#include "publish/layout.h"

namespace vmemctl {

// Returns the processes that the caller may see, by pid; root sees all users'. Each is asked to
// write its present state. Removes what dead processes left in the caller's own folders. Users are
// asked in parallel: one whose processes are silent, or who has hundreds of publications, delays
// this by less than half a second and hides no other user's. pid: 0, or the only process wanted;
// processes of unknown number, any of which may be the wanted one, are then returned too.
Found look(const Common& common, pid_t pid);

// Like look(), with forged publications among the problems.
std::vector<Process> find_processes(const Common& common, bool refresh, pid_t pid, std::vector<std::string>* problems);

// Describes forged publications: for each of at most 16 users a line for each of the three
// commonest reasons and one for the rest, then one line for all other users.
std::vector<std::string> words_of(const std::vector<Refused>& forged);

// Waits until `seconds` after the start of a look. Processes are asked at its start, so the time it
// waits for silent ones is part of the time between two looks.
void wait_since(Clock::time_point start, double seconds);

// Returns the process that has this number according to the kernel; fails with kAbsent or
// kForbidden and a reason.
Process find_process(const Common& common, pid_t pid);

// Asks a process. Fails with libvmem's message, or because the process does not answer.
std::string ask(const Process& process, vmem::publish::Ask what, const std::string& name, const std::string& value);

struct Rates {
  bool known = false;  // false: seen only once
  double seconds = 0;
  double faults = 0, ssd_read = 0, ssd_written = 0, to_device = 0, from_device = 0, evictions = 0;  // per second
};
Rates rates(const Process& before, const Process& now);
// Returns the same process in the earlier look, or null.
const Process* same_process(const std::vector<Process>& before, const Process& now);

// Describes each field of publish::Stats once, for JSON and for Prometheus.
struct Field {
  const char* name;
  uint64_t vmem::publish::Stats::*member;
};
extern const std::vector<Field> kFields;

void write_process(Json& json, const Process& process, const Rates& rates);

}  // namespace vmemctl
