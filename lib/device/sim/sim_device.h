// The simulated backend: devices whose memory is host memory, with the call semantics of CUDA's
// unified memory. It tests the whole device tier without a GPU.
//
// - SimOptions::handles: devices have page tables of their own instead, as with physical handles
//   (CpuView::split).
// - A made unit is a part of one process-wide memfd, mapped shared at its address for the CPU. The
//   whole range is also mapped at a second address for kernels and copies, so that mprotect does
//   not stop them.
// - Streams are threads. Kernels are functions that reach blocks through SimKernel::at(), which
//   checks what a GPU would check, and more:
//   - A hole, or a unit on a device without peer access: error 700, sticky, as with CUDA.
//   - Wrong data with CUDA; here error 700 and an entry in violations(): an access to bytes whose
//     copy in has not ended; a store to bytes being copied out; a copy or punch that overlaps
//     another copy; any of these on a unit that is on its way to another device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "device/piece_pool.h"
#include "device/units/units.h"

namespace vmem::device {

struct SimOptions {
  int devices = 1;
  uint64_t memory_bytes = uint64_t{1} << 30;  // each; a populate beyond it: -ENOMEM, and a violation
  Link link = Link::nvlink;                   // between any two devices
  // Most work items that a stream of the application holds before they begin. A thread that puts
  // more on it waits, as in CUDA's driver (about 1,000 there). 0: no limit.
  size_t queue_limit = 0;
  bool handles = false;  // CpuView::split
  size_t unit = kUnit;   // of ranges that are reserved without a unit; handles: up to kLargestUnit
  // Ranges are taken side by side from here on: address space that the caller has reserved, enough
  // for all of them.
  std::byte* space = nullptr;
};

enum class SimOp : uint8_t {
  reserve,
  map,  // handles: at its address, for its device
  populate,
  issue_in,  // the call that begins a copy: an error fails the call, and loses nothing
  issue_out,
  copy_in,
  copy_out,
  hold,        // unified: write protection; handles: unmapping
  hold_units,  // handles: each of several units that are unmapped together
  share,
  punch,
  unmapped,
  migrate,
  send,  // handles: the copy of a unit to another device, by the device that makes it
  advise,
  pin,
  unpin,
  record,  // an error of record, poll, wait or drain loses nothing
  poll,
  wait,
  drain
};

// Runs before each operation, for copies on their stream's thread. It may sleep for a slow device,
// or return an error for one that fails (a copy that fails loses the device, as with CUDA). Must
// not call Devices.
using SimHook = std::function<core::Status(SimOp op, int device, uintptr_t address, size_t size)>;

class SimDevices;

// Kernels of one device that were launched and have not ended, and its copies. They may end after
// the device is gone.
class SimWork {
 public:
  using Token = std::shared_ptr<void>;  // one kernel, or copies begun together; ends with its last owner
  static Token begin(const std::shared_ptr<SimWork>& work) {
    uint64_t number = 0;
    {
      const std::lock_guard lock(work->mutex_);
      number = ++work->last_;
      work->open_.insert(number);
    }
    return Token(nullptr, [work, number](void*) {
      const std::lock_guard end(work->mutex_);
      work->open_.erase(number);
      work->changed_.notify_all();
    });
  }
  // Returns when all work launched before has ended, or when `lost` says that waiting is useless.
  template <typename Lost>
  void drain(Lost lost) {
    std::unique_lock lock(mutex_);
    for (const uint64_t last = last_; !open_.empty() && *open_.begin() <= last && !lost();)
      changed_.wait_for(lock, std::chrono::milliseconds(10));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<uint64_t> open_;  // protected by mutex_
  uint64_t last_ = 0;        // protected by mutex_
};

// The calls that a simulated kernel may make.
class SimKernel {
 public:
  SimKernel(SimDevices& sim, int device) : sim_(sim), device_(device) {}
  int device() const { return device_; }
  // Returns the bytes [address, address + size), inside one range, for this access only. Null after
  // error 700: the kernel must return.
  std::byte* at(const void* address, size_t size, bool store);

 private:
  SimDevices& sim_;
  const int device_;
};
using SimFunction = std::function<void(SimKernel&)>;

class SimDevices final : public UnitDevices {
 public:
  explicit SimDevices(const SimOptions& options);
  core::Status start();  // once, before anything else
  ~SimDevices() override;
  const char* name() const override;
  core::Status trim(int device, uint64_t keep) override;
  core::Status health(int device) override;
  core::Status probe(int device) override;
  core::Status check_stream(void* stream, int device) override;
  core::Status order_after(const Ticket& ticket, void* stream, int device_of_stream) override;
  core::Status record(void* stream, int device, Ticket* out) override;
  core::Status poll(const Ticket& ticket, bool* done) override;
  core::Status wait(const Ticket& ticket) override;
  core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                 std::unique_ptr<PagingWords>* out) override;
  core::Status drain(int device) override;
  bool maps_ahead(int device, size_t) override { return device % 2 != 0; }  // so that tests meet both orders

