#include "publications.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <utility>

#include "common.h"
#include "core/process/user.h"
#include "publish/lookup.h"

namespace vmemctl {

namespace publish = vmem::publish;
using publish::Fd;
using vmem::core::Status;

namespace {

constexpr int kTries = 50;                          // reads of a file that is being rewritten, while there is time
constexpr std::chrono::milliseconds kRewrite{100};  // extra time after the deadline for files being rewritten then
constexpr int kAnswerMs = 1000;                     // limit for the answer to a single request
constexpr size_t kInFlight = 32;                    // requests to the processes of one folder

// Requests in flight in all folders that are read in parallel. Each takes two descriptors, of 1024
// by default: a user with many folders must not take the descriptors needed for others'
// publications.
constexpr size_t kInFlightOfAll = 192;
constexpr size_t kInFlightAlways = 2;  // of each folder, whatever the others use
std::atomic<size_t> in_flight{0};

// Milliseconds until the deadline; 0 after it.
int left(Clock::time_point deadline) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long>(static_cast<long>(ms), 0, 60000));
}

publish::Request request_for(publish::Ask what, const std::string& key, const std::string& value) {
  publish::Request request{};
  memcpy(request.magic, publish::kRequestMagic, sizeof request.magic);
  request.version = publish::kVersion;
  request.ask = static_cast<uint32_t>(what);
  if (key.size() >= sizeof request.name || value.size() >= sizeof request.value)
    throw Failure{kUsage, "\"" + printable(key.substr(0, 64)) + "\" or its value is too long"};
  publish::put_text(request.name, key);
  publish::put_text(request.value, value);
  return request;
}

// Connects to the socket beside a publication without following a link. The kernel tells which
// process listens there.
Status connect_to(int folder, const std::string& name, uid_t owner, Fd* out, ucred* peer) {
  Fd place;
  if (Status s = publish::open_socket(folder, name, owner, &place); !s.ok()) return s;
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  publish::put_text(address.sun_path, publish::socket_path(place));
  socklen_t size = sizeof *peer;
  if (!fd || connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, peer, &size) != 0)
    return vmem::core::system_error(errno, "cannot connect to publication %s", name.c_str());
  *out = std::move(fd);
  return {};
}

// Facts about a process from /proc that the process itself cannot write.
struct Identity {
  bool known = false;
  bool is[4] = {};  // real, effective, saved, file system user id: is it the user's?
  pid_t innermost = 0;

  bool any() const {
    return std::any_of(std::begin(is), std::end(is), [](bool b) { return b; });
  }
};

Identity identity(pid_t pid, uid_t owner) {
  Identity out;
  std::ifstream in("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "Uid:") {
      out.known = true;
      uid_t uid = 0;
      for (bool& same : out.is) same = (words >> uid) && uid == owner;
    } else if (key == "NSpid:") {
      while (words >> out.innermost) {
      }
    }
  }
  return out;
}

// The user's processes and their numbers in their own pid namespaces, as many as the time allows.
std::vector<std::pair<pid_t, pid_t>> processes_of(uid_t owner, Clock::time_point deadline) {
  std::vector<std::pair<pid_t, pid_t>> out;
  DIR* dir = opendir("/proc");
  if (dir == nullptr) return out;
  while (const dirent* entry = left(deadline) != 0 ? readdir(dir) : nullptr) {
    const auto pid = static_cast<pid_t>(strtol(entry->d_name, nullptr, 10));
    struct stat s {};
    if (pid <= 0 || fstatat(dirfd(dir), entry->d_name, &s, 0) != 0 || s.st_uid != owner) continue;
    if (const Identity is = identity(pid, owner); is.any()) out.emplace_back(pid, is.innermost);
  }
  closedir(dir);
  return out;
}

struct Asked {
  Process process;
  Fd file, socket;
  ucred peer{};
  bool linked = false;  // `peer` listens at its socket
  pid_t outside = 0;    // the process that it names, if in another pid namespace and not linked
};

