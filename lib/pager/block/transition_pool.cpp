#include "pager/block/transition_pool.h"

namespace vmem::pager {

bool TransitionPool::reserve(size_t free) noexcept try {
  if (const size_t room = grows_to(free); room != 0) {
    all_.reserve(room);
    free_.reserve(room);
  }
  while (free_.size() < free) {
    all_.push_back(std::make_unique<Transition>());
    free_.push_back(all_.back().get());
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

Transition* TransitionPool::take(Region& r, core::BlockIndex b, uint64_t now_ns) {
  Transition* m = free_.back();
  free_.pop_back();
  *m = Transition{};
  m->region = &r;
  m->block = b;
  m->begun_ns = now_ns;
  return m;
}

void TransitionPool::give(Transition* m) {
  m->status = {};
  m->begun_ns = 0;
  free_.push_back(m);
}

std::string TransitionPool::check() const {
  size_t begun = 0;
  for (const auto& m : all_) begun += m->begun_ns != 0 ? 1 : 0;
  for (const Transition* m : free_)
    if (m->begun_ns != 0) return "a move that is free has begun";
  if (begun + free_.size() != all_.size()) {
    return core::strprintf("%zu moves have begun, %zu are free, of %zu", begun, free_.size(), all_.size());
  }
  return "";
}

}  // namespace vmem::pager
