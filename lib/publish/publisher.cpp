#include "publish/publisher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

#include "core/log.h"
#include "core/process/user.h"
#include "core/step.h"
#include "core/thread.h"
#include "vmem/vmem.h"

namespace vmem::publish {

using core::error;
using core::Status;
using core::system_error;

namespace {

constexpr uint64_t kTickMs = 1000;                          // between two writes of the file
constexpr int kClientMs = 1000;                             // a client that sends nothing for so long is dropped
std::array<std::atomic<int>, 4> open_here{-1, -1, -1, -1};  // the newest publisher's folder, file, socket, wake

uint64_t clock_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

std::string fresh_name() {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) random = clock_ns(CLOCK_MONOTONIC);
  return core::strprintf("%d-%016llx", getpid(), static_cast<unsigned long long>(random));
}

}  // namespace

Status Publisher::start(const Source& source, const std::string& where, std::unique_ptr<Publisher>* out) {
  std::unique_ptr<Publisher> self(new Publisher(source));
  self->where_ = where;
  Header& h = self->snapshot_.header;
  h.started_ns = clock_ns(CLOCK_REALTIME);
  h.pid = static_cast<uint32_t>(getpid());
  h.uid = geteuid();
  h.pid_namespace = pid_namespace();
  h.start_ticks = start_ticks(0);
  put_text(h.command, program_invocation_short_name);
  put_text(h.library, core::strprintf("%d.%d", VMEM_VERSION_MAJOR, VMEM_VERSION_MINOR));
  self->wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!self->wake_) return system_error(errno, "no event descriptor");
  if (Status s = self->create(); !s.ok()) return s;
  if (Status s = core::start_thread(
          "vmem-publish", [p = self.get()] { p->run(); }, &self->thread_);
      !s.ok())
    return s;
  *out = std::move(self);
  return {};
}

Publisher::~Publisher() {
  stop();
  if (thread_.joinable()) thread_.join();
  for (auto& fd : open_here) fd.store(-1);
}

void Publisher::stop() {
  stop_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0) stop_.store(true);  // the counter is full: it will wake anyway
  if (thread_.joinable() && std::this_thread::get_id() != thread_.get_id()) thread_.join();
  remove();
}

void Publisher::retire() {
  retired_.store(true);
  remove();
}

void Publisher::after_fork_in_child() {
  for (auto& slot : open_here) {
    const int fd = slot.exchange(-1);
    if (fd >= 0) close(fd);
  }
}

std::string Publisher::path() const {
  const core::MutexLock lock(mutex_);
  return name_.empty() ? "" : folder_path_ + "/" + name_;
}

Status Publisher::create() {
  if (!where_.empty()) return create_in(where_);
  std::string tried;
  for (const std::string& folder : folders(geteuid(), secure_getenv("XDG_RUNTIME_DIR"))) {
    Status s = create_in(folder);
    if (s.ok()) return {};
    tried += (tried.empty() ? "" : "; ") + std::string(s.text());
  }
  return error(ENOENT, "no folder to publish in: %s", tried.c_str());
}

