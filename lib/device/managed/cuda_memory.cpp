// Managed ranges and the parts of them that are made.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <string_view>

#include "core/log.h"
#include "core/step.h"
#include "device/cuda/cuda_devices.h"

namespace vmem::device {

using cuda::Enter;
using cuda::Timeline;

Status CudaDevices::backend_memory(int device, Memory* out) {
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  size_t free_bytes = 0, total_bytes = 0;
  const CUresult e = driver_.mem_info(&free_bytes, &total_bytes);
  out->kept = g.pieces.idle_bytes();
  out->free = free_bytes + out->kept;
  out->total = total_bytes;
  return result(g, e, "asking for free memory");
}

Status CudaDevices::backend_reserve(Reservation& r) {
  if (!unified()) return reserve_addresses(r);
  Gpu& g = gpu(r.device);
  Enter here(driver_, g.context);
  Timeline span("reserve");
  // Managed memory of 2 MiB and more comes aligned to it, but that is not documented. In the rare
  // other case, ask for one unit more.
  for (const size_t more : {size_t{0}, r.unit}) {
    CUdeviceptr start = 0;
    if (CUresult e = driver_.mem_alloc_managed(&start, r.size + more, CU_MEM_ATTACH_GLOBAL); e != CUDA_SUCCESS)
      return result(g, e, "reserving managed address space");
    r.base = core::round_up(start, r.unit);
    if (r.base + r.size <= start + r.size + more) {
      r.backend = pointer(start);
      r.backend_size = r.size + more;
      break;
    }
    driver_.mem_free(start);
  }
  if (r.backend == nullptr) return error(EIO, "managed memory of %zu bytes did not come aligned", r.size);
  place_hole(reinterpret_cast<uintptr_t>(r.backend), r.backend_size);
  return {};
}

void CudaDevices::backend_release(Reservation& r) {
  if (!unified()) return release_addresses(r);
  Gpu& g = gpu(r.device);
  Timeline span("release");
  if (health(r.device).ok()) {
    Enter here(driver_, g.context);
    Status s = result(g, driver_.mem_free(reinterpret_cast<CUdeviceptr>(r.backend)), "freeing a managed range");
    if (s.ok()) return;
    core::log(core::Level::warning, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  }
  // CUDA believes that the range exists. Destroy what is in it, and keep the address space without
  // access for ever: the driver could tear down a later mapping there at exit. After a reset the
  // range is not ours any more.
  if (!g.reset.load()) place_hole(reinterpret_cast<uintptr_t>(r.backend), r.backend_size);
}

Status CudaDevices::backend_present(const Reservation& r) {
  if (health(r.device).ok() || !gpu(r.device).reset.load()) return {};
  const Status lost = lost_status(gpu(r.device));
  return error(EIO, "the managed range at %#zx ended with its context; its addresses are no longer libvmem's: %.*s",
               r.base, static_cast<int>(lost.text().size()), lost.text().data());
}

// The process has several files on /dev/nvidia-uvm open; one takes mappings. Finds it, and maps the
// range with it. Returns 0 or -errno.
int CudaDevices::find_uvm_file(uintptr_t address, size_t size) {
  DIR* dir = opendir("/proc/self/fd");
  if (dir == nullptr) return -errno;
  int err = ENOENT;
  while (dirent* entry = readdir(dir)) {
    if (entry->d_name[0] == '.') continue;
    const int fd = atoi(entry->d_name);
    char target[256];
    const ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target);
    const std::string_view path(target, n > 0 ? static_cast<size_t>(n) : 0);
    constexpr std::string_view kName = "/nvidia-uvm";
    if (path.size() < kName.size() || path.substr(path.size() - kName.size()) != kName) continue;
    // A refused mmap unmaps the addresses, and other threads may get them (seen: Linux 6.18). So try
    // elsewhere first, at an address that differs from the offset. There the right file returns
    // EINVAL, and a file without an address space of the GPU EBADFD.
    void* const elsewhere = mmap(nullptr, core::kPage, PROT_NONE, MAP_SHARED, fd, 0);
    if (elsewhere != MAP_FAILED) munmap(elsewhere, core::kPage);
    if (elsewhere == MAP_FAILED && errno == EBADFD) {
      err = EBADFD;
      continue;
    }
    if (mmap(pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(address)) !=
        pointer(address)) {
      err = errno;
      continue;
    }
    uvm_file_ = fcntl(fd, F_DUPFD_CLOEXEC, 64);
    err = uvm_file_ < 0 ? errno : 0;
    break;
  }
  closedir(dir);
  return -err;
}

Status CudaDevices::backend_map(const Span& span) {
  const uintptr_t address = span.address();
  std::unique_lock lock(uvm_mutex_);
  if (uvm_file_ < 0) {
    // The search leaves the range open to the CPU for longer than necessary, but never with data at
    // stake: try_unit() comes first.
    if (const int r = find_uvm_file(address, span.size()); r != 0)
      return core::system_error(r,
                                "no file of this process on /dev/nvidia-uvm maps %zu bytes at %#zx (is /proc "
                                "mounted?)",
                                span.size(), address);
    return {};
  }
  const int fd = uvm_file_;
  lock.unlock();
  if (mmap(pointer(address), span.size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
           static_cast<off_t>(address)) == pointer(address))
    return {};
  return core::system_error(errno, "mapping %zu bytes of unified memory at %#zx%s", span.size(), address,
                            errno == ENOMEM ? " (raise vm.max_map_count?)" : "");
}

Status CudaDevices::take_stream(Gpu& g, CUstream* out) try {
  {
    std::lock_guard lock(g.mutex);
    if (!g.idle_streams.empty()) {
      *out = g.idle_streams.back();
      g.idle_streams.pop_back();
      return {};
    }
    make_room(g.idle_streams, ++g.streams);
  }
  return result(g, driver_.stream_create(out, CU_STREAM_NON_BLOCKING, 0), "creating a stream");
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory to record a stream");
}

void CudaDevices::give_stream(Gpu& g, CUstream stream) {
  std::lock_guard lock(g.mutex);
  g.idle_streams.push_back(stream);
}

Status CudaDevices::finish(Gpu& g, CUstream stream, CUresult e, const char* what, Gpu* other) {
  Status put = result(g, e, what);
  for (unsigned tries = 0; put.ok() || health(g.device).ok(); ++tries) {
    Status s = result(g, driver_.stream_synchronize(stream), what);
    if (s.ok()) return put;
    if (!health(g.device).ok() || (other != nullptr && !notice(*other).ok())) return s;
    if (tries == 1000) {
      VMEM_LOG_OFTEN(core::Level::error, "a wait for a stream of device %d is refused and tried again: %.*s", g.device,
                     static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
  return put;
}

Status CudaDevices::prefetch_now(Gpu& g, uintptr_t address, size_t size, const char* what) {
  Enter here(driver_, g.context);
  CUstream stream = nullptr;
  if (Status s = take_stream(g, &stream); !s.ok()) return s;
  CUresult e = driver_.mem_prefetch(address, size, g.device, stream);
  core::step("device.prefetched");
  Status status = finish(g, stream, e, what);
  if (!g.lost.load()) give_stream(g, stream);
  return status;
}

Status CudaDevices::backend_populate(const Span& span, int device) {
  Timeline timeline("prepare");
  return prefetch_now(gpu(device), span.address(), span.size(), "making a block");
}

Status CudaDevices::backend_migrate(const Span& span, int to) {
  Timeline timeline("migrate");
  for (size_t i = 0; i < span.count; ++i) {
    const int from = span.unit(i).device.load();
    if (from == to || (i != 0 && from == span.unit(i - 1).device.load())) continue;
    if (Status s = health(from); !s.ok()) return s;
    Enter here(driver_, gpu(from).context);
    // Peer access is faster. An error is fine: it is on already, or there is none.
    driver_.ctx_enable_peer(gpu(to).context, 0);
  }
  return prefetch_now(gpu(to), span.address(), span.size(), "moving a block to another device");
}

Status CudaDevices::backend_advise(Range range, Advice advice, int location, bool set) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  CUmem_advise kind = CU_MEM_ADVISE_SET_READ_MOSTLY;
  switch (advice) {
    case Advice::preferred_location:
      kind = set ? CU_MEM_ADVISE_SET_PREFERRED_LOCATION : CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
      break;
    case Advice::read_mostly:
      kind = set ? CU_MEM_ADVISE_SET_READ_MOSTLY : CU_MEM_ADVISE_UNSET_READ_MOSTLY;
      location = g->device;  // ignored, but must exist
      break;
    case Advice::accessed_by:
      kind = set ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
      break;
  }
  // Advice names a device, whose context must exist.
  if (location != kHost)
    if (Status s = health(location); !s.ok()) return s;
  Enter here(driver_, g->context);
  const CUdevice where = location == kHost ? CU_DEVICE_CPU : location;
  return result(*g, driver_.mem_advise(range.address, range.size, kind, where), "giving advice");
}

Status CudaDevices::backend_pin(void* frames, size_t size) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  Enter here(driver_, g->context);
  return result(*g, driver_.host_register(frames, size, CU_MEMHOSTREGISTER_PORTABLE), "pinning host memory");
}

Status CudaDevices::backend_unpin(void* frames) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  Enter here(driver_, g->context);
  return result(*g, driver_.host_unregister(frames), "unpinning host memory");
}

}  // namespace vmem::device
