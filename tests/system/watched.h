// After watch(), the kernel ends this process (SIGSYS) when any of its threads changes the CPU's
// access to a range by mprotect, or installs a handler for SIGSEGV. This cannot be undone, so use
// it in a process of its own.
#pragma once

#include <dirent.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

namespace systest {

// Returns false if this kernel does not allow it.
inline bool watch(const void* base, size_t size) {
  const auto first = reinterpret_cast<uintptr_t>(base), end = first + size;
  // a filter compares halves of an address
  if (const uintptr_t border = (end - 1) >> 32 << 32; first < border) {
    return watch(base, border - first) && watch(reinterpret_cast<const void*>(border), end - border);
  }
  const auto high = static_cast<uint32_t>(first >> 32), low = static_cast<uint32_t>(first);
  const auto last = static_cast<uint32_t>(end - 1);
  const auto argument = [](size_t n, bool upper) {
    return static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * n + (upper ? 4 : 0));
  };
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 14),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_mprotect, 0, 5),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(0, true)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, high, 0, 10),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(0, false)),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, low, 0, 8),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, last, 7, 8),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_rt_sigaction, 0, 6),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(0, false)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SIGSEGV, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(1, false)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument(1, true)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

// Returns how many descriptors of /proc/self/pagemap this process has. The userfaultfd trap has
// one. A device tier opens one when it first needs it, and keeps it.
inline int pagemaps() {
  DIR* const d = opendir("/proc/self/fd");
  if (d == nullptr) return -1;
  int found = 0;
  while (const dirent* e = readdir(d)) {
    char link[64] = "";
    const std::string path = std::string("/proc/self/fd/") + e->d_name;
    found += readlink(path.c_str(), link, sizeof link - 1) > 0 && std::string(link).ends_with("/pagemap") ? 1 : 0;
  }
  closedir(d);
  return found;
}

}  // namespace systest
