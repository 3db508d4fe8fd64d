// Answers GET and HEAD through libmicrohttpd: one answer a connection. Connections, their memory and their time are
// bounded; when there are too many, or no descriptors, the oldest goes. A page in a browser that has been made to take
// us for its own server (DNS rebinding) asks by its own name: only names that are ours are answered.
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
  Body body;  // sent as it is: clients that get the same one share it
};
Answer plain(int status, const std::string& text);

// A host header: a number is ours (who made it up could have connected himself), a name must be one of these.
bool host_allowed(const std::string& host, const std::vector<std::string>& names);

class HttpServer {
 public:
  // "127.0.0.1:9448", "[::1]:9448", "0.0.0.0:0" (any free port). Fails with kUsage, kTaken or kForbidden. names: under
  // which we are asked, beside localhost and the machine's.
  HttpServer(const std::string& address, std::vector<std::string> names);
  // As given, with the port that it became.
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
