// Runs code as another user, in a user namespace of that user. For tests that run as root.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace vmem::test {

inline constexpr int kNoUserNamespace = 200;  // user namespaces are not permitted here

// Runs `attempt` in a user namespace that `maker` made, and returns its result, 0 to 99. With a map
// ("0 61000 1
// ", lines of inside, outside, count) it runs as uid 0 of the namespace, else as a user without a
// number. `watch` runs in the caller at the same time, with the child's pid.
inline int in_user_namespace(uid_t maker, const std::string& map, const std::function<int()>& attempt,
                             const std::function<void(pid_t)>& watch = {}) {
  int up[2], down[2];
  if (pipe2(up, O_CLOEXEC) != 0 || pipe2(down, O_CLOEXEC) != 0) return 100;
  const pid_t child = fork();
  if (child == 0) {
    char c = 0;
    if (setresgid(maker, maker, maker) != 0 || setresuid(maker, maker, maker) != 0) _exit(101);
    if (unshare(CLONE_NEWUSER) != 0) _exit(kNoUserNamespace);
    if (write(up[1], "x", 1) != 1 || read(down[0], &c, 1) != 1) _exit(102);
    if (!map.empty() && (setresgid(0, 0, 0) != 0 || setresuid(0, 0, 0) != 0)) _exit(103);
    _exit(attempt());
  }
  close(up[1]);
  char c = 0;
  if (read(up[0], &c, 1) == 1) {
    for (const char* which : {"/gid_map", "/uid_map"}) {
      if (map.empty()) break;
      const int fd = open(("/proc/" + std::to_string(child) + which).c_str(), O_WRONLY | O_CLOEXEC);
      if (write(fd, map.data(), map.size()) != static_cast<ssize_t>(map.size())) c = 0;
      close(fd);
    }
    if (watch) watch(child);
    if (c == 'x' && write(down[1], "x", 1) != 1) c = 0;
  }
  for (const int fd : {up[0], down[0], down[1]}) close(fd);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 104;
}

}  // namespace vmem::test
