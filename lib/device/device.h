// Makes, copies, maps and destroys memory of devices; the only interface to CUDA. A managed range
// is address space whose parts are made on a device and destroyed one by one. The pager decides
// which block goes where and when. Four backends (managed memory, physical handles, and a
// simulation of each) pass one contract suite, tests/unit/device_contract_suite.h.
//
// CpuView says what the CPU sees of a range. It is fixed for a backend's life.
// - unified: one address, one memory. The CPU reaches a made unit as a device does, so it is shut
//   out while the unit moves.
// - split: two page tables. A trap covers the whole range for its life, and the devices see at the
//   same addresses what map() puts there. No CPU access parks, and no mapping of the process
//   changes. Copies reach a made unit at a second address, which only the backend knows.
//
// Life of a unit, unified ("made": device memory backs it):
//   reserve ──> hole ──populate──> shut ──copy_in, wait, open──> open (read or read_write)
//                ^                                                  │ write_protect(read or none),
//                └── rearm ── hole, CPU accesses park <── punch ────┘   copy_out, wait
// - In: take the block out of the CPU's view; populate(); trap.wake(range), for threads parked in
//   the old trap; copy_in(); order_after(ticket, stream); open() when the ticket is done.
// - Out: wait for the release tickets of the streams that used it; write_protect(Access::read);
//   copy_out(); wait; punch(); trap.attach_at(range); put the bytes where CPU accesses find them;
//   rearm(range).
// - Drop: write_protect(Access::read), unless open for reading only; punch(); attach_at(); rearm().
// - CPU accesses to a unit that is shut, held or punched park in fault_gate.h's handler until
//   open() or rearm(). System calls with such a buffer return EFAULT: user space cannot park them.
//
// Life of a unit, split (write_protect, open and rearm check their arguments and do nothing):
//  hole ──populate──> made ──copy_in, map──> mapped ──unmap──> made ──copy_out, wait, punch──> hole
// - In: populate(); copy_in(); map(); order_after(ticket, stream). map() zeros units that no copy
//   fills, and waits for the device to do so; a copy of zeros does not wait.
// - Out: wait for the release tickets of its streams; unmap(); copy_out(); wait; punch().
//
// Rules for callers:
// - Threads: any thread may make any call, but no two calls may name overlapping ranges at once
//   (the pager owns a block's transition). Calls need no lock of the caller. Calls that wait for a
//   device say "Blocks". A thread's current CUDA device, capture mode and last error do not change.
// - Memory: no call throws; a call that lacks memory returns -ENOMEM. open(), rearm(), release(),
//   poll(), wait(), health(), unpin() and the end of a ticket need none; nor do punch() and
//   write_protect(), unless the program has put a SIGSEGV handler over ours since.
// - Errors: -ENODEV no such device; -EINVAL misaligned or foreign address, unit in the wrong state,
//   stream of another device; -EBUSY the stream captures a graph; -ENOMEM; -EIO the device is lost.
//   A failed call changes nothing unless its comment says otherwise.
// - Lost: by a sticky CUDA error such as 700, or cudaDeviceReset. From then on every call that
//   needs the device fails at once, with the first reason. After error 700 write_protect(),
//   punch(), rearm() and release() still work, so that regions can be taken down in order.
//   cudaDeviceReset unmaps the device's ranges with the traps and frames in their holes: calls that
//   would change them return -EIO; release() and rearm() succeed and leave the addresses alone.
#pragma once

#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "device/migration.h"

