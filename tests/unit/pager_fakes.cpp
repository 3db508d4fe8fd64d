#include "pager_fakes.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/patience.h"
#include "core/outside_lock.h"
#include "core/step.h"
#include "pager_fakes_wait.h"

namespace vmem::pager::test {

using core::Status;
using store::Io;
using trap::FaultKind;

namespace {

constexpr int kDropped = 0xdd;

uintptr_t number(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}

void* map(size_t size, size_t align) {
  auto* raw = static_cast<std::byte*>(
      mmap(nullptr, size + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  auto* at = reinterpret_cast<std::byte*>(core::round_up(number(raw), align));
  if (at != raw) munmap(raw, static_cast<size_t>(at - raw));
  if (raw + align != at) munmap(at + size, static_cast<size_t>(raw + align - at));
  return at;
}

}  // namespace

FakeTrap::FakeTrap(bool move, bool write_protect, bool install) {
  caps_.move = move && !install;
  caps_.install = install;
  caps_.write_protect = write_protect;
  caps_.poison = true;
  caps_.name = "fake";
}

FakeTrap::~FakeTrap() {
  for (const auto& [base, size] : own_) munmap(reinterpret_cast<void*>(base), size);
}

void FakeTrap::called(const char* name) {
  ++calls_[name];
  changed_.notify_all();
}

void FakeTrap::set(uintptr_t at, size_t size, Page page) {
  if (page == Page::absent) {
    pages_.erase(pages_.lower_bound(at), pages_.lower_bound(at + size));
    return;
  }
  for (uintptr_t p = at; p < at + size; p += core::kPage) pages_[p] = page;
}

bool FakeTrap::all(uintptr_t at, size_t size, Page page) {
  for (uintptr_t p = at; p < at + size; p += core::kPage) {
    const auto it = pages_.find(p);
    if ((it == pages_.end() ? Page::absent : it->second) != page) return false;
  }
  return true;
}

void FakeTrap::wake_locked(uintptr_t at, size_t size) {
  const auto end = woken_.lower_bound(at + size);  // a range may have a million pages
  for (auto it = woken_.lower_bound(at); it != end; ++it) ++it->second;
  changed_.notify_all();
}

bool FakeTrap::touch(uintptr_t at, bool write, const std::function<void(uint64_t*)>& use) {
  const uintptr_t page = core::round_down(at, core::kPage);
  std::unique_lock lock(mutex_);
  bool met = false;
  const auto meet = [&] {
    if (!std::exchange(met, true)) ++met_[page];
    changed_.notify_all();
  };
  for (;;) {
    const auto it = pages_.find(page);
    const Page now = it == pages_.end() ? Page::absent : it->second;
    if (now == Page::failed) return meet(), false;
    if (now == Page::present || (now == Page::protected_ && !write)) {
      use(reinterpret_cast<uint64_t*>(at));
      return meet(), true;
    }
    const FaultKind kind = now == Page::protected_ ? FaultKind::write_protect
                           : write                 ? FaultKind::write
                                                   : FaultKind::read;
    reports_.push_back({trap::Event::Kind::fault, {page, kind, 0}});
    meet();
    const uint64_t before = woken_[page];
    wait_or_die(lock, changed_, "a touch to be answered", [&] { return woken_[page] != before; });
  }
}

bool FakeTrap::load(const void* at, uint64_t* value) {
  return touch(number(at), false, [&](uint64_t* p) { *value = *p; });
}

bool FakeTrap::store(void* at, uint64_t value) {
  return touch(number(at), true, [&](uint64_t* p) { *p = value; });
}

size_t FakeTrap::met(const void* at) {
  std::lock_guard lock(mutex_);
  return met_[core::round_down(number(at), core::kPage)];
}

void FakeTrap::until_met(const void* at, size_t times) {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "a thread to touch a page",
              [&] { return met_[core::round_down(number(at), core::kPage)] >= times; });
}

void FakeTrap::until_quiet() {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "the reports to be taken", [&] { return waiting_ && reports_.empty(); });
}

void FakeTrap::press(uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    reports_.push_back({trap::Event::Kind::pressure, {}, bytes});
    changed_.notify_all();
  }
  until_quiet();
}

void FakeTrap::tell_tunables() {
  {
    std::lock_guard lock(mutex_);
    reports_.push_back({trap::Event::Kind::tunables});
    changed_.notify_all();
  }
  until_quiet();
}

