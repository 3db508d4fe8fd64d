// One folder of publications: whose each is, checked with the kernel before a word of it is believed, and what it says.
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
  std::string folder, name;  // its publication
  uid_t owner = 0;           // of folder, file, socket and process
  uid_t person = 0;          // the owner, or whose subordinate id that is
  pid_t pid = 0;             // as the kernel says, in our pid namespace; 0: it does not say, being in none that we see
  vmem::publish::Snapshot now;
  bool answers = true;  // false: it did not in time, `now` is the last it wrote
  double age_seconds = 0;
};

// A publication of which nothing is believed, shown or counted.
struct Refused {
  std::string file;
  uid_t user = 0;  // who put it there
  std::string why;
};

struct Found {
  std::vector<Process> processes;
  std::vector<Refused> forged;        // not what they say
  std::vector<Refused> unread;        // not to be read: look() makes problems of them
  std::vector<std::string> problems;  // what could not be read, a line each
};

struct Folder {
  Folder(std::string where, uid_t whose) : path(std::move(where)), owner(whose), person(whose) {}

  std::string path;
  uid_t owner, person;
  size_t turn = 0;                             // of its person's folders
  std::shared_ptr<std::atomic<size_t>> share;  // publications of its person's that may still be read; null: all
};

using Clock = std::chrono::steady_clock;

// Publications of a folder that are read: a user's others are counted in a problem.
inline constexpr size_t kMaxOfAFolder = 256;
// Of all folders of a person together, with those of his subordinate ids.
inline constexpr size_t kMaxOfAPerson = 512;

// The number of one of our pid namespace's processes in its own, after which its publication is named; 0: there is no
// such process.
pid_t inner_pid(pid_t pid);

// Asks every process of an open folder, several at a time, to write what is true now. Who has not answered at
// `deadline` is shown as it last wrote; nobody is waited for after that. inner: 0, or the only number after which a
// publication may be named; that is what its process says, and so it is not known whose it is.
void read_folder(const Folder& folder, int fd, pid_t inner, Clock::time_point deadline, Found* found);

// One request and its reply. Fails with kAbsent, kForbidden or kFailed; the process that answers is `process`.
vmem::publish::Reply exchange(const Process& process, vmem::publish::Ask what, const std::string& key,
                              const std::string& value);

}  // namespace vmemctl
