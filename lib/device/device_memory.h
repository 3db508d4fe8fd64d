// Makes, copies, maps and destroys memory of devices. A managed range is address space whose parts
// are made on a device and destroyed one by one. The pager decides which block goes where and when.
// device.h has the rules for callers.
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
// - CPU accesses to a unit that is shut, held or punched park at the CpuGate until
//   open() or rearm(). System calls with such a buffer return EFAULT: user space cannot park them.
//
// Life of a unit, split (write_protect, open and rearm check their arguments and do nothing):
//  hole ──populate──> made ──copy_in, map──> mapped ──unmap──> made ──copy_out, wait, punch──> hole
// - In: populate(); copy_in(); map(); order_after(ticket, stream). map() zeros units that no copy
//   fills, and waits for the device to do so; a copy of zeros does not wait.
// - Out: wait for the release tickets of its streams; unmap(); copy_out(); wait; punch().
#pragma once

#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/status.h"
#include "core/types.h"
#include "device/cpu_gate.h"
#include "device/migration.h"
#include "device/stream_ops.h"

namespace vmem::device {

inline constexpr size_t kUnit = core::kHugePage;         // smallest unit of a backend, bytes
inline constexpr size_t kLargestUnit = core::kMaxBlock;  // largest, bytes
inline constexpr size_t kUnitSizes = std::countr_zero(kLargestUnit / kUnit) + 1;
// Index of a unit size; sizes below kUnit give 0, so that a caller's mistake stays in the array.
constexpr size_t unit_class(size_t unit) {
  return static_cast<size_t>(std::bit_width(unit / kUnit | 1)) - 1;
}
inline constexpr size_t kMostRanges = 64;  // ranges or copies in one call; more: -EINVAL
inline constexpr int kHost = -1;           // a location of advise()

// Error of populate(): another thread reached the block in the microseconds between map and
// mprotect and saw an empty page. It has computed with wrong data: report it and abort.
inline constexpr int kIntruder = EUCLEAN;

// Accesses that the CPU can make without a stop.
enum class Access : uint8_t { none, read, read_write };

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

enum class Advice : uint8_t { preferred_location, read_mostly, accessed_by };

// Kinds of descriptor. handle: one unit, for another process that maps it on a device. dma_buf:
// adjacent units, for another driver that reaches them by DMA.
enum class Export : uint8_t { handle, dma_buf };

class DeviceMemory {
 public:
  // Unified: what parks CPU accesses while a unit moves. Split: null.
  virtual CpuGate* cpu_gate() const { return nullptr; }
  CpuView cpu_view() const { return cpu_gate() != nullptr ? CpuView::unified : CpuView::split; }
  // Default unit of a range, in bytes: a power of two from kUnit to largest_unit(). Unified: both
  // are kUnit. Split: the driver's cost is per unit, whatever its size.
  virtual size_t unit() const { return kUnit; }
  virtual size_t largest_unit() const { return kUnit; }

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
  // without parking them: they go to the hook of the CpuGate. none: -EINVAL, use write_protect(). After
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

 protected:
  ~DeviceMemory() = default;
};

}  // namespace vmem::device
