#include "store_test_util.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "common/faulty_engine.h"

namespace vmem::store::test {

std::vector<const char*> engine_names() {
  std::vector<const char*> names;
  for (const EngineEntry& entry : kEngines)
    if (entry.kind != EngineKind::automatic) names.push_back(entry.name.data());
  names.push_back("faulty");
  return names;
}

core::Status make_named_engine(const std::string& name, unsigned depth, unsigned threads,
                               std::unique_ptr<Engine>* out) {
  EngineOptions options;
  options.depth = depth;
  options.threads = threads;
  options.kind = engine_kind(name);  // "faulty": automatic
  core::Status status = make_engine(options, out);
  if (!status.ok() || name != "faulty") return status;
  std::unique_ptr<FaultyEngine> faulty;
  status = FaultyEngine::wrap(std::move(*out), 1, &faulty);
  *out = std::move(faulty);
  return status;
}

EngineBase* base_of(Engine& engine) {
  if (auto* faulty = dynamic_cast<FaultyEngine*>(&engine)) return &faulty->inner();
  return dynamic_cast<EngineBase*>(&engine);
}

Buffer::Buffer(size_t size)
    : data_(static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
      size_(size) {
  if (data_ == MAP_FAILED) throw std::runtime_error("no memory for a test buffer");
}
Buffer::~Buffer() {
  munmap(data_, size_);
}
void Buffer::zero() {
  memset(data_, 0, size_);
}
// Under the sanitizers, which check every access, the standard generators take most of a test's
// time. The words are those of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
// number generators", 2014).
static void fill_with_words(char* data, size_t size, uint64_t seed) {
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word = seed += 0x9e37'79b9'7f4a'7c15;
    word = (word ^ word >> 30) * 0xbf58'476d'1ce4'e5b9;
    word = (word ^ word >> 27) * 0x94d0'49bb'1331'11eb;
    word ^= word >> 31;
    memcpy(data + at, &word, std::min(size - at, sizeof word));
  }
}
void Buffer::fill(std::mt19937_64& random) {
  fill_with_words(data_, size_, random());
}

std::string mapping_that_holds(const void* bytes, size_t size, const char* but_flag) {
  struct Mapping {
    size_t start, end;
    std::string line;
    bool looked_at = true;
  };
  std::vector<Mapping> all;
  std::ifstream in("/proc/self/smaps");
  for (std::string line; std::getline(in, line);) {
    size_t start = 0, end = 0;
    if (sscanf(line.c_str(), "%zx-%zx ", &start, &end) == 2) all.push_back({start, end, line});
    if (line.rfind("VmFlags:", 0) == 0 && line.find(std::string(" ") + but_flag) != std::string::npos)
      all.back().looked_at = false;
  }
  std::string found;
  const int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (memory < 0) return "/proc/self/mem cannot be read";
  std::vector<char> seen(core::kPage + size - 1);
  for (const Mapping& m : all) {
    if (!m.looked_at || m.line.find(" rw") == std::string::npos) continue;
    for (size_t at = m.start; at < m.end && found.empty(); at += core::kPage) {
      const ssize_t n = pread(memory, seen.data(), std::min(seen.size(), m.end - at), static_cast<off_t>(at));
      if (n <= 0) break;
      if (memmem(seen.data(), static_cast<size_t>(n), bytes, size) != nullptr) found = m.line;
    }
  }
  close(memory);
  return found;
}

bool all_zero(const char* bytes, size_t size) {
  return size == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0);
}

TempDir::TempDir() {
  const char* base = getenv("TMPDIR");
  path_ = std::string(base != nullptr ? base : "/var/tmp") + "/vmem-test-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary directory");
}
TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

TempFile::TempFile(size_t size, bool direct) {
  const TempDir dir;
  const std::string name = dir.path() + "/file";
  fd_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  std::string bytes(size, '\0');
  fill_with_words(bytes.data(), size, size);
  if (fd_ < 0 || pwrite(fd_, bytes.data(), size, 0) != static_cast<ssize_t>(size)) {
    throw std::runtime_error("cannot write a test file");
  }
  fsync(fd_);
  direct_ = direct && fcntl(fd_, F_SETFL, O_DIRECT) == 0;
}
TempFile::TempFile(const std::string& directory) {
  const std::string name = directory + "/file";
  fd_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) throw std::runtime_error("cannot create a test file");
  unlink(name.c_str());
}
TempFile::~TempFile() {
  close(fd_);
}

bool TempFile::matches(uint64_t offset, const char* bytes, size_t size) const {
  std::string have(size, '\0');
  const int fd = open(core::strprintf("/proc/self/fd/%d", fd_).c_str(), O_RDONLY | O_CLOEXEC);
  const ssize_t n = pread(fd, have.data(), size, static_cast<off_t>(offset));
  close(fd);
  return n == static_cast<ssize_t>(size) && memcmp(have.data(), bytes, size) == 0;
}

SmallTmpfs::SmallTmpfs(size_t pages) {
  const std::string size = core::strprintf("size=%zu", pages * 4096);
  if (mount("vmem-test", dir_.path().c_str(), "tmpfs", 0, size.c_str()) != 0) why_ = strerror(errno);
}
SmallTmpfs::~SmallTmpfs() {
  if (ok()) umount2(dir_.path().c_str(), MNT_DETACH);
}

Io& Batch::add(Io::Op op, FileId file, uint64_t offset, void* buffer, size_t size) {
  Io& io = ios_.emplace_back();
  io.op = op;
  io.file = file;
  io.offset = offset;
  io.buffer = buffer;
  io.size = size;
  io.done = on_done;
  io.user = this;
  return io;
}

void Batch::submit(Engine& engine) {
  std::vector<Io*> all;
  for (Io& io : ios_) all.push_back(&io);
  submitted_ = all.size();
  engine.submit(all);
}

void Batch::submit_in_pieces(Engine& engine, std::mt19937_64& random) {
  std::vector<Io*> all;
  for (Io& io : ios_) all.push_back(&io);
  submitted_ = all.size();
  for (size_t at = 0; at < all.size();) {
    const size_t n = std::min<size_t>(all.size() - at, 1 + random() % 40);
    engine.submit(std::span<Io* const>(all).subspan(at, n));
    at += n;
  }
}

void Batch::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_.size() == submitted_; });
}

std::vector<Io*> Batch::order() {
  std::lock_guard lock(mutex_);
  return done_;
}

void Batch::on_done(Io& io) {
  auto* batch = static_cast<Batch*>(io.user);
  std::lock_guard lock(batch->mutex_);
  batch->done_.push_back(&io);
  batch->changed_.notify_all();
}

}  // namespace vmem::store::test
