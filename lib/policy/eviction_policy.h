// Whom to evict. Pure: same calls, same answers; no I/O, no clock, no lock, no thread. The pager calls it under its
// lock.
//
// There are no accessed bits to read. What the policy learns of reuse: (1) a block that comes back after it was
// evicted, with its age (bytes evicted since); (2) a probe: the pager takes a block out of sight but keeps its frame;
// touched() says that somebody wanted it back, cheaply. Where probes are not possible (small blocks that are copied)
// `probes` is false and only (1) is left.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/types.h"

namespace vmem::policy {

enum class Priority : uint8_t { low, normal, high };
enum class Temperature : uint8_t { cold, normal, hot };  // cold: evict first; hot: keep while anything else is left

struct Admission {
  core::FrameId id = core::kNoFrame;  // dense, below the capacity given by resize(); unique while resident
  uint32_t weight = 0;                // size in units of 4 KiB
  Priority priority = Priority::normal;
  Temperature temperature = Temperature::normal;
  bool pinned = false;      // evict only when nothing else is left
  bool sequential = false;  // its region is declared, or detected, as a one-time scan
  bool probes = true;       // this block may be probed
  bool ahead = false;       // read before anybody asked: its first touched() is its first use, and proves nothing
  bool hinted = false;      // .. because the program said that it will
  // Bytes/4096 that were evicted since this block last left memory; empty when it never was here.
  std::optional<uint64_t> age = std::nullopt;
};

struct Victim {
  core::FrameId id;
  bool probe;  // true: take out of sight, keep the frame, tell touched() or come again; false: give the memory back
};

struct EvictionPolicyStats {
  uint64_t admitted, refaulted, probed, touched, evicted;
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual const char* name() const = 0;
  virtual void resize(size_t frames, uint64_t capacity_pages) = 0;  // most ids; budget in 4 KiB units; may change
  virtual void admit(const Admission& what) = 0;
  // A probed block was wanted; or the block was used in another way that could be seen, as by a lease. Not for the use
  // that a block was brought in for, except where it was read ahead.
  virtual void touched(core::FrameId id) = 0;
  virtual void remove(core::FrameId id) = 0;  // it left for a reason of the pager's (freed, evicted by call, ..)
  virtual void advise(core::FrameId id, Temperature temperature, Priority priority, bool pinned) = 0;
  // Up to out.size() victims, best first, worth at least `pages` if there are that many; but when there are cold ones
  // that were used, no others: they are asked for if that was not enough. Probe victims do not count toward `pages`. A
  // real victim is forgotten (as if removed) when it is returned; the pager may admit() it again when it could not
  // evict it (with age 0). Ids in `held` state (see hold) are never returned.
  virtual size_t victims(uint64_t pages, std::span<Victim> out) = 0;
  // A held block (leased, I/O in flight) stays known but is never a victim. Holds count.
  virtual void hold(core::FrameId id) = 0;
  virtual void unhold(core::FrameId id) = 0;
  virtual EvictionPolicyStats stats() const = 0;
};

enum class EvictionPolicyKind : uint8_t { adaptive /* the default */, fifo, sieve, s3fifo, twoq };
std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionPolicyKind kind = EvictionPolicyKind::adaptive);

}  // namespace vmem::policy
