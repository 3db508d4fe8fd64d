// Copies of blocks on devices that the CPU is shown, and accesses that wait to be shown one, on
// devices with page tables of their own (device::CpuView::split). An access of such a block waits
// until a worker has looked at it (CpuMapper):
//
// - No lease: the block comes to host memory, as for a hint. If a copy is shown, the copy becomes
//   the block.
// - No lease, a load, advised read mostly: as under READ leases, if possible.
// - READ leases, a load: a copy is put in place, write-protected, and the device keeps the block.
// - READ leases, a store: the copy becomes writable, and the device's bytes are stale. When the
//   last lease has ended, the device's bytes go and the copy becomes the block. Until then an
//   acquire waits or is refused, and a sync or the end of the program writes the copy.
// - A WRITE lease: the access waits for its end, at most the fault time-out.
//
// Invariants:
//
// - A block that is `asked` has an access that waits. So has a block whose accesses get SIGBUS.
// - A block is cpu_mapped if and only if it is in the list of shown copies. Only such blocks are
//   stale.
// - device_stale_bytes() is the sum of the stale blocks.
//
// Not thread-safe: the pager's lock protects it. A call that fails for want of memory changes
// nothing.
#pragma once

#include <cstdint>
#include <string>

#include "core/counters.h"
#include "core/inplace_vector.h"
#include "core/types.h"
#include "pager/block/frame_table.h"
#include "pager/block/pooled_list.h"
#include "pager/block/region.h"
#include "pager/block/stall_clock.h"
#include "trap/trap.h"

namespace vmem::pager {

struct CpuFault {  // an access of a block on a device with page tables of its own
  Region* region;
  core::BlockIndex block;
  uint64_t since_ns;
  uint64_t mark;            // of StallClock
  uint64_t not_before = 0;  // when to try again after a failure
  bool starved = false;     // accesses get SIGBUS until a try succeeds
  // How long it has waited for WRITE leases to end, and when that was last looked at. While
  // accesses wait, workers look often, unless the machine stands still.
  uint64_t lent_ns = 0, looked_ns = 0;
  bool loads = false;                             // a load waits, or may wait
  uintptr_t load_at = 0;                          // loads: at this page, perhaps also at others; 0: not known
  bool gives_up = false;                          // stores waited for room in vain: refused once no copy is shown
  bool made_room = false;                         // another copy was dropped for the one that it waits for
  core::InplaceVector<uintptr_t, 8> stores = {};  // pages at which stores wait; if full, perhaps not all
};
struct CpuMapping {  // a block on a device, with a copy in place for the CPU
  Region* region;
  core::BlockIndex block;
  uint64_t since_ns;
};

class CpuMappings {
 public:
  static constexpr uint64_t kTryAgain = 20000000;   // ns until a failed try is repeated
  static constexpr uint64_t kAskAgain = 100000000;  // ns until then if accesses get SIGBUS: they have it by then
  static constexpr uint64_t kLookedAt = 100000000;  // ns that a wait counts at most between two looks
  // ns before a copy may go for want of memory: by then it has been accessed.
  static constexpr uint64_t kShownAtLeast = 5000000;
  // Accesses that find no page of a shown copy. So many may have come before the copy and be
  // reported late; the next one cannot.
  static constexpr uint8_t kReportedLate = 3;

  // split: the devices have page tables of their own. If not, no access waits here.
  CpuMappings(trap::Trap& trap, FrameTable& frame_table, WaitClock& waits, core::Counters& counters, bool split)
      : trap_(trap), frame_table_(frame_table), waits_(waits), counters_(counters), split_(split) {}

  // A wait that goes on, as in Transition. since_ns 0: there is none.
  struct Since {
    uint64_t since_ns, mark;
  };
  // A fault came to a block on a device. Returns true if it waits and the block had no waiting
  // access before.
  bool met(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now_ns);
  // Queues the block's accesses, if they are not queued. failed: the wait of the last try, which
  // goes on. Returns true if they were not.
  bool ask(Region& r, core::BlockIndex b, uint64_t now_ns, const Since& failed = {});
  // The block has come to rest on a device, in a region that stays: answers or queues accesses
  // that met the trap until then. Returns true if they wait and did not before.
  bool answer(Region& r, core::BlockIndex b, uint64_t now_ns, const Since& failed = {});

