// The only door to CUDA: managed ranges whose parts are made on a device and destroyed again one by one. Mechanism
// only: the pager decides what goes where and when. Four backends, managed memory and physical handles and a simulation
// of each, pass one contract suite (tests/unit/device_contract_suite.h).
//
// What the CPU sees of it is the backend's CpuView, fixed for its life:
//   unified   one address, one memory: the CPU reaches a made unit as a device does, so it is shut out while one moves.
//   split     two page tables: a trap stands over the whole range for its life, and the devices see at the same
//             addresses what map() puts there. Nobody is shut out, no CPU access parks, no mapping of the process
//             changes. The bytes of a made unit are copied through a second place, which nobody else knows.
//
// A range's life where the view is unified, in its units ("made" = device memory stands behind it):
//
//   reserve ──> hole ──populate──> shut ──copy_in, wait, open──> open (read or read_write)
//                ^                                                  │ write_protect(read or none), copy_out, wait
//                └── rearm ── hole, CPU accesses park <── punch ────┘
//
//   In:  take the block out of the CPU's view; populate(); trap.wake(range), for threads parked in the trap that stood
//        there; copy_in(); order_after(ticket, stream); when the ticket is done: open().
//   Out: wait until the release tickets of the streams that used it are done; write_protect(Access::read);
//        copy_out(); wait; punch(); trap.attach_at(range); put the bytes where CPU accesses find them; rearm(range).
//   Drop: write_protect(Access::read), or it is open for reading only; punch(); trap.attach_at(); rearm().
//
// CPU accesses of a unit that is shut, held or punched park in fault_gate.h's SIGSEGV handler until open() or rearm().
// System calls with such a buffer answer EFAULT instead: nothing in user space can park them.
//
// Where it is split (write_protect, open and rearm check their arguments and do nothing):
//
//   reserve ──> hole ──populate──> made ──copy_in, map──> mapped ──unmap──> made ──copy_out, wait, punch──> hole
//
//   In:  populate(); copy_in(); map(); order_after(ticket, stream). A part that no copy fills is zeros, for which map()
//        waits for the device, as a copy of zeros does not.
//   Out: wait until the release tickets of the streams that used it are done; unmap(); copy_out(); wait; punch().
//
// Threads: every call may come from any thread, except that two calls never name overlapping ranges at once (the pager
// owns a block's transition). No call needs a lock of the caller's. "Blocks" below says which calls wait for a device.
// A thread's current CUDA device, its capture mode and its last error stay as they were.
//
// Memory: no call throws; without memory that it needs it answers -ENOMEM. What ends a move, or a range, needs none:
// open(), punch() and write_protect() (but for a SIGSEGV handler that the program has put over ours since), rearm(),
// release(), poll(), wait(), health(), unpin(), and the end of a ticket.
//
// Errors: -ENODEV no such device; -EINVAL misaligned or foreign address, unit in the wrong state, stream of another
// device; -EBUSY stream captures a graph; -ENOMEM; -EIO the device is lost (sticky CUDA error such as 700, or
// cudaDeviceReset), with the first reason: from then on every call that needs that device answers so at once.
// On error nothing has changed unless the call says otherwise.
//
// After error 700 write_protect(), punch(), rearm() and release() still work, so that regions can be taken down in
// order. A cudaDeviceReset unmaps the device's ranges whole, with the traps and frames in their holes: those addresses
// are not ours any more, and calls that would change them answer -EIO (release(), rearm(): ok, and leave them alone).
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

inline constexpr size_t kUnit = core::kHugePage;         // the smallest unit of a backend, bytes
inline constexpr size_t kLargestUnit = core::kMaxBlock;  // .. and the largest, bytes
inline constexpr size_t kUnitSizes = std::countr_zero(kLargestUnit / kUnit) + 1;
// Which of these sizes it is; of what is smaller, the smallest: no caller's mistake is a place outside of an array.
constexpr size_t unit_class(size_t unit) {
  return static_cast<size_t>(std::bit_width(unit / kUnit | 1)) - 1;
}
inline constexpr unsigned kMaxDevices = 64;
inline constexpr size_t kMostRanges = 64;  // named in one call, ranges or copies; more: -EINVAL
inline constexpr int kHost = -1;           // a location of advise()

