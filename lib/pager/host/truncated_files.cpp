#include "pager/host/truncated_files.h"

#include "core/log.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "device/cpu_gate.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

// State reading; the file's own pages are mapped. Replaces them by the trap. For a moment neither
// is in place, and accesses park at the gate, which regions with a device tier have. On error
// accesses see the file as before (*shown), or get SIGBUS.
Status hide_file(trap::Trap& trap, device::CpuGate& gate, const Region& r, BlockIndex b, bool* shown) {
  if (Status s = gate.check(); !s.ok()) return s;
  const uintptr_t at = reinterpret_cast<uintptr_t>(r.address(b));
  gate.set(at, r.block_size, device::Gate::shut);
  const core::ScopeGuard open([&] { gate.set(at, r.block_size, device::Gate::open); });
  Status s = trap.unmap_file(r.address(b), r.block_size);
  if (!s.ok()) *shown = map_file(trap, r, b).ok();
  return s;
}

// Drops what was stored to the file's pages, which stay mapped: without a gate they cannot be
// replaced under a reader.
Status drop_shown(trap::Trap& trap, const Region& r, BlockIndex b) {
  const trap::Range range{reinterpret_cast<uintptr_t>(r.address(b)), core::round_up(r.file_bytes(b), core::kPage)};
  return trap.drop({&range, 1});
}

}  // namespace

TruncatedFiles::TruncatedFiles(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

Status TruncatedFiles::revive(Lock& lock, Region& r, BlockIndex b) {
  if (!ctx_.map.reserve_block()) return core::error(ENOMEM, "no memory for bookkeeping");
  const Block& block = r.table[b];
  const uint32_t shadow = block.aux;
  const FrameId id = ctx_.map.new_entry(r, b, nullptr);
  r.table.begin_read(b);
  Transition* m = ctx_.map.new_transition(r, b);
  device::CpuGate* const gate = r.gpu ? ctx_.device_set.cpu_gate() : nullptr;
  const bool hides = gate != nullptr;
  bool shown = (block.flags & core::kUnanswered) == 0;
  lock.unlock();
  core::step("file.hiding");
  Status s = hides ? hide_file(ctx_.trap, *gate, r, b, &shown) : drop_shown(ctx_.trap, r, b);
  lock.lock();
  ctx_.map.give_entry(id);
  r.table.set_aux(b, shadow);
  DeferredWork after;
  if (s.ok() && hides) {
    r.table.clear(b, core::kShowsFile | core::kLost | core::kTold | core::kUnanswered);
    r.table.abandon_read(b);
    ctx_.metadata_charges.charge(r);
    r.reasons.erase(b);
    ctx_.map.free_transition(m);
    host_.page_in.settle(r, b, after);
  } else {
    if (!s.ok()) VMEM_LOG_OFTEN(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    r.table.clear(b, core::kFaultPending | core::kStorePending | core::kUnanswered);
    if (!shown) r.table.mark(b, core::kUnanswered);
    r.table.poison(b);
    ctx_.trap.wake(r.address(b), r.block_size).ignore();
    ctx_.map.free_transition(m);
  }
  ctx_.upcalls.memory_freed(after);
  host_.page_in.run(lock, after);
  return s;
}

}  // namespace vmem::pager
