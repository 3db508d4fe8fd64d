#include "pager/tier/pipelined_copy.h"

#include "core/step.h"
#include "pager/tier/device_tier.h"
#include "pager/tier/retry.h"

namespace vmem::pager {

namespace {

device::Range range_of(const Transition& m) {
  return {reinterpret_cast<uintptr_t>(m.region->address(m.block)), m.region->block_size};
}

}  // namespace

PipelinedCopy::PipelinedCopy(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

bool PipelinedCopy::wants(const Region& r) const {
  return ctx_.devices != nullptr && r.block_size > device::kUnit && ctx_.device_set.own_page_tables();
}

// Copies when half of the rest has come: the last of the five copies of a 32 MiB block is 2 MiB.
void PipelinedCopy::came(Transition* m, size_t bytes) {
  CopiedParts& parts = m->move.parts;
  const size_t left = m->region->block_size - parts.told;
  if (2 * (bytes - parts.told) < left) return;
  parts.told = bytes;
  const Lock lock(ctx_.map.mutex());
  if (m->read.speculative && !leased(*m->region, m->block)) return;
  parts.come = bytes / device::kUnit * device::kUnit;
  if (parts.busy || parts.waits) return;  // a worker will see it, and copies it together with what comes until then
  if (!parts.copy_failed && parts.come > parts.copied) wait(m);
}

void PipelinedCopy::wait(Transition* m) {
  m->move.parts.waits = true;
  waiting_.push_back(m);
  ctx_.device_set.work().notify_one();
}

bool PipelinedCopy::is_left(Transition* m) {
  CopiedParts& parts = m->move.parts;
  // A worker frees the device memory: this is an I/O thread.
  if (!parts.busy && (!parts.made || m->status.ok())) {
    if (parts.waits) waiting_.remove(m);
    parts.waits = false;
    return true;
  }
  parts.over = true;
  if (!parts.busy && !parts.waits) wait(m);
  return false;
}

bool PipelinedCopy::serve(Lock& lock) {
  if (waiting_.empty()) return false;
  Transition* const m = waiting_.pop();
  CopiedParts& parts = m->move.parts;
  parts.waits = false;
  parts.busy = true;
  if (!parts.over) {
    const size_t come = parts.come;
    lock.unlock();
    copy(m, come);
    core::step("device.part");
    lock.lock();
  }
  if (parts.over && !m->status.ok() && parts.made) {
    lock.unlock();
    give_back(m);
    lock.lock();
  }
  parts.busy = false;
  if (!parts.over) {
    if (!parts.copy_failed && parts.come > parts.copied) wait(m);
    return true;
  }
  DeferredWork after;
  tier_.promoter.read_over(m, after);
  lock.unlock();
  host_.page_in.run(after);
  lock.lock();
  return true;
}

// Runs on the block's worker. A part that is refused now is copied, or refused, when the read is
// over.
void PipelinedCopy::copy(Transition* m, size_t come) {
  CopiedParts& parts = m->move.parts;
  const device::Range range = range_of(*m);
  bool torn = false;
  if (!parts.made) parts.made = ctx_.devices->populate({&range, 1}, m->device, &torn).ok();
  parts.copy_failed = !parts.made;
  if (parts.copy_failed) return;
  const device::Copy copy{range.address + parts.copied, m->image + parts.copied, come - parts.copied, true,
                          parts.ticket};
  device::Ticket done;
  parts.copy_failed = !ctx_.devices->copy_in(m->device, {&copy, 1}, &done).ok();
  if (parts.copy_failed) return;
  parts.ticket = std::move(done);
  parts.copied = come;
}

void PipelinedCopy::give_back(Transition* m) {
  CopiedParts& parts = m->move.parts;
  const device::Range range = range_of(*m);
  // An error means that the device is lost.
  if (parts.ticket != nullptr) wait_for_copy(*ctx_.devices, m->device, parts.ticket).ignore();
  parts.ticket.reset();
  retry_until_done(*ctx_.devices, m->device, "giving a block up", [&] {
    return tier_.managed_holes.punch({&range, 1});
  }).ignore();
  parts.made = false;
  parts.copied = 0;
  const Lock lock(ctx_.map.mutex());
  ctx_.device_set[static_cast<size_t>(m->device)].budget.set_keeps(true);
}

}  // namespace vmem::pager