namespace vmem::device {

using core::error;
using core::Status;

inline constexpr size_t kUnit = core::kHugePage;         // smallest unit of a backend, bytes
inline constexpr size_t kLargestUnit = core::kMaxBlock;  // largest, bytes
inline constexpr size_t kUnitSizes = std::countr_zero(kLargestUnit / kUnit) + 1;
// Index of a unit size; sizes below kUnit give 0, so that a caller's mistake stays in the array.
constexpr size_t unit_class(size_t unit) {
  return static_cast<size_t>(std::bit_width(unit / kUnit | 1)) - 1;
}
inline constexpr unsigned kMaxDevices = 64;
inline constexpr size_t kMostRanges = 64;  // ranges or copies in one call; more: -EINVAL
inline constexpr int kHost = -1;           // a location of advise()

// Error of populate(): another thread reached the block in the microseconds between map and
// mprotect and saw an empty page. It has computed with wrong data: report it and abort.
inline constexpr int kIntruder = EUCLEAN;

// Accesses that the CPU can make without a stop.
enum class Access : uint8_t { none, read, read_write };

// A point on a stream. Copies of a ticket refer to the same point. An empty ticket counts as done.
// A ticket must not outlive its Devices.
struct Event {
  virtual ~Event() = default;
};
using Ticket = std::shared_ptr<Event>;

struct Copy {
  uintptr_t block;  // in a made unit; any offset and length inside one reservation
  // Pinned host memory, unchanged until the ticket is done. Null means zeros (split, copy_in()).
  void* frame;
  size_t size;  // bytes
  // Split, copy_in(): one of several copies that fill a unit from start to end, without zeros
  // first. One per call; all but the last end at a multiple of kUnit. Before the last one, only
  // map_ahead() may map the unit.
  bool part = false;
  Ticket after = {};  // a copy of the same device that must end before *done is reached
};

enum class CpuView : uint8_t { unified, split };

enum class Link : uint8_t { self, nvlink, pcie, none };  // none: no peer access

struct Info {
  int device;
  std::string name;
  std::string pci;          // "0000:1b:00.0"; "" if simulated
  int numa_node;            // -1: unknown
  uint64_t total_bytes;     // of the device
  std::vector<Link> links;  // by device
};

struct Memory {
  uint64_t free, total;  // bytes, all processes
  uint64_t used;         // bytes of made units; exact
  uint64_t kept = 0;     // split: bytes that no unit uses and trim() gives back; counted as free
};

enum class Advice : uint8_t { preferred_location, read_mostly, accessed_by };

// Kinds of descriptor. handle: one unit, for another process that maps it on a device. dma_buf:
// adjacent units, for another driver that reaches them by DMA.
enum class Export : uint8_t { handle, dma_buf };

class PagingWords;
class Devices {
 public:
  virtual ~Devices() = default;          // after all ranges are released and all tickets gone
  virtual const char* name() const = 0;  // of the backend, as in setting device
  virtual CpuView cpu_view() const { return CpuView::unified; }
  // Default unit of a range, in bytes: a power of two from kUnit to largest_unit(). Unified: both
  // are kUnit. Split: the driver's cost is per unit, whatever its size.
  virtual size_t unit() const { return kUnit; }
  virtual size_t largest_unit() const { return kUnit; }
  virtual int count() const = 0;
  // Valid as long as this object. device < count().
  virtual const Info& info(int device) const = 0;
  // Makes the device's CUDA context at its first use (hundreds of ms and MiB).
  virtual core::Status memory(int device, Memory* out) = 0;
  // Ok, or -EIO with the reason. Notices a reset at once, a sticky error after another call met it.
  virtual core::Status health(int device) = 0;
  // As health(), and asks the device on a stream of our own, so that errors of kernels are noticed.
  // Does not block. If probe() fails and health() is ok, the device's state is unknown.
  virtual core::Status probe(int device) { return health(device); }

  // Reserves `size` bytes of address space, a multiple of `unit` and aligned to it, all holes
  // (PROT_NONE, not inherited by fork, rearmed), ready for trap.attach_at(). The range belongs to
  // `device`; parts may be made on any device.
  virtual core::Status reserve(size_t size, size_t unit, int device, void** base) = 0;
  core::Status reserve(size_t size, int device, void** base) { return reserve(size, unit(), device, base); }
  // Frees a range and everything in it: made units, holes, traps. No copy may be in flight and no
  // trap attached. Afterwards the addresses are not the caller's; parked threads get their SIGSEGV.
  // Blocks: CUDA waits for work under way.
  virtual core::Status release(void* base) = 0;

