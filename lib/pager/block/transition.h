// Blocks in transition, and the threads and requests that wait for them. Plain data under the
// pager's lock; only its owner uses a Transition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include "core/big_lock.h"
#include "core/histogram.h"
#include "core/inplace_vector.h"
#include "core/os_allocator.h"
#include "core/status.h"
#include "core/types.h"
#include "device/device.h"
#include "memory/device_budget.h"
#include "pager/block/frame_table.h"
#include "pager/block/pooled_list.h"
#include "pager/block/region.h"
#include "pager/block/requests.h"
#include "pager/block/stall_clock.h"
#include "store/codec.h"
#include "store/io_request.h"

namespace vmem::pager {

class StoreReader;
struct Transition;
struct ReadGroup;

// Copies a write-protected block out of its region. Returns 0, or -EFAULT if its pages cannot be
// read.
int copy_protected(const Region& r, std::byte* to, const std::byte* from);

inline constexpr core::BlockIndex kTurn = 128;  // blocks between two calls of give_way() in long work
inline constexpr size_t kDeviceBatch = 16;      // blocks that one turn of a worker or a request moves, at most
inline constexpr size_t kPeerBatch = 128;       // blocks that move together between devices, at most
// Bytes that move together, or two blocks if those have more: enough to make the driver's cost per
// call small. Between devices that takes larger batches.
inline constexpr uint64_t kBatchBytes = uint64_t{32} << 20, kPeerBatchBytes = uint64_t{256} << 20;
// Bytes that a worker moves between devices before it looks for other work.
inline constexpr uint64_t kPeerTurnBytes = uint64_t{1} << 30;
// A thread's wait for several transitions, on its stack.
struct Completion {
  uint64_t outstanding = 0;
  core::Status status;  // the first failure
};
// How a call scans the blocks of a range, and what it found.
struct RangeScan {
  // Whether to wait for blocks in transition, and for those under leases that wait for their
  // streams. while_it_goes_on waits until nothing has gone on for the time-out, and then does
  // what can be done.
  enum class Wait : uint8_t { always, never, while_it_goes_on };

  bool all = false;      // includes blocks under live leases
  bool frees = false;    // the region is being freed
  bool host = false;     // leaves out blocks on a device or on their way
  bool at_rest = false;  // leaves out blocks on a device under a live WRITE lease
  bool skipped = false;  // blocks were left out because of live leases
  Wait wait = Wait::always;
  StallClock progress;  // of while_it_goes_on
  // Blocks of a region that did not come to rest. A scan may meet a block several times.
  core::OwnMap<core::BlockIndex, bool> left;
  bool more_left = false;  // there was no memory to note one

  void leave(core::BlockIndex b) try { left.emplace(b, true); } catch (const std::bad_alloc&) {
    more_left = true;
  }
  // Whether the call reports only bytes that the file lacks. The program does not ask it what it
  // may rely on, as it asks vmem_sync.
  bool nobody_asks() const { return all || frees; }
};
// How a block leaves its device.
enum class Leave : uint8_t {
  evict,  // copied to a staging frame if it is dirty, else dropped
  host,   // copied to a staging frame
  sync,   // copied and written; stays
  drop,   // contents of no interest
};
// Goes on with a transition when its read or write has ended: on an I/O thread, without the lock.
class IoEnd {
 public:
  virtual void io_ended(Transition* m) VMEM_UNLOCKED = 0;
  // The first `bytes` of a long read are in the image. Called if StoreReader::prepare_read() was
  // asked to.
  virtual void io_came(Transition* m, size_t bytes) VMEM_UNLOCKED { (void)m, (void)bytes; }
  static void ended(store::Io& io);  // the store::Io::done of each transition's io

