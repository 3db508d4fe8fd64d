#include "policy/recorded_order.h"

#include <algorithm>

namespace vmem::policy {

RecordedOrder::RecordedOrder(uint32_t blocks, uint32_t most)
    : most_(most), window_(most), position_(most == 0 ? 0 : blocks, kNowhere) {
  order_.reserve(position_.size());
}

RecordedOrder::Pass* RecordedOrder::going_on(uint32_t position) {
  Pass* found = nullptr;  // if several are near, an active one has come to where another ended
  for (Pass& p : passes_) {
    const bool near = position + kNear >= p.at && position <= uint64_t{p.at} + std::max(window_, 1u) + kNear;
    if (p.live && near && (found == nullptr || found->used < p.used)) found = &p;
  }
  return found;
}

void RecordedOrder::record(uint32_t block) {
  position_[block] = static_cast<uint32_t>(order_.size());
  order_.push_back(block);
}

std::span<const uint32_t> RecordedOrder::on_request(uint32_t block) {
  if (most_ == 0) return {};
  const uint32_t position = position_[block];
  if (position == kNowhere) {
    score_ -= std::min(score_, 2u);
    record(block);
    return {};
  }
  Pass* p = going_on(position);
  if (p == nullptr) {
    score_ -= std::min(score_, 2u);
    if (++strays_ > kStrays) {
      strays_ = 0;
      passes_ = {};
      order_.clear();
      std::fill(position_.begin(), position_.end(), kNowhere);
      record(block);
      return {};
    }
    p = &*std::min_element(passes_.begin(), passes_.end(),
                           [](const Pass& a, const Pass& b) { return a.used < b.used; });
    *p = {true, position, position + 1, 0, ++tick_};
    return {};
  }
  if (strays_ != 0) --strays_;
  score_ = std::min(score_ + 1, 4 * kBelieved);
  p->used = ++tick_;
  p->at = std::max(p->at, position);
  if (++good_ % kRecover == 0) {
    wasted_ = 0;
    window_ = std::min(most_, std::max(2 * window_, 1u));
  }
  if (++p->hits < kBelieved || score_ < kBelieved) return {};
  const uint32_t from = std::max(p->asked, p->at + 1);
  const auto end = static_cast<uint32_t>(std::min<uint64_t>(order_.size(), uint64_t{p->at} + 1 + window_));
  if (from >= end) return {};
  p->asked = end;
  return std::span(order_).subspan(from, end - from);
}

void RecordedOrder::on_waste() {
  good_ = 0;
  if (++wasted_ < kWaste) return;
  wasted_ = 0;
  window_ /= 2;
}

}  // namespace vmem::policy
