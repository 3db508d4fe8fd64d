// The program's own direct I/O on region memory without a lease: pread and pwrite, io_uring, and
// io_uring with registered buffers, from several threads at once, beside evictions, syncs and
// dont-needs. A call that reports complete success must have transferred everything: each page is
// compared in memory, in the files and, for a shared file, after its region was freed. Needs Linux
// 6.8 or later, or the module; elsewhere such I/O needs a lease.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <mutex>

#include "common.h"

namespace {

using stress::differs;
using stress::Random;

constexpr size_t kPage = 4096, kLargest = 64 * kPage;

struct Settings {
  double seconds = 10;
  unsigned threads = 4;
  uint64_t seed = 1, bytes = 6 << 20;  // per thread and region: a multiple of 2 MiB
  std::string budget = "32MiB", transfer = "auto", trap = "uffd", compression = "none";
  bool delays = true;
};

struct Region {
  const char* name;
  char* at = nullptr;
  size_t block = 0;
  bool shared = false;
};
std::vector<Region> regions;
std::atomic<uint64_t> alive{0}, direct_reads{0}, direct_writes{0}, refused{0}, pages_compared{0}, busy{0};

// The words of a page follow from its number; each page gets a new number.
void make_page(void* page, uint64_t number) {
  auto* words = static_cast<uint64_t*>(page);
  for (size_t i = 0; i < kPage / 8; ++i) words[i] = number * 0x9e3779b97f4a7c15u + i;
}
bool is_page(const void* page, uint64_t number) {
  const auto* words = static_cast<const volatile uint64_t*>(page);
  uint64_t wrong = 0;
  for (size_t i = 0; i < kPage / 8; ++i) wrong |= words[i] ^ (number * 0x9e3779b97f4a7c15u + i);
  return wrong == 0;
}

// One thread's own part of each region, and its own file.
class Worker {
 public:
  Worker(const Settings& settings, unsigned index)
      : settings_(settings), index_(index), random_(settings.seed * 64 + index), pages_(settings.bytes / kPage) {
    const std::string path = stress::temp_file(&file_);
    close(file_);
    file_ = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    unlink(path.c_str());
    if (file_ < 0) {
      printf("skipped: no O_DIRECT in %s: %s\n", path.c_str(), strerror(errno));
      exit(77);
    }
    plain_ = static_cast<char*>(mmap(nullptr, kLargest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (plain_ == MAP_FAILED || io_uring_queue_init(8, &ring_, 0) != 0) differs("no memory, or no io_uring");
    in_region_.resize(regions.size(), std::vector<uint64_t>(pages_));
    in_file_.resize(pages_);
    for (size_t page = 0; page < pages_; page += kLargest / kPage) {
      const size_t n = std::min(kLargest / kPage, pages_ - page);
      for (size_t i = 0; i < n; ++i) make_page(plain_ + i * kPage, in_file_[page + i] = next_++);
      if (pwrite(file_, plain_, n * kPage, static_cast<off_t>(page * kPage)) != static_cast<ssize_t>(n * kPage))
        differs("filling a file: %s", strerror(errno));
    }
    for (size_t r = 0; r < regions.size(); ++r) store(r, 0, pages_);
  }

  void step() {
    const size_t r = random_.below(regions.size());
    const size_t n = 1 + random_.below(random_.one_in(3) ? kLargest / kPage : 8), first = random_.below(pages_ - n + 1);
    const size_t from = random_.below(pages_ - n + 1);
    switch (random_.below(8)) {
      case 0:
        return store(r, first, n);
      case 1:
        return compare(r, first, n);
      case 2:
        return read_directly(r, first, n, from);
      case 3:
        return write_directly(r, first, n, from);
      case 4:
      case 5:
        return by_ring(r, first, n, from, false);
      case 6:
        return by_ring(r, first, n, from, true);
      default:
        return drop_pinned(r);
    }
  }

  void compare_all() {
    for (size_t r = 0; r < regions.size(); ++r) compare(r, 0, pages_);
  }
  // Compares the shared file after its region was freed.
  void compare_file(int fd, size_t r) {
    for (size_t page = 0; page < pages_; ++page) {
      const auto at = static_cast<off_t>(index_ * settings_.bytes + page * kPage);
      if (pread(fd, plain_, kPage, at) != static_cast<ssize_t>(kPage)) differs("reading the shared file");
      if (!is_page(plain_, in_region_[r][page])) wrong("the shared file", r, page, plain_, in_region_[r][page]);
    }
  }

 private:
  char* at(size_t r, size_t page) const { return regions[r].at + index_ * settings_.bytes + page * kPage; }

  // Prints the operations on the page, the oldest first.
  void tell(size_t r, size_t page) const {
    for (const Did& d : did_) {
      if (d.region == r && d.first <= page && page < d.first + d.pages)
        fprintf(stderr, "  %s of pages %zu to %zu, file page %zu: %ld\n", d.what, d.first, d.first + d.pages - 1,
                d.from, d.result);
    }
  }
  void note(const char* what, size_t r, size_t first, size_t n, size_t from, long result) {
    if (did_.size() == 4096) did_.erase(did_.begin(), did_.begin() + 2048);
    did_.push_back({what, r, first, n, from, result});
  }
  [[noreturn]] void wrong(const char* where, size_t r, size_t page, const void* found, uint64_t expected) {
    tell(r, page);
    const uint64_t word = *static_cast<const volatile uint64_t*>(found);
    differs("%s, region %s, thread %u, page %zu: begins with the word %llx, and should be page %llu (word %llx)", where,
            regions[r].name, index_, page, static_cast<unsigned long long>(word),
            static_cast<unsigned long long>(expected), static_cast<unsigned long long>(expected * 0x9e3779b97f4a7c15u));
  }
  void compare(size_t r, size_t first, size_t n) {
    for (size_t i = first; i < first + n; ++i) {
      if (!is_page(at(r, i), in_region_[r][i])) wrong("memory", r, i, at(r, i), in_region_[r][i]);
    }
    pages_compared += n;
  }
  void store(size_t r, size_t first, size_t n) {
    note("store", r, first, n, 0, 0);
    for (size_t i = first; i < first + n; ++i) make_page(at(r, i), in_region_[r][i] = next_++);
  }
  // A call that was refused, in whole or in part, may have changed anything.
  void read_ended(const char* how, long result, size_t r, size_t first, size_t n, size_t from) {
    note(how, r, first, n, from, result);
    ++direct_reads;
    if (result == static_cast<long>(n * kPage)) {
      std::copy_n(&in_file_[from], n, &in_region_[r][first]);
    } else {
      ++refused;
      store(r, first, n);
    }
    if (random_.one_in(2)) compare(r, first, n);
  }
  void write_ended(const char* how, long result, size_t r, size_t first, size_t n, size_t from) {
    note(how, r, first, n, from, result);
    ++direct_writes;
    const auto place = static_cast<off_t>(from * kPage), size = static_cast<off_t>(n * kPage);
    if (result == size) {
      std::copy_n(&in_region_[r][first], n, &in_file_[from]);
    } else {
      ++refused;
      for (size_t i = 0; i < n; ++i) make_page(plain_ + i * kPage, in_file_[from + i] = next_++);
      if (pwrite(file_, plain_, n * kPage, place) != size) differs("writing from plain memory: %s", strerror(errno));
    }
    if (pread(file_, plain_, n * kPage, place) != size) differs("reading to plain memory: %s", strerror(errno));
    for (size_t i = 0; i < n; ++i) {
      if (!is_page(plain_ + i * kPage, in_file_[from + i]))
        wrong("the file", r, first + i, plain_ + i * kPage, in_file_[from + i]);
    }
  }
  void read_directly(size_t r, size_t first, size_t n, size_t from) {
    const ssize_t got = pread(file_, at(r, first), n * kPage, static_cast<off_t>(from * kPage));
    read_ended("pread", got, r, first, n, from);
  }
  void write_directly(size_t r, size_t first, size_t n, size_t from) {
    const ssize_t put = pwrite(file_, at(r, first), n * kPage, static_cast<off_t>(from * kPage));
    write_ended("pwrite", put, r, first, n, from);
  }

  // While the I/O is under way: evicts or syncs its blocks, and checks other pages.
  void meanwhile(size_t r, size_t first, size_t n) {
    if (random_.one_in(2)) vmem_evict(at(r, first), n * kPage, VMEM_SSD);
    if (random_.one_in(4)) vmem_sync(at(r, first), n * kPage);
    const size_t other = random_.below(regions.size());
    if (other != r) compare(other, random_.below(pages_ - 8), 8);
  }
  int submit_and_wait(size_t r, size_t first, size_t n) {
    if (const int rc = io_uring_submit(&ring_); rc < 0) return rc;
    meanwhile(r, first, n);
    io_uring_cqe* cqe = nullptr;
    int rc = 0;
    while ((rc = io_uring_wait_cqe(&ring_, &cqe)) == -EINTR) {
    }
    if (rc < 0) differs("io_uring_wait_cqe: %d", rc);
    rc = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    return rc;
  }
  void by_ring(size_t r, size_t first, size_t n, size_t from, bool registered) {
    if (registered) {
      const iovec buffer{at(r, first), n * kPage};
      if (io_uring_register_buffers(&ring_, &buffer, 1) != 0) {
        ++refused;
        return;
      }
    }
    for (unsigned times = registered ? 1 + static_cast<unsigned>(random_.below(4)) : 1; times != 0; --times) {
      io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
      const bool reads = random_.one_in(2);
      const auto size = static_cast<unsigned>(n * kPage);
      const uint64_t offset = from * kPage;
      if (reads && registered) io_uring_prep_read_fixed(sqe, file_, at(r, first), size, offset, 0);
      if (reads && !registered) io_uring_prep_read(sqe, file_, at(r, first), size, offset);
      if (!reads && registered) io_uring_prep_write_fixed(sqe, file_, at(r, first), size, offset, 0);
      if (!reads && !registered) io_uring_prep_write(sqe, file_, at(r, first), size, offset);
      if (random_.one_in(4)) sqe->flags |= IOSQE_ASYNC;
      const int result = submit_and_wait(r, first, n);
      reads ? read_ended(registered ? "registered read" : "ring read", result, r, first, n, from)
            : write_ended(registered ? "registered write" : "ring write", result, r, first, n, from);
      from = random_.below(pages_ - n + 1);
    }
    // Once more with no I/O under way: the device's transfer must be the only change.
    if (registered) {
      meanwhile(r, first, n);
      io_uring_unregister_buffers(&ring_);
    }
  }
  // A call that drops contents must not drop pinned pages.
  void drop_pinned(size_t r) {
    const size_t in_block = regions[r].block / kPage, block = random_.below(pages_ / in_block) * in_block;
    const iovec buffer{at(r, block + random_.below(in_block)), kPage};
    if (io_uring_register_buffers(&ring_, &buffer, 1) != 0) return;
    note("dont-need", r, block, in_block, 0, 0);
    const int rc = vmem_advise(at(r, block), regions[r].block, VMEM_ADVISE_DONT_NEED, 0);
    if (rc != -EBUSY) tell(r, block);
    if (rc != -EBUSY) differs("dont-need of what is pinned, region %s: %d %s", regions[r].name, rc, vmem_last_error());
    ++busy;
    compare(r, block, in_block);
    io_uring_unregister_buffers(&ring_);
  }

  struct Did {
    const char* what;
    size_t region, first, pages, from;
    long result;
  };
  std::vector<Did> did_;
  const Settings& settings_;
  const unsigned index_;
  Random random_;
  const size_t pages_;
  int file_ = -1;
  char* plain_ = nullptr;
  io_uring ring_{};
  std::vector<std::vector<uint64_t>> in_region_;
  std::vector<uint64_t> in_file_;
  uint64_t next_ = (uint64_t{index_} + 1) << 40;
};

// UFFDIO_MOVE (Linux 6.8) and the module see pins.
void skip_old_kernels() {
  utsname name{};
  unsigned major = 0, minor = 0;
  if (uname(&name) != 0 || sscanf(name.release, "%u.%u", &major, &minor) != 2 || major > 6 ||
      (major == 6 && minor >= 8))
    return;
  printf("skipped: Linux %s notices no pins: such I/O needs a lease\n", name.release);
  exit(77);
}

int make_regions(const Settings& settings, int* shared_file) {
  const size_t size = settings.threads * settings.bytes;
  for (const auto& [name, block] : std::initializer_list<std::pair<const char*, size_t>>{
           {"4KiB", 4096}, {"64KiB", 65536}, {"2MiB", 2 << 20}, {"auto", VMEM_BLOCK_AUTO}}) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.flags = VMEM_HOST_ONLY;
    attr.block_size = block;
    void* p = nullptr;
    if (const int rc = vmem_create(&p, size, &attr); rc != 0) differs("create %s: %d %s", name, rc, vmem_last_error());
    regions.push_back({name, static_cast<char*>(p), block == VMEM_BLOCK_AUTO ? 65536 : block, false});
  }
  const std::string path = stress::temp_file(shared_file);
  if (ftruncate(*shared_file, static_cast<off_t>(size)) != 0) differs("ftruncate: %s", strerror(errno));
  stress::configure("block_size", "64KiB");
  void* p = nullptr;
  if (const int rc = vmem_map(&p, size, path.c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY); rc != 0)
    differs("map: %d %s", rc, vmem_last_error());
  regions.push_back({"shared", static_cast<char*>(p), 65536, true});
  unlink(path.c_str());
  return 0;
}

int run(const Settings& settings) {
  skip_old_kernels();
  vmem_log([](int, const char*, void*) {}, nullptr);
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::string>>{{"device", "none"},
                                                                  {"host_budget", settings.budget},
                                                                  {"trap", settings.trap},
                                                                  {"transfer", settings.transfer},
                                                                  {"compression", settings.compression}})
    stress::configure(name, value);
  stress::start();
  int shared_file = -1;
  make_regions(settings, &shared_file);
  std::vector<std::unique_ptr<Worker>> workers;
  for (unsigned i = 0; i < settings.threads; ++i) workers.push_back(std::make_unique<Worker>(settings, i));
  if (settings.delays) vmem::core::step_hook.store(stress::delay);
  std::atomic<bool> stop{false};
  std::thread watcher = stress::watch(alive, stop, 90);
  std::thread mover([&, random = Random(settings.seed + 99)]() mutable {
    const size_t all = settings.threads * settings.bytes;
    while (!stop) {
      char* const at = regions[random.below(regions.size())].at;
      const size_t size = kPage + random.below(1 << 20) / kPage * kPage,
                   from = random.below(all - size) / kPage * kPage;
      const int rc = random.one_in(4) ? vmem_sync(at + from, size) : vmem_evict(at + from, size, VMEM_SSD);
      if (rc != 0 && rc != -EBUSY) differs("moving: %d %s", rc, vmem_last_error());
      usleep(200);
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings.seconds);
  std::vector<std::thread> threads;
  for (auto& worker : workers) {
    threads.emplace_back([&] {
      while (std::chrono::steady_clock::now() < end) {
        worker->step();
        ++alive;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  stop = true;
  mover.join();
  watcher.join();
  vmem::core::step_hook.store(nullptr);
  for (auto& worker : workers) worker->compare_all();
  struct vmem_stats s = {};
  s.size = sizeof s;
  vmem_stats(&s);
  if (const int rc = vmem_free(regions.back().at); rc != 0) differs("free: %d %s", rc, vmem_last_error());
  for (auto& worker : workers) worker->compare_file(shared_file, regions.size() - 1);
  printf(
      "seed %llu: %llu direct reads, %llu writes, %llu refused; %llu pages compared, %llu evictions, %llu drops "
      "refused: no difference\n",
      static_cast<unsigned long long>(settings.seed), static_cast<unsigned long long>(direct_reads.load()),
      static_cast<unsigned long long>(direct_writes.load()), static_cast<unsigned long long>(refused.load()),
      static_cast<unsigned long long>(pages_compared.load()), static_cast<unsigned long long>(s.evictions),
      static_cast<unsigned long long>(busy.load()));
  if (s.checksum_errors != 0) differs("%llu checksum errors", static_cast<unsigned long long>(s.checksum_errors));
  if (s.evictions < 20 || direct_reads < 20) differs("too little was done to be worth anything");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Direct I/O on memory that moves, without leases."};
  Settings settings;
  app.add_option("--seconds", settings.seconds);
  app.add_option("--threads", settings.threads);
  app.add_option("--bytes", settings.bytes);
  app.add_option("--budget", settings.budget);
  app.add_option("--transfer", settings.transfer);
  app.add_option("--compression", settings.compression);
  app.add_option("--trap", settings.trap);
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-delays", settings.delays);
  CLI11_PARSE(app, argc, argv);
  return run(settings);
}
