// Catches accesses of absent blocks. The only interface to userfaultfd and to the module. A backend
// knows addresses and bytes, not regions or tiers; the pager decides which bytes go where.
//
// - Any thread may make any call at any time. But concurrent calls never name overlapping ranges
//   (the pager owns a block's transition), and wait() has one caller at a time.
// - No call takes a lock that a faulting thread may hold, or touches bytes of a trapped range from
//   user space.
// - Allowed under the pager's lock: wake, unprotect, fill_zero of a page, fail, unfail, and calls
//   that map and release frame memory. No others.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/process/guarded_read.h"
#include "core/status.h"
#include "core/types.h"

namespace vmem::trap {

enum class FaultKind : uint8_t {
  read,           // load of an absent page
  write,          // store to an absent page
  write_protect,  // store to a page that was put in place with Protect::yes
};

struct Fault {
  uintptr_t address;  // of the access, rounded down to 4 KiB
  FaultKind kind;
  uint32_t thread;  // kernel thread id; 0 if the backend cannot tell
};

// An event of wait().
struct Event {
  enum class Kind : uint8_t {
    fault,     // see `fault`
    pressure,  // the machine is short of memory: give `bytes` of frames back
    tunables,  // the result of knobs() changed
  };
  Kind kind = Kind::fault;
  Fault fault{};
  uint64_t bytes = 0;
};

// How bytes are put in place and taken out. Fixed for a range when it is attached.
enum class Transfer : uint8_t {
  move,     // whole frames move: fill() empties the frame, take() fills one; multiples of 2 MiB only
  copy,     // fill() copies from the caller's frame; take() takes out the range's own pages
  install,  // frames stay in their memory and are mapped into the range (module)
};

enum class CoreDump : bool { no, yes };

// How long take() waits for a pinned page. Most pins last as long as one transfer.
enum class PinWait : uint8_t { brief, none };

enum class Protect : bool { no, yes };

// Which calls notice a pinned page (O_DIRECT, io_uring's buffers, RDMA) in a range that copies, and
// leave it.
enum class Pins : uint8_t {
  unseen,      // none: only pages under a lease, which are never taken, are safe
  taken_away,  // take() and drop(): no pin can change pages they took; protect() does not stop a pin
  protected_,  // protect() too: no pin can change pages that it protected
};

struct Caps {
  bool copy = true;            // Transfer::copy works
  bool move = false;           // Transfer::move works (UFFDIO_MOVE, Linux 6.8)
  bool install = false;        // Transfer::install works (module)
  bool write_protect = false;  // Protect::yes and protect() work (anonymous memory, Linux 5.7)
  bool poison = false;         // fail() needs no mapping (UFFDIO_POISON, Linux 6.6)
  bool system_calls = false;   // a fault inside a system call is served too (privileged); otherwise EFAULT
  bool batch_drop = false;     // drop() of many ranges is one system call
  Pins pins = Pins::unseen;
  core::Absent absent = core::Absent::zeros;  // what an unmapped page of a present block means
  bool one_report = false;                    // a block is reported once, however many threads wait for it
  const char* name = "";                      // "userfaultfd", "kmod", ..
};

// The meaning of caps.system_calls == false for the program.
inline constexpr char kSystemCallsNeedLeases[] =
    "system calls need leases: read(2), write(2) and similar calls fail with EFAULT where a block is not in host "
    "memory, unless a VMEM_HOST lease holds the range";

struct Range {
  uintptr_t address;
  size_t size;
};

// The module's knobs (docs/kernel-module.md), in bytes. A limit of 0 means none.
struct Knobs {
  uint64_t frame_limit = 0, context_limit = 0;
  uint64_t readahead_bytes = 0;
  unsigned fault_timeout_ms = 0;
  unsigned watermark_low = 0, watermark_high = 0;  // percent of the budget
};

class Trap {
 public:
  virtual ~Trap() = default;
  virtual const Caps& caps() const = 0;

  // Reserves `size` bytes of address space aligned to `align` (a power of two, at least 4 KiB), all
  // of it trapped and absent. Not inherited by fork, not dumped, no swap reservation. Asks for huge
  // pages if transfer is move, refuses them if it is copy.
  virtual core::Status attach(size_t size, size_t align, Transfer transfer, void** address) = 0;
  // Same over address space that the caller owns at `address` (a hole in a managed range). During
  // the call, an access by another thread raises SIGSEGV (the caller must park it) or parks in the
  // trap. It never sees an accessible empty page.
  virtual core::Status attach_at(void* address, size_t size, Transfer transfer) = 0;
  // detach() ends the trap: parked threads, and accesses from now on, get SIGBUS. The address space
  // stays reserved until unmap(). Never blocks on a fault. Two calls, so that the caller can order
  // its own bookkeeping between them.
  virtual core::Status detach(void* address, size_t size) = 0;
  virtual core::Status unmap(void* address, size_t size) = 0;

