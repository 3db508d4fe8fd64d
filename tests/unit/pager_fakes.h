// A trap, an engine and a space in memory, under which a test decides what happens when: touches are real threads, a
// read or write ends when the test says so, and a gate holds any named step of a move.
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

#include "store/io.h"
#include "store/space.h"
#include "trap/trap.h"

namespace vmem::pager::test {

// Ordinary memory with a page table of its own. Touches go through load() and store(), which park as the kernel parks a
// thread. Dropped memory is overwritten, so that whoever looks at it afterwards shows.
class FakeTrap final : public trap::Trap {
 public:
  // install: frames as the module's, which have memory only after populate_frames().
  explicit FakeTrap(bool move = true, bool write_protect = true, bool install = false);
  ~FakeTrap() override;

  // What a thread sees: false is SIGBUS. Blocks while the page is absent (or protected, for a store).
  bool load(const void* at, uint64_t* value);
  bool store(void* at, uint64_t value);
  // Loads and stores of the page so far: those that are over, and those that have been reported.
  size_t met(const void* at);
  void until_met(const void* at, size_t times);
  // Until the pager has taken every report and asks for more; the reports so far have been acted on.
  void until_quiet();
  // Reports that the machine wants this many bytes of frames back, or that what knobs() answers changed; returns when
  // that has been acted on.
  void press(uint64_t bytes);
  void tell_tunables();
  // Reports a fault that no thread has (any more).
  void report(const void* at, trap::FaultKind kind);
  size_t calls(const std::string& name);
  void until_called(const std::string& name, size_t times);
  // The next take() fails so.
  void fail_take(int error) {
    const std::lock_guard lock(mutex_);
    take_error_ = error;
  }
  // The next so many fill() fail so; half way, where they are not to protect, and undone when the first word had been
  // stored to, if it is to be that.
  void fail_fill(int error, size_t times, uint64_t stored = 0);
  // The next so many drop() meet a page that is pinned, when they have dropped all but the last range.
  void pin_drop(size_t times);
  // The next take() moves half of the block, cannot go back, and says so.
  void tear_take();
  // The next fill() puts half of the block in place and fails so: ENOTRECOVERABLE, or EEXIST as a kernel that has lost
  // count of what it moved.
  void tear_fill(int error);
  // The next so many fail() are refused.
  void refuse_fail(size_t times), refuse_unfail(size_t times);
  // The next unfail() is refused when half of the range is absent again.
  void tear_unfail();
  // Frames get no more memory than this together, and what they have now.
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
  void called(const char* name);
  void wake_locked(uintptr_t at, size_t size);

  trap::Caps caps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uintptr_t, Page> pages_;  // those not absent
  std::map<uintptr_t, size_t> met_;
  std::set<uintptr_t> attached_;
  std::map<uintptr_t, size_t> own_;  // .. by attach(); the rest is its caller's
  std::deque<trap::Event> reports_;
  std::map<uintptr_t, uint64_t> woken_;  // page that a thread met -> how often; a parked one leaves when it changes
  std::map<std::string, size_t> calls_;
  bool waiting_ = false, interrupted_ = false;
  int take_error_ = 0, fill_error_ = 0;
  uint64_t fill_stored_ = 0;
  size_t fill_failures_ = 0, drop_pins_ = 0, fail_refusals_ = 0, unfail_refusals_ = 0;
  bool tear_take_ = false, tear_unfail_ = false;
  int tear_fill_ = 0;
  std::map<uintptr_t, size_t> frames_;  // populated
  uint64_t frame_bytes_ = 0, frame_limit_ = UINT64_MAX;
  trap::Knobs knobs_;
};

// Files in memory. done() is called on a thread of its own.
class FakeEngine final : public store::Engine {
 public:
  FakeEngine();
  ~FakeEngine() override;

  void hold(store::Io::Op op, bool on);  // requests wait for let_go()
  void until_held(size_t count);
  size_t held();
  std::vector<uint64_t> held_offsets();  // in the order in which they were submitted
  void let_go();
  // The first so many bytes of the reads that are held have come, as an engine says it, on this thread.
  void come(size_t bytes);
  void fail(store::Io::Op op, int error);              // from now on; 0: no more
  void fill_disk(int error);                           // no write makes a file longer; 0: as before
  void tear(int error, uint64_t nth = 1);              // the nth write from now stops half way and fails so
  std::vector<uint8_t> bytes(store::FileId file);      // what it has
  uint64_t word(store::FileId file, size_t offset);    // 0 behind its end
  uint64_t count(store::Io::Op op);                    // answered, failures included
  void until_count(store::Io::Op op, uint64_t count);  // .. and what followed has been done
  // Offsets in the order in which they were asked for, together in one call.
  std::vector<std::vector<uint64_t>> asked(store::Io::Op op);
  void until_idle();             // nothing is submitted, under way or held
  void flip_stored_bits();       // of everything
  void shorten(uint64_t bytes);  // every file ends there, for reads

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
  // The next release() waits, and must have ended before the space does.
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

// Holds the threads that reach a named step (core/step.h) until it is opened. One at a time in the process.
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