void FakeTrap::report(const void* at, FaultKind kind) {
  std::lock_guard lock(mutex_);
  reports_.push_back({trap::Event::Kind::fault, {core::round_down(number(at), core::kPage), kind, 0}});
  changed_.notify_all();
}

size_t FakeTrap::calls(const std::string& name) {
  std::lock_guard lock(mutex_);
  return calls_[name];
}

void FakeTrap::until_called(const std::string& name, size_t times) {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, name.c_str(), [&] { return calls_[name] >= times; });
}

void FakeTrap::pin_drop(size_t times) {
  std::lock_guard lock(mutex_);
  drop_pins_ = times;
}

void FakeTrap::stick(const void* at, int error) {
  std::lock_guard lock(mutex_);
  stuck_.erase(number(at));
  if (error != 0) stuck_[number(at)] = error;
}

int FakeTrap::stuck(uintptr_t at, size_t size) const {
  const auto it = stuck_.lower_bound(at);
  return it != stuck_.end() && it->first < at + size ? it->second : 0;
}

void FakeTrap::tear_take() {
  std::lock_guard lock(mutex_);
  tear_take_ = true;
}

void FakeTrap::tear_fill(int error) {
  std::lock_guard lock(mutex_);
  tear_fill_ = error;
}

void FakeTrap::refuse_unfail(size_t times) {
  std::lock_guard lock(mutex_);
  unfail_refusals_ = times;
}

void FakeTrap::tear_unfail() {
  std::lock_guard lock(mutex_);
  tear_unfail_ = true;
}

void FakeTrap::refuse_fail(size_t times) {
  std::lock_guard lock(mutex_);
  fail_refusals_ = times;
}

Status FakeTrap::attach(size_t size, size_t align, trap::Transfer, void** address) {
  core::must_be_outside("Trap::attach");
  void* at = map(size, align);
  if (at == nullptr) return core::error(ENOMEM, "no address space");
  std::lock_guard lock(mutex_);
  attached_.insert(number(at));
  own_[number(at)] = size;
  *address = at;
  return {};
}

Status FakeTrap::attach_at(void* address, size_t size, trap::Transfer) {
  core::must_be_outside("Trap::attach_at");
  if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
      MAP_FAILED)
    return core::system_error(errno, "attach_at");
  std::lock_guard lock(mutex_);
  attached_.insert(number(address));
  return {};
}

void FakeTrap::fail_fill(int error, size_t times, uint64_t stored) {
  std::lock_guard lock(mutex_);
  fill_error_ = error;
  fill_stored_ = stored;
  fill_failures_ = times;
}

Status FakeTrap::detach(void* address, size_t size) {
  core::must_be_outside("Trap::detach");
  std::lock_guard lock(mutex_);
  set(number(address), size, Page::failed);
  wake_locked(number(address), size);
  called("detach");
  return {};
}

Status FakeTrap::unmap(void* address, size_t) {
  core::must_be_outside("Trap::unmap");
  std::lock_guard lock(mutex_);
  // Stays mapped, as failed pages, so that late accesses of a test meet SIGBUS and not another
  // test's memory.
  called("unmap");
  return attached_.count(number(address)) != 0 ? Status() : core::error(EINVAL, "never attached");
}

Status FakeTrap::wait(std::span<trap::Event> out, int, size_t* count) {
  core::must_be_outside("Trap::wait");
  std::unique_lock lock(mutex_);
  waiting_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return interrupted_ || !reports_.empty(); });
  waiting_ = false;
  interrupted_ = false;
  for (*count = 0; *count < out.size() && !reports_.empty(); reports_.pop_front()) out[(*count)++] = reports_.front();
  return {};
}

void FakeTrap::interrupt() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  changed_.notify_all();
}

