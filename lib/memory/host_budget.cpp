#include "memory/host_budget.h"

#include <numeric>

#include "core/break.h"
#include "core/status.h"

namespace vmem::memory {

void HostBudget::lower(uint64_t& what, uint64_t bytes) {
  what = bytes;
  allowed_excess_ = excess();
}

// Returns whether there is room within the budget if free frames are not counted; releases idle
// buffers for it.
bool HostBudget::fits(uint64_t bytes, uint64_t reserve) {
  const uint64_t most = limit(), needed = in_use() + bytes + reserve;
  if (needed <= most) return true;
  return idle_ != nullptr && idle_->release_buffers(needed - most) >= needed - most;
}

bool HostBudget::charge(uint64_t bytes, uint64_t reserve, Use use) {
  const uint64_t most = core::broken("budget") ? UINT64_MAX / 2 : limit();
  if (most == limit() && !fits(bytes, reserve)) return false;
  const uint64_t needed = charged_ + bytes + reserve;
  if (needed > most && (idle_ == nullptr || idle_->release_frames(needed - most) < needed - most)) return false;
  charged_ += bytes;
  of(use) += bytes;
  return true;
}

void HostBudget::credit(uint64_t bytes, Use use) {
  charged_ -= bytes;
  of(use) -= bytes;
  allowed_excess_ = std::min(allowed_excess_, excess());
}

bool HostBudget::charge_idle(uint64_t bytes, uint64_t reserve) {
  if (!fits(bytes, reserve)) return false;
  of(Use::idle) -= bytes;
  of(Use::blocks) += bytes;
  return true;
}

void HostBudget::credit_idle(uint64_t bytes) {
  of(Use::blocks) -= bytes;
  of(Use::idle) += bytes;
}

void HostBudget::set_tables(uint64_t bytes) {
  charged_ = charged_ - charged(Use::tables) + bytes;
  of(Use::tables) = bytes;
  trim();
  allowed_excess_ = excess();
}

void HostBudget::trim() {
  if (idle_ == nullptr) return;
  if (over()) idle_->release_frames(excess());
  if (over()) idle_->release_buffers(excess());
}

std::string HostBudget::check() const {
  static constexpr std::array<const char*, static_cast<size_t>(Use::count_)> kNames{
      "blocks", "free frames", "buffers", "tables", "fixed memory", "staging frames"};
  for (size_t i = 0; i < by_use_.size(); ++i) {
    if (static_cast<int64_t>(by_use_[i]) < 0)
      return core::strprintf("budget: %s are credited with %lld more than was charged", kNames[i],
                             -static_cast<long long>(by_use_[i]));
  }
  if (std::accumulate(by_use_.begin(), by_use_.end(), uint64_t{0}) != charged_)
    return "budget: the charges do not add up to their sum";
  if (excess() > allowed_excess_) {
    return core::strprintf("budget: %s are charged, %s may be", core::human_bytes(charged_).c_str(),
                           core::human_bytes(limit()).c_str());
  }
  return "";
}

}  // namespace vmem::memory
