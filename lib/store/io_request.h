// A transfer between memory and a file, as an engine (engine.h) takes it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "core/process/guarded_read.h"
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

}  // namespace vmem::store
