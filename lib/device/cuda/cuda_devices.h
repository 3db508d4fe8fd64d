// Internals of the CUDA backends: cuda_device.cpp (start, end, health), cuda_handles.cpp (memory as
// physical handles), cuda_clear.h (zeros for these), cuda_stream.cpp (copies, streams, tickets).
// ManagedDevices (device/managed/cuda_managed.h) has managed memory instead of handles.
//
// Locks are leaves: none is taken under another, except Gpu::mutex under a lock of Clearing.
// - Gpu::open_mutex: first use; held while the context is made
// - Gpu::mutex: reason, idle streams and events
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/outside_lock.h"
#include "device/cuda/cuda_api.h"
#include "device/cuda/cuda_clear.h"
#include "device/piece_pool.h"
#include "device/units/units.h"

namespace vmem::device {

inline constexpr size_t kCopyStreams = 2;  // per direction: the next copy is issued while one runs

inline void* pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

struct PagingMemory;  // cuda_paging.cpp

// How a thread waits for an event: asleep until the device interrupts the CPU, or by polling.
enum class Waits : uint8_t { asleep, looking };
struct EventPool {
  std::vector<CUevent> idle;
  size_t made = 0;  // `idle` has capacity for all
};

struct Gpu {
  int device = 0;
  bool managed = false;  // has concurrent managed access
  bool handles = false;  // has virtual memory management
  bool exports = false;  // handles: can become descriptors
  bool rdma = false;     // handles: other devices can reach them by DMA
  bool dma_buf = false;
  std::atomic<bool> plain{false};       // handles: made without `exports` and `rdma`
  std::atomic<bool> maps_ahead{false};  // handles: mapping waits for copies to the device
  bool reads_host = false;              // kernels can load from pinned host memory at its own address
  std::mutex open_mutex;
  std::atomic<bool> opened{false};
  CUcontext context = nullptr;        // fixed once opened
  unsigned long long context_id = 0;  // likewise
  CUstream copy[2][kCopyStreams] = {};
  std::atomic<unsigned> next[2] = {};
  std::atomic<bool> watched{false};  // a thread polls for the end of a copy
  std::atomic<bool> lost{false};
  std::atomic<bool> reset{false};        // lost, and the driver unmapped its allocations: made parts, holes and traps
  PiecePools pieces;                     // handles
  CUdeviceptr windows[kUnitSizes] = {};  // handles: where pieces are mapped; fixed once made, under open_mutex
  size_t window_size = 0;                // of each window
  std::mutex mutex;
  char reason[300] = "";                              // protected by mutex
  std::vector<CUstream> idle_streams;                 // protected by mutex; nothing is queued on them
  std::vector<std::shared_ptr<PagingMemory>> paging;  // protected by mutex; of closed ranges
  size_t paging_made = 0;                             // protected by mutex
  std::byte* zeros = nullptr;                         // handles: kUnit of them, pinned; fixed once opened
  std::unique_ptr<cuda::Clearing> clearing;           // handles; null: does not work here. Fixed once opened
  size_t streams = 0;                                 // made; idle_streams has capacity for all. Protected by mutex
  EventPool events[2];                                // by Waits; protected by mutex
};

// Reserves capacity, so that `count` of them can be given back without allocating.
template <typename T>
void make_room(std::vector<T>& idle, size_t count) {
  if (idle.capacity() < count) idle.reserve(2 * count);
}

struct CudaEvent : Event {
  CudaEvent(Gpu& g, CUevent e, Waits w) : gpu(g), event(e), waits(w) {}
  ~CudaEvent() override {
    core::must_be_outside("the end of a ticket");
    if (gpu.lost.load()) return;  // died with its context
    std::lock_guard lock(gpu.mutex);
    gpu.events[static_cast<size_t>(waits)].idle.push_back(event);
  }
  Gpu& gpu;
  const CUevent event;
  const Waits waits;
  bool out = false;  // the end of a copy to host memory, which a thread waits for
  std::atomic<bool> reached{false};
};

class CudaDevices : public UnitDevices {
 public:
  explicit CudaDevices(size_t unit, CpuGate* gate = nullptr) : UnitDevices(gate, unit) {}
  ~CudaDevices() override;
  // False: the process has CUDA devices already. Otherwise it may make one CudaDevices, whose end
  // takes the claim back.
  static bool claim_process();
  core::Status start();
  const char* name() const override { return "handles"; }
  core::Status trim(int device, uint64_t keep) override;
  core::Status health(int device) override;
  core::Status probe(int device) override;
  core::Status check_stream(void* stream, int device) override;
  bool of_thread(void* stream) const override { return static_cast<CUstream>(stream) == CU_STREAM_PER_THREAD; }
  core::Status order_after(const Ticket& ticket, void* stream, int device_of_stream) override;
  core::Status record(void* stream, int device, Ticket* out) override;
  core::Status poll(const Ticket& ticket, bool* done) override;
  core::Status wait(const Ticket& ticket) override;
  core::Status drain(int device) override;
  bool maps_ahead(int device, size_t unit) override;
  core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                 std::unique_ptr<PagingWords>* out) override;

