// The classes of the host tier, one of each, in the order in which they build on each other.
#pragma once

#include "pager/host/background_writes.h"
#include "pager/host/failed_blocks.h"
#include "pager/host/fault_handler.h"
#include "pager/host/installer.h"
#include "pager/host/isolator.h"
#include "pager/host/memory_pressure.h"
#include "pager/host/memory_waits.h"
#include "pager/host/page_in.h"
#include "pager/host/readahead.h"
#include "pager/host/reclaim.h"
#include "pager/host/store_reader.h"
#include "pager/host/store_writer.h"
#include "pager/host/truncated_files.h"
#include "pager/host/writeback.h"

namespace vmem::pager {

struct HostTier {
  explicit HostTier(PagerContext& ctx);
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  MemoryPressure pressure;
  FailedBlocks failed;
  MemoryWaits waits;
  ReadaheadQueue readahead_queue VMEM_GUARDED_BY(core::big_lock);
  ReclaimRequests reclaim_requests VMEM_GUARDED_BY(core::big_lock);
  StoreReader reader;
  Installer installer;
  PageIn page_in;
  Readahead readahead;
  Isolator isolator;
  StoreWriter writer;
  Writeback writeback;
  BackgroundWrites background;
  TruncatedFiles truncated_files;
  Reclaim reclaim;
  FaultHandler faults;
};

}  // namespace vmem::pager
