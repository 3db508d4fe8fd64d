#include "processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "core/process/user.h"
#include "core/thread.h"
#include "persons.h"
#include "publish/place.h"

namespace vmemctl {

namespace core = vmem::core;
namespace publish = vmem::publish;
using publish::Fd;
using vmem::core::Status;

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kOwnTime{1000};    // for the answers of the caller's own processes
constexpr milliseconds kOthersTime{400};  // for the processes of all other users together
constexpr milliseconds kGiveUp{2000};     // on a folder whose file system hangs
constexpr size_t kThreads = 32;
constexpr size_t kTurns = 2;  // folders of a person that are always read: in /run/user, and /dev/shm

std::string text(const Status& s) {
  return std::string(s.text());
}

// Parses a user number as the kernel writes it. Returns false if it is none.
bool parse_user(const std::string& digits, uid_t* user) {
  if (digits.empty() || digits.size() > 10 || digits.find_first_not_of("0123456789") != std::string::npos) return false;
  const unsigned long long n = std::stoull(digits);
  *user = static_cast<uid_t>(n);
  return n < UINT32_MAX && std::to_string(n) == digits;
}

// Adds folders named after a user, `base`/PREFIXuid[/rest], and owned by that user. Any user may
// create any number of such names, so of names that belong to another user only the number for each
// owner is kept.
void add_folders(const std::string& base, const std::string& prefix, const std::string& rest, std::vector<Folder>* out,
                 std::vector<std::string>* problems) {
  constexpr size_t kUsers = 8;  // reported, a line each
  DIR* dir = opendir(base.c_str());
  if (dir == nullptr) return;
  std::map<uid_t, size_t> others;
  std::map<uid_t, uid_t> names;  // folder names that carry the number of an owner outside our user namespace
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    uid_t user = 0;
    if (!name.starts_with(prefix) || !parse_user(name.substr(prefix.size()), &user)) continue;
    struct statx s {};
    // Ask the kernel only for what it knows already: a user's own file system may never answer.
    if (statx(dirfd(dir), entry->d_name, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC,
              STATX_TYPE | STATX_UID, &s) != 0)
      continue;
    const uid_t owner = s.stx_uid;
    if (const auto [named, added] = names.try_emplace(owner, UINT32_MAX); added && core::is_one_user(owner))
      named->second = core::uid_outside(owner);
    if (!S_ISDIR(s.stx_mode) || names[owner] != user) {
      ++others[owner];
      continue;
    }
    std::string path = base;
    path.append("/").append(name).append(rest);
    out->emplace_back(std::move(path), owner);
  }
  closedir(dir);
  size_t told = 0, more = 0;
  for (const auto& [user, count] : others) {
    if (++told > kUsers) {
      more += count;
    } else {
      problems->push_back(std::to_string(count) + " names of user " + std::to_string(user) + " in " + base +
                          " are not theirs, or are no folders: not read");
    }
  }
  if (more != 0)
    problems->push_back(std::to_string(more) + " names of " + std::to_string(others.size() - kUsers) +
                        " more users in " + base + " are not theirs, or are no folders: not read");
}

std::vector<Folder> all_folders(const Common& common, std::vector<std::string>* problems) {
  std::vector<Folder> out;
  if (!common.folder.empty()) {
    struct stat s {};
    if (stat(common.folder.c_str(), &s) != 0)
      throw Failure{kAbsent, "--folder " + common.folder + ": " + strerrordesc_np(errno)};
    out.emplace_back(common.folder, s.st_uid);
    return out;
  }
  for (const std::string& path : publish::folders(geteuid(), secure_getenv("XDG_RUNTIME_DIR")))
    out.emplace_back(path, geteuid());
  if (geteuid() == 0) {
    add_folders("/run/user", "", "/vmem", &out, problems);
    add_folders("/dev/shm", "vmem-", "", &out, problems);
    // Root's own folders appear twice: drop the second.
    std::set<std::string> paths;
    std::erase_if(out, [&](const Folder& folder) { return !paths.insert(folder.path).second; });
    std::ifstream subuid("/etc/subuid");
    take_turns(Persons(subuid), &out);
  }
  return out;
}

