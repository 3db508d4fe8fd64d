// Who stands where a block is absent. The only door to userfaultfd and to the module. A backend of this interface knows
// addresses and bytes, nothing of regions or tiers; the pager decides what goes where.
//
// Thread safety: every call may come from any thread at any time, except that two calls never name overlapping ranges
// at once (the pager owns a block's transition) and wait() has one caller at a time. Locks: no call takes a lock that a
// faulting thread may hold; none touches the bytes of a trapped range from user space. Under the pager's lock: wake,
// unprotect, fail, unfail, fill_zero of a page, and what maps and releases memory of frames; no other.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/guarded_read.h"
#include "core/status.h"
#include "core/types.h"

namespace vmem::trap {

enum class FaultKind : uint8_t {
  read,           // load of an absent page
  write,          // store to an absent page
  write_protect,  // store to a page that was put in place with Protect::yes
};

struct Fault {
  uintptr_t address;  // the touched byte, rounded down to 4 KiB
  FaultKind kind;
  uint32_t thread;  // kernel thread id, 0 when the backend cannot tell
};

// What wait() returns.
struct Event {
  enum class Kind : uint8_t {
    fault,     // `fault` says where
    pressure,  // the machine is short of memory: it asks for `bytes` of frames back
    tunables,  // the answer of knobs() changed
  };
  Kind kind = Kind::fault;
  Fault fault{};
  uint64_t bytes = 0;
};

// How bytes get into place and out again. Fixed for a range when it is attached.
enum class Transfer : uint8_t {
  move,     // whole frames travel: fill() empties the frame, take() fills one; multiples of 2 MiB only
  copy,     // fill() copies from a frame that stays the caller's; take() brings the range's own pages out
  install,  // frames stay where they are and are mapped into the range (module)
};

enum class CoreDump : bool { no, yes };

// For how long take() waits for a page that somebody pins: most pins last as long as one transfer.
enum class PinWait : uint8_t { brief, none };

enum class Protect : bool { no, yes };

// Which calls notice that somebody pins a page of a range that copies (O_DIRECT, io_uring's buffers, RDMA), and leave
// it.
enum class Pins : uint8_t {
  unseen,      // none: only what is not taken away from under a lease is safe
  taken_away,  // take() and drop(): what they took nobody can change any more. protect() keeps no pin from storing
  protected_,  // protect() as well: what it protected nobody can change any more
};

struct Caps {
  bool copy = true;            // Transfer::copy works
  bool move = false;           // Transfer::move works (UFFDIO_MOVE, Linux 6.8)
  bool install = false;        // Transfer::install works (module)
  bool write_protect = false;  // Protect::yes and protect() work (anonymous memory, Linux 5.7)
  bool poison = false;         // fail() costs no mapping (UFFDIO_POISON, Linux 6.6)
  bool system_calls = false;   // a fault raised inside a system call is served too (privileged); else EFAULT
  bool batch_drop = false;     // drop() of many ranges is one system call
  Pins pins = Pins::unseen;
  core::Absent absent = core::Absent::zeros;  // pages of a block that stands in its place, and that are not mapped
  bool one_report = false;                    // a block is reported once, however many threads wait for it
  const char* name = "";                      // "userfaultfd", "kmod", ..
};

// Where caps.system_calls is false: what it means.
inline constexpr char kSystemCallsNeedLeases[] =
    "system calls need leases: read(2), write(2) and the like answer EFAULT where a block is not in host memory, "
    "unless a VMEM_HOST lease holds the range";

struct Range {
  uintptr_t address;
  size_t size;
};

// The module's knobs, docs/kernel-module.md. Bytes; 0 of a limit: none.
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

  // Reserves `size` bytes of address space aligned to `align` (a power of two, at least 4 KiB) with the trap over all
  // of it. Nothing is resident. Not inherited by fork, not dumped, no reservation of swap. Huge pages are asked for
  // when transfer is move, refused when it is copy.
  virtual core::Status attach(size_t size, size_t align, Transfer transfer, void** address) = 0;
  // The same over address space the caller already owns at `address` (a hole in a managed range): an access by another
  // thread during the call raises SIGSEGV (park it) or parks in the trap; it never sees an accessible empty page.
  virtual core::Status attach_at(void* address, size_t size, Transfer transfer) = 0;
  // Ends the trap. Threads parked in the range, and accesses from now on, get SIGBUS; the address space stays reserved
  // until unmap(). Never blocks on a fault. Two calls so that the caller can order them around its own bookkeeping.
  virtual core::Status detach(void* address, size_t size) = 0;
  virtual core::Status unmap(void* address, size_t size) = 0;

