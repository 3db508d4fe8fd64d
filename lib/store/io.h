// The only door to io_uring: reads and writes of memory to files, in order of urgency, at bounded depth.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/guarded_read.h"
#include "core/status.h"
#include "core/types.h"

namespace vmem::store {

using FileId = uint32_t;

// One transfer. The submitter owns it and keeps it, and the buffer, alive and unchanged until done() has been called.
// Retries of short transfers, EINTR and EAGAIN happen inside; done() is the final word.
struct Io {
  enum class Op : uint8_t { read, write, flush /* fdatasync */ };
  Op op = Op::read;
  core::Urgency urgency = core::Urgency::fault;
  FileId file = 0;
  uint64_t offset = 0;  // bytes; direct files: a multiple of 4 KiB (512 where the file says so)
  void* buffer = nullptr;
  size_t size = 0;  // bytes
  // The buffer has no memory yet. The system finds and clears it (0.1 to 6 ms for 2 MiB) when the transfer is issued:
  // not on the thread that issues all others, where that can be had.
  bool unpopulated = false;
  // A read that meets the end of the file is success when `short_read_is_zero`: the rest of the buffer is zeroed.
  bool short_read_is_zero = false;
  // What is written stands in a region: the program may take the right to read it at any moment. Or drop a page: who
  // issues the transfer then waits for a fault to be served, and must not be the one who serves it
  // (core/fault_server.h).
  bool in_region = false;
  core::Absent absent = core::Absent::zeros;  // .. and what a page of it is that is not mapped
  // A write that never makes the file longer: what lies beyond its end when the kernel is called is left out, which is
  // success; `transferred` says how much there was room for. Ends anywhere, also on a direct file.
  bool within_file = false;
  // Called once, on an I/O thread, with no lock of the engine held. It may submit. It must not wait for another Io.
  void (*done)(Io& io) = nullptr;
  // Of a long read: its first `bytes` have come, and nobody writes to them any more. By the rules of done(), never
  // after it and never two at once for one Io; each time with more bytes than before, by 2 MiB at most, and fewer than
  // all. An engine may leave it out, also from somewhere on: done() alone says that all has come.
  void (*progress)(Io& io, size_t bytes) = nullptr;
  void* user = nullptr;

  size_t transferred = 0;  // (out) bytes that came from or went to the file, before any zeroing
  int result = 0;          // (out) 0 or a negative errno; a transfer that stays short is -EIO, a full disk -ENOSPC
                           // and -EAGAIN a read that the kernel has put off for 200 ms
  Io* next = nullptr;      // the engine's while queued

  // The engine's, of one that goes in parts. Places are bytes from the beginning.
  struct Parts {
    size_t begun = 0;      // parts up to here have been issued
    size_t moved = 0;      // up to here every byte has moved, or may yet: where the first part ended that came short
    size_t last = 0;       // behind the last byte that moved
    size_t failed_at = 0;  // the part that failed, of several the first
    int error = 0;         // .. and with what
    unsigned under_way = 0;
    size_t told = 0;       // by progress()
    bool untold = false;   // it is to be called
    bool telling = false;  // it is being called
  };
  Parts parts;

  // An engine's that stands on another: who is called in the end, and how far a write in parts has come.
  struct Layer {
    void (*done)(Io& io) = nullptr;
    void (*progress)(Io& io, size_t bytes) = nullptr;
    void* engine = nullptr;
    size_t begun = 0, settled = 0;
    int error = 0;
  };
  Layer layer;
};

// Something that may have to wait for a fault to be served. Its owner keeps it until it has run.
struct Errand {
  void (*run)(Errand& errand) = nullptr;
  Errand* next = nullptr;  // the engine's
};

struct EngineOptions {
  unsigned depth = 16;   // transfers in flight, all files together
  unsigned threads = 1;  // completion threads (io_uring: one ring each; threads engine: workers = depth)
  bool allow_io_uring = true;
  bool require_io_uring = false;
};

struct EngineStats {
  uint64_t reads, read_bytes, writes, write_bytes, merged, retries, errors;
};

// Thread-safe. submit() never blocks on I/O and never fails: it queues and wakes an I/O thread, and only those enter
// the kernel (engine_base.h says why). An eighth of the depth is kept for fault and acquire. What exceeds the depth
// waits inside in order of urgency, the caller bounds how much (one Io per frame in flight). Neighbouring requests of
// one submit() call on one file, same op, adjacent offsets, are merged into one vectored transfer of at most 1 MiB
// (each still gets its own done()).
//
// One of more than 2 MiB goes in parts that end at multiples of 2 MiB in the file, in order, as many at once as slots
// of the depth are free: what is more urgent passes between them, and of two that are equally urgent the younger one's
// parts follow the older one's. Of a read whose progress() is asked for there are four at once while none that is
// equally urgent stands behind it: of more all would come at the same time, in the end, and so many keep a disk busy
// (one of 3.5 GB/s, 2 MiB: depth 4 nearly saturates it). What is less urgent has the slots that would be free if all of
// them were under way. It is done when none of its parts is under way any more. Of several that failed the first by
// offset says the result; what had not been issued by then is not. `transferred` ends before the first part that failed
// or came short, and where `short_read_is_zero` all bytes behind it are zeros, even if the file grew meanwhile.
class Engine {
 public:
  virtual ~Engine() = default;  // waits for everything in flight
  virtual const char* name() const = 0;
  virtual void submit(std::span<Io* const> batch) = 0;
  // Makes a file known (registered with the ring). The descriptor stays the caller's; remove before closing it.
  virtual core::Status add_file(int fd, FileId* id) = 0;
  // The same for a file that holds blocks for this process alone: an engine may keep other bytes there than it is
  // given.
  virtual core::Status add_store(int fd, FileId* id) { return add_file(fd, id); }
  virtual void remove_file(FileId id) = 0;
  virtual EngineStats stats() const = 0;
  // Calls ready(user) on an I/O thread whenever `fd` polls readable, so that one thread can serve what comes from there
  // and the transfers it causes without waking another. ready() follows the rules of done(). One descriptor an engine.
  // False: this engine cannot; poll yourself.
  virtual bool watch(int /*fd*/, void (* /*ready*/)(void*), void* /*user*/) { return false; }
  // Ends it; ready() is not running and will not be called again when this returns. Not from ready().
  virtual void unwatch() {}
  // Runs the errand: now, or soon on an I/O thread that serves no faults if this thread does. By the rules of done().
  virtual void run_errand(Errand& errand) { errand.run(errand); }
};

// io_uring where it is permitted, else pread/pwrite threads; says once which and why.
// In a forked child, which begins anew: nothing of its parent's is left. Async-signal-safe.
void renew_in_child();
core::Status make_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);

// A file opened for direct I/O where the file system allows it, buffered otherwise.
struct OpenedFile {
  int fd = -1;
  bool direct = false;
  bool block_device = false;
  uint64_t size = 0;               // bytes, when opened
  uint64_t device = 0, inode = 0;  // 0: not known
  uint32_t memory_align = 1;       // of buffers
  uint32_t offset_align = 1;       // of offsets and sizes
};

}  // namespace vmem::store