// populate(): another thread reached the block in the microseconds between map and mprotect and saw an empty page. Its
// computation is wrong already: say so and abort.
inline constexpr int kIntruder = EUCLEAN;

// What the CPU may do without being stopped.
enum class Access : uint8_t { none, read, read_write };

// A point on a stream. Copies name the same point. Empty (default) counts as done. Must not outlive its Devices.
struct Event {
  virtual ~Event() = default;
};
using Ticket = std::shared_ptr<Event>;

struct Copy {
  uintptr_t block;  // in a made unit; any offset and length that stay inside one reservation
  // Pinned host memory; stays valid and untouched until the ticket is done. Split, copy_in(): null means zeros.
  void* frame;
  size_t size;  // bytes
  // Split, copy_in(): the next of several that fill a unit from its start to its end, without zeros first; one a
  // call. All but the last end at a multiple of kUnit in it. Before the last it is mapped by map_ahead() at most.
  bool part = false;
  Ticket after = {};  // of a copy of the same device: *done is not reached before it
};

enum class CpuView : uint8_t { unified, split };

enum class Link : uint8_t { self, nvlink, pcie, none };  // none: no peer access

struct Info {
  int device;
  std::string name;
  std::string pci;          // "0000:1b:00.0"; "" simulated
  int numa_node;            // -1 unknown
  uint64_t total_bytes;     // of its memory
  std::vector<Link> links;  // by device
};

struct Memory {
  uint64_t free, total;  // bytes, all processes
  uint64_t used;         // bytes of made units; exact
  uint64_t kept = 0;     // split: bytes that no unit has and trim() gives back, counted as free
};

enum class Advice : uint8_t { preferred_location, read_mostly, accessed_by };

// What a descriptor is: of one unit, for another process that maps it on a device; of units side by side, for another
// driver that reaches them by DMA.
enum class Export : uint8_t { handle, dma_buf };

class PagingWords;
class Devices {
 public:
  virtual ~Devices() = default;          // every range released, every ticket gone
  virtual const char* name() const = 0;  // of the backend, as setting device has it
  virtual CpuView cpu_view() const { return CpuView::unified; }
  // Of a range that is reserved without a word about it; bytes, a power of two from kUnit to largest_unit(), which is
  // kUnit where the view is unified. The driver's cost is per unit where it is split, whatever the unit's size.
  virtual size_t unit() const { return kUnit; }
  virtual size_t largest_unit() const { return kUnit; }
  virtual int count() const = 0;
  // Read once, valid as long as this. device < count().
  virtual const Info& info(int device) const = 0;
  // Makes the CUDA context of a device on its first use (hundreds of ms and MiB).
  virtual core::Status memory(int device, Memory* out) = 0;
  // Ok, or -EIO with the reason. Notices a reset; a sticky error is noticed by whichever call meets it first.
  virtual core::Status health(int device) = 0;
  // .. and asks the device itself, on a stream that is not the application's: what a kernel has met is noticed. Waits
  // for nothing. An error while health() is ok: nobody knows.
  virtual core::Status probe(int device) { return health(device); }

  // One range: `size` bytes of address space in units of `unit` bytes, of which it is a multiple and to which it is
  // aligned, all of it holes (PROT_NONE, not inherited by fork, rearmed), ready for trap.attach_at(). `device` is where
  // it is born; parts may be made on any.
  virtual core::Status reserve(size_t size, size_t unit, int device, void** base) = 0;
  core::Status reserve(size_t size, int device, void** base) { return reserve(size, unit(), device, base); }
  // Frees it with whatever is in it: made units, holes, traps. No copy may be in flight, no trap attached. Afterwards
  // the addresses belong to nobody; parked threads get their SIGSEGV. Blocks: CUDA waits for work under way.
  virtual core::Status release(void* base) = 0;