  // Sets whether the resident bytes of a range, as it was attached, go into core dumps from now on. The
  // default is the backend's setting. Returns -EOPNOTSUPP if this backend never dumps.
  virtual core::Status dump(void* address, size_t size, CoreDump dump) {
    (void)address, (void)size;
    if (dump == CoreDump::no) return {};
    return core::error(EOPNOTSUPP,
                       "mappings of the module are in no core dump; leave core_dump alone, or set trap to uffd");
  }

  // Waits for events and returns at most out.size() of them. A fault may be reported more than
  // once, and after it was resolved. timeout_ms < 0 waits forever. Returns 0 events on timeout and
  // after interrupt().
  virtual core::Status wait(std::span<Event> out, int timeout_ms, size_t* count) = 0;
  // Calls serve(fault, user) for each fault from now on, on the thread that made it, with every
  // signal blocked. Nothing of the application's may run there. serve() returns false if the address
  // is in no range. wait() returns no faults then. nullptr: no more. Returns false if this backend
  // cannot do it.
  using Serve = bool (*)(const Fault& fault, void* user);
  virtual bool serve_by(Serve serve, void* user) {
    (void)serve, (void)user;
    return false;
  }
  // Returns a descriptor that polls readable while wait() has events, or -1.
  virtual int event_descriptor() const { return -1; }
  // Makes the current or next wait() return; async-signal-safe.
  virtual void interrupt() = 0;

  // Puts the bytes of `frame` (same size as the range; 2 MiB-aligned for move) at `address` in one
  // atomic step: an access sees all of them or parks. Then wakes the range. The range must be
  // absent. move: the pages leave the frame, which then reads as zeros. copy: the frame is
  // unchanged. EAGAIN, EBUSY and ENOENT races inside the kernel are retried. On error the range is
  // still absent and the frame unchanged.
  virtual core::Status fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) = 0;
  // Same with zeros, without a frame. Uses 4 KiB zero pages of the kernel; a store allocates memory
  // without our knowledge.
  virtual core::Status fill_zero(void* address, size_t size) = 0;
  // Takes the range's bytes out, atomically for each page; a later access parks. `frame` is empty
  // address space of the same size from reserve_frames(), and then has the range's pages (absent 4
  // KiB pages read as zeros). If a page stays pinned (O_DIRECT, RDMA) for `wait`, returns -EBUSY
  // and everything is back in place.
  virtual core::Status take(void* address, size_t size, void* frame, Transfer transfer, PinWait wait) = 0;
  core::Status take(void* address, size_t size, void* frame, Transfer transfer) {
    return take(address, size, frame, transfer, PinWait::brief);
  }
  // Undoes take() of a range that copies: the pages go back and `frame` is empty. Otherwise as
  // fill().
  virtual core::Status put_back(void* address, size_t size, void* frame) {
    return fill(address, size, frame, Transfer::copy, Protect::no);
  }
  // Drops pages whose bytes are safe elsewhere and protected against stores, or no longer needed. A
  // later access parks. Returns -EBUSY if a page is pinned; of each range of up to 64 MiB, all or
  // nothing is dropped.
  virtual core::Status drop(std::span<const Range> ranges) = 0;
  // Write-protects (copy only, caps().write_protect): once it returns, a store parks and is
  // reported.
  virtual core::Status protect(void* address, size_t size) = 0;
  // Removes write protection and wakes the range. Returns -EPERM if that is forbidden; nothing has
  // changed then.
  virtual core::Status unprotect(void* address, size_t size) = 0;
  // Accesses of the absent range get SIGBUS from now on; parked threads get it at once.
  virtual core::Status fail(void* address, size_t size) = 0;
  // Undoes fail(): the range is absent and trapped again. On error accesses still get SIGBUS.
  virtual core::Status unfail(void* address, size_t size) = 0;
  // Maps the file itself over the absent range, from `offset` on. From now on accesses behave as in
  // any mapping by mmap, with SIGBUS beyond the current end of the file; parked threads continue at
  // once. shared: stores go to the file (fd is open for writing); otherwise they are private. On
  // error the range is still absent and trapped, or, if the trap is refused too, accesses get
  // SIGBUS. Returns -EOPNOTSUPP if this backend cannot do it.
  virtual core::Status map_file(void* address, size_t size, int fd, uint64_t offset, bool shared) {
    (void)address, (void)size, (void)fd, (void)offset, (void)shared;
    return core::Status(EOPNOTSUPP, "");
  }
  // Undoes map_file(), and fail() with it: the range is absent and trapped again. An access during
  // the call gets SIGSEGV (the caller must park it). On error accesses get SIGBUS; it can be tried
  // again.
  virtual core::Status unmap_file(void* address, size_t size) {
    (void)address, (void)size;
    return core::Status(EOPNOTSUPP, "");
  }
  // Lets parked threads of the range try again.
  virtual core::Status wake(void* address, size_t size) = 0;

