// The way out of host memory: a block is isolated, compared with what the store has, written if it differs, and only
// then let go; or put back, where it is to stay, is wanted again, or could not be written.
//
//   state taking, writing: WriteBack owns the block, from Isolator::begin_take() or hold_for_drop() until it is let go
//   or put back; but one that is promoted is a device worker's memory is credited only when the store has the bytes, or
//   nobody wants them any more
//
// Called under the pager's lock, but for what says otherwise.
#pragma once

#include <span>

#include "pager/isolate.h"
#include "pager/page_in.h"
#include "pager/shared.h"
#include "pager/store_writer.h"

namespace vmem::pager {

class WriteBack final : private IoEnd {
 public:
  using Lock = core::BigLock;
  WriteBack(const Shared& shared, MemoryPressure& pressure, FailedBlocks& failed, Installer& installer, PageIn& page_in,
            Isolator& isolator, StoreWriter& writer, Room& room)
      : trap_(shared.trap),
        space_(shared.space),
        counters_(shared.counters),
        budget_(shared.budget),
        frames_(shared.frames),
        map_(shared.map),
        writes_(shared.writes),
        tables_(shared.tables),
        pressure_(pressure),
        failed_(failed),
        installer_(installer),
        page_in_(page_in),
        isolator_(isolator),
        writer_(writer),
        room_(room) {}

  // Takes each move, in state taking, to its end, or to a write whose end comes later. No more than a Batch holds.
  // Unlocked, or with a lock that is dropped meanwhile.
  void evict_batch(std::span<Move*> batch) VMEM_UNLOCKED;
  void evict_batch(Lock& lock, std::span<Move*> batch) VMEM_LOCKED;

  // A block that is resident or held loses its contents, which nobody wants any more. Locked on entry and on return.
  core::Status drop_contents(Lock& lock, Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // A held block that the store has too; after reserve_move().
  void drop_held(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  // Blocks that wait for the end of a pin, here or as they are put in place; as Installer has it.
  bool any_pinned() const VMEM_LOCKED { return !pinned_.empty() || installer_.any_pinned(); }
  void retry_pinned(Lock& lock) VMEM_LOCKED;
  // The memory of the move's block will come free.
  void leaves(Move* m) VMEM_LOCKED { writes_.leaves(m->leaving, m->region->block_size, leaves_pool(*m)); }

 private:
  void io_ended(Move* m) VMEM_UNLOCKED override;
  void settle_taken(Move* m, DeferredWork& after) VMEM_LOCKED;
  void settle_probe(Region& r, core::BlockIndex b, DeferredWork& after) VMEM_LOCKED;
  void lose_taken(Move* m) VMEM_LOCKED;
  void finish_clean(Move* m, DeferredWork& after) VMEM_LOCKED;
  void finish_write(Move* m, DeferredWork& after) VMEM_UNLOCKED;
  bool drop_written(Move* m) VMEM_UNLOCKED;
  bool drop_cut_off(Move* m) VMEM_UNLOCKED;
  void end_write(Move* m, DeferredWork& after) VMEM_UNLOCKED;
  bool write_aside(Move* m) VMEM_UNLOCKED;
  void give_buffers(Move* m) VMEM_LOCKED;
  void let_go(Move* m, core::State from, DeferredWork& after) VMEM_LOCKED;
  void put_back(Move* m, DeferredWork& after) VMEM_LOCKED;
  void stay_in_place(Move* m, core::State from) VMEM_LOCKED;
  Move* hold_for_drop(Region& r, core::BlockIndex b) VMEM_LOCKED;

  trap::Trap& trap_;
  store::Space& space_;
  core::Counters& counters_;
  HostBudget& budget_;
  FramePool& frames_;
  BlockMap& map_;
  WriteBackState& writes_;
  TableCharges& tables_;
  MemoryPressure& pressure_;
  FailedBlocks& failed_;
  Installer& installer_;
  PageIn& page_in_;
  Isolator& isolator_;
  StoreWriter& writer_;
  Room& room_;
  MoveList pinned_ VMEM_GUARDED_BY(core::big_lock);  // written as far as their file goes, and to be dropped
};

}  // namespace vmem::pager
