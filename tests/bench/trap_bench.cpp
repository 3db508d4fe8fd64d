// The module compared with userfaultfd, in one run: how long a touch of an absent block takes until
// the thread continues, and how many bytes a CPU copies between io_uring and the application. The
// first part uses no disk: the frame is ready.
//
// It does not measure: several threads at once, a GPU's faults, the pager above the trap, a busy
// machine.
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "common/raw_disk.h"
#include "trap/trap.h"

namespace {

using Json = nlohmann::ordered_json;
using vmem::core::Status;
using vmem::trap::Event;
using vmem::trap::Protect;
using vmem::trap::Transfer;
using vmem::trap::Trap;

constexpr size_t kBlocks = 4, kPage = 4096, kHuge = 2 << 20;

struct Way {
  const char* name;
  Trap* trap;
  Transfer transfer;
  bool fits(size_t block) const { return transfer != Transfer::move || block % kHuge == 0; }
};

void must(const Status& s) {
  if (s.ok()) return;
  fprintf(stderr, "trap_bench: %s\n", std::string(s.text()).c_str());
  exit(1);
}

// A trapped range of `blocks` blocks, `count` resident frames, and a thread that waits in the trap
// like the pager's threads and passes the block of each fault to `serve`.
class Served {
 public:
  Served(const Way& way, size_t block, size_t blocks, size_t count) : way_(way), block_(block) {
    bytes_ = block * blocks;
    arena_ = block * count;
    must(way.trap->attach_blocks(bytes_, block, block, way.transfer, 0, &range_));
    must(way.trap->reserve_arena(arena_, block, &frames_));
    must(way.trap->populate_frames(frames_, arena_, -1));
  }
  ~Served() {
    stop_ = true;
    way_.trap->interrupt();
    if (thread_.joinable()) thread_.join();
    must(way_.trap->detach(range_, bytes_));
    must(way_.trap->unmap(range_, bytes_));
    must(way_.trap->release_arena(frames_, arena_));
  }
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;

  template <typename Serve>  // serve(size_t): the argument is the offset of the block in the range
  void start(Serve serve) {
    thread_ = std::thread([this, serve] {
      while (!stop_) {
        std::array<Event, 16> events{};
        size_t count = 0;
        must(way_.trap->wait(events, -1, &count));
        for (size_t i = 0; i < count; ++i) {
          if (events[i].kind != Event::Kind::fault) continue;
          serve((events[i].fault.address - reinterpret_cast<uintptr_t>(range_)) / block_ * block_);
          served_.fetch_add(1);
        }
      }
    });
  }
  // fill() wakes the thread before it returns, and the frame of a block is not free until fill()
  // has returned.
  void wait_until_served(size_t faults) const {
    while (served_ < faults) std::this_thread::yield();
  }
  // Makes a block absent again and puts its bytes back into the frame.
  void take_out(size_t at, std::byte* frame) const {
    const vmem::trap::Range whole{reinterpret_cast<uintptr_t>(to() + at), block_};
    must(way_.transfer == Transfer::copy ? way_.trap->drop(std::span(&whole, 1))
                                         : way_.trap->take(to() + at, block_, frame, way_.transfer));
  }
  void fill(size_t at, std::byte* frame) const {
    must(way_.trap->fill(to() + at, block_, frame, way_.transfer, Protect::no));
  }
  std::byte* to() const { return static_cast<std::byte*>(range_); }
  std::byte* frames() const { return static_cast<std::byte*>(frames_); }

 private:
  Way way_;
  size_t block_, bytes_, arena_;
  void *range_ = nullptr, *frames_ = nullptr;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> served_{0};
  std::thread thread_;
};

// Returns the microseconds of each of `touches` touches. Taking the block out again is not timed.
std::vector<double> round_trips(const Way& way, size_t block, size_t touches) {
  Served s(way, block, kBlocks, kBlocks);
  memset(s.frames(), 0x5a, kBlocks * block);
  s.start([&s](size_t at) { s.fill(at, s.frames() + at); });
  std::vector<double> us;
  for (size_t i = 0; i < touches; ++i) {
    const size_t at = i % kBlocks * block;
    const double start = rawdisk::now();
    if (*reinterpret_cast<volatile std::byte*>(s.to() + at + (i * kPage + 64) % block) != std::byte{0x5a}) abort();
    us.push_back((rawdisk::now() - start) * 1e6);
    s.wait_until_served(i + 1);
    s.take_out(at, s.frames() + at);
  }
  return us;
}

void latency(const std::vector<Way>& ways, size_t touches, Json* out) {
  printf("| block | how | fault round trip, median us | slowest tenth from us | p99 us |\n|---|---|---|---|---|\n");
  for (const size_t block : {kPage, size_t{64} << 10, kHuge}) {
    std::vector<std::vector<double>> us(ways.size());
    // Alternate the ways, so that a busy second affects all of them alike.
    for (size_t part = 0; part < 10; ++part) {
      for (size_t w = 0; w < ways.size(); ++w) {
        if (!ways[w].fits(block)) continue;
        const std::vector<double> some = round_trips(ways[w], block, touches / 10);
        us[w].insert(us[w].end(), some.begin(), some.end());
      }
    }
    for (size_t w = 0; w < ways.size(); ++w) {
      std::vector<double>& t = us[w];
      if (t.empty()) continue;
      std::sort(t.begin(), t.end());
      const double median = t[t.size() / 2], p99 = t[t.size() * 99 / 100];
      printf("| %zu KiB | %s | %.1f | %.1f | %.1f |\n", block >> 10, ways[w].name, median, t[t.size() * 9 / 10], p99);
      out->push_back({{"block", block}, {"how", ways[w].name}, {"median_us", median}, {"p99_us", p99}});
    }
  }
}

// Returns the number of the physical page behind `p`, which is present; 0 if this user may not know
// it.
uint64_t physical(int pagemap, const void* p) {
  uint64_t entry = 0;
  const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(p) / kPage * sizeof entry);
  if (pread(pagemap, &entry, sizeof entry, at) != sizeof entry || entry >> 63 == 0) return 0;
  return entry & ((uint64_t{1} << 55) - 1);
}

