// The kernel's lock of a file or folder, kept for good, as an ordinary user keeps it: a system call that has it writes
// to, or reads from, memory that never comes. Here userfaultfd keeps it away, there a file system of his (FUSE).
#pragma once

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

namespace vmem::test {

// To be asked for by root: it stands in for memory of a user's file system, which needs no rights. -1: not to be had.
inline int absent_memory() {
  return static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
}

// False: it cannot be done here. Else the lock of what is open as `fd` is kept until this process ends; of a folder so
// that nobody else gets it even to read.
inline bool keep_lock(int absent, int fd, const std::string& folder) {
  constexpr size_t kSize = 4096;
  void* const memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uffdio_api api{};
  api.api = UFFD_API;
  uffdio_register range{};
  range.range = {reinterpret_cast<uintptr_t>(memory), kSize};
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (memory == MAP_FAILED || ioctl(absent, UFFDIO_API, &api) != 0 || ioctl(absent, UFFDIO_REGISTER, &range) != 0)
    return false;
  std::thread([=] {
    if (folder.empty()) {
      (void)!write(fd, memory, kSize);
    } else {
      syscall(SYS_getdents64, fd, memory, kSize);
    }
  }).detach();
  pollfd wait{absent, POLLIN, 0};
  if (poll(&wait, 1, 10000) != 1) return false;
  if (folder.empty()) return true;
  std::thread([=] { close(open((folder + "/made").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)); }).detach();
  usleep(300000);  // who waits to write comes before who comes later to read
  return true;
}

}  // namespace vmem::test
