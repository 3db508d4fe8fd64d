// Interface of the policies that choose blocks to evict. Pure: the same calls get the same answers;
// no I/O, clock, lock or thread. The pager calls it under its lock.
//
// There are no accessed bits. A policy learns of reuse in two ways:
// - a block comes back after it was evicted, with its age (bytes evicted since);
// - a probe: the pager takes a block out of sight but keeps its frame, and touched() says that a
//   thread wanted it back, at little cost. Where probes are not possible (small blocks that are
//   copied), `probes` is false and only the first way is left.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/types.h"

namespace vmem::policy {

enum class Priority : uint8_t { low, normal, high };
enum class Temperature : uint8_t { cold, normal, hot };  // cold: evict first; hot: keep while any other block is left

struct Admission {
  core::FrameId id = core::kNoFrame;  // dense, below the capacity given by resize(); unique while resident
  uint32_t weight = 0;                // size in units of 4 KiB
  Priority priority = Priority::normal;
  Temperature temperature = Temperature::normal;
  bool pinned = false;      // evict only when no other block is left
  bool sequential = false;  // its region is declared, or detected, as a one-time scan
  bool probes = true;       // this block may be probed
  bool ahead = false;       // read ahead: its first touched() is its first use, and proves nothing
  bool hinted = false;      // read ahead because the program announced its use
  bool refused = false;     // it was a victim and could not leave: other blocks come first for a while
  // Bytes/4096 that were evicted since this block last left memory; empty if it was never in
  // memory.
  std::optional<uint64_t> age = std::nullopt;
};

struct Victim {
  core::FrameId id;
  bool probe;            // true: take out of sight, keep the frame until touched() or a real victim; false: evict
  bool refused = false;  // admitted as refused, and no other block is left
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual const char* name() const = 0;
  virtual void resize(size_t frames, uint64_t capacity_pages) = 0;  // most ids; budget in 4 KiB units; both may change
  virtual void admit(const Admission& what) = 0;
  // A probed block was wanted, or another use of the block was seen, such as a lease. Not called
  // for the use that a block was brought in for, unless it was read ahead.
  virtual void touched(core::FrameId id) = 0;
  virtual void remove(core::FrameId id) = 0;  // the pager took it out (freed, evicted by a call, ...)
  virtual void advise(core::FrameId id, Temperature temperature, Priority priority, bool pinned) = 0;
  // Fills `out` with victims, best first, worth at least `pages` if there are that many. Returns
  // how many.
  // - If there are cold blocks that were used, only those are returned; the caller asks again if
  //   they were not enough.
  // - Probe victims do not count toward `pages`.
  // - A real victim is forgotten, as by remove(). If the pager could not evict it, it may admit()
  //   the victim again with age 0.
  // - A block admitted as refused is passed over, whatever its class, and then gets its place back.
  //   It is a victim before that only if no other block is left; then all victims are refused ones.
  // - Held blocks (see hold) are never returned.
  virtual size_t victims(uint64_t pages, std::span<Victim> out) = 0;
  // A held block (leased, I/O in flight) stays known but is never a victim. Holds are counted.
  virtual void hold(core::FrameId id) = 0;
  virtual void unhold(core::FrameId id) = 0;
  virtual uint64_t probed() const = 0;  // blocks that were probe victims
};

}  // namespace vmem::policy
