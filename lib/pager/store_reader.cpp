#include "pager/store_reader.h"

#include <cerrno>

#include "core/break.h"
#include "store/codec.h"

namespace vmem::pager {

namespace {

// The kernel had no memory for the transfer, or did not come to it: that says nothing of the disk.
bool refused(int result) {
  return result == -ENOMEM || result == -ENOBUFS || result == -EAGAIN;
}

}  // namespace

// Unlocked; the read of `m` is over. Decodes and verifies it; the status is the move's.
void StoreReader::verify_read(Move* m) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  core::add(counters_.read_bytes, m->io.transferred);
  if (m->io.result != 0) {
    m->refused = refused(m->io.result) && !core::broken("read_refused");
    if (!m->refused) core::add(counters_.io_errors);
    m->status = core::system_error(m->refused ? -ENOMEM : m->io.result, "%s, %s",
                                   m->refused ? "the kernel has no memory to read" : "reading failed",
                                   map_.place(r, m->block).c_str());
  } else if (!block.extent && m->io.transferred < r.file_bytes(m->block)) {
    m->cut = true;
    m->status = core::error(EIO, "the file became shorter than when it was mapped: %zu of %zu bytes are left, %s",
                            m->io.transferred, r.file_bytes(m->block), map_.place(r, m->block).c_str());
  } else if (m->coded != nullptr) {
    m->status =
        store::decode(static_cast<store::Codec>(block.extent.codec()), m->coded, m->io.size, m->image, r.block_size);
    if (!m->status.ok()) core::add(counters_.checksum_errors);
  }
  if (m->status.ok() && block.extent) {
    // The digest also tells later whether the block was changed, so it stays even where it is not verified.
    const bool verify = r.checksum == 0 ? verify_.load(std::memory_order_relaxed) : r.checksum > 0;
    if (verify && !core::broken("digest_check") && !(store::digest(m->image, r.block_size) == block.digest)) {
      core::add(counters_.checksum_errors);
      m->status = core::error(EIO, "checksum mismatch: what the SSD returned is not what was written, %s",
                              map_.place(r, m->block).c_str());
    }
  } else if (m->status.ok() && r.writable()) {
    m->digest = store::digest(m->image, r.block_size);
  }
}

// Describes the read of block b to `m`, whose image (and coded) are set.
void StoreReader::prepare_read(Move* m, Urgency urgency, IoEnd& end) {
  Region& r = *m->region;
  const Block& block = r.table[m->block];
  m->then = &end;
  store::Io& io = m->io;
  io.op = store::Io::Op::read;
  io.urgency = urgency;
  io.user = m;
  io.done = IoEnd::ended;
  if (block.extent) {
    io.file = space_.file(block.extent);
    io.offset = block.extent.offset();
    io.size = block.extent.length();
    io.buffer = m->coded != nullptr ? m->coded : m->image;
  } else {
    io.file = r.file_id;
    io.offset = r.file_offset + m->block * r.block_size;
    io.size = r.block_size;
    io.buffer = m->image;
    io.short_read_is_zero = true;
  }
}

// Unlocked; the owner of a fill. True: what it is to read is a hole of the file, so there is nothing to read.
bool StoreReader::find_hole(Move* m) {
  const Region& r = *m->region;
  if (!r.sparse || !m->was_untouched) return false;
  if (!store::find_hole(r.file.file.fd, m->io.offset, r.file_bytes(m->block), &m->hole_end)) return false;
  m->hole = true;
  m->io.size = 0;
  return true;
}

}  // namespace vmem::pager
