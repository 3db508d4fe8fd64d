// The words of the paging protocol on CUDA: words that kernels poll are in the device's memory, the
// ring is in pinned host memory.
//
// - The host stores words by the stream's own write operations, which come after the copies that
//   the stream waits for. It reads `use` by copying it out.
// - There are two streams: arrivals waits for copies of blocks, departures waits for nothing.
// - Nothing waits for a kernel or needs a multiprocessor. So memory is mapped as handles are
//   (cudaFree would wait), and the next range gets the memory of a closed one.
#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "device/cuda/cuda_devices.h"
#include "device/paging_words.h"

namespace vmem::device {

using cuda::Enter;
using paging::Control;
using paging::HostAtomics;

namespace {

constexpr uint32_t kCells = 8192;

struct Marks {  // stored by streams, read by the host
  uint64_t reached, settled;
};

size_t device_bytes(uint32_t blocks) {
  return core::round_up(sizeof(Control<HostAtomics>) + blocks * (4 * sizeof(uint64_t) + sizeof(uint32_t)) + 64, kUnit);
}
size_t host_bytes(uint32_t blocks) {
  return core::round_up(sizeof(Marks) + kCells * sizeof(uint64_t) + blocks * (sizeof(uint64_t) + sizeof(uint32_t)),
                        core::kPage);
}

CUdeviceptr address_of(const void* word) {
  return reinterpret_cast<CUdeviceptr>(word);
}

}  // namespace

struct PagingMemory {
  uint32_t room = 0;  // blocks
  CUdeviceptr words = 0;
  CUmemGenericAllocationHandle handle = 0;
  bool mapped = false;
  std::byte* host = nullptr;
  bool pinned = false;
  CUstream arrivals = nullptr, departures = nullptr;
  CUevent departed = nullptr;
};

class CudaPagingWords final : public PagingWords {
 public:
  CudaPagingWords(CudaDevices& devices, Gpu& gpu, std::shared_ptr<PagingMemory> memory)
      : PagingWords(devices, gpu.device), devices_(devices), gpu_(gpu), memory_(std::move(memory)) {}
  ~CudaPagingWords() override {
    if (abandoned_ || gpu_.lost.load()) return;
    const std::lock_guard lock(gpu_.mutex);
    gpu_.paging.push_back(std::move(memory_));  // make_paging_words() has reserved capacity
  }

  // Waits for the work that the last range has put on the streams.
  Status start(uint32_t blocks, uint32_t frames) {
    auto* const control = reinterpret_cast<Control<HostAtomics>*>(memory_->words);
    auto* const state = reinterpret_cast<uint64_t*>(memory_->words + core::round_up(sizeof *control, size_t{64}));
    auto* const use = reinterpret_cast<uint32_t*>(state + 4 * size_t{blocks});
    marks_ = reinterpret_cast<Marks*>(memory_->host);
    auto* const ring = reinterpret_cast<uint64_t*>(marks_ + 1);
    written_ = ring + kCells;
    use_ = reinterpret_cast<uint32_t*>(written_ + blocks);
    // Words that are copied out are adjacent.
    uint64_t *const asked = state + blocks, *const home = asked + blocks, *const written = home + blocks;
    table_ = {state, asked, written, use, control, ring, kCells, blocks, frames, home};
    // Make the device's words here and copy them as a whole.
    const size_t bytes = reinterpret_cast<uintptr_t>(use + blocks) - memory_->words;
    std::vector<uint64_t> image((bytes + 7) / 8 + 1);
    auto* const copy = reinterpret_cast<std::byte*>(image.data());
    const auto here = [&](const void* word) { return copy + (reinterpret_cast<uintptr_t>(word) - memory_->words); };
    Table local = table_;
    local.state = reinterpret_cast<uint64_t*>(here(table_.state));
    local.asked = local.state + blocks;
    local.home = local.asked + blocks;
    local.written = local.home + blocks;
    local.use = reinterpret_cast<uint32_t*>(local.written + blocks);
    local.control = reinterpret_cast<Control<HostAtomics>*>(copy);
    paging::initialise(local);
    const Enter enter(devices_.driver_, gpu_.context);
    CUresult e = devices_.driver_.stream_synchronize(memory_->arrivals);
    if (e == CUDA_SUCCESS) e = devices_.driver_.stream_synchronize(memory_->departures);
    *marks_ = {};  // only now: the last range's work on the streams stored its own marks
    memset(written_, 0, blocks * (sizeof *written_ + sizeof *use_));
    if (e == CUDA_SUCCESS) e = devices_.driver_.copy_in(memory_->words, copy, bytes, memory_->departures);
    if (e == CUDA_SUCCESS) e = devices_.driver_.stream_synchronize(memory_->departures);
    return devices_.result(gpu_, e, "clearing the words of blocks");
  }