class Reader {
 public:
  Reader(const Folder& folder, int fd, pid_t inner, Clock::time_point deadline, Found* found)
      : folder_(folder), fd_(fd), inner_(inner), deadline_(deadline), found_(*found) {}
  ~Reader() { in_flight -= counted_; }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void run() {
    std::vector<std::string> names;
    if (Status s = publish::list(fd_, &names); !s.ok()) {
      found_.problems.push_back(folder_.path + ": " + std::string(s.text()));
      return;
    }
    if (inner_ != 0)
      std::erase_if(names, [this](const std::string& n) { return !n.starts_with(std::to_string(inner_) + "-"); });
    // Root removes no other user's files: skip the dead here so that they do not crowd out the
    // living.
    if (names.size() > kMaxOfAFolder) std::erase_if(names, [this](const std::string& n) { return is_dead(n); });
    std::sort(names.begin(), names.end());
    const size_t most = take_share(std::min(names.size(), kMaxOfAFolder));
    if (names.size() > most) {
      found_.unread.push_back({folder_.path, folder_.owner,
                               std::to_string(names.size() - most) + " publications there are more than " +
                                   std::to_string(kMaxOfAFolder) + " in a folder, or " + std::to_string(kMaxOfAPerson) +
                                   " of one person"});
      names.resize(most);
    }
    for (size_t next = 0; next < names.size() || !flight_.empty();) {
      while (next < names.size() && may_start()) {
        start(names[next++]);
        count();
      }
      collect();
      count();
    }
  }

 private:
  bool may_start() const {
    return flight_.size() < kInFlightAlways || (flight_.size() < kInFlight && in_flight.load() < kInFlightOfAll);
  }

  void count() {
    in_flight += flight_.size() - counted_;
    counted_ = flight_.size();
  }

  // Returns true if its process has ended; false also if that cannot be determined now.
  bool is_dead(const std::string& name) const {
    Fd file;
    return left(deadline_) != 0 && publish::open_file(fd_, name, folder_.owner, &file).ok() &&
           !publish::is_alive(file.get());
  }

  // Takes up to `wanted` from what is left of the person's share.
  size_t take_share(size_t wanted) const {
    if (!folder_.share) return wanted;
    size_t left = folder_.share->load();
    while (!folder_.share->compare_exchange_weak(left, left - std::min(left, wanted))) {
    }
    return std::min(left, wanted);
  }

  void forged(const std::string& name, const std::string& why) {
    found_.forged.push_back({folder_.path + "/" + name, folder_.owner, why});
  }

  void unread(const std::string& name, const std::string& why) {
    found_.unread.push_back({folder_.path + "/" + name, folder_.owner, why});
  }

  // Returns true if its process removed the publication, or died.
  bool gone(const Asked& a) const {
    struct stat opened {
    }, named{};
    Fd place;
    return !publish::is_alive(a.file.get()) || fstat(a.file.get(), &opened) != 0 ||
           !publish::open_entry_place(fd_, a.process.name, &place).ok() || fstat(place.get(), &named) != 0 ||
           opened.st_ino != named.st_ino;
  }

  void start(const std::string& name) {
    Asked a;
    a.process.folder = folder_.path;
    a.process.name = name;
    a.process.owner = folder_.owner;
    a.process.person = folder_.person;
    if (Status s = publish::open_file(fd_, name, folder_.owner, &a.file); !s.ok()) {
      if (s.code() == -EACCES || s.code() == -EXDEV) return forged(name, "it is no file of user " + user());
      if (s.code() != -ENOENT) unread(name, std::string(s.text()));
      return;
    }
    if (!publish::is_alive(a.file.get())) return;
    const Status s = connect_to(fd_, name, folder_.owner, &a.socket, &a.peer);
    a.linked = s.ok();
    if (s.code() == -EACCES && geteuid() != folder_.owner && geteuid() != 0) {
      return unread(name, "not permitted to ask the process");
    }
    if (s.code() == -EACCES || s.code() == -EXDEV) return forged(name, "its socket is none of user " + user());
    if (s.code() == -ENOENT || s.code() == -ECONNREFUSED) {
      if (!gone(a)) forged(name, "no process answers for it");
      return;
    }
    static const publish::Request refresh = request_for(publish::Ask::refresh, "", "");
    if (a.linked && send(a.socket.get(), &refresh, sizeof refresh, MSG_NOSIGNAL) == sizeof refresh) {
      flight_.push_back(std::move(a));
    } else {
      finish(a, false);  // its queue is full: it has not answered for a long time
    }
  }

