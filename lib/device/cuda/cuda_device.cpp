#include "device/cuda/cuda_device.h"

#include <errno.h>
#include <unistd.h>

#include <cstdio>
#include <new>
#include <utility>

#include "core/log.h"
#include "core/outside_lock.h"
#include "core/process/at_exit.h"
#include "device/backend.h"
#include "device/cuda/cuda_devices.h"

namespace vmem::device {

using cuda::Enter;

namespace {

std::atomic<bool> exists{false};

Link link_between(const cuda::Driver& driver, int a, int b) {
  if (a == b) return Link::self;
  int can = 0, atomics = 0;
  if (driver.can_access_peer(&can, a, b) != CUDA_SUCCESS || can == 0) return Link::none;
  // Peers over PCIe have no native atomics.
  driver.peer_attribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, a, b);
  return atomics != 0 ? Link::nvlink : Link::pcie;
}

std::string pci_of(const cuda::Driver& driver, int device) {
  char pci[32] = "";
  driver.device_pci(pci, sizeof pci, device);
  for (char& c : pci) c = static_cast<char>(tolower(c));  // as sysfs writes it
  return pci;
}

int numa_node_of(const std::string& pci) {
  const std::string path = "/sys/bus/pci/devices/" + pci + "/numa_node";
  int node = -1;
  if (FILE* f = fopen(path.c_str(), "re"); f != nullptr) {
    if (fscanf(f, "%d", &node) != 1) node = -1;
    fclose(f);
  }
  return node;
}

}  // namespace

