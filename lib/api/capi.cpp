// The calls of vmem.h. No exception passes, every failure leaves its message, and the caller's
// memory is accessed with no lock held: it may lie in a region.
#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "api/boundary.h"
#include "api/flush_on.h"
#include "api/runtime.h"
#include "core/log.h"
#include "core/process/cancellation.h"
#include "core/process/inherited.h"
#include "pager/pager.h"
#include "vmem/vmem.h"

#define VMEM_API extern "C" __attribute__((visibility("default")))

namespace {

using vmem::api::guarded;
using vmem::api::Runtime;
using vmem::api::with_pager;
using vmem::core::error;
using vmem::core::Status;

// A struct of a later version is longer than ours, but never as long as this.
constexpr size_t kMostOfStruct = 4096;
constexpr size_t kMostRanges = size_t{1} << 24;

// Checks a pointer from the caller to `count` objects of type T.
template <typename T>
Status check_pointer(const T* at, size_t count, const char* name) {
  const auto first = reinterpret_cast<uintptr_t>(at);
  if (at == nullptr) return error(EINVAL, "%s is null; give an address", name);
  if (first % alignof(T) != 0)
    return error(EINVAL, "%s is at %p; it must be aligned to %zu bytes", name, static_cast<const void*>(at),
                 alignof(T));
  if (count <= (UINTPTR_MAX - first) / sizeof(T)) return {};  // NOLINT(bugprone-sizeof-expression): of pointers, too
  return error(EINVAL, "%s: %zu elements at %p end beyond the last address", name, count, static_cast<const void*>(at));
}

Status check_access(unsigned access) {
  if (access == 0 || (access & ~(VMEM_READ | VMEM_WRITE)) != 0) {
    return error(EINVAL, "access 0x%x is not accepted; give VMEM_READ, VMEM_WRITE or both", access);
  }
  return {};
}

// Call it before the runtime starts.
Status check_inherited(const void* ptr) {
  if (!vmem::core::is_inherited(ptr)) return {};
  return error(
      ECHILD,
      "%p is in a region of the process that this one was forked from, and is not inherited; make one here, or "
      "map the file again",
      ptr);
}

// Runs a call that takes an address.
template <typename Body>
int with_region(const void* ptr, Body body) noexcept {
  return guarded([&]() -> Status {
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return body(pager);
  });
}

Status copy_ranges(const vmem_range* ranges, size_t count, bool need_access, std::vector<vmem_range>* out) {
  if (ranges == nullptr || count == 0)
    return error(EINVAL, "%zu ranges at %p; give at least one", count, static_cast<const void*>(ranges));
  if (count > kMostRanges) return error(EINVAL, "count is %zu; a call takes at most %zu ranges", count, kMostRanges);
  if (Status s = check_pointer(ranges, count, "ranges"); !s.ok()) return s;
  out->assign(ranges, ranges + count);
  for (size_t i = 0; i < count; ++i) {
    if (Status s = check_inherited((*out)[i].ptr); !s.ok()) return s;
    if ((*out)[i].reserved != 0) return error(EINVAL, "range %zu: reserved is %u; it must be 0", i, (*out)[i].reserved);
    if (!need_access) continue;
    if (Status s = check_access((*out)[i].access); !s.ok()) {
      return error(EINVAL, "range %zu: %.*s", i, static_cast<int>(s.text().size()), s.text().data());
    }
  }
  return {};
}

// Checks and copies the arguments of vmem_lease and vmem_lease_async.
Status fill_lease(struct vmem_lease** lease, const vmem_range* ranges, size_t count, int location, void* stream,
                  struct vmem_lease* out) {
  if (Status s = check_pointer(lease, 1, "lease"); !s.ok()) return s;
  out->location = location;
  out->stream = stream;
  return copy_ranges(ranges, count, true, &out->ranges);
}

// Copies the caller's attributes from a struct that may be shorter or longer than ours.
Status copy_attr(const vmem_region_attr* attr, vmem_region_attr* out) {
  *out = {};
  if (attr == nullptr) return {};
  if (Status s = check_pointer(attr, 1, "attr"); !s.ok()) return s;
  const size_t size = attr->size;
  if (size < offsetof(vmem_region_attr, flags) + sizeof(attr->flags) || size > kMostOfStruct)
    return error(EINVAL, "attr->size is %zu; give sizeof(struct vmem_region_attr), %zu", size, sizeof *out);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(attr);
  for (size_t i = sizeof *out; i < size; ++i) {
    if (bytes[i] == 0) continue;
    return error(E2BIG, "byte %zu of attr is set; this library knows the first %zu of it", i, sizeof *out);
  }
  memcpy(out, attr, std::min(size, sizeof *out));
  return {};
}

// Fills as much of *out as its first field says that it has room for: at least `words` of 8 bytes.
template <typename T, typename F>
int answer(T* out, size_t words, const char* name, const F& fill) {
  T filled = {};
  size_t room = 0;
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(out, 1, "out"); !s.ok()) return s;
    room = out->size;
    if (room < words * sizeof(uint64_t) || room > kMostOfStruct)
      return error(EINVAL, "out->size is %zu; set it to sizeof(%s), %zu", room, name, sizeof filled);
    return fill(&filled);
  });
  if (rc == 0) {
    filled.size = room;
    memcpy(out, &filled, std::min(room, sizeof filled));
  }
  return rc;
}

