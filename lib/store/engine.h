// The only interface to io_uring: moves memory to and from files, in order of urgency, at bounded
// depth. Also the registry of engines.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/status.h"
#include "store/io_request.h"

namespace vmem::store {

// Work that may have to wait for a fault to be served. Its owner keeps it until it has run.
struct Errand {
  void (*run)(Errand& errand) = nullptr;
  Errand* next = nullptr;  // the engine's
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
  // Makes a short read on this thread, outside queues and depth, without done(). Needs no memory.
  // Returns false if the engine cannot, or if it failed: submit() it then.
  virtual bool read_here(Io& /*io*/) { return false; }
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

enum class EngineKind : uint8_t {
  automatic,  // the first engine of kEngines that works here; logs once why an earlier one does not
  io_uring,   // rings of the kernel, or an error
  threads,    // pread and pwrite on threads, which works everywhere
};

struct EngineOptions {
  unsigned depth = 16;   // transfers in flight, all files together
  unsigned threads = 1;  // completion threads (io_uring: one ring each; threads engine: workers = depth)
  EngineKind kind = EngineKind::automatic;
};

// They block every signal on their threads: the application's handlers belong on the application's
// threads.
core::Status make_first_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);
core::Status make_uring_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);
core::Status make_thread_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);
const char* advice_on_uring(int error);

// A row of the registry.
struct EngineEntry {
  EngineKind kind;
  std::string_view name;  // value of setting io_engine
  core::Status (*make)(const EngineOptions& options, std::unique_ptr<Engine>* out);
  const char* (*advice)(int error) = nullptr;  // says how to make it work; null for the last one
};
// The values of setting io_engine, in the order of EngineKind; automatic tries the others in this
// order, fastest first. A new engine needs its own source, and a kind, a factory and a row here.
inline constexpr EngineEntry kEngines[] = {
    {EngineKind::automatic, "auto", make_first_engine},
    {EngineKind::io_uring, "io_uring", make_uring_engine, advice_on_uring},
    {EngineKind::threads, "threads", make_thread_engine},
};
// Returns automatic for a name that is not in the table.
EngineKind engine_kind(std::string_view name);
// Makes the engine of options.kind.
core::Status make_engine(const EngineOptions& options, std::unique_ptr<Engine>* out);

}  // namespace vmem::store
