#include "memory/frame_pool.h"

#include <numaif.h>
#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <functional>

#include "core/log.h"

namespace vmem::memory {

using core::kHugePage;

FramePool::FramePool(trap::Trap& trap, HostBudget& budget, std::vector<int> numa_nodes)
    : trap_(trap), budget_(budget), install_(trap.caps().install), nodes_(std::move(numa_nodes)) {
  budget_.set_idle(this);
}

FramePool::~FramePool() {
  budget_.set_idle(nullptr);
  for (const trap::Range& arena : arenas_)
    trap_.release_arena(reinterpret_cast<void*>(arena.address), arena.size).ignore();
  for (const trap::Range& slab : beside_) munmap(reinterpret_cast<void*>(slab.address), slab.size);
}

size_t FramePool::index(size_t size) {
  const auto n = static_cast<size_t>(std::countr_zero(size / core::kPage));
  if (n >= std::tuple_size_v<decltype(classes_)>) __builtin_unreachable();  // GCC 13 warns of a size of 0
  return n;
}

std::byte* FramePool::get(size_t size, uint64_t reserve, bool* fresh) {
  Class& c = classes_[index(size)];
  if (fresh != nullptr) *fresh = false;
  if (!c.free.empty()) {
    if (!budget_.charge_idle(size, reserve)) return nullptr;
    std::byte* frame = c.free.back();
    c.free.pop_back();
    c.unused = std::min(c.unused, c.free.size());
    return frame;
  }
  if (!budget_.charge(size, reserve)) return nullptr;
  std::byte* slot = get_slot(size);
  if (slot == nullptr) budget_.credit(size);
  if (fresh != nullptr) *fresh = slot != nullptr;
  return slot;
}

core::Status FramePool::populate(std::byte* frame, size_t size) const {
  const int node = nodes_.empty() ? -1 : nodes_[reinterpret_cast<uintptr_t>(frame) / size % nodes_.size()];
  return trap_.populate_frames(frame, size, node);
}

void FramePool::put_fresh(std::byte* frame, size_t size) {
  put_slot(frame, size);
  budget_.credit(size);
}

// Returns false if the frame is pinned: it keeps its memory.
bool FramePool::release(std::byte* frame, size_t size) {
  if (core::Status s = trap_.release_frames(frame, size); !s.ok()) {
    VMEM_LOG_ONCE(core::Level::warning, "a frame keeps its memory: %.*s", static_cast<int>(s.text().size()),
                  s.text().data());
    return false;
  }
  return true;
}

void FramePool::put(std::byte* frame, size_t size) {
  if (budget_.over() && release(frame, size)) {  // the budget was lowered, or tables grew
    budget_.credit(size);
    put_slot(frame, size);
    return;
  }
  classes_[index(size)].free.push_back(frame);
  budget_.credit_idle(size);
}

// Enough for readahead in two regions. A program that frees a region to use the memory otherwise
// would miss more.
uint64_t FramePool::room_to_keep() const {
  const uint64_t most = std::min(room() / 2, uint64_t{256} << 20), free = budget_.charged(Use::idle);
  return budget_.over() ? 0 : most - std::min(most, free);
}

void FramePool::watch() {
  for (Class& c : classes_) {
    c.unused = c.free.size();
    c.unused_slabs = c.idle;
  }
}

uint64_t FramePool::unused() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < classes_.size(); ++i) {
    const Class& c = classes_[i];
    const uint64_t size = core::kPage << i, slab = slab_of(size), made = c.slabs.size() * slab;
    bytes += c.unused * size + std::min(c.unused_slabs * slab, made - std::min(made, c.bounce_least));
  }
  return bytes;
}

// Skips pinned frames, until the next watch().
void FramePool::release_unused(uint64_t bytes) {
  for (size_t i = 0; i < classes_.size() && bytes != 0; ++i) {
    Class& c = classes_[i];
    const uint64_t size = core::kPage << i, slab = slab_of(size);
    const uint64_t frames = std::min<uint64_t>(c.unused, core::round_up(bytes, size) / size);
    c.unused -= frames;
    release_free(c, size, frames * size);
    bytes -= std::min(bytes, frames * size);
    const uint64_t slabs = std::min<uint64_t>(c.unused_slabs, core::round_up(bytes, slab) / slab);
    c.unused_slabs -= slabs;
    release_idle(c, size, slabs * slab);
    bytes -= std::min(bytes, slabs * slab);
  }
}

