// The CUDA body. Every rule of order here was measured (a part of a managed range destroyed by munmap can be made again
// by mmap on the process's own /dev/nvidia-uvm file; prefetches of such parts only one at a time on an otherwise empty
// stream, synchronised; never a copy queued behind one).
//
// Locks, none held while another is taken, all leaves: uvm_mutex_ (the file), Gpu::open_mutex (first use; held over
// context creation), Gpu::mutex (reason, idle streams and events).
#include "device/cuda_device.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/log.h"
#include "core/step.h"
#include "device/cuda_api.h"
#include "device/managed.h"
#include "device/park.h"

namespace vmem::device {

using core::error;
using core::Status;
using cuda::Enter;
using cuda::Timeline;

namespace {

constexpr size_t kCopyStreams = 2;  // a direction: the next copy is issued while one runs

void* pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

struct Gpu {
  int device = 0;
  bool managed = false;  // concurrent managed access
  std::mutex open_mutex;
  std::atomic<bool> opened{false};
  CUcontext context = nullptr;        // fixed once opened
  unsigned long long context_id = 0;  // likewise
  cudaStream_t copy[2][kCopyStreams] = {};
  std::atomic<unsigned> next[2] = {};
  std::atomic<bool> lost{false};
  std::atomic<bool> reset{false};  // lost with all its allocations
  std::mutex mutex;
  std::string reason;                      // protected by mutex
  std::vector<cudaStream_t> idle_streams;  // protected by mutex; nothing is queued on them
  std::vector<cudaEvent_t> idle_events;    // protected by mutex
};

struct CudaEvent : Event {
  CudaEvent(Gpu& g, cudaEvent_t e) : gpu(g), event(e) {}
  ~CudaEvent() override {
    if (gpu.lost.load()) return;  // died with its context
    std::lock_guard lock(gpu.mutex);
    gpu.idle_events.push_back(event);
  }
  Gpu& gpu;
  const cudaEvent_t event;
  std::atomic<bool> reached{false};
};

class CudaDevices final : public ManagedDevices {
 public:
  ~CudaDevices() override;
  Status start();
  const char* name() const override { return "cuda"; }
  Status health(int device) override;
  Status check_stream(void* stream, int device) override;
  Status order_after(const Ticket& ticket, void* stream, int device_of_stream) override;
  Status record(void* stream, int device, Ticket* out) override;
  Status poll(const Ticket& ticket, bool* done) override;
  Status wait(const Ticket& ticket) override;

 private:
  Status body_memory(int device, Memory* out) override;
  Status body_reserve(Reservation& r) override;
  void body_release(Reservation& r) override;
  Status body_map(const Span& span) override;
  Status body_populate(const Span& span, int device) override;
  Status body_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) override;
  Status body_migrate(const Span& span, int to) override;
  Status body_advise(Range range, Advice advice, int location, bool set) override;
  Status body_pin(void* frames, size_t size) override;
  Status body_unpin(void* frames) override;

  Gpu& gpu(int device) { return *gpus_[static_cast<size_t>(device)]; }
  Status describe(int devices);
  // Context and streams, at the first use.
  Status open_gpu(Gpu& g);
  Status any_gpu(Gpu** out);
  void lose(Gpu& g, std::string reason);
  // What a CUDA call answered, as a status; a sticky error loses the device.
  Status result(Gpu& g, cudaError_t e, const char* what);
  Status lost_status(Gpu& g);
  Status take_stream(Gpu& g, cudaStream_t* out);
  void give_stream(Gpu& g, cudaStream_t stream);
  Status take_event(Gpu& g, std::shared_ptr<CudaEvent>* out);
  // Prefetch on an empty stream, synchronised.
  Status prefetch_now(Gpu& g, uintptr_t address, size_t size, const char* what);
  Status not_capturing(Gpu& g, cudaStream_t stream);
  Status try_unit(int device);
  int find_uvm_file(uintptr_t address, size_t size);