constexpr unsigned kMapKinds = VMEM_MAP_READ | VMEM_MAP_SHARED | VMEM_MAP_PRIVATE;

Status set_codec(const char* name, vmem::pager::RegionSpec* what) {
  const std::string codec = name != nullptr ? name : Runtime::get().options().text(vmem::core::Option::compression);
  if (codec != "none" && codec != "lz4" && codec != "zstd")
    return error(EINVAL, "codec \"%s\" is not known; give none, lz4 or zstd", codec.c_str());
  what->codec = codec == "lz4"    ? vmem::store::Codec::lz4
                : codec == "zstd" ? vmem::store::Codec::zstd
                                  : vmem::store::Codec::raw;
  return {};
}

Status set_file(const vmem_region_attr& attr, vmem::pager::RegionSpec* what) {
  const unsigned kind = attr.flags & kMapKinds;
  const unsigned accepted = kMapKinds | VMEM_HOST_ONLY | VMEM_FIXED | (kind != 0 ? VMEM_NO_LOCK : 0);
  if ((attr.flags & ~accepted) != 0 || (kind & (kind - 1)) != 0) {
    return error(
        EINVAL,
        "flags 0x%x are not accepted; give VMEM_HOST_ONLY and VMEM_FIXED if wanted, and for a file exactly one "
        "of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, and VMEM_NO_LOCK if wanted",
        attr.flags);
  }
  what->lock = (attr.flags & VMEM_NO_LOCK) == 0;
  const auto given = [&](const char* problem) {
    return error(EINVAL, "%s (path %s, fd %d, offset %llu)", problem, attr.path != nullptr ? attr.path : "not given",
                 attr.fd, static_cast<unsigned long long>(attr.offset));
  };
  if (kind == 0) {
    if (attr.path == nullptr && attr.offset == 0 && attr.fd <= 0) return {};
    return given("a file or an offset, but none of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE");
  }
  if (attr.path != nullptr && attr.fd > 0) return given("two files; give the path and fd -1, or the descriptor alone");
  if (attr.path == nullptr && attr.fd < 0) return given("no file; give a path, or a descriptor that is open");
  if (attr.path == nullptr && fcntl(attr.fd, F_GETFD) < 0)
    return error(EBADF, "descriptor %d is not open; give one that is, or a path", attr.fd);
  what->path = attr.path != nullptr ? attr.path : "/proc/thread-self/fd/" + std::to_string(attr.fd);
  what->offset = attr.offset;
  what->backing = kind == VMEM_MAP_READ     ? vmem::pager::Backing::file_read
                  : kind == VMEM_MAP_SHARED ? vmem::pager::Backing::file_shared
                                            : vmem::pager::Backing::file_private;
  return {};
}

