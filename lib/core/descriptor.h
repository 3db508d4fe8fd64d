// Descriptors that the library keeps, and those that every program has.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace vmem::core {

// For what open() and its like return. Where the program has closed its standard input, output or error, the next file
// that is opened has that number, and what is printed there goes into it: lines of our log, too, into a mapped file. So
// what is kept gets a number above them. fd, or a copy of it that is closed by exec; -1, with errno, when there is
// none.
inline int above_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(fd);
  errno = error;
  return copy;
}

// The same for what others open: while one lives, those of the three that are closed are taken.
class StandardTaken {
 public:
  StandardTaken() {
    for (int& fd : taken_) {
      if (fd = open("/", O_PATH | O_CLOEXEC); fd <= STDERR_FILENO) continue;
      close(fd);
      fd = -1;
      return;
    }
  }
  ~StandardTaken() {
    for (const int fd : taken_)
      if (fd >= 0) close(fd);
  }
  StandardTaken(const StandardTaken&) = delete;
  StandardTaken& operator=(const StandardTaken&) = delete;

 private:
  int taken_[STDERR_FILENO + 1] = {-1, -1, -1};
};

}  // namespace vmem::core
