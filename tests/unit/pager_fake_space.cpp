#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "pager_fakes.h"
#include "pager_fakes_wait.h"

namespace vmem::pager::test {

using core::Status;

Status FakeSpace::allocate(size_t size, unsigned codec, std::span<core::Extent> out) {
  std::lock_guard lock(mutex_);
  if (used_ + size * out.size() > budget_)
    return core::error(ENOSPC, "ssd_budget %llu is used up", static_cast<unsigned long long>(budget_));
  for (core::Extent& e : out) {
    e = core::Extent::make(0, next_, size, codec);
    live_[next_] = size;
    next_ += size;
    used_ += size;
  }
  return {};
}

FakeSpace::~FakeSpace() {
  std::lock_guard lock(mutex_);
  if (!release_held_) return;
  fprintf(stderr, "pager_fakes: the space ends under a release\n");
  abort();
}

void FakeSpace::hold_release() {
  std::lock_guard lock(mutex_);
  hold_release_ = true;
}

void FakeSpace::until_release_held() {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "an extent to be released", [&] { return release_held_; });
}

void FakeSpace::let_release_go() {
  std::lock_guard lock(mutex_);
  release_held_ = false;
  changed_.notify_all();
}

void FakeSpace::release(core::Extent extent) {
  std::unique_lock lock(mutex_);
  if (std::exchange(hold_release_, false)) {
    release_held_ = true;
    changed_.notify_all();
    wait_or_die(lock, changed_, "a release to be let go", [&] { return !release_held_; });
  }
  const auto it = live_.find(extent.offset());
  if (it == live_.end()) {
    fprintf(stderr, "pager_fakes: an extent was released twice\n");
    abort();
  }
  used_ -= it->second;
  live_.erase(it);
}

void FakeSpace::refuse(core::Extent extent) {
  release(extent);
  std::lock_guard lock(mutex_);
  ++refused_;
}

size_t FakeSpace::refused() const {
  std::lock_guard lock(mutex_);
  return refused_;
}

void FakeSpace::set_budget(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  budget_ = bytes;
}

uint64_t FakeSpace::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

size_t FakeSpace::extents() const {
  std::lock_guard lock(mutex_);
  return live_.size();
}

core::OwnString FakeSpace::describe(core::Extent extent) const {
  return core::textf("path fake, offset %llu", static_cast<unsigned long long>(extent.offset()));
}

}  // namespace vmem::pager::test
