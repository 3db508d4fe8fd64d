// One transfer in flight: a run of adjacent Ios that move together, or a part of a long one, in as
// many system calls as it takes. Both engines repeat prepare(), the system call and advance(),
// until advance() returns true.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "store/io_request.h"

namespace vmem::store {

inline constexpr size_t kMaxMergedBytes = size_t{1} << 20;
// Longer Ios go in parts, each a transfer of its own. A part is small, so that an urgent request
// does not wait long behind it, and large enough that its fixed cost does not matter.
inline constexpr size_t kPartBytes = size_t{2} << 20;
inline constexpr unsigned kMaxPieces = 256;  // buffers in one vectored call; below IOV_MAX (1024)

// Tests insert this below the retry layer, to limit the bytes that one system call moves. Any
// thread; must not block.
class Injector {
 public:
  virtual ~Injector() = default;
  // want: bytes left in this attempt. The result is clamped to 1 .. want.
  virtual size_t attempt_limit(const Io& io, size_t want) = 0;
};

// A descriptor as the engines know it.
struct FileSlot {
  int fd = -1;
  bool direct = false;  // opened with O_DIRECT: attempts start at multiples of 4 KiB
};

// The next system call to make; valid until advance(). pieces is empty for a flush.
struct Attempt {
  Io::Op op;
  FileId file;
  FileSlot slot;
  uint64_t offset;
  std::span<iovec> pieces;
  size_t bytes;
  bool unpopulated;   // some buffer has no memory yet
  bool in_region;     // some buffer lies in a region
  bool stalled;       // the last attempt moved nothing
  bool part_of_page;  // of a direct file, which cannot write it directly: only perform() can
};

// Makes the attempt by a blocking system call. Returns the result for advance(). Not for the thread
// that serves faults: the call may have to wait for one.
ssize_t perform(const Attempt& attempt);

// Returns the flags of a descriptor that transfers may be using, or a negative errno.
int descriptor_flags(int fd);
// Call in a forked child: another thread of the parent may have held the lock.
void renew_flags_lock();

// Not thread-safe; the thread that drives it owns it. Allocates only in the constructor.
class Transfer {
 public:
  Transfer();

  // chain: `count` Ios linked by next, with the same op and file, each starting where the last one
  // ends.
  void start(Io* chain, unsigned count, FileSlot slot);
  // Starts the part of `whole` that has `bytes` bytes from position `from`. The chain is then one
  // Io for this part.
  void start_part(Io* whole, size_t from, size_t bytes, FileSlot slot);
  Attempt prepare(Injector* injector);
  // result: the system call's bytes or negative errno. Returns true when every Io of the chain has
  // its result; false: call prepare() and issue again. May sleep a millisecond after repeated
  // EAGAIN.
  bool advance(ssize_t result);

  Io* chain() const { return chain_; }
  Io* whole() const { return whole_; }  // the Io of which the chain is a part, or nullptr
  void leave_whole() { whole_ = nullptr; }
  uint64_t retries() const { return retries_; }
  Transfer* next_free = nullptr;  // used by the pool

 private:
  // The Ios that move together now. At first this is the whole chain; after an error, one Io at a
  // time, so that one bad sector spoils only its own block.
  struct Span {
    Io* first;
    Io* end;         // one past the last; nullptr at the end of the chain
    uint64_t base;   // file offset of first
    size_t total;    // bytes
    size_t reached;  // bytes from base that have moved; never shrinks
    size_t resume;   // where the next attempt starts, <= reached
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
  unsigned stalls_ = 0;  // consecutive attempts that moved nothing
  uint64_t retries_ = 0;
  std::unique_ptr<iovec[]> pieces_;  // kMaxPieces
};

}  // namespace vmem::store
