// Checks the promise of vmem_sync for a shared file against everything a disk may forget. Records
// every write and flush that the library hands to its engine, and replays them as after a loss of
// power. A write that completed before a completed flush began is on the disk; of any other write,
// any of its pages may be there or not. At every sync that returned 0, and at about one in 64 ends
// of writes after it, each word must be what it was when the sync was called, or newer.
//
// This is the method of dm-log-writes, but above the file system: it checks the order of the
// library's own writes and flushes, not the file system.
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>

#include "api/runtime.h"
#include "common.h"
#include "common/hooks.h"
#include "promises.h"
#include "store/engine.h"

namespace {

using stress::differs;
using stress::Random;
using vmem::store::Engine;
using vmem::store::FileId;
using vmem::store::Io;

struct Settings {
  double seconds = 10;
  unsigned threads = 3;
  uint64_t bytes = (4 << 20) + 1000, seed = 1;
  std::string budget = "24MiB", transfer = "auto", engine = "auto", trap = "uffd";
  bool delays = true;
};

// In the order in which they happened. The bytes of a write are kept until it is known to be
// durable.
struct Event {
  enum Kind { write_begins, write_ends, flush_begins, flush_ends, synced } kind;
  uint64_t id = 0;  // of the write or the flush
  uint64_t offset = 0;
  std::vector<std::byte> bytes;
  std::vector<std::pair<uint32_t, uint64_t>> words;  // synced: what must be on the disk
};

std::mutex recording;
std::vector<Event> events;
uint64_t recorded_bytes = 0;
ino_t watched = 0;  // the watched file

void record(Event event) {
  std::lock_guard guard(recording);
  recorded_bytes += event.bytes.size();
  events.push_back(std::move(event));
}

// Has a name of its own for tests/tsan.supp: the kernel's write protection keeps the image from
// changing, which ThreadSanitizer cannot see.
[[gnu::noinline]] std::vector<std::byte> copy_image(const Io& io) {
  const auto* bytes = static_cast<const std::byte*>(io.buffer);
  return {bytes, bytes + io.size};
}

// Records the I/O on the watched file. Copies the bytes at the time of the call: they do not change
// until it is done.
class Recorder final : public Engine {
 public:
  explicit Recorder(std::unique_ptr<Engine> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return "recorder"; }
  void submit(std::span<Io* const> batch) override {
    for (Io* io : batch) {
      if (io->op == Io::Op::read || !is_watched(io->file)) continue;
      auto* r = new Recorded{io->done, io->user, ++ids_, io->op};
      Event event{io->op == Io::Op::write ? Event::write_begins : Event::flush_begins, r->id, io->offset, {}, {}};
      if (io->op == Io::Op::write) event.bytes = copy_image(*io);
      record(std::move(event));
      io->user = r;
      io->done = [](Io& done) {
        const std::unique_ptr<Recorded> mine(static_cast<Recorded*>(done.user));
        done.user = mine->user, done.done = mine->done;
        if (done.result == 0)
          record({mine->op == Io::Op::write ? Event::write_ends : Event::flush_ends, mine->id, 0, {}, {}});
        done.done(done);
      };
    }
    inner_->submit(batch);
  }
  vmem::core::Status add_file(int fd, FileId* id) override {
    struct stat st = {};
    fstat(fd, &st);
    auto s = inner_->add_file(fd, id);
    std::lock_guard guard(mutex_);
    if (s.ok()) files_[*id] = st.st_ino;
    return s;
  }
  void remove_file(FileId id) override { inner_->remove_file(id); }
  vmem::store::EngineStats stats() const override { return inner_->stats(); }

 private:
  struct Recorded {
    void (*done)(Io&);
    void* user;
    uint64_t id;
    Io::Op op;
  };
  bool is_watched(FileId id) {
    std::lock_guard guard(mutex_);
    const auto it = files_.find(id);
    return it != files_.end() && it->second == watched;
  }
  std::unique_ptr<Engine> inner_;
  std::mutex mutex_;
  std::map<FileId, ino_t> files_;
  std::atomic<uint64_t> ids_{0};
};

// Models the disk: its durable contents and the writes that may not have reached it.
struct Disk {
  struct Pending {
    uint64_t offset;
    std::vector<std::byte> bytes;
    uint64_t ended = 0;  // when it ended; 0: not yet
  };
  std::vector<std::byte> durable;
  std::map<uint64_t, Pending> pending;   // by id
  std::map<uint64_t, uint64_t> flushes;  // flushes under way: when each began
  std::vector<uint64_t> floor;           // by word: the oldest version that is allowed
  uint64_t time = 0, checks = 0;

