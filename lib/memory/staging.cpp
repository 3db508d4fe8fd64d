#include "memory/staging.h"

#include <numaif.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/log.h"

namespace vmem::memory {

using core::Status;

Staging::~Staging() {
  for (const Slab& slab : slabs_) end_slab(*devices_, slab);
}

void Staging::end_slab(device::HostPinning& devices, const Slab& slab) {
  if (Status s = devices.unpin(slab.at); !s.ok()) {
    // The driver may still know these addresses by their pages, and would copy to whatever is
    // mapped here next: so nothing ever is. Only this remains of a lost device.
    if (slab.owner == nullptr) {
      void* const kept =
          mmap(slab.at, slab.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      if (kept != MAP_FAILED) madvise(kept, slab.size, MADV_DONTFORK);  // otherwise the frames stay there too
    }
    core::log(core::Level::debug, "%zu bytes of addresses of staging frames stay, unused: %.*s", slab.size,
              static_cast<int>(s.text().size()), s.text().data());
    return;
  }
  if (slab.owner == nullptr) {
    munmap(slab.at, slab.size);
  } else {
    slab.owner->release_arena(slab.at, slab.size).ignore();  // frames that are still pinned go with the process
  }
}

Staging::Slab Staging::take_slab() {
  if (slabs_.empty()) return {};
  const Slab slab = slabs_.back();
  slabs_.pop_back();
  std::erase_if(free_, [&](const std::byte* at) { return at >= slab.at && at < slab.at + slab.size; });
  total_ -= slab.size / frame_;
  return slab;
}

namespace {

Status plain_slab(size_t size, size_t frame, const std::vector<int>& nodes, void** out) {
  // Align by hand: 2 MiB pages need it.
  void* const raw = mmap(nullptr, size + frame, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return core::system_error(errno, "no address space for %zu bytes of staging frames", size);
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw), at = core::round_up(start, frame);
  if (at != start) munmap(raw, at - start);
  if (const size_t tail = start + frame - at; tail != 0) munmap(reinterpret_cast<void*>(at + size), tail);
  void* const base = reinterpret_cast<void*>(at);
  const auto fail = [&](int why, const char* what) {
    munmap(base, size);
    return core::system_error(why, "%s %zu bytes of staging frames failed", what, size);
  };
  madvise(base, size, MADV_HUGEPAGE);
  madvise(base, size, MADV_DONTFORK);
  madvise(base, size, MADV_DONTDUMP);
  if (!nodes.empty()) {
    std::array<unsigned long, 16> mask{};
    for (int node : nodes) mask[static_cast<size_t>(node) / 64] |= 1ul << (node % 64);
    mbind(base, size, MPOL_INTERLEAVE, mask.data(), mask.size() * 64, 0);
  }
  if (mprotect(base, size, PROT_READ | PROT_WRITE) != 0) return fail(errno, "giving access to");
  // MADV_POPULATE_WRITE reports a lack of memory. Older kernels cannot: touch the pages.
  if (madvise(base, size, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) return fail(errno, "populating");
    memset(base, 0, size);
  }
  *out = base;
  return {};
}

Status trap_slab(trap::Trap& trap, size_t size, size_t frame, const std::vector<int>& nodes, void** out) {
  if (Status s = trap.reserve_arena(size, frame, out); !s.ok()) return s;
  for (size_t i = 0; i < size / frame; ++i) {
    const int node = nodes.empty() ? -1 : nodes[i % nodes.size()];
    Status s = trap.populate_frames(static_cast<std::byte*>(*out) + i * frame, frame, node);
    if (s.ok()) continue;
    trap.release_arena(*out, size).ignore();  // no page of it is pinned
    return s;
  }
  return {};
}

}  // namespace

Status Staging::make_slab(device::HostPinning& devices, trap::Trap& trap, size_t frames, size_t frame,
                          const std::vector<int>& nodes, Slab* slab) {
  const size_t size = frames * frame;
  void* at = nullptr;
  if (trap.caps().install) {
    // Do not fall back to plain memory: that would bypass the administrator's limits.
    if (Status s = trap_slab(trap, size, frame, nodes, &at); !s.ok()) return s;
    Status s = devices.pin(at, size);
    if (s.ok()) {
      *slab = {static_cast<std::byte*>(at), size, &trap};
      return {};
    }
    VMEM_LOG_ONCE(core::Level::warning,
                  "the module's frames cannot be pinned for the device: %.*s; going on with plain memory",
                  static_cast<int>(s.text().size()), s.text().data());
    trap.release_arena(at, size).ignore();
  }
  if (Status s = plain_slab(size, frame, nodes, &at); !s.ok()) return s;
  if (Status s = devices.pin(at, size); !s.ok()) {
    munmap(at, size);
    return s;
  }
  *slab = {static_cast<std::byte*>(at), size, nullptr};
  return {};
}

bool Staging::reserve(size_t frames, uint64_t keep) noexcept try {
  slabs_.reserve(slabs_.size() + 1);
  free_.reserve(total_ + frames);  // put() needs no memory
  return budget_.charge(frames * frame_, keep, Use::staging);
} catch (const std::bad_alloc&) {
  return false;
}

void Staging::add_slab(device::HostPinning& devices, const Slab& slab) {
  devices_ = &devices;
  slabs_.push_back(slab);
  total_ += slab.size / frame_;
  for (size_t at = slab.size; at > 0; at -= frame_) free_.push_back(slab.at + at - frame_);
}

std::byte* Staging::get(size_t keep) {
  if (free_.size() <= keep) return nullptr;
  std::byte* frame = free_.back();
  free_.pop_back();
  return frame;
}

bool Staging::owns(const std::byte* at) const {
  for (const Slab& slab : slabs_) {
    if (at >= slab.at && at < slab.at + slab.size) return true;
  }
  return false;
}

}  // namespace vmem::memory
