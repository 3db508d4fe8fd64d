#include "pager/block/move_pool.h"

namespace vmem::pager {

bool MovePool::reserve(size_t free) noexcept try {
  if (const size_t room = grows_to(free); room != 0) {
    all_.reserve(room);
    free_.reserve(room);
  }
  while (free_.size() < free) {
    all_.push_back(std::make_unique<Move>());
    free_.push_back(all_.back().get());
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

Move* MovePool::take(Region& r, core::BlockIndex b, uint64_t now_ns) {
  Move* m = free_.back();
  free_.pop_back();
  *m = Move{};
  m->region = &r;
  m->block = b;
  m->begun_ns = now_ns;
  return m;
}

void MovePool::give(Move* m) {
  m->status = {};
  m->begun_ns = 0;
  free_.push_back(m);
}

std::string MovePool::check() const {
  size_t begun = 0;
  for (const auto& m : all_) begun += m->begun_ns != 0 ? 1 : 0;
  for (const Move* m : free_)
    if (m->begun_ns != 0) return "a move that is free has begun";
  if (begun + free_.size() != all_.size()) {
    return core::strprintf("%zu moves have begun, %zu are free, of %zu", begun, free_.size(), all_.size());
  }
  return "";
}

}  // namespace vmem::pager