  // --- the application's side, and the test's ---
  // Makes a cudaStream_t. nullptr is the default stream of the calling thread's current device.
  void* create_stream(int device);
  void destroy_stream(void* stream);  // waits for its work
  // Ends the handle while its work goes on, as cudaStreamDestroy does. Call destroy_stream() later.
  void forget_stream(void* stream) {
    const std::lock_guard lock(mutex_);
    live_streams_.erase(stream);
  }
  static void set_current_device(int device);  // of this thread; 0 at first
  core::Status launch(void* stream, SimFunction kernel);
  core::Status synchronize(void* stream);  // waits for its work; -EIO: the device is lost
  // Simulates capture of a graph: until it ends, record() refuses the device's default stream, and
  // drain() fails.
  void capture(void* stream, bool on);
  size_t waiting();  // threads that wait because a queue is full
  // Loses a device at once.
  void lose(int device, std::string_view reason);
  // Loses a device when it is next asked for something.
  void fail(int device, std::string_view reason);
  // Simulates cudaDeviceReset: all devices are lost, no range has addresses of its own any more,
  // and no copy runs.
  void reset(std::string_view reason);
  void set_hook(SimHook hook);
  // Gives `bytes` of the device's memory to others: units that find no room are refused (-ENOMEM).
  void leave_to_others(int device, uint64_t bytes) { devices_[static_cast<size_t>(device)]->others = bytes; }
  // Handles: bytes of pieces, of units or kept for the next one.
  uint64_t taken(int device) const { return devices_[static_cast<size_t>(device)]->pieces.bytes(); }
  std::vector<std::string> violations() const;

 protected:
  core::Status backend_memory(int device, Memory* out) override;
  core::Status backend_reserve(Reservation& r) override;
  core::Status backend_present(const Reservation& r) override;
  void backend_release(Reservation& r) override;
  core::Status backend_map(const Span& span) override;
  void backend_unmapped(const Span& span) override;
  core::Status backend_populate(const Span& span, int device) override;
  core::Status backend_copy(int device, Direction direction, std::span<const Copy> copies, Ticket* done) override;
  core::Status backend_migrate(const Span& span, int to) override;
  core::Status backend_advise(Range range, Advice advice, int location, bool set) override;
  core::Status backend_pin(void* frames, size_t size) override;
  core::Status backend_unpin(void* frames) override;
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
  core::Status backend_before_write_protect(const Span& span) override;
  core::Status backend_before_punch(const Span& span) override;

 private:
  friend class SimKernel;
  friend class SimPagingWords;
  struct Stream;
  struct SimEvent;
  struct Device {
    bool lost = false;   // protected by mutex_
    bool fails = false;  // becomes lost once it is asked. Protected by mutex_
    std::string reason;  // protected by mutex_
    std::unique_ptr<Stream> default_stream;
    std::vector<std::unique_ptr<Stream>> copy_streams[2];  // by direction
    std::atomic<unsigned> next[2] = {};
    PiecePools pieces;
    std::atomic<uint64_t> others{0};  // bytes
    const std::shared_ptr<SimWork> work = std::make_shared<SimWork>();
  };
  Stream* stream_of(void* stream, int device_if_null);
  bool captures(int device) const;  // -1: any
  core::Status checked_stream(void* stream, int device, Stream** out);
  template <typename Work>
  core::Status enqueue(Stream* stream, Work work);  // waits while its queue is full
  core::Status run_hook(SimOp op, int device, uintptr_t address, size_t size);
  void violation(std::string what);
  std::byte* kernel_access(int device, uintptr_t address, size_t size, bool store);
  bool mapped_for(int device, uintptr_t unit);
  core::Status let_see(uintptr_t unit, int device, bool set);
  std::byte* view(const Reservation& r, uintptr_t address) const;
  core::Status address_space(Reservation& r);
  core::Status reserve_pages(Reservation& r);
  core::Status make_piece(int device, size_t size, uint32_t number, Piece* out);
  core::Status take_piece(int device, size_t size, uint32_t* out);
  bool destroy_piece(size_t size, const Piece& piece);
  core::Status oversubscribed(int device);
  // Returns where copies reach the byte; *run: how many bytes from there on are adjacent.
  std::byte* window(const Reservation& r, uintptr_t address, size_t* run) const;
  std::byte* window(int device, size_t size, uint32_t piece) const;
  bool is_sent(const std::byte* piece) const;
  bool is_sent(const Reservation& r, size_t unit) const {
    return !unified() && is_sent(window(r.units[unit].device.load(), r.unit, r.units[unit].piece.load()));
  }
  void copy_bytes(const Reservation& r, const Copy& copy, bool in);

  const SimOptions options_;
  std::atomic<size_t> placed_{0};  // bytes taken of options_.space
  int memfd_ = -1;
  std::byte* window_ = nullptr;  // handles: window of all devices
  mutable std::mutex mutex_;     // devices_' state, events, live streams, violations
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::set<void*> live_streams_;  // protected by mutex_
  // Handles: the devices that a unit is mapped for, a bit each, by the unit's address. Protected by
  // mutex_.
  std::map<uintptr_t, uint64_t> mapped_for_;
  // Streams belong to the application: their work may begin after these devices are gone.
  struct Life {
    std::mutex mutex;
    bool over = false;  // protected by mutex
    void end() {
      const std::lock_guard lock(mutex);
      over = true;
    }
  };
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  struct Sending {  // a unit on its way to another device
    const std::byte *source, *target;
    int by;
  };
  std::vector<Sending> sending_;         // protected by mutex_
  std::vector<std::string> violations_;  // protected by mutex_
  uint64_t file_end_ = 0;                // protected by mutex_
  std::atomic<size_t> waiting_{0};
  std::atomic<bool> reset_{false};
  std::atomic<bool> opened_{false};
  std::atomic<int> copying_{0};  // copies that may access blocks and frames now
  std::mutex hook_mutex_;
  std::shared_ptr<SimHook> hook_;  // protected by hook_mutex_
};

core::Status make_sim_devices(const SimOptions& options, std::unique_ptr<SimDevices>* out);
// Makes devices as setting device=sim or sim-handles does.
core::Status make_sim_devices(bool handles, size_t unit, std::unique_ptr<Devices>* out);
// Returns the last SimDevices made if it lives, or null; for tests that reach it through the C API.
SimDevices* current_sim();

}  // namespace vmem::device
