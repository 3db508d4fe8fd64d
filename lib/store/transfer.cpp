#include "store/transfer.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>

#include "core/break.h"
#include "core/fault_server.h"
#include "core/mutex.h"
#include "core/process/unwatched_reads.h"
#include "core/step.h"

namespace vmem::store {

namespace {

constinit core::Mutex flags_mutex;  // held while O_DIRECT is off a descriptor

constexpr unsigned kPatientStalls = 8;  // retried at once
constexpr unsigned kMaxStalls = 200;    // then gives up, after about 200 ms
constexpr uint64_t kSmallestSector = 512;

// Returns true if a read at `position` finds nothing because the file ends there. A short count
// alone does not prove that, and zeros in place of data would be silent corruption. So the file's
// own size decides.
bool ends_at(int fd, uint64_t position) {
  struct stat st;
  if (fstat(fd, &st) != 0) return false;
  if (S_ISREG(st.st_mode)) return static_cast<uint64_t>(st.st_size) <= position;
  if (S_ISBLK(st.st_mode)) {
    uint64_t size = 0;
    return ioctl(fd, BLKGETSIZE64, &size) == 0 && size <= position;
  }
  return true;
}

// Returns the file's size now, or UINT64_MAX for a block device, which does not grow, or if the
// size is unknown.
uint64_t room_of(int fd) {
  struct stat st;
  return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? static_cast<uint64_t>(st.st_size) : UINT64_MAX;
}

// Writes the partial page at the end of a direct file, or of a region's range, since direct I/O
// moves whole pages only. It clears O_DIRECT for a moment; otherwise each file would need a second
// descriptor. Other transfers on this descriptor may then go through the page cache, which is also
// correct.
ssize_t write_part_of_page(const Attempt& attempt, off_t offset) {
  const int fd = attempt.slot.fd;
  const core::MutexLock lock(flags_mutex);
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0) return -1;
  ssize_t n;
  do {
    n = pwritev(fd, attempt.pieces.data(), static_cast<int>(attempt.pieces.size()), offset);
  } while (n < 0 && errno == EINTR);
  const int error = errno;
  fcntl(fd, F_SETFL, flags);
  errno = error;
  return n;
}

// The kernel write-protects the bytes, so no store changes them during the write.
ssize_t write_image(const Attempt& attempt, off_t offset) {
  const core::UnwatchedReads unwatched;
  if (attempt.part_of_page) return write_part_of_page(attempt, offset);
  return pwritev(attempt.slot.fd, attempt.pieces.data(), static_cast<int>(attempt.pieces.size()), offset);
}

// reached: bytes that moved, counted from the start of `io`.
void settle(Io* io, size_t reached, int result) {
  io->transferred = std::min(reached, io->size);
  io->result = result;
}

void pause_one_ms() {
  const timespec ms{0, 1000000};
  nanosleep(&ms, nullptr);
}

}  // namespace

void renew_flags_lock() {
  new (&flags_mutex) core::Mutex;
}

int descriptor_flags(int fd) {
  const core::MutexLock lock(flags_mutex);
  const int flags = fcntl(fd, F_GETFL);
  return flags < 0 ? -errno : flags;
}

ssize_t perform(const Attempt& attempt) {
  core::may_wait_for_a_fault("a transfer is made");
  const int pieces = static_cast<int>(attempt.pieces.size());
  const auto offset = static_cast<off_t>(attempt.offset);
  ssize_t rc = 0;
  switch (attempt.op) {
    case Io::Op::read:
      rc = preadv(attempt.slot.fd, attempt.pieces.data(), pieces, offset);
      break;
    case Io::Op::write:
      rc = write_image(attempt, offset);
      break;
    case Io::Op::flush:
      rc = fdatasync(attempt.slot.fd);
      break;
  }
  return rc < 0 ? -errno : rc;
}

Transfer::Transfer() : pieces_(std::make_unique_for_overwrite<iovec[]>(kMaxPieces)) {}

void Transfer::start(Io* chain, unsigned count, FileSlot slot) {
  chain_ = chain;
  whole_ = nullptr;
  slot_ = slot;
  retries_ = 0;
  Io* last = chain;
  while (--count != 0) last = last->next;
  last->next = nullptr;
  enter_span(chain, nullptr);
}

void Transfer::start_part(Io* whole, size_t from, size_t bytes, FileSlot slot) {
  part_ = *whole;
  part_.offset += from;
  part_.buffer = static_cast<char*>(whole->buffer) + from;
  part_.size = bytes;
  start(&part_, 1, slot);
  whole_ = whole;
}

void Transfer::enter_span(Io* first, Io* end) {
  span_ = Span{first, end, first->offset, 0, 0, 0};
  for (const Io* io = first; io != end; io = io->next) span_.total += io->size;
  stalls_ = 0;
}

