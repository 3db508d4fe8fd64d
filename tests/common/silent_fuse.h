// A FUSE file system whose user-space server does not answer.
#pragma once

#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace vmem::test {

// Serves a file system that reports its root's attributes and leaves every other request
// unanswered. A process that makes such a request cannot even be killed until the server ends.
// Never returns.
[[noreturn]] inline void serve_nothing(int fuse, mode_t mode, uid_t user) {
  std::vector<char> buffer(1 << 20);
  for (;;) {
    if (read(fuse, buffer.data(), buffer.size()) <= 0) _exit(0);
    fuse_in_header in{};
    memcpy(&in, buffer.data(), sizeof in);
    const auto answer = [&](const auto& with) {
      fuse_out_header head{};
      head.len = sizeof head + sizeof with;
      head.unique = in.unique;
      char out[sizeof head + sizeof with];
      memcpy(out, &head, sizeof head);
      memcpy(out + sizeof head, &with, sizeof with);
      if (write(fuse, out, sizeof out) != static_cast<ssize_t>(sizeof out)) _exit(1);
    };
    if (in.opcode == FUSE_INIT) {
      fuse_init_out out{};
      out.major = FUSE_KERNEL_VERSION;
      out.minor = FUSE_KERNEL_MINOR_VERSION;
      out.max_write = 4096;
      answer(out);
    } else if (in.opcode == FUSE_GETATTR) {
      fuse_attr_out out{};
      out.attr.ino = 1;
      out.attr.mode = mode;
      out.attr.nlink = S_ISDIR(mode) ? 2 : 1;
      out.attr.uid = out.attr.gid = user;
      answer(out);
    }
  }
}

// Mounts such a file system on `where`; the kernel knows only the file type of its root. Returns
// its /dev/fuse descriptor, or -1 if the mount is not permitted.
inline int mount_fuse(const std::string& where, mode_t kind, uid_t user) {
  const int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (fuse < 0) return -1;
  char root[16];
  snprintf(root, sizeof root, "%o", kind & S_IFMT);
  const std::string id = std::to_string(user);
  const std::string options =
      "fd=" + std::to_string(fuse) + ",rootmode=" + root + ",user_id=" + id + ",group_id=" + id + ",allow_other";
  if (mount("mallory", where.c_str(), "fuse", MS_NOSUID | MS_NODEV, options.c_str()) == 0) return fuse;
  close(fuse);
  return -1;
}

}  // namespace vmem::test
