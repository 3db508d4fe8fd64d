#include "pager/calls/export.h"

#include <algorithm>
#include <cerrno>

#include "core/step.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

Export::Export(PagerContext& ctx, Calls& calls)
    : ctx_(ctx), host_(calls.host), leases_(calls.leases), tier_(calls.tier) {}

// Sets *device to the device at which every block of the span is under a live lease.
Status Export::exported_from(const BlockSpan& span, int* device) {
  const Region& r = *span.region;
  BlockIndex next = span.first;
  int d = VMEM_HOST;
  r.leases.visit(span.first, span.last, [&](BlockIndex first, BlockIndex last, const Leases& leases) {
    const int location = leases.front().location;
    if (first != next || location < 0 || (d >= 0 && location != d)) return false;
    if (std::none_of(leases.begin(), leases.end(), [](const Lease& l) { return l.count != 0; })) return false;
    d = location;
    next = last + 1;
    return true;
  });
  if (next <= span.last) {
    return error(EINVAL, "%s is under no live lease at %s; lease all of the range at one device first",
                 ctx_.map.describe_locked(r, next).c_str(), d < 0 ? "a device" : "that device");
  }
  *device = d;
  bool wait = false;
  return leases_.releases.check_device_stale({&span, 1}, &wait);
}

Status Export::export_range(const void* ptr, size_t size, device::Export how, int* descriptor) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  if (Status s = ctx_.map.check_range(ptr, size, &span); !s.ok()) return s;
  Region& r = *span.region;
  if (!r.gpu) {
    return error(EOPNOTSUPP,
                 "the range is in a region without a device tier (VMEM_HOST_ONLY); make it without that flag");
  }
  if (!ctx_.device_set.own_page_tables()) {
    return error(EOPNOTSUPP,
                 "blocks of managed memory cannot be exported; those of physical handles can (device=handles)");
  }
  const BlockIndex blocks = span.last - span.first + 1;
  if (how == device::Export::handle && blocks != 1) {
    return error(EINVAL,
                 "the range has %llu blocks of %s, and a descriptor covers one; export each block, or a dma-buf",
                 static_cast<unsigned long long>(blocks), core::human_bytes(r.block_size).c_str());
  }
  ++r.counts.in_flight;
  int d = 0;
  Status s;
  for (BlockIndex b = span.first; s.ok() && b <= span.last;) {
    s = exported_from(span, &d);
    if (!s.ok()) break;
    b = span.first;
    while (b <= span.last && r.table[b].state == State::on_device && r.table[b].device == d) ++b;
    if (b > span.last) break;
    if (!core::in_transition(r.table[b].state))
      s = error(EIO, "%s is not on device %d, though it is leased there", ctx_.map.describe_locked(r, b).c_str(), d);
    else if (!ctx_.map.wait_stable(lock, r, b))
      s = error(ECANCELED, "vmem_shutdown frees the region");
    b = span.first;
  }
  if (s.ok()) {
    for (BlockIndex i = span.first; i <= span.last; ++i) tier_.blocks.claim(r, i);
    lock.unlock();
    core::step("export.claimed");
    s = ctx_.devices->share({reinterpret_cast<uintptr_t>(r.address(span.first)), blocks * r.block_size}, how,
                            descriptor);
    const Status health = s.ok() ? Status() : ctx_.devices->health(d);
    lock.lock();
    ctx_.device_set.saw_loss(d, health);
    for (BlockIndex i = span.first; i <= span.last; ++i) tier_.blocks.unclaim(r, i);
  }
  --r.counts.in_flight;
  ctx_.map.notify();
  host_.page_in.serve_waiting(lock);
  return s;
}

}  // namespace vmem::pager
