// A small HTTP/1.0 answerer: GET and HEAD, one short answer a connection, several connections at once, all bounded.
#pragma once

#include <functional>
#include <string>

#include "common.h"
#include "publish/place.h"

namespace vmemctl {

struct Answer {
  int status = 200;
  std::string type = "text/plain; charset=utf-8", body;
};

class HttpServer {
 public:
  // "127.0.0.1:9448", "[::1]:9448", "0.0.0.0:0" (any free port). Fails with kUsage, kTaken or kForbidden.
  explicit HttpServer(const std::string& address);
  // As given, with the port that it became.
  const std::string& address() const { return address_; }
  // Answers until a signal (SIGINT, SIGTERM) arrives. `handle` gets the path without its query.
  void run(const std::function<Answer(const std::string& path)>& handle);

 private:
  vmem::publish::Fd listen_;
  std::string address_;
};

}  // namespace vmemctl