  void* arrivals() const override { return memory_->arrivals; }
  void* departures() const override { return memory_->departures; }

  Status set_state(uint32_t block, uint64_t word, bool arrives) override {
    if (!arrives) {
      departed_ = true;
      return write(memory_->departures, &table_.state[block], word);
    }
    if (departed_) {  // the same block may have left just before
      const Enter enter(devices_.driver_, gpu_.context);
      CUresult e = devices_.driver_.event_record(memory_->departed, memory_->departures);
      if (e == CUDA_SUCCESS) e = devices_.driver_.stream_wait_event(memory_->arrivals, memory_->departed, 0);
      if (Status s = devices_.result(gpu_, e, "ordering the words of blocks"); !s.ok()) return s;
      departed_ = false;
    }
    return write(memory_->arrivals, &table_.state[block], word);
  }
  bool reads_host() const override { return gpu_.reads_host; }
  Status set_home(uint32_t block, uint64_t address) override {
    departed_ = true;
    return write(memory_->departures, &table_.home[block], address);
  }
  Status mark(uint64_t number) override { return write(memory_->arrivals, &marks_->reached, number); }
  uint64_t reached() const override { return __atomic_load_n(&marks_->reached, __ATOMIC_ACQUIRE); }

  Status settle() override {
    {
      const Enter enter(devices_.driver_, gpu_.context);
      const CUresult e = devices_.driver_.copy_out(
          written_, address_of(table_.written), table_.blocks * (sizeof *written_ + sizeof *use_), memory_->departures);
      if (Status s = devices_.result(gpu_, e, "reading the words of blocks"); !s.ok()) return s;
    }
    if (Status s = write(memory_->departures, &marks_->settled, ++settled_); !s.ok()) return s;
    for (unsigned look = 1; __atomic_load_n(&marks_->settled, __ATOMIC_ACQUIRE) < settled_; ++look) {
      if (look % 64 == 0) sched_yield();
      if (look % 16384 != 0) continue;
      const Enter enter(devices_.driver_, gpu_.context);
      const CUresult e = devices_.driver_.stream_query(memory_->departures);
      if (e == CUDA_ERROR_NOT_READY) {
        usleep(100);
        continue;
      }
      if (Status s = devices_.result(gpu_, e, "reading the words of blocks"); !s.ok()) return s;
    }
    return {};
  }
  uint32_t use(uint32_t block) const override { return use_[block]; }
  uint64_t written(uint32_t block) const override { return written_[block]; }
  Status progress(uint64_t number) override { return write(memory_->departures, &table_.control->progress, number); }
  Status taken(uint64_t cells) override { return write(memory_->departures, &table_.control->ring_taken, cells); }
  Status end(paging::Answer why) override {
    const Enter enter(devices_.driver_, gpu_.context);
    return devices_.result(gpu_,
                           devices_.driver_.stream_write32(memory_->departures, address_of(&table_.control->ended),
                                                           static_cast<cuuint32_t>(why), 0),
                           "ending requests");
  }
  void abandon() override { abandoned_ = true; }

 private:
  Status write(CUstream stream, const uint64_t* word, uint64_t value) {
    const Enter enter(devices_.driver_, gpu_.context);
    return devices_.result(gpu_, devices_.driver_.stream_write64(stream, address_of(word), value, 0),
                           "storing the words of blocks");
  }

