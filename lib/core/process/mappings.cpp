#include "core/process/mappings.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/types.h"

namespace vmem::core {

namespace {

// Returns the n-th number in a file of numbers, or 0 if there is none.
uint64_t number_in(const char* path, int n = 0) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::array<char, 128> text{};
  const ssize_t length = read(fd, text.data(), text.size() - 1);
  close(fd);
  if (length <= 0) return 0;
  char* at = text.data();
  while (n-- > 0) strtoull(at, &at, 10);
  return strtoull(at, nullptr, 10);
}

}  // namespace

Mappings count_mappings() {
  Mappings out;
  const int fd = open("/proc/thread-self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return out;
  std::array<char, 4096> part;
  for (ssize_t n; (n = read(fd, part.data(), part.size())) > 0;) {
    out.now += static_cast<size_t>(std::count(part.data(), part.data() + n, '\n'));
  }
  close(fd);
  out.most = number_in("/proc/sys/vm/max_map_count");
  return out;
}

Status name_limit(const Status& why, const char* what) {
  if (why.code() != -ENOMEM) return why;
  if (const Mappings m = count_mappings(); m.used_up()) {
    return error(ENOMEM,
                 "no mapping left for %s: this process has %zu, of at most %zu (vm.max_map_count). Every region takes "
                 "one: make fewer and larger ones, or raise it: sysctl -w vm.max_map_count=%zu",
                 what, m.now, m.most, 2 * m.most);
  }
  struct Limit {
    int resource;
    int in_statm;
    const char* of;
    const char* set_by;
  };
  Status named = why;
  for (const Limit& l : {Limit{RLIMIT_AS, 0, "address space", "ulimit -v"}, {RLIMIT_DATA, 5, "data", "ulimit -d"}}) {
    rlimit limit{};
    if (getrlimit(l.resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    named =
        error(ENOMEM, "%.*s. This process has %s of %s, of at most %s (`%s`)", static_cast<int>(named.text().size()),
              named.text().data(), human_bytes(number_in("/proc/thread-self/statm", l.in_statm) * kPage).c_str(), l.of,
              human_bytes(limit.rlim_cur).c_str(), l.set_by);
  }
  return named;
}

Status check_reserved(uintptr_t start, size_t size) {
  uintptr_t at = start;
  std::ifstream maps("/proc/thread-self/maps");
  for (std::string line; at < start + size && std::getline(maps, line);) {
    uintptr_t from = 0, to = 0;
    char rights[5];
    unsigned long inode = 0;
    int name = 0;
    if (sscanf(line.c_str(), "%zx-%zx %4s %*s %*s %lu %n", &from, &to, rights, &inode, &name) != 4 || to <= at)
      continue;
    if (from > at) break;
    const bool anonymous = inode == 0 && (line[static_cast<size_t>(name)] == '\0' ||
                                          line.compare(static_cast<size_t>(name), 6, "[anon:") == 0);
    if (strcmp(rights, "---p") != 0 || !anonymous) {
      return error(EEXIST,
                   "%zu bytes at 0x%zx are wanted in a reservation, but 0x%zx to 0x%zx is no private anonymous mapping "
                   "with PROT_NONE: %s",
                   size, start, from, to, line.c_str());
    }
    at = to;
  }
  if (at >= start + size) return {};
  return error(EEXIST,
               "%zu bytes at 0x%zx are wanted in a reservation, and nothing is mapped at 0x%zx: reserve all of it "
               "before (mmap with PROT_NONE), or give the address without VMEM_FIXED",
               size, start, at);
}

}  // namespace vmem::core
