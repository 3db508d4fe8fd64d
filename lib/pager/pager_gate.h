// Controls who uses the process's pager: any number of calls at once, or the one thread that starts,
// stops or replaces it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "core/status.h"

namespace vmem::pager {

class Pager;

// Calls that arrive while a thread waits to be alone wait behind it: it gets its turn however many
// threads call in a loop. A thread that is inside must not enter again.
class Gate {
 public:
  void enter();
  // For exit(), whose thread may be inside already: waits only while a thread is alone.
  void enter_at_exit();
  void leave();

  // One thread at a time may be alone, in two steps: after close() new calls wait outside, and
  // those inside continue; drain() returns when none is inside. open() ends both.
  void close();
  void drain();
  void open();

 private:
  static constexpr uint32_t kClosed = 1u << 31, kAlone = 1u << 30;
  void enter_unless(uint32_t barred);

  std::atomic<uint32_t> state_{0};  // calls inside, and the bits above
};

// Closes a gate and opens it again.
class Closed {
 public:
  explicit Closed(Gate& gate) : gate_(gate) { gate_.close(); }
  ~Closed() { gate_.open(); }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;
  void drain() { gate_.drain(); }

 private:
  Gate& gate_;
};

// The gate with the pager inside.
class PagerGate : public Gate {
 public:
  PagerGate();
  ~PagerGate();

  // Keeps the pager alive for one call. Null if default-constructed, or if there is no pager.
  class Use {
   public:
    Use() = default;
    ~Use() {
      if (gate_ != nullptr) gate_->leave();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Pager* operator->() const { return pager_; }
    Pager& operator*() const { return *pager_; }
    explicit operator bool() const { return pager_ != nullptr; }

   private:
    friend class PagerGate;
    void take(PagerGate& entered);
    Gate* gate_ = nullptr;
    Pager* pager_ = nullptr;
  };
  // Does not start a pager. Returns -ECHILD in a child that cannot begin anew.
  core::Status use(Use* out);
  // The same with enter_at_exit().
  void use_at_exit(Use* out);

  std::unique_ptr<Pager> pager;  // changed by the thread that is alone
};

// Returns -ECHILD in a forked child that cannot begin anew.
core::Status check_fork();

}  // namespace vmem::pager
