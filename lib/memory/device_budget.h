// One device's memory: how much blocks may use, how much they use, and how much is leased.
//
// - charges <= limit <= budget, except for a budget that was lowered and has not been reached yet.
//   The limit is less than the budget while other programs have the device's memory.
// - Blocks that go to other devices, or are freed, count as leaving. Leaving bytes are still
//   charged, and ending leases still count as leased.
// - A block is charged from when it is claimed for the device until its device memory is free. A
//   block on its way between devices is charged to both.
//
// Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"

namespace vmem::pager {

class DeviceBudget {
 public:
  // Starts the use of the device, by blocks of `block` bytes. A budget is a multiple of that, at
  // least one block.
  void begin(uint64_t bytes, uint64_t block);
  bool begun() const { return budget_ != 0; }
  // Changes the budget. Blocks beyond it have to leave.
  void set(uint64_t bytes);
  // The device has only the memory that is charged, plus `kept` bytes that no block uses. Lowers
  // the limit to that; then new blocks wait until others leave. Returns false if nothing changes.
  bool follow_down(uint64_t kept);
  // The device has `bytes` for blocks, those on it included: raises the limit. Returns false if
  // nothing changes.
  bool follow_up(uint64_t bytes);
  uint64_t budget() const { return budget_; }
  uint64_t limit() const { return limit_; }
  bool is_short() const { return limit_ < budget_; }

  bool fits(uint64_t bytes) const { return charged_ + bytes <= limit_; }
  void charge(uint64_t bytes) {  // after fits()
    charged_ += bytes;
    quiet_ = 0;
  }
  void credit(uint64_t bytes) { charged_ -= bytes; }
  uint64_t charged() const { return charged_; }  // blocks that come, are there, or leave

  // count_leaving(): the bytes are about to leave; to_peer: to another device. Then left() or
  // stays() follows.
  void count_leaving(uint64_t bytes, bool to_peer = false);
  void left(uint64_t bytes, bool to_peer = false);
  void stays(uint64_t bytes, bool to_peer = false);
  bool over() const { return charged_ - leaving_ > limit_; }  // even when all leaving blocks have gone

  // frees(): their region is freed and no table lists them; freed(): their device memory is free.
  void frees(uint64_t bytes);
  void freed(uint64_t bytes);

  // Sets how many bytes requests wait for; 0 forgets it.
  void want(uint64_t bytes) { wanted_ = bytes; }
  uint64_t wanted() const { return wanted_; }
  // Bytes that have to leave for waiting requests, and for a lowered budget, beyond those that are
  // leaving.
  uint64_t missing() const;

  // more: blocks of `leased` bytes came under leases, `ending` of them only under ending ones.
  // Otherwise they are no longer leased.
  void count_leases(uint64_t leased, uint64_t ending, bool more);
  uint64_t leased() const { return leased_; }
  uint64_t live() const { return leased_ - ending_; }  // without leases that only wait for their streams
  // Compares with the budget, not the limit: a lease waits for memory that others have, as a block
  // does, since it may come back.
  bool room_for_lease(uint64_t bytes) const { return leased_ + bytes <= budget_; }
  bool room_once_ended(uint64_t bytes) const { return live() + bytes <= budget_; }

  // The device may keep memory that no block uses.
  void set_keeps(bool keeps) { keeps_ = keeps; }
  bool keeps() const { return keeps_; }
  bool idle() const { return charged_ == 0 && !keeps_ && !is_short(); }
  // Counts a look; the caller looks five times a second. rests(): no block has come for a while, or
  // for a moment if none are there; then the device does not keep unused memory for the next block.
  void looked() { ++quiet_; }
  bool came() const { return quiet_ == 0; }  // a block has come since the last look
  bool rests() const { return quiet_ > (charged_ == 0 ? 1u : 5u); }
  // must_trim(): the budget was lowered and the charges are within it; memory that no block uses
  // has to follow. trimmed(): it has, to the limit `to`.
  bool must_trim() const { return lowered_ && charged_ <= limit_; }
  void trimmed(uint64_t to) { lowered_ = lowered_ && (limit_ != to || charged_ > limit_); }

  // For tests: returns what is wrong, or an empty string. in_tables: bytes of blocks that the
  // tables place on the device; a block that goes to another device counts there. leased: bytes of
  // leased blocks.
  std::string check(uint64_t in_tables, uint64_t leased) const;

 private:
  uint64_t budget_ = 0;  // bytes, as all here; 0: not used yet
  uint64_t limit_ = 0;
  uint64_t block_ = core::kHugePage;
  uint64_t charged_ = 0;
  uint64_t leaving_ = 0, to_peers_ = 0, freed_ = 0;
  uint64_t wanted_ = 0;
  uint64_t leased_ = 0, ending_ = 0;
  uint64_t quiet_ = 0;  // looks since something was charged
  bool lowered_ = false, keeps_ = false;
};

}  // namespace vmem::pager
