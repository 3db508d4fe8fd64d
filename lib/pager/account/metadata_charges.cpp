#include "pager/account/metadata_charges.h"

#include <algorithm>
#include <iterator>

#include "core/break.h"
#include "core/log.h"

namespace vmem::pager {

using memory::Use;

namespace {

constexpr size_t kTries = 8;  // refused blocks that are tried at a time

}  // namespace

// Returns the charge for all bookkeeping, with `more` bytes of it.
uint64_t MetadataCharges::counted(uint64_t more) const {
  const uint64_t bytes =
      bytes_ + frame_table_.size() * (sizeof(Frame) + 24) + transitions_.size() * sizeof(Transition) + more;
  return bytes > kFree ? bytes - kFree : 0;
}

void MetadataCharges::charge(Region& r) {
  const size_t bytes = std::max(r.table.footprint(), r.charge.table_granted);
  if (bytes == r.charge.table) return;
  bytes_ += bytes - r.charge.table;
  r.charge.table = bytes;
  count();
}

void MetadataCharges::charge_leases(Region& r) {
  const size_t bytes = r.leases.bytes();
  if (bytes == r.charge.leases) return;
  bytes_ += bytes - r.charge.leases;
  r.charge.leases = bytes;
  count();
}

void MetadataCharges::credit(Region& r) {
  bytes_ -= std::exchange(r.charge.table, 0) + std::exchange(r.charge.leases, 0);
  count();
}

uint64_t MetadataCharges::growth(const Region& r, BlockIndex b) const {
  const size_t cost = r.table.cost(b);
  if (cost == 0) return 0;
  const size_t grown = r.table.footprint() + cost;
  const uint64_t bytes = counted(grown > r.charge.table ? grown - r.charge.table : 0);
  return bytes > budget_.charged(Use::tables) ? bytes - budget_.charged(Use::tables) : 0;
}

bool MetadataCharges::fits(const Region& r, BlockIndex b) const {
  const size_t more = r.table.cost(b);
  if (more == 0 || r.table.footprint() + more <= r.charge.table || budget_.charged(Use::tables) == 0) return true;
  return reserve_.for_moves() + more <= budget_.wanted();
}

// Lets accesses of a refused block reach the trap again. Returns true if the block need not be
// known any more. A block that has come since is left alone: unfail() would take its pages away.
// One in transition stays known: it may not come after all.
bool MetadataCharges::asks_again(const Region& r, BlockIndex b) {
  const State state = r.table[b].state;
  if (state == State::resident || state == State::poisoned) return true;
  if (state != State::unpopulated && state != State::stored && state != State::staged) return false;
  const Status s = trap_.unfail(r.address(b), r.block_size);
  if (!s.ok()) VMEM_LOG_ONCE(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
  return s.ok() || core::broken("table_retry");  // else it would get SIGBUS for good
}

bool MetadataCharges::may_grow(const Region& r, BlockIndex b) {
  if (!fits(r, b)) return false;
  refused_.erase_if([&](const auto& e) { return fits(*e.first, e.second) && asks_again(*e.first, e.second); });
  return true;
}

void MetadataCharges::try_again() {
  if (!refused_.empty()) may_grow(*refused_.front().first, refused_.front().second);
}

Status MetadataCharges::refuse(Region& r, BlockIndex b) {
  // If the list is full, the oldest block leaves it, or the next one whose SIGBUS the trap takes
  // back. If it takes none back, the list grows by one.
  bool full = refused_.size() >= kMostRefused;
  for (size_t tries = kTries; full && tries != 0; --tries) {
    const auto [region, block] = refused_.front();
    full = !asks_again(*region, block);
    full ? refused_.move_front(refused_.end()) : refused_.pop_front();
  }
  if (!refused_.push_back({&r, b})) {  // no memory to know it
    trap_.wake(r.address(b), r.block_size).ignore();
    return {};
  }
  Status failed = trap_.fail(r.address(b), r.block_size);
  if (!failed.ok()) refused_.erase(std::prev(refused_.end()));
  return failed;
}

void MetadataCharges::forget(const Region& r) {
  refused_.erase_if([&](const auto& e) { return e.first == &r; });
}

std::string MetadataCharges::check(uint64_t bytes) const {
  if (bytes != bytes_) {
    return core::strprintf("%llu bytes are charged for tables and leases of regions, those there are have %llu",
                           static_cast<unsigned long long>(bytes_), static_cast<unsigned long long>(bytes));
  }
  return "";
}

}  // namespace vmem::pager