  cuda::Driver driver_ = {};
  std::vector<std::unique_ptr<Gpu> > gpus_;
  std::mutex uvm_mutex_;
  int uvm_file_ =
      -1;  // protected by uvm_mutex_; our own duplicate, so that its number cannot come to mean another file
  bool installed_ = false;
};

std::atomic<bool> exists{false};

// --- start and end --------------------------------------------------------------------------------------------------

Link link_between(int a, int b) {
  if (a == b) return Link::self;
  int can = 0, atomics = 0;
  if (cudaDeviceCanAccessPeer(&can, a, b) != cudaSuccess || can == 0) return Link::none;
  // Peers on PCIe have no atomics of their own.
  cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, a, b);
  return atomics != 0 ? Link::nvlink : Link::pcie;
}

int numa_node_of(const std::string& pci) {
  std::string path = "/sys/bus/pci/devices/" + pci + "/numa_node";
  for (char& c : path) c = static_cast<char>(tolower(c));
  int node = -1;
  if (FILE* f = fopen(path.c_str(), "re"); f != nullptr) {
    if (fscanf(f, "%d", &node) != 1) node = -1;
    fclose(f);
  }
  return node;
}

Status CudaDevices::describe(int devices) {
  for (int d = 0; d < devices; ++d) {
    cudaDeviceProp properties;
    if (cudaError_t e = cudaGetDeviceProperties(&properties, d); e != cudaSuccess)
      return error(ENODEV, "device %d cannot be described: %s", d, cuda::error_words(e).c_str());
    char pci[32] = "";
    cudaDeviceGetPCIBusId(pci, sizeof pci, d);
    Info info{d, properties.name, pci, numa_node_of(pci), properties.totalGlobalMem, {}};
    for (int other = 0; other < devices; ++other) info.links.push_back(link_between(d, other));
    infos_.push_back(std::move(info));
    auto g = std::make_unique<Gpu>();
    g->device = d;
    g->managed = properties.concurrentManagedAccess != 0;
    gpus_.push_back(std::move(g));
  }
  cudaGetLastError();
  return {};
}

Status CudaDevices::start() {
  int devices = 0;
  if (Status s = cuda::load_driver(&driver_, &devices); !s.ok()) return s;
  if (devices > static_cast<int>(kMaxDevices)) devices = static_cast<int>(kMaxDevices);
  if (Status s = describe(devices); !s.ok()) return s;
  int first = 0;
  while (first < devices && !gpu(first).managed) ++first;
  if (first == devices)
    return error(ENODEV, "no device has concurrent managed access (needed: Linux, Pascal or later, not in WSL)");
  if (Status s = park::install(); !s.ok()) return s;
  installed_ = true;
  if (Status s = try_unit(first); !s.ok())
    return error(ENODEV,
                 "this driver does not let a destroyed part of a managed range be made again (tried with one "
                 "block on device %d): %s",
                 first, std::string(s.text()).c_str());
  return {};
}

// The whole life of one unit: what the device tier stands on.
Status CudaDevices::try_unit(int device) {
  void* base = nullptr;
  if (Status s = reserve(kUnit, device, &base); !s.ok()) return s;
  const Range unit{reinterpret_cast<uintptr_t>(base), kUnit};
  const std::span<const Range> range(&unit, 1);
  constexpr size_t kWords = core::kPage / sizeof(uint64_t);
  auto* page = static_cast<uint64_t*>(std::aligned_alloc(core::kPage, core::kPage));
  Status status = page == nullptr ? error(ENOMEM, "no memory for a page") : pin(page, core::kPage);
  const bool pinned = status.ok();
  for (uint64_t round = 1; round <= 2 && status.ok(); ++round) {
    const Copy first{unit.address, page, core::kPage}, last{unit.address + kUnit - core::kPage, page, core::kPage};
    Ticket done;
    bool torn = false;
    auto step = [&](Status s) {
      if (status.ok()) status = std::move(s);
      return status.ok();
    };
    if (!step(prepare(range, device, &torn))) break;
    // Its last page was never written: zeros, whatever the unit held in the round before.
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
    step(settle(range));
  }
  if (pinned) unpin(page).ignore();
  std::free(page);
  Status released = release(base);
  return status.ok() ? released : status;
}

