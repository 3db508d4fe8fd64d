// Files, buffers and batches for the store's tests.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "core/status.h"
#include "store/engine.h"
#include "store/engine_base.h"

namespace vmem::store::test {

// The names of all engines, for make_named_engine().
std::vector<const char*> engine_names();
// An engine of the registry or "faulty" (a wrapper without rules over io_uring or, where that is forbidden, threads).
core::Status make_named_engine(const std::string& name, unsigned depth, unsigned threads, std::unique_ptr<Engine>* out);
// Returns the engine below a wrapper.
EngineBase* base_of(Engine& engine);

// Page-aligned memory, zero at first.
class Buffer {
 public:
  explicit Buffer(size_t size);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }
  void fill(std::mt19937_64& random);
  void zero();

 private:
  char* data_;
  size_t size_;
};

bool all_zero(const char* bytes, size_t size);

// Returns a writable mapping of this process that holds the bytes, as /proc/self/smaps shows it, or
// "". Skips mappings with the flag (of VmFlags there).
std::string mapping_that_holds(const void* bytes, size_t size, const char* but_flag);

// A temporary directory, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// An unlinked file of `size` pseudo-random bytes (the same for the same size), direct where the file system can.
class TempFile {
 public:
  TempFile(size_t size, bool direct);
  explicit TempFile(const std::string& directory);  // empty, buffered, in that directory
  ~TempFile();
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  bool matches(uint64_t offset, const char* bytes, size_t size) const;

 private:
  int fd_ = -1;
  bool direct_ = false;
};

// A tmpfs of that many pages; needs root.
class SmallTmpfs {
 public:
  explicit SmallTmpfs(size_t pages);
  ~SmallTmpfs();
  bool ok() const { return why_.empty(); }
  const std::string& why() const { return why_; }
  const std::string& path() const { return dir_.path(); }

 private:
  TempDir dir_;
  std::string why_;
};

// Ios that are submitted and waited for together.
class Batch {
 public:
  ~Batch() { wait(); }
  Io& add(Io::Op op, FileId file, uint64_t offset, void* buffer, size_t size);
  void submit(Engine& engine);
  // Several submit() calls of random length.
  void submit_in_pieces(Engine& engine, std::mt19937_64& random);
  void wait();
  std::deque<Io>& ios() { return ios_; }
  // Returns the requests in the order of their completion.
  std::vector<Io*> order();

 private:
  static void on_done(Io& io);
  std::deque<Io> ios_;
  size_t submitted_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Io*> done_;  // protected by mutex_
};

}  // namespace vmem::store::test
