// An application that uses mmap: random system calls and accesses through shared mappings on one
// file, compared with a copy in memory. Uses plain POSIX calls. Without mmap_shim.c it tests the
// kernel; with mmap_shim.c preloaded, it tests vmem_map. Mappings are short-lived, as in fsx, or
// serve many accesses and are larger than the budget.
//
//   exercise FILE SECONDS SEED LARGEST
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPage = 4096;

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1du >> 8;
  }
  uint64_t below(uint64_t n) { return operator()() % n; }
};

int fd = -1;
uint64_t seed, done;
size_t largest;
std::vector<unsigned char> good;
const char* now = "";
size_t now_at, now_size;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "FAILED: seed %llu, operation %llu (%s at %zu, %zu bytes, file of %zu): %s: %s\n",
          static_cast<unsigned long long>(seed), static_cast<unsigned long long>(done), now, now_at, now_size,
          good.size(), what, strerror(errno));
  _exit(1);
}

void compare(const unsigned char* found, size_t at, size_t n, const char* what) {
  if (memcmp(found, good.data() + at, n) == 0) return;
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == good[at + i]) continue;
    fprintf(stderr, "byte %zu is %02x, must be %02x\n", at + i, found[i], good[at + i]);
    break;
  }
  errno = 0;
  fail(what);
}

void resize(size_t size) {
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) fail("ftruncate");
  good.resize(size, 0);
}

void fill(Random& r, unsigned char* to, size_t n) {
  const uint64_t v = r.below(16) == 0 ? 0 : r();
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<unsigned char>(v >> (i % 7 * 8));
}

struct Map {
  unsigned char* base;
  size_t skip, size;
  unsigned char* at() const { return base + skip; }
};

Map map(size_t at, size_t n, bool write) {
  const size_t start = at / kPage * kPage;
  Map m{nullptr, at - start, at - start + n};
  void* p = mmap(nullptr, m.size, PROT_READ | (write ? PROT_WRITE : 0), MAP_SHARED, fd, static_cast<off_t>(start));
  if (p == MAP_FAILED) fail("mmap");
  m.base = static_cast<unsigned char*>(p);
  return m;
}

void unmap(const Map& m) {
  if (munmap(m.base, m.size) != 0) fail("munmap");
}

void check_file(size_t at, size_t n) {
  std::vector<unsigned char> bytes(n);
  if (pread(fd, bytes.data(), n, static_cast<off_t>(at)) != static_cast<ssize_t>(n)) fail("pread");
  compare(bytes.data(), at, n, "the file differs");
}

// Maps the whole file for many accesses by two threads, each on its own pages.
void live_in(Random& r) {
  now = "a long mapping", now_at = 0, now_size = good.size();
  if (good.size() < 4 * kPage) resize(4 * kPage);
  const Map m = map(0, good.size(), true);
  const size_t size = good.size(), accesses = 200 + r.below(1500);
  const auto half = [&](unsigned which, uint64_t own_seed) {
    Random own{own_seed | 1};
    for (size_t i = 0; i < accesses; ++i) {
      const size_t page = own.below(size / kPage / 2) * 2 + which, at = page * kPage + own.below(kPage - 64);
      if (at + 64 > size) continue;
      if (memcmp(m.base + at, good.data() + at, 64) != 0) compare(m.base + at, at, 64, "a long mapping differs");
      if (own.below(2) == 0) continue;
      fill(own, good.data() + at, 64);
      memcpy(m.base + at, good.data() + at, 64);
    }
  };
  std::thread other(half, 1u, r());
  half(0, r());
  other.join();
  if (r.below(2) == 0) {
    if (msync(m.base, m.size, MS_SYNC) != 0) fail("msync");
    check_file(0, size);
  }
  unmap(m);
  check_file(0, size);
}

void one(Random& r) {
  const size_t size = good.size(), most = r.below(8) == 0 ? largest : 64 << 10;
  size_t at = r.below(largest - 1);
  size_t n = 1 + r.below(std::min(most, largest - at));
  const uint64_t kind = r.below(100);
  now_at = at, now_size = n;
  if (kind < 45 && (size == 0 || kind < 25)) {  // writes may make the file longer
    if (at + n > size) resize(at + n);
    if (kind < 10) {
      now = "write";
      std::vector<unsigned char> bytes(n);
      fill(r, bytes.data(), n);
      if (pwrite(fd, bytes.data(), n, static_cast<off_t>(at)) != static_cast<ssize_t>(n)) fail("pwrite");
      memcpy(good.data() + at, bytes.data(), n);
      return;
    }
    now = "mapped write";
    const Map m = map(at, n, true);
    compare(m.at(), at, n, "before it, the mapping differs");
    fill(r, good.data() + at, n);
    memcpy(m.at(), good.data() + at, n);
    if (r.below(4) == 0) {
      if (msync(m.base, m.size, MS_SYNC) != 0) fail("msync");
      check_file(at, n);
    }
    unmap(m);
    return;
  }
  if (size == 0) return;
  at %= size, n = std::min(n, size - at);
  now_at = at, now_size = n;
  if (kind < 35) {
    now = "read";
    check_file(at, n);
  } else if (kind < 65) {
    now = "mapped read";
    const Map m = map(at, n, false);
    compare(m.at(), at, n, "the mapping differs");
    // Checks the bytes of the last page beyond the end of the file.
    if (at + n == size)
      for (size_t i = m.size; i % kPage != 0; ++i)
        if (m.base[i] != 0) errno = 0, fail("bytes beyond the end of the file are not zeros");
    unmap(m);
  } else if (kind < 75) {
    now = "truncate";
    resize(r.below(largest));
  } else if (kind < 85) {
    now = "punch hole";
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at), static_cast<off_t>(n)) != 0) {
      if (errno == EOPNOTSUPP) return;
      fail("fallocate");
    }
    memset(good.data() + at, 0, n);
  } else if (kind < 90) {
    now = "fsync";
    if (fsync(fd) != 0) fail("fsync");
  } else {
    live_in(r);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "exercise FILE SECONDS SEED LARGEST\n");
    return 2;
  }
  seed = strtoull(argv[3], nullptr, 10);
  largest = strtoull(argv[4], nullptr, 10);
  fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) fail("open");
  Random r{seed * 0x9e3779b97f4a7c15u + 1};
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(atof(argv[2]));
  for (; std::chrono::steady_clock::now() < end; ++done) one(r);
  now = "the end";
  check_file(0, good.size());
  struct stat st;
  if (fstat(fd, &st) != 0 || static_cast<size_t>(st.st_size) != good.size()) fail("the file's size");
  close(fd);
  unlink(argv[1]);
  printf("seed %llu: %llu operations, no difference\n", static_cast<unsigned long long>(seed),
         static_cast<unsigned long long>(done));
  return 0;
}
