#include "pager/block/lease_map.h"

#include <functional>
#include <iterator>
#include <new>
#include <utility>

#include "core/status.h"

namespace vmem::pager {

namespace {

uint64_t count_of(core::BlockIndex first, core::BlockIndex last) {
  return last - first + 1;
}

bool all_end(const Leases& leases) {
  return std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; });
}

bool dead(const Lease& l) {
  return l.count == 0 && l.pending == 0;
}

bool all_dead(const Leases& leases) {
  return std::all_of(leases.begin(), leases.end(), dead);
}

// Returns the stream's lease. The host has one lease, whatever the stream.
template <typename Of>
auto of_stream(Of& leases, void* stream) {
  return std::find_if(leases.begin(), leases.end(),
                      [&](const Lease& l) { return l.location < 0 || l.stream == stream; });
}

// Returns the place of a new lease. Leases are in the order of their streams, so that those of two
// ranges can be compared.
Leases::iterator place_of(Leases& leases, void* stream) {
  return std::find_if(leases.begin(), leases.end(), [&](const Lease& l) { return std::less<>()(stream, l.stream); });
}

}  // namespace

LeaseMap::Ranges::const_iterator LeaseMap::at(BlockIndex b) const {
  auto i = ranges_.upper_bound(b);
  return i != ranges_.begin() && std::prev(i)->second.last >= b ? std::prev(i) : i;
}

LeaseMap::Ranges::iterator LeaseMap::at(BlockIndex b) {
  auto i = ranges_.upper_bound(b);
  return i != ranges_.begin() && std::prev(i)->second.last >= b ? std::prev(i) : i;
}

size_t LeaseMap::bytes() const {
  constexpr size_t kNode = sizeof(Ranges::value_type) + 64;  // with the links of the tree and the allocator's overhead
  return (ranges_.size() + spares_.size()) * kNode + freed_ * sizeof(Lease) +
         spares_.capacity() * sizeof(Ranges::node_type);
}

const Leases* LeaseMap::find(BlockIndex b) const {
  const auto i = at(b);
  return i != ranges_.end() && i->first <= b ? &i->second.leases : nullptr;
}

uint64_t LeaseMap::leased(BlockIndex first, BlockIndex last) const {
  uint64_t count = 0;
  visit(first, last, [&](BlockIndex from, BlockIndex to, const Leases&) {
    count += count_of(from, to);
    return true;
  });
  return count;
}

void LeaseMap::grow(Leases& leases, size_t room) {
  const size_t before = leases.capacity();
  leases.reserve(room);
  freed_ += leases.capacity() - before;
}

// Makes sure of `count` spares, each with room for `width` leases. Throws bad_alloc.
void LeaseMap::spare(size_t count, size_t width) {
  spares_.reserve(std::max(count, kSpares));
  for (Ranges::node_type& node : spares_) grow(node.mapped().leases, width);
  while (spares_.size() < count) {
    Ranges one;
    grow(one[0].leases, width);
    spares_.push_back(one.extract(one.begin()));
  }
}

// Frees the spares that are not needed.
void LeaseMap::trim() noexcept {
  while (spares_.size() > (ranges_.empty() ? 0 : kSpares)) {
    freed_ -= spares_.back().mapped().leases.capacity();
    spares_.pop_back();
  }
  if (ranges_.empty()) core::OwnVector<Ranges::node_type>().swap(spares_);
}

void LeaseMap::forget(Ranges::iterator range) noexcept {
  Ranges::node_type node = ranges_.extract(range);
  if (spares_.size() == spares_.capacity()) {
    freed_ -= node.mapped().leases.capacity();
    return;
  }
  node.mapped().leases.clear();
  node.mapped().begins = node.mapped().ends = {};
  spares_.push_back(std::move(node));
}

// Divides the range that has blocks b - 1 and b. Does nothing if there is none, or no spare.
void LeaseMap::cut(BlockIndex b) noexcept {
  const auto left = at(b);
  if (left == ranges_.end() || left->first >= b || spares_.empty()) return;
  Ranges::node_type node = std::move(spares_.back());
  spares_.pop_back();
  node.key() = b;
  Range& right = node.mapped();
  right.last = std::exchange(left->second.last, b - 1);
  right.leases = left->second.leases;  // within its capacity
  right.begins = {};
  right.ends = std::exchange(left->second.ends, {});
  ranges_.insert(std::next(left), std::move(node));
}

