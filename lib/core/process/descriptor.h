// Keeps the library's descriptors away from standard input, output and error.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace vmem::core {

// Moves a new descriptor above the standard three. If the program has closed one of them, the next
// file opened gets its number, and anything printed there goes into that file: our log lines into a
// mapped file, for one. Takes the result of open() or a similar call. Returns fd or a close-on-exec
// copy, or -1 with errno.
inline int above_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(fd);
  errno = error;
  return copy;
}

// Protects descriptors that other code opens: occupies those of the standard three that are closed,
// during its scope.
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
