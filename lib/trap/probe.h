// Finds out what this process can do with userfaultfd on this kernel, by trying it.
#pragma once

#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap {

struct Probed {
  int fd = -1;                 // the userfaultfd; the caller closes it
  int self = -1;               // pidfd of this process if caps.batch_drop; the caller closes it
  int pagemap = -1;            // /proc/self/pagemap if caps.move; the caller closes it
  bool take_by_remap = false;  // MREMAP_DONTUNMAP works
  bool frees_tables = false;   // dropping a range frees its empty page tables
  Caps caps;
};

// Opens a userfaultfd and tries each feature in scratch memory. Returns -EPERM or -ENOSYS, with the
// way to enable it, if none can be opened. Takes a few ms and briefly runs one thread.
core::Status probe(const UserfaultOptions& options, Probed* out);

}  // namespace vmem::trap