Status CudaDevices::describe(int devices) {
  for (int d = 0; d < devices; ++d) {
    char name[256] = "";
    size_t bytes = 0;
    CUresult e = driver_.device_name(name, sizeof name, d);
    if (e == CUDA_SUCCESS) e = driver_.device_memory(&bytes, d);
    if (e != CUDA_SUCCESS) return error(ENODEV, "device %d cannot be described: %s", d, cuda::error_words(e).c_str());
    std::string pci = pci_of(driver_, d);
    Info info{d, name, pci, numa_node_of(pci), bytes, {}};
    for (int other = 0; other < devices; ++other) info.links.push_back(link_between(driver_, d, other));
    infos_.push_back(std::move(info));
    auto g = std::make_unique<Gpu>();
    g->device = d;
    const auto has = [&](CUdevice_attribute what) {
      int value = 0;
      return driver_.device_attribute(&value, what, d) == CUDA_SUCCESS && value != 0;
    };
    g->managed = has(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    g->handles = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    g->exports = has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    g->rdma = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    g->dma_buf = has(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
    g->reads_host = has(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    gpus_.push_back(std::move(g));
  }
  return {};
}

Status CudaDevices::start() {
  int devices = 0;
  if (Status s = cuda::load_driver(&driver_, &devices); !s.ok()) return s;
  if (Status s = load_calls(); !s.ok()) return s;
  if (devices > static_cast<int>(kMaxDevices)) devices = static_cast<int>(kMaxDevices);
  if (Status s = describe(devices); !s.ok()) return s;
  int first = 0;
  while (first < devices && !fit(gpu(first))) ++first;
  if (first == devices) return error(ENODEV, "no device has %s", needed());
  return try_device(first);
}

CudaDevices::~CudaDevices() {
  for (auto& g : gpus_) {
    if (!g->opened.load() || !health(g->device).ok()) continue;
    {
      Enter here(driver_, g->context);
      if (!here.ok()) continue;
      free_paging(*g);
      free_zeros(*g);
      if (g->clearing != nullptr) g->clearing->end();
      g->pieces.trim(0, [this](size_t size, const Piece& piece) { return destroy_piece(size, piece); });
      for (const CUdeviceptr window : g->windows)
        if (window != 0) driver_.address_free(window, g->window_size);
      for (auto& direction : g->copy)
        for (CUstream s : direction) driver_.stream_destroy(s);
      for (CUstream s : g->idle_streams) driver_.stream_destroy(s);
      for (const EventPool& pool : g->events)
        for (CUevent e : pool.idle) driver_.event_destroy(e);
    }
    driver_.primary_release(g->device);
  }
  exists.store(false);
}

Status CudaDevices::open_gpu(Gpu& g) {
  if (g.opened.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(g.open_mutex);
  if (g.opened.load()) return {};
  if (!fit(g)) return error(ENODEV, "device %d has no %s", g.device, needed());
  if (CUresult r = driver_.primary_retain(&g.context, g.device); r != CUDA_SUCCESS)
    return error(r == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : ENODEV, "device %d: no CUDA context (driver error %d)",
                 g.device, static_cast<int>(r));
  CUresult e = CUDA_ERROR_INVALID_CONTEXT;
  Status prepared;
  {
    Enter here(driver_, g.context);
    if (here.ok() && driver_.ctx_id(g.context, &g.context_id) == CUDA_SUCCESS) e = CUDA_SUCCESS;
    for (auto& direction : g.copy)
      for (CUstream& s : direction)
        if (e == CUDA_SUCCESS) e = driver_.stream_create(&s, CU_STREAM_NON_BLOCKING, 0);
    if (e == CUDA_SUCCESS) prepared = prepare(g);
    if (e != CUDA_SUCCESS || !prepared.ok())
      for (auto& direction : g.copy)
        for (CUstream& s : direction)
          if (s != nullptr) driver_.stream_destroy(std::exchange(s, nullptr));
  }
  if (e != CUDA_SUCCESS || !prepared.ok()) {
    driver_.primary_release(g.device);  // may destroy the context, which this thread has left
    if (!prepared.ok()) return prepared;
    return error(cuda::errno_of(e), "device %d: no streams: %s", g.device, cuda::error_words(e).c_str());
  }
  core::do_exit_work_before_this();  // at exit the context goes, with bytes that only the device has
  g.opened.store(true, std::memory_order_release);
  return {};
}

Status CudaDevices::prepare(Gpu& g) {
  Status zeros = make_zeros(g);
  if (!zeros.ok()) return zeros;
  start_clearing(g);
  g.maps_ahead.store(mapping_waits_for_copies(g));
  return {};
}

// --- health ---------------------------------------------------------------------------------------------------------

void CudaDevices::lose(Gpu& g, const char* reason) {
  {
    std::lock_guard lock(g.mutex);
    if (g.lost.load()) return;
    snprintf(g.reason, sizeof g.reason, "%s", reason);
    g.lost.store(true);
  }
  // At exit the driver takes contexts down after the library has written all that must be kept.
  const bool expected = core::exiting() && g.reset.load();
  core::log(expected ? core::Level::debug : core::Level::error, "device %d is lost: %s", g.device, reason);
}

Status CudaDevices::lost_status(Gpu& g) {
  std::lock_guard lock(g.mutex);
  return error(EIO, "device %d is lost: %s", g.device, g.reason);
}

Status CudaDevices::result(Gpu& g, CUresult e, const char* what) {
  if (e == CUDA_SUCCESS) return {};
  // The call may have named streams or memory of other contexts, and returned their errors. A
  // stream of our own in this context tells whether the error is this device's.
  if (cuda::is_sticky(e) && g.opened.load(std::memory_order_acquire)) {
    if (Status s = health(g.device); !s.ok()) return s;
    Enter here(driver_, g.context);
    const auto own = driver_.stream_query(g.copy[0][0]);
    if (cuda::is_sticky(own)) {
      char reason[sizeof g.reason];
      snprintf(reason, sizeof reason, "%s (seen while %s); the CUDA context can only be left by ending the process",
               cuda::error_words(own).c_str(), what);
      lose(g, reason);
      return lost_status(g);
    }
  }
  return error(cuda::errno_of(e), "device %d, %s: %s", g.device, what, cuda::error_words(e).c_str());
}

Status CudaDevices::health(int device) {
  core::must_be_outside("Devices::health");
  Gpu& g = gpu(device);
  if (g.lost.load()) return lost_status(g);
  if (!g.opened.load(std::memory_order_acquire)) return open_gpu(g);
  unsigned flags = 0;
  int active = 0;
  unsigned long long id = 0;
  // A reset destroys all our handles, and none may be used afterwards: look for it first.
  if (driver_.primary_state(g.device, &flags, &active) != CUDA_SUCCESS || active == 0 ||
      driver_.ctx_id(g.context, &id) != CUDA_SUCCESS || id != g.context_id) {
    g.reset.store(true);
    lose(g, "its CUDA context was destroyed (cudaDeviceReset, or the process is exiting)");
    return lost_status(g);
  }
  return {};
}

Status CudaDevices::any_gpu(Gpu** out) {
  Status status = error(EIO, "no device is left");
  for (const bool opened : {true, false})  // make no context while another will do
    for (auto& g : gpus_) {
      if (!fit(*g) || g->opened.load() != opened) continue;
      status = health(g->device);
      if (status.ok()) {
        *out = g.get();
        return {};
      }
    }
  return status;
}

// --- memory and streams ---------------------------------------------------------------------------------------------

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
  return error(ENOMEM, "no memory to know a stream by");
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
      VMEM_LOG_OFTEN(core::Level::error, "a wait for a stream of device %d is refused and taken again: %.*s", g.device,
                     static_cast<int>(s.text().size()), s.text().data());
    }
    usleep(1000);
  }
  return put;
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

bool CudaDevices::claim_process() {
  return !exists.exchange(true);
}

Status make_cuda_handles(size_t unit, std::unique_ptr<Devices>* out) {
  if (!core::is_power_of_two(unit) || unit < kUnit || unit > kLargestUnit)
    return error(EINVAL, "units of %zu bytes: they are a power of two from 2 to %zu MiB", unit, kLargestUnit >> 20);
  return make_cuda<CudaDevices>(out, unit);
}

extern const Backend handles_backend;
const Backend handles_backend = {"handles", true, nullptr, make_cuda_handles};

}  // namespace vmem::device
