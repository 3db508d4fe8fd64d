#include "http.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <strings.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <list>
#include <memory>
#include <utility>

namespace vmemctl {

using vmem::publish::Fd;

namespace {

constexpr size_t kMemory = 16 << 10;  // for one connection: the request's headers and the answer's
constexpr size_t kMaxClients = 32;
constexpr uint64_t kClientMs = 10000;  // from accept to the last byte, whatever the client does
constexpr unsigned kSilentS = 5;       // longest silence of a client within that time
constexpr uint64_t kTickMs = 200;      // between two checks for clients whose time is up
constexpr uint64_t kNoRoomMs = 20;     // pause before the next accept when connections or descriptors run out

uint64_t now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000 + static_cast<uint64_t>(t.tv_nsec) / 1000000;
}

struct Client {
  int fd;
  uint64_t since;
  bool ended = false;  // shut down by us; the library closes it
};

// Extracts the name from a Host header, without its port.
std::string name_in(const std::string& host) {
  if (!host.empty() && host[0] == '[') {
    const size_t end = host.find(']');
    if (end == std::string::npos || (end + 1 < host.size() && host[end + 1] != ':')) return "";
    return host.substr(1, end - 1);
  }
  std::string name = host.substr(0, host.find(':'));
  while (!name.empty() && name.back() == '.') name.pop_back();
  return name;
}

}  // namespace

Answer plain(int status, const std::string& text) {
  return {status, "text/plain; charset=utf-8", std::make_shared<const std::string>(text)};
}

bool host_allowed(const std::string& host, const std::vector<std::string>& names) {
  const std::string name = name_in(host);
  unsigned char address[sizeof(in6_addr)];
  if (inet_pton(AF_INET, name.c_str(), address) == 1 || inet_pton(AF_INET6, name.c_str(), address) == 1) return true;
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& n) { return strcasecmp(n.c_str(), name.c_str()) == 0; });
}

// libmicrohttpd parses and answers; this class decides which clients are accepted, and for how
// long. One thread does all.
class HttpServer::Daemon {
 public:
  Daemon(const std::function<Answer(const std::string&)>& handle, const std::vector<std::string>& names)
      : handle_(handle), names_(names) {
    // libmicrohttpd gets no listening socket: it would spin when there is no descriptor for a new
    // connection.
    daemon_ = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET, 0, nullptr, nullptr, &Daemon::answer, this,
                               MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(kMaxClients),
                               MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMemory, MHD_OPTION_CONNECTION_TIMEOUT, kSilentS,
                               MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_NOTIFY_CONNECTION, &Daemon::changed, this,
                               MHD_OPTION_END);
    if (daemon_ == nullptr) throw Failure{kFailed, "libmicrohttpd cannot be started"};
  }
  ~Daemon() { MHD_stop_daemon(daemon_); }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  int events() const { return MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd; }
  // Milliseconds until the next timed work; -1: none.
  int next() const {
    MHD_UNSIGNED_LONG_LONG ms = kTickMs;
    if (MHD_get_timeout(daemon_, &ms) != MHD_YES && clients_.empty()) return -1;
    return static_cast<int>(std::min<uint64_t>(ms, kTickMs));
  }

  // Reads, answers and writes what is ready.
  void work() {
    MHD_run(daemon_);
    const uint64_t now = now_ms();
    for (Client& c : clients_) {
      if (now - c.since > kClientMs) end(c);
    }
  }

  // Returns false if there is no descriptor for another connection now.
  bool accept_from(int listening) {
    if (clients_.size() >= kMaxClients) {
      end_oldest();
      MHD_run(daemon_);  // closes it
    }
    if (clients_.size() >= kMaxClients) return false;
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    const int fd = accept4(listening, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      MHD_add_connection(daemon_, fd, reinterpret_cast<sockaddr*>(&peer), size);  // closes it when it fails
      return true;
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return true;
    if (!said_) fprintf(stderr, "vmemctl: no room for another connection (%s)\n", strerrordesc_np(errno));
    said_ = true;
    end_oldest();
    return false;
  }

 private:
  static void end(Client& c) {
    if (!c.ended) shutdown(c.fd, SHUT_RDWR);
    c.ended = true;
  }
  // Ends the connection that has had the most time: an honest client needs little.
  void end_oldest() {
    for (Client& c : clients_) {
      if (!c.ended) return end(c);
    }
  }

  static void changed(void* self, MHD_Connection* connection, void** place, MHD_ConnectionNotificationCode what) {
    auto& clients = static_cast<Daemon*>(self)->clients_;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      const int fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
      *place = &clients.emplace_back(Client{fd, now_ms()});
    } else {
      clients.remove_if([&](const Client& c) { return &c == *place; });
    }
  }

  Answer answer_to(MHD_Connection* connection, const char* url, const std::string& method) const {
    const char* host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    if (host != nullptr && !host_allowed(host, names_)) {
      return plain(403, "this host name is not served: start vmemctl export with --allow-host NAME\n");
    }
    if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) return plain(405, "only GET and HEAD\n");
    return handle_(url);
  }

  static MHD_Result answer(void* self, MHD_Connection* connection, const char* url, const char* method,
                           const char* /*version*/, const char* /*upload*/, size_t* /*upload_size*/, void** /*place*/) {
    Answer a;
    std::unique_ptr<Body> kept;  // kept during the life of the response
    try {
      try {
        a = static_cast<Daemon*>(self)->answer_to(connection, url, method);
      } catch (const Failure& f) {
        a = plain(500, printable(f.words) + "\n");
      }
      kept = std::make_unique<Body>(a.body);
    } catch (const std::exception&) {
      return MHD_NO;  // no memory: the connection is closed
    }
    MHD_Response* response = MHD_create_response_from_buffer_with_free_callback_cls(
        a.body->size(), const_cast<char*>(a.body->data()), [](void* body) { delete static_cast<Body*>(body); },
        kept.get());
    if (response == nullptr) return MHD_NO;
    (void)kept.release();
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, a.type.c_str());
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (a.status == 405) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    const MHD_Result result = MHD_queue_response(connection, static_cast<unsigned>(a.status), response);
    MHD_destroy_response(response);
    return result;
  }

  const std::function<Answer(const std::string&)>& handle_;
  const std::vector<std::string>& names_;
  MHD_Daemon* daemon_ = nullptr;
  std::list<Client> clients_;  // oldest first
  bool said_ = false;
};