// Creates the file and the socket. A file under its final name is complete and marked alive, so
// that no sweep takes it for one left behind.
Status Publisher::create_in(const std::string& path) {
  Fd folder;
  if (Status s = open_folder(path, geteuid(), true, &folder); !s.ok()) return s;
  sweep(folder.get(), geteuid());
  const std::string name = fresh_name(), unfinished = ".new-" + name;
  Fd file(openat(folder.get(), unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return system_error(errno, "cannot make a file in %s", path.c_str());
  const auto fail = [&](const char* what) {
    const int err = errno;
    unlinkat(folder.get(), unfinished.c_str(), 0);
    unlinkat(folder.get(), socket_name(name).c_str(), 0);
    return system_error(err, "%s in %s", what, path.c_str());
  };
  // Set the mode whatever the umask is. Allocate the space now, so that a full tmpfs shows here.
  if (fchmod(file.get(), 0600) != 0) return fail("cannot close a file to others");
  if (posix_fallocate(file.get(), 0, sizeof(Header)) != 0) return errno = ENOSPC, fail("no room");
  if (!mark_alive(file.get())) return fail("cannot lock a file");
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return fail("cannot make a socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  put_text(address.sun_path, short_path(folder.get(), socket_name(name)));
  // Only the user has access to the folder, so that no other meets the socket before its mode is
  // set.
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return fail("cannot bind a socket");
  if (fchmodat(folder.get(), socket_name(name).c_str(), 0600, 0) != 0) return fail("cannot close a socket to others");
  if (listen(socket.get(), 16) != 0) return fail("cannot listen");
  if (renameat(folder.get(), unfinished.c_str(), folder.get(), name.c_str()) != 0) return fail("cannot name a file");
  std::string folder_path = path, named = name, socket_named = socket_name(name);
  const core::MutexLock lock(mutex_);
  open_here[0] = folder.get();
  open_here[1] = file.get();
  open_here[2] = socket.get();
  open_here[3] = wake_.get();
  folder_ = std::move(folder);
  file_ = std::move(file);
  socket_ = std::move(socket);
  folder_path_.swap(folder_path);
  name_.swap(named);
  socket_name_.swap(socket_named);
  return {};
}

void Publisher::remove() {
  const core::MutexLock lock(mutex_);
  if (name_.empty() || !folder_) return;
  unlinkat(folder_.get(), name_.c_str(), 0);
  unlinkat(folder_.get(), socket_name_.c_str(), 0);
}

// Returns false if the file was removed (by a logout, or a sweep of old files).
bool Publisher::still_there() const {
  const core::MutexLock lock(mutex_);
  struct stat mine {
  }, named{};
  return fstat(file_.get(), &mine) == 0 && fstatat(folder_.get(), name_.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

// Returns false if the process gave up, for good, the user for whom it publishes.
bool Publisher::has_its_user() const {
  uid_t real = 0, effective = 0, saved = 0;
  const uid_t user = snapshot_.header.uid;
  return getresuid(&real, &effective, &saved) != 0 || real == user || effective == user || saved == user;
}

// Gives the publication up: readers take its process for dead. The names cannot be removed.
void Publisher::leave() {
  retired_.store(true);
  for (auto* fd : {&open_here[0], &open_here[1], &open_here[2]}) fd->store(-1);
  const core::MutexLock lock(mutex_);
  file_.reset();
  socket_.reset();
  folder_.reset();
  name_.clear();
  folder_path_.clear();
}

void Publisher::write() {
  if (!file_) return;
  if (!has_its_user()) {
    // Its new user may not debug it: its memory still has data of the old one.
    core::log(core::Level::info,
              "vmemctl no longer sees this process: it is no process of user %u now. Set publish to off and on to show "
              "it to user %u",
              snapshot_.header.uid, geteuid());
    return leave();
  }
  // While it acts for another user it may not even look there.
  if (!retired_.load() && !stopping() && geteuid() == snapshot_.header.uid && !still_there()) {
    if (Status s = create(); !s.ok()) return;  // tried again at the next tick
    if (retired_.load()) return remove();
  }
  Header& h = snapshot_.header;
  ++h.sequence;
  snapshot_.devices.clear();
  snapshot_.regions.clear();
  source_.take(&snapshot_);
  h.taken_ns = clock_ns(CLOCK_REALTIME);
  h.taken_monotonic_ns = clock_ns(CLOCK_MONOTONIC);
  pack(snapshot_, &bytes_);
  if (pwrite(file_.get(), bytes_.data(), bytes_.size(), 0) == static_cast<ssize_t>(bytes_.size())) return;
  if (said_full_) return;
  said_full_ = true;
  core::log(core::Level::info, "the publication for vmemctl is out of date: writing %s failed (%s)", path().c_str(),
            strerrordesc_np(errno));
}

void Publisher::run() {
  uint64_t next = 0;
  while (!stopping()) {
    const uint64_t now = clock_ns(CLOCK_MONOTONIC) / 1000000;
    if (now >= next) {
      try {
        write();
      } catch (const std::bad_alloc&) {  // the next tick may have memory
      }
      next = now + kTickMs;
    }
    std::array<pollfd, 2> wait{{{wake_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}}};
    const int ready = poll(wait.data(), wait.size(), static_cast<int>(next - std::min(next, now)));
    if (ready < 0 && errno == EINVAL) usleep(10000);  // RLIMIT_NOFILE is below two
    if (ready <= 0) continue;
    if ((wait[1].revents & POLLIN) == 0 || stopping()) continue;
    Fd client(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (client) answer(client);
  }
  remove();
}

void Publisher::answer(const Fd& client) {
  Request request{};
  Reply reply{};
  reply.version = kVersion;
  ucred peer{};
  socklen_t size = sizeof peer;
  Status s;
  std::string text;
  if (getsockopt(client.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      (peer.uid != 0 && (peer.uid != geteuid() || !core::is_one_user(peer.uid)))) {
    s = error(EPERM, "user %u may not ask a process of user %u", peer.uid, geteuid());
  } else {
    // A client that connects and sends nothing must not keep the thread.
    std::array<pollfd, 2> wait{{{wake_.get(), POLLIN, 0}, {client.get(), POLLIN, 0}}};
    poll(wait.data(), wait.size(), kClientMs);
    if (recv(client.get(), &request, sizeof request, 0) != sizeof request ||
        memcmp(request.magic, kRequestMagic, sizeof request.magic) != 0 || request.version != kVersion) {
      s = error(EPROTO, "this is no request of version %u: use the vmemctl of this libvmem", kVersion);
    } else {
      request.name[sizeof request.name - 1] = request.value[sizeof request.value - 1] = '\0';
      core::step("publish.asked");
      try {
        s = handle(request, &text);
      } catch (const std::bad_alloc&) {
        s = error(ENOMEM, "process %d has no memory to answer with", getpid());
      }
    }
  }
  reply.code = s.code();
  put_text(reply.text, s.ok() ? std::string_view(text) : s.text());
  send(client.get(), &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Status Publisher::handle(const Request& request, std::string* text) {
  switch (static_cast<Ask>(request.ask)) {
    case Ask::refresh:
      write();
      return {};
    case Ask::set:
      return source_.set(stop_, request.name, request.value);
    case Ask::get:
      return source_.get(stop_, request.name, text);
  }
  return error(ENOSYS, "request %u is unknown to this libvmem", request.ask);
}

}  // namespace vmem::publish
