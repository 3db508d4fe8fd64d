// Scope guard.
#pragma once

#include <utility>

namespace vmem::core {

// Calls `what`, which must not throw, at the end of its scope, unless dismissed.
template <typename What>
class ScopeGuard {
 public:
  explicit ScopeGuard(What what) : what_(std::move(what)) {}
  ~ScopeGuard() {
    if (armed_) what_();
  }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;
  void dismiss() { armed_ = false; }

 private:
  What what_;
  bool armed_ = true;
};

}  // namespace vmem::core
