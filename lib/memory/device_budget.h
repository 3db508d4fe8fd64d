// What blocks may have of one device's memory, what they have, and what is under leases there.
//
//   charges <= limit <= budget, always, but for a budget that was lowered since and has not been reached yet; the limit
//   is less than the budget while the device has no memory for it: others have that
//   what goes to other devices, or is freed, is among what leaves, that is among the charges; what is ending is among
//   what is leased
//
// A block is charged from when it is claimed for the device until its memory there is nobody's. Of a block that goes to
// another device both have it. Not thread-safe: the pager's lock protects it. Needs no memory.
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"

namespace vmem::pager {

class DeviceBudget {
 public:
  // The device is used from now on, by blocks of so many bytes: a budget is a multiple of them, and not less than one.
  void begin(uint64_t bytes, uint64_t block);
  bool begun() const { return budget_ != 0; }
  // Somebody has said so. What is charged beyond it is to leave.
  void set(uint64_t bytes);
  // The device has no memory but for what is charged already, and so much that no block has: who wants more has to wait
  // until something leaves. False: nothing changes.
  bool follow_down(uint64_t kept);
  // It has so much for blocks, those that are there included. False: nothing changes.
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
  uint64_t charged() const { return charged_; }  // blocks that come, that are there, that leave

  // They are about to leave, to another device or not; then they have left, or they stay.
  void leaves(uint64_t bytes, bool to_peer = false);
  void left(uint64_t bytes, bool to_peer = false);
  void stays(uint64_t bytes, bool to_peer = false);
  bool over() const { return charged_ - leaving_ > limit_; }  // with all of them gone

  // Their region is freed, and no table has them any more; then their memory is nobody's.
  void frees(uint64_t bytes);
  void freed(uint64_t bytes);

  // Somebody waits for so much room; of one who says nothing it is forgotten.
  void want(uint64_t bytes) { wanted_ = bytes; }
  uint64_t wanted() const { return wanted_; }
  // How much is to leave for that, and for a budget that was lowered, beyond what does already.
  uint64_t missing() const;

  // Blocks came under leases, so many of them under ending ones alone; or (more: false) are no more.
  void count_leases(uint64_t leased, uint64_t ending, bool more);
  uint64_t leased() const { return leased_; }
  uint64_t live() const { return leased_ - ending_; }  // without what waits for its streams alone
  // Where the device is short of memory a lease waits for it as a block does: it may come back.
  bool room_for_lease(uint64_t bytes) const { return leased_ + bytes <= budget_; }
  bool room_once_ended(uint64_t bytes) const { return live() + bytes <= budget_; }

  // The device may keep memory that no block has.
  void set_keeps(bool keeps) { keeps_ = keeps; }
  bool keeps() const { return keeps_; }
  bool idle() const { return charged_ == 0 && !keeps_ && !is_short(); }
  // Somebody looked, as happens five times a second. Nothing has come for a while, or for a moment and nothing is
  // there: what no block has is not kept for the next.
  void looked() { ++quiet_; }
  bool came() const { return quiet_ == 0; }  // something has, since somebody looked
  bool rests() const { return quiet_ > (charged_ == 0 ? 1u : 5u); }
  // .. which is to be within a budget that was lowered: blocks are. Then it is.
  bool must_trim() const { return lowered_ && charged_ <= limit_; }
  void trimmed(uint64_t to) { lowered_ = lowered_ && (limit_ != to || charged_ > limit_); }

  // Tests: what is wrong; empty: nothing. Bytes of blocks that tables have at the device, a block that goes to another
  // one being there; and of those that are leased.
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
