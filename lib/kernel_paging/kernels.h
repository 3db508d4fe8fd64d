// Ranges that are open to kernels, each with a thread that serves them (paging_service.h) until
//   vmem_kernel_end: the last kernel has ended; the thread gives the leases back and ends, then the range is closed.
//   vmem_shutdown: the thread tells the kernels, takes back what they give up, and ends. What they keep stays leased,
//                  and the regions wait for the device before they go. No range is opened meanwhile. It is over when
//                  nobody is inside the gate.
//
// A thread that lives is in working_. The service of a range is used inside the gate alone, by its thread, and before
// and after that by who makes and who closes it; over() takes it away with nobody inside.
//
// Lock: mutex_ is a leaf under the gate; nothing is called under it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "core/mutex.h"
#include "core/status.h"
#include "kernel_paging/paging_service.h"
#include "vmem/vmem.h"

struct vmem_kernel {
  std::unique_ptr<vmem::api::PagingService> service;  // null: it is over

  // Protected by Kernels::mutex_.
  bool idle = false;     // the last kernel has ended: the thread is to give the leases back
  bool stopped = false;  // by shutdown
  bool late = false;     // .. by exit, which waits for it no more
  bool over = false;     // its region went with a shutdown
  bool ending = false;   // somebody is in vmem_kernel_end
};

namespace vmem::api {

class Runtime;

class Kernels {
 public:
  core::Status begin(Runtime& runtime, const vmem_range& range, int device, size_t budget, struct vmem_kernel** out,
                     vmem_kernel_view* view);
  core::Status end(Runtime& runtime, struct vmem_kernel* which, void* stream);

  // Shutdown: stop() while calls may be inside the gate, over() when none is, drain() with no lock held.
  // Exit: stop() alone, which waits no longer than `patience_ns` in which no thread ends.
  void stop(pager::Pager& pager, uint64_t patience_ns = UINT64_MAX);
  void over();
  void drain();

 private:
  using Handle = std::shared_ptr<struct vmem_kernel>;
  void work(Runtime& runtime, const Handle& kernel);
  bool serve(Runtime& runtime, const Handle& kernel, bool* done);
  bool wait_until_idle(Runtime& runtime, struct vmem_kernel* kernel);
  void wait() VMEM_REQUIRES(mutex_);

  core::Mutex mutex_;
  std::condition_variable changed_;
  bool closed_ VMEM_GUARDED_BY(mutex_) = false;  // from stop() to over() no range is opened
  std::map<struct vmem_kernel*, Handle> live_ VMEM_GUARDED_BY(mutex_);
  std::map<struct vmem_kernel*, Handle> working_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::api