// One look at every folder. Threads share it and may outlive the call if a file system hangs.
struct Look {
  explicit Look(pid_t wanted) : inner(wanted) {}

  const pid_t inner;  // see read_folder
  const Clock::time_point start = Clock::now();
  std::mutex mutex;  // protects the rest
  std::condition_variable changed;
  std::deque<Folder> todo;
  std::multimap<std::string, uid_t> busy;  // a folder that is being read, by its path
  std::set<std::pair<dev_t, ino_t>> seen;
  Found found;
  size_t left_out = 0;  // folders
};

void read_one(Look& look, const Folder& folder, Found* found) {
  Fd fd;
  if (Status s = publish::open_folder(folder.path, folder.owner, false, &fd); !s.ok()) {
    if (s.code() == -EXDEV) {
      found->unread.push_back({folder.path, folder.owner, "it is on a file system of a user's (FUSE): not read"});
    } else if (s.code() != -ENOENT) {
      found->problems.push_back(text(s));
    }
    return;
  }
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return;
  {
    std::lock_guard lock(look.mutex);
    if (!look.seen.insert({st.st_dev, st.st_ino}).second) return;
  }
  if (folder.owner == geteuid()) publish::sweep(fd.get(), folder.owner);
  const milliseconds time = folder.owner == geteuid() ? kOwnTime : kOthersTime;
  read_folder(folder, fd.get(), look.inner, look.start + time, found);
}

void work(Look& look) {
  std::unique_lock lock(look.mutex);
  while (!look.todo.empty()) {
    const Folder folder = look.todo.front();
    look.todo.pop_front();
    // Only a user who wants to keep this busy has so many.
    if (folder.turn >= kTurns && folder.owner != geteuid() &&
        (*folder.share == 0 || Clock::now() > look.start + kOthersTime)) {
      ++look.left_out;
      continue;
    }
    const auto entry = look.busy.emplace(folder.path, folder.owner);
    lock.unlock();
    Found found;
    read_one(look, folder, &found);
    lock.lock();
    look.busy.erase(entry);
    for (Process& p : found.processes) look.found.processes.push_back(std::move(p));
    for (Refused& f : found.forged) look.found.forged.push_back(std::move(f));
    for (Refused& u : found.unread) look.found.unread.push_back(std::move(u));
    for (std::string& p : found.problems) look.found.problems.push_back(std::move(p));
    look.changed.notify_all();
  }
}

// Starts a thread a folder, but none for folders in which an earlier look still hangs.
void read_all(const std::shared_ptr<Look>& look) {
  static std::vector<std::weak_ptr<Look>> earlier;
  for (const auto& before : earlier) {
    const std::shared_ptr<Look> l = before.lock();
    if (!l) continue;
    std::lock_guard lock(l->mutex);
    for (const auto& [path, owner] : l->busy) {
      if (std::erase_if(look->todo, [p = path](const Folder& f) { return f.path == p; }) != 0)
        look->found.problems.push_back(path + ": cannot be read: does its file system hang?");
    }
  }
  std::erase_if(earlier, [](const auto& l) { return l.expired(); });
  const size_t wanted = std::min(kThreads, look->todo.size());  // each thread takes a folder at once
  size_t started = 0;
  for (; started < wanted; ++started) {
    std::thread thread;
    if (!vmem::core::start_thread(
             "vmemctl-look", [look] { work(*look); }, &thread)
             .ok())
      break;
    thread.detach();
  }
  if (started == 0) return work(*look);
  std::unique_lock lock(look->mutex);
  const auto done = [&] { return look->todo.empty() && look->busy.empty(); };
  if (look->changed.wait_until(lock, look->start + kGiveUp, done)) return;
  for (const auto& [path, owner] : look->busy)
    look->found.problems.push_back(path + ": cannot be read: does its file system hang?");
  if (!look->todo.empty())
    look->found.problems.push_back(std::to_string(look->todo.size()) +
                                   " folders of publications were not read in time");
  look->todo.clear();
  earlier.push_back(look);
}

