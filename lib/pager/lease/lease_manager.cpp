#include "pager/lease/lease_manager.h"

#include <algorithm>
#include <cerrno>

#include "core/scope_guard.h"
#include "pager/lease/lease_room.h"

namespace vmem::pager {

namespace {

Status no_memory() {
  return error(ENOMEM, "no memory for bookkeeping");
}

}  // namespace

LeaseManager::LeaseManager(PagerContext& ctx) : ctx_(ctx) {}

// Counts blocks that came under leases, and blocks that came to have only ending leases. more:
// false takes them out of the counts.
void LeaseManager::count(const Region& r, int location, uint64_t leased, uint64_t ending, bool more) {
  const uint64_t bytes = leased * r.block_size;
  if (location < 0) {
    more ? ctx_.reserve.lease(bytes) : ctx_.reserve.release(bytes);
  } else {
    ctx_.device_set[static_cast<size_t>(location)].budget.count_leases(bytes, ending * r.block_size, more);
  }
}

Status LeaseManager::grant(const BlockSpan& span, unsigned access, int location, void* stream) {
  Region& r = *span.region;
  int other = location;
  BlockIndex at = 0;
  r.leases.visit(span.first, span.last, [&](BlockIndex first, BlockIndex, const Leases& leases) {
    other = leases.front().location;
    at = first;
    return other == location;
  });
  if (other != location) {
    return error(EBUSY, "%s is leased at location %d; release it there first", ctx_.map.describe_locked(r, at).c_str(),
                 other);
  }
  const uint64_t tables = ctx_.budget.charged(memory::Use::tables);
  const bool prepared = r.leases.prepare(span.first, span.last, stream);
  ctx_.metadata_charges.charge_leases(r);
  const uint64_t fresh = (span.last - span.first + 1 - r.leases.leased(span.first, span.last)) * r.block_size;
  const uint64_t wanted = location < 0 ? fresh : 0, kept = ctx_.reserve.bytes() + ctx_.frames.least_overhead();
  const bool costs = wanted != 0 || ctx_.budget.charged(memory::Use::tables) > tables;
  const bool fits = !costs || ctx_.reserve.fits(wanted);
  if (!prepared || !fits) {
    r.leases.join(span.first, span.last);
    ctx_.metadata_charges.charge_leases(r);
    if (!prepared) return no_memory();
    return error(ENOMEM,
                 "the lease does not fit: host_budget %s less %s for faults, buffers and tables, %s leased already; "
                 "holders: %s",
                 core::human_bytes(ctx_.budget.limit()).c_str(), core::human_bytes(kept).c_str(),
                 core::human_bytes(ctx_.reserve.pinned()).c_str(), holders().c_str());
  }
  const LeaseMap::Change change = r.leases.acquire(span.first, span.last, location, stream, access);
  ctx_.metadata_charges.charge_leases(r);
  count(r, location, change.leased, 0, true);
  count(r, location, 0, change.ending, false);
  ++r.counts.granted;
  return {};
}

void LeaseManager::take_back(const BlockSpan& span, unsigned access, int location, void* stream) {
  Region& r = *span.region;
  const LeaseMap::Change change = r.leases.take_back(span.first, span.last, location, stream, access);
  ctx_.metadata_charges.charge_leases(r);
  count(r, location, change.leased, 0, false);
  count(r, location, 0, change.ending, true);
  if (change.leased != 0) ctx_.map.progress().made();
}

Status LeaseManager::release(Lock& lock, std::span<const BlockSpan> spans, const vmem_range* asked, void* stream,
                             std::list<PendingRelease>* pending) {
  const auto access_of = [&](size_t span) { return asked != nullptr ? asked[span].access : 0; };
  size_t divided = 0, i = 0;
  BlockIndex next = 0;  // of span i
  const auto join = [&] {
    lock.hold();
    for (size_t k = 0; k < divided; ++k) {
      Region& r = *spans[k].region;
      const uint64_t lost = r.leases.join(spans[k].first, spans[k].last);
      count(r, VMEM_HOST, lost, 0, false);
      ctx_.metadata_charges.charge_leases(r);
      if (lost != 0) ctx_.map.progress().made();
    }
  };
  core::ScopeGuard undo([&] {
    for (PendingRelease& e : *pending) e.spans.clear();
    for (size_t k = 0; k <= i && k < spans.size(); ++k) {
      Region& r = *spans[k].region;
      each_leased_run(r.leases, spans[k].first, k == i ? next : spans[k].last + 1,
                      [&](BlockIndex first, BlockIndex last, int location) {
                        lock.hold();
                        const LeaseMap::Change change = r.leases.revive(first, last, stream, access_of(k));
                        count(r, location, 0, change.ending, false);
                        return true;
                      });
    }
    join();
  });
  for (; divided < spans.size(); ++divided) {
    if (!spans[divided].region->leases.divide(spans[divided].first, spans[divided].last)) return no_memory();
  }
  for (; i < spans.size(); ++i) {
    Region& r = *spans[i].region;
    next = spans[i].first;
    if (const BlockIndex b = r.leases.unleased(next, spans[i].last, stream); b <= spans[i].last) {
      return error(EINVAL, "%s has no lease of stream %p to release; nothing was released",
                   ctx_.map.describe_locked(r, b).c_str(), stream);
    }
    each_leased_run(r.leases, next, spans[i].last + 1, [&](BlockIndex first, BlockIndex last, int location) {
      lock.hold();
      if (location >= 0) {
        const auto e = std::find_if(pending->begin(), pending->end(),
                                    [&](const PendingRelease& x) { return x.device == location || x.spans.empty(); });
        if (e == pending->end() || e->spans.size() == e->spans.capacity()) return false;
        e->spans.push_back({&r, first, last});
        e->device = location;
        e->stream = stream;
      }
      const LeaseMap::Change change = r.leases.release(first, last, stream, access_of(i));
      count(r, location, 0, change.ending, true);
      next = last + 1;
      return true;
    });
    if (next <= spans[i].last) return Status(ENOBUFS, "");
  }
  undo.dismiss();
  join();
  return {};
}

void LeaseManager::revive(const PendingRelease& ending) {
  for (const BlockSpan& s : ending.spans) {
    const LeaseMap::Change change = s.region->leases.revive(s.first, s.last, ending.stream);
    count(*s.region, ending.device, 0, change.ending, false);
    s.region->leases.join(s.first, s.last);
    ctx_.metadata_charges.charge_leases(*s.region);
  }
}

void LeaseManager::end(const PendingRelease& ending) {
  for (const BlockSpan& s : ending.spans) {
    const LeaseMap::Change change = s.region->leases.end(s.first, s.last, ending.stream);
    count(*s.region, ending.device, change.leased, change.ending, false);
    ctx_.metadata_charges.charge_leases(*s.region);
  }
}

void LeaseManager::forget(Lock& lock, const Region& r) {
  r.leases.visit(0, r.blocks - 1, [&](BlockIndex first, BlockIndex last, const Leases& leases) {
    const int location = leases.front().location;
    const bool ending = std::all_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count == 0; });
    lock.hold();
    count(r, location, last - first + 1, ending ? last - first + 1 : 0, false);
    return true;
  });
}

core::OwnString LeaseManager::holders() try {
  core::OwnString text;
  int named = 0;
  for (const auto& [base, r] : ctx_.map.regions()) {
    if (r->leases.empty()) continue;
    if (++named > 4) return text + ", ..";
    text += core::textf("%sregion %s%llu %s", text.empty() ? "" : ", ", r->name.empty() ? "" : (r->name + " #").c_str(),
                        static_cast<unsigned long long>(r->id),
                        core::human_bytes(r->leases.blocks() * r->block_size).c_str());
  }
  return text.empty() ? core::OwnString("none") : text;
} catch (const std::bad_alloc&) {
  return "";
}

std::string LeaseManager::check() {
  uint64_t leased = 0;
  for (const auto& [base, r] : ctx_.map.regions()) {
    r->leases.visit(0, r->blocks - 1,
                    [&, size = r->block_size](BlockIndex first, BlockIndex last, const Leases& leases) {
                      if (leases.front().location == VMEM_HOST) leased += (last - first + 1) * size;
                      return true;
                    });
  }
  return ctx_.reserve.check(leased, ctx_.map.regions().size());
}

}  // namespace vmem::pager