CudaDevices::~CudaDevices() {
  for (auto& g : gpus_) {
    if (!g->opened.load() || !health(g->device).ok()) continue;
    {
      Enter here(driver_, g->context);
      if (!here.ok()) continue;
      for (auto& direction : g->copy)
        for (cudaStream_t s : direction) cudaStreamDestroy(s);
      for (cudaStream_t s : g->idle_streams) cudaStreamDestroy(s);
      for (cudaEvent_t e : g->idle_events) cudaEventDestroy(e);
    }
    driver_.primary_release(g->device);
  }
  if (installed_) park::uninstall();
  if (uvm_file_ >= 0) close(uvm_file_);
  exists.store(false);
}

Status CudaDevices::open_gpu(Gpu& g) {
  if (g.opened.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(g.open_mutex);
  if (g.opened.load()) return {};
  if (!g.managed) return error(ENODEV, "device %d has no concurrent managed access", g.device);
  if (CUresult r = driver_.primary_retain(&g.context, g.device); r != CUDA_SUCCESS)
    return error(r == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : ENODEV, "device %d: no CUDA context (driver error %d)",
                 g.device, static_cast<int>(r));
  Enter here(driver_, g.context);
  cudaError_t e = here.ok() && driver_.ctx_id(g.context, &g.context_id) == CUDA_SUCCESS ? cudaSuccess
                                                                                        : cudaErrorDeviceUninitialized;
  for (auto& direction : g.copy)
    for (cudaStream_t& s : direction)
      if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  if (e != cudaSuccess) {
    for (auto& direction : g.copy)
      for (cudaStream_t& s : direction)
        if (s != nullptr) cudaStreamDestroy(std::exchange(s, nullptr));
    driver_.primary_release(g.device);
    return error(cuda::errno_of(e), "device %d: no streams: %s", g.device, cuda::error_words(e).c_str());
  }
  g.opened.store(true, std::memory_order_release);
  return {};
}

// --- health ---------------------------------------------------------------------------------------------------------

void CudaDevices::lose(Gpu& g, std::string reason) {
  {
    std::lock_guard lock(g.mutex);
    if (!g.lost.load()) {
      core::log(core::Level::error, "device %d is lost: %s", g.device, reason.c_str());
      g.reason = std::move(reason);
    }
    g.lost.store(true);
  }
}

Status CudaDevices::lost_status(Gpu& g) {
  std::lock_guard lock(g.mutex);
  return error(EIO, "device %d is lost: %s", g.device, g.reason.c_str());
}

Status CudaDevices::result(Gpu& g, cudaError_t e, const char* what) {
  if (e == cudaSuccess) return {};
  if (cuda::is_sticky(e)) {
    lose(g, core::strprintf("%s (seen while %s); the CUDA context can only be left by ending the process",
                            cuda::error_words(e).c_str(), what));
    return lost_status(g);
  }
  return error(cuda::errno_of(e), "device %d, %s: %s", g.device, what, cuda::error_words(e).c_str());
}

Status CudaDevices::health(int device) {
  Gpu& g = gpu(device);
  if (g.lost.load()) return lost_status(g);
  if (!g.opened.load(std::memory_order_acquire)) return open_gpu(g);
  unsigned flags = 0;
  int active = 0;
  unsigned long long id = 0;
  // A reset takes every handle of ours along; none may be touched afterwards, so it is looked for first.
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
  for (const bool opened : {true, false})  // no context is made while another will do
    for (auto& g : gpus_) {
      if (!g->managed || g->opened.load() != opened) continue;
      status = health(g->device);
      if (status.ok()) {
        *out = g.get();
        return {};
      }
    }
  return status;
}

// --- memory ---------------------------------------------------------------------------------------------------------

Status CudaDevices::body_memory(int device, Memory* out) {
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  size_t free_bytes = 0, total_bytes = 0;
  const cudaError_t e = cudaMemGetInfo(&free_bytes, &total_bytes);
  out->free = free_bytes;
  out->total = total_bytes;
  return result(g, e, "asking for free memory");
}

Status CudaDevices::body_reserve(Reservation& r) {
  Gpu& g = gpu(r.device);
  Enter here(driver_, g.context);
  Timeline span("reserve");
  // Managed memory of 2 MiB and more comes aligned to it; nothing documents that, so the rare other case takes a unit
  // more than it needs.
  for (const size_t more : {size_t{0}, kUnit}) {
    void* p = nullptr;
    if (cudaError_t e = cudaMallocManaged(&p, r.size + more, cudaMemAttachGlobal); e != cudaSuccess)
      return result(g, e, "reserving managed address space");
    const auto start = reinterpret_cast<uintptr_t>(p);
    r.base = core::round_up(start, kUnit);
    if (r.base + r.size <= start + r.size + more) {
      r.body = p;
      r.body_size = r.size + more;
      break;
    }
    cudaFree(p);
  }
  if (r.body == nullptr) return error(EIO, "managed memory of %zu bytes did not come aligned", r.size);
  place_hole(reinterpret_cast<uintptr_t>(r.body), r.body_size);
  return {};
}

void CudaDevices::body_release(Reservation& r) {
  Gpu& g = gpu(r.device);
  Timeline span("release");
  if (health(r.device).ok()) {
    Enter here(driver_, g.context);
    Status s = result(g, cudaFree(r.body), "freeing a managed range");
    if (s.ok()) return;
    core::log(core::Level::warning, "%s", std::string(s.text()).c_str());
  }
  // CUDA believes that the range exists, or forgot it in a reset. Destroy what is ours in it and keep the address space
  // without access for ever: a later mapping there could be torn down by the driver at exit.
  if (!g.reset.load()) return place_hole(reinterpret_cast<uintptr_t>(r.body), r.body_size);
  for (size_t i = 0; i < r.size / kUnit; ++i)  // after a reset, made parts may be anybody's by now
    if (!is_made(r.units[i].state.load())) place_hole(r.base + i * kUnit, kUnit);
}

// The process has several files on /dev/nvidia-uvm open; one takes mappings. Maps the range with it.
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

Status CudaDevices::body_map(const Span& span) {
  const uintptr_t address = span.address();
  std::unique_lock lock(uvm_mutex_);
  if (uvm_file_ < 0) {
    // Searching leaves the range open to the CPU for longer than it needs to be: never done with data at stake, since
    // try_unit() comes first.
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

Status CudaDevices::take_stream(Gpu& g, cudaStream_t* out) {
  {
    std::lock_guard lock(g.mutex);
    if (!g.idle_streams.empty()) {
      *out = g.idle_streams.back();
      g.idle_streams.pop_back();
      return {};
    }
  }
  return result(g, cudaStreamCreateWithFlags(out, cudaStreamNonBlocking), "creating a stream");
}

void CudaDevices::give_stream(Gpu& g, cudaStream_t stream) {
  std::lock_guard lock(g.mutex);
  g.idle_streams.push_back(stream);
}

Status CudaDevices::prefetch_now(Gpu& g, uintptr_t address, size_t size, const char* what) {
  Enter here(driver_, g.context);
  cudaStream_t stream = nullptr;
  if (Status s = take_stream(g, &stream); !s.ok()) return s;
  cudaError_t e = cuda::prefetch(pointer(address), size, g.device, stream);
  core::step("device.prefetched");
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  Status status = result(g, e, what);
  if (!g.lost.load()) give_stream(g, stream);
  return status;
}

Status CudaDevices::body_populate(const Span& span, int device) {
  Timeline timeline("prepare");
  return prefetch_now(gpu(device), span.address(), span.size(), "making a block");
}

Status CudaDevices::body_migrate(const Span& span, int to) {
  Timeline timeline("migrate");
  for (size_t i = 0; i < span.count; ++i) {
    const int from = span.unit(i).device.load();
    if (from == to || (i != 0 && from == span.unit(i - 1).device.load())) continue;
    if (Status s = health(from); !s.ok()) return s;
    Enter here(driver_, gpu(from).context);
    cudaDeviceEnablePeerAccess(to, 0);  // faster where it can be had; on already, or not to be had: also right
    cudaGetLastError();
  }
  return prefetch_now(gpu(to), span.address(), span.size(), "moving a block to another device");
}

Status CudaDevices::body_advise(Range range, Advice advice, int location, bool set) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  cudaMemoryAdvise kind = cudaMemAdviseSetReadMostly;
  switch (advice) {
    case Advice::preferred_location:
      kind = set ? cudaMemAdviseSetPreferredLocation : cudaMemAdviseUnsetPreferredLocation;
      break;
    case Advice::read_mostly:
      kind = set ? cudaMemAdviseSetReadMostly : cudaMemAdviseUnsetReadMostly;
      location = g->device;  // ignored, but must exist
      break;
    case Advice::accessed_by:
      kind = set ? cudaMemAdviseSetAccessedBy : cudaMemAdviseUnsetAccessedBy;
      break;
  }
  // Advice names a device whose context must exist.
  if (location != kHost)
    if (Status s = health(location); !s.ok()) return s;
  Enter here(driver_, g->context);
  return result(*g, cuda::advise(pointer(range.address), range.size, kind, location), "giving advice");
}

Status CudaDevices::body_pin(void* frames, size_t size) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  Enter here(driver_, g->context);
  return result(*g, cudaHostRegister(frames, size, cudaHostRegisterPortable), "pinning host memory");
}

Status CudaDevices::body_unpin(void* frames) {
  Gpu* g = nullptr;
  if (Status s = any_gpu(&g); !s.ok()) return s;
  Enter here(driver_, g->context);
  return result(*g, cudaHostUnregister(frames), "unpinning host memory");
}

// --- copies, streams, tickets ---------------------------------------------------------------------------------------

Status CudaDevices::take_event(Gpu& g, std::shared_ptr<CudaEvent>* out) {
  cudaEvent_t event = nullptr;
  {
    std::lock_guard lock(g.mutex);
    if (!g.idle_events.empty()) {
      event = g.idle_events.back();
      g.idle_events.pop_back();
    }
  }
  if (event == nullptr) {
    // Blocking: a waiting thread sleeps instead of turning a core.
    const cudaError_t e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
    if (Status s = result(g, e, "creating an event"); !s.ok()) return s;
  }
  *out = std::make_shared<CudaEvent>(g, event);
  return {};
}

Status CudaDevices::body_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) {
  const bool in = direction == Direction::in;
  Timeline timeline(in ? "copy in" : "copy out");
  Gpu& g = gpu(device);
  Enter here(driver_, g.context);
  std::shared_ptr<CudaEvent> event;
  if (Status s = take_event(g, &event); !s.ok()) return s;
  const auto side = static_cast<size_t>(direction);
  cudaStream_t stream = g.copy[side][g.next[side].fetch_add(1) % kCopyStreams];
  cudaError_t e = cudaSuccess;
  for (const Copy& copy : copies) {
    void* block = pointer(copy.block);
    e = in ? cudaMemcpyAsync(block, copy.frame, copy.size, cudaMemcpyHostToDevice, stream)
           : cudaMemcpyAsync(copy.frame, block, copy.size, cudaMemcpyDeviceToHost, stream);
    if (e != cudaSuccess) break;
  }
  if (e == cudaSuccess) e = cudaEventRecord(event->event, stream);
  if (e != cudaSuccess) {
    Status status = result(g, e, in ? "copying to it" : "copying from it");
    // Those already issued still use their frames, which the caller takes back on error.
    if (!g.lost.load()) cudaStreamSynchronize(stream);
    return status;
  }
  *done = std::move(event);
  return {};
}

