// Tests the promise of vmem_sync for a shared file after a loss of power, through the file system:
// the file is on ext4 on the kernel's dm-log-writes, which records every request that reached the
// drive, and its flushes. Each recorded instant that matters is rebuilt on a second drive; the file
// system is mounted there, recovers, and is read. Every word must be what it was at the call of the
// last vmem_sync that had returned 0, or newer, but never newer than the last store. Requests that
// no flush covers may be missing.
//
// Log format: Documentation/admin-guide/device-mapper/log-writes.rst and drivers/md/dm-log-writes.c
// of the kernel.
//
// For a guest (power_loss.sh), as root: it overwrites the drives.
#include <fcntl.h>
#include <linux/dm-ioctl.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <mutex>

#include "stress/promises.h"

namespace {

using stress::differs;
using stress::Random;

struct Settings {
  double seconds = 10, check_seconds = 60;
  unsigned threads = 3;
  uint64_t bytes = (4 << 20) + 1000, seed = 1;
  std::string drive = "/dev/ram0", copy = "/dev/ram1", log, image = "/fs.img", folder = "/tmp/mnt";
  std::string budget = "16MiB", block = "64KiB", trap = "uffd", engine = "auto";
};
Settings settings;

void must(bool ok, const char* what) {
  if (!ok) differs("%s: %s", what, strerror(errno));
}

std::vector<char> whole(const std::string& path, size_t size) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  must(fd >= 0, path.c_str());
  std::vector<char> out(size);
  for (size_t at = 0; at < size;) {
    const ssize_t n = pread(fd, out.data() + at, size - at, static_cast<off_t>(at));
    must(n > 0, path.c_str());
    at += static_cast<size_t>(n);
  }
  close(fd);
  return out;
}

void overwrite(const std::string& path, const std::vector<char>& bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  must(fd >= 0, path.c_str());
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = pwrite(fd, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    must(n > 0, path.c_str());
    at += static_cast<size_t>(n);
  }
  must(fsync(fd) == 0, "fsync of a drive");
  close(fd);
}

size_t size_of(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  must(fd >= 0, path.c_str());
  const off_t size = lseek(fd, 0, SEEK_END);
  close(fd);
  return static_cast<size_t>(size);
}

// The device mapper's target log-writes over the drive.
class Mapped {
 public:
  Mapped(const std::string& drive, const std::string& log) : control_(open("/dev/mapper/control", O_RDWR | O_CLOEXEC)) {
    must(control_ >= 0, "/dev/mapper/control");
    call("DM_DEV_CREATE", DM_DEV_CREATE, {});
    struct dm_target_spec spec = {};
    spec.length = size_of(drive) / 512;
    strcpy(spec.target_type, "log-writes");
    const std::string parameters = drive + " " + log;
    std::string data(reinterpret_cast<const char*>(&spec), sizeof spec);
    data += parameters;
    data.resize((data.size() + 8) / 8 * 8);
    call("DM_TABLE_LOAD", DM_TABLE_LOAD, data, 1);
    call("DM_DEV_SUSPEND", DM_DEV_SUSPEND, {});  // without the flag: resume
  }
  ~Mapped() {
    call("DM_DEV_REMOVE", DM_DEV_REMOVE, {});
    close(control_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  const char* path() const { return "/dev/dm-0"; }
  void mark(uint64_t id) {
    struct dm_target_msg head = {};
    std::string data(reinterpret_cast<const char*>(&head), sizeof head);
    data += "mark " + std::to_string(id);
    data.resize((data.size() + 8) / 8 * 8);
    call("DM_TARGET_MSG", DM_TARGET_MSG, data);
  }

 private:
  void call(const char* name, unsigned long what, const std::string& data, uint32_t targets = 0) {
    std::vector<char> buffer(sizeof(struct dm_ioctl) + std::max<size_t>(data.size(), 4096));
    auto* io = reinterpret_cast<struct dm_ioctl*>(buffer.data());
    io->version[0] = DM_VERSION_MAJOR;
    io->data_size = static_cast<uint32_t>(buffer.size());
    io->data_start = sizeof(struct dm_ioctl);
    io->target_count = targets;
    strcpy(io->name, "vmem-power-loss");
    memcpy(buffer.data() + sizeof(struct dm_ioctl), data.data(), data.size());
    must(ioctl(control_, what, buffer.data()) == 0, name);
  }
  const int control_;
};

// By mark: the words that every vmem_sync that had returned 0 by then has promised.
std::mutex promising;
std::map<uint64_t, std::vector<std::pair<uint32_t, uint64_t>>> promises;
std::atomic<uint64_t> alive{0}, version{1}, syncs{0};

void work(uint64_t* words, size_t count, unsigned t, Mapped& drive, const std::atomic<bool>& end) {
  stress::OwnWords own(words, count, t, settings.threads, version, settings.seed * 7919 + t);
  while (!end) {
    ++alive;
    std::vector<std::pair<uint32_t, uint64_t>> promised;
    if (!own.step(&promised)) continue;
    const uint64_t id = ++syncs;
    {
      std::lock_guard guard(promising);
      promises[id] = std::move(promised);
    }
    drive.mark(id);
  }
}

void write_file(Mapped& drive) {
  mkdir(settings.folder.c_str(), 0700);
  must(mount(drive.path(), settings.folder.c_str(), "ext4", 0, nullptr) == 0, "mount");
  const std::string path = settings.folder + "/file";
  // Half of the file has blocks, the rest is a hole.
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  must(fd >= 0, path.c_str());
  const std::vector<char> zeros(settings.bytes / 2);
  must(pwrite(fd, zeros.data(), zeros.size(), 0) == static_cast<ssize_t>(zeros.size()), "write");
  must(ftruncate(fd, static_cast<off_t>(settings.bytes)) == 0, "ftruncate");
  must(fsync(fd) == 0, "fsync");
  close(fd);
  const int folder = open(settings.folder.c_str(), O_RDONLY | O_CLOEXEC);
  must(fsync(folder) == 0, "fsync of the folder");
  close(folder);
  drive.mark(0);

  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::string>>{{"device", "none"},
                                                                  {"host_budget", settings.budget},
                                                                  {"trap", settings.trap},
                                                                  {"io_engine", settings.engine},
                                                                  {"block_size", settings.block},
                                                                  {"readahead", "0"}})
    stress::configure(name, value);
  stress::start();
  uint64_t* const words = stress::map_shared(path, settings.bytes);
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < settings.threads; ++t)
    threads.emplace_back([&, t] { work(words, settings.bytes / 8, t, drive, end); });
  usleep(static_cast<useconds_t>(settings.seconds * 1e6));
  end = true;
  for (std::thread& t : threads) t.join();
  if (const int rc = vmem_free(words); rc != 0) differs("free: %d %s", rc, vmem_last_error());
  vmem_shutdown();
  must(umount(settings.folder.c_str()) == 0, "umount");
}

