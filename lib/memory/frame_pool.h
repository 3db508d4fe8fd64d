// Frames to move blocks through, and buffers to read into, within the host budget.
//
// - Charged as idle = free frames; charged as buffers = slabs; frames in use are charged as blocks.
// - With the module a frame has memory only after populate(). That may fail at a limit of the
//   machine, or when memory is short. The budget is then capped for a while, so that blocks are
//   evicted for frames.
//
// Not thread-safe: the pager's lock protects it, except populate().
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
  // The budget asks this pool for room as long as the pool lives.
  FramePool(trap::Trap& trap, HostBudget& budget, std::vector<int> numa_nodes);
  ~FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  // Returns a frame of `size` bytes with its charge; its contents are undefined. Returns nullptr if
  // the budget minus `reserve` has no room, or there is no address space. *fresh: the frame has no
  // memory yet. With the module populate() must give it some. Otherwise the first store does, which
  // waits for the kernel to find and clear pages.
  std::byte* get(size_t size, uint64_t reserve, bool* fresh = nullptr);
  // Gives a fresh frame zeroed memory. Needs no lock; may wait for the kernel. After an error the
  // frame is still fresh.
  core::Status populate(std::byte* frame, size_t size) const;
  // Takes back a fresh frame that got no memory.
  void put_fresh(std::byte* frame, size_t size);
  // Takes back a frame with its pages: it stays populated, ready for the next get().
  void put(std::byte* frame, size_t size);
  // Bytes of frames that a freed region may leave in the pool for the next region, instead of
  // freeing them at once.
  uint64_t room_to_keep() const;

  // Memory that is charged and not used: free frames, and idle buffers beyond those that each size
  // must keep.
  uint64_t idle() const { return budget_.charged(Use::idle) + idle_buffers(); }
  // Starts to watch which unused memory get() and get_bounce() do not take.
  void watch();
  // unused(): bytes not taken since watch(). release_unused() gives up to `bytes` of them, or
  // somewhat more, back to the system.
  uint64_t unused() const;
  void release_unused(uint64_t bytes);
  // Reserves address space for the first frames of this size, so that no block waits for that.
  // Returns false if there is none.
  bool want_slots(size_t size);
  // Returns the address space of a frame without memory or charge, where take() puts a block's
  // pages. Returns nullptr if there is none.
  std::byte* get_slot(size_t size);
  void put_slot(std::byte* slot, size_t size);

  // Returns a buffer that stays mapped, for I/O in copy mode and compressed images. Each size has
  // at most limit_bytes of them. Returns nullptr if all are busy and there is no memory for another
  // slab.
  std::byte* get_bounce(size_t size);
  // Takes back a buffer, or a slot with the pages of a block that take() brought out: the slot's
  // memory goes back to the system.
  void put_bounce(std::byte* buffer, size_t size);
  // One more region uses buffers of this size. The largest limit_bytes applies. Makes slabs of at
  // least least_bytes, and at least one, so that a fault always finds a buffer. Returns -ENOMEM,
  // which names the budget, with nothing changed.
  core::Status want_bounce(size_t size, uint64_t limit_bytes, uint64_t least_bytes = 0);
  // One region less uses them. The slabs go with the last region, when all buffers are back.
  void unwant_bounce(size_t size);
  // Sets the limit. Keeps the old one if there is no memory to list more slabs.
  void limit_bounce(size_t size, uint64_t limit_bytes) noexcept;
  size_t free_bounce(size_t size) const;
  // Bytes of slabs that `size` must keep: least_bytes, rounded up to slabs.
  static uint64_t least_bounce(size_t size, uint64_t least_bytes);

  // Asks the kernel to take memory for [at, at + size) from the chosen NUMA nodes.
  void place(void* at, size_t size) const;
  // Bytes that blocks cannot use: tables, fixed memory, and each size's least slabs. Idle slabs
  // beyond those are released when others need the room.
  uint64_t least_overhead() const;
  // Bytes that blocks can use, including blocks that cannot be evicted.
  uint64_t room() const { return budget_.limit() - std::min(budget_.limit(), least_overhead()); }
  // The bytes of buffers that are released when others need the room.
  uint64_t idle_buffers() const;

  // For tests: returns what is wrong, or an empty string.
  std::string check() const;

 private:
  struct Slab {  // of bounce buffers
    std::byte* at;
    size_t busy = 0;                     // how many
    std::array<uint64_t, 8> taken = {};  // which buffers: a bit each
  };
  struct Class {
    core::OwnVector<std::byte*> free;   // populated; has room for every frame, as `slots` has: putting needs no memory
    core::OwnVector<std::byte*> slots;  // empty; a heap, the lowest at its head
    size_t frames = 0;                  // made so far
    size_t unused = 0;                  // free frames that get() has not taken since watch()
    size_t unused_slabs = 0;            // idle slabs likewise
    core::OwnVector<Slab> slabs;        // the first are used first, so that the last become idle
    size_t idle = 0;                    // slabs with no buffer in use
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
  const bool install_;  // the frames are the module's
  std::vector<int> nodes_;
  std::array<Class, core::kBlockSizes> classes_;
  core::OwnVector<trap::Range> arenas_;  // of frames
  core::OwnVector<trap::Range> beside_;  // slabs of buffers that are not module frames
};

}  // namespace vmem::memory
