#include "policy/readahead.h"

#include <algorithm>

namespace vmem::policy {

using core::BlockIndex;

namespace {
constexpr uint32_t kFirstWindow = 4;      // blocks
constexpr int64_t kLongestStride = 4096;  // blocks
constexpr uint32_t kMostCaution = 4;
constexpr uint32_t kExtensionsToGrow = 8;
// Touches in a row that make a stream. Two neighbours happen by chance; the caution and the small
// first window limit the cost.
constexpr uint32_t kTouchesSequential = 2, kTouchesStrided = 4;
constexpr uint64_t kIdle = 1024;  // touches after which a stream gets no share of the memory
constexpr int64_t kAgain = 8;     // blocks before the passed ones that are reported once more
}  // namespace

ReadAhead::ReadAhead(uint64_t blocks, uint32_t max_blocks) : blocks_(blocks), max_(max_blocks), limit_(max_blocks) {}

void ReadAhead::set_access(Access access) {
  access_ = access;
  streams_ = {};
  current_ = nullptr;
  passed_ = given_up_ = {};
  history_used_ = 0;
  caution_ = 0;
  limit_ = max_;
}

void ReadAhead::set_max(uint32_t max_blocks) {
  max_ = limit_ = max_blocks;
  for (Stream& s : streams_) {
    s.window = std::min(s.window, max_);
    if (s.window == 0) s.live = false;
  }
}

// Returns the steps of the stream's stride from `from` to `to`; empty if `to` is not on its grid or
// lies before `from`.
std::optional<uint64_t> ReadAhead::steps(const Stream& s, int64_t from, int64_t to) {
  const int64_t distance = to - from;
  if (distance % s.stride != 0 || distance / s.stride < 0) return std::nullopt;
  return static_cast<uint64_t>(distance / s.stride);
}

// Returns the nearest stream that continues with this block. A fault belongs to a stream if it is
// anywhere in the blocks requested. While the stream is fresh, the block after those also counts,
// and up to an eighth of a window further for a plain sequential stream.
ReadAhead::Stream* ReadAhead::following(BlockIndex block, bool marker) {
  Stream* best = nullptr;
  uint64_t best_distance = UINT64_MAX;
  for (Stream& s : streams_) {
    if (!s.live) continue;
    // In a small region chance leads to the end of any window sooner or later. Checked first
    // because it needs no division.
    if (access_ != Access::sequential && !marker && tick_ - s.used > 16 + 2 * uint64_t{s.window}) continue;
    const auto n = steps(s, static_cast<int64_t>(s.last), static_cast<int64_t>(block));
    if (!n) continue;
    const uint64_t asked = steps(s, static_cast<int64_t>(s.last), s.ahead).value_or(1);
    if (*n > asked + (std::abs(s.stride) == 1 ? s.window / 8 + 1 : 0)) continue;
    const uint64_t distance = block > s.last ? block - s.last : s.last - block;
    if (distance < best_distance) {
      best = &s;
      best_distance = distance;
    }
  }
  return best;
}

// Returns the shortest stride with which earlier touches, in their order, lead to this block; 0 if
// there is none.
int64_t ReadAhead::find_stride(BlockIndex block) const {
  const uint64_t oldest = history_used_ > kHistory ? history_used_ - kHistory : 0;
  const int64_t longest = std::min<int64_t>(kLongestStride, static_cast<int64_t>(blocks_ / 8) + 1);
  int64_t best = 0;
  for (uint64_t i = history_used_; i-- > oldest;) {
    const int64_t stride = static_cast<int64_t>(block - history_[i % kHistory]);
    if (stride == 0 || std::abs(stride) > longest || (best != 0 && std::abs(stride) >= std::abs(best))) continue;
    uint32_t need = (std::abs(stride) == 1 ? kTouchesSequential : kTouchesStrided) + caution_ - 2;
    BlockIndex before = history_[i % kHistory] - static_cast<uint64_t>(stride);
    for (uint64_t j = i; need != 0 && j-- > oldest;) {
      if (history_[j % kHistory] != before) continue;
      before -= static_cast<uint64_t>(stride);
      --need;
    }
    if (need == 0) best = stride;
  }
  return best;
}

// Ends a stream. If its first window was not used, the region's next streams need more touches.
void ReadAhead::forget(Stream& s) {
  if (s.live && !s.extended && access_ == Access::normal) caution_ = std::min(caution_ + 1, kMostCaution);
  s.live = false;
}

ReadAhead::Stream& ReadAhead::start(BlockIndex block, int64_t stride) {
  Stream* place = &streams_[0];
  for (Stream& s : streams_) {
    if (!s.live) {
      place = &s;
      break;
    }
    if (s.used < place->used) place = &s;
  }
  if (const Run run = unread(*place); run.count != 0) given_up_ = run;
  forget(*place);
  *place = Stream{};
  place->live = true;
  place->last = block;
  place->stride = stride;
  place->begun = place->passed = place->behind = static_cast<int64_t>(block);
  place->ahead = place->begun + stride;
  place->used = tick_;
  place->clock = room_.clock;
  place->window = access_ == Access::sequential ? limit_ : std::min(limit_, kFirstWindow);
  return *place;
}

// Returns the blocks that a stream may have in memory unread, for two windows.
uint64_t ReadAhead::share() const {
  uint64_t streams = 0;
  for (const Stream& s : streams_) streams += s.live && tick_ - s.used <= kIdle ? 1 : 0;
  return room_.blocks / 2 / std::max<uint64_t>(1, streams);
}

Run ReadAhead::unread(const Stream& s) {
  if (!s.live) return {};
  return {static_cast<BlockIndex>(s.passed), s.stride, steps(s, s.passed, s.ahead).value_or(0)};
}

void ReadAhead::pass(Stream& s, int64_t at) {
  const auto n = steps(s, s.passed, at);
  if (!n) return;
  const auto again =
      static_cast<int64_t>(std::min<uint64_t>(static_cast<uint64_t>(kAgain), steps(s, s.begun, s.passed).value_or(0)));
  passed_ = {static_cast<BlockIndex>(s.passed - again * s.stride), s.stride, *n + static_cast<uint64_t>(again)};
  s.passed = at;
}

Run ReadAhead::leave_behind(uint64_t keep) {
  if (current_ == nullptr || !current_->live) return {};
  Stream& s = *current_;
  const uint64_t n = steps(s, s.behind, s.passed).value_or(0);
  if (n < 2 * keep) return {};
  const Run run{static_cast<BlockIndex>(s.behind), s.stride, n - keep};
  s.behind += static_cast<int64_t>(run.count) * s.stride;
  return run;
}

Run ReadAhead::give_up(uint64_t clock) {
  for (Stream& s : streams_) {
    if (!s.live || s.clock >= clock) continue;
    const Run run = unread(s);
    forget(s);
    if (run.count != 0) return run;
  }
  return {};
}

// The reader of a stream has come to `block`: returns the next window, if it is time for one.
std::optional<Window> ReadAhead::extend(Stream& s, BlockIndex block, bool marker) {
  const int64_t at = static_cast<int64_t>(block);
  const uint64_t step = steps(s, static_cast<int64_t>(s.last), at).value_or(0);
  const uint64_t left = steps(s, at, s.ahead).value_or(0);
  const uint64_t unread = left > 0 ? left - 1 : 0;
  s.last = block;
  // A touch in the window, but not of its marker nor the next block: chance, or a block that was
  // evicted again.
  if (!marker && step > 1 && left > 0) return std::nullopt;
  s.used = tick_;
  s.clock = room_.clock;
  pass(s, at);
  if (!marker && unread * 2 > s.window) return std::nullopt;
  const bool gap = s.ahead != at && left == 0;
  if (left == 0) s.ahead = at + s.stride;
  s.wasted = 0;
  if (!gap) {
    if (s.window >= limit_ && limit_ < max_ && ++extensions_ >= kExtensionsToGrow) {
      ++limit_;
      extensions_ = 0;
    }
    s.window = static_cast<uint32_t>(std::min<uint64_t>(limit_, uint64_t{s.window} * 2));
    if (s.extended && caution_ > 0) --caution_;
    s.extended = true;
  }
  return ask(s, unread);
}

std::optional<Window> ReadAhead::ask(Stream& s, uint64_t unread) {
  if (s.ahead < 0 || s.ahead >= static_cast<int64_t>(blocks_)) return std::nullopt;
  const int64_t room = s.stride > 0 ? (static_cast<int64_t>(blocks_) - 1 - s.ahead) / s.stride : s.ahead / -s.stride;
  // Blocks requested and not used yet stay below two windows.
  const uint64_t window = std::min<uint64_t>(s.window, share());
  if (unread >= window * 2) return std::nullopt;
  uint64_t count = std::min({window, window * 2 - unread, static_cast<uint64_t>(room) + 1});
  for (const Stream& other : streams_) {
    if (!other.live || &other == &s || other.stride != s.stride) continue;
    count = std::min(count, steps(s, s.ahead, other.begun).value_or(count));
  }
  if (count == 0) return std::nullopt;
  Window w;
  w.first = static_cast<BlockIndex>(s.ahead);
  w.stride = s.stride;
  w.count = static_cast<uint32_t>(count);
  // A quarter into the window: three quarters are still unused when the next window is requested.
  w.marker = static_cast<BlockIndex>(s.ahead + static_cast<int64_t>(count / 4) * s.stride);
  s.ahead += static_cast<int64_t>(count) * s.stride;
  return w;
}

std::optional<Window> ReadAhead::on_fault(BlockIndex block, bool marker, Room room) {
  room_ = room;
  current_ = nullptr;
  passed_ = given_up_ = {};
  if (max_ == 0 || access_ == Access::random || block >= blocks_) return std::nullopt;
  ++tick_;
  if ((current_ = following(block, marker)) != nullptr) return extend(*current_, block, marker);
  int64_t stride = find_stride(block);
  // Several sequential readers, each of a part, begin at even distances: that is no stride.
  if (access_ == Access::sequential && std::abs(stride) != 1) stride = 0;
  history_[history_used_++ % kHistory] = block;
  if (access_ == Access::sequential && stride == 0) {
    stride = block + 1 == blocks_ ? -1 : 1;
    for (Stream& s : streams_) {
      if (!s.live || s.extended || s.stride != 1 || s.last != block + 1) continue;
      stride = -1;  // the forward stream begun there was a backward reader
      given_up_ = unread(s);
      s.live = false;
    }
  }
  if (stride == 0) return std::nullopt;
  current_ = &start(block, stride);
  return ask(*current_, 0);
}

// Records them as if accessed one by one: a stream that begins with them is found as soon as one
// that traps at each block.
void ReadAhead::presume(const Run& run) {
  if (max_ == 0 || access_ == Access::random) return;
  constexpr uint64_t kLooked = kTouchesSequential + kMostCaution;
  for (uint64_t i = std::max<uint64_t>(1, run.count - std::min(run.count, kLooked)); i < run.count; ++i)
    history_[history_used_++ % kHistory] =
        static_cast<BlockIndex>(static_cast<int64_t>(run.first) + static_cast<int64_t>(i) * run.stride);
}

// There are two kinds of waste. A reader that turned away ends its stream. Readers that all
// continue, but slower than blocks are evicted, need smaller windows, since all compete for the
// same memory.
void ReadAhead::on_waste(BlockIndex block) {
  if (++wasted_ * 2 >= limit_ && limit_ > 1) {
    limit_ /= 2;
    wasted_ = 0;
    extensions_ = 0;
    for (Stream& s : streams_) s.window = std::min(s.window, limit_);
  }
  for (Stream& s : streams_) {
    if (!s.live) continue;
    // Only the last blocks requested can still be in memory unread: two windows back from the end.
    const auto back = steps(s, static_cast<int64_t>(block), s.ahead);
    if (!back || *back == 0 || *back > uint64_t{s.window} * 2) continue;
    if (++s.wasted * 2 < s.window) return;
    s.wasted = 0;
    s.window /= 2;
    if (s.window == 0) forget(s);
    return;
  }
  // The block belongs to a stream that has been forgotten and was given up unread.
  if (++stray_waste_ < kFirstWindow) return;
  stray_waste_ = 0;
  if (access_ == Access::normal) caution_ = std::min(caution_ + 1, kMostCaution);
}

void ReadAhead::on_dropped(uint32_t blocks) {
  Stream* latest = nullptr;
  for (Stream& s : streams_) {
    if (s.live && (latest == nullptr || s.used > latest->used)) latest = &s;
  }
  if (latest == nullptr) return;
  const uint64_t asked = steps(*latest, static_cast<int64_t>(latest->last), latest->ahead).value_or(0);
  const uint64_t back = std::min<uint64_t>(blocks, asked > 0 ? asked - 1 : 0);
  latest->ahead -= static_cast<int64_t>(back) * latest->stride;
  latest->window = std::max<uint32_t>(1, latest->window / 2);
}

void ReadAhead::on_cut(const Run& run) {
  for (Stream& s : streams_) {
    const auto first = static_cast<int64_t>(run.first);
    if (!s.live || s.stride != run.stride || s.ahead != first + static_cast<int64_t>(run.count) * run.stride) continue;
    if (steps(s, static_cast<int64_t>(s.last), first).value_or(0) == 0) continue;
    s.ahead = first;
    return;
  }
}

}  // namespace vmem::policy