Status CudaDevices::not_capturing(Gpu& g, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t e = cudaStreamIsCapturing(stream, &capture);
  if (e == cudaErrorStreamCaptureImplicit || capture != cudaStreamCaptureStatusNone) {
    if (e != cudaSuccess) cudaGetLastError();
    return error(EBUSY, "the stream captures a graph: acquire first, launch the finished graph, then release");
  }
  return result(g, e, "looking at a stream");
}

Status CudaDevices::check_stream(void* stream, int device) {
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  auto* const handle = static_cast<cudaStream_t>(stream);
  CUcontext context = nullptr;
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    driver_.ctx_current(&context);  // none yet: the runtime's default, device 0
  } else if (driver_.stream_ctx(handle, &context) != CUDA_SUCCESS) {
    return error(EINVAL, "%p is not a CUDA stream of this process", stream);
  }
  if (context != g.context) {
    CUdevice owner = 0;
    if (context != nullptr) {
      Enter there(driver_, context);
      if (!there.ok() || driver_.ctx_device(&owner) != CUDA_SUCCESS)
        return error(EINVAL, "the context of stream %p is gone", stream);
    }
    if (owner != device)
      return error(EINVAL, "the stream %p is device %d's, not device %d's%s", stream, owner, device,
                   handle == nullptr ? " (the default stream follows cudaSetDevice)" : "");
  }
  Enter here(driver_, g.context);
  return not_capturing(g, handle);
}

