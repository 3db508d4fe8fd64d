// Keeps the kernel's lock of a file or folder for good, as an ordinary user could: a system call
// that holds the lock reads or writes memory that never arrives. Here userfaultfd withholds the
// memory; the user would take a FUSE file system.
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

// Returns a userfaultfd, or -1 if there is none. Call as root: it stands in for memory of a user's
// file system, which needs no rights.
inline int absent_memory() {
  return static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
}

// Keeps the lock of the open file `fd` until this process ends. If `folder` is named, a waiting
// writer also keeps readers of that folder out. Returns false if that is not possible here.
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
  usleep(300000);  // the waiting writer precedes later readers
  return true;
}

}  // namespace vmem::test