  // Waits for answers until the deadline, then gives up on the others.
  void collect() {
    std::vector<pollfd> wait;
    for (const Asked& a : flight_) wait.push_back({a.socket.get(), POLLIN, 0});
    const int ms = left(deadline_);
    if (!wait.empty() && poll(wait.data(), wait.size(), ms) < 0 && errno != EINTR) return give_up();
    for (size_t i = flight_.size(); i-- > 0;) {
      if (wait[i].revents == 0) continue;
      publish::Reply reply{};
      const ssize_t n = recv(flight_[i].socket.get(), &reply, sizeof reply, 0);
      finish(flight_[i], n == sizeof reply);
      flight_.erase(flight_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (ms == 0) give_up();
  }

  void give_up() {
    for (Asked& a : flight_) finish(a, false);
    flight_.clear();
  }

  Status read_file(int file, publish::Snapshot* out) const {
    std::vector<std::byte> bytes(publish::kMaxBytes);
    Status s;
    for (int i = 0; i < kTries; ++i) {
      const ssize_t n = pread(file, bytes.data(), bytes.size(), 0);
      if (n < 0) return vmem::core::system_error(errno, "cannot read it");
      s = publish::unpack(std::span(bytes).first(static_cast<size_t>(n)), out);
      if (s.code() != -EAGAIN || left(deadline_ + kRewrite) == 0) return s;
      usleep(2000);
    }
    return s;
  }

  void finish(Asked& a, bool answers) {
    Process& p = a.process;
    p.answers = answers;
    if (Status s = read_file(a.file.get(), &p.now); !s.ok()) {
      if (!gone(a)) unread(p.name, std::string(s.text()));
      return;
    }
    if (!a.linked && p.now.header.pid_namespace != publish::pid_namespace()) {
      a.outside = outside(p.now.header);
      if (a.outside == 0) {
        if (!gone(a)) unread(p.name, "its process takes no requests now, and cannot be identified from here");
        return;
      }
    }
    std::string why;
    if (!is_genuine(a, &why)) {
      if (!why.empty() && !gone(a)) forged(p.name, why);
      return;
    }
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    const double now = static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
    p.age_seconds = std::max(0.0, now - static_cast<double>(p.now.header.taken_monotonic_ns) * 1e-9);
    remove_repeated(&p.now);
    found_.processes.push_back(std::move(p));
  }

  // Returns our number of the process that a header from another pid namespace names; 0 if this
  // user has no such process, or there is no time to look.
  pid_t outside(const publish::Header& h) {
    if (!looked_) processes_ = processes_of(folder_.owner, deadline_);
    looked_ = true;
    for (const auto& [pid, inner] : processes_) {
      struct stat s {};
      if (left(deadline_) == 0) break;
      if (inner == static_cast<pid_t>(h.pid) && h.start_ticks != 0 && publish::start_ticks(pid) == h.start_ticks &&
          stat(("/proc/" + std::to_string(pid) + "/ns/pid").c_str(), &s) == 0 && s.st_ino == h.pid_namespace)
        return pid;
    }
    return 0;
  }

  // Checks that the file's name, its header, its owner, the process at its socket and /proc agree.
  // Returns false with an empty reason if the process has gone.
  bool is_genuine(Asked& a, std::string* why) const {
    const publish::Header& h = a.process.now.header;
    const std::string digits = a.process.name.substr(0, a.process.name.find('-'));
    const auto named = static_cast<pid_t>(digits.size() > 9 ? 0 : std::stol(digits));
    if (named == 0 || h.pid != static_cast<uint32_t>(named)) {
      *why = "its file is named after process " + digits + ", its header after process " + std::to_string(h.pid);
      return false;
    }
    if (a.linked && a.peer.uid != folder_.owner) {
      *why = "user " + std::to_string(a.peer.uid) + " answers for it";
      return false;
    }
    const bool ours = h.pid_namespace == publish::pid_namespace();
    const pid_t pid = a.linked ? a.peer.pid : ours ? named : a.outside;
    if (pid == 0) return true;  // in a pid namespace that we cannot see: only its user is known
    const Identity is = identity(pid, folder_.owner);
    if (!is.known) return false;
    if (pid != named && (ours || is.innermost != named)) {
      *why = "it says process " + digits + ", process " + std::to_string(pid) + " answers for it";
      return false;
    }
    if (!is.any() ||
        (pid == named && ours && h.uid != folder_.owner && vmem::core::uid_of_namespace(pid, h.uid) != folder_.owner)) {
      *why = "it says process " + digits + " of user " + std::to_string(h.uid) + ", which is not user " + user() + "'s";
      return false;
    }
    // Without a peer, only the start time shows that the number has not been reused.
    if (!a.linked && publish::start_ticks(pid) != h.start_ticks) return false;
    a.process.pid = pid;
    return true;
  }

  // Keeps one region or device per number: two would be one series with two values.
  static void remove_repeated(publish::Snapshot* s) {
    const auto once = [](auto& all, auto number) {
      using Item = typename std::remove_reference_t<decltype(all)>::value_type;
      std::stable_sort(all.begin(), all.end(), [&](const Item& a, const Item& b) { return a.*number < b.*number; });
      all.erase(
          std::unique(all.begin(), all.end(), [&](const Item& a, const Item& b) { return a.*number == b.*number; }),
          all.end());
    };
    once(s->devices, &publish::Device::ordinal);
    once(s->regions, &publish::Region::id);
  }

  std::string user() const { return std::to_string(folder_.owner); }

  const Folder& folder_;
  const int fd_;
  const pid_t inner_;
  const Clock::time_point deadline_;
  Found& found_;
  std::vector<Asked> flight_;
  size_t counted_ = 0;                              // requests of this folder that in_flight counts
  std::vector<std::pair<pid_t, pid_t>> processes_;  // the folder owner's, once looked_
  bool looked_ = false;
};

}  // namespace

pid_t inner_pid(pid_t pid) {
  return identity(pid, 0).innermost;
}

void read_folder(const Folder& folder, int fd, pid_t inner, Clock::time_point deadline, Found* found) {
  Reader(folder, fd, inner, deadline, found).run();
}

publish::Reply exchange(const Process& process, publish::Ask what, const std::string& key, const std::string& value) {
  const publish::Request request = request_for(what, key, value);
  Fd folder, fd;
  if (Status s = publish::open_folder(process.folder, process.owner, false, &folder); !s.ok())
    throw Failure{kAbsent, std::string(s.text())};
  ucred peer{};
  const Status s = connect_to(folder.get(), process.name, process.owner, &fd, &peer);
  int err = -s.code();
  if (s.ok()) {
    if (process.pid == 0 || peer.uid != process.owner || peer.pid != process.pid)
      throw Failure{kForbidden, "another process answers for process " + std::to_string(process.pid) + ": not asked"};
    publish::Reply reply{};
    pollfd wait{fd.get(), POLLIN, 0};
    if (send(fd.get(), &request, sizeof request, MSG_NOSIGNAL) == sizeof request) {
      poll(&wait, 1, kAnswerMs);
      const ssize_t n = recv(fd.get(), &reply, sizeof reply, 0);
      if (n == sizeof reply) {
        reply.text[sizeof reply.text - 1] = '\0';
        return reply;
      }
      if (n > 0) throw Failure{kFailed, "the process gives an answer that is not libvmem's"};
      if (n == 0) errno = ECONNRESET;
    }
    err = errno;
  }
  if (err == EACCES || err == EPERM)
    throw Failure{kForbidden, "not permitted to ask the process: be its user, or root"};
  if (err == ENOENT || err == ECONNREFUSED || err == ECONNRESET || err == EPIPE)
    throw Failure{kAbsent, "the process has ended, or uses libvmem no more"};
  throw Failure{kFailed, "the process does not answer within " + std::to_string(kAnswerMs) + " ms (is it stopped?)"};
}

}  // namespace vmemctl
