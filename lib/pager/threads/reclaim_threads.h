// The reclaim threads: what they do next, and when they sleep. They evict and write blocks, repeat
// what was refused, give memory back that is not used, and give up waits that nothing can end.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "pager/account/context.h"

namespace vmem::pager {

struct HostTier;

class ReclaimThreads {
 public:
  ReclaimThreads(PagerContext& ctx, HostTier& host);

  // Starts that many threads, or fewer if the system refuses some: that is slower, not wrong. Fails
  // only if there is none.
  core::Status start(unsigned threads) VMEM_UNLOCKED;
  // stop() tells the threads to end; join() waits until they have.
  void stop() VMEM_LOCKED;
  void join() VMEM_UNLOCKED;

 private:
  void loop() VMEM_UNLOCKED;
  void wait_for_work(Lock& lock) VMEM_LOCKED;
  void wait_for_writes(Lock& lock, uint64_t now_ns) VMEM_LOCKED;

  PagerContext& ctx_;
  HostTier& host_;
  std::vector<std::thread> threads_;
  uint64_t pins_ns_ VMEM_GUARDED_BY(core::big_lock) = 0;  // when to look at pinned blocks again
  bool stop_ VMEM_GUARDED_BY(core::big_lock) = false;
};

}  // namespace vmem::pager