Status set_block_size(size_t bytes, vmem::pager::RegionSpec* what) {
  what->block_size = bytes;
  what->fixed_block_size = bytes != 0;
  if (bytes == 0) what->block_size = Runtime::get().options().number(vmem::core::Option::block_size);
  what->adapts = bytes == VMEM_BLOCK_AUTO || (bytes == 0 && what->block_size == vmem::core::kAuto);
  if (bytes == 0 || what->adapts ||
      (std::has_single_bit(bytes) && bytes >= vmem::core::kMinBlock && bytes <= vmem::core::kMaxBlock))
    return {};
  return error(EINVAL, "block_size %zu is not accepted; give VMEM_BLOCK_AUTO or a power of two from 4 KiB to %s", bytes,
               vmem::core::human_bytes(vmem::core::kMaxBlock).c_str());
}

// Checks advice for a region that is being created.
Status check_advice(int advice) {
  switch (advice) {
    case 0:
    case VMEM_ADVISE_NORMAL:
    case VMEM_ADVISE_SEQUENTIAL:
    case VMEM_ADVISE_RANDOM:
    case VMEM_ADVISE_COLD:
    case VMEM_ADVISE_HOT:
    case VMEM_ADVISE_PIN:
    case VMEM_ADVISE_PRIORITY_LOW:
    case VMEM_ADVISE_PRIORITY_NORMAL:
    case VMEM_ADVISE_PRIORITY_HIGH:
      return {};
    default:
      return error(EINVAL, "advice %d is not accepted for a new region; vmem.h lists the accepted ones", advice);
  }
}

// Creates a region; fails, with no region made, also if its advice is refused.
Status create(size_t size, const vmem_region_attr& attr, void** base) {
  vmem::pager::RegionSpec what;
  what.size = size;
  what.host_only = (attr.flags & VMEM_HOST_ONLY) != 0;
  const std::string name = attr.name != nullptr ? attr.name : "";
  Status s = set_file(attr, &what);
  if (s.ok()) s = check_advice(attr.advice);
  if (s.ok() && (attr.checksum < -1 || attr.checksum > 1))
    s = error(EINVAL, "checksum %d is not accepted; give 1, -1, or 0 for the setting", attr.checksum);
  if (s.ok() && (attr.core_dump < -1 || attr.core_dump > 1))
    s = error(EINVAL, "core_dump %d is not accepted; give 1, -1, or 0 for the setting", attr.core_dump);
  if (!s.ok()) return s;
  what.advice = attr.advice;
  what.checksum = attr.checksum;
  what.core_dump = attr.core_dump;
  what.address = reinterpret_cast<uintptr_t>(attr.address);
  what.fixed = (attr.flags & VMEM_FIXED) != 0;
  Runtime::Use pager;
  s = Runtime::get().use(&pager);  // use() reads the settings
  if (s.ok()) s = set_codec(attr.codec, &what);
  if (s.ok()) s = set_block_size(attr.block_size, &what);
  if (s.ok()) s = pager->create(what, base);
  if (!s.ok()) return s;
  struct Undo {
    Runtime::Use& pager;
    void* base;
    ~Undo() {
      if (base != nullptr) pager->destroy(base, true).ignore();
    }
  } undo{pager, *base};
  if (!name.empty()) s = pager->set_name(*base, name.c_str());
  if (s.ok() && attr.advice != 0) s = pager->advise(*base, size, attr.advice, VMEM_HOST);
  if (s.ok()) undo.base = nullptr;
  return s;
}

}  // namespace

VMEM_API int vmem_version(void) {
  return VMEM_VERSION;
}

VMEM_API int vmem_init(void) {
  return with_pager([](Runtime::Use&) -> Status { return {}; });
}

VMEM_API void vmem_shutdown(void) {
  guarded([]() -> Status {
    Runtime::get().shutdown();
    return {};
  });
}