  // Makes holes into units on `device`: zeros, shut (split: not mapped). Adjacent ranges are made as one: on an H200
  // 16 us for 2 MiB, 36 for 8 MiB, 125 for 32 MiB. Each group of adjacent ranges is one mapping of the process. Advice
  // is applied again. Blocks for the driver's work, not for kernels; many threads may populate at once. -ENOMEM: the
  // budget's owner let it overflow (sim); -kIntruder: abort. *torn after an error: every named unit is a punched hole
  // now, so put the trap back and rearm(); else nothing has changed.
  virtual core::Status populate(std::span<const Range> ranges, int device, bool* torn) = 0;
  // Issues the copies on one of the device's own streams and returns; 5 us for each 2 MiB. *done is reached when all
  // are through. The units are made on `device`; in: shut; out: shut or held (split: in and out, mapped or not).
  // Never waits for a user's stream.
  virtual core::Status copy_in(int device, std::span<const Copy> copies, Ticket* done) = 0;
  virtual core::Status copy_out(int device, std::span<const Copy> copies, Ticket* done) = 0;
  // Split: made units appear at their addresses for the device that they are on, or go from there. A kernel that
  // reaches for a unit that is not mapped loses the device. Neither waits for kernels or copies. unmap(): units that
  // are not mapped stay so; with a lost device ok, and whatever was mapped there is nobody's. Unified: ok, a made unit
  // is seen from populate() to punch().
  virtual core::Status map(std::span<const Range> ranges) {
    (void)ranges;
    return {};
  }
  virtual core::Status unmap(std::span<const Range> ranges) {
    (void)ranges;
    return {};
  }
  // Split: true where units of so many bytes that copies fill whole are better mapped before these are issued, by
  // map_ahead(), since map() waits for copies to the device that are under way (where many are queued, for about 1 ms).
  // Between the two, and where copy_in() fails, the units hold anything.
  virtual bool maps_ahead(int device, size_t unit) {
    (void)device, (void)unit;
    return false;
  }
  virtual core::Status map_ahead(std::span<const Range> ranges) { return map(ranges); }
  // Split: memory of a device that no unit has is kept for the next one; what there is above `keep` bytes, made
  // units included, goes back to the driver. memory() counts it as free meanwhile. Blocks for the driver's work.
  virtual core::Status trim(int device, uint64_t keep) {
    (void)device, (void)keep;
    return {};
  }
  // Split: a descriptor (close on exec) of mapped units, all on one device. Whoever gets it shares their memory, to
  // read and to write, until it closes it and what it made of it: so when a unit leaves its memory, that is no other
  // unit's ever after, but goes back to the driver, which keeps it as long as anybody outside does. -EOPNOTSUPP: not by
  // this backend, device or driver.
  virtual core::Status share(Range range, Export how, int* descriptor) {
    (void)range, (void)how, (void)descriptor;
    return core::error(EOPNOTSUPP, "memory of this backend cannot be exported");
  }
  // Gives the CPU access to made units, whatever it had before (Access::read takes stores away, without parking: they
  // go to the hook of fault_gate.h). none: -EINVAL, use write_protect(). After a system error, and in write_protect(),
  // some of the ranges may have been done: the same call may be made again.
  virtual core::Status open(std::span<const Range> ranges, Access access) = 0;
  // Takes access away from made units while they move: when it returns no CPU store (read) or touch (none) can happen
  // before open(); faulting threads park. Units that are shut stay shut. read_write: -EINVAL.
  virtual core::Status write_protect(std::span<const Range> ranges, Access still_allowed) = 0;
  // Destroys made units (10 us for 2 MiB alone, 50 to 90 beside copies, 1 ms beside a full queue of the application's
  // device-to-host copies), device and host memory both, and leaves holes without access in one step: no other mapping
  // can land there. CPU accesses park until rearm(). Refuses a unit the CPU may write: write_protect() it first, or its
  // last bytes are not copied out. The caller has waited for copies; GPU kernels that touch it lose the device.
  virtual core::Status punch(std::span<const Range> ranges) = 0;
  // Something else answers for the holes now (a trap): parked threads try again.
  virtual core::Status rearm(std::span<const Range> ranges) = 0;
  // Moves made units to another device, bytes and CPU access unchanged: each range by itself, and each[i] says how that
  // went. Blocks until done. No kernel may use them meanwhile. After an error a unit may be on either device and counts
  // for both until punched (split: it counts for the one that it is on, and others of its range may have moved).
  // `by`: whose copies they are, `to` or the device that they are on; what keeps other copies of that one waiting keeps
  // these, too. The first error, if there is one; -EINVAL: nothing has changed.
  virtual core::Status migrate(std::span<const Range> ranges, int to, int by, std::span<core::Status> each) = 0;
  core::Status migrate(Range range, int to) {
    core::Status status;
    return migrate({&range, 1}, to, to, {&status, 1});
  }
  // .. until there are no more. Split: the next are begun before those under way have ended, so that the devices
  // have copies to do all the time.
  virtual void migrate_all(Migration& all, int to, int by);

