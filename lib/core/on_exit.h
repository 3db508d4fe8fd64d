// What must happen however a block of code is left.
#pragma once

#include <utility>

namespace vmem::core {

// Calls `what`, which does not throw, at the end of its scope, unless it was dismissed.
template <typename What>
class OnExit {
 public:
  explicit OnExit(What what) : what_(std::move(what)) {}
  ~OnExit() {
    if (armed_) what_();
  }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;
  void dismiss() { armed_ = false; }

 private:
  What what_;
  bool armed_ = true;
};

}  // namespace vmem::core