struct Super {
  uint64_t magic, version, entries;
  uint32_t sector_size;
};
struct Entry {
  uint64_t sector, sectors, flags, data_size;
};
enum : uint64_t { kFlush = 1, kFua = 2, kDiscard = 4, kMark = 8 };
constexpr uint64_t kMagic = 0x6a736677736872;

// The drive, and the requests that no flush covers.
class Replay {
 public:
  explicit Replay(std::vector<char> drive) : durable_(std::move(drive)), floor_(settings.bytes / 8) {}

  void apply(const Entry& e, std::vector<char> bytes, size_t sector) {
    if ((e.flags & kFlush) != 0) settle();
    if (!bytes.empty()) pending_.push_back({e.sector * sector, std::move(bytes)});
    if ((e.flags & kFua) != 0 && !pending_.empty()) {
      put(durable_, pending_.back());
      pending_.pop_back();
    }
  }
  void promised(uint64_t id) {
    for (const auto& [word, v] : promises[id]) floor_[word] = std::max(floor_[word], v);
  }
  // Checks a loss of power at this point. If `some` is set, a random half of the requests that no
  // flush covers has arrived, in order; else none has.
  void check(Random* some, const char* when) {
    std::vector<char> drive = durable_;
    for (const Request& r : pending_)
      if (some != nullptr && some->one_in(2)) put(drive, r);
    overwrite(settings.copy, drive);
    must(mount(settings.copy.c_str(), settings.folder.c_str(), "ext4", 0, nullptr) == 0, "mount after the loss");
    const std::vector<char> file = whole(settings.folder + "/file", settings.bytes);
    must(umount(settings.folder.c_str()) == 0, "umount after the loss");
    for (size_t w = 0; w < floor_.size(); ++w) {
      uint64_t there;
      memcpy(&there, file.data() + w * 8, 8);
      if (there < floor_[w] || there >= version)
        differs("%s: word %zu has version %llu, a sync that answered 0 promised %llu, the newest is %llu", when, w,
                static_cast<unsigned long long>(there), static_cast<unsigned long long>(floor_[w]),
                static_cast<unsigned long long>(version - 1));
    }
    ++checks_;
    ++alive;
  }
  uint64_t checks() const { return checks_; }

