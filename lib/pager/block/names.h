// Short names in the pager for names of other folders.
#pragma once

#include "core/big_lock.h"
#include "core/status.h"
#include "core/types.h"
#include "pager/block/block_table.h"
#include "trap/trap.h"

namespace vmem::pager {

using core::Block;
using core::BlockIndex;
using core::error;
using core::FrameId;
using core::kNoFrame;
using core::State;
using core::Status;
using core::Urgency;
using trap::Transfer;
using Lock = core::BigLock;

}  // namespace vmem::pager