Status FakeTrap::fill(void* at, size_t size, void* frame, trap::Transfer transfer, trap::Protect protect) {
  core::must_be_outside("Trap::fill");
  std::lock_guard lock(mutex_);
  if (!all(number(at), size, Page::absent)) return core::error(EEXIST, "pages are there already");
  if (fill_failures_ != 0) {
    --fill_failures_;
    if (fill_stored_ != 0 && protect == trap::Protect::no) memcpy(frame, &fill_stored_, sizeof fill_stored_);
    called("fill refused");
    return core::error(fill_error_, "as the test wants it");
  }
  if (tear_fill_ != 0) {
    memcpy(at, frame, size / 2);
    if (transfer == trap::Transfer::move) memset(frame, 0, size / 2);
    set(number(at), size / 2, Page::present);
    wake_locked(number(at), size / 2);
    called("fill torn");
    return core::error(std::exchange(tear_fill_, 0), "half way, as the test wants it");
  }
  if (transfer == trap::Transfer::install && frames_.count(number(frame)) == 0)
    return core::error(ENOENT, "the frame has no memory");
  memcpy(at, frame, size);
  if (transfer == trap::Transfer::move) memset(frame, 0, size);
  set(number(at), size, protect == trap::Protect::yes ? Page::protected_ : Page::present);
  wake_locked(number(at), size);
  called("fill");
  return {};
}

Status FakeTrap::fill_zero(void* at, size_t size) {
  std::lock_guard lock(mutex_);
  if (!all(number(at), size, Page::absent)) return core::error(EEXIST, "pages are there already");
  memset(at, 0, size);
  set(number(at), size, Page::present);
  wake_locked(number(at), size);
  called("fill_zero");
  return {};
}

Status FakeTrap::take(void* at, size_t size, void* frame, trap::Transfer, trap::PinWait wait) {
  core::must_be_outside("Trap::take");
  std::lock_guard lock(mutex_);
  called(wait == trap::PinWait::none ? "take at once" : "take");
  if (take_error_ != 0) return core::error(take_error_, "pinned");
  if (const int error = stuck(number(at), size); error != 0) return core::error(error, "stuck");
  if (std::exchange(tear_take_, false)) {
    memcpy(frame, at, size / 2);
    memset(at, kDropped, size / 2);
    set(number(at), size / 2, Page::absent);
    return core::error(ENOTRECOVERABLE, "half way, as the test wants it");
  }
  memcpy(frame, at, size);
  memset(at, kDropped, size);
  set(number(at), size, Page::absent);
  return {};
}

Status FakeTrap::drop(std::span<const trap::Range> ranges) {
  core::must_be_outside("Trap::drop");
  std::lock_guard lock(mutex_);
  const bool pinned = drop_pins_ != 0;
  for (const trap::Range& r : pinned ? ranges.first(ranges.size() - 1) : ranges) {
    if (stuck(r.address, r.size) != 0) return core::error(EBUSY, "stuck");
    memset(reinterpret_cast<void*>(r.address), kDropped, r.size);
    set(r.address, r.size, Page::absent);
    called("drop of a range");
  }
  if (pinned) {
    --drop_pins_;
    called("drop of what is pinned");
    return core::error(EBUSY, "pinned");
  }
  called("drop");
  return {};
}

Status FakeTrap::protect(void* at, size_t size) {
  core::must_be_outside("Trap::protect");
  std::lock_guard lock(mutex_);
  for (uintptr_t p = number(at); p < number(at) + size; p += core::kPage) {
    if (auto it = pages_.find(p); it != pages_.end() && it->second == Page::present) it->second = Page::protected_;
  }
  called("protect");
  return {};
}

Status FakeTrap::unprotect(void* at, size_t size) {
  std::lock_guard lock(mutex_);
  for (uintptr_t p = number(at); p < number(at) + size; p += core::kPage) {
    if (auto it = pages_.find(p); it != pages_.end() && it->second == Page::protected_) it->second = Page::present;
  }
  wake_locked(number(at), size);
  called("unprotect");
  return {};
}

Status FakeTrap::fail(void* at, size_t size) {
  std::lock_guard lock(mutex_);
  if (fail_refusals_ != 0) {
    --fail_refusals_;
    called("fail refused");
    return core::error(ENOMEM, "as the test wants it");
  }
  if (!all(number(at), size, Page::absent)) return core::error(EEXIST, "the range is not absent");
  set(number(at), size, Page::failed);
  wake_locked(number(at), size);
  called("fail");
  return {};
}

