// The module vmem.ko as a backend of Trap: ranges and arenas by address, operations in batches.
//
// Transfer::copy serves memory that cannot be a frame of the module, such as a device's staging
// frames. The trap fills and installs a frame of its own, and releases it when the block leaves.
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

// Maps addresses to offsets in the context. Any thread; leaf lock.
class OffsetMap {
 public:
  struct Entry {
    size_t size;      // bytes
    uint64_t offset;  // of the first byte, in the context
    size_t unit;      // bytes of a block or frame
    bool owned;       // a region in our own address space (attach), not the caller's (attach_at)
  };
  // Memory for one more entry. Allocated before a range is made, so that recording the range cannot
  // fail.
  using Room = core::OwnMap<uintptr_t, Entry>::node_type;
  // Returns 0 or -ENOMEM.
  static core::Status make_room(size_t size, Room* out);
  void set(uintptr_t start, const Entry& entry, Room room);
  // Removes the entry that begins at `start` and has `size` bytes. Returns false if there is none.
  bool take(uintptr_t start, size_t size, Entry* out);
  // Finds the entry that contains [start, start + size); *begin is its start.
  bool find(uintptr_t start, size_t size, uintptr_t* begin, Entry* out) const;
  // Removes an entry that overlaps [start, start + size). Returns false if there is none.
  bool take_overlap(uintptr_t start, size_t size, Entry* out);
  bool first(uintptr_t* begin, Entry* out) const;
  // Translates the address of an access of the block at `offset` to our mapping. Returns `address`
  // if it lies there, otherwise the block's start there. Returns `address` for an unknown block.
  uintptr_t accessed(uintptr_t address, uint64_t offset) const;

 private:
  mutable core::Mutex mutex_;
  core::OwnMap<uintptr_t, Entry> entries_ VMEM_GUARDED_BY(mutex_);
};

// The operations of one call; a few need no memory.
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
  // largest: bytes of the module's largest block or frame. A larger block is several of them, which
  // come and go together.
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
  // Makes a range of the module and maps it over the mapping at `start`. entry: complete except for
  // its offset. On error there is no range, and the old mapping stays.
  core::Status create_at(uint32_t kind, uintptr_t start, OffsetMap::Entry* entry);
  // Same, in its own address space.
  core::Status create_in_space(uint32_t kind, size_t align, uintptr_t near, OffsetMap* map, OffsetMap::Entry entry,
                               void** address);
  // Finds the first offset, size and number of whole blocks of one region. Returns -EINVAL or
  // -ENOENT with a message.
  core::Status blocks(const char* call, const void* address, size_t size, uint64_t* offset, size_t* unit,
                      size_t* count) const;
  core::Status frames(const char* call, const void* address, size_t size, uint64_t* offset, size_t* unit) const;
  // Runs one operation on `count` blocks. A result equal to `fine` is success. Returns the first
  // other failure.
  core::Status each(const char* call, uint32_t op, uint64_t offset, size_t unit, size_t count, int fine);
  int batch(std::span<vmem_op> ops);
  core::Status attach_hole(void* address, size_t size, uintptr_t begin, const OffsetMap::Entry& entry);
  // Removes the blocks of `ops` with result 0, which were just installed. Waits while one is
  // pinned.
  void take_back(std::span<const vmem_op> ops);
  // Removes all of the blocks, at most kFew, or none: if one is pinned, the others are put back. So
  // a block of the pager that is several here (copied and above 2 MiB, or larger than the module
  // allows) is whole or gone.
  core::Status drop_together(uint64_t offset, size_t unit, size_t count);
  core::Status copy_in(void* address, size_t size, void* image, Protect protect);
  core::Status copy_out(void* address, size_t size, void* image);
  core::Status get_copy_frame(size_t unit, std::byte** frame);
  void put_copy_frame(std::byte* frame, size_t unit);
  core::Status note_copies(void* address, std::span<const vmem_op> ops, std::span<std::byte* const> made, size_t unit);
  // Releases our own frames of `count` blocks from `offset` on, which are absent or destroyed.
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
    std::vector<std::byte*> empty;  // capacity for all, so that returning one needs no memory
    size_t made = 0;
  };
  core::Mutex copies_mutex_;  // leaf
  // Our own frames in place, by offset of their block.
  std::map<uint64_t, Copy> copies_ VMEM_GUARDED_BY(copies_mutex_);
  std::map<size_t, Slots> slots_ VMEM_GUARDED_BY(copies_mutex_);  // by unit: address space for such frames
};

}  // namespace vmem::trap
