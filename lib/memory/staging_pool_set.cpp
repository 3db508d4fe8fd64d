#include "memory/staging_pool_set.h"

#include <algorithm>

namespace vmem::memory {

namespace {

constexpr uint64_t kLeastForTheCpu = uint64_t{16} << 20;

}  // namespace

// The rest of the host budget is for blocks that the CPU uses, and for faults.
uint64_t StagingGrowth::most() const {
  const uint64_t budget = budget_.limit();
  return budget - std::max(budget / 100 * (100 - share_), std::min(budget / 2, kLeastForTheCpu));
}

// Bytes of the frames of all sizes.
uint64_t StagingGrowth::held() const {
  return budget_.charged(Use::staging);
}

size_t StagingGrowth::reserve() const {
  return std::max<size_t>(2, std::min<size_t>(staging_.batch(), staging_.total() / 4));
}

// The first few frames may take what is kept for other sizes: without them no block of their size
// moves.
uint64_t StagingGrowth::kept() const {
  return others_ == nullptr || staging_.total() == 0 ? 0 : others_->kept(staging_);
}

bool StagingGrowth::fits() const {
  return held() + kept() + Staging::kLeast * staging_.frame() <= most();
}

bool StagingGrowth::has_room() const {
  const uint64_t unused = others_ == nullptr ? 0 : others_->unused(staging_);
  return held() - unused + kept() + Staging::kLeast * staging_.frame() <= most();
}

bool StagingGrowth::blocks_must_leave(uint64_t leaving) const {
  if (staging_.total() == 0 || growing_ || (has_room() && !(wanted_ && refused_))) return false;
  const size_t low = std::max<size_t>(2 * reserve(), staging_.total() / 8);
  return staging_.free() * staging_.frame() + leaving < low * staging_.frame();
}

size_t StagingGrowth::take(size_t at_most) {
  wanted_ = false;
  if (growing_) return 0;
  const uint64_t room = most() - std::min(most(), held());
  const uint64_t others = others_ == nullptr ? 0 : others_->kept(staging_);
  const uint64_t first = staging_.total() == 0 ? std::min(room, Staging::kLeast * staging_.frame()) : 0;
  const uint64_t bytes = std::max(first, room - std::min(room, others));
  return std::min<size_t>({at_most, staging_.slab_frames(), bytes / staging_.frame()});
}

void StagingGrowth::no_room(uint64_t now_ns) {
  wanted_ = refused_ = true;
  again_ns_ = now_ns + kAgain;
}

void StagingGrowth::end(bool made, uint64_t now_ns) {
  growing_ = false;
  refused_ = !made;
  if (!made) again_ns_ = now_ns + kLater;
}

std::string StagingGrowth::check(uint64_t now_ns) const {
  if (again_ns_ > now_ns + kLater) return "staging frames are made later than they may be";
  return "";
}

}  // namespace vmem::memory