Attempt Transfer::prepare(Injector* injector) {
  Attempt out{span_.first->op, span_.first->file, slot_, span_.base + span_.resume, {}, 0, false,
              false,           stalls_ != 0,      false};
  if (out.op == Io::Op::flush) return out;

  at_end_ = false;
  size_t want = span_.total - span_.resume;
  if (out.op == Io::Op::write && span_.first->within_file) {
    want = fit_into_file(want, &out.part_of_page);
    if (want == 0) {  // an empty write, so that the engines need no special case
      out.pieces = {pieces_.get(), 0};
      return out;
    }
  }
  if (injector != nullptr && want != 0) {
    size_t limit = want;
    for (const Io* io = span_.first; io != span_.end; io = io->next) {
      limit = std::min(limit, injector->attempt_limit(*io, want));
    }
    want = std::clamp(limit, size_t{1}, want);
  }

  size_t start = 0;  // of the current Io, from base
  size_t count = 0;
  for (const Io* io = span_.first; io != span_.end && out.bytes < want; start += io->size, io = io->next) {
    if (start + io->size <= span_.resume) continue;
    const size_t skip = span_.resume > start ? span_.resume - start : 0;
    char* from = static_cast<char*>(io->buffer) + skip;
    const size_t bytes = std::min(io->size - skip, want - out.bytes);
    iovec* before = count != 0 ? &pieces_[count - 1] : nullptr;
    out.unpopulated |= io->unpopulated;
    out.in_region |= io->in_region;
    if (before != nullptr && static_cast<char*>(before->iov_base) + before->iov_len == from) {
      before->iov_len += bytes;
    } else {
      pieces_[count++] = iovec{from, bytes};
    }
    out.bytes += bytes;
  }
  out.pieces = {pieces_.get(), count};
  return out;
}

// Returns how many of `want` bytes the next system call may write: up to the end of the file; on a
// direct file whole pages, and at last a partial page. 0: the file has no room for more.
size_t Transfer::fit_into_file(size_t want, bool* part_of_page) {
  if (core::broken("file_end")) return want;
  const uint64_t position = span_.base + span_.resume;
  const uint64_t room = room_of(slot_.fd);
  at_end_ = room <= span_.base + span_.reached;
  if (at_end_) return 0;
  want = static_cast<size_t>(std::min<uint64_t>(want, room - position));
  if (!slot_.direct || want % core::kPage == 0) return want;
  if (want > core::kPage) return core::round_down(want, core::kPage);
  *part_of_page = true;
  return want;
}

bool Transfer::again() {
  ++retries_;
  return false;
}

bool Transfer::advance(ssize_t result) {
  // ECANCELED: the kernel drops the queued requests of a thread that exits; nothing has moved.
  if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) {
    if (++stalls_ > kMaxStalls) return fail(span_.first->op == Io::Op::read ? -EAGAIN : -EIO);
    if (stalls_ > kPatientStalls) pause_one_ms();
    return again();
  }
  if (result < 0) return fail(static_cast<int>(result));
  if (span_.first->op == Io::Op::flush) {
    settle(span_.first, 0, 0);
    return leave_span();
  }

  if (at_end_) return finish_at_end_of_file();
  const size_t reached = span_.resume + static_cast<size_t>(result);
  if (reached > span_.reached) {
    span_.reached = reached;
    stalls_ = 0;
  } else if (span_.reached < span_.total) {
    ++stalls_;
  }
  if (span_.reached >= span_.total) {
    for (Io* io = span_.first; io != span_.end; io = io->next) settle(io, io->size, 0);
    return leave_span();
  }

  core::step("store.short");
  const uint64_t position = span_.base + span_.reached;
  // A direct read that ended at a full sector restarts up to a page further back. It then meets the
  // same end again and never returns 0.
  if (span_.first->op == Io::Op::read && (result == 0 || stalls_ != 0 || position % kSmallestSector != 0) &&
      ends_at(slot_.fd, position)) {
    return finish_at_end_of_file();
  }
  if (stalls_ > kPatientStalls) return fail(-EIO);
  // Direct descriptors refuse odd offsets: move the last partial page again.
  const uint64_t restart = slot_.direct ? std::max(core::round_down(position, core::kPage), span_.base) : position;
  span_.resume = static_cast<size_t>(restart - span_.base);
  return again();
}

// A read keeps the bytes that exist, or stays short; a write within the file is over.
bool Transfer::finish_at_end_of_file() {
  size_t start = 0;
  for (Io* io = span_.first; io != span_.end; start += io->size, io = io->next) {
    const size_t have = span_.reached > start ? std::min(span_.reached - start, io->size) : 0;
    const bool writes = io->op == Io::Op::write;
    const bool whole = have == io->size || io->short_read_is_zero || writes;
    if (!writes && whole && have < io->size) memset(static_cast<char*>(io->buffer) + have, 0, io->size - have);
    settle(io, have, whole ? 0 : -EIO);
  }
  return leave_span();
}

bool Transfer::fail(int error) {
  if (span_.first->next == span_.end) {
    settle(span_.first, span_.reached, error);
    return leave_span();
  }
  Io* io = span_.first;
  for (size_t start = 0; start + io->size <= span_.reached; io = io->next) {
    settle(io, io->size, 0);
    start += io->size;
  }
  enter_span(io, io->next);
  return again();
}

bool Transfer::leave_span() {
  if (span_.end == nullptr) return true;
  enter_span(span_.end, span_.end->next);
  return false;
}

}  // namespace vmem::store
