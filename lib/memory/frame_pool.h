// Host memory of bounded size: the budget, frames to move blocks through, and buffers to read into. Not thread-safe:
// the pager's lock protects it, except populate().
//
//   used = credits handed out + populated free frames + bounce slabs + tables   <=   budget, always
//
// A credit is the right to keep that many bytes of memory. It travels with the bytes: frame -> region -> frame.
//
// Over the module a frame has memory only after populate(), which may be refused: by a limit of the machine, or because
// memory is short. The pool is then capped below its budget for a while, so that blocks are evicted for frames.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "core/types.h"
#include "trap/trap.h"

namespace vmem::memory {

class FramePool {
 public:
  FramePool(trap::Trap& trap, uint64_t budget_bytes, std::vector<int> numa_nodes);
  ~FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  // In force: what was set, or less while the machine gives less.
  uint64_t budget() const { return std::min({budget_, cap_, ceiling_}); }
  uint64_t wanted_budget() const { return budget_; }
  void set_budget(uint64_t bytes) { budget_ = bytes; }
  // Until lift_cap(); UINT64_MAX: none.
  void set_cap(uint64_t bytes) { cap_ = bytes; }
  void lift_cap() { cap_ = UINT64_MAX; }
  bool capped() const { return cap_ != UINT64_MAX; }
  // An administrator's limit; UINT64_MAX: none.
  void set_ceiling(uint64_t bytes) { ceiling_ = bytes; }
  uint64_t used() const { return used_; }
  uint64_t in_use() const { return used_ - free_bytes_; }
  // Bytes that could be handed out now.
  uint64_t available() const { return budget() > in_use() ? budget() - in_use() : 0; }
  // What may hold blocks that were read ahead and not used yet: the rest is for what readers are at, and for what they
  // have passed, which leaves first.
  uint64_t ahead_limit() const { return (budget() - std::min(budget(), overhead())) / 2; }
  // Memory of the library's own tables, counted like frames; free frames and idle buffers make room for them. Whoever
  // has not asked for room before may push `used` over the budget until blocks are evicted.
  void set_tables(uint64_t bytes);

  // A credit without a frame; false when it would exceed budget - reserve.
  bool take_credit(uint64_t bytes, uint64_t reserve);
  void give_credit(uint64_t bytes);

  // Memory outside the pool that counts against the budget for good; false when it would exceed budget - reserve.
  bool take_fixed(uint64_t bytes, uint64_t reserve);
  void give_fixed(uint64_t bytes);

  // A frame of `size` bytes with its credit: contents undefined. nullptr: no memory within budget - reserve. *fresh: it
  // has no memory yet, see populate().
  std::byte* get(size_t size, uint64_t reserve, bool* fresh = nullptr);
  // Gives a fresh frame memory, zeroed. Without the lock; may wait for the system. On an error it is still fresh.
  core::Status populate(std::byte* frame, size_t size) const;
  // A fresh frame that got no memory comes back.
  void put_fresh(std::byte* frame, size_t size);
  // A frame comes back with its pages: it stays populated, ready for the next get().
  void put(std::byte* frame, size_t size);
  // Address space for the first frames of this size, so that none of its blocks ever waits for that. False: there is
  // none.
  bool want_slots(size_t size);
  // Address space of a frame without memory or credit: where take() puts a block's pages. nullptr: no address space.
  std::byte* get_slot(size_t size);
  void put_slot(std::byte* slot, size_t size);

  // Buffers that stay mapped: I/O in copy mode, compressed images. Bounded by limit_bytes per size; nullptr: all busy,
  // or no memory for another slab.
  std::byte* get_bounce(size_t size);
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
  // Part of used() that is not blocks: tables, bounce slabs, fixed memory.
  uint64_t overhead() const;
  // .. and cannot be had for blocks: idle slabs beyond the least go to whoever needs the room.
  uint64_t least_overhead() const;
  uint64_t tables() const { return tables_; }
  uint64_t fixed() const { return fixed_; }

  // Gives populated free frames, then idle slabs, back to the system until used <= budget or there are none left.
  void trim();

 private:
  struct Slab {  // of bounce buffers
    std::byte* at;
    size_t busy = 0;                     // how many
    std::array<uint64_t, 8> taken = {};  // which: a bit each
  };
  struct Class {
    std::vector<std::byte*> free;  // populated; room for every frame there is, as in slots: giving back needs no memory
    std::vector<std::byte*> slots;  // empty
    size_t frames = 0;              // made so far
    std::vector<Slab> slabs;        // the first are used first, so that the last become idle
    uint64_t bounce_limit = 0, bounce_least = 0, bounce_users = 0;
  };
  static size_t slab_of(size_t size) { return std::max(size, core::kHugePage); }
  static size_t index(size_t size);
  bool grow_slots(size_t size) noexcept;
  std::byte* get_slab(size_t size);
  void reserve_slabs(Class& c, size_t slab, uint64_t limit);
  bool release(std::byte* frame, size_t size);
  uint64_t shrink_free(uint64_t bytes);
  bool fits(uint64_t bytes, uint64_t reserve);
  bool release_slab(size_t size, std::vector<Slab>::iterator slab);
  uint64_t shrink_bounce(uint64_t bytes);

  trap::Trap& trap_;
  const bool install_;  // frames are the module's
  uint64_t budget_, used_ = 0, free_bytes_ = 0, tables_ = 0, fixed_ = 0;
  uint64_t cap_ = UINT64_MAX, ceiling_ = UINT64_MAX;
  std::vector<int> nodes_;
  std::array<Class, 14> classes_;
  std::vector<trap::Range> arenas_;  // of frames
  std::vector<trap::Range> beside_;  // slabs of buffers beside the module's frames
};

}  // namespace vmem::memory