VMEM_API int vmem_set(const char* name, const char* value) {
  return guarded([&]() -> Status {
    if (name == nullptr || value == nullptr) return error(EINVAL, "name or value is null; give two strings");
    return Runtime::get().set(name, value);
  });
}

VMEM_API int vmem_get(const char* name, char* value, size_t size) {
  return guarded([&]() -> Status {
    if (name == nullptr || value == nullptr) return error(EINVAL, "name or value is null; give a string and a buffer");
    std::string text;
    if (Status s = Runtime::get().get(name, &text); !s.ok()) return s;
    if (text.size() + 1 > size)
      return error(ERANGE, "the value needs %zu bytes, the buffer has %zu", text.size() + 1, size);
    memcpy(value, text.c_str(), text.size() + 1);
    return {};
  });
}

VMEM_API void vmem_log(void (*sink)(int, const char*, void*), void* user) {
  const vmem::core::NoCancellation whole;
  bool locks;  // this thread exits from inside a call, and may hold locks
  {
    const Runtime::Call call;
    locks = call.refused();
  }
  if (locks) return vmem::core::set_log_sink_at_exit(sink, user);
  vmem::core::set_log_sink(sink, user);
}

VMEM_API int vmem_create(void** ptr, size_t size, const struct vmem_region_attr* attr) {
  void* base = nullptr;
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(ptr, 1, "ptr"); !s.ok()) return s;
    vmem_region_attr copy;
    if (Status s = copy_attr(attr, &copy); !s.ok()) return s;
    return create(size, copy, &base);
  });
  if (rc == 0) *ptr = base;
  return rc;
}

VMEM_API int vmem_alloc(void** ptr, size_t size, unsigned flags) {
  void* base = nullptr;
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(ptr, 1, "ptr"); !s.ok()) return s;
    if ((flags & ~VMEM_HOST_ONLY) != 0) return error(EINVAL, "flags 0x%x are unknown; give 0 or VMEM_HOST_ONLY", flags);
    vmem_region_attr attr = {};
    attr.flags = flags;
    return create(size, attr, &base);
  });
  if (rc == 0) *ptr = base;
  return rc;
}

VMEM_API int vmem_map(void** ptr, size_t size, const char* path, uint64_t offset, unsigned flags) {
  void* base = nullptr;
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(ptr, 1, "ptr"); !s.ok()) return s;
    if (path == nullptr) return error(EINVAL, "path is null; give the name of a file");
    const unsigned kind = flags & kMapKinds;
    if ((flags & ~(kMapKinds | VMEM_HOST_ONLY | VMEM_NO_LOCK)) != 0 || (kind & (kind - 1)) != 0 || kind == 0) {
      return error(EINVAL,
                   "flags 0x%x are not accepted; give exactly one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, "
                   "and VMEM_HOST_ONLY and VMEM_NO_LOCK if wanted",
                   flags);
    }
    vmem_region_attr attr = {};
    attr.path = path;
    attr.offset = offset;
    attr.flags = flags;
    return create(size, attr, &base);
  });
  if (rc == 0) *ptr = base;
  return rc;
}

namespace {

int free_region(void* ptr, bool discard) {
  if (ptr == nullptr) return 0;
  return guarded([&]() -> Status {
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    // Do not start a pager: without one there are no regions. The program may free its last region
    // after vmem_shutdown.
    Runtime::Use pager;
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok()) return s;
    if (!pager) return error(EINVAL, "%p is not a region of libvmem (never was, or was freed)", ptr);
    return discard ? pager->discard(ptr) : pager->destroy(ptr, false);
  });
}

}  // namespace

VMEM_API int vmem_free(void* ptr) {
  return free_region(ptr, false);
}

VMEM_API int vmem_discard(void* ptr) {
  return free_region(ptr, true);
}

VMEM_API int vmem_name(const void* ptr, const char* name) {
  return guarded([&]() -> Status {
    if (name == nullptr) return error(EINVAL, "name is null; give a string");
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    const std::string copy(name, strnlen(name, 63));
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->set_name(ptr, copy.c_str());
  });
}

