#include "pager/host/host_tier.h"

namespace vmem::pager {

HostTier::HostTier(PagerContext& ctx)
    : pressure(ctx),
      failed(ctx, *this),
      waits(ctx, *this),
      reader(ctx),
      installer(ctx, *this),
      page_in(ctx, *this),
      readahead(ctx, *this),
      isolator(ctx),
      writer(ctx, *this),
      writeback(ctx, *this),
      background(ctx, *this),
      truncated_files(ctx, *this),
      reclaim(ctx, *this),
      faults(ctx, *this) {}

}  // namespace vmem::pager