Status FakeTrap::unfail(void* at, size_t size) {
  std::lock_guard lock(mutex_);
  if (unfail_refusals_ != 0) {
    --unfail_refusals_;
    called("unfail refused");
    return core::error(ENOMEM, "as the test wants it");
  }
  if (std::exchange(tear_unfail_, false)) {
    set(number(at), size / 2, Page::absent);
    called("unfail torn");
    return core::error(ENOMEM, "half way, as the test wants it");
  }
  set(number(at), size, Page::absent);
  wake_locked(number(at), size);
  called("unfail");
  return {};
}

Status FakeTrap::wake(void* at, size_t size) {
  core::step("fake.wake");
  std::lock_guard lock(mutex_);
  wake_locked(number(at), size);
  called("wake");
  return {};
}

Status FakeTrap::reserve_frames(size_t size, bool, void** address) {
  *address = map(size, core::kHugePage);
  return *address != nullptr ? Status() : core::error(ENOMEM, "no address space");
}

void FakeTrap::until_frames_below(uint64_t bytes) {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "frames to be released", [&] { return frame_bytes_ <= bytes; });
}

Status FakeTrap::populate_frames(void* address, size_t size, int) {
  std::lock_guard lock(mutex_);
  called("populate");
  if (!caps_.install) return core::error(EINVAL, "frames of this trap need no memory");
  if (frame_bytes_ + size > frame_limit_) return core::error(EDQUOT, "limit reached");
  if (!frames_.emplace(number(address), size).second) return core::error(EEXIST, "populated twice");
  frame_bytes_ += size;
  return {};
}

Status FakeTrap::release_frames(void* address, size_t size) {
  madvise(address, size, MADV_DONTNEED);
  std::lock_guard lock(mutex_);
  called("release");
  changed_.notify_all();
  if (!caps_.install) return {};
  if (frames_.erase(number(address)) == 0) return core::error(ENOENT, "no such frame");
  frame_bytes_ -= size;
  return {};
}

Status FakeTrap::knobs(trap::Knobs* out) {
  std::lock_guard lock(mutex_);
  if (!caps_.install) return core::error(EOPNOTSUPP, "no knobs");
  *out = knobs_;
  return {};
}

FakeEngine::FakeEngine() : thread_([this] { run(); }) {}

FakeEngine::~FakeEngine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void FakeEngine::hold(Io::Op op, bool on) {
  std::lock_guard lock(mutex_);
  if (on) {
    holds_.insert(op);
  } else {
    holds_.erase(op);
  }
}

void FakeEngine::until_held(size_t count) {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "requests to arrive", [&] { return held_.size() >= count; });
}

size_t FakeEngine::held() {
  std::lock_guard lock(mutex_);
  return held_.size();
}

std::vector<uint64_t> FakeEngine::held_offsets() {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> offsets;
  for (const store::Io* io : held_) offsets.push_back(io->offset);
  return offsets;
}

void FakeEngine::let_go() {
  std::lock_guard lock(mutex_);
  ready_.insert(ready_.end(), held_.begin(), held_.end());
  held_.clear();
  changed_.notify_all();
}

void FakeEngine::come(size_t bytes) {
  std::deque<Io*> reads;
  {
    const std::lock_guard lock(mutex_);
    reads = held_;
    std::erase_if(reads, [](const Io* io) { return io->op != Io::Op::read; });
    for (Io* io : reads) {
      const size_t told = std::exchange(io->parts.told, bytes);
      memcpy(static_cast<char*>(io->buffer) + told, files_[io->file].data() + io->offset + told, bytes - told);
    }
  }
  for (Io* io : reads)
    if (io->progress != nullptr) io->progress(*io, bytes);
}

void FakeEngine::fail(Io::Op op, int error) {
  std::lock_guard lock(mutex_);
  errors_[op] = error;
}

void FakeEngine::fill_disk(int error) {
  std::lock_guard lock(mutex_);
  full_ = error;
}

void FakeEngine::tear(int error, uint64_t nth) {
  std::lock_guard lock(mutex_);
  tear_error_ = error;
  tear_in_ = nth;
}

std::vector<uint8_t> FakeEngine::bytes(store::FileId file) {
  std::lock_guard lock(mutex_);
  return files_[file];
}
uint64_t FakeEngine::word(store::FileId file, size_t offset) {
  std::lock_guard lock(mutex_);
  const std::vector<uint8_t>& bytes = files_[file];
  uint64_t value = 0;
  if (offset + sizeof value <= bytes.size()) memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

uint64_t FakeEngine::count(Io::Op op) {
  std::lock_guard lock(mutex_);
  return counts_[op];
}

void FakeEngine::until_count(Io::Op op, uint64_t count) {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "requests to end", [&] { return ended_[op] >= count; });
}

