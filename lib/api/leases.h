// Lease handles, and the leases that are taken while their caller goes on.
//
//   vmem_lease ───────────────────────> ready ──vmem_lease_end──> gone
//   vmem_lease_async ──> pending ──┬──> ready ──┘                  ^
//                                  └──> failed ──vmem_lease_end ───┘    (cancelled: failed, with -ECANCELED)
//
// A pending lease has a thread of its own, which is a blocking acquire: so one that waits for a stream, or for room
// that another makes, keeps nobody, and an asynchronous lease can do what the same call on a thread of the application
// could. The thread settles the lease, calls its `ready` and ends. At most kMost at once.
//
// Shutdown frees regions under their leases: it cancels what is pending, and with the gate closed and nobody inside
// marks every handle as over, so that no handle ever names bytes of a later runtime. Handles stay until they are ended.
//
// Lock: mutex_ is a leaf under the gate; nothing is called under it, and no memory of regions is touched.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "core/mutex.h"
#include "core/status.h"
#include "pager/lease/acquire_request.h"
#include "vmem/vmem.h"

struct vmem_lease {
  using Ready = void (*)(struct vmem_lease* lease, int result, void* user);
  enum class State : uint8_t { pending, ready, failed };

  // Fixed before anybody else sees it.
  std::vector<vmem_range> ranges;
  int location = 0;
  void* stream = nullptr;
  Ready on_ready = nullptr;
  void* user = nullptr;

  vmem::pager::AcquireRequest ask;

  // Protected by Leases::mutex_.
  State state = State::pending;
  int code = 0;          // failed: why
  char words[512] = "";  // .. with the message
  bool over = false;     // its regions went with a shutdown
  bool ending = false;   // somebody is in vmem_lease_end
  bool at_work = false;  // its thread has not come to its end: it is pending, or in on_ready
  int fd = -1;           // readable once it is not pending; closed with the handle
  ~vmem_lease();
};

namespace vmem::api {

class Runtime;
using LeaseHandle = struct vmem_lease;  // the call of that name hides the struct

class Leases {
 public:
  static constexpr size_t kMost = 64;  // pending at once

  using Handle = std::shared_ptr<LeaseHandle>;
  // lease: ranges, location, stream and, for start(), on_ready, which may be called before this returns.
  core::Status take(Runtime& runtime, Handle lease, LeaseHandle** out);
  core::Status start(Runtime& runtime, Handle lease, LeaseHandle** out);
  // -EAGAIN: pending; else why it failed.
  core::Status poll(LeaseHandle* which);
  core::Status descriptor(LeaseHandle* which, int* fd);
  core::Status end(Runtime& runtime, LeaseHandle* which, void* stream);

  // Shutdown: cancel() before regions are freed; over() when none is left and no call is inside the gate; drain() with
  // no lock held: returns when no thread works for a lease that is over, and none is in its on_ready.
  void cancel();
  void over();
  void drain();

 private:
  core::Status find(LeaseHandle* which, Handle* out) VMEM_REQUIRES(mutex_);
  void work(Runtime& runtime, const Handle& lease);
  void settle(LeaseHandle& lease, int code, std::string_view words) VMEM_REQUIRES(mutex_);
  bool works_for_over() const VMEM_REQUIRES(mutex_);
  // Until something changes, or for no reason; the lock is given away for signal handlers, too.
  void wait() VMEM_REQUIRES(mutex_);

  core::Mutex mutex_;
  std::condition_variable changed_;
  std::map<LeaseHandle*, Handle> live_ VMEM_GUARDED_BY(mutex_);
  std::map<LeaseHandle*, Handle> working_ VMEM_GUARDED_BY(mutex_);  // pending, or in on_ready
};

}  // namespace vmem::api
