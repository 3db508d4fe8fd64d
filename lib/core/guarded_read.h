// Reads memory whose rights the program may change at any moment: a page of a region that it has given PROT_NONE, or
// unmapped. A load of it by a thread of ours would end the process, so the kernel reads, at a sixth of the speed.
#pragma once

#include <cstddef>

namespace vmem::core {

// Copies `size` bytes, also where the program may not read them now. Pages that are not there are zeros. Any thread but
// the one that serves faults; allocates nothing. It may wait, as a load may, for the trap to answer for a page that the
// program has dropped. 0, or -EFAULT: the kernel reads one of them for nobody, and what is in `to` means nothing.
int read_guarded(void* to, const void* from, size_t size);
// The same where no trap stands, so that any thread may.
int read_guarded_untrapped(void* to, const void* from, size_t size);
// The same, slower, and never waiting: for the threads that answer for the trap.
int read_guarded_at_once(void* to, const void* from, size_t size);

// What mappings the process has at an address.
class MappingQuery {
 public:
  MappingQuery();
  ~MappingQuery();
  MappingQuery(const MappingQuery&) = delete;
  MappingQuery& operator=(const MappingQuery&) = delete;
  // Whether one mapping has all of [at, at + size), and all the rights that memory has: nobody has changed those of a
  // part, at this moment. 0.5 us; any thread. False, too, where the kernel does not tell (before Linux 6.11).
  bool plain(const void* at, size_t size) const;

 private:
  const int fd_;
};

}  // namespace vmem::core
