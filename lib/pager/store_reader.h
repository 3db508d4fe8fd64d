// Reads blocks from the store, or from their file: says what is to be read, and whether what was read is what was
// written. For the ways into host memory and to a device alike.
//
//   bytes of the store are used only if they have the digest that was taken before they were written, unless the
//   setting or the region says otherwise; what comes from a file that is written has its digest taken here
#pragma once

#include <atomic>

#include "pager/shared.h"

namespace vmem::pager {

class StoreReader : private Shared {
 public:
  explicit StoreReader(const Shared& shared) : Shared(shared), verify_(config_.checksum) {}

  // Describes the read of a move whose image (and coded) are set; `end` goes on with it.
  void prepare_read(Move* m, core::Urgency urgency, IoEnd& end) VMEM_LOCKED;
  // It is over: decodes and verifies it; the status is the move's.
  void verify_read(Move* m) VMEM_UNLOCKED;
  // What is to be read is a hole of the file, so there is nothing to read.
  bool find_hole(Move* m) VMEM_UNLOCKED;

  void set_verify(bool on) { verify_.store(on, std::memory_order_relaxed); }

 private:
  std::atomic<bool> verify_;  // setting checksum
};

}  // namespace vmem::pager