// Calls each(range, blocks) for the ranges that lie wholly inside.
template <typename Each>
void LeaseMap::each(BlockIndex first, BlockIndex last, Each each) noexcept {
  for (auto i = ranges_.lower_bound(first); i != ranges_.end() && i->second.last <= last; ++i) {
    each(i->second, count_of(i->first, i->second.last));
  }
}

// Calls at_end() for the range that begins at `first`, if one does, and the one that ends at
// `last`.
template <typename At>
void LeaseMap::at_ends(BlockIndex first, BlockIndex last, At at_end) noexcept {
  if (const auto i = ranges_.find(first); i != ranges_.end()) at_end(i->second, i->second.begins);
  if (const auto i = at(last); i != ranges_.end() && i->second.last == last) at_end(i->second, i->second.ends);
}

bool LeaseMap::prepare(BlockIndex first, BlockIndex last, void* stream) noexcept try {
  size_t width = 1, nodes = 2;
  BlockIndex next = first;
  for (auto i = at(first); i != ranges_.end() && i->first <= last; ++i) {
    width = std::max(width, i->second.leases.size() + 1);
    nodes += i->first > next;
    next = i->second.last + 1;
  }
  spare(nodes + (next <= last), width);
  for (auto i = at(first); i != ranges_.end() && i->first <= last; ++i) {
    Leases& leases = i->second.leases;
    if (of_stream(leases, stream) == leases.end()) grow(leases, leases.size() + 1);
  }
  return true;
} catch (const std::bad_alloc&) {
  trim();
  return false;
}

LeaseMap::Change LeaseMap::acquire(BlockIndex first, BlockIndex last, int location, void* stream,
                                   unsigned access) noexcept {
  cut(first);
  cut(last + 1);
  Change change;
  auto i = at(first);
  for (BlockIndex next = first; next <= last; ++i) {
    if (i == ranges_.end() || i->first > next) {
      Ranges::node_type node = std::move(spares_.back());
      spares_.pop_back();
      node.key() = next;
      node.mapped().last = i == ranges_.end() ? last : std::min(last, i->first - 1);
      change.leased += count_of(next, node.mapped().last);
      i = ranges_.insert(i, std::move(node));
    } else if (all_end(i->second.leases)) {
      change.ending += count_of(i->first, i->second.last);
    }
    Leases& leases = i->second.leases;
    auto lease = of_stream(leases, stream);
    if (lease == leases.end()) lease = leases.insert(place_of(leases, stream), Lease{location, stream});
    if (lease->count == 0) lease->access = lease->reads = lease->writes = 0;
    lease->grant(access);
    next = i->second.last + 1;
  }
  blocks_ += change.leased;
  at_ends(first, last, [](const Range&, Ends& ends) { ++ends.acquires; });
  join(first, last);
  return change;
}

LeaseMap::Change LeaseMap::take_back(BlockIndex first, BlockIndex last, int location, void* stream,
                                     unsigned access) noexcept {
  // Both ends exist, unless a caller released blocks that it had not acquired. Then divide() may
  // find no memory, and a range that crosses an end stays leased.
  static_cast<void>(divide(first, last));
  Change change;
  each(first, last, [&](Range& range, uint64_t blocks) {
    const auto lease = of_stream(range.leases, stream);
    if (lease == range.leases.end() || lease->location != location || lease->count == 0) return;
    lease->take_back(access);
    if (all_end(range.leases) && !all_dead(range.leases)) change.ending += blocks;
  });
  at_ends(first, last, [](const Range&, Ends& ends) { ends.acquires -= ends.acquires != 0; });
  change.leased = join(first, last);
  return change;
}

LeaseMap::Change LeaseMap::release(BlockIndex first, BlockIndex last, void* stream, unsigned asked) noexcept {
  Change change;
  each(first, last, [&](Range& range, uint64_t blocks) {
    Lease& lease = *of_stream(range.leases, stream);
    if (lease.location >= 0) {
      ++lease.pending;
      lease.ended |= asked != 0 ? asked : lease.access;
    }
    lease.release(asked);
    if (lease.location >= 0 && all_end(range.leases)) change.ending += blocks;
  });
  at_ends(first, last, [](const Range& range, Ends& ends) {
    ends.acquires -= ends.acquires != 0;
    ends.pending += range.leases.front().location >= 0;
  });
  return change;
}