 private:
  struct Request {
    uint64_t offset;
    std::vector<char> bytes;
  };
  static void put(std::vector<char>& drive, const Request& r) {
    if (r.offset + r.bytes.size() > drive.size()) differs("a request beyond the end of the drive");
    memcpy(drive.data() + r.offset, r.bytes.data(), r.bytes.size());
  }
  void settle() {
    for (const Request& r : pending_) put(durable_, r);
    pending_.clear();
  }
  std::vector<char> durable_;
  std::vector<Request> pending_;
  std::vector<uint64_t> floor_;
  uint64_t checks_ = 0;
};

int run() {
  overwrite(settings.drive, whole(settings.image, size_of(settings.image)));
  std::vector<char> start = whole(settings.drive, size_of(settings.drive));
  std::atomic<bool> over{false};
  std::thread watcher = stress::watch(alive, over, 120);
  {
    Mapped drive(settings.drive, settings.log);
    write_file(drive);
  }
  const std::vector<char> log = whole(settings.log, size_of(settings.log));
  Super super;
  memcpy(&super, log.data(), sizeof super);
  if (super.magic != kMagic || super.version != 1) differs("%s holds no log", settings.log.c_str());
  Random random(settings.seed);
  Replay replay(std::move(start));
  // Makes as many checks as time permits, spread over the whole log.
  const auto began = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / settings.check_seconds;
  };
  uint64_t marks = 0, requests = 0;
  bool there = false;  // the file
  size_t at = super.sector_size;
  for (uint64_t i = 0; i < super.entries; ++i) {
    Entry e;
    if (at + super.sector_size > log.size()) differs("the log ends within an entry");
    memcpy(&e, log.data() + at, sizeof e);
    const char* const text = log.data() + at + sizeof e;
    at += super.sector_size;
    const bool on_time = spent() < static_cast<double>(i) / static_cast<double>(super.entries);
    if ((e.flags & kMark) != 0) {
      const uint64_t id = strtoull(std::string(text, strnlen(text, e.data_size)).c_str(), nullptr, 10);
      there = true;
      ++marks;
      replay.promised(id);
      if (on_time || marks < 4) replay.check(nullptr, "at a sync, with nothing beyond the flush");
      if (on_time || marks < 4) replay.check(&random, "at a sync, with some requests beyond the flush");
      continue;
    }
    std::vector<char> bytes;
    if ((e.flags & kDiscard) == 0 && e.sectors != 0) {
      bytes.assign(log.data() + at, log.data() + at + e.sectors * super.sector_size);
      at += e.sectors * super.sector_size;
      ++requests;
    }
    replay.apply(e, std::move(bytes), super.sector_size);
    if (there && on_time && random.one_in(8)) replay.check(&random, "between two syncs");
  }
  over = true;
  watcher.join();
  printf(
      "seed %llu: %llu syncs, %llu requests in %llu entries, %llu losses of power, no difference; "
      "%zu bytes of the log left\n",
      static_cast<unsigned long long>(settings.seed), static_cast<unsigned long long>(syncs.load()),
      static_cast<unsigned long long>(requests), static_cast<unsigned long long>(super.entries),
      static_cast<unsigned long long>(replay.checks()), log.size() - at);
  // A complete log has a mark for each sync, one before them, and the target's own at the end. A
  // log that filled the drive ends before the work that was under way then.
  const bool full = log.size() - at < size_of(settings.drive);
  if (marks < 2 || (!full && marks != syncs + 2) || replay.checks() < 4)
    differs("too little happened to be worth anything: %llu marks, %llu syncs, %zu bytes of the log left",
            static_cast<unsigned long long>(marks), static_cast<unsigned long long>(syncs.load()), log.size() - at);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What a sync promised, after a loss of power at any instant, on a file system."};
  app.add_option("--seconds", settings.seconds, "of writing");
  app.add_option("--check-seconds", settings.check_seconds, "of losing power");
  app.add_option("--threads", settings.threads);
  app.add_option("--bytes", settings.bytes, "of the file")->transform(CLI::AsSizeValue(false));
  app.add_option("--drive", settings.drive, "for the file system");
  app.add_option("--copy", settings.copy, "for what is rebuilt");
  app.add_option("--log", settings.log, "for the record of requests")->envname("VMEM_TEST_BLOCK_DEVICE");
  app.add_option("--image", settings.image, "of the empty file system");
  app.add_option("--budget", settings.budget);
  app.add_option("--block", settings.block);
  app.add_option("--trap", settings.trap);
  app.add_option("--engine", settings.engine);
  app.add_option("--seed", settings.seed);
  CLI11_PARSE(app, argc, argv);
  return run();
}