VMEM_API int vmem_prefetch(const void* ptr, size_t size, int location, void* stream) {
  return with_region(ptr, [&](Runtime::Use& pager) { return pager->prefetch(ptr, size, location, stream); });
}

VMEM_API int vmem_advise(const void* ptr, size_t size, int advice, int location) {
  return with_region(ptr, [&](Runtime::Use& pager) { return pager->advise(ptr, size, advice, location); });
}

VMEM_API int vmem_acquire(const void* ptr, size_t size, unsigned access, int location, void* stream) {
  return with_region(ptr, [&](Runtime::Use& pager) -> Status {
    if (Status s = check_access(access); !s.ok()) return s;
    const vmem_range range{ptr, size, access, 0};
    return pager->acquire({&range, 1}, location, stream);
  });
}

VMEM_API int vmem_release(const void* ptr, size_t size, void* stream) {
  return with_region(ptr, [&](Runtime::Use& pager) {
    const vmem_range range{ptr, size, 0, 0};
    return pager->release({&range, 1}, stream);
  });
}

VMEM_API int vmem_acquire_ranges(const struct vmem_range* ranges, size_t count, int location, void* stream) {
  return guarded([&]() -> Status {
    std::vector<vmem_range> copy;
    if (Status s = copy_ranges(ranges, count, true, &copy); !s.ok()) return s;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->acquire(copy, location, stream);
  });
}

VMEM_API int vmem_release_ranges(const struct vmem_range* ranges, size_t count, void* stream) {
  return guarded([&]() -> Status {
    std::vector<vmem_range> copy;
    if (Status s = copy_ranges(ranges, count, false, &copy); !s.ok()) return s;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->release(copy, stream);
  });
}

VMEM_API int vmem_lease(struct vmem_lease** lease, const struct vmem_range* ranges, size_t count, int location,
                        void* stream) {
  struct vmem_lease* made = nullptr;
  const int rc = guarded([&]() -> Status {
    const auto handle = std::make_shared<struct vmem_lease>();
    if (Status s = fill_lease(lease, ranges, count, location, stream, handle.get()); !s.ok()) return s;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return Runtime::get().leases().take(*pager, handle, &made);
  });
  if (rc == 0) *lease = made;
  return rc;
}

VMEM_API int vmem_lease_async(struct vmem_lease** lease, const struct vmem_range* ranges, size_t count, int location,
                              void* stream, void (*ready)(struct vmem_lease*, int, void*), void* user) {
  struct vmem_lease* made = nullptr;
  const int rc = guarded([&]() -> Status {
    const auto handle = std::make_shared<struct vmem_lease>();
    if (Status s = fill_lease(lease, ranges, count, location, stream, handle.get()); !s.ok()) return s;
    handle->on_ready = ready;
    handle->user = user;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return Runtime::get().leases().start(*pager, handle, &made);
  });
  if (rc == 0) *lease = made;
  return rc;
}

VMEM_API int vmem_lease_poll(struct vmem_lease* lease) {
  return guarded([&]() -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok()) return s;
    return Runtime::get().leases().poll(lease);
  });
}

VMEM_API int vmem_lease_fd(struct vmem_lease* lease) {
  int fd = -1;
  const int rc = guarded([&]() -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok()) return s;
    return Runtime::get().leases().descriptor(lease, &fd);
  });
  return rc == 0 ? fd : rc;
}

VMEM_API int vmem_lease_end(struct vmem_lease* lease, void* stream) {
  if (lease == nullptr) return 0;
  return guarded([&]() -> Status { return Runtime::get().leases().end(lease, stream); });
}

