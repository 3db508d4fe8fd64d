#include "policy/frame_lists.h"

namespace vmem::policy {

using core::FrameId;
using core::kNoFrame;

void FrameLists::push_head(ListId list, FrameId id) {
  List& l = lists_[list];
  Node& n = nodes_[id];
  n.newer = kNoFrame;
  n.older = l.head;
  if (l.head != kNoFrame) {
    nodes_[l.head].newer = id;
  } else {
    l.tail = id;
  }
  l.head = id;
  n.list = list;
  l.pages += n.weight();
}

void FrameLists::unlink(FrameId id) {
  Node& n = nodes_[id];
  if (n.list == kNoList) return;
  List& l = lists_[n.list];
  if (n.newer != kNoFrame) {
    nodes_[n.newer].older = n.older;
  } else {
    l.head = n.older;
  }
  if (n.older != kNoFrame) {
    nodes_[n.older].newer = n.newer;
  } else {
    l.tail = n.newer;
  }
  l.pages -= n.weight();
  n.list = kNoList;
  n.newer = n.older = kNoFrame;
}

}  // namespace vmem::policy
