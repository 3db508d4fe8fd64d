#include "pager/host/store_reader.h"

#include <bit>
#include <cerrno>

#include "core/break.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "pager/host/host_tier.h"

namespace vmem::pager {

namespace {

// The kernel had no memory for the transfer, or did not get to it: that is no error of the disk.
bool no_memory(int result) {
  return result == -ENOMEM || result == -ENOBUFS || result == -EAGAIN;
}

}  // namespace

StoreReader::StoreReader(PagerContext& ctx) : ctx_(ctx), verify_(ctx.config.checksum) {}

store::Digester* StoreReader::take_digester() {
  uint32_t free = free_digesters_.load(std::memory_order_relaxed);
  while (free != 0 && !free_digesters_.compare_exchange_weak(free, free & (free - 1), std::memory_order_acquire)) {
  }
  if (free == 0) return nullptr;
  store::Digester* const d = &digesters_[static_cast<size_t>(std::countr_zero(free))];
  d->reset();
  return d;
}

void StoreReader::give_back_digester(Transition* m) {
  if (m->read.digester == nullptr) return;
  free_digesters_.fetch_or(1u << (m->read.digester - digesters_.data()), std::memory_order_release);
  m->read.digester = nullptr;
  m->read.digested = 0;
}

// The first `bytes` of an image have arrived, and the rest is being read.
void StoreReader::came(store::Io& io, size_t bytes) {
  auto* const m = static_cast<Transition*>(io.user);
  if (m->move.tells) m->then->io_came(m, bytes);
  if (!m->read.digests) return;
  if (m->read.digester == nullptr) m->read.digester = m->read.reader->take_digester();
  if (m->read.digester == nullptr) return;
  m->read.digester->update(m->image + m->read.digested, bytes - m->read.digested);
  m->read.digested = bytes;
  core::step("fill.digest");
}

// Returns the digest of an image that has arrived in full.
core::Digest StoreReader::digest(Transition* m) {
  const size_t size = m->region->block_size;
  if (m->read.digester == nullptr) return store::digest(m->image, size);
  m->read.digester->update(m->image + m->read.digested, size - m->read.digested);
  m->read.digested = size;
  return m->read.digester->finish();
}

bool StoreReader::verifies(const Region& r) const {
  return r.checksum == 0 ? verify_.load(std::memory_order_relaxed) : r.checksum > 0;
}

void StoreReader::verify_read(Transition* m) {
  const core::ScopeGuard digester_is_free([&] { give_back_digester(m); });
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  core::add(ctx_.counters.read_bytes, m->io.transferred);
  if (m->io.result != 0) {
    m->read.no_memory = no_memory(m->io.result) && !core::broken("read_refused");
    if (!m->read.no_memory) core::add(ctx_.counters.io_errors);
    m->status = core::system_error(m->read.no_memory ? -ENOMEM : m->io.result, "%s, %s",
                                   m->read.no_memory ? "the kernel has no memory to read" : "reading failed",
                                   ctx_.map.describe(r, m->block).c_str());
  } else if (!block.extent && m->io.transferred < r.file_bytes(m->block)) {
    m->cut = true;
    m->status = core::error(EIO, "the file is shorter than its region: %zu of the %zu bytes of the block are there, %s",
                            m->io.transferred, r.file_bytes(m->block), ctx_.map.describe(r, m->block).c_str());
  } else if (m->coded != nullptr) {
    m->status =
        store::decode(static_cast<store::Codec>(block.extent.codec()), m->coded, m->io.size, m->image, r.block_size);
    if (!m->status.ok()) core::add(ctx_.counters.checksum_errors);
  }
  if (m->status.ok() && block.extent) {
    // The digest also tells later whether the block has changed, so it stays even if it is not
    // verified.
    if (verifies(r) && !core::broken("digest_check") && !(digest(m) == block.digest)) {
      core::add(ctx_.counters.checksum_errors);
      m->status = core::error(EIO, "checksum mismatch: the SSD returned other bytes than were written, %s",
                              ctx_.map.describe(r, m->block).c_str());
    }
  } else if (m->status.ok() && r.writable()) {
    m->digest = digest(m);
  }
}

void StoreReader::prepare_read(Transition* m, Urgency urgency, IoEnd& end, bool wants_parts) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  m->then = &end;
  m->read.reader = this;
  store::Io& io = m->io;
  io.op = store::Io::Op::read;
  io.urgency = urgency;
  io.user = m;
  io.done = IoEnd::ended;
  if (block.extent) {
    io.file = ctx_.space.file(block.extent);
    io.offset = block.extent.offset();
    io.size = block.extent.length();
    io.buffer = m->coded != nullptr ? m->coded : m->image;
  } else {
    io.file = r.source.id;
    io.offset = r.source.offset + m->block * r.block_size;
    io.size = r.block_size;
    io.buffer = m->image;
    io.short_read_is_zero = true;
  }
  m->read.digests = m->coded == nullptr && (block.extent ? verifies(r) : r.writable());
  m->move.tells = m->coded == nullptr && wants_parts;
  if (m->read.digests || m->move.tells) io.progress = came;
}

bool StoreReader::find_hole(Transition* m) {
  const Region& r = *m->region;
  if (!r.source.sparse || !m->read.was_unpopulated) return false;
  if (!store::find_hole(r.source.file.file.fd, m->io.offset, r.file_bytes(m->block), &m->read.hole_end)) return false;
  m->read.hole = true;
  m->io.size = 0;
  return true;
}

}  // namespace vmem::pager
