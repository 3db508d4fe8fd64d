// What this kernel lets this process do with userfaultfd, found out by doing it once.
#pragma once

#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap {

struct Probed {
  int fd = -1;                 // the descriptor; the caller closes it
  int self = -1;               // pidfd of this process when caps.batch_drop; the caller closes it
  int pagemap = -1;            // /proc/self/pagemap when caps.move; the caller closes it
  bool take_by_remap = false;  // MREMAP_DONTUNMAP works
  bool frees_tables = false;   // dropping a range takes its empty page tables away
  Caps caps;
};

// Opens a userfaultfd and tries each feature in scratch memory. -EPERM or -ENOSYS, with the way to enable it, when none
// can be opened. Takes a few ms and starts one thread for a moment.
core::Status probe(const UserfaultOptions& options, Probed* out);

}  // namespace vmem::trap
