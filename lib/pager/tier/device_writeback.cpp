#include "pager/tier/device_writeback.h"

#include "core/log.h"
#include "core/step.h"
#include "pager/tier/device_tier.h"

namespace vmem::pager {

DeviceWriteback::DeviceWriteback(PagerContext& ctx, DeviceTier& tier) : ctx_(ctx), host_(tier.host), tier_(tier) {}

void DeviceWriteback::write(std::span<Transition* const> transitions, DeferredWork& after) {
  Batch changed;
  for (Transition* m : transitions) {
    if (!m->status.ok()) continue;
    m->digest = store::digest(m->image, m->region->block_size);
    m->write.clean = m->write.has_digest && m->digest == m->region->table[m->block].digest;
    if (!m->write.clean) changed.push_back(m);
  }
  host_.writer.prepare_writes(changed.all());
  for (Transition* m : transitions) {
    if (!m->status.ok() || m->write.clean) {
      finish_write(m, after);
      continue;
    }
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
  }
}

void DeviceWriteback::io_ended(Transition* m) {
  DeferredWork after;
  if (m->io.result != 0) m->status = Status(m->io.result, "");
  finish_write(m, after);
  host_.page_in.run(after);
}

void DeviceWriteback::give_back_frame(Transition* m) {
  Region& r = *m->region;
  if (m->move.kept) {
    ctx_.map.copies().unhold(r.table[m->block].aux);
  } else if (m->image != nullptr) {
    ctx_.staging.of(r).frames.put(m->image);
  }
}

// Notes a successful write. cut: only a part of the block was written.
void DeviceWriteback::note_written(Transition* m, bool cut) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  if (!m->write.clean) {
    core::add(ctx_.counters.write_bytes, cut ? m->io.transferred : m->write.stored);
    if (r.backing != Backing::file_shared) {
      // Under the lock, as in finish_write().
      if (m->write.new_extent && block.extent) ctx_.space.release(block.extent);
      r.table.set_extent(m->block, m->write.extent);
    }
    r.table.set_digest(m->block, m->digest);
    if (cut) r.table.forget_digest(m->block);  // only a part is in the file
    host_.failed.clear_unknown(r, m->block);
    ctx_.map.frame_table()[block.aux].droppable = false;
    if (r.backing == Backing::file_shared) ctx_.writes.file_succeeded(r);
  }
  // Under a lease for writing the device may have stored more since; so may the CPU to a shown
  // copy.
  if (!cut && !lent_for_writing(r, m->block) && !ctx_.map.frame_table()[block.aux].dev.stale)
    r.table.clear(m->block, core::kDirty);
}

// State demoting, write-protected on its device; the write has ended or there was none.
void DeviceWriteback::finish_write(Transition* m, DeferredWork& after) {
  Region& r = *m->region;
  const device::Range range{reinterpret_cast<uintptr_t>(r.address(m->block)), r.block_size};
  core::step("device.written");
  if (host_.writer.find_elsewhere(m)) {
    Lock lock(ctx_.map.mutex());
    host_.writer.to_store(m, *this, after);
    return;
  }
  // Open before the state says that the block stays: a store that traps before that waits for the
  // state (on_touch).
  const Status opened = ctx_.devices->open({&range, 1}, device::Access::read);
  core::step("device.opened");
  const bool cut =
      m->status.ok() && !m->write.clean && r.backing == Backing::file_shared && m->io.transferred < m->write.stored;
  if (cut) {
    VMEM_LOG_OFTEN(core::Level::info, "the file became shorter: %zu changed bytes beyond its end were not written, %s",
                   m->write.stored - m->io.transferred, ctx_.map.place(r, m->block).c_str());
  }
  Lock lock(ctx_.map.mutex());
  const Block& block = r.table[m->block];
  if (m->coded != nullptr) ctx_.frames.put_bounce(m->coded, r.block_size);
  m->coded = nullptr;
  if (!m->status.ok() && m->write.stored == 0) {
    m->status = error(-m->status.code(), "%.*s: not written, %s", static_cast<int>(m->status.text().size()),
                      m->status.text().data(), ctx_.map.where(r, m->block).c_str());
  }
  if (m->status.ok()) {
    note_written(m, cut);
  } else if (m->write.stored != 0) {
    host_.writer.note_write_failure(m);
    host_.writer.give_back_extent(m);
  }
  if (!m->status.ok() || cut) ctx_.map.frame_table()[block.aux].dev.saved = false;
  give_back_frame(m);
  if (!opened.ok() && m->status.ok()) m->status = opened;
  tier_.blocks.stays(r, m->block);
  const core::FrameId id = block.aux;
  if (ctx_.map.frame_table()[id].admitted) ctx_.map.policy(id).unhold(id);
  ctx_.map.free_transition(m);
  ctx_.above.memory_freed(after);
}

}  // namespace vmem::pager
