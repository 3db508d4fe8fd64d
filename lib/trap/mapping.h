// Address space for regions and frames, and who stands where in it. Blocking: only on the kernel's mmap lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/mutex.h"
#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap {

enum class HugePages : bool { no, yes };

// Refuses what is no range of whole pages: size 0, unaligned, wrapping. `call` names the caller in the message.
core::Status check_range(const char* call, uintptr_t start, size_t size);

// Inaccessible, private, anonymous address space without swap reservation, aligned to `align`. Release with munmap().
// near: taken if it is so aligned and nothing is there; nothing that is mapped is replaced.
core::Status reserve_space(size_t size, size_t align, uintptr_t* start, uintptr_t near = 0);
// Puts such address space over whatever is mapped at `start`.
core::Status replace_with_space(uintptr_t start, size_t size);
// Turns reserved space into memory that the descriptor watches: `mode` is that of os::enroll(), 0 for none. It becomes
// accessible last, so that no access ever finds memory that is accessible and not watched.
core::Status arm(int fd, uintptr_t start, size_t size, uint64_t mode, HugePages huge, CoreDump dump = CoreDump::no);
// Maps the file over the range; *replaced: it is there, also where something else failed.
core::Status replace_with_file(int fd, uint64_t offset, bool shared, uintptr_t start, size_t size,
                               CoreDump dump = CoreDump::no, bool* replaced = nullptr);
// Maps an empty file over the range: every access gets SIGBUS. Where it fails the range may have lost its contents.
core::Status replace_with_sigbus(int empty_file, uintptr_t start, size_t size);

// Which ranges are trapped, for the two things the kernel does not tell: how a range was attached, when its trap has to
// be made anew, and what would turn into zeros when the descriptor is closed. Any thread.
class RangeMap {
 public:
  struct Entry {
    size_t size;
    Transfer transfer;
    bool owned;  // address space is ours (attach), not the caller's (attach_at)
    CoreDump dump;
  };

  // Needs no memory where the range is in one that is known already, and is the same. Throws without a change.
  void set(uintptr_t start, size_t size, Transfer transfer, bool owned, CoreDump dump = CoreDump::no);
  // False: nothing was set together that is just this range.
  bool set_dump(uintptr_t start, size_t size, CoreDump dump);
  // Needs no memory unless the range is the middle of what was set together.
  void erase(uintptr_t start, size_t size);
  // False when `address` is in no attached range.
  bool find(uintptr_t address, Entry* out) const;
  // Any range that is still there and owned.
  bool first_owned(Range* out) const;

 private:
  void cut(uintptr_t start, size_t size) VMEM_REQUIRES(mutex_);

  mutable core::Mutex mutex_;  // leaf; nothing is touched or called under it
  std::map<uintptr_t, Entry> entries_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::trap
