#include "pager/frames.h"

#include <numaif.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "core/break.h"
#include "core/log.h"

namespace vmem::pager {

using core::kHugePage;

FramePool::FramePool(trap::Trap& trap, uint64_t budget_bytes, std::vector<int> numa_nodes)
    : trap_(trap), install_(trap.caps().install), budget_(budget_bytes), nodes_(std::move(numa_nodes)) {}

FramePool::~FramePool() {
  for (const trap::Range& arena : arenas_)
    trap_.release_arena(reinterpret_cast<void*>(arena.address), arena.size).ignore();
  for (const trap::Range& slab : slabs_) munmap(reinterpret_cast<void*>(slab.address), slab.size);
}

size_t FramePool::index(size_t size) {
  return static_cast<size_t>(std::countr_zero(size / core::kPage));
}

void FramePool::set_tables(uint64_t bytes) {
  used_ = used_ - tables_ + bytes;
  tables_ = bytes;
}

bool FramePool::take_credit(uint64_t bytes, uint64_t reserve) {
  const uint64_t most = core::broken("budget") ? UINT64_MAX / 2 : budget();
  if (used_ + bytes + reserve > most) {
    if (used_ - free_bytes_ + bytes + reserve > most) return false;
    if (!shrink_free(used_ + bytes + reserve - most)) return false;
  }
  used_ += bytes;
  return true;
}

void FramePool::give_credit(uint64_t bytes) {
  used_ -= bytes;
}

bool FramePool::take_fixed(uint64_t bytes, uint64_t reserve) {
  if (!take_credit(bytes, reserve)) return false;
  fixed_ += bytes;
  return true;
}

void FramePool::give_fixed(uint64_t bytes) {
  fixed_ -= bytes;
  give_credit(bytes);
}

std::byte* FramePool::get(size_t size, uint64_t reserve, bool* fresh) {
  Class& c = classes_[index(size)];
  if (fresh != nullptr) *fresh = false;
  if (!c.free.empty()) {
    if (used_ - free_bytes_ + size + reserve > budget()) return nullptr;
    std::byte* frame = c.free.back();
    c.free.pop_back();
    free_bytes_ -= size;
    return frame;
  }
  if (!take_credit(size, reserve)) return nullptr;
  std::byte* slot = get_slot(size);
  if (slot == nullptr) give_credit(size);
  if (fresh != nullptr) *fresh = install_;
  return slot;
}

core::Status FramePool::populate(std::byte* frame, size_t size) const {
  const int node = nodes_.empty() ? -1 : nodes_[reinterpret_cast<uintptr_t>(frame) / size % nodes_.size()];
  return trap_.populate_frames(frame, size, node);
}

void FramePool::put_fresh(std::byte* frame, size_t size) {
  put_slot(frame, size);
  give_credit(size);
}

// False: somebody pins it, so it keeps its memory.
bool FramePool::release(std::byte* frame, size_t size) {
  if (core::Status s = trap_.release_frames(frame, size); !s.ok()) {
    VMEM_LOG_ONCE(core::Level::warning, "a frame keeps its memory: %.*s", static_cast<int>(s.text().size()),
                  s.text().data());
    return false;
  }
  return true;
}

void FramePool::put(std::byte* frame, size_t size) {
  if (used_ > budget() && release(frame, size)) {  // the budget was lowered, or tables grew
    used_ -= size;
    put_slot(frame, size);
    return;
  }
  classes_[index(size)].free.push_back(frame);
  free_bytes_ += size;
}

std::byte* FramePool::get_slot(size_t size) {
  Class& c = classes_[index(size)];
  if (c.slots.empty() && !grow_slots(size)) return nullptr;
  std::byte* slot = c.slots.back();
  c.slots.pop_back();
  return slot;
}

void FramePool::put_slot(std::byte* slot, size_t size) {
  classes_[index(size)].slots.push_back(slot);
}

bool FramePool::grow_slots(size_t size) {
  const size_t bytes = std::max<size_t>(32 * size, 2 * kHugePage);
  void* at = nullptr;
  if (core::Status s = trap_.reserve_arena(bytes, size, &at); !s.ok()) {
    core::log(core::Level::warning, "no address space for frames: %.*s", static_cast<int>(s.text().size()),
              s.text().data());
    return false;
  }
  if (!install_) place(at, bytes);
  arenas_.push_back({reinterpret_cast<uintptr_t>(at), bytes});
  // Last pushed is first used: hand out ascending addresses so that neighbours share mappings.
  for (size_t offset = bytes; offset >= size; offset -= size) {
    classes_[index(size)].slots.push_back(static_cast<std::byte*>(at) + offset - size);
  }
  return true;
}

void FramePool::place(void* at, size_t size) const {
  if (nodes_.empty()) return;
  std::array<unsigned long, 16> mask{};
  for (int node : nodes_) mask[static_cast<size_t>(node) / 64] |= 1ul << (node % 64);
  if (mbind(at, size, nodes_.size() == 1 ? MPOL_BIND : MPOL_INTERLEAVE, mask.data(), mask.size() * 64, 0) != 0) {
    VMEM_LOG_ONCE(core::Level::warning, "frames cannot be placed on the NUMA nodes of setting numa_nodes: errno %d",
                  errno);
  }
}

// Memory that never stands in a region, a slab of buffers.
std::byte* FramePool::get_slab(size_t size) {
  if (!install_) return get_slot(size);  // as good, and aligned
  void* const raw = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw), at = core::round_up(start, kHugePage);
  if (at != start) munmap(raw, at - start);
  if (start + kHugePage != at) munmap(reinterpret_cast<void*>(at + size), start + kHugePage - at);
  madvise(reinterpret_cast<void*>(at), size, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(at), size, MADV_DONTFORK);
  place(reinterpret_cast<void*>(at), size);
  slabs_.push_back({at, size});
  return reinterpret_cast<std::byte*>(at);
}

