// Reads memory whose access rights the program may change at any moment: it may set PROT_NONE,
// unmap a page of a region, or make it a guard page (MADV_GUARD_INSTALL, Linux 6.13). A load by a
// library thread would then end the process. So the kernel does the reading, which is slower.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::core {

// The meaning of an absent page. zeros: the page never existed or was dropped, as in anonymous
// memory. elsewhere: the page's contents are somewhere else and the next access maps them, as in
// device mappings.
enum class Absent : uint8_t { zeros, elsewhere };
// How guard pages read. are_zeros: as zeros, since installing a guard discards the contents.
// refused: they cannot be read.
enum class Guards : uint8_t { are_zeros, refused };

// Copies `size` bytes, even where the program may not read them now. Returns 0, or -EFAULT if the
// kernel cannot read one of them; the contents of `to` are undefined then. Like a load, it may wait
// for the trap to resolve a page that the program has dropped. Any thread except the one that
// serves faults. Does not allocate.
int read_guarded(void* to, const void* from, size_t size, Absent absent, Guards guards = Guards::are_zeros);
// Same, for anonymous memory without a trap; any thread.
int read_guarded_untrapped(void* to, const void* from, size_t size, Guards guards = Guards::are_zeros);
// Same, but slower, and never waits: for threads that serve the trap. With Absent::elsewhere, the
// caller must keep the pages present.
int read_guarded_at_once(void* to, const void* from, size_t size, Absent absent, Guards guards = Guards::are_zeros);

// As read_guarded_at_once(), for callers that may not fail for want of a descriptor. It opens the
// files of /proc when it is made, and so also reads after the program has used up its descriptors,
// has changed its root directory, or has ended its main thread. If the program has closed them, it
// opens them for each call. Thread-safe.
class GuardedReader {
 public:
  GuardedReader();
  ~GuardedReader();
  GuardedReader(const GuardedReader&) = delete;
  GuardedReader& operator=(const GuardedReader&) = delete;
  int read_at_once(void* to, const void* from, size_t size, Absent absent) const;

 private:
  const int memory_, pagemap_;
  uint64_t inode_ = 0, file_system_ = 0;  // of memory_; inode 0: it is not there
};

// Asks the kernel about this process's mappings.
class MappingQuery {
 public:
  MappingQuery();
  ~MappingQuery();
  MappingQuery(const MappingQuery&) = delete;
  MappingQuery& operator=(const MappingQuery&) = delete;
  // Returns true if one mapping covers [at, at + size) and is readable and writable, so the program
  // has not changed the rights of a part of it. Returns false if the kernel cannot tell (before
  // Linux 6.11). Cheap; any thread.
  bool plain(const void* at, size_t size) const;
  // Returns true if part of [at, at + size) is sealed (mseal, Linux 6.10) and cannot be unmapped.
  // Returns false if the kernel cannot tell (before Linux 6.11). The rights of the range must not
  // change during the call.
  bool sealed(const void* at, size_t size) const;
  // Tells if markers stand in for pages of [at, at + size). `some`: guard pages, or pages that the
  // kernel has swapped out. `guards`: guard pages, or the kernel never tells this process. Cheap;
  // any thread.
  enum class Marks : uint8_t { none, some, guards };
  Marks marks(const void* at, size_t size) const;

 private:
  const int fd_, pagemap_;
};

}  // namespace vmem::core
