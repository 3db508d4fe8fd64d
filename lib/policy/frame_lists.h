// Doubly linked lists over arrays indexed by FrameId: 16 bytes a frame, every operation O(1). A
// frame is in one list or in none. Lists count the pages in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "policy/chunks.h"
#include "policy/eviction_policy.h"

namespace vmem::policy {

using ListId = uint8_t;
inline constexpr ListId kNoList = 0;
inline constexpr unsigned kPinnedTemperature = 3;  // beside the advised temperatures, which it overrides

struct Node {
  core::FrameId newer = core::kNoFrame;  // towards the head
  core::FrameId older = core::kNoFrame;  // towards the tail; if held: the number of holds
  uint32_t stamp = 0;                    // used by the policy
  uint32_t weight_beyond_one : 14 = 0;   // pages
  uint32_t list : 5 = kNoList;
  uint32_t known : 1 = 0;        // admitted
  uint32_t held : 1 = 0;         // by hold(): in no list
  uint32_t probes : 1 = 0;       // may be probed
  uint32_t probed : 1 = 0;       // out of sight
  uint32_t used : 1 = 0;         // a use was seen; for the policy, or while held
  uint32_t priority : 2 = 0;     // Priority
  uint32_t temperature : 2 = 0;  // Temperature, or kPinnedTemperature
  uint32_t just_probed : 1 = 0;  // by the current victims() call
  uint32_t ahead : 1 = 0;        // read ahead, its first use not seen yet
  uint32_t hinted : 1 = 0;       // read ahead because the program asked for it
  uint32_t proven : 1 = 0;       // used by the policy: in the protected part

  static constexpr uint32_t kMostWeight = 1u << 14;
  uint32_t weight() const { return weight_beyond_one + 1u; }  // pages
  void set_weight(uint32_t pages) { weight_beyond_one = std::clamp<uint32_t>(pages, 1, kMostWeight) - 1; }
};
static_assert(Node::kMostWeight >= core::kMaxBlock / core::kPage);
static_assert(sizeof(Node) == 16);

class FrameLists {
 public:
  explicit FrameLists(size_t lists) : lists_(lists) {}

  void resize(size_t frames) {
    if (frames <= frames_) return;
    nodes_.grow(frames);
    frames_ = frames;
  }
  size_t frames() const { return frames_; }
  Node& operator[](core::FrameId id) { return nodes_[id]; }
  const Node& operator[](core::FrameId id) const { return nodes_[id]; }

  uint64_t pages(ListId list) const { return lists_[list].pages; }
  core::FrameId head(ListId list) const { return lists_[list].head; }
  core::FrameId tail(ListId list) const { return lists_[list].tail; }
  bool empty(ListId list) const { return lists_[list].head == core::kNoFrame; }

  // Adds the frame as the newest of the list. It must be in no list.
  void push_head(ListId list, core::FrameId id);
  // Takes the frame out of its list, if it is in one.
  void unlink(core::FrameId id);
  void move_to_head(ListId list, core::FrameId id) {
    unlink(id);
    push_head(list, id);
  }

 private:
  struct List {
    core::FrameId head = core::kNoFrame, tail = core::kNoFrame;
    uint64_t pages = 0;
  };
  Chunks<Node> nodes_;
  size_t frames_ = 0;
  std::vector<List> lists_;
};

}  // namespace vmem::policy