  // Turns holes into units on `device`: zeros, shut (split: not mapped). Adjacent ranges become one
  // mapping of the process, which is faster. Applies advice again. Blocks for the driver's work,
  // not for kernels; several threads may populate at once. -ENOMEM: the device is full. -kIntruder:
  // abort. *torn after an error: all named units are punched holes; put the trap back and rearm().
  virtual core::Status populate(std::span<const Range> ranges, int device, bool* torn) = 0;
  // Issues the copies on a stream of the device's own and returns. *done is reached when all have
  // ended. The units are made on `device`. Unified: they are shut, or held for copy_out(). Split:
  // mapped or not. Never waits for a user's stream.
  virtual core::Status copy_in(int device, std::span<const Copy> copies, Ticket* done) = 0;
  virtual core::Status copy_out(int device, std::span<const Copy> copies, Ticket* done) = 0;
  // Split: map() shows made units at their addresses to the device that they are on; unmap() takes
  // them away. A kernel that accesses an unmapped unit loses the device. Neither waits for kernels;
  // map() may wait for copies and zeros. unmap() ignores unmapped units, and succeeds on a lost
  // device. Unified: both succeed; a made unit is visible from populate() to punch().
  virtual core::Status map(std::span<const Range> ranges) {
    (void)ranges;
    return {};
  }
  virtual core::Status unmap(std::span<const Range> ranges) {
    (void)ranges;
    return {};
  }
  // Split: true if units of this size that copies fill whole should be mapped before the copies are
  // issued, by map_ahead(), because map() waits for copies to the device that are under way. From
  // map_ahead() to the copies, and after a failed copy_in(), the bytes of the units are undefined.
  virtual bool maps_ahead(int device, size_t unit) {
    (void)device, (void)unit;
    return false;
  }
  virtual core::Status map_ahead(std::span<const Range> ranges) { return map(ranges); }
  // Split: the backend keeps memory that no unit uses for the next unit. trim() returns it to the
  // driver until at most `keep` bytes are left, made units included. Blocks for the driver's work.
  virtual core::Status trim(int device, uint64_t keep) {
    (void)device, (void)keep;
    return {};
  }
  // Split: returns a descriptor (close on exec) of mapped units, all on one device. Its holder
  // shares their memory, to read and write, until it closes the descriptor and all it made from it.
  // Shared memory never backs another unit: after its unit it goes back to the driver, which keeps
  // it for the holder. -EOPNOTSUPP: not by this backend, device or driver.
  virtual core::Status share(Range range, Export how, int* descriptor) {
    (void)range, (void)how, (void)descriptor;
    return core::error(EOPNOTSUPP, "memory of this backend cannot be exported");
  }
  // Gives the CPU this access to made units, whatever it had before. Access::read takes stores away
  // without parking them: they go to fault_gate.h's hook. none: -EINVAL, use write_protect(). After
  // a system error of open() or write_protect() some ranges may be done: repeat the call.
  virtual core::Status open(std::span<const Range> ranges, Access access) = 0;
  // Takes CPU access away from made units while they move: until open() no CPU store (read) or
  // access (none) can happen; faulting threads park. Shut units stay shut. read_write: -EINVAL.
  virtual core::Status write_protect(std::span<const Range> ranges, Access still_allowed) = 0;
  // Destroys made units, device and host memory both, and leaves holes without access in one step,
  // so that no other mapping can land there. CPU accesses park until rearm(). Refuses a unit that
  // the CPU may write: write_protect() it first, or its last bytes are not copied out. The caller
  // has waited for copies; a kernel that accesses it loses the device. Slower beside copies.
  virtual core::Status punch(std::span<const Range> ranges) = 0;
  // Lets parked threads try again: something else (a trap) handles accesses to the holes now.
  virtual core::Status rearm(std::span<const Range> ranges) = 0;
  // Moves made units to another device; bytes and CPU access stay. each[i] is the result for
  // ranges[i]. Blocks until done. No kernel may use the units meanwhile. After an error a unit may
  // be on either device and counts for both until punched (split: counts for the one that it is on;
  // others of its range may have moved). `by`, which is `to` or the source, makes the copies; what
  // delays its other copies delays these. Returns the first error. -EINVAL: nothing has changed.
  virtual core::Status migrate(std::span<const Range> ranges, int to, int by, std::span<core::Status> each) = 0;
  core::Status migrate(Range range, int to) {
    core::Status status;
    return migrate({&range, 1}, to, to, {&status, 1});
  }
  // As migrate(), until `all` names no more ranges. Split: begins the next ones before the previous
  // ones have ended, so that the devices always have copies to do.
  virtual void migrate_all(Migration& all, int to, int by);

