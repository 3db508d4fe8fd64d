#include "pager/host/store_writer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/fault_server.h"
#include "core/log.h"
#include "pager/block/block_run.h"
#include "pager/host/host_tier.h"
#include "store/codec.h"
#include "store/open.h"

namespace vmem::pager {

namespace {

constexpr size_t kClusterBlock = 64 << 10;  // blocks up to this size go side by side, in place only for want of room

// Such a file takes the block only after it was changed back, if ever: it is sealed, immutable,
// read-only, a swap file by now, or gone.
bool refuses_for_good(int code) {
  constexpr int kForGood[] = {EPERM, EACCES, EROFS, ETXTBSY, EINVAL, EBADF, ENODEV, ENXIO, ESTALE, EOPNOTSUPP, EFBIG};
  return std::find(std::begin(kForGood), std::end(kForGood), -code) != std::end(kForGood);
}

// Errors of the machine, or of the program's pages, but not of the file.
bool says_nothing_of_the_file(int code) {
  constexpr int kOthers[] = {EFAULT, ENOMEM, ENOBUFS, EAGAIN, EINTR, EBUSY, ECANCELED};
  return std::find(std::begin(kOthers), std::end(kOthers), -code) != std::end(kOthers);
}

// The file system, a quota or RLIMIT_FSIZE does not let the file grow.
bool has_no_room(const core::Status& s) {
  return s.code() == -ENOSPC || s.code() == -EDQUOT || s.code() == -EFBIG;
}

// The path failed (full, broken, read-only by now), and not the memory that was to be written.
bool is_of_the_path(const Status& s) {
  return s.code() != -EFAULT && s.code() != -ENOMEM && s.code() != -EAGAIN && s.code() != -EINTR;
}

}  // namespace

StoreWriter::StoreWriter(PagerContext& ctx, HostTier& host) : ctx_(ctx), host_(host) {}

// Finds room for small blocks, which are stored raw.
void StoreWriter::allocate_cluster(std::span<Transition*> cluster) {
  // Blocks of one region that leave together are stored side by side, in the order of their
  // addresses.
  std::sort(cluster.begin(), cluster.end(), address_order);
  for (size_t i = 0; i < cluster.size();) {
    size_t n = 1;
    while (i + n < cluster.size() && cluster[i + n]->write.stored == cluster[i]->write.stored) ++n;
    std::array<core::Extent, Batch::capacity()> extents;
    if (ctx_.space.allocate(cluster[i]->write.stored, 0, std::span(extents).first(n)).ok()) {
      for (size_t k = 0; k < n; ++k) cluster[i + k]->write.extent = extents[k];
    } else {
      for (size_t k = 0; k < n; ++k) {
        Transition* const m = cluster[i + k];
        m->status = ctx_.space.allocate(m->write.stored, 0, {&m->write.extent, 1});
      }
    }
    // Without room, overwrite the old copy: the block stays in memory until the new one is whole.
    for (size_t k = i; k < i + n; ++k) {
      Transition* const m = cluster[k];
      const core::Extent old = m->region->table[m->block].extent;
      if (!old || old.codec() != 0 || old.length() != m->write.stored) continue;
      const bool full = m->status.ok() && !core::broken("full_disk") && ctx_.space.expected_to_fail(m->write.extent);
      if (!full && m->status.code() != -ENOSPC) continue;
      if (full) ctx_.space.release(m->write.extent);
      m->status = {};
      m->write.extent = old;
      m->write.new_extent = false;
    }
    i += n;
  }
}

// Returns true if our own loads may read the image: the program may have changed the rights of
// pages that are in place.
bool StoreWriter::may_load(const Transition& m) const {
  if (!m.write.in_place || m.write.aside != nullptr) return true;
  const Region& r = *m.region;
  return pager::may_load(mappings_, r, r.address(m.block), r.block_size);
}

void StoreWriter::prepare_writes(std::span<Transition* const> transitions) {
  Batch cluster;
  for (Transition* m : transitions) {
    Region& r = *m->region;
    if (r.backing == Backing::file_shared) continue;
    m->write.stored = r.block_size;
    m->write.codec = store::Codec::raw;
    if (m->write.in_place) core::may_wait_for_a_fault("a block is compressed in its place");
    if (m->coded != nullptr && may_load(*m)) {
      store::encode(r.codec, m->image, r.block_size, m->coded, &m->write.stored, &m->write.codec);
    } else if (m->coded != nullptr) {
      // Write a copy raw: a write from the block's place might need a copy later, and find no
      // buffer.
      m->write.aside = std::exchange(m->coded, nullptr);
      if (core::read_guarded(m->write.aside, m->image, r.block_size, r.absent) == 0) {
        m->image = m->write.aside;
        m->digest = store::digest(m->image, r.block_size);  // a page may have become a guard page since it was hashed
      }
    }
    const core::Extent old = r.table[m->block].extent;
    if (old && old.codec() == 0 && m->write.codec == store::Codec::raw && r.block_size > kClusterBlock) {
      m->write.extent = old;
      m->write.new_extent = m->write.elsewhere && ctx_.space.allocate(m->write.stored, 0, {&m->write.extent, 1}).ok();
      if (!m->write.new_extent) m->write.extent = old;
      continue;
    }
    m->write.new_extent = true;
    if (m->write.codec == store::Codec::raw && r.block_size <= kClusterBlock) {
      cluster.push_back(m);
    } else {
      m->status = ctx_.space.allocate(m->write.stored, static_cast<unsigned>(m->write.codec), {&m->write.extent, 1});
    }
  }
  allocate_cluster(cluster.all());
}

void StoreWriter::to_store(Transition* m, IoEnd& end, DeferredWork& after) {
  Region& r = *m->region;
  m->then = &end;
  const auto prepare = [&](store::Io& io, store::FileId file, uint64_t offset, std::byte* buffer, size_t size) {
    io.op = store::Io::Op::write;
    io.urgency = m->completion != nullptr ? Urgency::acquire : Urgency::writeback;
    io.file = file;
    io.offset = offset;
    io.buffer = buffer;
    io.size = size;
    io.done = IoEnd::ended;
    io.user = m;
    io.in_region = buffer == r.address(m->block);
    io.absent = r.absent;
  };
  if (r.backing == Backing::file_shared) {
    m->write.stored = r.file_bytes(m->block);
    prepare(m->io, r.source.id, r.source.offset + m->block * r.block_size, m->image, m->write.stored);
    m->io.within_file = true;
  } else {
    prepare(m->io, ctx_.space.file(m->write.extent), m->write.extent.offset(),
            m->write.codec == store::Codec::raw ? m->image : m->coded, m->write.stored);
    if (!m->write.new_extent) r.table.forget_digest(m->block);  // until that copy is whole
  }
  // A store shows that reading ahead was worth it. On a device only a lease shows that: the block
  // may have been dirty before it came.
  if (const Block& block = r.table[m->block]; m->device < 0 && (block.flags & core::kReadAhead) != 0) {
    r.table.forget_read_ahead(m->block);
    ctx_.map.frame_table().seen(ctx_.map.frame_table()[block.aux]);
    core::add(ctx_.counters.prefetch_hits);
  }
  after.submit.push_back(m);
}

bool StoreWriter::find_elsewhere(Transition* m) {
  if (m->status.ok() || m->write.stored == 0 || !is_of_the_path(m->status) || core::broken("one_path")) return false;
  if (m->region->backing == Backing::file_shared || m->write.tries + 1 >= ctx_.space.paths()) return false;
  const core::Extent failed = m->write.extent;
  ctx_.space.avoid(failed);
  core::Extent other;
  if (!ctx_.space.allocate(m->write.stored, static_cast<unsigned>(m->write.codec), {&other, 1}).ok()) return false;
  if (ctx_.space.expected_to_fail(other)) {
    ctx_.space.release(other);
    return false;
  }
  core::add(ctx_.counters.io_errors);
  const Status why =
      core::system_error(m->status.code(), "a write failed, and its bytes are written to another place, %s",
                         ctx_.space.describe(failed).c_str());
  VMEM_LOG_OFTEN(core::Level::warning, "%.*s", static_cast<int>(why.text().size()), why.text().data());
  if (m->write.new_extent) ctx_.space.release(failed);
  m->write.extent = other;
  m->write.new_extent = true;
  m->status = {};
  ++m->write.tries;
  return true;
}

void StoreWriter::note_write_failure(Transition* m) {
  Region& r = *m->region;
  const bool again = (r.table[m->block].flags & core::kUnknown) != 0;
  const bool shared = r.backing == Backing::file_shared;
  int code = m->status.code();
  // The kernel cuts a write at the limit, and direct I/O refuses the length that is left.
  if (shared && (code == -EINVAL || code == -EIO) &&
      !store::within_size_limit(r.source.offset + m->block * r.block_size + m->write.stored)) {
    code = -EFBIG;
    m->status = {};
  }
  if (m->io.size != 0 && !core::broken("unknown_mark")) host_.failed.mark_unknown(r, m->block);  // the write was begun
  core::add(ctx_.counters.io_errors);
  ctx_.map.frame_table()[r.table[m->block].aux].droppable =
      shared && (refuses_for_good(code) || (again && !says_nothing_of_the_file(code)));
  if (has_no_room(m->status) && !r.table[m->block].extent && !shared) ctx_.writeback_throttle.no_room(now_ns());
  if (m->status.text().empty()) {
    m->status = core::system_error(code, "writing failed, the block stays in memory, %s",
                                   ctx_.map.describe_locked(r, m->block).c_str());
  }
  const bool heard = m->completion != nullptr || core::broken("write_report");
  const bool say = shared ? ctx_.writeback_throttle.file_failed(r, m->status, heard, now_ns())
                          : ctx_.writeback_throttle.failed(m->status, heard, now_ns());
  if (!say) return;
  VMEM_LOG_OFTEN(core::Level::warning, "%.*s", static_cast<int>(m->status.text().size()), m->status.text().data());
}

void StoreWriter::store_has_room() {
  Lock lock(ctx_.map.mutex());
  if (ctx_.writeback_throttle.has_room()) host_.pressure.wake_all_reclaim();
}

void StoreWriter::give_back_extent(Transition* m) {
  if (!m->write.new_extent || !m->write.extent) return;
  if (has_no_room(m->status)) {
    ctx_.space.refuse(m->write.extent);
  } else {
    ctx_.space.release(m->write.extent);
  }
}

}  // namespace vmem::pager