 protected:
  ~IoEnd() = default;
};
// The part of a block that is copied to a device while the rest is read.
struct CopiedParts {
  size_t told = 0;           // bytes that had come when a copy was last considered; only the I/O thread uses it
  size_t come = 0;           // bytes that have come and may be copied
  size_t copied = 0;         // bytes whose copies were issued
  device::Ticket ticket;     // of all these copies
  bool made = false;         // the block has memory on the device
  bool waits = false;        // waits for a worker
  bool busy = false;         // a worker is at it, and owns `copied`, `ticket`, `made` and `copy_failed`
  bool copy_failed = false;  // a copy was refused: the rest is copied when all has come
  bool over = false;         // all has come, or the read failed
};
// Fields of a transition that reads a block.
struct ReadOp {
  StoreReader* reader = nullptr;
  store::Digester* digester = nullptr;  // of `reader`, while it has digested a part of the image
  size_t digested = 0;                  // bytes that `digester` has
  bool digests = false;                 // a digest is taken of the bytes as they come
  bool speculative = false;             // no fault or acquire waits for it
  bool reads_ahead = false;             // being read ahead, counted by ReadaheadQueue
  bool stored_soon = false;             // read beside a fault, and the block before that run was stored to
  bool meanwhile = false;               // to a staging frame, for an acquire that tries again if the read fails
  bool was_unpopulated = false;         // the block's state before
  bool fresh = false;                   // the frame has no memory yet, and gets zeros with it
  bool no_memory = false;               // the kernel had no memory to read it
  bool hole = false;                    // the file has nothing there
  uint64_t hole_end = 0;                // hole: its end in the file, in bytes
  size_t accessed = SIZE_MAX;           // the byte of the block that a fault accesses, if known
  uint64_t started_ns = 0;              // when the fault came; 0: none waits
  ReadGroup* group = nullptr;           // it is put in place with these
};
// A transition's part of the memory that will come free: 0 unless WritebackThrottle counts it.
class PendingFree {
 public:
  bool counted() const { return bytes_ != 0; }

