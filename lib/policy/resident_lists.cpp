#include "policy/resident_lists.h"

namespace vmem::policy {

using core::kNoResident;
using core::ResidentId;

void ResidentLists::push_head(ListId list, ResidentId id) {
  List& l = lists_[list];
  Node& n = nodes_[id];
  n.newer = kNoResident;
  n.older = l.head;
  if (l.head != kNoResident) {
    nodes_[l.head].newer = id;
  } else {
    l.tail = id;
  }
  l.head = id;
  n.list = list;
  l.pages += n.weight();
}

void ResidentLists::unlink(ResidentId id) {
  Node& n = nodes_[id];
  if (n.list == kNoList) return;
  List& l = lists_[n.list];
  if (n.newer != kNoResident) {
    nodes_[n.newer].older = n.older;
  } else {
    l.head = n.older;
  }
  if (n.older != kNoResident) {
    nodes_[n.older].newer = n.newer;
  } else {
    l.tail = n.newer;
  }
  l.pages -= n.weight();
  n.list = kNoList;
  n.newer = n.older = kNoResident;
}

}  // namespace vmem::policy
