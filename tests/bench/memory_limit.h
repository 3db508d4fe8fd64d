// Memory-limited competitors of libvmem in benchmarks: a memory cgroup, and files mapped by Linux.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace memlimit {

// A memory cgroup, version 1 or 2, that lives as long as the object. Its operator bool is false if
// it cannot be made.
class Group {
 public:
  explicit Group(uint64_t limit) {
    static int made = 0;
    for (const char* base : {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"}) {
      const bool v1 = std::string(base).ends_with("memory");
      if (access((std::string(base) + (v1 ? "/memory.limit_in_bytes" : "/cgroup.controllers")).c_str(), R_OK) != 0)
        continue;
      folder_ = std::string(base) + "/vmem-bench." + std::to_string(getpid()) + "." + std::to_string(made++);
      if (mkdir(folder_.c_str(), 0755) == 0) {
        std::ofstream out(folder_ + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
        out << limit;
        out.flush();
        if (out.good()) return;
        rmdir(folder_.c_str());
      }
      folder_.clear();
    }
  }
  // The processes of the group have ended, or are about to.
  ~Group() {
    for (int i = 0; !folder_.empty() && i < 200 && rmdir(folder_.c_str()) != 0; ++i) usleep(10000);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  explicit operator bool() const { return !folder_.empty(); }
  // Puts the calling process into the group permanently. Returns false if it is not limited.
  bool enter() const {
    std::ofstream out(folder_ + "/cgroup.procs");
    out << getpid();
    out.flush();
    return out.good();
  }

 private:
  std::string folder_;
};

// Shared file mappings of Linux. MADV_WILLNEED prefetches. msync(MS_ASYNC) does nothing since Linux
// 2.6.19, so complete parts are written by sync_file_range(2); a part is dropped when the same
// thread completes its next one.
class MappedFile {
 public:
  MappedFile(const std::string& path, int flags, uint64_t bytes) : bytes_(bytes) {
    fd_ = open(path.c_str(), flags, 0600);
    if ((flags & O_CREAT) != 0) unlink(path.c_str());
    if (fd_ < 0 || ((flags & O_CREAT) != 0 && ftruncate(fd_, static_cast<off_t>(bytes)) != 0)) return;
    posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
    void* const at =
        mmap(nullptr, bytes, PROT_READ | ((flags & O_ACCMODE) == O_RDWR ? PROT_WRITE : 0), MAP_SHARED, fd_, 0);
    if (at != MAP_FAILED) at_ = static_cast<std::byte*>(at);
  }
  ~MappedFile() {
    if (at_ != nullptr) munmap(at_, bytes_);
    if (fd_ >= 0) close(fd_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::byte* data() const { return at_; }
  bool has(const void* p) const { return p >= at_ && p < at_ + bytes_; }
  void advise(int advice) const { madvise(at_, bytes_, advice); }
  void fetch(const void* p, size_t n) const { madvise(at_ + pages(p), up(p, n) - pages(p), MADV_WILLNEED); }
  void drop(const void* p, size_t n) const {
    madvise(at_ + pages(p), up(p, n) - pages(p), MADV_DONTNEED);
    posix_fadvise(fd_, static_cast<off_t>(pages(p)), static_cast<off_t>(up(p, n) - pages(p)), POSIX_FADV_DONTNEED);
  }
  void write(const void* p, size_t n) {
    sync_file_range(fd_, static_cast<off_t>(pages(p)), static_cast<off_t>(up(p, n) - pages(p)), SYNC_FILE_RANGE_WRITE);
    Part last;
    {
      const std::lock_guard lock(mutex_);
      last = std::exchange(parts_[std::this_thread::get_id()], {p, n});
    }
    if (last.size == 0) return;
    sync_file_range(fd_, static_cast<off_t>(pages(last.at)),
                    static_cast<off_t>(up(last.at, last.size) - pages(last.at)),
                    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    drop(last.at, last.size);
  }
  void sync() const { msync(at_, bytes_, MS_SYNC); }
  // Unmaps the file first.
  void unmap_and_sync() {
    munmap(at_, bytes_);
    at_ = nullptr;
    fsync(fd_);
  }

 private:
  struct Part {
    const void* at = nullptr;
    size_t size = 0;
  };
  uint64_t pages(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - at_) & ~4095ull;
  }
  uint64_t up(const void* p, size_t n) const {
    return (static_cast<uint64_t>(static_cast<const std::byte*>(p) - at_) + n + 4095) & ~4095ull;
  }
  uint64_t bytes_;
  int fd_ = -1;
  std::byte* at_ = nullptr;
  std::mutex mutex_;
  std::map<std::thread::id, Part> parts_;  // on their way to the disk
};

}  // namespace memlimit
