// The text that all who ask within a moment get. A client that reads slowly keeps its text for as long as it is let:
// the texts that are kept are counted, so that a row of such clients, each with a text of its own, cost no more memory.
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
  static constexpr size_t kMaxOlder = 3;  // texts that somebody still reads, beside the latest
  static constexpr std::chrono::milliseconds kFresh{250};

  // `make` is called where the latest is old and fewer than kMaxOlder earlier ones are being read.
  Body get(std::chrono::steady_clock::time_point now, const std::function<std::string()>& make) {
    if (latest_ != nullptr && now - taken_ <= kFresh) return latest_;
    older_.erase(std::remove_if(older_.begin(), older_.end(), [](const auto& body) { return body.expired(); }),
                 older_.end());
    if (latest_ != nullptr && older_.size() >= kMaxOlder) return latest_;
    if (latest_ != nullptr) older_.push_back(latest_);
    latest_.reset();  // nobody needs memory for both if nobody reads it
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
