// Reads memory whose rights the program may change at any moment: a page of a region that it has given PROT_NONE, or
// unmapped, or made a guard page (MADV_GUARD_INSTALL, Linux 6.13). A load of it by a thread of ours would end the
// process, so the kernel reads, at a sixth of the speed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::core {

// A page that the page tables do not have: it was never there or was dropped, and has zeros, as in anonymous memory; or
// it is somewhere else, and enters them by the next access, as in mappings of a device.
enum class Absent : uint8_t { zeros, elsewhere };
// What a guard page means: it has no contents, nor had it any since it was made one.
enum class Guards : uint8_t { are_zeros, refused };

// Copies `size` bytes, also where the program may not read them now. Any thread but the one that serves faults;
// allocates nothing. It may wait, as a load may, for the trap to answer for a page that the program has dropped. 0, or
// -EFAULT: the kernel reads one of them for nobody, and what is in `to` means nothing.
int read_guarded(void* to, const void* from, size_t size, Absent absent, Guards guards = Guards::are_zeros);
// The same where no trap stands, so that any thread may; anonymous memory.
int read_guarded_untrapped(void* to, const void* from, size_t size, Guards guards = Guards::are_zeros);
// The same, slower, and never waiting: for the threads that answer for the trap. Where absent pages are elsewhere, the
// caller keeps them there.
int read_guarded_at_once(void* to, const void* from, size_t size, Absent absent, Guards guards = Guards::are_zeros);

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
  // Whether some of [at, at + size) is sealed (mseal, Linux 6.10): it cannot be unmapped. False, too, where the kernel
  // does not tell (before Linux 6.11). Memory whose rights nobody changes meanwhile.
  bool sealed(const void* at, size_t size) const;
  // What stands in for pages of [at, at + size), at this moment. 0.4 us for 64 KiB; any thread. `some` may be guard
  // pages, and may be pages that the kernel has swapped out.
  enum class Marks : uint8_t { none, some, guards };
  Marks marks(const void* at, size_t size) const;

 private:
  const int fd_, pagemap_;
};

}  // namespace vmem::core
