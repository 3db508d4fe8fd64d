// What the CPU is shown of blocks on devices whose page tables are their own (device::CpuView::split), and who waits
// to be shown something. An access of such a block waits until a worker has looked at it (CpuMapper):
//
//   nobody leases it            it comes to host memory, as with any hint; what is shown of it is the block then
//   .. load, read mostly        as under READ leases, where it can be
//   READ leases, load           it is shown: a copy stands in place, write-protected, and the device keeps the block
//   READ leases, store          .. then the copy may change, and the device's bytes are stale: they go, and the copy is
//                               the block, when the last lease has ended; an acquire waits for that, or is refused.
//                               What a sync or the end of the program writes is the copy
//   a WRITE lease               the access waits for its end, at most the fault time-out
//
//   a block that is `asked` has an access that waits, and so has one whose accesses get SIGBUS; one is `shown` if and
//   only if it is among the shown, and stale only then; device_stale_bytes() = the blocks of those
//
// Not thread-safe: the pager's lock protects it. What is refused for want of memory changes nothing.
#pragma once

#include <cstdint>
#include <string>

#include "core/counters.h"
#include "core/inplace_vector.h"
#include "core/pooled_list.h"
#include "core/types.h"
#include "pager/block/frame_table.h"
#include "pager/block/region.h"
#include "pager/block/stall_clock.h"
#include "trap/trap.h"

namespace vmem::pager {

struct CpuFault {  // of a block on a device with page tables of its own
  Region* region;
  core::BlockIndex block;
  uint64_t since_ns;
  uint64_t mark;            // of StallClock
  uint64_t not_before = 0;  // what failed is tried again then
  bool starved = false;     // .. and accesses are refused until it succeeds
  // For how long it has waited for WRITE leases to end, and when that was looked at last: with accesses that wait
  // somebody looks, unless the machine stands still.
  uint64_t lent_ns = 0, looked_ns = 0;
  bool loads = false;                             // it is, or may be, a load that waits
  uintptr_t load_at = 0;                          // .. at this page, or at others, too; 0: that is not known
  bool gives_up = false;                          // stores have waited for room in vain: refused once nothing is shown
  bool made_room = false;                         // another copy has gone for the one that it waits for
  core::InplaceVector<uintptr_t, 8> stores = {};  // .. at these pages, or more if it is full
};
struct CpuMapping {  // a block on a device that the CPU is shown a copy of
  Region* region;
  core::BlockIndex block;
  uint64_t since_ns;
};

class CpuMappings {
 public:
  static constexpr uint64_t kTryAgain = 20000000;     // ns until what failed is tried again
  static constexpr uint64_t kAskAgain = 100000000;    // .. whose accesses are refused: they have got their signals
  static constexpr uint64_t kLookedAt = 100000000;    // .. that a wait counts between two looks at most
  static constexpr uint64_t kShownAtLeast = 5000000;  // .. until a copy may go for want of memory: it has been accessed
  // Accesses that meet no page of what they are shown: so many were met before, and reported late. Not so the next.
  static constexpr uint8_t kReportedLate = 3;

  // separate: the devices have page tables of their own. Where they have not, nobody waits here.
  CpuMappings(trap::Trap& trap, FrameTable& frame_table, WaitClock& waits, core::Counters& counters, bool split)
      : trap_(trap), frame_table_(frame_table), waits_(waits), counters_(counters), split_(split) {}

  // A wait that goes on, as Transition has it; since_ns 0: there is none.
  struct Since {
    uint64_t since_ns, mark;
  };
  // On a device, met by a fault. True: somebody waits who did not before.
  bool met(Region& r, core::BlockIndex b, const trap::Fault& fault, uint64_t now_ns);
  // It waits for its turn, unless it does already. failed: its last try; the wait is the same. True: it did not.
  bool ask(Region& r, core::BlockIndex b, uint64_t now_ns, const Since& failed = {});
  // It has come to rest on a device, in a region that stays: who met the trap meanwhile has not been answered. True: it
  // waits, and did not before.
  bool answer(Region& r, core::BlockIndex b, uint64_t now_ns, const Since& failed = {});

  // Those that wait, in the order in which they came.
  using iterator = PooledList<CpuFault>::iterator;
  bool waits() const { return !accesses_.empty(); }
  iterator begin() { return accesses_.begin(); }
  iterator end() { return accesses_.end(); }
  iterator erase(iterator which) { return accesses_.erase(which); }
  iterator begun(iterator which);  // what it waited for is on its way: erased

  // What decides about an access beside what is known here; of a block that is not on a device nothing.
  struct Around {
    uint64_t now_ns = 0;
    uint64_t lent_most_ns = 0;  // for so long a WRITE lease is waited for
    bool lost = false;          // the device
    bool lent = false;          // for writing
    bool leased = false;        // at a device that is not lost
    bool elsewhere = false;     // .. another, where it is to go first
    bool shows = false;         // nobody leases it, and it may be shown
    bool room = false;          // one more block may be stale
    bool may_hide = false;      // nothing was begun before
  };
  enum class Next : uint8_t {
    wait,          // nothing can be done now
    erase,         // nobody waits any more, or not here
    again,         // it was answered
    hide,          // what is shown has to go first
    change,        // the CPU is to change what it is shown: change()
    show,          // shown a copy: begun(), or stays()
    move,          // to host memory: the same
    refuse,        // there is no memory, for too long: refuse()
    refuse_store,  // .. no room for one more stale block
    refuse_lent,   // it was lent for writing for too long
  };
  Next next(CpuFault& access, const Around& around);
  Next stays(CpuFault& access, uint64_t now_ns) const;  // wait, or refuse
  // Who waits for it, and whoever accesses it before its entry is through, gets SIGBUS. refuse_store: only those whose
  // pages are known, where they are few.
  void refuse(CpuFault& access, Next why, uint64_t now_ns);
  // Accesses of it are answered again. False: the trap does not take back what gives SIGBUS, the block has to stay
  // where it is, and this is to be called again.
  bool unrefuse(Region& r, core::BlockIndex b);

  // A copy is to be made: what it takes to know of it is had before any of it is in place. False: there is no memory.
  // Then show(), or not_shown().
  bool expect();
  void not_shown() { --expected_; }
  // It is in place, write-protected: who waits is answered.
  void show(Region& r, core::BlockIndex b, uint64_t now_ns);
  // The CPU changes it from here on.
  void change(Region& r, core::BlockIndex b);
  // What is in place there belongs to somebody else now, or to nobody.
  void forget(Region& r, core::BlockIndex b);
  void forget(const Region& r);  // none of a region that goes waits, or is shown
  bool any() const { return !shown_.empty(); }
  uint64_t device_stale_bytes() const { return device_stale_bytes_; }
  // The one to go for want of memory; null: none may. lost(device): what is shown of its blocks may be all there is.
  template <typename Lost>
  const CpuMapping* oldest(uint64_t now_ns, Lost lost) const {
    for (const CpuMapping& s : shown_) {
      if (s.since_ns + kShownAtLeast > now_ns) break;
      const core::Block& block = s.region->table[s.block];
      if (s.region->dying || block.state != core::State::on_device || frame_table_[block.aux].device_stale) continue;
      if (!lost(block.device)) return &s;
    }
    return nullptr;
  }

  // Tests: recounts all. What is wrong; empty: nothing.
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
  PooledList<CpuMapping> shown_;  // the oldest first
  size_t expected_ = 0;           // .. and so many are being made, for which there is room
  uint64_t device_stale_bytes_ = 0;
};

}  // namespace vmem::pager