void FakeEngine::until_idle() {
  std::unique_lock lock(mutex_);
  wait_or_die(lock, changed_, "all requests to end", [&] { return busy_ == 0; });
}

void FakeEngine::shorten(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  end_ = bytes;
}

void FakeEngine::flip_stored_bits() {
  std::lock_guard lock(mutex_);
  for (auto& [id, bytes] : files_) {
    for (size_t i = 0; i < bytes.size(); i += core::kPage) bytes[i] ^= 4;
  }
}

Status FakeEngine::add_file(int, store::FileId* id) {
  *id = 1;
  return {};
}

std::vector<std::vector<uint64_t>> FakeEngine::asked(Io::Op op) {
  std::lock_guard lock(mutex_);
  return asked_[op];
}

void FakeEngine::submit(std::span<Io* const> batch) {
  std::lock_guard lock(mutex_);
  busy_ += batch.size();
  std::map<Io::Op, std::vector<uint64_t>> offsets;
  for (const Io* io : batch) offsets[io->op].push_back(io->offset);
  for (auto& [op, of_one] : offsets) asked_[op].push_back(std::move(of_one));
  for (Io* io : batch) (holds_.count(io->op) != 0 ? held_ : ready_).push_back(io);
  changed_.notify_all();
}

void FakeEngine::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !ready_.empty(); });
    if (ready_.empty()) return;
    Io* io = ready_.front();
    ready_.pop_front();
    int error = errors_[io->op];
    std::vector<uint8_t>& file = files_[io->file];
    if (io->op == Io::Op::write && tear_in_ != 0 && --tear_in_ == 0) {
      error = tear_error_;
      if (file.size() < io->offset + io->size / 2) file.resize(io->offset + io->size / 2);
      memcpy(file.data() + io->offset, io->buffer, io->size / 2);
    }
    if (full_ != 0 && io->op == Io::Op::write && file.size() < io->offset + io->size) error = full_;
    if (error == 0 && io->op != Io::Op::flush) {
      if (file.size() < io->offset + io->size) file.resize(io->offset + io->size);
      uint8_t* at = file.data() + io->offset;
      if (io->op == Io::Op::read) {
        // After progress() no thread writes to the part it reported; the test may have changed the
        // bytes, though.
        const size_t told = memcmp(io->buffer, at, io->parts.told) == 0 ? io->parts.told : 0;
        memcpy(static_cast<char*>(io->buffer) + told, at + told, io->size - told);
      } else {
        memcpy(at, io->buffer, io->size);
      }
    }
    io->transferred = error == 0 ? io->size : 0;
    if (io->op == Io::Op::read && error == 0)
      io->transferred = std::min<size_t>(io->size, end_ - std::min<uint64_t>(end_, io->offset));
    io->result = -error;
    const Io::Op op = io->op;
    ++counts_[op];
    lock.unlock();
    io->done(*io);
    lock.lock();
    ++ended_[op];
    --busy_;
    changed_.notify_all();
  }
}

namespace {

std::mutex gate_mutex;
std::condition_variable gate_changed;
std::string gate_step;
size_t gate_reached = 0;
bool gate_open = true;

}  // namespace

Gate::Gate(const char* step) {
  {
    std::lock_guard lock(gate_mutex);
    gate_step = step;
    gate_reached = 0;
    gate_open = false;
  }
  core::step_hook.store(at);
}

Gate::~Gate() {
  open();
  core::step_hook.store(nullptr);
}

void Gate::at(const char* step) {
  std::unique_lock lock(gate_mutex);
  if (gate_open || gate_step != step) return;
  ++gate_reached;
  gate_changed.notify_all();
  wait_or_die(lock, gate_changed, "a gate to be opened", [] { return gate_open; });
}

void Gate::until_reached(size_t threads) {
  std::unique_lock lock(gate_mutex);
  wait_or_die(lock, gate_changed, "a step to be reached", [&] { return gate_reached >= threads; });
}

void Gate::open() {
  std::lock_guard lock(gate_mutex);
  gate_open = true;
  gate_changed.notify_all();
}

}  // namespace vmem::pager::test
