// Reads blocks from the store, or from their file: says what is to be read, and whether what was read is what was
// written. For the ways into host memory and to a device alike.
//
//   bytes of the store are used only if they have the digest that was taken before they were written, unless the
//   setting or the region says otherwise; what comes from a file that is written has its digest taken here
//   a digest has each byte of the image once, when nobody writes to it any more
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pager/account/shared.h"
#include "store/codec.h"

namespace vmem::pager {

class StoreReader : private Shared {
 public:
  explicit StoreReader(const Shared& shared) : Shared(shared), verify_(config_.checksum) {}

  // Describes the read of a transition whose image (and coded) are set; `end` goes on with it, and is told what has
  // come of the image where it `wants_parts` and that can be had.
  void prepare_read(Transition* m, core::Urgency urgency, IoEnd& end, bool wants_parts = false) VMEM_LOCKED;
  // It is over: decodes and verifies it; the status is the transition's.
  void verify_read(Transition* m) VMEM_UNLOCKED;
  // What is to be read is a hole of the file, so there is nothing to read.
  bool find_hole(Transition* m) VMEM_UNLOCKED;

  void set_verify(bool on) { verify_.store(on, std::memory_order_relaxed); }

 private:
  static void came(store::Io& io, size_t bytes) VMEM_UNLOCKED;
  bool verifies(const Region& r) const;
  core::Digest digest(Transition* m) VMEM_UNLOCKED;
  store::Digester* take_digester() VMEM_UNLOCKED;
  void give_back_digester(Transition* m) VMEM_UNLOCKED;

  std::atomic<bool> verify_;  // setting checksum
  // Of blocks of which a part has come: more are seldom under way. A block that finds none free has its digest taken
  // when all of it is there.
  static constexpr size_t kDigesters = 16;
  std::array<store::Digester, kDigesters> digesters_;
  std::atomic<uint32_t> free_digesters_{(1u << kDigesters) - 1};  // a bit each
};

}  // namespace vmem::pager
