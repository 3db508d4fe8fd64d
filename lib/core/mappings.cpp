#include "core/mappings.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "core/types.h"

namespace vmem::core {

namespace {

// The first number of a file, 0 where there is none.
uint64_t number_in(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::array<char, 64> text{};
  const ssize_t n = read(fd, text.data(), text.size() - 1);
  close(fd);
  return n > 0 ? strtoull(text.data(), nullptr, 10) : 0;
}

}  // namespace

Mappings count_mappings() {
  Mappings out;
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
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
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return why;
  return error(ENOMEM, "%.*s. This process has %s of address space, of at most %s (`ulimit -v`)",
               static_cast<int>(why.text().size()), why.text().data(),
               human_bytes(number_in("/proc/self/statm") * kPage).c_str(), human_bytes(limit.rlim_cur).c_str());
}

}  // namespace vmem::core
