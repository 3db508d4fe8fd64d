#include "processes.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <set>

#include "publish/place.h"

namespace vmemctl {

namespace publish = vmem::publish;
using publish::Fd;
using vmem::core::Status;

namespace {

constexpr int kTries = 50;        // of reading a file that is being rewritten
constexpr long kAnswerMs = 1000;  // how long a process has to answer

std::string text(const Status& s) {
  return std::string(s.text());
}

struct Folder {
  std::string path;
  uid_t owner;
};

// Folders named after a user, as `base`/PREFIXuid[/rest].
void add_folders(const std::string& base, const std::string& prefix, const std::string& rest,
                 std::vector<Folder>* out) {
  DIR* dir = opendir(base.c_str());
  if (dir == nullptr) return;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
    const std::string digits = name.substr(prefix.size());
    if (digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) continue;
    std::string path = base;
    path.append("/").append(name).append(rest);
    out->push_back({std::move(path), static_cast<uid_t>(std::stoul(digits))});
  }
  closedir(dir);
}

std::vector<Folder> all_folders(const Common& common) {
  std::vector<Folder> out;
  if (!common.folder.empty()) {
    struct stat s {};
    if (stat(common.folder.c_str(), &s) != 0)
      throw Failure{kAbsent, "--folder " + common.folder + ": " + strerrordesc_np(errno)};
    out.push_back({common.folder, s.st_uid});
    return out;
  }
  for (const std::string& path : publish::folders(geteuid(), secure_getenv("XDG_RUNTIME_DIR")))
    out.push_back({path, geteuid()});
  if (geteuid() == 0) {
    add_folders("/run/user", "", "/vmem", &out);
    add_folders("/dev/shm", "vmem-", "", &out);
  }
  return out;
}

Status read_file(int file, publish::Snapshot* out) {
  std::vector<std::byte> bytes(publish::kMaxBytes);
  Status s;
  for (int i = 0; i < kTries; ++i) {
    const ssize_t n = pread(file, bytes.data(), bytes.size(), 0);
    if (n < 0) return vmem::core::system_error(errno, "cannot read it");
    s = publish::unpack(std::span(bytes).first(static_cast<size_t>(n)), out);
    if (s.code() != -EAGAIN) return s;
    usleep(2000);
  }
  return s;
}

// In our own pid namespace the kernel can be asked whether that process lives; elsewhere the mark on the file tells.
bool lives(const publish::Header& h) {
  const uint64_t ours = publish::pid_namespace();
  if (ours == 0 || h.pid_namespace != ours) return true;
  return publish::start_ticks(static_cast<pid_t>(h.pid)) == h.start_ticks;
}

publish::Reply exchange(int folder, const std::string& name, const publish::Request& request) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const timeval limit{kAnswerMs / 1000, kAnswerMs % 1000 * 1000};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  publish::put_text(address.sun_path, publish::short_path(folder, publish::socket_name(name)));
  publish::Reply reply{};
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
      send(fd.get(), &request, sizeof request, MSG_NOSIGNAL) == sizeof request) {
    const ssize_t n = recv(fd.get(), &reply, sizeof reply, 0);
    if (n == sizeof reply) {
      reply.text[sizeof reply.text - 1] = '\0';
      return reply;
    }
    if (n > 0) throw Failure{kFailed, "the process answers something else than libvmem does"};
    if (n == 0) errno = ECONNRESET;
  }
  if (errno == EACCES || errno == EPERM)
    throw Failure{kForbidden, "not permitted to ask the process: be its user, or root"};
  if (errno == ENOENT || errno == ECONNREFUSED || errno == ECONNRESET || errno == EPIPE)
    throw Failure{kAbsent, "the process has ended, or uses libvmem no more"};
  throw Failure{kFailed, "the process does not answer within " + std::to_string(kAnswerMs) + " ms (is it stopped?)"};
}

publish::Reply exchange(int folder, const std::string& name, publish::Ask what, const std::string& key,
                        const std::string& value) {
  publish::Request request{};
  memcpy(request.magic, publish::kRequestMagic, sizeof request.magic);
  request.version = publish::kVersion;
  request.ask = static_cast<uint32_t>(what);
  if (key.size() >= sizeof request.name || value.size() >= sizeof request.value)
    throw Failure{kUsage, "\"" + printable(key.substr(0, 64)) + "\" or its value is too long"};
  publish::put_text(request.name, key);
  publish::put_text(request.value, value);
  return exchange(folder, name, request);
}

double age(const publish::Header& h) {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  const double now = static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  return std::max(0.0, now - static_cast<double>(h.taken_monotonic_ns) * 1e-9);
}