  static void put(std::vector<std::byte>& image, uint64_t offset, const std::byte* bytes, size_t n) {
    if (offset >= image.size()) return;
    memcpy(image.data() + offset, bytes, std::min<size_t>(n, image.size() - offset));
  }
  void check(const std::vector<std::byte>& image, const char* when) {
    ++checks;
    for (size_t w = 0; w < floor.size(); ++w) {
      uint64_t there;
      memcpy(&there, image.data() + w * 8, 8);
      if (there < floor[w])
        differs("%s: word %zu of the file has version %llu, a sync that answered 0 promised %llu", when, w,
                static_cast<unsigned long long>(there), static_cast<unsigned long long>(floor[w]));
    }
  }
  // Assumes that some pages of some pending writes arrived, in the order of the writes.
  void check_some(Random& random, const char* when) {
    std::vector<std::byte> image = durable;
    for (const auto& [id, p] : pending)
      for (size_t at = 0; at < p.bytes.size(); at += 4096)
        if (random.one_in(2))
          put(image, p.offset + at, p.bytes.data() + at, std::min<size_t>(4096, p.bytes.size() - at));
    check(image, when);
  }
  void replay(Event& e, Random& random) {
    ++time;
    switch (e.kind) {
      case Event::write_begins:
        pending[e.id] = {e.offset, std::move(e.bytes), 0};
        return;
      case Event::write_ends:
        pending[e.id].ended = time;
        if (random.one_in(64)) check_some(random, "between two writes");
        return;
      case Event::flush_begins:
        flushes[e.id] = time;
        return;
      case Event::flush_ends: {
        const uint64_t began = flushes[e.id];
        flushes.erase(e.id);
        // Two concurrent writes of one page have no defined order: the library must not do that.
        for (auto it = pending.begin(); it != pending.end();) {
          if (it->second.ended == 0 || it->second.ended > began) {
            ++it;
            continue;
          }
          put(durable, it->second.offset, it->second.bytes.data(), it->second.bytes.size());
          it = pending.erase(it);
        }
        return;
      }
      case Event::synced:
        for (const auto& [word, version] : e.words) floor[word] = std::max(floor[word], version);
        check(durable, "at a sync, with nothing beyond the flush");
        check_some(random, "at a sync, with some pages beyond the flush");
    }
  }
};

int run(const Settings& settings) {
  stress::catch_sigbus();
  vmem_log([](int, const char*, void*) {}, nullptr);
  vmem::api::test_hooks().wrap_engine = [](std::unique_ptr<Engine> inner) -> std::unique_ptr<Engine> {
    return std::make_unique<Recorder>(std::move(inner));
  };
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::string>>{{"device", "none"},
                                                                  {"host_budget", settings.budget},
                                                                  {"trap", settings.trap},
                                                                  {"transfer", settings.transfer},
                                                                  {"io_engine", settings.engine},
                                                                  {"evict_threads", "2"},
                                                                  {"io_threads", "2"},
                                                                  {"readahead", "0"}})
    stress::configure(name, value);
  stress::start();
  if (settings.delays) vmem::core::step_hook.store(stress::delay);
  static const char* const kBlocks[] = {"4KiB", "64KiB", "2MiB"};
  Random random(settings.seed);
  std::atomic<uint64_t> alive{0}, version{1}, syncs{0};
  std::atomic<bool> over{false};
  std::thread watcher = stress::watch(alive, over, 90);
  uint64_t checks = 0, writes = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings.seconds);
  for (unsigned round = 0; std::chrono::steady_clock::now() < until || round < 3; ++round) {
    int fd = -1;
    const std::string path = stress::temp_file(&fd);
    struct stat st = {};
    if (ftruncate(fd, static_cast<off_t>(settings.bytes)) != 0 || fstat(fd, &st) != 0)
      differs("ftruncate: %s", strerror(errno));
    watched = st.st_ino;
    stress::configure("block_size", kBlocks[round % 3]);
    uint64_t* const words = stress::map_shared(path, settings.bytes);
    const size_t count = settings.bytes / 8;
    std::atomic<bool> end{false};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < settings.threads; ++t) {
      threads.emplace_back([&, t] {
        stress::OwnWords own(words, count, t, settings.threads, version, settings.seed * 7919 + round * 31 + t);
        while (!end) {
          ++alive;
          Event event{Event::synced, 0, 0, {}, {}};
          if (!own.step(&event.words)) continue;
          ++syncs;
          record(std::move(event));
        }
      });
    }
    for (unsigned i = 0; i < 40; ++i) {
      usleep(10000);
      std::lock_guard guard(recording);
      if (recorded_bytes > (256u << 20)) break;
    }
    end = true;
    for (std::thread& t : threads) t.join();
    if (const int rc = vmem_free(words); rc != 0) differs("free: %d %s", rc, vmem_last_error());
    Disk disk;
    disk.durable.resize(settings.bytes);
    disk.floor.resize(count);
    std::lock_guard guard(recording);
    for (Event& e : events) {
      writes += e.kind == Event::write_begins;
      disk.replay(e, random);
      ++alive;
    }
    checks += disk.checks;
    events.clear();
    recorded_bytes = 0;
    close(fd);
    unlink(path.c_str());
  }
  over = true;
  watcher.join();
  vmem::core::step_hook.store(nullptr);
  vmem_shutdown();
  printf("seed %llu: %llu syncs, %llu writes of the file, %llu states of the disk checked, no difference\n",
         static_cast<unsigned long long>(settings.seed), static_cast<unsigned long long>(syncs.load()),
         static_cast<unsigned long long>(writes), static_cast<unsigned long long>(checks));
  if (syncs == 0 || writes == 0) differs("too little happened to be worth anything");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What a sync promised, after a loss of power at any instant."};
  Settings settings;
  app.add_option("--seconds", settings.seconds);
  app.add_option("--threads", settings.threads);
  app.add_option("--bytes", settings.bytes, "of the file")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", settings.budget);
  app.add_option("--transfer", settings.transfer);
  app.add_option("--engine", settings.engine);
  app.add_option("--trap", settings.trap);
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-delays", settings.delays);
  CLI11_PARSE(app, argc, argv);
  return run(settings);
}
