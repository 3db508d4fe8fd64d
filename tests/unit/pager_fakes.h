// A trap, an engine and a space in memory that the test controls: accesses are real threads, a read
// or write ends when the test says so, and a gate holds any named step of a transition.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/big_lock.h"
#include "core/types.h"
#include "store/engine.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager::test {

using core::BigLock;
using core::kHugePage;
using store::Io;

// Ordinary memory with its own page table. Accesses go through load() and store(), which park as
// the kernel parks a thread. Dropped memory is overwritten, so that a later look at it shows.
class FakeTrap : public trap::Trap {
 public:
  // install: frames as the module's, which have memory only after populate_frames().
  explicit FakeTrap(bool move = true, bool write_protect = true, bool install = false);
  ~FakeTrap() override;

  // The result of a thread's access: false is SIGBUS. Blocks while the page is absent (or
  // protected, for a store).
  bool load(const void* at, uint64_t* value);
  bool store(void* at, uint64_t value);
  // Loads and stores of the page so far: those that ended and those that were reported.
  size_t met(const void* at);
  void until_met(const void* at, size_t times);
  // Blocks until the pager has taken every report, acted on it, and asks for more.
  void until_quiet();
  // Reports that the machine wants this many bytes of frames back, or that the answer of knobs()
  // changed. Returns when the pager has acted on it.
  void press(uint64_t bytes);
  void tell_tunables();
  // Reports a fault of no (living) thread.
  void report(const void* at, trap::FaultKind kind);
  size_t calls(const std::string& name);
  void until_called(const std::string& name, size_t times);
  // The next take() fails with `error`.
  void fail_take(int error) {
    const std::lock_guard lock(mutex_);
    take_error_ = error;
  }
  // The next `times` fill() fail with `error`: half way if they are not to protect. With `stored`,
  // the fill is undone after the first word was stored to.
  void fail_fill(int error, size_t times, uint64_t stored = 0);
  // The next `times` drop() meet a pinned page, after they dropped all ranges but the last.
  void pin_drop(size_t times);
  // From now on take() of memory with `at` fails with `error`, and drop() of it with EBUSY; 0: no
  // longer.
  void stick(const void* at, int error);
  // The next take() moves half of the block, cannot undo it, and says so.
  void tear_take();
  // The next fill() puts half of the block in place and fails: with ENOTRECOVERABLE, or with EEXIST
  // as a kernel that lost count of what it moved.
  void tear_fill(int error);
  // The next `times` fail() (or unfail()) are refused.
  void refuse_fail(size_t times), refuse_unfail(size_t times);
  // The next unfail() is refused with half of the range absent again.
  void tear_unfail();
  // Limits the memory of all frames together; frame_bytes() is what they have now.
  void limit_frames(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    frame_limit_ = bytes;
  }
  uint64_t frame_bytes() {
    const std::lock_guard lock(mutex_);
    return frame_bytes_;
  }
  void until_frames_below(uint64_t bytes);
  void set_knobs(const trap::Knobs& knobs) {
    const std::lock_guard lock(mutex_);
    knobs_ = knobs;
  }

  const trap::Caps& caps() const override { return caps_; }
  core::Status attach(size_t size, size_t align, trap::Transfer transfer, void** address) override;
  core::Status attach_at(void* address, size_t size, trap::Transfer transfer) override;
  core::Status detach(void* address, size_t size) override;
  core::Status unmap(void* address, size_t size) override;
  core::Status wait(std::span<trap::Event> out, int timeout_ms, size_t* count) override;
  void interrupt() override;
  core::Status fill(void* at, size_t size, void* frame, trap::Transfer transfer, trap::Protect protect) override;
  core::Status fill_zero(void* at, size_t size) override;
  core::Status take(void* at, size_t size, void* frame, trap::Transfer transfer, trap::PinWait wait) override;
  core::Status drop(std::span<const trap::Range> ranges) override;
  core::Status protect(void* at, size_t size) override;
  core::Status unprotect(void* at, size_t size) override;
  core::Status fail(void* at, size_t size) override;
  core::Status unfail(void* at, size_t size) override;
  core::Status wake(void* at, size_t size) override;
  core::Status reserve_frames(size_t size, bool huge, void** address) override;
  core::Status populate_frames(void* address, size_t size, int node) override;
  core::Status release_frames(void* address, size_t size) override;
  core::Status knobs(trap::Knobs* out) override;

 private:
  enum class Page : uint8_t { absent, present, protected_, failed };
  bool touch(uintptr_t at, bool write, const std::function<void(uint64_t*)>& use);
  void set(uintptr_t at, size_t size, Page page);
  bool all(uintptr_t at, size_t size, Page page);
  int stuck(uintptr_t at, size_t size) const;
  void called(const char* name);
  void wake_locked(uintptr_t at, size_t size);

