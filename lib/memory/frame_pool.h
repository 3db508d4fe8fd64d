// Frames to move blocks through, and buffers to read into, within the host budget.
//
//   charged for idle = free frames, charged for buffers = slabs; what is handed out is charged for blocks
//
// Not thread-safe: the pager's lock protects it, except populate().
//
// Over the module a frame has memory only after populate(), which may be refused: by a limit of the machine, or because
// memory is short. The budget is then capped for a while, so that blocks are evicted for frames.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/os_allocator.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/host_budget.h"
#include "trap/trap.h"

namespace vmem::memory {

class FramePool final : private IdleMemory {
 public:
  // The budget asks this pool for room from now on.
  FramePool(trap::Trap& trap, HostBudget& budget, std::vector<int> numa_nodes);
  ~FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  // A frame of `size` bytes with its charge: contents undefined. nullptr: no memory within budget - reserve. *fresh: it
  // has no memory yet. Over the module populate() must give it some; elsewhere whoever stores first does, and waits for
  // the system to find and to clear it.
  std::byte* get(size_t size, uint64_t reserve, bool* fresh = nullptr);
  // Gives a fresh frame memory, zeroed. Without the lock; may wait for the system. On an error it is still fresh.
  core::Status populate(std::byte* frame, size_t size) const;
  // A fresh frame that got no memory comes back.
  void put_fresh(std::byte* frame, size_t size);
  // A frame comes back with its pages: it stays populated, ready for the next get().
  void put(std::byte* frame, size_t size);
  // Bytes of frames that a region which goes may leave to the next, in place of giving them back at once.
  uint64_t room_to_keep() const;

  // Memory that is charged and not used: free frames, and idle buffers beyond what their size must keep.
  uint64_t idle() const { return budget_.charged(Use::idle) + idle_buffers(); }
  // From now on it is watched which of it nobody takes.
  void watch();
  // Bytes that nobody has taken since; gives up to so many of them back to the system, or somewhat more.
  uint64_t unused() const;
  void release_unused(uint64_t bytes);
  // Address space for the first frames of this size, so that none of its blocks ever waits for that. False: there is
  // none.
  bool want_slots(size_t size);
  // Address space of a frame without memory or charge: where take() puts a block's pages. nullptr: no address space.
  std::byte* get_slot(size_t size);
  void put_slot(std::byte* slot, size_t size);

  // Buffers that stay mapped: I/O in copy mode, compressed images. Bounded by limit_bytes per size; nullptr: all busy,
  // or no memory for another slab.
  std::byte* get_bounce(size_t size);
  // Also a slot with the pages of a block that take() brought out: its memory goes back to the system.
  void put_bounce(std::byte* buffer, size_t size);
  // One more region uses buffers of this size. The limit is the largest that anybody asked for. Makes sure of the first
  // slab, or of least_bytes, so that a fault always finds one. -ENOMEM names the budget; nothing changed then.
  core::Status want_bounce(size_t size, uint64_t limit_bytes, uint64_t least_bytes = 0);
  // One region less: the slabs go with the last, whose buffers are all back.
  void unwant_bounce(size_t size);
  // Without memory for more slabs the limit stays.
  void limit_bounce(size_t size, uint64_t limit_bytes) noexcept;
  size_t free_bounce(size_t size) const;
  // Bytes of slabs of buffers that `size` must keep: what least_bytes asks for, rounded to slabs.
  static uint64_t least_bounce(size_t size, uint64_t least_bytes);

  // Asks the kernel to take memory for [at, at + size) from the chosen NUMA nodes.
  void place(void* at, size_t size) const;
  // What cannot be had for blocks: tables, fixed memory, and of each size's slabs the least. Idle slabs beyond that go
  // to whoever needs the room.
  uint64_t least_overhead() const;
  // What blocks can have, and those that nobody can evict have some of it.
  uint64_t room() const { return budget_.limit() - std::min(budget_.limit(), least_overhead()); }
  // Of what is charged for buffers: it goes to whoever needs the room.
  uint64_t idle_buffers() const;

  // Tests: what is wrong; empty: nothing.
  std::string check() const;

 private:
  struct Slab {  // of bounce buffers
    std::byte* at;
    size_t busy = 0;                     // how many
    std::array<uint64_t, 8> taken = {};  // which: a bit each
  };
  struct Class {
    core::OwnVector<std::byte*>
        free;  // populated; room for every frame there is, as in slots: giving back needs no memory
    core::OwnVector<std::byte*> slots;  // empty; a heap, the lowest at its head
    size_t frames = 0;                  // made so far
    size_t unused = 0;                  // free frames that nobody has taken since watch(), and slabs likewise
    size_t unused_slabs = 0;
    core::OwnVector<Slab> slabs;  // the first are used first, so that the last become idle
    size_t idle = 0;              // slabs of which no buffer is in use
    uint64_t bounce_limit = 0, bounce_least = 0, bounce_users = 0;
  };
  static size_t slab_of(size_t size) { return std::max(size, core::kHugePage); }
  static size_t index(size_t size);
  bool grow_slots(size_t size) noexcept;
  std::byte* get_slab(size_t size);
  void reserve_slabs(Class& c, size_t slab, uint64_t limit);
  bool release(std::byte* frame, size_t size);
  uint64_t release_free(Class& c, size_t size, uint64_t bytes);
  uint64_t release_idle(Class& c, size_t size, uint64_t bytes);
  bool release_slab(size_t size, core::OwnVector<Slab>::iterator slab);
  uint64_t release_frames(uint64_t bytes) override;
  uint64_t release_buffers(uint64_t bytes) override;

  trap::Trap& trap_;
  HostBudget& budget_;
  const bool install_;  // frames are the module's
  std::vector<int> nodes_;
  std::array<Class, core::kBlockSizes> classes_;
  core::OwnVector<trap::Range> arenas_;  // of frames
  core::OwnVector<trap::Range> beside_;  // slabs of buffers beside the module's frames
};

}  // namespace vmem::memory