Status CudaDevices::order_after(const Ticket& ticket, void* stream, int device_of_stream) {
  if (Status s = usable(device_of_stream); !s.ok()) return s;
  Gpu& g = gpu(device_of_stream);
  auto* const handle = static_cast<cudaStream_t>(stream);
  {
    Enter here(driver_, g.context);
    if (Status s = not_capturing(g, handle); !s.ok()) return s;
  }
  bool done = false;
  if (Status s = poll(ticket, &done); !s.ok() || done) return s;
  Enter here(driver_, g.context);
  return result(g, cudaStreamWaitEvent(handle, static_cast<CudaEvent*>(ticket.get())->event, 0),
                "ordering a stream after a copy");
}

Status CudaDevices::record(void* stream, int device, Ticket* out) {
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  auto* const handle = static_cast<cudaStream_t>(stream);
  Enter here(driver_, g.context);
  if (Status s = not_capturing(g, handle); !s.ok()) return s;
  std::shared_ptr<CudaEvent> event;
  if (Status s = take_event(g, &event); !s.ok()) return s;
  const cudaError_t e = cudaEventRecord(event->event, handle);
  if (e == cudaErrorInvalidResourceHandle) {
    cudaGetLastError();
    return error(EINVAL, "the stream %p is not device %d's", stream, device);
  }
  if (Status s = result(g, e, "marking a stream"); !s.ok()) return s;
  *out = std::move(event);
  return {};
}