std::byte* FramePool::get_slot(size_t size) {
  Class& c = classes_[index(size)];
  if (c.slots.empty() && !grow_slots(size)) return nullptr;
  // The lowest slot first: neighbouring blocks get adjacent slots, so that one call moves them.
  std::pop_heap(c.slots.begin(), c.slots.end(), std::greater<>());
  std::byte* slot = c.slots.back();
  c.slots.pop_back();
  return slot;
}

void FramePool::put_slot(std::byte* slot, size_t size) {
  auto& slots = classes_[index(size)].slots;
  slots.push_back(slot);
  std::push_heap(slots.begin(), slots.end(), std::greater<>());
}

bool FramePool::want_slots(size_t size) {
  constexpr size_t kLeast = 8;
  const Class& c = classes_[index(size)];
  return c.slots.size() + c.free.size() >= kLeast || grow_slots(size);
}

bool FramePool::grow_slots(size_t size) noexcept try {
  const size_t bytes = std::max<size_t>(32 * size, 2 * kHugePage);
  Class& c = classes_[index(size)];
  const size_t frames = c.frames + bytes / size;
  c.free.reserve(frames);
  c.slots.reserve(frames);
  arenas_.reserve(arenas_.size() + 1);
  void* at = nullptr;
  if (core::Status s = trap_.reserve_arena(bytes, size, &at); !s.ok()) {
    VMEM_LOG_OFTEN(core::Level::warning, "no address space for frames: %.*s", static_cast<int>(s.text().size()),
                   s.text().data());
    return false;
  }
  if (!install_) place(at, bytes);
  arenas_.push_back({reinterpret_cast<uintptr_t>(at), bytes});
  for (size_t offset = 0; offset < bytes; offset += size) put_slot(static_cast<std::byte*>(at) + offset, size);
  c.frames = frames;
  return true;
} catch (const std::bad_alloc&) {
  return false;
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

// Returns memory for a slab of buffers, which is never mapped in a region.
std::byte* FramePool::get_slab(size_t size) {
  if (!install_) return get_slot(size);                      // a slot serves as well, and is aligned
  if (beside_.size() == beside_.capacity()) return nullptr;  // want_bounce() makes room when a region is made
  void* const raw = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw), at = core::round_up(start, kHugePage);
  if (at != start) munmap(raw, at - start);
  if (start + kHugePage != at) munmap(reinterpret_cast<void*>(at + size), start + kHugePage - at);
  madvise(reinterpret_cast<void*>(at), size, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(at), size, MADV_DONTFORK);
  madvise(reinterpret_cast<void*>(at), size, MADV_DONTDUMP);  // they hold images of blocks
  place(reinterpret_cast<void*>(at), size);
  beside_.push_back({at, size});
  return reinterpret_cast<std::byte*>(at);
}

std::byte* FramePool::get_bounce(size_t size) {
  Class& c = classes_[index(size)];
  const size_t slab = slab_of(size), buffers = slab / size;
  auto it = std::find_if(c.slabs.begin(), c.slabs.end(), [&](const Slab& s) { return s.busy < buffers; });
  if (it == c.slabs.end()) {
    if ((c.slabs.size() + 1) * slab > c.bounce_limit || !budget_.charge(slab, 0, Use::buffers)) return nullptr;
    std::byte* at = get_slab(slab);
    if (at == nullptr) {
      budget_.credit(slab, Use::buffers);
      return nullptr;
    }
    it = c.slabs.insert(c.slabs.end(), Slab{at});
    ++c.idle;
  }
  size_t word = 0;
  while (it->taken[word] == UINT64_MAX) ++word;
  const unsigned bit = static_cast<unsigned>(std::countr_one(it->taken[word]));
  it->taken[word] |= uint64_t{1} << bit;
  if (it->busy++ == 0) --c.idle;
  c.unused_slabs = std::min(c.unused_slabs, c.idle);
  return it->at + (word * 64 + bit) * size;
}

