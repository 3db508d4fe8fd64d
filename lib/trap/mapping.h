// Address space for regions and frames, and which ranges of it are trapped. Blocks only on the
// kernel's mmap lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/mutex.h"
#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap {

enum class HugePages : bool { no, yes };

// Refuses a range that is not whole pages: size 0, unaligned, or wrapping. `call` names the caller
// in the message.
core::Status check_range(const char* call, uintptr_t start, size_t size);

// Reserves inaccessible, private, anonymous address space, aligned to `align`, without a swap
// reservation. Release it with munmap(). near: used if it is aligned and free. Never replaces a
// mapping.
core::Status reserve_space(size_t size, size_t align, uintptr_t* start, uintptr_t near = 0);
// Puts such address space over the mapping at `start`.
core::Status replace_with_space(uintptr_t start, size_t size);
// Turns reserved space into memory that the descriptor watches. mode: as for os::enroll(), 0 for
// none. It becomes accessible last, so that no access finds memory that is accessible but not
// watched.
core::Status arm(int fd, uintptr_t start, size_t size, uint64_t mode, HugePages huge, CoreDump dump = CoreDump::no);
// Maps the file over the range. *replaced: the file is mapped, even if a later step failed.
core::Status replace_with_file(int fd, uint64_t offset, bool shared, uintptr_t start, size_t size,
                               CoreDump dump = CoreDump::no, bool* replaced = nullptr);
// Maps an empty file over the range: every access gets SIGBUS. On failure the range may have lost
// its contents.
core::Status replace_with_sigbus(int empty_file, uintptr_t start, size_t size);

// Remembers trapped ranges, for two facts that the kernel does not tell: how to attach a range
// again, and which ranges would turn into zeros when the descriptor is closed. Any thread.
class RangeMap {
 public:
  struct Entry {
    size_t size;
    Transfer transfer;
    bool owned;  // our own address space (attach), not the caller's (attach_at)
    CoreDump dump;
  };

  // Needs no memory if the range lies in a known, equal one. If it throws, nothing has changed.
  void set(uintptr_t start, size_t size, Transfer transfer, bool owned, CoreDump dump = CoreDump::no);
  // Returns false if no set() was for exactly this range.
  bool set_dump(uintptr_t start, size_t size, CoreDump dump);
  // Needs no memory unless the range is the middle of one set().
  void erase(uintptr_t start, size_t size);
  // Returns false if `address` is in no attached range.
  bool find(uintptr_t address, Entry* out) const;
  // Returns any owned range that is left.
  bool first_owned(Range* out) const;

 private:
  void cut(uintptr_t start, size_t size) VMEM_REQUIRES(mutex_);

  mutable core::Mutex mutex_;  // leaf; no memory is touched, and nothing called, under it
  std::map<uintptr_t, Entry> entries_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::trap
