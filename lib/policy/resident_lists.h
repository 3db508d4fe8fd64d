// Doubly linked lists over arrays indexed by ResidentId: 16 bytes a resident, every operation O(1). A resident is in
// one list, or in none. Lists count the pages in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/chunks.h"
#include "core/types.h"
#include "policy/evictor.h"

namespace vmem::policy {

using ListId = uint8_t;
inline constexpr ListId kNoList = 0;
inline constexpr unsigned kPinnedTemperature = 3;  // a temperature of its own: whatever was advised besides

struct Node {
  core::ResidentId newer = core::kNoResident;  // towards the head
  core::ResidentId older = core::kNoResident;  // towards the tail; of a parked resident: how often it is held
  uint32_t stamp = 0;                          // the policy's own
  uint32_t weight_beyond_one : 14 = 0;         // pages
  uint32_t list : 5 = kNoList;
  uint32_t known : 1 = 0;        // admitted
  uint32_t parked : 1 = 0;       // held: in no list
  uint32_t probes : 1 = 0;       // may be probed
  uint32_t probed : 1 = 0;       // out of sight
  uint32_t used : 1 = 0;         // seen to be wanted; the policy's own, or of a parked resident
  uint32_t priority : 2 = 0;     // Priority
  uint32_t temperature : 2 = 0;  // Temperature, or kPinnedTemperature
  uint32_t just_probed : 1 = 0;  // by the victims() call under way
  uint32_t ahead : 1 = 0;        // read ahead, its first use not seen yet
  uint32_t hinted : 1 = 0;       // .. because the program asked for it
  uint32_t proven : 1 = 0;       // the policy's own: belongs to the protected part

  static constexpr uint32_t kMostWeight = 1u << 14;
  uint32_t weight() const { return weight_beyond_one + 1u; }  // pages
  void set_weight(uint32_t pages) { weight_beyond_one = std::clamp<uint32_t>(pages, 1, kMostWeight) - 1; }
};
static_assert(Node::kMostWeight >= core::kMaxBlock / core::kPage);
static_assert(sizeof(Node) == 16);

class ResidentLists {
 public:
  explicit ResidentLists(size_t lists) : lists_(lists) {}

  void resize(size_t residents) {
    if (residents <= residents_) return;
    nodes_.grow(residents);
    residents_ = residents;
  }
  size_t residents() const { return residents_; }
  Node& operator[](core::ResidentId id) { return nodes_[id]; }
  const Node& operator[](core::ResidentId id) const { return nodes_[id]; }

  uint64_t pages(ListId list) const { return lists_[list].pages; }
  core::ResidentId head(ListId list) const { return lists_[list].head; }
  core::ResidentId tail(ListId list) const { return lists_[list].tail; }
  bool empty(ListId list) const { return lists_[list].head == core::kNoResident; }

  // As the newest of the list. The resident must be in none.
  void push_head(ListId list, core::ResidentId id);
  // Takes it out of the list it is in; nothing when it is in none.
  void unlink(core::ResidentId id);
  void move_to_head(ListId list, core::ResidentId id) {
    unlink(id);
    push_head(list, id);
  }

 private:
  struct List {
    core::ResidentId head = core::kNoResident, tail = core::kNoResident;
    uint64_t pages = 0;
  };
  core::Chunks<Node> nodes_;
  size_t residents_ = 0;
  std::vector<List> lists_;
};

}  // namespace vmem::policy