 private:
  friend class WritebackThrottle;
  uint64_t bytes_ = 0;
  uint8_t pool_ = kHostPool;
};
// Fields of a transition that takes a block out of host memory, or writes it.
struct WriteOp {
  PendingFree leaving;         // counted by WritebackThrottle
  std::byte* aside = nullptr;  // in_place: a copy of the block, which is the image then
  bool spare = false;          // `aside` is the EmergencyBuffer, which the transition has
  // in_place: leased for writing, so its pages stay as they are, and a copy of them is written.
  // Protection would stop the lease's threads, and the kernel's work on behalf of any thread.
  bool unprotected = false;
  size_t stored = 0;  // bytes to write
  store::Codec codec = store::Codec::raw;
  core::Extent extent;  // written to; the block's own when it is overwritten in place
  bool new_extent = false;
  bool elsewhere = false;    // the last write to its extent failed
  unsigned tries = 0;        // writes of this image that failed and were begun again on another path
  bool keep = false;         // sync: the block stays in memory
  bool probe = false;        // isolated only to see whether it is missed: the frame is kept
  bool from_staged = false;  // it was staged before, so it has a frame already
  bool in_place = false;     // its pages stay in the region, write-protected; as a rule they are the image
  bool clean = false;        // nothing to write
  bool only_clean = false;   // leaves only if clean: no write is possible for a while
  bool background = false;   // a write in the background, counted by DirtyBlocks
  bool reclaims = false;     // chosen for want of memory, and by no call: if it fails, others are tried
  bool has_digest = false;   // the digest of the bytes in the store is known
  bool zeros = false;        // clean, because it is all zeros
  bool out = false;          // its pages are in `image`, not in the region
  bool emptied = false;      // its pages are not in `image` any more: they were dropped
};
// Fields of a transition to, from or between devices.
struct DeviceOp {
  bool tells = false;           // promoting: `then` is told how many bytes have come
  CopiedParts parts;            // promoting: the copies of bytes that have come
  std::byte* source = nullptr;  // promoting from host memory, demoting: bytes there, to be copied to `image` first
  Leave leave = Leave::evict;
  bool migrates = false;     // demoting: straight to another device
  bool spills = false;       // migrates, for want of room
  bool was_spilled = false;  // demoting: was a spilled block of the device that it leaves
  bool kept = false;         // demoting: `image` is the block's host copy, so nothing is copied
  bool cpu_mapped = false;   // demoting: a copy is in place for the CPU, and becomes the block
};
// One block's way in or out. Owned by the thread that owns the block's transition.
struct Transition : core::OwnNew {
  store::Io io;
  Transition* next = nullptr;  // in a TransitionList
  IoEnd* then = nullptr;       // is told when `io` has ended
  Region* region = nullptr;
  core::BlockIndex block = 0;
  std::byte* image = nullptr;     // the block's bytes: a frame, a bounce buffer, or the region itself (protected)
  std::byte* coded = nullptr;     // compressed image, a bounce buffer
  core::Digest digest;            // of the image
  int device = -1;                // promoting, demoting
  bool in_staging = false;        // image is a staging frame
  bool cut = false;               // the file ends before the block does: a fill, and a write that was cut off there
  bool torn = false;              // the trap stopped half way and could not go back
  bool protect = false;           // install: with write protection
  bool pinned_in_policy = false;  // install: the policy knows it already, and holds it until the end
  uint64_t since_ns = 0;          // since when an access waits: install from a staging frame, show
  uint64_t mark = 0;              // of that wait, as in MemoryWaiter
  uint64_t begun_ns = 0;          // when the block was claimed; 0: the transition is free
  core::Way way = core::Way::none;
  Completion* completion = nullptr;
  core::Status status;
  ReadOp read;
  WriteOp write;
  DeviceOp move;
};
inline void IoEnd::ended(store::Io& io) {
  Transition* const m = static_cast<Transition*>(io.user);
  m->then->io_ended(m);
}
// Returns whose memory comes free when the block has left, as a Frame::pool.
inline uint8_t leaves_pool(const Transition& m) {
  return m.in_staging ? staging_pool(*m.region) : kHostPool;
}
// Whether its pages are in a slot, which goes back to the pool without them.
inline bool in_slot(const Transition& m) {
  return m.write.out && !m.write.from_staged && m.region->transfer == trap::Transfer::copy;
}
using Batch = core::InplaceVector<Transition*, 64>;  // blocks that are evicted, or leave devices, together
struct InBatch {                                     // blocks that come to a device together
  Batch transitions = {};
  int device = -1;
  device::Ticket ticket = {};  // of their copies; empty: there are none
  core::Status status = {};
  bool made = false, torn = false;  // have memory on the device; have given it up again
};
struct OutPart {  // the blocks of a batch that leave one device; each step is made for all
  std::span<Transition*> transitions = {};
  int device = -1;
  device::Ticket ticket = {};             // of their copies; empty: there are none
  uint64_t bytes = 0;                     // that they copy
  bool hidden = false;                    // the device has unmapped them
  core::Status status = {}, copied = {};  // of the device's calls; of the copies
};
struct TransitionList {  // first in, first out; a transition is in at most one. Needs no memory
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
  uint32_t left = 0;     // reads that have not ended; 0: the group is free, and nothing is ready
};
struct DeferredWork {      // done when the lock has been dropped (PageIn::run)
  TransitionList submit;   // their `io`
  TransitionList zero;     // their frames are cleared, then treated as read
  TransitionList install;  // state mapping
  bool empty() const { return submit.empty() && zero.empty() && install.empty(); }
};
struct DeviceState {  // one device, from its first use on
  DeviceBudget budget;
  core::OwnVector<Transition*> ready;  // promoting: to be prepared and copied
  TransitionList issued;               // promoting: begun by the acquires that wait for them, to be ended by workers
  unsigned ending = 0;                 // workers that end them
  unsigned sleepers = 0;               // acquires that wait, and begin with ready blocks as they wake up
  // To be moved here from other devices. One worker at a time does that, so that more move
  // together.
  core::OwnVector<Transition*> incoming;
  bool migrating = false;  // that worker is at work
  uint64_t in_bytes = 0, out_bytes = 0, evictions = 0, clean_drops = 0;
  uint64_t to_peers = 0, from_peers = 0;  // bytes that were spilled, and that came back
  bool lost = false;                      // lost, and the log says so
  bool rescue = false;                    // lost, and host memory may have copies of its blocks
  uint64_t failures = 0;                  // promotions that failed; `failure` is the last
  core::Status failure;
  uint64_t said_short_ns = 0;  // when the log last said that others have its memory
};
// no_room: on the device, or for bookkeeping. no_frame: all staging frames of its size are in use.
enum class Start : uint8_t { done, wait, no_room, no_frame };

}  // namespace vmem::pager