void FramePool::put_bounce(std::byte* buffer, size_t size) {
  Class& c = classes_[index(size)];
  const size_t slab = slab_of(size);
  const auto it = std::find_if(c.slabs.begin(), c.slabs.end(),
                               [&](const Slab& s) { return buffer >= s.at && buffer < s.at + slab; });
  if (it == c.slabs.end()) {  // a slot
    release(buffer, size);
    put_slot(buffer, size);
    return;
  }
  const size_t i = static_cast<size_t>(buffer - it->at) / size;
  it->taken[i / 64] &= ~(uint64_t{1} << i % 64);
  if (--it->busy != 0) return;
  ++c.idle;
  if (c.slabs.size() * slab <= c.bounce_least) return;
  if (budget_.over() || c.slabs.size() * slab > c.bounce_limit) release_slab(size, it);
}

// Gives an idle slab back to the system. Returns false if its memory is pinned.
bool FramePool::release_slab(size_t size, core::OwnVector<Slab>::iterator slab) {
  const size_t bytes = slab_of(size);
  std::byte* const at = slab->at;
  if (install_) {
    munmap(at, bytes);
    std::erase_if(beside_, [&](const trap::Range& r) { return r.address == reinterpret_cast<uintptr_t>(at); });
  } else {
    if (!release(at, bytes)) return false;
    put_slot(at, bytes);
  }
  Class& c = classes_[index(size)];
  c.slabs.erase(slab);
  --c.idle;
  c.unused_slabs = std::min(c.unused_slabs, c.idle);
  budget_.credit(bytes, Use::buffers);
  return true;
}

// Releases idle slabs beyond those that the size must keep; returns the bytes of budget freed.
uint64_t FramePool::release_idle(Class& c, size_t size, uint64_t bytes) {
  const size_t slab = slab_of(size);
  uint64_t freed = 0;
  for (size_t n = c.slabs.size(); n > 0 && freed < bytes && c.slabs.size() * slab > c.bounce_least; --n) {
    const auto it = c.slabs.begin() + static_cast<std::ptrdiff_t>(n - 1);
    if (it->busy == 0 && release_slab(size, it)) freed += slab;
  }
  return freed;
}

uint64_t FramePool::release_buffers(uint64_t bytes) {
  uint64_t freed = 0;
  for (size_t i = 0; i < classes_.size() && freed < bytes; ++i)
    freed += release_idle(classes_[i], core::kPage << i, bytes - freed);
  return freed;
}

size_t FramePool::free_bounce(size_t size) const {
  const Class& c = classes_[index(size)];
  const size_t slab = slab_of(size);
  const uint64_t made = c.slabs.size() * slab;
  uint64_t free = (std::max(c.bounce_limit, made) - made) / slab * (slab / size);
  for (const Slab& s : c.slabs) free += slab / size - s.busy;
  return free;
}

uint64_t FramePool::least_bounce(size_t size, uint64_t least_bytes) {
  return core::round_up(std::max<uint64_t>(least_bytes, 1), slab_of(size));
}

void FramePool::limit_bounce(size_t size, uint64_t limit_bytes) noexcept try {
  Class& c = classes_[index(size)];
  const uint64_t limit = std::max(limit_bytes, c.bounce_least);
  reserve_slabs(c, slab_of(size), limit);
  c.bounce_limit = limit;
} catch (const std::bad_alloc&) {
}

void FramePool::reserve_slabs(Class& c, size_t slab, uint64_t limit) {
  const size_t most = limit / slab + 1;
  c.slabs.reserve(most);
  if (install_) beside_.reserve(beside_.size() + most);
}