  // Whether what is resident in a range, as it was attached, goes into core dumps from now on: whatever the backend was
  // told for ranges of which nothing is said. -EOPNOTSUPP: with this backend it never does.
  virtual core::Status dump(void* address, size_t size, CoreDump dump) {
    (void)address, (void)size;
    if (dump == CoreDump::no) return {};
    return core::error(EOPNOTSUPP,
                       "mappings of the module are in no core dump; leave core_dump alone, or set trap to uffd");
  }

  // Waits until there are events and fills at most out.size() of them; a fault may be reported again, and may be
  // reported after it was resolved. timeout_ms < 0 waits for ever. Returns 0 events on timeout and after interrupt().
  virtual core::Status wait(std::span<Event> out, int timeout_ms, size_t* count) = 0;
  // A descriptor that polls readable while wait() would find events; -1: there is none.
  virtual int event_descriptor() const { return -1; }
  // Makes the current or next wait() return; async-signal-safe.
  virtual void interrupt() = 0;

  // Puts the bytes of `frame` (same size as the range; 2 MiB-aligned for move) at `address` in one atomic step: an
  // access sees all of them or parks. Then wakes the range. The range must be absent. move: the pages leave the frame,
  // which reads as zeros afterwards. copy: the frame is unchanged. EAGAIN, EBUSY and ENOENT races inside the kernel are
  // retried here. On error the range is absent still and the frame is as it was.
  virtual core::Status fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) = 0;
  // The same with zeros, without a frame (4 KiB pages of the kernel's zero page; a store allocates behind our back).
  virtual core::Status fill_zero(void* address, size_t size) = 0;
  // Takes the range's bytes out, atomically page by page: a later access parks. `frame` is empty address space of the
  // same size from reserve_frames(); afterwards its pages are the range's (4 KiB pages absent from the range read as
  // zeros). A page that somebody pins (O_DIRECT, RDMA): -EBUSY after `wait`, and everything is back where it was.
  virtual core::Status take(void* address, size_t size, void* frame, Transfer transfer, PinWait wait) = 0;
  core::Status take(void* address, size_t size, void* frame, Transfer transfer) {
    return take(address, size, frame, transfer, PinWait::brief);
  }
  // Undoes take() of a range that copies: the pages go back from `frame`, which is empty then. As fill() otherwise.
  virtual core::Status put_back(void* address, size_t size, void* frame) {
    return fill(address, size, frame, Transfer::copy, Protect::no);
  }
  // Drops the pages of ranges whose bytes the caller knows to be safe elsewhere and protected against stores or of no
  // interest. A later access parks. -EBUSY: somebody pins a page; of each range of up to 64 MiB all has gone, or none.
  virtual core::Status drop(std::span<const Range> ranges) = 0;
  // Puts write protection on (copy only, caps().write_protect): once it returns, a store parks and is reported.
  virtual core::Status protect(void* address, size_t size) = 0;
  // Takes it off and wakes the range. -EPERM: this is forbidden, and nothing has changed.
  virtual core::Status unprotect(void* address, size_t size) = 0;
  // Touches of the (absent) range get SIGBUS from now on, parked threads at once.
  virtual core::Status fail(void* address, size_t size) = 0;
  // Undoes fail(): the range is absent and trapped again. On error accesses get SIGBUS still.
  virtual core::Status unfail(void* address, size_t size) = 0;
  // Puts the file itself over the (absent) range, from `offset` on: from now on, parked threads at once, an access
  // meets what it meets in a mapping by mmap, with SIGBUS beyond the file's end as it is then. shared: stores go to the
  // file (fd is open for writing); else they are this mapping's own. On error the range is absent and trapped still,
  // or, if the trap is refused as well, accesses get SIGBUS. -EOPNOTSUPP: this backend cannot.
  virtual core::Status map_file(void* address, size_t size, int fd, uint64_t offset, bool shared) {
    (void)address, (void)size, (void)fd, (void)offset, (void)shared;
    return core::Status(EOPNOTSUPP, "");
  }
  // Undoes map_file(), and fail() beside it: the range is absent and trapped again. An access meanwhile gets SIGSEGV
  // (park it). On error accesses get SIGBUS, and it can be tried again.
  virtual core::Status unmap_file(void* address, size_t size) {
    (void)address, (void)size;
    return core::Status(EOPNOTSUPP, "");
  }
  // Lets parked threads of the range try again.
  virtual core::Status wake(void* address, size_t size) = 0;

  // Address space whose pages may travel by fill(move) and take(): private, anonymous, readable and writable, aligned
  // to 2 MiB, not inherited by fork, nothing resident. release with munmap().
  virtual core::Status reserve_frames(size_t size, bool huge, void** address) = 0;

  // With Transfer::install a range is made of blocks, and an arena of frames, of one size each, fixed when it is made;
  // fill() and take() name whole blocks, `frame` is where the frame is mapped, and take() brings the frame back that is
  // in place (-EINVAL when `frame` is another). attach() and attach_at() take the whole range for one block where its
  // size may be one, else 2 MiB or 4 KiB; attach_at() over a hole in a range of this trap keeps that range's blocks.
  // The other backends do not care. near: where, if it is a multiple of `align` and nothing is there; else, and for 0,
  // anywhere. Nothing that is mapped is replaced.
  virtual core::Status attach_blocks(size_t size, size_t align, size_t block_size, Transfer transfer, uintptr_t near,
                                     void** address) {
    (void)block_size, (void)near;
    return attach(size, align, transfer, address);
  }
  // Address space for frames of `frame_size` bytes each, nothing resident. Give back with release_arena().
  virtual core::Status reserve_arena(size_t size, size_t frame_size, void** address) {
    return reserve_frames(size, frame_size >= core::kHugePage, address);
  }
  // Makes frames resident and zero; without it the first access does, where the backend has no say in memory. -ENOMEM,
  // or -EDQUOT when a limit of the machine is reached: nothing is resident then. node: memory node to take it from, -1
  // for the caller's.
  virtual core::Status populate_frames(void* address, size_t size, int node) {
    (void)address;
    (void)size;
    (void)node;
    return {};
  }
  // Gives the memory of frames back; the address space stays. -EBUSY: somebody pins one, it stays resident.
  virtual core::Status release_frames(void* address, size_t size);
  // The same of many ranges. All are tried; the status is the first failure.
  virtual core::Status release_many(std::span<const Range> ranges);
  virtual core::Status release_arena(void* address, size_t size);
  // What the administrator of the machine asks of every process now. -EOPNOTSUPP: nobody does.
  virtual core::Status knobs(Knobs* out) {
    (void)out;
    return core::Status(EOPNOTSUPP, "");
  }
};

struct UserfaultOptions {
  bool allow_move = true;
  bool allow_write_protect = true;
  bool allow_poison = true;
  bool allow_privileged = true;  // false: behave as an ordinary user would
  bool allow_device = true;      // /dev/userfaultfd
  bool allow_process_madvise = true;
  bool allow_table_reclaim = true;  // rely on MADV_DONTNEED freeing page tables (Linux 6.14)
  bool core_dump = false;           // what is resident in ranges goes into core dumps
};

// userfaultfd: /dev/userfaultfd, the system call, or the system call limited to user-mode faults, whichever is allowed.
// Probes each feature by using it once. -EPERM or -ENOSYS with the way to enable it when none is allowed.
core::Status make_userfault_trap(const UserfaultOptions& options, std::unique_ptr<Trap>* out);

struct KmodOptions {
  const char* device = "/dev/vmem";
};

// The module vmem.ko. -ENOENT: not loaded; -EACCES: the user is not in the group; -EPROTONOSUPPORT or -EOPNOTSUPP: it
// is too old; each with what to do.
core::Status make_kmod_trap(const KmodOptions& options, std::unique_ptr<Trap>* out);

}  // namespace vmem::trap
