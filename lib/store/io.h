// The only interface to io_uring: moves memory to and from files, in order of urgency, at bounded
// depth.
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

// One transfer. The submitter owns it, and keeps it and its buffer alive and unchanged until done()
// is called. Short transfers, EINTR and EAGAIN are retried inside; done() reports the final result.
struct Io {
  enum class Op : uint8_t { read, write, flush /* fdatasync */ };
  Op op = Op::read;
  core::Urgency urgency = core::Urgency::fault;
  FileId file = 0;
  uint64_t offset = 0;  // bytes; direct files: a multiple of 4 KiB (512 if the file allows it)
  void* buffer = nullptr;
  size_t size = 0;  // bytes
  // The buffer has no memory yet. The kernel finds and clears it when the transfer is issued, which
  // takes time. If possible, this does not happen on the thread that issues all others.
  bool unpopulated = false;
  // A read that meets the end of the file succeeds, and the rest of the buffer is zeroed.
  bool short_read_is_zero = false;
  // The bytes to write lie in a region, and the program may revoke the right to read them at any
  // moment. If it drops a page, the issuing thread waits for a fault to be served. It must not be
  // the thread that serves it (core/fault_server.h).
  bool in_region = false;
  core::Absent absent = core::Absent::zeros;  // the meaning of an unmapped page there
  // A write that never extends the file. Bytes beyond the end of the file at the time of the system
  // call are left out, which is success. `transferred` says how many fitted. May end anywhere, even
  // on a direct file.
  bool within_file = false;
  // Called once, on an I/O thread, with no lock of the engine held. It may submit. It must not wait
  // for another Io.
  void (*done)(Io& io) = nullptr;
  // Called when the first `bytes` of a long read have arrived; they no longer change. Follows the
  // rules of done(). It never runs after done() or twice at once for one Io. Each call reports more
  // bytes than the last, by at most 2 MiB, and fewer than all. An engine may omit calls, even all
  // later ones; only done() reports that all bytes have arrived.
  void (*progress)(Io& io, size_t bytes) = nullptr;
  void* user = nullptr;

  size_t transferred = 0;  // (out) bytes read or written, before any zeroing
  // (out) 0 or a negative errno: -EIO if it stays short, -ENOSPC if the disk is full, -EAGAIN for a
  // read that the kernel has put off for 200 ms.
  int result = 0;
  Io* next = nullptr;  // the engine's, while queued

  // Used by the engine for an Io in parts. Positions are bytes from the start of the Io.
  struct Parts {
    size_t begun = 0;  // end of the parts that have been issued
    // All bytes before this have moved or may still move; ends where the first short part ended.
    size_t moved = 0;
    size_t last = 0;       // end of the last byte that moved
    size_t failed_at = 0;  // the failed part with the lowest position
    int error = 0;         // its error
    unsigned under_way = 0;
    size_t told = 0;       // by progress()
    bool untold = false;   // a call is due
    bool telling = false;  // a call is running
  };
  Parts parts;

  // Used by an engine on top of another: the original callbacks, and how far a write in pieces has
  // come.
  struct Layer {
    void (*done)(Io& io) = nullptr;
    void (*progress)(Io& io, size_t bytes) = nullptr;
    void* engine = nullptr;
    size_t begun = 0, settled = 0;
    int error = 0;
  };
  Layer layer;
};

// Work that may have to wait for a fault to be served. Its owner keeps it until it has run.
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

// Thread-safe. submit() never blocks on I/O and never fails: it queues and wakes an I/O thread.
// Only I/O threads enter the kernel (engine_base.h says why).
//
// - An eighth of the depth is kept for fault and acquire.
// - Transfers beyond the depth wait inside, in order of urgency. The caller bounds their number
//   (one Io in flight per frame).
// - Adjacent requests of one submit() call (one file, same op, contiguous offsets) are merged into
//   one vectored transfer of at most 1 MiB. Each still gets its own done().
//
// An Io of more than 2 MiB goes in parts that end at multiples of 2 MiB in the file:
//
// - Parts are issued in order, as many at once as slots are free. More urgent transfers pass
//   between them. Parts of an Io follow those of an equally urgent older one.
// - A read with progress() has only four parts at once while no equally urgent Io stands behind it.
//   Four keep a disk busy; with more, all would arrive together at the end. Less urgent transfers
//   get the slots that would be free if all its parts were in flight.
// - After a failure no further parts are issued. The Io is done when none of its parts is in flight
//   any more. If several failed, the first by offset gives the result.
// - `transferred` ends before the first part that failed or came short. With `short_read_is_zero`
//   all bytes behind it are zeros, even if the file grew during the read.
class Engine {
 public:
  virtual ~Engine() = default;  // waits for everything in flight
  virtual const char* name() const = 0;
  virtual void submit(std::span<Io* const> batch) = 0;
  // Registers a file, with the rings too. The descriptor stays the caller's; remove the file before
  // closing it.
  virtual core::Status add_file(int fd, FileId* id) = 0;
  // Same for a file that holds blocks of this process alone: an engine may store other bytes than
  // it is given.
  virtual core::Status add_store(int fd, FileId* id) { return add_file(fd, id); }
  virtual void remove_file(FileId id) = 0;
  virtual EngineStats stats() const = 0;
  // Calls ready(user) on an I/O thread whenever `fd` polls readable. So one thread can serve its
  // events and the transfers they cause without waking another. ready() follows the rules of
  // done(). One descriptor per engine. Returns false if the engine cannot; then the caller polls.
  virtual bool watch(int /*fd*/, void (* /*ready*/)(void*), void* /*user*/) { return false; }
  // Ends watch(). When it returns, ready() is not running and will not be called again. Must not be
  // called from ready().
  virtual void unwatch() {}
  // Runs the errand by the rules of done(): now, or, if this thread serves faults, soon on another
  // thread.
  virtual void run_errand(Errand& errand) { errand.run(errand); }
};

// Call in a forked child, which starts anew: drops the parent's state. Async-signal-safe.
void renew_in_child();
// Makes an io_uring engine where that is permitted, otherwise an engine of pread/pwrite threads.
// Logs once why.
core::Status make_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);

// A file opened for direct I/O if the file system allows it, otherwise buffered.
struct OpenedFile {
  int fd = -1;
  bool direct = false;
  bool block_device = false;
  uint64_t size = 0;               // bytes, when opened
  uint64_t device = 0, inode = 0;  // 0: unknown
  uint32_t memory_align = 1;       // of buffers
  uint32_t offset_align = 1;       // of offsets and sizes
};

}  // namespace vmem::store
