// What the pager keeps of blocks on their way, and of those who wait for them. Plain data under the pager's lock; a
// Transition is its owner's alone.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "core/big_lock.h"
#include "core/histogram.h"
#include "core/inplace_vector.h"
#include "core/pooled_list.h"
#include "core/status.h"
#include "core/types.h"
#include "device/device.h"
#include "memory/device_budget.h"
#include "pager/account/requests.h"
#include "pager/account/writeback_throttle.h"
#include "pager/block/region.h"
#include "pager/block/stall_clock.h"
#include "store/codec.h"
#include "store/io.h"

namespace vmem::pager {

struct Snapshot;
class StoreReader;
struct Transition;
struct ReadGroup;

// Of a block that stands in a region: what the kernel's write protection keeps from changing meanwhile. 0, or -EFAULT:
// the program may not read it, nor anybody.
int copy_protected(const Region& r, std::byte* to, const std::byte* from);

inline constexpr core::BlockIndex kTurn = 128;  // blocks that long work looks at before it gives way
inline constexpr size_t kDeviceBatch = 16;      // blocks that move together, at most
inline constexpr size_t kPeerBatch = 128;       // .. between devices
// .. in bytes: where the driver's cost is spread thin, so long as those are several blocks. Between devices 113 GB/s by
// 32 MiB, 176 by 256 (two H200, NVLink).
inline constexpr uint64_t kBatchBytes = uint64_t{32} << 20, kPeerBatchBytes = uint64_t{256} << 20;
// A worker's turn at what comes from other devices: 3 ms over NVLink, after which it looks what else there is to do.
inline constexpr uint64_t kPeerTurnBytes = uint64_t{1} << 30;
// Someone who waits for several transitions; lives on the waiter's stack.
struct Completion {
  uint64_t outstanding = 0;
  core::Status status;  // the first failure
};
// How a call goes through the blocks of a range, and what it found.
struct RangeScan {
  // Of blocks that move, and of those under leases that wait for their streams: waits for them; leaves them; waits
  // until nothing has gone on for the time-out, and then does what can be done.
  enum class Wait : uint8_t { always, never, while_it_goes_on };

  bool all = false;      // live leases do not matter
  bool frees = false;    // the region goes
  bool host = false;     // what is on a device, or under way, is left
  bool skipped = false;  // .. they do, and blocks were left for them
  Wait wait = Wait::always;
  StallClock progress;  // of the waits, while it goes on
  uint64_t left = 0;    // blocks that did not come to rest
  core::BlockIndex first_left = 0;

  void leave(core::BlockIndex b) {
    if (left++ == 0) first_left = b;
  }
  // The program is to be told of nothing but what the file has not: it does not ask, as vmem_sync, what it may rely on.
  bool nobody_asks() const { return all || frees; }
};
// How a block leaves its device.
enum class Leave : uint8_t {
  evict,  // copied to a staging frame if it is dirty, else dropped
  host,   // copied to a staging frame
  sync,   // copied and written, and stays
  drop,   // contents of no interest
};
// Who goes on with a transition when its read or write has ended: on an I/O thread, with no lock held.
class IoEnd {
 public:
  virtual void io_ended(Transition* m) VMEM_UNLOCKED = 0;
  // Of a long read, where StoreReader::prepare_read() was asked for it: the first `bytes` of the image are there.
  virtual void io_came(Transition* m, size_t bytes) VMEM_UNLOCKED { (void)m, (void)bytes; }
  static void ended(store::Io& io);  // for store::Io::done, of a transition's io