Status CudaDevices::poll(const Ticket& ticket, bool* done) {
  *done = true;
  if (ticket == nullptr) return {};
  auto* event = static_cast<CudaEvent*>(ticket.get());
  if (Status s = health(event->gpu.device); !s.ok()) return s;
  if (event->reached.load(std::memory_order_acquire)) return {};
  Enter here(driver_, event->gpu.context);
  const cudaError_t e = cudaEventQuery(event->event);
  if (e == cudaErrorNotReady) {
    cudaGetLastError();
    *done = false;
    return {};
  }
  if (Status s = result(event->gpu, e, "waiting for a stream"); !s.ok()) return s;
  event->reached.store(true, std::memory_order_release);
  return {};
}

Status CudaDevices::wait(const Ticket& ticket) {
  bool done = false;
  if (Status s = poll(ticket, &done); !s.ok() || done) return s;
  auto* event = static_cast<CudaEvent*>(ticket.get());
  Enter here(driver_, event->gpu.context);
  if (Status s = result(event->gpu, cudaEventSynchronize(event->event), "waiting for a stream"); !s.ok()) return s;
  event->reached.store(true, std::memory_order_release);
  return {};
}

}  // namespace

Status make_cuda_devices(std::unique_ptr<Devices>* out) {
  out->reset();
  if (exists.exchange(true)) return error(EBUSY, "the CUDA devices of this process are in use already");
  auto devices = std::make_unique<CudaDevices>();
  if (Status s = devices->start(); !s.ok()) return s;
  *out = std::move(devices);
  return {};
}

}  // namespace vmem::device