VMEM_API int vmem_kernel_begin(struct vmem_kernel** kernel, const void* ptr, size_t size, unsigned access, int device,
                               size_t budget, struct vmem_kernel_view* view) {
  struct vmem_kernel* made = nullptr;
  vmem_kernel_view seen = {};
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(kernel, 1, "kernel"); !s.ok()) return s;
    if (Status s = check_pointer(view, 1, "view"); !s.ok()) return s;
    if (Status s = check_access(access); !s.ok()) return s;
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    if ((access & VMEM_READ) == 0) return error(EINVAL, "access is VMEM_WRITE; kernels also read: add VMEM_READ");
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return Runtime::get().kernels().begin(*pager, {ptr, size, access, 0}, device, budget, &made, &seen);
  });
  if (rc == 0) {
    *kernel = made;
    *view = seen;
  }
  return rc;
}

VMEM_API int vmem_kernel_end(struct vmem_kernel* kernel, void* stream) {
  if (kernel == nullptr) return 0;
  return guarded([&]() -> Status { return Runtime::get().kernels().end(kernel, stream); });
}

VMEM_API int vmem_export(const void* ptr, size_t size, unsigned flags, int* fd) {
  int made = -1;
  const int rc = guarded([&]() -> Status {
    if (Status s = check_pointer(fd, 1, "fd"); !s.ok()) return s;
    if ((flags & ~VMEM_EXPORT_DMA_BUF) != 0)
      return error(EINVAL, "flags 0x%x are unknown; give 0 or VMEM_EXPORT_DMA_BUF", flags);
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    const auto how = flags != 0 ? vmem::device::Export::dma_buf : vmem::device::Export::handle;
    return pager->export_range(ptr, size, how, &made);
  });
  if (rc == 0) *fd = made;
  return rc;
}

VMEM_API int vmem_evict(const void* ptr, size_t size, int location) {
  return with_region(ptr, [&](Runtime::Use& pager) { return pager->evict(ptr, size, location); });
}

VMEM_API int vmem_sync(const void* ptr, size_t size) {
  if (ptr != nullptr || size != 0) return with_region(ptr, [&](Runtime::Use& pager) { return pager->sync(ptr, size); });
  return guarded([&]() -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok() || !pager) return s;
    return pager->sync_all();
  });
}

VMEM_API int vmem_flush(void) {
  return guarded([&]() -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok() || !pager) return s;
    pager->flush_host().ignore();  // flush_shared() tries failed writes again
    return pager->flush_shared();
  });
}

VMEM_API int vmem_flush_on(const int* signals, size_t count) {
  return guarded([&]() -> Status {
    if (signals == nullptr || count == 0 || count > 64) {
      return error(EINVAL, "%zu signals at %p; give at least one", count, static_cast<const void*>(signals));
    }
    Runtime::Use pager;  // refuses a forked child that cannot begin anew
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok()) return s;
    const std::vector<int> wanted(signals, signals + count);  // the array may lie in a region
    return vmem::api::flush_on(wanted);
  });
}

VMEM_API int vmem_query(const void* ptr, size_t size, struct vmem_residency* out) {
  return answer(out, 5, "struct vmem_residency", [&](vmem_residency* filled) -> Status {
    if (Status s = check_inherited(ptr); !s.ok()) return s;
    Runtime::Use pager;  // a query does not start a pager
    if (Status s = Runtime::get().use_if_running(&pager); !s.ok()) return s;
    if (!pager) return error(EINVAL, "%p is not inside a region of libvmem", ptr);
    return pager->queries().query(ptr, size, filled);
  });
}

VMEM_API int vmem_stats(struct vmem_stats* out) {
  return answer(out, 2, "struct vmem_stats", [](struct vmem_stats* filled) -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    pager->queries().stats(filled);
    return {};
  });
}

VMEM_API int vmem_device_stats(int device, struct vmem_device_stats* out) {
  return answer(out, 2, "struct vmem_device_stats", [&](struct vmem_device_stats* filled) -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->queries().device_stats(device, filled);
  });
}

VMEM_API const char* vmem_strerror(int err) {
  if (err == 0) return "success";
  const int e = err == INT_MIN ? INT_MAX : std::abs(err);
  const char* words = strerrordesc_np(e);
  return words != nullptr ? words : "unknown error";
}

VMEM_API const char* vmem_last_error(void) {
  return vmem::api::last_error();
}
