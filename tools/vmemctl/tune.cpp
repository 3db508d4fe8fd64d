// vmemctl tune: settings of a running process, knobs of the module.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "api/memory_limit.h"
#include "commands.h"
#include "core/options.h"
#include "processes.h"
#include "publish/place.h"

namespace vmemctl {

namespace {

struct Result {
  std::string name, value;
  bool changed;
};

struct Assignment {
  std::string name, value;
  bool set;
};

Assignment parse(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == 0) throw Failure{kUsage, "\"" + printable(text) + "\" names no setting; give NAME=VALUE"};
  if (equals == std::string::npos) return {text, "", false};
  return {text.substr(0, equals), text.substr(equals + 1), true};
}

// ---- the machine: one value a file ----

// A knob's name is the name of a file in this folder.
std::string knob_path(const std::string& sysfs, const std::string& name) {
  if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") != std::string::npos)
    throw Failure{kUsage, "\"" + printable(name) + "\" is no name of a tunable; docs/kernel-module.md lists them"};
  return sysfs + "/" + name;
}

std::string read_knob(const std::string& sysfs, const std::string& name) {
  const std::string path = knob_path(sysfs, name);
  vmem::publish::Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[64];
  const ssize_t n = fd ? read(fd.get(), text, sizeof text) : -1;
  if (n < 0) {
    throw Failure{errno == EACCES ? kForbidden : kAbsent,
                  "the module has no readable tunable " + printable(name) + " (" + strerrordesc_np(errno) + ")"};
  }
  std::string value(text, static_cast<size_t>(n));
  while (!value.empty() && value.back() == '\n') value.pop_back();
  return printable(value);
}

// Accepts sizes such as 8GiB for *_bytes, as settings do.
std::string in_bytes(const std::string& name, const std::string& value) {
  uint64_t n = 0;
  if (!name.ends_with("_bytes") || !vmem::core::parse_bytes(value, &n).ok()) return value;
  return std::to_string(n);
}

void write_knob(const std::string& sysfs, const Assignment& a) {
  const std::string path = knob_path(sysfs, a.name), value = in_bytes(a.name, a.value);
  vmem::publish::Fd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (fd && write(fd.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size())) return;
  const int err = errno;
  switch (err) {
    case EACCES:
    case EPERM:
      throw Failure{kForbidden, "only root may change the machine's tunable " + a.name};
    case ENOENT:
      throw Failure{kAbsent, "the module has no tunable " + a.name + "; docs/kernel-module.md lists them"};
    case ERANGE:
    case EINVAL:
      throw Failure{kFailed, "the module refuses " + a.name + "=" + printable(a.value) + " (" + strerrordesc_np(err) +
                                 "); docs/kernel-module.md has the bounds"};
    default:
      throw Failure{kFailed, path + ": " + strerrordesc_np(err)};
  }
}

std::vector<Result> tune_machine(const TuneOptions& options, const std::vector<Assignment>& assignments) {
  DIR* dir = opendir(options.sysfs.c_str());
  if (dir == nullptr)
    throw Failure{kAbsent, "the module vmem.ko is not loaded (no " + options.sysfs + "): modprobe vmem"};
  std::vector<std::string> knobs;
  while (const dirent* entry = readdir(dir)) {
    struct stat s {};
    if (fstatat(dirfd(dir), entry->d_name, &s, 0) == 0 && S_ISREG(s.st_mode) && (s.st_mode & S_IWUSR) != 0 &&
        strcmp(entry->d_name, "uevent") != 0)
      knobs.emplace_back(entry->d_name);
  }
  closedir(dir);
  std::sort(knobs.begin(), knobs.end());
  std::vector<Result> out;
  for (const Assignment& a : assignments) {
    if (a.set) write_knob(options.sysfs, a);
    out.push_back({a.name, read_knob(options.sysfs, a.name), a.set});
  }
  if (!assignments.empty()) return out;
  for (const std::string& name : knobs) out.push_back({name, read_knob(options.sysfs, name), false});
  return out;
}

constexpr char kNoLimit[] = "18446744073709551615";  // for a size

// Warns here if the budget exceeds what the process can have: its own log may go unread.
void warn_of_budget(const Process& process, const std::string& value) {
  uint64_t bytes = 0;
  if (!vmem::core::parse_bytes(value, &bytes).ok()) return;
  const std::string line =
      vmem::api::warn_of_budget(bytes, process.now.header.stats.host_bytes, "", std::to_string(process.pid));
  if (!line.empty()) fprintf(stderr, "vmemctl: warning: %s\n", line.c_str());
}

std::vector<Result> tune_process(const Common& common, int pid, const std::vector<Assignment>& assignments) {
  using vmem::publish::Ask;
  const Process process = find_process(common, pid);
  std::vector<Result> out;
  for (const Assignment& a : assignments) {
    if (a.set) ask(process, Ask::set, a.name, a.value);
    if (a.set && a.name == "host_budget") warn_of_budget(process, a.value);
    // After publish=off the process no longer answers.
    const bool gone = a.set && a.name == "publish";
    out.push_back({a.name, gone ? a.value : ask(process, Ask::get, a.name, ""), a.set});
  }
  if (!assignments.empty()) return out;
  for (const vmem::core::OptionInfo& info : vmem::core::option_table()) {
    if (info.live) out.push_back({info.name, ask(process, Ask::get, info.name, ""), false});
  }
  return out;
}

}  // namespace

int tune(const Common& common, const TuneOptions& options) {
  if (options.machine == (options.pid != 0)) throw Failure{kUsage, "give either --pid PID or --machine"};
  std::vector<Assignment> assignments;
  for (const std::string& text : options.assignments) assignments.push_back(parse(text));
  const std::vector<Result> results =
      options.machine ? tune_machine(options, assignments) : tune_process(common, options.pid, assignments);
  Json json;
  json.object().key("settings").array();
  for (const Result& r : results) {
    json.object().field("name", r.name).field("value", r.value).field("changed", r.changed).end();
    if (!common.json) printf("%s=%s\n", printable(r.name).c_str(), r.value == kNoLimit ? "unlimited" : r.value.c_str());
  }
  json.end().end();
  if (common.json) printf("%s\n", json.text().c_str());
  return kDone;
}

}  // namespace vmemctl