std::byte* FramePool::get_bounce(size_t size) {
  Class& c = classes_[index(size)];
  if (c.bounce.empty()) {
    const size_t slab = std::max(size, kHugePage);
    if (c.bounce_bytes + slab > c.bounce_limit || !take_credit(slab, 0)) return nullptr;
    // Slabs are slots of the huge class that stay populated for good.
    std::byte* at = get_slab(slab);
    if (at == nullptr) {
      give_credit(slab);
      return nullptr;
    }
    c.bounce_bytes += slab;
    for (size_t offset = slab; offset >= size; offset -= size) c.bounce.push_back(at + offset - size);
  }
  std::byte* buffer = c.bounce.back();
  c.bounce.pop_back();
  return buffer;
}

void FramePool::put_bounce(std::byte* buffer, size_t size) {
  classes_[index(size)].bounce.push_back(buffer);
}

size_t FramePool::free_bounce(size_t size) const {
  const Class& c = classes_[index(size)];
  const uint64_t more = c.bounce_limit > c.bounce_bytes ? (c.bounce_limit - c.bounce_bytes) / size : 0;
  return c.bounce.size() + more;
}

core::Status FramePool::want_bounce(size_t size, uint64_t limit_bytes) {
  Class& c = classes_[index(size)];
  c.bounce_limit = std::max<uint64_t>({c.bounce_limit, limit_bytes, std::max(size, kHugePage)});
  if (c.bounce_bytes != 0) return {};
  std::byte* first = get_bounce(size);
  if (first == nullptr) {
    return core::error(ENOMEM, "host_budget %s has no room for an I/O buffer of %s (%s in use); raise host_budget",
                       core::human_bytes(budget()).c_str(), core::human_bytes(std::max(size, kHugePage)).c_str(),
                       core::human_bytes(used_ - free_bytes_).c_str());
  }
  put_bounce(first, size);
  return {};
}

uint64_t FramePool::overhead() const {
  uint64_t bytes = tables_ + fixed_;
  for (const Class& c : classes_) bytes += c.bounce_bytes;
  return bytes;
}

bool FramePool::shrink_free(uint64_t bytes) {
  uint64_t freed = 0;
  std::vector<std::byte*> pinned;
  for (size_t i = 0; i < classes_.size() && freed < bytes; ++i) {
    const size_t size = core::kPage << i;
    Class& c = classes_[i];
    while (!c.free.empty() && freed < bytes) {
      std::byte* frame = c.free.back();
      c.free.pop_back();
      if (!release(frame, size)) {
        pinned.push_back(frame);
        continue;
      }
      put_slot(frame, size);
      free_bytes_ -= size;
      used_ -= size;
      freed += size;
    }
    c.free.insert(c.free.end(), pinned.begin(), pinned.end());
    pinned.clear();
  }
  return freed >= bytes;
}

void FramePool::trim() {
  if (used_ > budget()) shrink_free(used_ - budget());
}

}  // namespace vmem::pager