core::Status FramePool::want_bounce(size_t size, uint64_t limit_bytes, uint64_t least_bytes) {
  Class& c = classes_[index(size)];
  const uint64_t slab = slab_of(size), least = least_bounce(size, least_bytes);
  const uint64_t limit = c.bounce_limit, kept = c.bounce_least;
  const size_t before = c.slabs.size();
  reserve_slabs(c, slab, std::max({c.bounce_limit, limit_bytes, least}));
  c.bounce_limit = std::max({c.bounce_limit, limit_bytes, least});
  // Set this before making any slab. Otherwise the charge for the second slab releases the first,
  // which is idle and beyond the least, and so on for ever.
  c.bounce_least = std::max(c.bounce_least, least);
  while (c.slabs.size() * slab < least) {
    const bool room = budget_.charge(slab, 0, Use::buffers);
    std::byte* const at = room ? get_slab(slab) : nullptr;
    if (at == nullptr) {
      if (room) budget_.credit(slab, Use::buffers);
      c.bounce_limit = limit;
      c.bounce_least = kept;
      while (c.slabs.size() > before && release_slab(size, c.slabs.end() - 1)) {
      }
      if (room)
        return core::error(ENOMEM, "no addresses, or no memory, for an I/O buffer of %s",
                           core::human_bytes(slab).c_str());
      return core::error(ENOMEM, "host_budget %s has no room for an I/O buffer of %s (%s in use); raise host_budget",
                         core::human_bytes(budget_.limit()).c_str(), core::human_bytes(slab).c_str(),
                         core::human_bytes(budget_.in_use()).c_str());
    }
    c.slabs.push_back(Slab{at});
    ++c.idle;
  }
  ++c.bounce_users;
  return {};
}

void FramePool::unwant_bounce(size_t size) {
  Class& c = classes_[index(size)];
  if (--c.bounce_users != 0) return;
  c.bounce_limit = c.bounce_least = 0;
  for (size_t n = c.slabs.size(); n > 0; --n) {
    const auto it = c.slabs.begin() + static_cast<std::ptrdiff_t>(n - 1);
    if (it->busy == 0) release_slab(size, it);
  }
}

uint64_t FramePool::least_overhead() const {
  uint64_t bytes = budget_.charged(Use::tables) + budget_.fixed();
  for (const Class& c : classes_) bytes += c.bounce_least;
  return bytes;
}

uint64_t FramePool::idle_buffers() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < classes_.size(); ++i) {
    const Class& c = classes_[i];
    const uint64_t slab = slab_of(core::kPage << i), made = c.slabs.size() * slab;
    bytes += std::min(c.idle * slab, made - std::min(made, c.bounce_least));
  }
  return bytes;
}

// Releases free frames; returns the bytes of budget freed.
uint64_t FramePool::release_free(Class& c, size_t size, uint64_t bytes) {
  uint64_t freed = 0;
  for (size_t n = c.free.size(); n > 0 && freed < bytes; --n) {
    std::byte* frame = c.free[n - 1];
    if (!release(frame, size)) continue;
    c.free.erase(c.free.begin() + static_cast<std::ptrdiff_t>(n - 1));  // the last one, unless it is pinned
    put_slot(frame, size);
    budget_.credit(size, Use::idle);
    freed += size;
  }
  c.unused = std::min(c.unused, c.free.size());
  return freed;
}

uint64_t FramePool::release_frames(uint64_t bytes) {
  uint64_t freed = 0;
  for (size_t i = 0; i < classes_.size() && freed < bytes; ++i)
    freed += release_free(classes_[i], core::kPage << i, bytes - freed);
  return freed;
}

std::string FramePool::check() const {
  uint64_t idle = 0, buffers = 0;
  for (size_t i = 0; i < classes_.size(); ++i) {
    idle += classes_[i].free.size() * (core::kPage << i);
    buffers += classes_[i].slabs.size() * slab_of(core::kPage << i);
    const auto& slabs = classes_[i].slabs;
    const auto unused = std::count_if(slabs.begin(), slabs.end(), [](const Slab& s) { return s.busy == 0; });
    if (static_cast<size_t>(unused) != classes_[i].idle) return "idle slabs of buffers are miscounted";
    if (classes_[i].unused > classes_[i].free.size() || classes_[i].unused_slabs > classes_[i].idle)
      return "more frames or buffers are unused than are free";
  }
  if (idle != budget_.charged(Use::idle)) return "free frames and their charge disagree";
  if (buffers != budget_.charged(Use::buffers)) return "slabs of buffers and their charge disagree";
  return budget_.check();
}

}  // namespace vmem::memory