  // cudaMemAdvise, remembered by range and applied whenever a part is made. set = false undoes. location: a device,
  // kHost (not for accessed_by of units that are made: the CPU's access is the pager's), ignored by read_mostly.
  // Split: accessed_by maps units for that device, too, wherever they are, if there is a link; the rest is
  // remembered and changes nothing.
  virtual core::Status advise(Range range, Advice advice, int location, bool set) = 0;
  // Bytes of made units whose page the CPU has touched since and maps now. The driver keeps host memory for at least
  // those, until the unit is punched, also after the GPU has taken the page back: keep the largest value seen.
  virtual core::Status host_resident_bytes(Range range, uint64_t* bytes) = 0;

  // stream: cudaStream_t as void*, or nullptr, the legacy default stream; cudaStreamPerThread means the calling
  // thread's. May work of this device be ordered with it? -EINVAL other device, -EBUSY capture, -EIO lost. For nullptr
  // the calling thread's current context counts; a stream outside the primary context: -EINVAL too.
  virtual core::Status check_stream(void* stream, int device) = 0;
  // It names another stream on each thread.
  virtual bool of_thread(void* stream) const {
    (void)stream;
    return false;
  }
  // Work put on the stream after the call runs after the ticket. Never blocks. The stream may be another device's.
  virtual core::Status order_after(const Ticket& ticket, void* stream, int device_of_stream) = 0;
  // *out is reached when all work now on the stream is done.
  virtual core::Status record(void* stream, int device, Ticket* out) = 0;
  // An error: the ticket did not tell. What it stands for may be under way still, and it tells later; it never will,
  // and nothing runs there, once health() says that the device is lost.
  virtual core::Status poll(const Ticket& ticket, bool* done) = 0;
  // Sleeps until it is reached; to wake up takes 5 to 300 us more than polling, the longer the sleep the more. Only for
  // copies: a user's stream may take for ever.
  virtual core::Status wait(const Ticket& ticket) = 0;

  // Returns when all work that was put on any stream of the device before has ended, of streams that are no more too.
  // Blocks, for as long as a kernel runs. -EIO: the device is lost, and nothing runs there. -EBUSY: some stream
  // captures a graph, and the capture has failed by this; work may still run.
  virtual core::Status drain(int device) = 0;

  // Split: what kernels of the device and a server need to agree on `blocks` blocks (paging_words.h), of which a
  // group may have `frames` at once. Gone before these devices.
  virtual core::Status make_paging_words(int device, uint32_t blocks, uint32_t frames,
                                         std::unique_ptr<PagingWords>* out);

  // Host memory for copies at full speed, for all devices. kPage-aligned. Stays the caller's. Blocks (about 16 ms/GiB).
  // Where it is not unpinned it stays pinned, and its addresses must not be given to others.
  virtual core::Status pin(void* frames, size_t size) = 0;
  virtual core::Status unpin(void* frames) = 0;
};

// As setting device has them.
enum class Kind : uint8_t { automatic, cuda, handles, managed, sim, sim_handles, none };
Kind kind_of(std::string_view setting);

// automatic: the CUDA backend that is preferred, else another; *why says why not the first. Where none can be had *out
// is null, the call succeeds and *why says why there is no device tier. cuda: the same, and that reason as an error.
// handles, managed: that backend or an error. Each CUDA backend tries once with one unit whether it works here.
// One CUDA Devices at a time. Installs fault_gate.h's handler where the CPU's view of the devices is unified.
// A backend without units of so many bytes: -EINVAL.
core::Status make_devices(Kind kind, size_t unit, std::unique_ptr<Devices>* out, std::string* why);

// .. of these backends, automatic in this order.
struct Makers {
  core::Status (*handles)(size_t unit, std::unique_ptr<Devices>*);
  core::Status (*managed)(std::unique_ptr<Devices>*);
  core::Status (*sim)(std::unique_ptr<Devices>*);
  core::Status (*sim_handles)(size_t unit, std::unique_ptr<Devices>*);
};
core::Status make_devices(Kind kind, size_t unit, std::span<const Kind> automatic, const Makers& makers,
                          std::unique_ptr<Devices>* out, std::string* why);

}  // namespace vmem::device