struct Paged {
  uint64_t read = 0, copied = 0, wrong = 0;
  bool known = true;  // whether `copied` could be determined
};

// Pages a file in, block by block as touches fault: io_uring reads into a frame, and the trap puts
// it into place. A CPU copied the page if the application's physical page differs from the one that
// the disk wrote.
Paged page_in(const Way& way, const std::string& path, size_t block, uint64_t bytes) {
  Paged out;
  const int file = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  io_uring ring;
  if (file < 0 || pagemap < 0 || io_uring_queue_init(4, &ring, 0) != 0) {
    perror("trap_bench");
    exit(1);
  }
  std::vector<uint64_t> written(block / kPage);
  {
    Served s(way, block, bytes / block, 1);
    s.start([&](size_t at) {
      io_uring_prep_read(io_uring_get_sqe(&ring), file, s.frames(), static_cast<unsigned>(block), at);
      io_uring_cqe* cqe = nullptr;
      if (io_uring_submit(&ring) != 1 || io_uring_wait_cqe(&ring, &cqe) != 0) abort();
      if (cqe->res > 0) out.read += static_cast<uint64_t>(cqe->res);
      io_uring_cqe_seen(&ring, cqe);
      for (size_t p = 0; p < written.size(); ++p) written[p] = physical(pagemap, s.frames() + p * kPage);
      s.fill(at, s.frames());
    });
    for (uint64_t at = 0; at < bytes; at += block) {
      const auto* words = reinterpret_cast<const volatile uint64_t*>(s.to() + at);
      for (size_t i = 0; i < block / 8; ++i) out.wrong += words[i] != at / 8 + i;
      s.wait_until_served(at / block + 1);
      for (size_t p = 0; p < written.size(); ++p) {
        const uint64_t seen = physical(pagemap, s.to() + at + p * kPage);
        out.known = out.known && seen != 0;
        if (seen != written[p]) out.copied += kPage;
      }
      s.take_out(at, s.frames());
    }
  }
  io_uring_queue_exit(&ring);
  close(pagemap);
  close(file);
  return out;
}

int copies(const std::vector<Way>& ways, const std::string& folder, uint64_t bytes, Json* out) {
  const std::string path = folder + "/trap-bench-" + std::to_string(getpid());
  std::vector<uint64_t> words(bytes / 8);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i;
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(bytes));
  file.close();
  if (!file) {
    fprintf(stderr, "trap_bench: cannot write %s\n", path.c_str());
    return 1;
  }
  printf("\n| block | how | MiB read by io_uring | MiB copied by a CPU | wrong words |\n|---|---|---|---|---|\n");
  uint64_t wrong = 0;
  for (const size_t block : {size_t{64} << 10, kHuge}) {
    for (const Way& way : ways) {
      if (!way.fits(block)) continue;
      const Paged p = page_in(way, path, block, bytes);
      char copied[32] = "known to root";
      if (p.known) snprintf(copied, sizeof copied, "%.1f", static_cast<double>(p.copied) / (1 << 20));
      printf("| %zu KiB | %s | %.1f | %s | %lu |\n", block >> 10, way.name, static_cast<double>(p.read) / (1 << 20),
             copied, p.wrong);
      out->push_back({{"block", block},
                      {"how", way.name},
                      {"read_bytes", p.read},
                      {"copied_bytes", p.known ? Json(p.copied) : Json()}});
      wrong += p.wrong;
    }
  }
  unlink(path.c_str());
  return wrong == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  CLI::App app{"The module beside userfaultfd: fault round trips, bytes copied"};
  size_t touches = 2000;
  uint64_t mib = 64;
  std::string folder = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "/var/tmp", json;
  app.add_option("--touches", touches, "Touches a row")->check(CLI::Range(100, 1000000));
  app.add_option("--mib", mib, "MiB of data in the second part, even")->check(CLI::Range(2, 1024));
  app.add_option("--folder", folder, "Where the file is put");
  app.add_option("--json", json, "Also write the figures here");
  app.allow_extras();  // make bench passes its arguments to every benchmark
  CLI11_PARSE(app, argc, argv);

  std::unique_ptr<Trap> uffd, kmod;
  std::vector<Way> ways;
  if (const Status s = vmem::trap::make_userfault_trap({}, &uffd); s.ok()) {
    if (uffd->caps().move) ways.push_back({"userfaultfd, moved", uffd.get(), Transfer::move});
    ways.push_back({"userfaultfd, copied", uffd.get(), Transfer::copy});
  } else {
    printf("userfaultfd: %s\n", std::string(s.text()).c_str());
  }
  if (const Status s = vmem::trap::make_kmod_trap({}, &kmod); s.ok()) {
    ways.push_back({"module, installed", kmod.get(), Transfer::install});
  } else {
    printf("module: %s\n", std::string(s.text()).c_str());
  }
  Json figures;
  latency(ways, touches, &figures["round_trips"]);
  const int failed = copies(ways, folder, mib / 2 * kHuge, &figures["copies"]);
  if (!json.empty()) std::ofstream(json) << figures.dump(1) << '\n';
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    fprintf(stderr, "trap_bench: %s\n", e.what());
    return 1;
  }
}
