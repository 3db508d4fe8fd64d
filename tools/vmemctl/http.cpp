#include "http.h"

#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <vector>

namespace vmemctl {

using vmem::publish::Fd;

namespace {

constexpr size_t kMaxRequest = 8 << 10;  // bytes, headers included
constexpr size_t kMaxClients = 32;
constexpr uint64_t kClientMs = 5000;  // from accept to the last byte

uint64_t now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000 + static_cast<uint64_t>(t.tv_nsec) / 1000000;
}

struct Client {
  Fd fd;
  uint64_t since;
  std::string in, out;
  bool answering = false;
};

const char* words(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Internal Server Error";
  }
}

std::string respond(const Answer& a, bool head) {
  std::string out = "HTTP/1.0 " + std::to_string(a.status) + " " + words(a.status) + "\r\nContent-Type: " + a.type +
                    "\r\nContent-Length: " + std::to_string(a.body.size()) + "\r\nConnection: close\r\n";
  if (a.status == 405) out += "Allow: GET, HEAD\r\n";
  out += "\r\n";
  return head ? out : out + a.body;
}

// The whole request is there.
std::string answer_to(const std::string& request, const std::function<Answer(const std::string&)>& handle) {
  const std::string line = request.substr(0, request.find_first_of("\r\n"));
  const size_t first = line.find(' '), second = line.find(' ', first + 1);
  if (first == std::string::npos || second == std::string::npos || line.compare(second + 1, 5, "HTTP/") != 0)
    return respond({400, "text/plain", "this is no HTTP request\n"}, false);
  const std::string method = line.substr(0, first);
  if (method != "GET" && method != "HEAD") return respond({405, "text/plain", "only GET and HEAD\n"}, false);
  std::string path = line.substr(first + 1, second - first - 1);
  path = path.substr(0, path.find_first_of("?#"));
  Answer answer;
  try {
    answer = handle(path);
  } catch (const std::exception& e) {
    answer = {500, "text/plain", std::string(e.what()) + "\n"};
  } catch (const Failure& f) {
    answer = {500, "text/plain", f.words + "\n"};
  }
  return respond(answer, method == "HEAD");
}

// False: done with this client.
bool serve(Client& c, const std::function<Answer(const std::string&)>& handle) {
  if (!c.answering) {
    char buffer[2048];
    const ssize_t n = recv(c.fd.get(), buffer, sizeof buffer, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    c.in.append(buffer, static_cast<size_t>(n));
    const bool whole = c.in.find("\r\n\r\n") != std::string::npos || c.in.find("\n\n") != std::string::npos;
    if (!whole && c.in.size() <= kMaxRequest) return true;
    c.out = whole ? answer_to(c.in, handle) : respond({431, "text/plain", "the request is too long\n"}, false);
    c.answering = true;
  }
  const ssize_t n = send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  c.out.erase(0, static_cast<size_t>(n));
  if (!c.out.empty()) return true;
  shutdown(c.fd.get(), SHUT_WR);
  return false;
}

}  // namespace

HttpServer::HttpServer(const std::string& address) {
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
  std::vector<Client> clients;
  std::vector<pollfd> wait;
  for (;;) {
    wait.assign(
        {{stop.get(), POLLIN, 0}, {listen_.get(), static_cast<short>(clients.size() < kMaxClients ? POLLIN : 0), 0}});
    for (const Client& c : clients) wait.push_back({c.fd.get(), static_cast<short>(c.answering ? POLLOUT : POLLIN), 0});
    if (poll(wait.data(), wait.size(), clients.empty() ? -1 : 500) < 0 && errno != EINTR) return;
    if (wait[0].revents != 0) return;
    const uint64_t now = now_ms();
    for (size_t i = clients.size(); i-- > 0;) {
      const bool ready = wait[i + 2].revents != 0;
      if ((ready && !serve(clients[i], handle)) || now - clients[i].since > kClientMs)
        clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if ((wait[1].revents & POLLIN) != 0) {
      Fd fd(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd) clients.push_back({std::move(fd), now, "", "", false});
    }
  }
}

}  // namespace vmemctl