 protected:
  // Managed memory replaces these.
  virtual bool fit(const Gpu& g) const { return g.handles; }
  virtual const char* needed() const { return "virtual memory management"; }
  virtual core::Status load_calls() { return cuda::load_handles(&driver_); }
  // Tries the whole life of one unit on the first device that fits, which the device tier relies on.
  virtual core::Status try_device(int device);
  // Called with the new context current, while the device is opened.
  virtual core::Status prepare(Gpu& g);
  // Most bytes of one call that copies.
  virtual size_t copy_piece() const { return SIZE_MAX; }
  // Returns where copies reach the byte; *run: how many bytes from there on are adjacent.
  virtual uintptr_t window_of(uintptr_t block, size_t* run);

  Gpu& gpu(int device) { return *gpus_[static_cast<size_t>(device)]; }
  core::Status any_gpu(Gpu** out);
  // Turns the result of a CUDA call into a status. A sticky error of this device's own loses it.
  core::Status result(Gpu& g, CUresult e, const char* what);
  // Waits until all work on the stream has ended. Retries a wait that is refused while the device
  // works, because the caller then reuses the memory that is copied to and from. `e` is the result
  // of putting the work there and is returned first. Also fails once `other`, whose memory is
  // copied, is lost.
  core::Status finish(Gpu& g, CUstream stream, CUresult e, const char* what, Gpu* other = nullptr);
  core::Status lost_status(Gpu& g);
  core::Status take_stream(Gpu& g, CUstream* out);
  void give_stream(Gpu& g, CUstream stream);

  core::Status backend_reserve(Reservation& r) override;
  void backend_release(Reservation& r) override;
  core::Status backend_map(const Span&) override { return no_managed(); }
  core::Status backend_populate(const Span&, int) override { return no_managed(); }
  core::Status backend_migrate(const Span&, int) override { return no_managed(); }
  core::Status backend_advise(Range, Advice, int, bool) override { return no_managed(); }

  cuda::Driver driver_ = {};

 private:
  friend class CudaPagingWords;
  static core::Status no_managed() { return error(EOPNOTSUPP, "memory of this backend is not managed"); }
  core::Status backend_memory(int device, Memory* out) override;
  core::Status backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) override;
  core::Status backend_back(const Span& span, int device) override;
  void backend_unback(const Span& span) override;
  core::Status backend_take(int device, size_t size, uint32_t* piece) override;
  core::Status backend_send_piece(const Span& span, int device, uint32_t piece, int by, Ticket* done) override;
  void backend_give(int device, size_t size, uint32_t piece) override;
  core::Status backend_zero(const Span& span) override;
  core::Status backend_show(const Span& span) override;
  core::Status backend_hide(const Span& span) override;
  core::Status backend_share(const Span& span, Export how, int* descriptor) override;
  core::Status backend_show_to(const Span& span, int device, bool set) override;
  core::Status backend_pin(void* frames, size_t size) override;
  core::Status backend_unpin(void* frames) override;

  core::Status describe(int devices);
  // Makes the context and the streams, at the first use.
  core::Status open_gpu(Gpu& g);
  void lose(Gpu& g, const char* reason);
  core::Status take_event(Gpu& g, std::shared_ptr<CudaEvent>* out, Waits waits = Waits::asleep);
  core::Status not_capturing(Gpu& g, CUstream stream);
  // cuda_handles.cpp
  core::Status notice(Gpu& g);
  core::Status make_window(Gpu& g, size_t size);
  core::Status make_piece(Gpu& g, size_t size, uint32_t number, Piece* out);
  bool destroy_piece(size_t size, const Piece& piece);
  core::Status make_handle(Gpu& g, size_t size, CUmemGenericAllocationHandle* out);
  core::Status take_piece(Gpu& g, size_t size, uint32_t* out);
  bool may_see(PiecePool& pool, uint32_t piece, int device, const Gpu& owner);
  core::Status make_zeros(Gpu& g);
  void free_zeros(Gpu& g);
  bool mapping_waits_for_copies(Gpu& g);
  // Without the kernel, zeros always come over the link.
  void start_clearing(Gpu& g);
  // Makes the parts zeros before work that is put on the stream later. Waits for no kernel of the
  // application: a kernel makes the zeros if multiprocessors are free for it at once; otherwise
  // they come over the link.
  CUresult clear(Gpu& g, std::span<const cuda::Clearing::Part> parts, CUstream stream);
  // then: a stream that is also ordered after it, or null.
  bool clear_by_kernel(Gpu& g, std::span<const cuda::Clearing::Part> parts, const CudaEvent& cleared,
                       const CUstream* then);
  // A thread that maps may hold the driver's lock for a millisecond, until copies let it go on. So
  // threads that unmap go first.
  void let_unmapping_go_first();
  // cuda_paging.cpp
  core::Status make_paging_memory(Gpu& g, PagingMemory& m);
  void free_paging(Gpu& g);

  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::atomic<unsigned> unmapping_{0};  // threads that unmap
};

// Makes devices of class D, unless the process has CUDA devices already.
template <typename D, typename... Arguments>
core::Status make_cuda(std::unique_ptr<Devices>* out, Arguments... arguments) {
  out->reset();
  if (!CudaDevices::claim_process()) return error(EBUSY, "the CUDA devices of this process are in use already");
  auto devices = std::make_unique<D>(arguments...);
  if (core::Status s = devices->start(); !s.ok()) return s;
  *out = std::move(devices);
  return {};
}

}  // namespace vmem::device