LeaseMap::Change LeaseMap::revive(BlockIndex first, BlockIndex last, void* stream, unsigned asked) noexcept {
  Change change;
  each(first, last, [&](Range& range, uint64_t blocks) {
    Lease& lease = *of_stream(range.leases, stream);
    if (all_end(range.leases) && lease.location >= 0) change.ending += blocks;
    lease.revive(asked);
    if (lease.location >= 0 && --lease.pending == 0) lease.ended = 0;
  });
  at_ends(first, last, [](const Range& range, Ends& ends) {
    ++ends.acquires;
    ends.pending -= range.leases.front().location >= 0;
  });
  return change;
}

LeaseMap::Change LeaseMap::end(BlockIndex first, BlockIndex last, void* stream) noexcept {
  Change change;
  each(first, last, [&](Range& range, uint64_t blocks) {
    Lease& lease = *of_stream(range.leases, stream);
    if (--lease.pending == 0) lease.ended = 0;
    if (all_dead(range.leases)) change.ending += blocks;
  });
  at_ends(first, last, [](const Range&, Ends& ends) { --ends.pending; });
  change.leased = join(first, last);
  return change;
}

uint64_t LeaseMap::join(BlockIndex first, BlockIndex last) noexcept {
  uint64_t lost = 0;
  auto i = at(first - (first != 0));
  while (i != ranges_.end() && i->first <= last + 1) {
    const auto next = std::next(i);
    std::erase_if(i->second.leases, dead);
    if (i->second.leases.empty()) {
      lost += count_of(i->first, i->second.last);
      forget(i);
    } else if (i != ranges_.begin()) {
      Range &left = std::prev(i)->second, &right = i->second;
      const bool pinned = (left.ends.acquires | left.ends.pending | right.begins.acquires | right.begins.pending) != 0;
      if (left.last + 1 == i->first && !pinned && left.leases == right.leases) {
        left.last = right.last;
        left.ends = right.ends;
        forget(i);
      }
    }
    i = next;
  }
  blocks_ -= lost;
  trim();
  return lost;
}

bool LeaseMap::divide(BlockIndex first, BlockIndex last) noexcept try {
  size_t nodes = 0, width = 0;
  for (const BlockIndex b : {first, last + 1}) {
    const auto i = at(b);
    if (i == ranges_.end() || i->first >= b) continue;
    ++nodes;
    width = std::max(width, i->second.leases.size());
  }
  if (nodes == 0) return true;
  spare(nodes, width);
  cut(first);
  cut(last + 1);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

core::BlockIndex LeaseMap::unleased(BlockIndex first, BlockIndex last, void* stream) const {
  BlockIndex next = first;
  visit(first, last, [&](BlockIndex from, BlockIndex to, const Leases& leases) {
    const auto lease = of_stream(leases, stream);
    if (from != next || lease == leases.end() || lease->count == 0) return false;
    next = to + 1;
    return true;
  });
  return next;
}

std::string LeaseMap::check() const {
  uint64_t blocks = 0;
  size_t room = 0;
  for (const Ranges::node_type& node : spares_) room += node.mapped().leases.capacity();
  const Range* before = nullptr;
  for (const auto& [first, range] : ranges_) {
    const auto wrong = [at = first, last = range.last](const char* what) {
      return core::strprintf("leases of blocks %llu to %llu: %s", static_cast<unsigned long long>(at),
                             static_cast<unsigned long long>(last), what);
    };
    if (range.last < first || (before != nullptr && first <= before->last)) return wrong("out of order");
    if (range.leases.empty()) return wrong("none");
    for (auto l = range.leases.begin(); l != range.leases.end(); ++l) {
      if (dead(*l)) return wrong("one counts nothing");
      if (l->location != range.leases.front().location) return wrong("at two locations");
      if (l->location < 0 && (range.leases.size() != 1 || l->pending != 0))
        return wrong("the host has one, not pending");
      if (of_stream(range.leases, l->stream) != l) return wrong("two of one stream");
    }
    const bool touch = before != nullptr && before->last + 1 == first;
    const auto pinned = [](const Ends& e) { return e.acquires != 0 || e.pending != 0; };
    if (touch && !pinned(before->ends) && !pinned(range.begins) && before->leases == range.leases)
      return wrong("as those before them");
    blocks += count_of(first, range.last);
    room += range.leases.capacity();
    before = &range;
  }
  if (blocks != blocks_) return "leased blocks are miscounted";
  if (room != freed_) return "memory of leases is miscounted";
  if (spares_.size() > (ranges_.empty() ? 0 : kSpares)) return "too much memory in reserve";
  return "";
}

}  // namespace vmem::pager
