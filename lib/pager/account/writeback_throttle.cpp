#include "pager/account/writeback_throttle.h"

#include <utility>

namespace vmem::pager {

void WritebackThrottle::count_leaving(PendingFree& move, uint64_t bytes, uint8_t pool) {
  settled(move);
  move.bytes_ = bytes;
  move.pool_ = pool;
  leaving_[pool] += bytes;
}

void WritebackThrottle::settled(PendingFree& move) {
  leaving_[move.pool_] -= std::exchange(move.bytes_, 0);
}

bool WritebackThrottle::failed(const Status& why, bool reported_by_caller, uint64_t now_ns) {
  const bool repeated = said_ == why.code() && now_ns - said_ns_ < kSayAgain;
  const bool say = failures_in_row_ == 0 && !repeated;
  if (say) {
    said_ = why.code();
    said_ns_ = now_ns;
  }
  if (failures_in_row_ == 0 || now_ns >= next_try_ns_) {
    ++failures_in_row_;
    retry_ns_ = next_try_ns_ = now_ns + std::min(kShortestPause << std::min(failures_in_row_, 6u), kLongestPause);
  }
  if (!reported_by_caller && error_.ok()) error_ = why;
  return say;
}

bool WritebackThrottle::file_failed(Region& r, const Status& why, bool reported_by_caller, uint64_t now_ns) {
  const bool say = r.source.refusals == 0;
  if (say || now_ns >= r.source.refused_until_ns) {
    ++r.source.refusals;
    r.source.refused_until_ns = now_ns + std::min(kShortestPause << std::min(r.source.refusals, 6u), kLongestPause);
    files_until_ns_ = std::max(files_until_ns_, r.source.refused_until_ns);
  }
  r.source.refusal = why;
  if (!reported_by_caller && r.source.write_error.ok()) r.source.write_error = why;
  return say;
}

bool WritebackThrottle::has_room() {
  next_try_ns_ = full_until_ns_ = 0;
  return std::exchange(retry_ns_, 0) != 0;
}

Status WritebackThrottle::take_error() {
  return std::exchange(error_, {});
}

std::string WritebackThrottle::check(std::span<const std::unique_ptr<Transition>> transitions, uint64_t now_ns) const {
  std::array<uint64_t, kDevicePools> counted{};
  for (const auto& m : transitions) {
    const PendingFree& part = m->write.leaving;
    if (m->begun_ns == 0 && part.counted()) return "a move is over, and its block is said to leave";
    if (part.counted() && part.bytes_ != m->region->block_size) return "a block leaves that has another size";
    counted[part.pool_] += part.bytes_;
  }
  for (size_t pool = 0; pool < counted.size(); ++pool) {
    if (counted[pool] == leaving_[pool]) continue;
    return core::strprintf("%llu bytes of %s (%zu) are said to leave, moves have %llu",
                           static_cast<unsigned long long>(leaving_[pool]), pool == 0 ? "frames" : "staging frames",
                           pool, static_cast<unsigned long long>(counted[pool]));
  }
  if (pause(now_ns) > kLongestPause) return "write-back waits longer than it may";
  return "";
}

}  // namespace vmem::pager