// False: it is gone.
bool look(int folder, bool refresh, Process* p, std::vector<std::string>* problems) {
  Fd file;
  if (!publish::open_file(folder, p->name, p->owner, &file).ok()) return false;
  if (refresh) {
    try {
      exchange(folder, p->name, publish::Ask::refresh, "", "");
    } catch (const Failure&) {
      p->answers = false;
    }
  }
  if (Status s = read_file(file.get(), &p->now); !s.ok()) {
    if (publish::is_alive(file.get())) problems->push_back(p->folder + "/" + p->name + ": " + text(s));
    return false;
  }
  p->age_seconds = age(p->now.header);
  return lives(p->now.header);
}

}  // namespace

std::vector<Process> find_processes(const Common& common, bool refresh, pid_t pid, std::vector<std::string>* problems) {
  std::vector<Process> out;
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const Folder& folder : all_folders(common)) {
    Fd fd;
    if (Status s = publish::open_folder(folder.path, folder.owner, false, &fd); !s.ok()) {
      if (s.code() != -ENOENT) problems->push_back(text(s));
      continue;
    }
    struct stat st {};
    if (fstat(fd.get(), &st) != 0 || !seen.insert({st.st_dev, st.st_ino}).second) continue;
    publish::sweep(fd.get(), folder.owner);
    std::vector<std::string> names;
    if (Status s = publish::list(fd.get(), &names); !s.ok()) {
      problems->push_back(folder.path + ": " + text(s));
      continue;
    }
    for (const std::string& name : names) {
      Process p;
      p.folder = folder.path;
      p.name = name;
      p.owner = folder.owner;
      if (pid != 0 && !name.starts_with(std::to_string(pid) + "-")) continue;
      if (look(fd.get(), refresh, &p, problems)) out.push_back(std::move(p));
    }
  }
  std::sort(out.begin(), out.end(), [](const Process& a, const Process& b) {
    return a.now.header.pid != b.now.header.pid ? a.now.header.pid < b.now.header.pid : a.name < b.name;
  });
  return out;
}

Process find_process(const Common& common, pid_t pid) {
  std::vector<std::string> problems;
  std::vector<Process> found = find_processes(common, true, pid, &problems);
  if (!found.empty()) return std::move(found.front());
  const std::string who = "process " + std::to_string(pid);
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
  Fd folder;
  if (Status s = publish::open_folder(process.folder, process.owner, false, &folder); !s.ok())
    throw Failure{kAbsent, text(s)};
  const publish::Reply reply = exchange(folder.get(), process.name, what, name, value);
  if (reply.code == -EPERM) throw Failure{kForbidden, printable(reply.text)};
  if (reply.code != 0) throw Failure{kFailed, printable(reply.text)};
  return printable(reply.text);
}

const Process* same_process(const std::vector<Process>& before, const Process& now) {
  const auto it = std::find_if(before.begin(), before.end(),
                               [&](const Process& p) { return p.name == now.name && p.folder == now.folder; });
  return it != before.end() ? &*it : nullptr;
}

Rates rates(const Process& before, const Process& now) {
  Rates r;
  const publish::Header &a = before.now.header, &b = now.now.header;
  if (b.taken_monotonic_ns <= a.taken_monotonic_ns) return r;
  r.known = true;
  r.seconds = static_cast<double>(b.taken_monotonic_ns - a.taken_monotonic_ns) * 1e-9;
  // A runtime that was shut down and started again begins at zero.
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
    {"lease_blocks", &publish::Stats::lease_blocks},
    {"lease_hits", &publish::Stats::lease_hits},
};

namespace {

void write_histogram(Json& json, const publish::Histogram& h) {
  json.object().field("sum_ns", h.sum_ns).key("below_ns").array();
  for (size_t i = 0; i < std::size(h.count); ++i) {  // the empty ones would only be noise
    if (h.count[i] != 0) json.object().field("ns", uint64_t{1} << i).field("count", h.count[i]).end();
  }
  json.end().end();
}

}  // namespace

void write_process(Json& json, const Process& process, const Rates& r) {
  const publish::Header& h = process.now.header;
  json.object().field("pid", h.pid).field("user", h.uid).field("command", h.command).field("library", h.library);
  json.field("trap", h.trap).field("answers", process.answers).field("age_seconds", process.age_seconds);
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
    json.field("out_bytes", d.out_bytes).field("evictions", d.evictions).field("clean_drops", d.clean_drops).end();
  }
  json.end().field("regions_total", h.regions_total).key("regions").array();
  for (const publish::Region& g : process.now.regions) {
    json.object().field("id", g.id).field("name", g.name).field("address", g.base).field("size", g.size);
    json.field("block_size", g.block_size).field("backing", publish::kBackingNames[g.backing]);
    json.field("device_tier", g.has_device_tier != 0).field("zero_bytes", g.zero_bytes).field("ssd_bytes", g.ssd_bytes);
    json.field("host_bytes", g.host_bytes).field("device_bytes", g.device_bytes);
    json.field("failed_bytes", g.failed_bytes).field("leased_bytes", g.leased_bytes).end();
  }
  json.end().end();
}

}  // namespace vmemctl
