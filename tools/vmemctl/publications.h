// Reads one folder of publications. The kernel confirms who wrote each one before its content is
// used.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "publish/layout.h"
#include "publish/place.h"

namespace vmemctl {

struct Process {
  std::string folder, name;  // where it is published
  uid_t owner = 0;           // of folder, file, socket and process
  uid_t person = 0;          // the owner, or the user whose subordinate id the owner is
  pid_t pid = 0;             // from the kernel, in our pid namespace; 0: unknown, in a namespace we cannot see
  vmem::publish::Snapshot now;
  bool answers = true;  // false: no answer in time, `now` is its last state
  double age_seconds = 0;
};

// A publication whose content is not used: neither shown nor counted.
struct Refused {
  std::string file;
  uid_t user = 0;  // who created it
  std::string why;
};

struct Found {
  std::vector<Process> processes;
  std::vector<Refused> forged;        // publications that fail the checks
  std::vector<Refused> unread;        // unreadable; look() turns them into problems
  std::vector<std::string> problems;  // read errors, a line each
};

struct Folder {
  Folder(std::string where, uid_t whose) : path(std::move(where)), owner(whose), person(whose) {}

  std::string path;
  uid_t owner, person;
  size_t turn = 0;                             // its number among its person's folders
  std::shared_ptr<std::atomic<size_t>> share;  // publications of this person that may still be read; null: all
};

using Clock = std::chrono::steady_clock;

// Publications read in one folder; a problem reports the number of the rest.
inline constexpr size_t kMaxOfAFolder = 256;
// For all folders of a person together, with those of the person's subordinate ids.
inline constexpr size_t kMaxOfAPerson = 512;

// Returns the number that a process of our pid namespace has in its own, which names its
// publication; 0: no such process.
pid_t inner_pid(pid_t pid);

// Asks every process of an open folder, several at a time, to write its present state. A process
// that has not answered by `deadline` is shown as it last wrote; there is no wait after it. inner:
// 0, or the only number in a publication's name to accept; a process in another pid namespace
// chooses that number, so it does not identify the process.
void read_folder(const Folder& folder, int fd, pid_t inner, Clock::time_point deadline, Found* found);

// Sends one request and returns the reply. Fails with kAbsent, kForbidden or kFailed. Checks that
// `process` is the one that answers.
vmem::publish::Reply exchange(const Process& process, vmem::publish::Ask what, const std::string& key,
                              const std::string& value);

}  // namespace vmemctl
