// Which blocks leave host memory, and when: for those who wait for memory, for the watermarks, for prefetches to the
// SSD and behind scans. policy::EvictionPolicy names the victims, Writeback takes them out. Here are the reclaim
// threads, who also give up waits that nothing can end.
//
//   what is leased, or a region that is being freed, is not begun with; one that was chosen and could not be taken is
//   admitted again
//
// The pager's lock protects it.
#pragma once

#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "pager/account/shared.h"
#include "pager/host/background_writes.h"
#include "pager/host/reclaim_requests.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

class Reclaim : private Shared {
 public:
  // What is asked of those who know the devices, under the lock.
  class Above {
   public:
    // Staging frames of which size blocks have to leave, looking from one pool on; nothing: none.
    virtual std::optional<uint8_t> short_of_staging(uint8_t first) VMEM_LOCKED = 0;
    // The policy has chosen a host copy. False: it stays, being all there is of its block.
    virtual bool evict_copy(core::FrameId copy) VMEM_LOCKED = 0;
    // Host memory is short: what the CPU is shown of blocks on devices may go.
    virtual void host_is_short() VMEM_LOCKED = 0;

   protected:
    ~Above() = default;
  };

  Reclaim(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed, MemoryWaits& waits, PageIn& page_in,
          Isolator& isolator, Writeback& write_back, ReclaimRequests& requests, MemoryFreed& freed, Above& above)
      : Shared(shared),
        pressure_(pressure),
        failed_(failed),
        waits_(waits),
        page_in_(page_in),
        isolator_(isolator),
        writeback_(write_back),
        requests_(requests),
        freed_(freed),
        above_(above),
        background_(shared, isolator, write_back) {}

  // Unlocked. So many threads, or fewer: that is slower, and not wrong.
  core::Status start(unsigned threads) VMEM_UNLOCKED;
  // Locked: they end soon; unlocked: they have.
  void stop() VMEM_LOCKED;
  void join() VMEM_UNLOCKED;

  // The block is at rest in host memory, and a prefetch to the SSD met it before that: it is asked again.
  void leaves(Region& r, core::BlockIndex b) VMEM_LOCKED;
  BackgroundWrites& background() { return background_; }

 private:
  struct Short {
    bool host = false;                    // host memory
    bool stuck = false;                   // somebody waits, and nothing moves
    std::optional<uint8_t> staging = {};  // staging frames, of this pool
  };
  void loop() VMEM_UNLOCKED;
  void wait_for_work(Lock& lock) VMEM_LOCKED;
  void serve_request(Lock& lock) VMEM_LOCKED;
  void wait_for_writes(Lock& lock, uint64_t now_ns) VMEM_LOCKED;
  void shrink(Lock& lock, const Short& what, uint8_t* next_staging, size_t* passed) VMEM_LOCKED;
  void set_aside(core::FrameId id) VMEM_LOCKED;
  bool admit_aside(uint64_t now_ns) VMEM_LOCKED;

  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  MemoryWaits& waits_;
  PageIn& page_in_;
  Isolator& isolator_;
  Writeback& writeback_;
  ReclaimRequests& requests_;
  MemoryFreed& freed_;
  Above& above_;
  BackgroundWrites background_;
  std::vector<std::thread> threads_;
  uint64_t pins_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;  // when to look whether pins have ended
  // Blocks that no policy knows until something can be written: there may be some, and some that were set aside since
  // the search for them began anew, which is here.
  bool any_aside_ VMEM_GUARDED_BY(core::big_lock) = false;
  bool aside_since_ VMEM_GUARDED_BY(core::big_lock) = false;
  core::FrameId aside_next_ VMEM_GUARDED_BY(core::big_lock) = 0;
  // Some stay aside until a file that refused a write is asked again: the first of those times.
  uint64_t aside_ns_ VMEM_GUARDED_BY(core::big_lock) = UINT64_MAX;
  bool stop_ VMEM_GUARDED_BY(core::big_lock) = false;
};

}  // namespace vmem::pager