  // The accesses that wait, in the order in which they came.
  using iterator = PooledList<CpuFault>::iterator;
  bool waits() const { return !accesses_.empty(); }
  iterator begin() { return accesses_.begin(); }
  iterator end() { return accesses_.end(); }
  iterator erase(iterator which) { return accesses_.erase(which); }
  iterator begun(iterator which);  // erases an access: what it waited for is on its way

  // Facts that decide about an access and are not known here. None are given for a block that is
  // not on a device.
  struct Around {
    uint64_t now_ns = 0;
    uint64_t lent_most_ns = 0;  // how long to wait for WRITE leases
    bool lost = false;          // the device is lost
    bool lent = false;          // under a WRITE lease
    bool leased = false;        // leased, and the device is not lost
    bool elsewhere = false;     // leased at another device, where it goes first
    bool shows = false;         // not leased, and a copy may be shown
    bool room = false;          // one more block may be stale
    bool may_hide = false;      // the caller has begun nothing that it would delay
  };
  enum class Next : uint8_t {
    wait,          // nothing can be done now
    erase,         // no access waits any more, or not here
    again,         // it was answered: call next() again
    hide,          // the copy has to go first
    change,        // the CPU may change the copy: call change()
    show,          // show a copy; then call begun(), or stays() if that cannot begin
    move,          // move it to host memory; then the same
    refuse,        // no memory for too long: call refuse()
    refuse_store,  // no room for one more stale block: call refuse()
    refuse_lent,   // under a WRITE lease for too long: call refuse()
  };
  Next next(CpuFault& access, const Around& around);
  Next stays(CpuFault& access, uint64_t now_ns) const;  // returns wait or refuse
  // Answers waiting accesses with SIGBUS, and all that come until unrefuse(). refuse_store: only
  // stores whose pages are known, if they are few.
  void refuse(CpuFault& access, Next why, uint64_t now_ns);
  // Ends refuse(). Returns false if the trap does not take SIGBUS back: the block must stay where
  // it is, and the caller tries again later.
  bool unrefuse(Region& r, core::BlockIndex b);

  // Gets the memory to list one more copy, before any part of it is in place. Returns false if
  // there is none. Otherwise call show() or not_shown() next.
  bool expect();
  void not_shown() { --expected_; }
  // The copy is in place, write-protected: answers waiting accesses.
  void show(Region& r, core::BlockIndex b, uint64_t now_ns);
  // Makes the copy writable: the block is stale from here on.
  void change(Region& r, core::BlockIndex b);
  // The copy is gone, or is the block now.
  void forget(Region& r, core::BlockIndex b);
  void forget(const Region& r);  // drops all that belongs to a region that is being freed
  bool any() const { return !shown_.empty(); }
  uint64_t device_stale_bytes() const { return device_stale_bytes_; }
  // Returns the oldest copy that may go for want of memory, or null. lost(device): copies of its
  // blocks may be the last ones.
  template <typename Lost>
  const CpuMapping* oldest(uint64_t now_ns, Lost lost) const {
    for (const CpuMapping& s : shown_) {
      if (s.since_ns + kShownAtLeast > now_ns) break;
      const core::Block& block = s.region->table[s.block];
      if (s.region->dying || block.state != core::State::on_device || frame_table_[block.aux].dev.stale) continue;
      if (!lost(block.device)) return &s;
    }
    return nullptr;
  }

  // For tests: recounts everything. Returns what is wrong, or an empty string.
  std::string check() const;

 private:
  CpuFault* find(const Region& r, core::BlockIndex b);
  void answered(Region& r, core::BlockIndex b);
  bool over(const CpuFault& access) const;
  void fail(CpuFault& access, bool stores);

  trap::Trap& trap_;
  FrameTable& frame_table_;
  WaitClock& waits_;
  core::Counters& counters_;
  const bool split_;
  PooledList<CpuFault> accesses_;
  PooledList<CpuMapping> shown_;  // oldest first
  size_t expected_ = 0;           // copies that are being made; shown_ has room for them
  uint64_t device_stale_bytes_ = 0;
};

}  // namespace vmem::pager
