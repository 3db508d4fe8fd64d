// The text that all clients within a moment share. A slow client keeps its text until its time is
// up. The texts in use are counted, so that many slow clients cannot each hold a different one.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace vmemctl {

using Body = std::shared_ptr<const std::string>;

class Latest {
 public:
  static constexpr size_t kMaxOlder = 3;  // texts that clients still read, beside the latest
  static constexpr std::chrono::milliseconds kFresh{250};

  // Calls `make` if the latest text is old and clients hold fewer than kMaxOlder earlier ones.
  Body get(std::chrono::steady_clock::time_point now, const std::function<std::string()>& make) {
    if (latest_ != nullptr && now - taken_ <= kFresh) return latest_;
    older_.erase(std::remove_if(older_.begin(), older_.end(), [](const auto& body) { return body.expired(); }),
                 older_.end());
    if (latest_ != nullptr && older_.size() >= kMaxOlder) return latest_;
    if (latest_ != nullptr) older_.push_back(latest_);
    latest_.reset();  // if no client reads it, free it before the next is made
    latest_ = std::make_shared<const std::string>(make());
    taken_ = now;
    return latest_;
  }

 private:
  Body latest_;
  std::chrono::steady_clock::time_point taken_{};
  std::vector<std::weak_ptr<const std::string>> older_;
};

}  // namespace vmemctl
