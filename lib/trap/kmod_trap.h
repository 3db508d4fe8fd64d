// The module as a backend of Trap: ranges and arenas by address, operations as batches.
//
// Transfer::copy is there for memory that cannot be the caller's frame (staging frames of a device): a frame of the
// trap's own is filled and installed, and released when the block goes.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "core/mutex.h"
#include "core/os_allocator.h"
#include "trap/trap.h"
#include "vmem/vmem_uapi.h"

namespace vmem::trap {

// Which offsets of the context stand at which addresses. Any thread; leaf lock.
class OffsetMap {
 public:
  struct Entry {
    size_t size;      // bytes
    uint64_t offset;  // in the context, of the first byte
    size_t unit;      // bytes of a block or frame
    bool owned;       // a region whose address space is ours (attach), not the caller's (attach_at)
  };
  // Room for one more entry: had before anything is made, so that to know what was made needs no memory.
  using Room = core::OwnMap<uintptr_t, Entry>::node_type;
  // -ENOMEM.
  static core::Status make_room(size_t size, Room* out);
  void set(uintptr_t start, const Entry& entry, Room room);
  // The entry that begins at `start` and has `size` bytes, taken out. False when there is none.
  bool take(uintptr_t start, size_t size, Entry* out);
  // The entry that holds [start, start + size) wholly; *begin is where it begins.
  bool find(uintptr_t start, size_t size, uintptr_t* begin, Entry* out) const;
  // Some entry that overlaps [start, start + size), taken out. False when there is none.
  bool take_overlap(uintptr_t start, size_t size, Entry* out);
  bool first(uintptr_t* begin, Entry* out) const;
  // Where the block that begins at `offset` was accessed, as we know it: at `address`, or, where that is another
  // mapping of it, at its beginning. A block that nobody knows: `address`.
  uintptr_t accessed(uintptr_t address, uint64_t offset) const;

 private:
  mutable core::Mutex mutex_;
  core::OwnMap<uintptr_t, Entry> entries_ VMEM_GUARDED_BY(mutex_);
};

// The operations of one call: few need no memory.
class KmodOps {
 public:
  static constexpr size_t kFew = 64;
  explicit KmodOps(size_t count) : count_(count) {
    if (count > kFew) many_.resize(count);
  }
  KmodOps(const KmodOps&) = delete;
  KmodOps& operator=(const KmodOps&) = delete;
  std::span<vmem_op> all() { return {many_.empty() ? few_.data() : many_.data(), count_}; }

 private:
  size_t count_;
  std::array<vmem_op, kFew> few_{};
  std::vector<vmem_op> many_;
};

class KmodTrap final : public Trap {
 public:
  // largest: of the module's blocks and frames, bytes. What is larger is several of them, which come and go together.
  KmodTrap(int fd, int event, uint32_t batch_max, size_t largest, bool system_calls);
  ~KmodTrap() override;
  KmodTrap(const KmodTrap&) = delete;
  KmodTrap& operator=(const KmodTrap&) = delete;

  const Caps& caps() const override { return caps_; }
  core::Status attach(size_t size, size_t align, Transfer transfer, void** address) override;
  core::Status attach_at(void* address, size_t size, Transfer transfer) override;
  core::Status attach_blocks(size_t size, size_t align, size_t block_size, Transfer transfer, uintptr_t near,
                             void** address) override;
  core::Status detach(void* address, size_t size) override;
  core::Status unmap(void* address, size_t size) override;
  core::Status wait(std::span<Event> out, int timeout_ms, size_t* count) override;
  void interrupt() override;
  core::Status fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) override;
  core::Status fill_zero(void* address, size_t size) override;
  core::Status take(void* address, size_t size, void* frame, Transfer transfer, PinWait wait) override;
  core::Status drop(std::span<const Range> ranges) override;
  core::Status protect(void* address, size_t size) override;
  core::Status unprotect(void* address, size_t size) override;
  core::Status fail(void* address, size_t size) override;
  core::Status unfail(void* address, size_t size) override;
  core::Status wake(void* address, size_t size) override;
  core::Status reserve_frames(size_t size, bool huge, void** address) override;
  core::Status reserve_arena(size_t size, size_t frame_size, void** address) override;
  core::Status populate_frames(void* address, size_t size, int node) override;
  core::Status release_frames(void* address, size_t size) override;
  core::Status release_arena(void* address, size_t size) override;
  core::Status knobs(Knobs* out) override;
  int event_descriptor() const override { return fd_; }

 private:
  core::Status create(uint32_t kind, size_t size, size_t unit, uint64_t* offset);
  void destroy(uint64_t offset);
  core::Status map_over(uintptr_t start, size_t size, uint64_t offset);
  // Makes a range of the module and maps it over whatever is at `start`; entry: all but its offset. On error there is
  // no range, and what was mapped is.
  core::Status create_at(uint32_t kind, uintptr_t start, OffsetMap::Entry* entry);
  // The same in address space of its own.
  core::Status create_in_space(uint32_t kind, size_t align, uintptr_t near, OffsetMap* map, OffsetMap::Entry entry,
                               void** address);
  // Whole blocks of one region: their first offset, size and number. -EINVAL or -ENOENT with words.
  core::Status blocks(const char* call, const void* address, size_t size, uint64_t* offset, size_t* unit,
                      size_t* count) const;
  core::Status frames(const char* call, const void* address, size_t size, uint64_t* offset, size_t* unit) const;
  // The same operation on `count` blocks; results that equal `fine` are success. The first other one is the error.
  core::Status each(const char* call, uint32_t op, uint64_t offset, size_t unit, size_t count, int fine);
  int batch(std::span<vmem_op> ops);
  core::Status attach_hole(void* address, size_t size, uintptr_t begin, const OffsetMap::Entry& entry);
  // Of blocks that were put in place a moment ago; waits for who pins one meanwhile. ops: those with result 0.
  void take_back(std::span<const vmem_op> ops);
  // All of the blocks, kFew at most, or none: those that were removed come back where another is pinned. So a block of
  // the pager's, which is several here where it is above 2 MiB and copied, or above what the module has, is whole or
  // gone.
  core::Status drop_together(uint64_t offset, size_t unit, size_t count);
  core::Status copy_in(void* address, size_t size, void* image, Protect protect);
  core::Status copy_out(void* address, size_t size, void* image);
  core::Status get_copy_frame(size_t unit, std::byte** frame);
  void put_copy_frame(std::byte* frame, size_t unit);
  core::Status note_copies(void* address, std::span<const vmem_op> ops, std::span<std::byte* const> made, size_t unit);
  // The frames of our own that stood in `count` blocks from `offset` on, which are absent now or destroyed.
  void release_copies(uint64_t offset, size_t unit, size_t count);

  const int fd_, event_;
  const uint32_t batch_max_;
  const size_t largest_;  // bytes
  Caps caps_;
  OffsetMap regions_, arenas_;

  struct Copy {
    std::byte* frame;
    size_t unit;
  };
  struct Slots {
    std::vector<std::byte*> empty;  // room for all: giving one back needs no memory
    size_t made = 0;
  };
  core::Mutex copies_mutex_;  // leaf
  std::map<uint64_t, Copy> copies_
      VMEM_GUARDED_BY(copies_mutex_);  // frames of our own in place, by offset of their block
  std::map<size_t, Slots> slots_ VMEM_GUARDED_BY(copies_mutex_);  // by unit: address space for such frames
};

}  // namespace vmem::trap
