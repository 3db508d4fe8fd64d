// The C boundary: no exception passes, every failure leaves its words, and memory of the caller is touched with no lock
// held (it may lie in a region).
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "api/runtime.h"
#include "core/log.h"
#include "core/text.h"
#include "vmem/vmem.h"

#define VMEM_API extern "C" __attribute__((visibility("default")))

namespace {

using vmem::api::Runtime;
using vmem::core::error;
using vmem::core::Status;

// The words of this thread's last failure. Plain bytes: they need no memory and no destructor, so that they can be
// asked for when memory is short and while the process exits.
constinit thread_local char last_error[1024] = "";

int report(int code, std::string_view words) noexcept {
  const size_t length = std::min(words.size(), sizeof last_error - 1);
  memcpy(last_error, words.data(), length);
  last_error[vmem::core::make_printable(last_error, length)] = '\0';  // the cut may be in a character
  return code;
}

// At the end of a call, when no lock is held: the application gets the lines that it logged. The sink may call the
// library; the message of the call stays.
class DeliverLog {
 public:
  DeliverLog() { vmem::core::begin_call_that_logs(); }
  ~DeliverLog() {
    if (!vmem::core::end_call_that_logs()) return;
    char message[sizeof last_error];
    memcpy(message, last_error, sizeof message);
    vmem::core::deliver_log_of_call();
    memcpy(last_error, message, sizeof message);
  }
  DeliverLog(const DeliverLog&) = delete;
  DeliverLog& operator=(const DeliverLog&) = delete;
};

// Runs a call's body; what it throws (memory for bookkeeping) becomes an error. Nothing is thrown from here.
template <typename Body>
int guarded(Body body) noexcept {
  const DeliverLog deliver;
  const Runtime::Call call;
  if (call.refused()) return report(-EDEADLK, "the process exits from inside another call of libvmem on this thread");
  try {
    const Status s = body();
    return s.ok() ? 0 : report(s.code(), s.text());
  } catch (const std::bad_alloc&) {
    return report(-ENOMEM, "no memory for bookkeeping");
  } catch (const std::exception& e) {
    char words[256];
    snprintf(words, sizeof words, "unexpected failure: %s", e.what());
    return report(-EIO, words);
  } catch (...) {
    return report(-EIO, "unexpected failure");
  }
}

template <typename Body>
int with_pager(Body body) noexcept {
  return guarded([&]() -> Status {
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return body(pager);
  });
}

Status check_access(unsigned access) {
  if (access == 0 || (access & ~(VMEM_READ | VMEM_WRITE)) != 0) {
    return error(EINVAL, "access 0x%x is not accepted; give VMEM_READ, VMEM_WRITE or both", access);
  }
  return {};
}

Status copy_ranges(const vmem_range* ranges, size_t count, bool need_access, std::vector<vmem_range>* out) {
  if (ranges == nullptr || count == 0)
    return error(EINVAL, "%zu ranges at %p; give at least one", count, static_cast<const void*>(ranges));
  if (count > SIZE_MAX / sizeof(vmem_range)) return error(EINVAL, "count %zu is too large", count);
  out->assign(ranges, ranges + count);
  for (size_t i = 0; i < count; ++i) {
    if ((*out)[i].reserved != 0) return error(EINVAL, "range %zu: reserved is %u; it must be 0", i, (*out)[i].reserved);
    if (!need_access) continue;
    if (Status s = check_access((*out)[i].access); !s.ok()) {
      return error(EINVAL, "range %zu: %.*s", i, static_cast<int>(s.text().size()), s.text().data());
    }
  }
  return {};
}

vmem::pager::NewRegion new_region(size_t size, unsigned flags) {
  vmem::core::Options& options = Runtime::get().options();
  vmem::pager::NewRegion what;
  what.size = size;
  what.block_size = options.number(vmem::core::Option::block_size);
  const std::string codec = options.text(vmem::core::Option::compression);
  what.codec = codec == "lz4"    ? vmem::store::Codec::lz4
               : codec == "zstd" ? vmem::store::Codec::zstd
                                 : vmem::store::Codec::raw;
  what.host_only = (flags & VMEM_HOST_ONLY) != 0;
  return what;
}

}  // namespace

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
  bool locks;  // this thread exits from inside a call, and may hold any
  {
    const Runtime::Call call;
    locks = call.refused();
  }
  if (locks) return vmem::core::set_log_sink_at_exit(sink, user);
  vmem::core::set_log_sink(sink, user);
}

VMEM_API int vmem_alloc(void** ptr, size_t size, unsigned flags) {
  void* base = nullptr;
  const int rc = guarded([&]() -> Status {
    if (ptr == nullptr) return error(EINVAL, "ptr is null; give the address of a pointer");
    if ((flags & ~VMEM_HOST_ONLY) != 0) return error(EINVAL, "flags 0x%x are unknown; give 0 or VMEM_HOST_ONLY", flags);
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->create(new_region(size, flags), &base);
  });
  if (rc == 0) *ptr = base;
  return rc;
}

