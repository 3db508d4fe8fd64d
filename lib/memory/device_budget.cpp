#include "memory/device_budget.h"

#include "core/status.h"

namespace vmem::pager {

void DeviceBudget::begin(uint64_t bytes, uint64_t block) {
  block_ = block;
  limit_ = budget_ = std::max(core::round_down(bytes, block_), block_);
}

void DeviceBudget::set(uint64_t bytes) {
  begin(bytes, block_);
  lowered_ = true;
}

bool DeviceBudget::follow_down(uint64_t kept) {
  const uint64_t had = charged_ + core::round_down(kept, block_);
  if (std::max(had, block_) >= limit_) return false;
  limit_ = std::max(had, block_);
  return true;
}

bool DeviceBudget::follow_up(uint64_t bytes) {
  const uint64_t has = std::min(core::round_down(bytes, block_), budget_);
  if (has <= limit_) return false;
  limit_ = has;
  return true;
}

void DeviceBudget::count_leaving(uint64_t bytes, bool to_peer) {
  leaving_ += bytes;
  if (to_peer) to_peers_ += bytes;
}

void DeviceBudget::stays(uint64_t bytes, bool to_peer) {
  leaving_ -= bytes;
  if (to_peer) to_peers_ -= bytes;
}

void DeviceBudget::left(uint64_t bytes, bool to_peer) {
  stays(bytes, to_peer);
  credit(bytes);
}

void DeviceBudget::frees(uint64_t bytes) {
  freed_ += bytes;
  count_leaving(bytes);
}

void DeviceBudget::freed(uint64_t bytes) {
  freed_ -= bytes;
  left(bytes);
}

uint64_t DeviceBudget::missing() const {
  const uint64_t needed = charged_ - leaving_ + wanted_;
  return needed - std::min(needed, limit_);
}

void DeviceBudget::count_leases(uint64_t leased, uint64_t ending, bool more) {
  leased_ = more ? leased_ + leased : leased_ - leased;
  ending_ = more ? ending_ + ending : ending_ - ending;
}

std::string DeviceBudget::check(uint64_t in_tables, uint64_t leased) const {
  const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
  if (in_tables + to_peers_ + freed_ != charged_ || leased != leased_) {
    return core::strprintf("used %llu, counted %llu; leased %llu, counted %llu", number(charged_),
                           number(in_tables + to_peers_ + freed_), number(leased_), number(leased));
  }
  if (to_peers_ + freed_ > leaving_ || leaving_ > charged_) {
    return core::strprintf("%llu bytes go to other devices, %llu are freed, %llu leave, %llu are used",
                           number(to_peers_), number(freed_), number(leaving_), number(charged_));
  }
  if (ending_ > leased_) return core::strprintf("%llu leased, %llu ending", number(leased_), number(ending_));
  if (charged_ > limit_ && !lowered_)
    return core::strprintf("used %llu of a budget of %llu", number(charged_), number(limit_));
  return "";
}

}  // namespace vmem::pager