  trap::Caps caps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uintptr_t, Page> pages_;  // pages that are not absent
  std::map<uintptr_t, size_t> met_;
  std::set<uintptr_t> attached_;
  std::map<uintptr_t, size_t> own_;  // made by attach(); callers own the others
  std::deque<trap::Event> reports_;
  std::map<uintptr_t, uint64_t> woken_;  // page of a fault -> number of wakes; a parked thread leaves when it changes
  std::map<std::string, size_t> calls_;
  bool waiting_ = false, interrupted_ = false;
  int take_error_ = 0, fill_error_ = 0;
  std::map<uintptr_t, int> stuck_;
  uint64_t fill_stored_ = 0;
  size_t fill_failures_ = 0, drop_pins_ = 0, fail_refusals_ = 0, unfail_refusals_ = 0;
  bool tear_take_ = false, tear_unfail_ = false;
  int tear_fill_ = 0;
  std::map<uintptr_t, size_t> frames_;  // populated
  uint64_t frame_bytes_ = 0, frame_limit_ = UINT64_MAX;
  trap::Knobs knobs_;
};

// Files in memory. Calls done() on a thread of its own.
class FakeEngine final : public store::Engine {
 public:
  FakeEngine();
  ~FakeEngine() override;

  void hold(store::Io::Op op, bool on);  // requests wait for let_go()
  void until_held(size_t count);
  size_t held();
  std::vector<uint64_t> held_offsets();  // in the order of submission
  void let_go();
  // The first `bytes` of the held reads have arrived; reports so on this thread, as an engine does.
  void come(size_t bytes);
  void fail(store::Io::Op op, int error);              // from now on; 0: no more
  void fill_disk(int error);                           // no write extends a file; 0: normal again
  void tear(int error, uint64_t nth = 1);              // the nth write from now stops half way with `error`
  std::vector<uint8_t> bytes(store::FileId file);      // contents
  uint64_t word(store::FileId file, size_t offset);    // 0 beyond its end
  uint64_t count(store::Io::Op op);                    // answered, failures included
  void until_count(store::Io::Op op, uint64_t count);  // also until their callbacks have finished
  // Offsets in the order of submission, those of one call together.
  std::vector<std::vector<uint64_t>> asked(store::Io::Op op);
  void until_idle();             // nothing is submitted, under way or held
  void flip_stored_bits();       // of all files
  void shorten(uint64_t bytes);  // reads see files of that length

  const char* name() const override { return "fake"; }
  void submit(std::span<store::Io* const> batch) override;
  core::Status add_file(int, store::FileId* id) override;
  void remove_file(store::FileId) override {}
  store::EngineStats stats() const override { return {}; }

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<store::Io*> ready_, held_;
  std::map<store::FileId, std::vector<uint8_t>> files_;
  std::set<store::Io::Op> holds_;
  std::map<store::Io::Op, int> errors_;
  std::map<store::Io::Op, uint64_t> counts_, ended_;
  std::map<store::Io::Op, std::vector<std::vector<uint64_t>>> asked_;
  int full_ = 0;
  int tear_error_ = 0;
  uint64_t tear_in_ = 0, end_ = UINT64_MAX;
  uint64_t busy_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

class FakeSpace final : public store::Space {
 public:
  ~FakeSpace() override;
  core::Status allocate(size_t size, unsigned codec, std::span<core::Extent> out) override;
  void release(core::Extent extent) override;
  // The next release() waits; it must end before the space is destroyed.
  void hold_release();
  void until_release_held();
  void let_release_go();
  void refuse(core::Extent extent) override;
  bool expected_to_fail(core::Extent) const override { return refused() != 0; }
  size_t refused() const;
  store::FileId file(core::Extent) const override { return 0; }
  void set_budget(uint64_t bytes) override;
  uint64_t used() const override;
  core::OwnString describe(core::Extent extent) const override;
  size_t extents() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool hold_release_ = false, release_held_ = false;
  std::map<uint64_t, size_t> live_;  // offset -> size
  size_t refused_ = 0;
  uint64_t next_ = 0, used_ = 0, budget_ = UINT64_MAX;
};

// Holds the threads that reach a named step (core/step.h) until it is opened. One gate at a time
// per process.
class Gate {
 public:
  explicit Gate(const char* step);
  ~Gate();
  void until_reached(size_t threads = 1);
  void open();

 private:
  static void at(const char* step);
};

}  // namespace vmem::pager::test