  // Reserves address space whose pages can move by fill(move) and take(): private, anonymous,
  // readable and writable, aligned to 2 MiB, not inherited by fork, absent. Release it with
  // munmap().
  virtual core::Status reserve_frames(size_t size, bool huge, void** address) = 0;

  // With Transfer::install a range consists of blocks, and an arena of frames, each of one size
  // that is fixed when it is made. fill() and take() name whole blocks; `frame` is where the frame
  // is mapped. take() returns the frame that is in place (-EINVAL if `frame` is another).
  //
  // attach() and attach_at() make the range one block if its size allows it, otherwise blocks of 2
  // MiB or 4 KiB. attach_at() over a hole in a range of this trap keeps that range's blocks. Other
  // backends ignore block sizes.
  //
  // near: used if it is a multiple of `align` and free; otherwise, and for 0, the kernel picks an
  // address. Never replaces a mapping.
  virtual core::Status attach_blocks(size_t size, size_t align, size_t block_size, Transfer transfer, uintptr_t near,
                                     void** address) {
    (void)block_size, (void)near;
    return attach(size, align, transfer, address);
  }
  // Reserves address space for frames of `frame_size` bytes each, absent. Give it back with
  // release_arena().
  virtual core::Status reserve_arena(size_t size, size_t frame_size, void** address) {
    return reserve_frames(size, frame_size >= core::kHugePage, address);
  }
  // Makes frames resident and zero; without it the first access does so, if the backend does not
  // manage memory. Returns -ENOMEM, or -EDQUOT at a limit of the machine; nothing is resident then.
  // node: memory node, or -1 for the caller's.
  virtual core::Status populate_frames(void* address, size_t size, int node) {
    (void)address;
    (void)size;
    (void)node;
    return {};
  }
  // Frees the memory of frames; the address space stays. Returns -EBUSY if one is pinned, which
  // stays resident.
  virtual core::Status release_frames(void* address, size_t size);
  // Same for many ranges. Tries all and returns the first failure.
  virtual core::Status release_many(std::span<const Range> ranges);
  virtual core::Status release_arena(void* address, size_t size);
  // Gets what the machine's administrator asks of every process. Returns -EOPNOTSUPP if there is no
  // such setting.
  virtual core::Status knobs(Knobs* out) {
    (void)out;
    return core::Status(EOPNOTSUPP, "");
  }
};

struct UserfaultOptions {
  bool allow_move = true;
  bool allow_write_protect = true;
  bool allow_poison = true;
  bool allow_privileged = true;  // false: behave as for an ordinary user
  bool allow_device = true;      // /dev/userfaultfd
  bool allow_process_madvise = true;
  bool in_signal_handler = false;   // faults come as SIGBUS (signal_faults.h)
  bool allow_table_reclaim = true;  // rely on MADV_DONTNEED freeing page tables (Linux 6.14)
  bool core_dump = false;           // resident bytes of ranges go into core dumps
};

// Uses /dev/userfaultfd, the system call, or the system call limited to user-mode faults, whichever
// is allowed. Tests each feature by using it once. Returns -EPERM or -ENOSYS, with the way to
// enable it, if none is allowed.
core::Status make_userfault_trap(const UserfaultOptions& options, std::unique_ptr<Trap>* out);

struct KmodOptions {
  const char* device = "/dev/vmem";
};

// Uses the module vmem.ko. Returns -ENOENT if it is not loaded, -EACCES if the user is not in the
// group, -EPROTONOSUPPORT or -EOPNOTSUPP if it is too old. Each error says what to do.
core::Status make_kmod_trap(const KmodOptions& options, std::unique_ptr<Trap>* out);

}  // namespace vmem::trap
