#include "pager/staging.h"

#include <numaif.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/log.h"

namespace vmem::pager {

using core::Status;

Staging::~Staging() {
  for (const Slab& slab : slabs_) {
    devices_->unpin(slab.at).ignore();  // a lost device has let go of it already
    munmap(slab.at, slab.size);
  }
}

Status Staging::make_slab(device::Devices& devices, size_t frames, const std::vector<int>& nodes, std::byte** slab) {
  const size_t size = frames * kFrame;
  // Aligned by hand: 2 MiB pages need it.
  void* const raw = mmap(nullptr, size + kFrame, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return core::system_error(errno, "no address space for %zu bytes of staging frames", size);
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw), at = core::round_up(start, kFrame);
  if (at != start) munmap(raw, at - start);
  if (const size_t tail = start + kFrame - at; tail != 0) munmap(reinterpret_cast<void*>(at + size), tail);
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
  // MADV_POPULATE_WRITE says so when there is no memory; older kernels are asked page by page and cannot.
  if (madvise(base, size, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) return fail(errno, "populating");
    memset(base, 0, size);
  }
  if (Status s = devices.pin(base, size); !s.ok()) {
    munmap(base, size);
    return s;
  }
  *slab = static_cast<std::byte*>(base);
  return {};
}

void Staging::add_slab(device::Devices& devices, std::byte* slab, size_t frames) {
  devices_ = &devices;
  slabs_.push_back({slab, frames * kFrame});
  total_ += frames;
  for (size_t i = frames; i > 0; --i) free_.push_back(slab + (i - 1) * kFrame);
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

}  // namespace vmem::pager
