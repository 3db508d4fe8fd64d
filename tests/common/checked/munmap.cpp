// For unit and system tests: a munmap() that aborts where a part of the range is not mapped. A
// second munmap() of the same range could otherwise unmap what another thread has mapped there
// since.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // the sanitizers have their own
namespace {

constexpr size_t kPage = 4096;

// Looks at the first 16 GiB only: a larger range takes too long.
bool all_is_mapped(char* at, size_t size) {
  constexpr size_t kStep = size_t{256} << 20, kMost = size_t{16} << 30;
  static unsigned char pages[kStep / kPage];  // only the kernel writes here
  size = std::min((size + kPage - 1) / kPage * kPage, kMost);
  for (size_t done = 0; done < size; done += kStep) {
    if (syscall(SYS_mincore, at + done, std::min(kStep, size - done), pages) != 0 && errno == ENOMEM) return false;
  }
  return true;
}

}  // namespace

extern "C" int munmap(void* address, size_t size) noexcept {
  const int error = errno;
  if (!all_is_mapped(static_cast<char*>(address), size)) {
    char text[160];
    const int n = snprintf(text, sizeof text, "munmap(%p, %zu): a part of that is not mapped\n", address, size);
    static_cast<void>(write(STDERR_FILENO, text, static_cast<size_t>(n)) == n);
    abort();
  }
  errno = error;
  return static_cast<int>(syscall(SYS_munmap, address, size));
}
#endif
