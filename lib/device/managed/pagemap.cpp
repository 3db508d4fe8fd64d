#include "device/managed/pagemap.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "core/process/fork.h"
#include "core/process/page_map.h"
#include "core/types.h"

namespace vmem::device {

core::Status mapped_pages(uintptr_t address, size_t size, bool first_only, uint64_t* count) {
  // Opened once: the file stays this process's, whatever is mapped later. A child of a process with
  // devices has no descriptor.
  static const int fd = core::keep_from_children(open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC));
  *count = 0;
  if (fd < 0)
    return core::error(EACCES,
                       "/proc/self/pagemap cannot be opened: libvmem cannot see whether a thread touched a block "
                       "while it was being made. Mount /proc, or run without the device tier");
  uint64_t entries[512];
  size_t page = address / core::kPage;
  const size_t end = (address + size) / core::kPage;
  while (page < end) {
    const size_t wanted = std::min<size_t>(std::size(entries), end - page) * sizeof(uint64_t);
    const ssize_t got = pread(fd, entries, wanted, static_cast<off_t>(page * sizeof(uint64_t)));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || got % static_cast<ssize_t>(sizeof(uint64_t)) != 0)
      return core::system_error(got < 0 ? errno : EIO, "reading /proc/self/pagemap at page %#zx", page);
    const size_t n = static_cast<size_t>(got) / sizeof(uint64_t);
    for (size_t i = 0; i < n; ++i) *count += (entries[i] & core::kPageExists) != 0;
    if (first_only && *count != 0) return {};
    page += n;
  }
  return {};
}

}  // namespace vmem::device