VMEM_API int vmem_map(void** ptr, size_t size, const char* path, uint64_t offset, unsigned flags) {
  void* base = nullptr;
  const int rc = guarded([&]() -> Status {
    if (ptr == nullptr || path == nullptr) return error(EINVAL, "ptr or path is null");
    const unsigned kinds = VMEM_MAP_READ | VMEM_MAP_SHARED | VMEM_MAP_PRIVATE;
    const unsigned kind = flags & kinds;
    if ((flags & ~(kinds | VMEM_HOST_ONLY)) != 0 || (kind & (kind - 1)) != 0 || kind == 0) {
      return error(EINVAL,
                   "flags 0x%x are not accepted; give exactly one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, "
                   "and VMEM_HOST_ONLY if wanted",
                   flags);
    }
    const std::string copy(path);
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    auto what = new_region(size, flags);
    what.path = copy;
    what.offset = offset;
    what.backing = kind == VMEM_MAP_READ     ? vmem::pager::Backing::file_read
                   : kind == VMEM_MAP_SHARED ? vmem::pager::Backing::file_shared
                                             : vmem::pager::Backing::file_private;
    return pager->create(what, &base);
  });
  if (rc == 0) *ptr = base;
  return rc;
}

VMEM_API int vmem_free(void* ptr) {
  if (ptr == nullptr) return 0;
  return with_pager([&](Runtime::Use& pager) { return pager->destroy(ptr, false); });
}

VMEM_API int vmem_name(const void* ptr, const char* name) {
  return guarded([&]() -> Status {
    if (name == nullptr) return error(EINVAL, "name is null; give a string");
    const std::string copy(name, strnlen(name, 63));
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->set_name(ptr, copy.c_str());
  });
}

VMEM_API int vmem_prefetch(const void* ptr, size_t size, int location, void* /*stream*/) {
  return with_pager([&](Runtime::Use& pager) { return pager->prefetch(ptr, size, location); });
}

VMEM_API int vmem_advise(const void* ptr, size_t size, int advice, int location) {
  return with_pager([&](Runtime::Use& pager) { return pager->advise(ptr, size, advice, location); });
}

VMEM_API int vmem_acquire(const void* ptr, size_t size, unsigned access, int location, void* stream) {
  return with_pager([&](Runtime::Use& pager) -> Status {
    if (Status s = check_access(access); !s.ok()) return s;
    const vmem_range range{ptr, size, access, 0};
    return pager->acquire({&range, 1}, location, stream);
  });
}

VMEM_API int vmem_release(const void* ptr, size_t size, void* stream) {
  return with_pager([&](Runtime::Use& pager) {
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

VMEM_API int vmem_evict(const void* ptr, size_t size, int location) {
  return with_pager([&](Runtime::Use& pager) { return pager->evict(ptr, size, location); });
}

VMEM_API int vmem_sync(const void* ptr, size_t size) {
  return with_pager([&](Runtime::Use& pager) { return pager->sync(ptr, size); });
}

VMEM_API int vmem_query(const void* ptr, size_t size, struct vmem_residency* out) {
  vmem_residency filled = {};
  size_t room = 0;
  const int rc = guarded([&]() -> Status {
    if (out == nullptr) return error(EINVAL, "out is null");
    room = out->size;
    if (room < sizeof(uint64_t) * 5) {
      return error(EINVAL, "out->size is %zu; set it to sizeof(struct vmem_residency), %zu", room, sizeof filled);
    }
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->query(ptr, size, &filled);
  });
  if (rc == 0) {
    filled.size = room;
    memcpy(out, &filled, std::min(room, sizeof filled));
  }
  return rc;
}

VMEM_API int vmem_stats(struct vmem_stats* out) {
  struct vmem_stats filled = {};
  size_t room = 0;
  const int rc = guarded([&]() -> Status {
    if (out == nullptr) return error(EINVAL, "out is null");
    room = out->size;
    if (room < sizeof(uint64_t) * 2) {
      return error(EINVAL, "out->size is %zu; set it to sizeof(struct vmem_stats), %zu", room, sizeof filled);
    }
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    pager->stats(&filled);
    return {};
  });
  if (rc == 0) {
    filled.size = room;
    memcpy(out, &filled, std::min(room, sizeof filled));
  }
  return rc;
}

VMEM_API int vmem_device_stats(int device, struct vmem_device_stats* out) {
  struct vmem_device_stats filled = {};
  size_t room = 0;
  const int rc = guarded([&]() -> Status {
    if (out == nullptr) return error(EINVAL, "out is null");
    room = out->size;
    if (room < sizeof(uint64_t) * 2) {
      return error(EINVAL, "out->size is %zu; set it to sizeof(struct vmem_device_stats), %zu", room, sizeof filled);
    }
    Runtime::Use pager;
    if (Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return pager->device_stats(device, &filled);
  });
  if (rc == 0) {
    filled.size = room;
    memcpy(out, &filled, std::min(room, sizeof filled));
  }
  return rc;
}

VMEM_API const char* vmem_strerror(int err) {
  const int e = err < 0 ? -err : err;
  if (e == 0) return "success";
  const char* words = strerrordesc_np(e);
  return words != nullptr ? words : "unknown error";
}

VMEM_API const char* vmem_last_error(void) {
  return last_error;
}