  CudaDevices& devices_;
  Gpu& gpu_;
  std::shared_ptr<PagingMemory> memory_;
  Marks* marks_ = nullptr;
  uint64_t* written_ = nullptr;  // as last copied out; use_ follows
  uint32_t* use_ = nullptr;
  uint64_t settled_ = 0;
  bool departed_ = false;  // departures has work that arrivals must come after
  bool abandoned_ = false;
};

namespace {

void unmap_words(const cuda::Driver& driver, const PagingMemory& memory) {
  const size_t size = device_bytes(memory.room);
  if (memory.mapped) driver.mem_unmap(memory.words, size);
  if (memory.handle != 0) driver.mem_release(memory.handle);
  if (memory.words != 0) driver.address_free(memory.words, size);
}

// Its streams are empty, and no kernel uses it.
void free_memory(const cuda::Driver& driver, const PagingMemory& memory) {
  for (CUstream s : {memory.arrivals, memory.departures})
    if (s != nullptr) driver.stream_destroy(s);
  if (memory.departed != nullptr) driver.event_destroy(memory.departed);
  if (memory.pinned) driver.host_unregister(memory.host);
  if (memory.host != nullptr) munmap(memory.host, host_bytes(memory.room));
  unmap_words(driver, memory);
}

}  // namespace

void CudaDevices::free_paging(Gpu& g) {
  for (const auto& memory : g.paging) free_memory(driver_, *memory);
  g.paging.clear();
}

Status CudaDevices::make_paging_memory(Gpu& g, PagingMemory& m) {
  const size_t size = device_bytes(m.room);
  CUmemAllocationProp what = {};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  what.location.id = g.device;
  CUmemAccessDesc access = {};
  access.location = what.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const char* const doing = "making room for the words of blocks";
  const Enter enter(driver_, g.context);
  Status s = result(g, driver_.address_reserve(&m.words, size, kUnit, 0, 0), doing);
  if (s.ok()) s = result(g, driver_.mem_create(&m.handle, size, &what, 0), doing);
  if (s.ok()) s = result(g, driver_.mem_map(m.words, size, 0, m.handle, 0), doing);
  m.mapped = s.ok();
  if (s.ok()) s = result(g, driver_.mem_set_access(m.words, size, &access, 1), doing);
  if (!s.ok()) return s;
  void* const host =
      mmap(nullptr, host_bytes(m.room), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (host == MAP_FAILED) return core::system_error(errno, "no memory for a ring of requests");
  m.host = static_cast<std::byte*>(host);
  madvise(host, host_bytes(m.room), MADV_DONTFORK);
  CUresult e =
      driver_.host_register(host, host_bytes(m.room), CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  m.pinned = e == CUDA_SUCCESS;
  // The ring needs one address on both sides.
  CUdeviceptr seen = 0;
  if (e == CUDA_SUCCESS) e = driver_.host_device_pointer(&seen, host, 0);
  if (e == CUDA_SUCCESS && seen != address_of(host))
    return error(EOPNOTSUPP, "device %d has another address for pinned memory of the host", g.device);
  for (CUstream* stream : {&m.arrivals, &m.departures})
    if (e == CUDA_SUCCESS) e = driver_.stream_create(stream, CU_STREAM_NON_BLOCKING, 0);
  if (e == CUDA_SUCCESS) e = driver_.event_create(&m.departed, CU_EVENT_DISABLE_TIMING);
  return result(g, e, doing);
}

Status CudaDevices::make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                      std::unique_ptr<PagingWords>* out) try {
  if (Status s = usable(device); !s.ok()) return s;
  Gpu& g = gpu(device);
  int can = 0;
  if (driver_.device_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) != CUDA_SUCCESS ||
      can == 0)
    return error(EOPNOTSUPP, "streams of device %d cannot store words of 64 bits", device);
  std::shared_ptr<PagingMemory> memory;
  {
    const std::lock_guard lock(g.mutex);
    const auto fits = std::find_if(g.paging.begin(), g.paging.end(), [&](const auto& m) { return m->room >= blocks; });
    if (fits != g.paging.end()) {
      memory = std::move(*fits);
      g.paging.erase(fits);
    } else {
      make_room(g.paging, ++g.paging_made);
    }
  }
  if (memory == nullptr) {
    memory = std::make_shared<PagingMemory>();
    memory->room = blocks;
    if (Status s = make_paging_memory(g, *memory); !s.ok()) {
      const Enter enter(driver_, g.context);
      if (!g.lost.load()) free_memory(driver_, *memory);
      return s;
    }
  }
  auto words = std::make_unique<CudaPagingWords>(*this, g, std::move(memory));
  if (Status s = words->start(blocks, frames); !s.ok()) return s;
  *out = std::move(words);
  return {};
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory for the words of %u blocks", blocks);
}

}  // namespace vmem::device
