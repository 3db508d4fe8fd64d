// Acquires that somebody asks for and does not wait in: what is checked on the asker's thread, and what keeps their
// regions until the acquire begins.
#include "pager/ask.h"

#include <algorithm>
#include <cerrno>

#include "pager/pager.h"

namespace vmem::pager {

using core::error;
using core::Status;

// May work of the device be ordered with the stream? There is none at the host.
Status Pager::check_stream(int location, void* stream) {
  if (Status s = check_location(location, false); !s.ok() || location < 0) return s;
  return gpus_.check_stream(location, stream);
}

// On the thread that names the stream: what "the default stream" is may depend on it.
Status Pager::ask(std::span<const vmem_range> ranges, int location, void* stream, Ask* ask) {
  if (Status s = check_stream(location, stream); !s.ok()) return s;
  if (location >= 0 && devices_->of_thread(stream)) {
    return error(EINVAL,
                 "stream %p is another one on each thread, and an asynchronous lease is taken on a thread of its own; "
                 "give a stream that was created",
                 stream);
  }
  ask->regions.reserve(ranges.size());
  Lock lock(map_.mutex());
  SpanOf span;
  for (const vmem_range& range : ranges) {
    if (Status s = map_.check_range(range.ptr, range.size, &span); !s.ok()) return s;
  }
  for (const vmem_range& range : ranges) {
    map_.check_range(range.ptr, range.size, &span).ignore();  // it is as it was a moment ago
    ask->regions.push_back(span.region->id);
    ++span.region->asked;
  }
  return {};
}

// The regions may be freed, and so they may have been by shutdown.
void Pager::withdraw(std::span<const vmem_range> ranges, Ask* ask) {
  Lock lock(map_.mutex());
  for (size_t i = 0; i < ask->regions.size(); ++i) {
    Region* const r = map_.find(reinterpret_cast<uintptr_t>(ranges[i].ptr));
    if (r != nullptr && r->id == ask->regions[i]) --r->asked;
  }
  ask->regions.clear();
  map_.notify();
}

Status check_asked(std::span<const SpanOf> spans, const Ask* ask) {
  if (ask == nullptr) return {};
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].region->id != ask->regions[i]) return error(EINVAL, "the region of range %zu was freed meanwhile", i);
  }
  return Ask::check(ask);
}

// Whoever waits looks whether it was cancelled.
void Pager::wake_asked() {
  Lock lock(map_.mutex());
  map_.notify();
}

}  // namespace vmem::pager
