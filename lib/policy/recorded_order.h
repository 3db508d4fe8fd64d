// What kernels asked for before, and in which order: who goes through the same blocks again, pass after pass over a
// graph or a table that is larger than the device, asks for each behind the same ones. Pure; one object a range.
//
// Blocks are recorded when they are asked for the first time. A block that is asked for again is looked up there: it
// goes on with a pass if it stands shortly behind or before the last one of that pass, since many groups ask at once.
// When a pass has gone on so a few times, what stands next is to be read, unless more than a third of what is asked for
// goes on with none: blocks at random find themselves near some pass by chance. Where most do so for long the record is
// old, and begins anew; where what was read was not used, less is read.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace vmem::policy {

class RecordedOrder {
 public:
  static constexpr uint32_t kPasses = 8;    // that are followed at once
  static constexpr uint32_t kBelieved = 4;  // blocks that went on with a pass, until what stands next is read

  // blocks: in the range. most: that are read ahead of a pass, at most; 0 turns it off. Throws bad_alloc.
  RecordedOrder(uint32_t blocks, uint32_t most);
  // Asked for, or had by who had asked for none of those that were read ahead with it. What to read now, in order;
  // valid until the next call.
  std::span<const uint32_t> on_request(uint32_t block);
  // A block that was read for its sake left, and nobody had had it.
  void on_waste();

 private:
  struct Pass {
    bool live = false;
    uint32_t at = 0, asked = 0;  // the last one; in front of this one all has been asked for
    uint32_t hits = 0;           // blocks that went on with it
    uint64_t used = 0;
  };
  Pass* going_on(uint32_t position);
  void record(uint32_t block);

  static constexpr uint32_t kNowhere = UINT32_MAX;
  static constexpr uint32_t kNear = 16;     // blocks that groups which ask at once may overtake each other by
  static constexpr uint32_t kStrays = 64;   // blocks that go on with no pass, until the record is old
  static constexpr uint32_t kWaste = 8;     // blocks that were read for nobody, until half as much is read
  static constexpr uint32_t kRecover = 64;  // blocks that go on with a pass, until more is read again
  const uint32_t most_;
  uint32_t window_;
  std::vector<uint32_t> order_, position_;  // blocks; by block: where in `order_`
  std::array<Pass, kPasses> passes_{};
  uint32_t score_ = 0;  // of late: one for each block that goes on with a pass, less two for each that does not
  uint32_t strays_ = 0, wasted_ = 0, good_ = 0;
  uint64_t tick_ = 0;
};

}  // namespace vmem::policy
