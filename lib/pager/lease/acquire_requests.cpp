#include "pager/lease/acquire_requests.h"

#include <cerrno>

#include "pager/lease/lease_room.h"

namespace vmem::pager {

AcquireRequests::AcquireRequests(PagerContext& ctx) : ctx_(ctx) {}

Status AcquireRequests::check_stream(int location, void* stream) {
  if (Status s = check_location(location, ctx_.device_set.size(), false); !s.ok() || location < 0) return s;
  return ctx_.device_set.check_stream(location, stream);
}

Status AcquireRequests::ask(std::span<const vmem_range> ranges, int location, void* stream, AcquireRequest* ask) {
  if (Status s = check_stream(location, stream); !s.ok()) return s;
  if (location >= 0 && ctx_.devices->of_thread(stream)) {
    return error(EINVAL,
                 "stream %p means another stream on each thread, and an asynchronous lease is taken on its own thread; "
                 "give a stream that was created",
                 stream);
  }
  ask->regions.reserve(ranges.size());
  Lock lock(ctx_.map.mutex());
  BlockSpan span;
  for (const vmem_range& range : ranges) {
    if (Status s = ctx_.map.check_range(range.ptr, range.size, &span); !s.ok()) return s;
  }
  for (const vmem_range& range : ranges) {
    ctx_.map.check_range(range.ptr, range.size, &span).ignore();  // checked above, under this hold of the lock
    ask->regions.push_back(span.region->id);
    ++span.region->counts.asked;
  }
  return {};
}

void AcquireRequests::withdraw(std::span<const vmem_range> ranges, AcquireRequest* ask) {
  Lock lock(ctx_.map.mutex());
  for (size_t i = 0; i < ask->regions.size(); ++i) {
    Region* const r = ctx_.map.find(reinterpret_cast<uintptr_t>(ranges[i].ptr));
    if (r != nullptr && r->id == ask->regions[i]) --r->counts.asked;
  }
  ask->regions.clear();
  ctx_.map.notify();
}

void AcquireRequests::wake() {
  Lock lock(ctx_.map.mutex());
  ctx_.map.notify();
}

Status check_asked(std::span<const BlockSpan> spans, const AcquireRequest* ask) {
  if (ask == nullptr) return {};
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].region->id != ask->regions[i]) return error(EINVAL, "the region of range %zu was freed meanwhile", i);
  }
  return AcquireRequest::check(ask);
}

}  // namespace vmem::pager
