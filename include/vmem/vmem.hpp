/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RAII over <vmem/vmem.h>. Header-only. Errors become vmem::error, a std::system_error whose what()
 * is libvmem's message. Objects are movable, not copyable. One object is not for several threads at
 * once; its memory is.
 */
#ifndef VMEM_VMEM_HPP
#define VMEM_VMEM_HPP

#if __cplusplus < 202002L
#error "<vmem/vmem.hpp> needs C++20: compile with -std=c++20 (vmem::vmem of the CMake package asks for it)"
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "vmem/vmem.h"

namespace vmem {

class error : public std::system_error {
 public:
  explicit error(int rc, const std::string& what = vmem_last_error())
      : std::system_error(rc < 0 ? -rc : rc, std::generic_category(), what) {}
};

inline void check(int rc) {
  if (rc != 0) throw error(rc);
}

/* VMEM_VERSION of the running library. */
inline int version() {
  return vmem_version();
}
/* Writes to shared files what exit() would write. */
inline void flush() {
  check(vmem_flush());
}

/* Calls flush() before one of these signals ends the process: vmem_flush_on. */
inline void flush_on(std::initializer_list<int> signals) {
  check(vmem_flush_on(signals.begin(), signals.size()));
}

/* Syncs every region: vmem_sync(NULL, 0). */
inline void sync() {
  check(vmem_sync(nullptr, 0));
}
/* vmem_export; returns a descriptor that the caller closes. */
inline int export_range(const void* ptr, std::size_t size, unsigned flags = 0) {
  int fd = -1;
  check(vmem_export(ptr, size, flags, &fd));
  return fd;
}
inline void set(const std::string& name, const std::string& value) {
  check(vmem_set(name.c_str(), value.c_str()));
}
inline std::string get(const std::string& name) {
  std::string value(256, '\0');
  int rc;
  while ((rc = vmem_get(name.c_str(), value.data(), value.size())) == -ERANGE) value.resize(value.size() * 2);
  check(rc);
  value.resize(value.find('\0'));
  return value;
}
inline struct vmem_stats stats() {
  struct vmem_stats s = {};
  s.size = sizeof s;
  check(vmem_stats(&s));
  return s;
}

/* Calls on parts of regions, as spans. */
template <typename T>
void prefetch(std::span<T> range, int location = VMEM_HOST, void* stream = nullptr) {
  check(vmem_prefetch(range.data(), range.size_bytes(), location, stream));
}
template <typename T>
void advise(std::span<T> range, int advice, int location = VMEM_HOST) {
  check(vmem_advise(range.data(), range.size_bytes(), advice, location));
}
template <typename T>
void sync(std::span<T> range) {
  check(vmem_sync(range.data(), range.size_bytes()));
}
template <typename T>
void evict(std::span<T> range, int location = VMEM_SSD) {
  check(vmem_evict(range.data(), range.size_bytes(), location));
}
template <typename T>
struct vmem_residency query(std::span<T> range) {
  struct vmem_residency r = {};
  r.size = sizeof r;
  check(vmem_query(range.data(), range.size_bytes(), &r));
  return r;
}
/* vmem_log under the name that other libraries give it. */
inline void set_log_callback(void (*callback)(int level, const char* line, void* user), void* user = nullptr) {
  vmem_log(callback, user);
}

/* Attributes of a region, as struct vmem_region_attr; the defaults follow the settings. */
struct attributes {
  unsigned flags = 0;         /* VMEM_HOST_ONLY, VMEM_FIXED; with a file also VMEM_MAP_.. */
  std::size_t block_size = 0; /* VMEM_BLOCK_AUTO: follows the use; 0: setting block_size */
  int advice = 0;             /* of enum vmem_advice, for the whole region */
  std::string codec = {};     /* "none", "lz4", "zstd"; "": setting compression */
  int checksum = 0;           /* 1 verify, -1 do not; 0: setting checksum */
  std::string name = {};
  std::string path = {}; /* a file, from `offset` on; "": `fd` is the file, or there is none */
  std::uint64_t offset = 0;
  int fd = -1;
  void* address = nullptr; /* a hint; with VMEM_FIXED an address in a reservation */
  int core_dump = 0;       /* 1 in core dumps, -1 not; 0: setting core_dump */
};

/*
 * Owns a region and frees it in the destructor. The object must end, or be free()d, before
 * vmem_shutdown(). A destructor cannot report errors: if freeing fails (a live lease, a shared file
 * that cannot be written) the region stays, without an owner, until vmem_shutdown(). Call free() if
 * that matters.
 */
class region {
 public:
  region() = default;
  explicit region(std::size_t bytes, unsigned flags = 0) : size_(bytes) { check(vmem_alloc(&data_, bytes, flags)); }
  /* `bytes` of `path` from `offset` on; flags as for vmem_map. */
  region(std::size_t bytes, const std::string& path, std::uint64_t offset, unsigned flags) : size_(bytes) {
    check(vmem_map(&data_, bytes, path.c_str(), offset, flags));
  }
  region(std::size_t bytes, const attributes& wanted) : size_(bytes) {
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.flags = wanted.flags;
    attr.block_size = wanted.block_size;
    attr.advice = wanted.advice;
    attr.checksum = wanted.checksum;
    attr.offset = wanted.offset;
    attr.codec = wanted.codec.empty() ? nullptr : wanted.codec.c_str();
    attr.name = wanted.name.empty() ? nullptr : wanted.name.c_str();
    attr.path = wanted.path.empty() ? nullptr : wanted.path.c_str();
    attr.fd = wanted.fd;
    attr.address = wanted.address;
    attr.core_dump = wanted.core_dump;
    check(vmem_create(&data_, bytes, &attr));
  }
  region(region&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  region& operator=(region&& other) noexcept {
    region old(std::move(*this));
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  ~region() {
    if (data_ != nullptr) (void)vmem_free(data_);
  }
  void free() {
    check(vmem_free(data_));
    data_ = nullptr;
    size_ = 0;
  }
  /* vmem_discard. After EIO, which says what is lost, the region is gone, too. */
  void discard() {
    const int rc = vmem_discard(data_);
    if (rc == 0 || rc == -EIO) {
      data_ = nullptr;
      size_ = 0;
    }
    check(rc);
  }

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }
  void name(const std::string& n) const { check(vmem_name(data_, n.c_str())); }
  void prefetch(int location = VMEM_HOST, void* stream = nullptr) const {
    check(vmem_prefetch(data_, size_, location, stream));
  }
  void advise(int advice, int location = VMEM_HOST) const { check(vmem_advise(data_, size_, advice, location)); }
  void sync() const { check(vmem_sync(data_, size_)); }
  void evict(int location = VMEM_SSD) const { check(vmem_evict(data_, size_, location)); }
  struct vmem_residency query() const {
    struct vmem_residency r = {};
    r.size = sizeof r;
    check(vmem_query(data_, size_, &r));
    return r;
  }

  /* The region as elements of T, as many as fit. */
  template <typename T>
  std::span<T> view() const {
    return {static_cast<T*>(data_), size_ / sizeof(T)};
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/*
 * A lease for the life of the object. The destructor ends it on its stream, or cancels it if it is
 * not ready.
 */
class lease {
 public:
  lease(const void* ptr, std::size_t size, unsigned access, int location = VMEM_HOST, void* stream = nullptr)
      : stream_(stream) {
    const struct vmem_range one = {ptr, size, access, 0};
    check(vmem_lease(&lease_, &one, 1, location, stream));
  }
  template <typename T>
  lease(std::span<T> range, unsigned access, int location = VMEM_HOST, void* stream = nullptr)
      : lease(range.data(), range.size_bytes(), access, location, stream) {}
  /* Several ranges, of one or several regions, all or nothing. */
  explicit lease(std::span<const struct vmem_range> ranges, int location = VMEM_HOST, void* stream = nullptr)
      : stream_(stream) {
    check(vmem_lease(&lease_, ranges.data(), ranges.size(), location, stream));
  }
  /* Begins a lease and returns at once; vmem_lease_async says when `ready` is called. */
  static lease async(std::span<const struct vmem_range> ranges, int location = VMEM_HOST, void* stream = nullptr,
                     void (*ready)(struct vmem_lease*, int, void*) = nullptr, void* user = nullptr) {
    lease made;
    made.stream_ = stream;
    check(vmem_lease_async(&made.lease_, ranges.data(), ranges.size(), location, stream, ready, user));
    return made;
  }
  lease(lease&& other) noexcept : lease_(std::exchange(other.lease_, nullptr)), stream_(other.stream_) {}
  lease& operator=(lease&&) = delete;
  ~lease() {
    if (lease_ != nullptr) (void)vmem_lease_end(lease_, stream_);
  }
  /* False: not yet. Throws the error if the lease has failed. */
  bool ready() const {
    const int rc = vmem_lease_poll(lease_);
    if (rc != 0 && rc != -EAGAIN) throw error(rc);
    return rc == 0;
  }
  /* Returns a descriptor that polls readable once the lease is ready or has failed. */
  int fd() const {
    const int rc = vmem_lease_fd(lease_);
    if (rc < 0) throw error(rc);
    return rc;
  }
  struct vmem_lease* get() const {
    return lease_;
  }
  void release() { release(stream_); }
  /* Ends the lease when `stream` reaches this point. */
  void release(void* stream) {
    check(vmem_lease_end(lease_, stream));
    lease_ = nullptr;
  }

 private:
  lease() = default;

  struct vmem_lease* lease_ = nullptr;
  void* stream_ = nullptr;
};

/*
 * Keeps a range open to kernels that page (vmem_kernel_begin, <vmem/device.cuh>) for the life of
 * the object; kernels get view(). The destructor closes the range: it waits for the kernels that
 * are on its stream by then, and serves them meanwhile. If that fails (the stream captures a graph)
 * the range stays open until vmem_shutdown(). Call end() if that matters.
 */
class kernel_range {
 public:
  kernel_range(const void* ptr, std::size_t size, unsigned access, int device, void* stream, std::size_t budget = 0)
      : stream_(stream) {
    check(vmem_kernel_begin(&kernel_, ptr, size, access, device, budget, &view_));
  }
  template <typename T>
  kernel_range(std::span<T> range, unsigned access, int device, void* stream, std::size_t budget = 0)
      : kernel_range(range.data(), range.size_bytes(), access, device, stream, budget) {}
  kernel_range(kernel_range&& other) noexcept
      : kernel_(std::exchange(other.kernel_, nullptr)), view_(other.view_), stream_(other.stream_) {}
  kernel_range& operator=(kernel_range&&) = delete;
  ~kernel_range() {
    if (kernel_ != nullptr) (void)vmem_kernel_end(kernel_, stream_);
  }
  /* The argument of vmem::device_region. */
  const vmem_kernel_view& view() const { return view_; }
  struct vmem_kernel* get() const {
    return kernel_;
  }
  void end() { end(stream_); }
  /* Closes the range when `stream` reaches this point. */
  void end(void* stream) {
    check(vmem_kernel_end(kernel_, stream));
    kernel_ = nullptr;
  }

 private:
  struct vmem_kernel* kernel_ = nullptr;
  vmem_kernel_view view_ = {};
  void* stream_ = nullptr;
};

}  // namespace vmem
#endif /* VMEM_VMEM_HPP */