  // cudaMemAdvise, remembered by range and applied whenever a part is made. set = false undoes it.
  // location: a device or kHost; read_mostly ignores it, accessed_by ignores kHost (the pager
  // controls the CPU's access). Split: accessed_by also maps units for that device, wherever they
  // are, if there is a link; other advice is remembered and has no effect.
  virtual core::Status advise(Range range, Advice advice, int location, bool set) = 0;
  // Bytes of made units whose pages the CPU has touched and maps now. The driver keeps host memory
  // for at least these until punch(), even if the GPU takes a page back: keep the largest value.
  virtual core::Status host_resident_bytes(Range range, uint64_t* bytes) = 0;

  // Checks that work of this device may be ordered with a cudaStream_t: nullptr is the legacy
  // default stream in the thread's current context, cudaStreamPerThread the calling thread's.
  // -EINVAL: of another device or outside the primary context. -EBUSY: it captures. -EIO: lost.
  virtual core::Status check_stream(void* stream, int device) = 0;
  // True if `stream` names another stream on each thread.
  virtual bool of_thread(void* stream) const {
    (void)stream;
    return false;
  }
  // Work put on the stream (of any device) after this call runs after the ticket. Never blocks.
  virtual core::Status order_after(const Ticket& ticket, void* stream, int device_of_stream) = 0;
  // *out is reached when all work now on the stream is done.
  virtual core::Status record(void* stream, int device, Ticket* out) = 0;
  // If poll() fails, the work may still be under way, and a later poll() tells. Once health() says
  // that the device is lost, nothing runs there and no poll() tells.
  virtual core::Status poll(const Ticket& ticket, bool* done) = 0;
  // Sleeps until the ticket is reached; waking takes longer than polling, more so after a long
  // sleep. For copies only: a user's stream may never end.
  virtual core::Status wait(const Ticket& ticket) = 0;

  // Returns when all work put before on any stream of the device, destroyed ones included, has
  // ended. Blocks as long as a kernel runs. -EIO: the device is lost and runs nothing. -EBUSY: a
  // stream captures a graph; the call has made the capture fail, and work may still run.
  virtual core::Status drain(int device) = 0;

  // Split: makes the words that kernels of the device and a server share for `blocks` blocks
  // (paging_words.h). A group may hold `frames` of them at once. Destroy them before these devices.
  virtual core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                         std::unique_ptr<PagingWords>* out);

  // Pins host memory for copies at full speed, for all devices. kPage-aligned; stays the caller's.
  // Blocks. If unpin() fails the memory stays pinned: do not give its addresses to others.
  virtual core::Status pin(void* frames, size_t size) = 0;
  virtual core::Status unpin(void* frames) = 0;
};

// Values of setting device.
enum class Kind : uint8_t { automatic, cuda, handles, managed, sim, sim_handles, none };
Kind kind_of(std::string_view setting);

// Makes the devices. -EINVAL: the backend has no units of `unit` bytes.
// - automatic: the preferred CUDA backend, else another; *why says why not the first. If none works
//   the call succeeds, *out is null and *why says why there is no device tier.
// - cuda: the same, but the reason is an error. handles, managed: that backend or an error.
// - A CUDA backend first tries one unit. There is one CUDA Devices at a time. Unified backends
//   install fault_gate.h's handler.
core::Status make_devices(Kind kind, size_t unit, std::unique_ptr<Devices>* out, std::string* why);

// As above, with these backends; automatic and cuda try `automatic` in its order.
struct Makers {
  core::Status (*handles)(size_t unit, std::unique_ptr<Devices>*);
  core::Status (*managed)(std::unique_ptr<Devices>*);
  core::Status (*sim)(std::unique_ptr<Devices>*);
  core::Status (*sim_handles)(size_t unit, std::unique_ptr<Devices>*);
};
core::Status make_devices(Kind kind, size_t unit, std::span<const Kind> automatic, const Makers& makers,
                          std::unique_ptr<Devices>* out, std::string* why);

}  // namespace vmem::device