std::vector<std::string> grouped(const std::vector<Refused>& all, const std::string& before) {
  constexpr size_t kReasons = 3, kUsers = 16;  // reasons of one user
  std::map<uid_t, std::map<std::string, std::vector<std::string>>> users;
  for (const Refused& f : all) users[f.user][f.why].push_back(f.file);
  std::vector<std::string> out;
  size_t told = 0, untold = 0;
  for (const auto& [user, reasons] : users) {
    if (++told > kUsers) {
      for (const auto& [why, files] : reasons) untold += files.size();
      continue;
    }
    const std::string begin = before + "user " + std::to_string(user) + ": ";
    size_t shown = 0, more = 0;
    std::vector<std::pair<std::string, std::vector<std::string>>> most(reasons.begin(), reasons.end());
    std::stable_sort(most.begin(), most.end(),
                     [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
    for (const auto& [why, files] : most) {
      if (++shown > kReasons) {
        more += files.size();
        continue;
      }
      std::string line = begin + files.front();
      if (files.size() > 1) line += " and " + std::to_string(files.size() - 1) + " more";
      out.push_back(line.append(": ").append(why));
    }
    if (more != 0) out.push_back(begin + std::to_string(more) + " more publications");
  }
  if (untold != 0)
    out.push_back(before + std::to_string(users.size() - kUsers) + " more users: " + std::to_string(untold) +
                  " publications");
  return out;
}

}  // namespace

Found look(const Common& common, pid_t pid) {
  const pid_t inner = pid != 0 ? inner_pid(pid) : 0;
  if (pid != 0 && inner == 0) return {};
  const auto look = std::make_shared<Look>(inner);
  for (Folder& folder : all_folders(common, &look->found.problems)) look->todo.push_back(std::move(folder));
  const bool mine =
      std::all_of(look->todo.begin(), look->todo.end(), [](const Folder& f) { return f.owner == geteuid(); });
  if (mine) {
    work(*look);
  } else {
    read_all(look);
  }
  std::unique_lock lock(look->mutex);
  Found found = std::move(look->found);
  if (look->left_out != 0)
    found.problems.push_back(std::to_string(look->left_out) + " folders of persons with many folders were not read");
  lock.unlock();
  std::sort(found.processes.begin(), found.processes.end(), [](const Process& a, const Process& b) {
    return a.pid != b.pid ? a.pid < b.pid : a.owner != b.owner ? a.owner < b.owner : a.name < b.name;
  });
  if (pid != 0) std::erase_if(found.processes, [pid](const Process& p) { return p.pid != pid && p.pid != 0; });
  // Keep one publication a process: two would be one series with two values. Processes of unknown
  // number are told apart by their publications' names alone.
  std::vector<Process> once;
  for (Process& p : found.processes) {
    if (!once.empty() && once.back().pid == p.pid && once.back().owner == p.owner &&
        (p.pid != 0 || once.back().name == p.name)) {
      found.forged.push_back(
          {p.folder + "/" + p.name, p.owner,
           "process " + (p.pid != 0 ? std::to_string(p.pid) : p.name) + " has another publication already"});
    } else {
      once.push_back(std::move(p));
    }
  }
  found.processes = std::move(once);
  for (std::string& line : grouped(found.unread, "cannot read what is published by "))
    found.problems.push_back(std::move(line));
  return found;
}

std::vector<std::string> words_of(const std::vector<Refused>& forged) {
  return grouped(forged, "FORGED by ");
}

std::vector<Process> find_processes(const Common& common, bool /*refresh*/, pid_t pid,
                                    std::vector<std::string>* problems) {
  Found found = look(common, pid);
  for (std::string& p : found.problems) problems->push_back(std::move(p));
  for (std::string& line : words_of(found.forged)) problems->push_back(std::move(line));
  return std::move(found.processes);
}

void wait_since(Clock::time_point start, double seconds) {
  std::this_thread::sleep_until(start + std::chrono::duration<double>(seconds));
}

Process find_process(const Common& common, pid_t pid) {
  std::vector<std::string> problems;
  std::vector<Process> found = find_processes(common, true, pid, &problems);
  const size_t all = found.size();
  std::erase_if(found, [pid](const Process& p) { return p.pid != pid; });
  const std::string who = "process " + std::to_string(pid);
  if (found.size() > 1) throw Failure{kForbidden, "two users publish for " + who + ": neither is asked"};
  if (!found.empty()) return std::move(found.front());
  if (all != 0) problems.emplace_back("the number of some that do is not known here: ask in their own pid namespace");
  struct stat s {};
  if (stat(("/proc/" + std::to_string(pid)).c_str(), &s) != 0) throw Failure{kAbsent, "there is no " + who};
  if (geteuid() != 0 && s.st_uid != geteuid()) {
    throw Failure{kForbidden, who + " is user " + std::to_string(s.st_uid) + "'s: be that user, or root"};
  }
  std::string why;
  for (const std::string& problem : problems) why += "; " + problem;
  throw Failure{kAbsent, who + " does not use libvmem, or has setting publish off" + why};
}

std::string ask(const Process& process, publish::Ask what, const std::string& name, const std::string& value) {
  const publish::Reply reply = exchange(process, what, name, value);
  if (reply.code == -EPERM) throw Failure{kForbidden, printable(reply.text)};
  if (reply.code != 0) throw Failure{kFailed, printable(reply.text)};
  return printable(reply.text);
}

const Process* same_process(const std::vector<Process>& before, const Process& now) {
  const auto it = std::find_if(before.begin(), before.end(), [&](const Process& p) {
    return p.name == now.name && p.owner == now.owner && p.pid == now.pid;  // one folder may have several paths
  });
  return it != before.end() ? &*it : nullptr;
}

Rates rates(const Process& before, const Process& now) {
  Rates r;
  const publish::Header &a = before.now.header, &b = now.now.header;
  if (b.taken_monotonic_ns <= a.taken_monotonic_ns) return r;
  r.known = true;
  r.seconds = static_cast<double>(b.taken_monotonic_ns - a.taken_monotonic_ns) * 1e-9;
  // Counters start at zero again after a shutdown and a new start.
  const auto per_second = [&](uint64_t publish::Stats::*m) {
    return b.stats.*m >= a.stats.*m ? static_cast<double>(b.stats.*m - a.stats.*m) / r.seconds : 0.0;
  };
  r.faults = per_second(&publish::Stats::faults);
  r.ssd_read = per_second(&publish::Stats::read_bytes);
  r.ssd_written = per_second(&publish::Stats::write_bytes);
  r.to_device = per_second(&publish::Stats::host_to_device_bytes);
  r.from_device = per_second(&publish::Stats::device_to_host_bytes);
  r.evictions = per_second(&publish::Stats::evictions);
  return r;
}

const std::vector<Field> kFields = {
    {"faults", &publish::Stats::faults},
    {"soft_faults", &publish::Stats::soft_faults},
    {"fault_ns_total", &publish::Stats::fault_ns_total},
    {"fault_ns_max", &publish::Stats::fault_ns_max},
    {"read_bytes", &publish::Stats::read_bytes},
    {"write_bytes", &publish::Stats::write_bytes},
    {"host_bytes", &publish::Stats::host_bytes},
    {"device_bytes", &publish::Stats::device_bytes},
    {"ssd_bytes", &publish::Stats::ssd_bytes},
    {"host_budget", &publish::Stats::host_budget},
    {"evictions", &publish::Stats::evictions},
    {"clean_drops", &publish::Stats::clean_drops},
    {"prefetched_blocks", &publish::Stats::prefetched_blocks},
    {"prefetch_hits", &publish::Stats::prefetch_hits},
    {"prefetch_wasted", &publish::Stats::prefetch_wasted},
    {"host_to_device_bytes", &publish::Stats::host_to_device_bytes},
    {"device_to_host_bytes", &publish::Stats::device_to_host_bytes},
    {"copied_bytes", &publish::Stats::copied_bytes},
    {"io_errors", &publish::Stats::io_errors},
    {"checksum_errors", &publish::Stats::checksum_errors},
    {"lost_blocks", &publish::Stats::lost_blocks},
    {"unknown_blocks", &publish::Stats::unknown_blocks},
    {"fault_around_blocks", &publish::Stats::fault_around_blocks},
    {"dirty_bytes", &publish::Stats::dirty_bytes},
    {"background_write_bytes", &publish::Stats::background_write_bytes},
    {"lease_blocks", &publish::Stats::lease_blocks},
    {"lease_hits", &publish::Stats::lease_hits},
};

namespace {

void write_histogram(Json& json, const publish::Histogram& h) {
  json.object().field("sum_ns", h.sum_ns).key("below_ns").array();
  for (size_t i = 0; i < std::size(h.count); ++i) {  // empty buckets would only be noise
    if (h.count[i] != 0) json.object().field("ns", uint64_t{1} << i).field("count", h.count[i]).end();
  }
  json.end().end();
}

}  // namespace

void write_process(Json& json, const Process& process, const Rates& r) {
  const publish::Header& h = process.now.header;
  json.object()
      .field("pid", process.pid)
      .field("user", process.owner)
      .field("command", h.command)
      .field("library", h.library);
  json.field("trap", h.trap)
      .field("device_tier", h.device_tier)
      .field("answers", process.answers)
      .field("age_seconds", process.age_seconds);
  json.field("started_unix", static_cast<double>(h.started_ns) * 1e-9);
  json.key("stats").object();
  for (const Field& f : kFields) json.field(f.name, h.stats.*f.member);
  json.end().key("rates");
  if (r.known) {
    json.object().field("seconds", r.seconds).field("faults", r.faults).field("ssd_read_bytes", r.ssd_read);
    json.field("ssd_written_bytes", r.ssd_written).field("to_device_bytes", r.to_device);
    json.field("from_device_bytes", r.from_device).field("evictions", r.evictions).end();
  } else {
    json.null();
  }
  json.key("fault_times");
  write_histogram(json, h.fault);
  json.key("move_times").object();
  for (size_t i = 0; i < vmem::core::kWays; ++i) write_histogram(json.key(vmem::core::kWayNames[i]), h.move[i]);
  json.end().key("devices").array();
  for (const publish::Device& d : process.now.devices) {
    json.object().field("device", d.ordinal).field("name", d.name).field("lost", d.lost != 0).field("budget", d.budget);
    json.field("used_bytes", d.used_bytes).field("leased_bytes", d.leased_bytes).field("in_bytes", d.in_bytes);
    json.field("out_bytes", d.out_bytes).field("evictions", d.evictions).field("clean_drops", d.clean_drops);
    json.field("guest_bytes", d.guest_bytes).end();
  }
  json.end().field("regions_total", h.regions_total).key("regions").array();
  for (const publish::Region& g : process.now.regions) {
    json.object().field("id", g.id).field("name", g.name).field("address", g.base).field("size", g.size);
    json.field("block_size", g.block_size).field("backing", publish::kBackingNames[g.backing]);
    json.field("device_tier", g.has_device_tier != 0).field("zero_bytes", g.zero_bytes).field("ssd_bytes", g.ssd_bytes);
    json.field("host_bytes", g.host_bytes).field("device_bytes", g.device_bytes);
    json.field("failed_bytes", g.failed_bytes).field("leased_bytes", g.leased_bytes);
    json.key("heat").array();
    for (const uint8_t level : g.heat) json.value(static_cast<int>(level));
    json.end().end();
  }
  json.end().end();
}

}  // namespace vmemctl
