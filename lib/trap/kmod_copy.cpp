// Copies blocks into frames of the trap's own (Transfer::copy with the module), and fills holes in
// its ranges.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "core/log.h"
#include "core/mutex.h"
#include "core/step.h"
#include "trap/kmod_trap.h"

namespace vmem::trap {

using core::error;
using core::Status;
using core::system_error;

namespace {

uintptr_t at(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

constexpr size_t kSlots = 32;  // reserved together

Status no_memory() {
  return error(ENOMEM, "no memory to record frames");
}

}  // namespace

// Restores the range where something else was mapped over a part of it. Its blocks come back absent
// at their old offsets, so that neighbours keep theirs.
Status KmodTrap::attach_hole(void* address, size_t size, uintptr_t begin, const OffsetMap::Entry& entry) {
  const uint64_t offset = entry.offset + (at(address) - begin);
  const size_t count = size / entry.unit;
  if (Status s = each("attach_at", VMEM_OP_REMOVE, offset, entry.unit, count, -ENOENT); !s.ok()) return s;
  release_copies(offset, entry.unit, count);
  if (Status s = each("attach_at", VMEM_OP_UNFAIL, offset, entry.unit, count, -ENODATA); !s.ok()) return s;
  if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    return system_error(errno, "attach_at: cannot map %s of the module at 0x%zx", core::human_bytes(size).c_str(),
                        at(address));
  }
  core::step("trap.attach_at.mapped");
  return {};
}

// Returns a populated frame of zeros.
Status KmodTrap::get_copy_frame(size_t unit, std::byte** frame) try {
  std::byte* slot = nullptr;
  {
    const core::MutexLock lock(copies_mutex_);
    Slots& slots = slots_[unit];
    if (!slots.empty.empty()) {
      slot = slots.empty.back();
      slots.empty.pop_back();
    } else {
      slots.empty.reserve(slots.made + kSlots);
      slots.made += kSlots;
    }
  }
  if (slot == nullptr) {
    void* arena = nullptr;
    if (Status s = reserve_arena(kSlots * unit, unit, &arena); !s.ok()) {
      const core::MutexLock lock(copies_mutex_);
      slots_[unit].made -= kSlots;
      return s;
    }
    slot = static_cast<std::byte*>(arena);
    const core::MutexLock lock(copies_mutex_);
    for (size_t i = kSlots; i > 1; --i) slots_[unit].empty.push_back(slot + (i - 1) * unit);
  }
  if (Status s = populate_frames(slot, unit, -1); !s.ok()) {
    const core::MutexLock lock(copies_mutex_);
    slots_[unit].empty.push_back(slot);
    return s;
  }
  *frame = slot;
  return {};
} catch (const std::bad_alloc&) {
  return no_memory();
}

void KmodTrap::put_copy_frame(std::byte* frame, size_t unit) {
  if (Status s = release_frames(frame, unit); !s.ok()) {
    // The frame is pinned: its memory stays until the context ends, and the slot is not used again.
    VMEM_LOG_OFTEN(core::Level::warning, "%.*s; its memory stays in use", static_cast<int>(s.text().size()),
                   s.text().data());
    return;
  }
  const core::MutexLock lock(copies_mutex_);
  slots_[unit].empty.push_back(frame);
}

void KmodTrap::release_copies(uint64_t offset, size_t unit, size_t count) {
  std::map<uint64_t, Copy> gone;
  {
    const core::MutexLock lock(copies_mutex_);
    const auto last = copies_.lower_bound(offset + unit * count);
    for (auto it = copies_.lower_bound(offset); it != last;) gone.insert(copies_.extract(it++));
  }
  for (const auto& [at, c] : gone) put_copy_frame(c.frame, c.unit);
}

// Records the frames before they are in place: a thread that drops a block right after must find
// its frame. Records all of them, or none on failure.
Status KmodTrap::note_copies(void* address, std::span<const vmem_op> ops, std::span<std::byte* const> made,
                             size_t unit) {
  Status failure;
  const core::MutexLock lock(copies_mutex_);
  try {
    for (size_t i = 0; i < made.size(); ++i) {
      if (!copies_.emplace(ops[i].block, Copy{made[i], unit}).second)
        failure = error(EEXIST, "fill: the block at 0x%zx is in place already", at(address) + i * unit);
    }
  } catch (const std::bad_alloc&) {
    failure = no_memory();
  }
  for (size_t i = 0; i < made.size() && !failure.ok(); ++i) {
    const auto it = copies_.find(ops[i].block);
    if (it != copies_.end() && it->second.frame == made[i]) copies_.erase(it);
  }
  return failure;
}

Status KmodTrap::copy_in(void* address, size_t size, void* image, Protect protect) {
  uint64_t block = 0;
  size_t unit = 0, count = 0;
  if (Status s = blocks("fill", address, size, &block, &unit, &count); !s.ok()) return s;
  KmodOps room(count);
  const std::span<vmem_op> ops = room.all();
  std::vector<std::byte*> made;
  try {
    made.reserve(count);
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
  Status failure;
  for (size_t i = 0; i < count && failure.ok(); ++i) {
    std::byte* frame = nullptr;
    failure = get_copy_frame(unit, &frame);
    if (!failure.ok()) break;
    made.push_back(frame);
    memcpy(frame, static_cast<const std::byte*>(image) + i * unit, unit);
    uint64_t slot = 0;
    size_t frame_unit = 0;
    failure = frames("fill", frame, unit, &slot, &frame_unit);
    ops[i].op = VMEM_OP_INSTALL;
    ops[i].flags = protect == Protect::yes ? VMEM_OPF_PROTECT : 0;
    ops[i].block = block + i * unit;
    ops[i].frame = slot;
  }
  if (failure.ok()) failure = note_copies(address, ops, made, unit);
  if (!failure.ok()) {
    for (std::byte* frame : made) put_copy_frame(frame, unit);
    return failure;
  }
  if (const int err = batch(ops); err != 0) {
    release_copies(block, unit, count);
    return system_error(err, "fill: the module refuses the batch");
  }
  for (size_t i = 0; i < count; ++i) {
    if (ops[i].result != 0 && failure.ok())
      failure = system_error(ops[i].result, "fill: block at 0x%zx", at(address) + i * unit);
  }
  if (failure.ok()) return {};
  core::step("trap.fill.undo");
  take_back(ops);
  for (size_t i = 0; i < count && protect == Protect::no; ++i) {
    // A thread may have stored to it since.
    if (ops[i].result == 0) memcpy(static_cast<std::byte*>(image) + i * unit, made[i], unit);
  }
  release_copies(block, unit, count);
  return failure;
}

Status KmodTrap::copy_out(void* address, size_t size, void* image) {
  uint64_t block = 0;
  size_t unit = 0, count = 0;
  if (Status s = blocks("take", address, size, &block, &unit, &count); !s.ok()) return s;
  std::vector<Copy> copies;
  {
    const core::MutexLock lock(copies_mutex_);
    for (size_t i = 0; i < count; ++i) {
      const auto it = copies_.find(block + i * unit);
      if (it == copies_.end()) return error(ENOENT, "take: the block at 0x%zx is absent", at(address) + i * unit);
      copies.push_back(it->second);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    Status s = each("take", VMEM_OP_REMOVE, block + i * unit, unit, 1, 0);
    if (s.ok()) continue;
    core::step("trap.take.undo");
    for (size_t back = 0; back < i; ++back) {
      vmem_op o{};
      uint64_t slot = 0;
      size_t frame_unit = 0;
      frames("take", copies[back].frame, unit, &slot, &frame_unit).ignore();
      o.op = VMEM_OP_INSTALL;
      o.block = block + back * unit;
      o.frame = slot;
      if (batch({&o, 1}) != 0 || o.result != 0)
        VMEM_LOG_OFTEN(core::Level::error, "take: a block that was taken cannot be put back: %d", o.result);
    }
    return s;
  }
  for (size_t i = 0; i < count; ++i) memcpy(static_cast<std::byte*>(image) + i * unit, copies[i].frame, unit);
  release_copies(block, unit, count);
  return {};
}

}  // namespace vmem::trap