 protected:
  ~IoEnd() = default;
};
// What was copied to a device of a block that is being read.
struct CopiedParts {
  size_t told = 0;        // bytes that had come when a copy was last thought of; the I/O thread's
  size_t come = 0;        // .. that may be copied
  size_t copied = 0;      // .. of which copies were issued
  device::Ticket ticket;  // of all these
  bool made = false;      // it has memory on the device
  bool waits = false;     // for a worker
  bool busy = false;      // .. which is at it, and has `copied`, `ticket`, `made` and `refused`
  bool refused = false;   // the rest is copied when all has come
  bool over = false;      // all has come, or will not
};
// One block's way in or out. Owned by whoever owns the block's transition.
struct Transition : core::OwnNew {
  store::Io io;
  Transition* next = nullptr;           // in a TransitionList
  PendingFree leaving;                  // as WritebackThrottle counts it
  IoEnd* then = nullptr;                // of io
  StoreReader* reader = nullptr;        // .. a read's
  store::Digester* digester = nullptr;  // the reader's, while it has a part of the image
  size_t digested = 0;                  // .. so many bytes
  Region* region = nullptr;
  core::BlockIndex block = 0;
  std::byte* image = nullptr;  // the block's bytes: a frame, a bounce buffer, or the region itself (protected)
  std::byte* coded = nullptr;  // compressed image, a bounce buffer
  std::byte* aside = nullptr;  // in_place: a copy of it, which is the image then
  bool spare = false;          // .. in EmergencyBuffer, which the transition has
  size_t stored = 0;
  store::Codec codec = store::Codec::raw;
  core::Extent extent;  // written to; the block's own when it is overwritten in place
  bool new_extent = false;
  bool elsewhere = false;  // the last write to its extent failed
  unsigned tries = 0;      // writes of this image that failed and were begun again on another path
  core::Digest digest;
  bool keep = false;              // sync: the block stays in memory
  bool probe = false;             // only out of sight: the frame is kept
  bool from_staged = false;       // it was staged before, so it has a frame already
  bool in_place = false;          // its pages are in the region, write-protected, and the image as a rule
  bool clean = false;             // nothing to write
  bool only_clean = false;        // .. or it stays: nothing can be written for a while
  bool background = false;        // a write that nobody waits for: DirtyBlocks counts it
  bool reclaims = false;          // chosen for want of memory, and by no call: where it fails others are tried
  bool has_digest = false;        // of what the store holds
  bool zeros = false;             // .. because it is all zeros
  bool torn = false;              // take() stopped half way and could not go back
  bool out = false;               // its pages are in `image`, not in the region
  bool emptied = false;           // .. nor there any more: they were dropped
  bool protect = false;           // install: with write protection
  bool pinned_in_policy = false;  // install: known to the policy already, held there meanwhile
  bool speculative = false;
  bool reads_ahead = false;      // .. and is being read, as ReadaheadQueue counts it
  bool stored_soon = false;      // .. as a neighbour, and the block beside it that tells what comes was stored to
  bool meanwhile = false;        // fill: to a staging frame, for an acquire that tries again if it cannot be had
  bool cut = false;              // fill: the file ends before the block does; write: .. and so does what was written
  size_t accessed = SIZE_MAX;    // fill: the byte of the block that a fault wants, if that is known
  bool was_unpopulated = false;  // fill: the state it came from
  bool fresh = false;            // fill: the frame has no memory yet, and reads as zeros when it has
  bool refused = false;          // fill: the kernel had no memory to read it
  bool hole = false;             // fill: the file has nothing there
  uint64_t hole_end = 0;         // .. up to this byte of it
  bool in_staging = false;       // image is a staging frame
  int device = -1;               // promoting, demoting: which
  bool tells = false;            // promoting: `then` is told what has come of it
  bool digests = false;          // .. and a digest is taken of it
  CopiedParts parts;             // .. and it may be copied
  std::byte* source = nullptr;   // promoting from host memory, demoting: the bytes in it, to be copied to `image` first
  Leave leave = Leave::evict;    // demoting: how
  bool migrates = false;         // demoting: straight to another device
  bool spills = false;           // .. for want of room, spilled
  bool was_spilled = false;      // demoting: of the device that it is to leave
  bool kept = false;             // demoting: image is the block's host copy, nothing is to be copied
  bool cpu_mapped = false;       // demoting: a copy is in place, and is the block when it has left
  uint64_t started_ns = 0;       // fill: when the fault was met; 0 when nobody waits
  uint64_t since_ns = 0;         // install from a staging frame: since when somebody waits
  uint64_t mark = 0;             // fill, install: of the wait, as MemoryWaiter has it
  uint64_t begun_ns = 0;         // when the block was claimed; 0: it is over
  core::Way way = core::Way::none;
  Completion* completion = nullptr;
  ReadGroup* read_group = nullptr;  // fill: with whom it is put in place
  core::Status status;
};
inline void IoEnd::ended(store::Io& io) {
  Transition* const m = static_cast<Transition*>(io.user);
  m->then->io_ended(m);
}
// Whose memory comes free when it has left, as Frame::pool has it.
inline uint8_t leaves_pool(const Transition& m) {
  return m.in_staging ? staging_pool(*m.region) : kHostPool;
}
// Its pages are in a slot that goes back without them.
inline bool in_slot(const Transition& m) {
  return m.out && !m.from_staged && m.region->transfer == trap::Transfer::copy;
}
using Batch = core::InplaceVector<Transition*, 64>;  // of those that are evicted, or leave their devices, together
struct InBatch {                                     // blocks that come to a device together
  Batch transitions = {};
  int device = -1;
  device::Ticket ticket = {};  // of their copies; empty: there are none
  core::Status status = {};
  bool made = false, torn = false;  // on the device; punched holes now
};
struct OutPart {  // of a batch: those that leave one device, each step for all of them
  std::span<Transition*> transitions = {};
  int device = -1;
  device::Ticket ticket = {};             // of their copies; empty: there are none
  uint64_t bytes = 0;                     // .. that they copy
  bool hidden = false;                    // not mapped any more, where that is the device's own business
  core::Status status = {}, copied = {};  // of the device's part, and of the copies
};
struct TransitionList {  // first in, first out; a transition is in one at most. Needs no memory
  Transition* head = nullptr;
  Transition* tail = nullptr;
  bool empty() const { return head == nullptr; }
  void push_back(Transition* m) {
    m->next = nullptr;
    (head == nullptr ? head : tail->next) = m;
    tail = m;
  }
  void push_front(Transition* m) {
    m->next = head;
    if (head == nullptr) tail = m;
    head = m;
  }
  void append(TransitionList& more) {
    while (!more.empty()) push_back(more.pop());
  }
  Transition* pop() {
    Transition* m = head;
    head = m->next;
    return m;
  }
  void remove(const Transition* m) {
    TransitionList others;
    while (!empty()) {
      Transition* const one = pop();
      if (one != m) others.push_back(one);
    }
    *this = others;
  }
};
// Neighbours that are read by one transfer, and wait for each other to be put in place by one call.
struct ReadGroup {
  TransitionList ready;  // state mapping
  uint32_t left = 0;     // that are being read; 0: nobody's, and nothing is ready
};
struct DeferredWork {      // what is done when the lock has been dropped (PageIn::run)
  TransitionList submit;   // their `io`
  TransitionList zero;     // frames to clear, then as if read
  TransitionList install;  // state mapping
  bool empty() const { return submit.empty() && zero.empty() && install.empty(); }
};
struct DeviceState {  // one device, from its first use on
  DeviceBudget budget;
  core::OwnVector<Transition*> ready;  // promoting: to be prepared and copied
  TransitionList issued;               // .. begun by those who wait for them, to be ended
  unsigned ending = 0;                 // .. by so many workers
  unsigned sleepers = 0;  // acquires that wait for blocks and begin with those that are ready, as they wake up
  core::OwnVector<Transition*>
      incoming;            // to be moved here from other devices, by one worker at a time: the more together
  bool migrating = false;  // .. it is at work
  uint64_t in_bytes = 0, out_bytes = 0, evictions = 0, clean_drops = 0;
  uint64_t to_peers = 0, from_peers = 0;  // bytes: spilled elsewhere, and back from there
  bool lost = false;                      // .. and has been said
  bool rescue = false;                    // .. and host memory may have copies of its blocks
  uint64_t failures = 0;                  // moves in that failed; `failure` is the last
  core::Status failure;
  uint64_t said_short_ns = 0;  // that others have its memory, when last
};
struct PendingRelease {  // a release that the stream has not reached
  uint64_t id = 0;       // ascending
  int device = -1;
  void* stream = nullptr;  // whose leases
  void* end = nullptr;     // the stream that has to get there; as a rule the same
  pthread_t thread = {};   // who released: what one thread puts on one stream is reached in order
  bool recorded = false;   // `ticket` is set; until then its owner is in the driver
  bool oldest = false;     // of its lane
  uint64_t since_ns = 0;
  device::Ticket ticket;  // empty: over
  std::vector<BlockSpan> spans;
  // Among others in StreamReleaseQueue: of its lane; of the oldest, the last of its lane, and the oldest of the next
  // lane.
  PendingRelease* next_in_lane = nullptr;
  PendingRelease *last_in_lane = nullptr, *next_oldest = nullptr;
  std::list<PendingRelease>::iterator self;
  bool same_lane(const PendingRelease& e) const {
    return device == e.device && end == e.end && pthread_equal(thread, e.thread) != 0;
  }
};
// no_room: on the device, or to know the block by. no_frame: what blocks of its size move through is in use.
enum class Start : uint8_t { done, wait, no_room, no_frame };

}  // namespace vmem::pager
