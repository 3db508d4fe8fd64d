#include "pager/tier/kernel_ranges.h"

#include <algorithm>
#include <cerrno>

#include "pager/tier/device_tier.h"

namespace vmem::pager {

KernelRanges::KernelRanges(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), tier_(tier) {}

Status KernelRanges::check(const BlockSpan& span, unsigned access, int d, uint64_t budget) {
  const Region& r = *span.region;
  if (!r.gpu) {
    return error(EINVAL, "the range is in a region without a device tier (VMEM_HOST_ONLY); make it without that flag");
  }
  if (r.backing == Backing::file_read && (access & VMEM_WRITE) != 0) {
    return error(EACCES, "the range is in a region mapped with VMEM_MAP_READ; open it with VMEM_READ");
  }
  const DeviceBudget& device_budget = ctx_.device_set[static_cast<size_t>(d)].budget;
  const uint64_t blocks = span.last - span.first + 1;
  if (blocks > paging::kMaxBlocks) {
    return error(EINVAL, "the range has %llu blocks, more than %u", static_cast<unsigned long long>(blocks),
                 paging::kMaxBlocks);
  }
  // Other leases may hold a part of it now; the range's leases wait for that as any lease does.
  if (const uint64_t all = device_budget.budget(); budget > all) {
    return error(ENOMEM, "a budget of %s for kernels does not fit device %d: device_budget %s",
                 core::human_bytes(budget).c_str(), d, core::human_bytes(all).c_str());
  }
  if (budget != 0 && budget < r.block_size) {
    return error(EINVAL, "a budget of %llu bytes does not hold a block of %s", static_cast<unsigned long long>(budget),
                 core::human_bytes(r.block_size).c_str());
  }
  return {};
}

Status KernelRanges::open(const vmem_range& range, int d, uint64_t budget, KernelRange* out) {
  if (d < 0) return error(EINVAL, "kernels run on devices; %d is not the number of one", d);
  if (Status s = check_location(d, ctx_.device_set.size(), false); !s.ok()) return s;
  if (Status s = ctx_.device_set.use(d); !s.ok()) return s;
  Region* region = nullptr;
  {
    Lock lock(ctx_.map.mutex());
    BlockSpan span;
    if (Status s = ctx_.map.check_range(range.ptr, range.size, &span); !s.ok()) return s;
    Region& r = *span.region;
    if (Status s = check(span, range.access, d, budget); !s.ok()) return s;
    const uint64_t most = budget != 0 ? budget : ctx_.device_set[static_cast<size_t>(d)].budget.limit() / 2;
    const uint64_t blocks = span.last - span.first + 1, frames = std::clamp<uint64_t>(most / r.block_size, 1, blocks);
    out->first = reinterpret_cast<uintptr_t>(r.address(span.first));
    out->end = std::min(reinterpret_cast<uintptr_t>(r.address(span.last)) + r.block_size,
                        reinterpret_cast<uintptr_t>(r.base) + r.size);
    out->block_size = r.block_size;
    out->blocks = static_cast<uint32_t>(blocks);
    out->frames = static_cast<uint32_t>(frames);
    out->readahead = r.advice.access == policy::Access::random
                         ? 0
                         : static_cast<uint32_t>(ctx_.tunables.readahead_bytes / r.block_size);
    out->device = d;
    out->region = r.id;
    ++r.counts.kernels;
    ++ctx_.staging.kernel_ranges;
    ++r.counts.in_flight;
    region = &r;
  }
  Status s = ctx_.devices->make_paging_words(d, out->blocks, out->frames, &out->words);
  Lock lock(ctx_.map.mutex());
  if (!s.ok()) {
    --region->counts.kernels;
    --ctx_.staging.kernel_ranges;
  }
  while (ctx_.staging.ending != 0) lock.sleep(ctx_.map.changed());  // unpinning may wait for kernels
  --region->counts.in_flight;
  ctx_.map.notify();
  return s;
}

// Ends the words without the lock.
void KernelRanges::close(KernelRange* range) {
  range->words.reset();
  Lock lock(ctx_.map.mutex());
  --ctx_.staging.kernel_ranges;
  ctx_.device_set.work().notify_all();
  Region* const r = ctx_.map.find(range->first);
  if (r != nullptr && r->id == range->region) --r->counts.kernels;
  ctx_.map.notify();
}

void KernelRanges::not_changed(std::span<const vmem_range> ranges, int d) {
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  for (const vmem_range& range : ranges) {
    if (ctx_.map.check_range(range.ptr, range.size, &span).ok()) tier_.blocks.not_changed(span, d);
  }
}

}  // namespace vmem::pager