HttpServer::HttpServer(const std::string& address, std::vector<std::string> names) : names_(std::move(names)) {
  char own[256] = "";
  gethostname(own, sizeof own - 1);
  names_.insert(names_.end(), {"localhost", own});
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon == std::string::npos ? 0 : colon);
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  const bool number = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos &&
                      std::stoi(port) <= 65535;
  if (host.empty() || !number || getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    throw Failure{kUsage, "--listen " + printable(address) +
                              ": give ADDRESS:PORT, the address in numbers, as 127.0.0.1:9448 or [::1]:9448"};
  }
  listen_ = Fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(listen_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const bool bound =
      listen_ && bind(listen_.get(), found->ai_addr, found->ai_addrlen) == 0 && listen(listen_.get(), 64) == 0;
  const int err = errno;
  freeaddrinfo(found);
  if (!bound) {
    if (err == EADDRINUSE)
      throw Failure{kTaken, address + " is taken by another program; give another with --listen ADDRESS:PORT"};
    if (err == EACCES) throw Failure{kForbidden, "not permitted to listen on " + address + "; take a port from 1024"};
    throw Failure{kFailed, "cannot listen on " + address + ": " + strerrordesc_np(err)};
  }
  sockaddr_storage real{};
  socklen_t size = sizeof real;
  getsockname(listen_.get(), reinterpret_cast<sockaddr*>(&real), &size);
  char service[8] = "";
  getnameinfo(reinterpret_cast<sockaddr*>(&real), size, nullptr, 0, service, sizeof service, NI_NUMERICSERV);
  address_ = address.substr(0, colon + 1) + service;
}

void HttpServer::run(const std::function<Answer(const std::string& path)>& handle) {
  sigset_t ends;
  sigemptyset(&ends);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&ends, signal);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  const Fd stop(signalfd(-1, &ends, SFD_CLOEXEC));
  Daemon daemon(handle, names_);
  uint64_t closed_until = 0;  // no connection is accepted before this time
  for (;;) {
    const bool open = now_ms() >= closed_until;
    std::array<pollfd, 3> wait{{{stop.get(), POLLIN, 0},
                                {daemon.events(), POLLIN, 0},
                                {listen_.get(), static_cast<short>(open ? POLLIN : 0), 0}}};
    if (poll(wait.data(), wait.size(), open ? daemon.next() : static_cast<int>(kNoRoomMs)) < 0 && errno != EINTR)
      return;
    if (wait[0].revents != 0) return;
    if ((wait[2].revents & POLLIN) != 0 && !daemon.accept_from(listen_.get())) closed_until = now_ms() + kNoRoomMs;
    daemon.work();
  }
}

}  // namespace vmemctl
