// The host memory that the library holds, and its limit.
//
// - charges <= budget. charge() refuses anything that would exceed the budget.
// - Charges exceed it only after a call that says so (a lowered budget, tables for which no room
//   was reserved). Then nothing more is charged until credits have brought them below it again.
// - Memory that is charged and unused (free frames, idle buffers) is released when others need it.
// - A charge travels with the bytes: frame -> region -> frame.
//
// Not thread-safe: the pager's lock protects it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace vmem::memory {

// The purpose of a charge.
enum class Use : uint8_t {
  blocks,   // frames handed out, or the right to keep a block's bytes
  idle,     // free frames that keep their memory
  buffers,  // slabs of buffers for I/O, in use or not
  tables,   // data about regions and blocks
  fixed,    // buffers of encrypted I/O
  staging,  // staging frames
  count_
};

// The owner of unused memory. Both functions give up to `bytes` of it, or somewhat more, back to
// the system, credit it, and return how much it was.
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
  // Sets the owner that is asked for room; null: none.
  void set_idle(IdleMemory* idle) { idle_ = idle; }

  // The limit in force: the budget that was set, or less while the machine gives less.
  uint64_t limit() const { return std::min({wanted_, cap_, ceiling_}); }
  uint64_t wanted() const { return wanted_; }
  void set(uint64_t bytes) { lower(wanted_, bytes); }
  // A limit until lift_cap(); UINT64_MAX: none.
  void set_cap(uint64_t bytes) { lower(cap_, bytes); }
  void lift_cap() { set_cap(UINT64_MAX); }
  bool capped() const { return cap_ != UINT64_MAX; }
  // An administrator's limit; UINT64_MAX: none.
  void set_ceiling(uint64_t bytes) { lower(ceiling_, bytes); }

  uint64_t charged() const { return charged_; }
  uint64_t charged(Use use) const { return by_use_[static_cast<size_t>(use)]; }
  uint64_t in_use() const { return charged_ - charged(Use::idle); }
  bool over() const { return charged_ > limit(); }
  // Bytes that can be charged for blocks now.
  uint64_t available() const { return limit() - std::min(limit(), in_use()); }
  // The part of charged() that is not blocks.
  uint64_t overhead() const { return charged(Use::tables) + fixed() + charged(Use::buffers); }
  // The part of overhead() that stays.
  uint64_t fixed() const { return charged(Use::fixed) + charged(Use::staging); }
  // Bytes that blocks read ahead and not used yet may take. The other half is for blocks that
  // readers use, and for those they have passed, which leave first.
  uint64_t ahead_limit() const { return (limit() - std::min(limit(), overhead())) / 2; }

  // Returns false, with nothing charged, if less than `reserve` of the budget would be left.
  bool charge(uint64_t bytes, uint64_t reserve, Use use = Use::blocks);
  void credit(uint64_t bytes, Use use = Use::blocks);
  // charge_idle(): as charge(), for a free frame that is handed out. credit_idle(): it comes back
  // and keeps its memory.
  bool charge_idle(uint64_t bytes, uint64_t reserve);
  void credit_idle(uint64_t bytes);
  // The tables have this size now. A caller that has not reserved the room may push charges above
  // the budget.
  void set_tables(uint64_t bytes);
  // Releases free frames, then idle buffers, until charges are within the budget or none are left.
  void trim();

  // For tests: returns what is wrong, or an empty string.
  std::string check() const;

 private:
  uint64_t& of(Use use) { return by_use_[static_cast<size_t>(use)]; }
  uint64_t excess() const { return charged_ - std::min(charged_, limit()); }
  void lower(uint64_t& what, uint64_t bytes);
  bool fits(uint64_t bytes, uint64_t reserve);

  uint64_t wanted_, cap_ = UINT64_MAX, ceiling_ = UINT64_MAX;
  uint64_t charged_ = 0;
  std::array<uint64_t, static_cast<size_t>(Use::count_)> by_use_{};
  uint64_t allowed_excess_ = 0;  // excess that the last lowering, or tables, caused and credits have not undone
  IdleMemory* idle_ = nullptr;
};

}  // namespace vmem::memory
