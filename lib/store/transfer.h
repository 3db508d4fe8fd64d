// One transfer in flight: a run of neighbouring Ios that move together, or a part of a long one, however many system
// calls that takes.
// Both engines drive it the same way: prepare() -> system call -> advance(), until advance() says it is over.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "store/io.h"

namespace vmem::store {

inline constexpr size_t kMaxMergedBytes = size_t{1} << 20;
// What is longer goes in parts, each a transfer of its own. A part keeps a disk busy for 0.2 to 1 ms, which is what an
// urgent request may have to wait for it, and costs 10 us on its way.
inline constexpr size_t kPartBytes = size_t{2} << 20;
inline constexpr unsigned kMaxPieces = 256;  // buffers in one vectored call; below IOV_MAX (1024)

// Tests stand below the retry layer with this: it limits what one system call moves. Any thread; must not block.
class Injector {
 public:
  virtual ~Injector() = default;
  // want: bytes left in this attempt. The answer is clamped to 1 .. want.
  virtual size_t attempt_limit(const Io& io, size_t want) = 0;
};

// A descriptor as the engines know it.
struct FileSlot {
  int fd = -1;
  bool direct = false;  // opened with O_DIRECT: attempts start at multiples of 4 KiB
};

// What to do next, valid until advance(). pieces is empty for a flush.
struct Attempt {
  Io::Op op;
  FileId file;
  FileSlot slot;
  uint64_t offset;
  std::span<iovec> pieces;
  size_t bytes;
  bool unpopulated;   // some buffer has no memory yet
  bool in_region;     // some buffer stands in a region
  bool stalled;       // the attempt before moved nothing
  bool part_of_page;  // of a direct file, which takes none: for perform() alone
};

// Makes the attempt by a system call that waits for its end: what advance() is to be told. Not by the thread that
// serves faults, for which the call may have to wait.
ssize_t perform(const Attempt& attempt);

// The flags of a descriptor that transfers may be using; negative errno.
int descriptor_flags(int fd);
// In a forked child: another thread of its parent may have had the lock.
void renew_flags_lock();

// Not thread-safe: owned by the thread that drives it. Allocates only in the constructor.
class Transfer {
 public:
  Transfer();

  // chain: `count` Ios linked by next, same op and file, each starting where the one before it ends.
  void start(Io* chain, unsigned count, FileSlot slot);
  // `bytes` of `whole`, `from` its beginning. The chain is then an Io that stands for this part alone.
  void start_part(Io* whole, size_t from, size_t bytes, FileSlot slot);
  Attempt prepare(Injector* injector);
  // result: what the system call answered, bytes or a negative errno. True: over, every Io of the chain has its result
  // set. False: prepare() and issue again. May sleep up to a millisecond when the kernel says EAGAIN again and again.
  bool advance(ssize_t result);

  Io* chain() const { return chain_; }
  Io* whole() const { return whole_; }  // what the chain is a part of; nullptr: of nothing
  void leave_whole() { whole_ = nullptr; }
  uint64_t retries() const { return retries_; }
  Transfer* next_free = nullptr;  // the pool's

 private:
  // The Ios moving together now: the whole chain at first; after an error one at a time, so that one bad sector spoils
  // only the block it is in.
  struct Span {
    Io* first;
    Io* end;         // one past the last, nullptr at the end of the chain
    uint64_t base;   // file offset of first
    size_t total;    // bytes
    size_t reached;  // bytes from base that have moved, never shrinks
    size_t resume;   // where the attempt starts, <= reached
  };

  void enter_span(Io* first, Io* end);
  bool leave_span();  // true when the chain is over
  bool fail(int error);
  bool finish_at_end_of_file();
  size_t fit_into_file(size_t want, bool* part_of_page);
  bool again();

  Io* chain_ = nullptr;
  Io* whole_ = nullptr;
  Io part_;
  FileSlot slot_;
  Span span_{};
  bool at_end_ = false;  // within_file: the file has no room for more
  unsigned stalls_ = 0;  // attempts in a row that moved nothing
  uint64_t retries_ = 0;
  std::unique_ptr<iovec[]> pieces_;  // kMaxPieces
};

}  // namespace vmem::store
