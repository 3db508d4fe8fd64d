// Reads blocks from the store or from their file: sets up the read, and verifies that the bytes are
// those that were written. Used on the way into host memory and to a device.
//
// - Bytes of the store are used only if they have the digest that was taken before they were
//   written, unless the setting `checksum` or the region turns verification off. A block that comes
//   from a file and may be written has its digest taken here.
// - A digest covers each byte of the image once, after the last write to that byte.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pager/account/context.h"
#include "store/codec.h"

namespace vmem::pager {

class StoreReader {
 public:
  explicit StoreReader(PagerContext& ctx);

  // Sets up the read of a transition whose image (and coded) are set. `end` continues when the read
  // is over. wants_parts: `end` also hears of each part that arrives, unless the block is
  // compressed.
  void prepare_read(Transition* m, core::Urgency urgency, IoEnd& end, bool wants_parts = false) VMEM_LOCKED;
  // The read is over: decodes and verifies its bytes, and sets the transition's status.
  void verify_read(Transition* m) VMEM_UNLOCKED;
  // Returns true if the block is a hole of its file, so that there is nothing to read.
  bool find_hole(Transition* m) VMEM_UNLOCKED;

  void set_verify(bool on) { verify_.store(on, std::memory_order_relaxed); }

 private:
  static void came(store::Io& io, size_t bytes) VMEM_UNLOCKED;
  bool verifies(const Region& r) const;
  core::Digest digest(Transition* m) VMEM_UNLOCKED;
  store::Digester* take_digester() VMEM_UNLOCKED;
  void give_back_digester(Transition* m) VMEM_UNLOCKED;

  PagerContext& ctx_;
  std::atomic<bool> verify_;  // setting checksum
  // For blocks of which a part has come; more are seldom in flight. A block that finds none free is
  // hashed when all of it has come.
  static constexpr size_t kDigesters = 16;
  std::array<store::Digester, kDigesters> digesters_;
  std::atomic<uint32_t> free_digesters_{(1u << kDigesters) - 1};  // one bit each
};

}  // namespace vmem::pager
