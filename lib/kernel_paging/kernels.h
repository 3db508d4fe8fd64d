// Ranges that are open to kernels. Each has a thread that serves it (paging_service.h) until one of
// these calls:
//
// - vmem_kernel_end: when the last kernel has ended, the thread gives the leases back and ends.
//   Then the range is closed.
// - vmem_shutdown: the thread tells the kernels, takes back the blocks that they release, and ends.
//   Blocks that kernels keep stay leased, and the free of a region waits for the device. No range
//   is opened from stop() until over(), which runs when no call is inside the gate.
//
// Invariants:
//
// - A range whose thread runs is in working_.
// - The service of a range is used only inside the gate: by the range's thread, before that by
//   begin(), and after it by end(). over() destroys it when no call is inside. Other threads use
//   only the functions that paging_service.h allows them.
// - mutex_ is a leaf lock under the gate.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "core/mutex.h"
#include "core/status.h"
#include "kernel_paging/paging_service.h"
#include "pager/pager_gate.h"
#include "vmem/vmem.h"

struct vmem_kernel {
  std::unique_ptr<vmem::api::PagingService> service;  // null: over

  // Protected by Kernels::mutex_.
  bool idle = false;     // the last kernel has ended: the thread must give the leases back
  bool stopped = false;  // by stop()
  bool late = false;     // exit has given up its wait for the thread
  bool over = false;     // a shutdown has freed its region
  bool ending = false;   // a thread is in vmem_kernel_end
};

namespace vmem::api {

class Kernels {
 public:
  explicit Kernels(pager::PagerGate& gate) : gate_(gate) {}
  // The caller is inside the gate.
  core::Status begin(pager::Pager& pager, const vmem_range& range, int device, size_t budget, struct vmem_kernel** out,
                     vmem_kernel_view* view);
  // The caller is outside.
  core::Status end(struct vmem_kernel* which, void* stream);

  // Shutdown calls stop() while calls may be inside the gate, over() when none is, and drain() with
  // no lock held. Exit calls only stop(), which gives up when no thread has ended for patience_ns.
  void stop(pager::Pager& pager, uint64_t patience_ns = UINT64_MAX);
  void over();
  void drain();

 private:
  using Handle = std::shared_ptr<struct vmem_kernel>;
  void work(const Handle& kernel);
  bool serve(const Handle& kernel, bool* done);
  bool wait_until_idle(struct vmem_kernel* kernel);
  void wait() VMEM_REQUIRES(mutex_);

  pager::PagerGate& gate_;
  core::Mutex mutex_;
  std::condition_variable changed_;
  bool closed_ VMEM_GUARDED_BY(mutex_) = false;  // no range can be opened: from stop() to over()
  std::map<struct vmem_kernel*, Handle> live_ VMEM_GUARDED_BY(mutex_);
  std::map<struct vmem_kernel*, Handle> working_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace vmem::api
