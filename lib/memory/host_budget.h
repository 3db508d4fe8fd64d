// What the library holds of host memory, and how much that may be.
//
//   charges <= budget, always
//
// charge() refuses what would exceed the budget. Charges stand above it only after a call that says so (a budget that
// is lowered, tables that nobody asked room for), and then nothing more is charged until credits have brought them
// below it again.
//
// Memory that is charged and that nobody uses, free frames and idle buffers, gives way to who needs the room. A charge
// travels with the bytes: frame -> region -> frame. Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace vmem::memory {

// What a charge is for.
enum class Use : uint8_t {
  blocks,   // handed out: a frame, or the right to keep a block's bytes
  idle,     // free frames that keep their memory
  buffers,  // slabs of buffers for I/O, in use or not
  tables,   // what is known of regions and blocks
  fixed,    // buffers of encrypted I/O
  staging,  // staging frames
  count_
};

// Who holds memory that nobody uses. Both give up to `bytes` of it back to the system, or somewhat more, credit that,
// and return how much it was.
class IdleMemory {
 public:
  virtual uint64_t release_frames(uint64_t bytes) = 0;
  virtual uint64_t release_buffers(uint64_t bytes) = 0;

 protected:
  ~IdleMemory() = default;
};

class HostBudget {
 public:
  explicit HostBudget(uint64_t bytes) : wanted_(bytes) {}
  HostBudget(const HostBudget&) = delete;
  HostBudget& operator=(const HostBudget&) = delete;
  // Asked for room from now on; null: nobody is.
  void set_idle(IdleMemory* idle) { idle_ = idle; }

  // In force: what was set, or less while the machine gives less.
  uint64_t limit() const { return std::min({wanted_, cap_, ceiling_}); }
  uint64_t wanted() const { return wanted_; }
  void set(uint64_t bytes) { lower(wanted_, bytes); }
  // Until lift_cap(); UINT64_MAX: none.
  void set_cap(uint64_t bytes) { lower(cap_, bytes); }
  void lift_cap() { set_cap(UINT64_MAX); }
  bool capped() const { return cap_ != UINT64_MAX; }
  // An administrator's limit; UINT64_MAX: none.
  void set_ceiling(uint64_t bytes) { lower(ceiling_, bytes); }

  uint64_t charged() const { return charged_; }
  uint64_t charged(Use use) const { return by_use_[static_cast<size_t>(use)]; }
  uint64_t in_use() const { return charged_ - charged(Use::idle); }
  bool over() const { return charged_ > limit(); }
  // Bytes that could be charged for blocks now.
  uint64_t available() const { return limit() - std::min(limit(), in_use()); }
  // Part of charged() that is not blocks.
  uint64_t overhead() const { return charged(Use::tables) + fixed() + charged(Use::buffers); }
  // .. and stays.
  uint64_t fixed() const { return charged(Use::fixed) + charged(Use::staging); }
  // What may hold blocks that were read ahead and not used yet: the rest is for what readers are at, and for what they
  // have passed, which leaves first.
  uint64_t ahead_limit() const { return (limit() - std::min(limit(), overhead())) / 2; }

  // False, with nothing charged, when it would leave less than `reserve` of the budget.
  bool charge(uint64_t bytes, uint64_t reserve, Use use = Use::blocks);
  void credit(uint64_t bytes, Use use = Use::blocks);
  // A free frame is handed out, as charge(); or it comes back and keeps its memory.
  bool charge_idle(uint64_t bytes, uint64_t reserve);
  void credit_idle(uint64_t bytes);
  // Tables have this size by now. Whoever has not made sure of the room before may push charges above the budget.
  void set_tables(uint64_t bytes);
  // Free frames, then idle buffers, go until charges are within the budget or there are none left.
  void trim();

  // Tests: what is wrong; empty: nothing.
  std::string check() const;

 private:
  uint64_t& of(Use use) { return by_use_[static_cast<size_t>(use)]; }
  uint64_t excess() const { return charged_ - std::min(charged_, limit()); }
  void lower(uint64_t& what, uint64_t bytes);
  bool fits(uint64_t bytes, uint64_t reserve);

  uint64_t wanted_, cap_ = UINT64_MAX, ceiling_ = UINT64_MAX;
  uint64_t charged_ = 0;
  std::array<uint64_t, static_cast<size_t>(Use::count_)> by_use_{};
  uint64_t allowed_excess_ = 0;  // what the last lowering, or tables, left above the budget and credits have not undone
  IdleMemory* idle_ = nullptr;
};

}  // namespace vmem::memory
