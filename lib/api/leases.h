// Lease handles, and leases that are taken asynchronously.
//
//   vmem_lease ───────────────────────> ready ──vmem_lease_end──> gone
//   vmem_lease_async ──> pending ──┬──> ready ──┘                  ^
//                                  └──> failed ──vmem_lease_end ───┘    (cancelled: failed, with -ECANCELED)
//
// - A pending lease has a thread of its own that makes a blocking acquire. So a lease that waits
//   for a stream, or for room that another lease makes, delays no other. An asynchronous lease
//   succeeds wherever the same call on an application's thread would. The thread settles the lease,
//   calls its `ready` and ends. At most kMost leases are pending at once.
// - Shutdown frees regions under their leases. It cancels pending leases and, with the gate closed
//   and no call inside, marks every handle as over: no handle ever refers to bytes of a later
//   runtime. Handles stay until they are ended.
// - mutex_ is a leaf lock under the gate: no call is made with it held, and no memory of regions is
//   touched.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "core/mutex.h"
#include "core/status.h"
#include "pager/lease/acquire_requests.h"
#include "pager/pager_gate.h"
#include "vmem/vmem.h"

struct vmem_lease {
  using Ready = void (*)(struct vmem_lease* lease, int result, void* user);
  enum class State : uint8_t { pending, ready, failed };

  // Constant once another thread can see the lease.
  std::vector<vmem_range> ranges;
  int location = 0;
  void* stream = nullptr;
  Ready on_ready = nullptr;
  void* user = nullptr;

  vmem::pager::AcquireRequest ask;

  // Protected by Leases::mutex_.
  State state = State::pending;
  int code = 0;          // the error, if it failed
  char words[512] = "";  // its message
  bool over = false;     // a shutdown freed its regions
  bool ending = false;   // a thread is in vmem_lease_end
  bool at_work = false;  // its thread is still running: the lease is pending, or in on_ready
  int fd = -1;           // readable once it is not pending; closed with the handle
  ~vmem_lease();
};

namespace vmem::api {

using LeaseHandle = struct vmem_lease;  // the function of that name hides the struct

class Leases {
 public:
  explicit Leases(pager::PagerGate& gate) : gate_(gate) {}
  static constexpr size_t kMost = 64;  // pending at once

  using Handle = std::shared_ptr<LeaseHandle>;
  // The caller is inside the gate, and has set the lease's ranges, location and stream and, for
  // start(), on_ready. on_ready may be called before start() returns.
  core::Status take(pager::Pager& pager, Handle lease, LeaseHandle** out);
  core::Status start(pager::Pager& pager, Handle lease, LeaseHandle** out);
  // Returns 0 if ready, -EAGAIN if pending, or the error.
  core::Status poll(LeaseHandle* which);
  core::Status descriptor(LeaseHandle* which, int* fd);
  core::Status end(LeaseHandle* which, void* stream);

  // Shutdown calls cancel() before it frees regions, and over() when none is left and no call is
  // inside the gate. Then it calls drain() with no lock held, which returns when no thread works
  // for a lease that is over, and none is in its on_ready.
  void cancel();
  void over();
  void drain();

 private:
  core::Status find(LeaseHandle* which, Handle* out) VMEM_REQUIRES(mutex_);
  void work(const Handle& lease);
  void settle(LeaseHandle& lease, int code, std::string_view words) VMEM_REQUIRES(mutex_);
  bool works_for_over() const VMEM_REQUIRES(mutex_);
  // Waits for a change; may also return without one. Drops the lock for signal handlers, too.
  void wait() VMEM_REQUIRES(mutex_);

  pager::PagerGate& gate_;
  core::Mutex mutex_;
  std::condition_variable changed_;
  std::map<LeaseHandle*, Handle> live_ VMEM_GUARDED_BY(mutex_);
  std::map<LeaseHandle*, Handle> working_ VMEM_GUARDED_BY(mutex_);  // pending, or in on_ready
};

}  // namespace vmem::api
