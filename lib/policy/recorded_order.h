// Records the order in which kernels requested blocks. A kernel that goes through a graph or a
// table that is larger than the device, pass after pass, requests each block behind the same ones
// again. Pure; one object a range.
//
// - A block is recorded when it is requested for the first time.
// - A block that is requested again belongs to a pass if it was recorded shortly before or after
//   the last block of that pass: many groups request blocks at once.
// - When several blocks have continued a pass, the blocks that follow are read. They are not read
//   while more than a third of the requests continue no pass: random blocks are near some pass by
//   chance.
// - If most requests continue no pass for long, the record is old and begins anew. If blocks that
//   were read were not used, fewer are read.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace vmem::policy {

class RecordedOrder {
 public:
  static constexpr uint32_t kPasses = 8;    // passes followed at once
  static constexpr uint32_t kBelieved = 4;  // blocks that must continue a pass before the next are read

  // blocks: in the range. most: the limit of blocks read ahead of a pass; 0 turns it off. Throws
  // bad_alloc.
  RecordedOrder(uint32_t blocks, uint32_t most);
  // A kernel requested the block, or used it as one of the blocks read ahead, which it need not
  // request. Returns the blocks to read now, in order; valid until the next call.
  std::span<const uint32_t> on_request(uint32_t block);
  // A block that on_request() had returned left without a use.
  void on_waste();

 private:
  struct Pass {
    bool live = false;
    uint32_t at = 0, asked = 0;  // position of its last block; all before `asked` were requested
    uint32_t hits = 0;           // blocks that continued it
    uint64_t used = 0;
  };
  Pass* going_on(uint32_t position);
  void record(uint32_t block);

  static constexpr uint32_t kNowhere = UINT32_MAX;
  static constexpr uint32_t kNear = 16;     // blocks by which concurrent groups may overtake each other
  static constexpr uint32_t kStrays = 64;   // blocks that continue no pass before the record is old
  static constexpr uint32_t kWaste = 8;     // unused blocks before the window is halved
  static constexpr uint32_t kRecover = 64;  // blocks that continue a pass before the window grows again
  const uint32_t most_;
  uint32_t window_;
  std::vector<uint32_t> order_, position_;  // blocks; by block: its position in `order_`
  std::array<Pass, kPasses> passes_{};
  uint32_t score_ = 0;  // +1 for each recent block that continues a pass, -2 for each that does not
  uint32_t strays_ = 0, wasted_ = 0, good_ = 0;
  uint64_t tick_ = 0;
};

}  // namespace vmem::policy
