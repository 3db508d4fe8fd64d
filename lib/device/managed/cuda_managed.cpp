#include "device/managed/cuda_managed.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "core/log.h"
#include "core/outside_lock.h"
#include "core/step.h"
#include "device/backend.h"
#include "device/managed/fault_gate.h"
#include "device/paging_words.h"

namespace vmem::device {

using cuda::Enter;
using cuda::Timeline;

Status ManagedDevices::backend_reserve(Reservation& r) {
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

void ManagedDevices::backend_release(Reservation& r) {
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

Status ManagedDevices::backend_present(const Reservation& r) {
  if (health(r.device).ok() || !gpu(r.device).reset.load()) return {};
  const Status lost = lost_status(gpu(r.device));
  return error(EIO, "the managed range at %#zx ended with its context; its addresses are no longer libvmem's: %.*s",
               r.base, static_cast<int>(lost.text().size()), lost.text().data());
}

// The process has several files on /dev/nvidia-uvm open; one takes mappings. Finds it, and maps the
// range with it. Returns 0 or -errno.
int ManagedDevices::find_uvm_file(uintptr_t address, size_t size) {
  DIR* dir = opendir("/proc/thread-self/fd");
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

Status ManagedDevices::backend_map(const Span& span) {
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

Status ManagedDevices::prefetch_now(Gpu& g, uintptr_t address, size_t size, const char* what) {
  Enter here(driver_, g.context);
  CUstream stream = nullptr;
  if (Status s = take_stream(g, &stream); !s.ok()) return s;
  CUresult e = driver_.mem_prefetch(address, size, g.device, stream);
  core::step("device.prefetched");
  Status status = finish(g, stream, e, what);
  if (!g.lost.load()) give_stream(g, stream);
  return status;
}

Status ManagedDevices::backend_populate(const Span& span, int device) {
  Timeline timeline("prepare");
  return prefetch_now(gpu(device), span.address(), span.size(), "making a block");
}

Status ManagedDevices::backend_migrate(const Span& span, int to) {
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

Status ManagedDevices::backend_advise(Range range, Advice advice, int location, bool set) {
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

ManagedDevices::ManagedDevices() : CudaDevices(kUnit, &fault_gate::cpu_gate()) {}

ManagedDevices::~ManagedDevices() {
  if (installed_) cpu_gate()->uninstall();
  if (uvm_file_ >= 0) close(uvm_file_);
}

Status ManagedDevices::trim(int device, uint64_t) {
  core::must_be_outside("Devices::trim");
  return usable(device);
}

Status ManagedDevices::make_paging_words(int device, uint32_t, uint32_t, std::unique_ptr<PagingWords>*) {
  if (Status s = usable(device); !s.ok()) return s;
  return no_paging_words();
}

uintptr_t ManagedDevices::window_of(uintptr_t block, size_t* run) {
  const ReservationPtr r = find(block);
  *run = r->base + r->size - block;
  return block;
}

Status ManagedDevices::try_device(int device) {
  if (Status s = cpu_gate()->install(); !s.ok()) return s;
  installed_ = true;
  if (Status s = try_unit(device); !s.ok())
    return error(ENODEV,
                 "this driver does not let a destroyed part of a managed range be made again (tried with one "
                 "block on device %d): %.*s",
                 device, static_cast<int>(s.text().size()), s.text().data());
  return {};
}

Status ManagedDevices::try_unit(int device) {
  void* base = nullptr;
  if (Status s = reserve(unit_, device, &base); !s.ok()) return s;
  const Range unit{reinterpret_cast<uintptr_t>(base), unit_};
  const std::span<const Range> range(&unit, 1);
  constexpr size_t kWords = core::kPage / sizeof(uint64_t);
  auto* page = static_cast<uint64_t*>(std::aligned_alloc(core::kPage, core::kPage));
  Status status = page == nullptr ? error(ENOMEM, "no memory for a page") : pin(page, core::kPage);
  const bool pinned = status.ok();
  for (uint64_t round = 1; round <= 2 && status.ok(); ++round) {
    const Copy first{unit.address, page, core::kPage}, last{unit.address + unit_ - core::kPage, page, core::kPage};
    Ticket done;
    bool torn = false;
    auto step = [&](Status s) {
      if (status.ok()) status = std::move(s);
      return status.ok();
    };
    if (!step(populate(range, device, &torn))) break;
    // The last page was never written: it must be zeros, whatever the unit held in the round
    // before.
    if (step(copy_out(device, std::span(&last, 1), &done)) && step(wait(done)))
      for (size_t i = 0; i < kWords; ++i)
        if (page[i] != 0) step(error(EIO, "a block made again holds old bytes"));
    for (size_t i = 0; i < kWords; ++i) page[i] = round * 1000003 + i;
    for (const Copy& copy : {first, last})
      if (step(copy_in(device, std::span(&copy, 1), &done))) step(wait(done));
    if (step(open(range, Access::read))) {
      const auto* seen = static_cast<const volatile uint64_t*>(pointer(last.block));
      for (size_t i = 0; i < kWords; ++i)
        if (seen[i] != round * 1000003 + i) step(error(EIO, "a block made again reads wrong on the CPU"));
    }
    Status punched = punch(range);
    step(std::move(punched));
    step(rearm(range));
  }
  if (!pinned || unpin(page).ok()) std::free(page);  // else it is still pinned, and keeps its address
  Status released = release(base);
  return status.ok() ? released : status;
}

extern const Backend managed_backend;
const Backend managed_backend = {"managed", true, nullptr,
                                 [](size_t, std::unique_ptr<Devices>* out) { return make_cuda<ManagedDevices>(out); }};

}  // namespace vmem::device
