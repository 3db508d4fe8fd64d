// Answers GET and HEAD through libmicrohttpd, one answer a connection. The number, memory and time
// of connections are bounded; with too many, or without descriptors, the oldest is closed. Requests
// must use one of our host names: a web page that uses DNS rebinding to reach this server sends its
// own name.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common.h"
#include "latest.h"
#include "publish/place.h"

namespace vmemctl {

struct Answer {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  Body body;  // sent unchanged: clients that get the same text share it
};
Answer plain(int status, const std::string& text);

// Checks a Host header. Any IP address is accepted (a client that can choose it could have
// connected directly); a name must be in `names`.
bool host_allowed(const std::string& host, const std::vector<std::string>& names);

class HttpServer {
 public:
  // address: "127.0.0.1:9448", "[::1]:9448", "0.0.0.0:0" (any free port). Fails with kUsage, kTaken
  // or kForbidden. names: host names accepted beside localhost and the machine's.
  HttpServer(const std::string& address, std::vector<std::string> names);
  // The address as given, with the actual port.
  const std::string& address() const { return address_; }
  // Answers until a signal (SIGINT, SIGTERM) arrives. `handle` gets the path without its query.
  void run(const std::function<Answer(const std::string& path)>& handle);

 private:
  class Daemon;
  vmem::publish::Fd listen_;
  std::string address_;
  std::vector<std::string> names_;
};

}  // namespace vmemctl
