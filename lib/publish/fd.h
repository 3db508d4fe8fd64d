// A descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <utility>

#include "core/process/descriptor.h"

namespace vmem::publish {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(core::above_standard(fd)) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    reset();
    fd_ = other.release();
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace vmem::publish
