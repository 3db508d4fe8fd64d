// The trap without a module: one userfaultfd for all ranges of the process.
//
// States of a page of an attached range, and the calls that change them:
//
//   absent --fill, fill_zero--> present <--protect / unprotect--> protected
//     ^  ^------take, drop--------'  '-----------take, drop-----------'
//     '--unfail-- failed <--fail-- absent
//
// An access of an absent page, and a store to a protected one, parks its thread in the kernel and
// queues a message for wait(). All other calls change page tables; none waits for a parked thread.
//
// Frames live in mappings of their own, registered for write protection alone: the kernel moves
// pages only into a registered mapping, and this kind never traps.
//
// Huge pages:
// - A huge page that moves to a place with a page table is split, which is slow, and it stays
//   split.
// - Small pages leave page tables behind. So do faults, unless the range asks for huge pages.
// - But a store to an absent page of a range that asks for huge pages is costly: the kernel
//   allocates and clears a huge page, outside any budget, before it notices the trap.
// - So where MADV_DONTNEED frees empty tables, ranges ask for small pages, and fill() drops the
//   absent range first. Elsewhere they ask for huge pages.
//
// Closing the descriptor would turn absent pages into zeros. So the destructor puts SIGBUS over
// ranges that attach() made and that are still attached. The caller must end ranges of attach_at()
// first.
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/log.h"
#include "core/outside_lock.h"
#include "core/process/fork.h"
#include "core/process/guarded_read.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/mapping.h"
#include "trap/os.h"
#include "trap/probe.h"
#include "trap/signal_faults.h"
#include "trap/stuck_pages.h"
#include "trap/taking.h"
#include "trap/transfer.h"
#include "trap/trap.h"
#include "trap/waking.h"

namespace vmem::trap {

namespace {

using core::Status;

uintptr_t at(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

class UserfaultTrap final : public Trap {
 public:
  UserfaultTrap(const Probed& probed, int event, int empty_file, CoreDump dump, std::unique_ptr<SignalFaults> faults)
      : fd_(probed.fd),
        self_(probed.self),
        pagemap_(probed.pagemap),
        event_(event),
        empty_file_(empty_file),
        frees_tables_(probed.frees_tables),
        dump_(dump),
        caps_(probed.caps),
        faults_(std::move(faults)),
        waking_(probed.fd, probed.pagemap, probed.caps, faults_.get()),
        taking_(probed.fd, probed.pagemap, probed.caps, probed.take_by_remap, waking_) {}
  ~UserfaultTrap() override;
  Status start() { return faults_ != nullptr ? faults_->start(fd_, pagemap_) : Status(); }
  UserfaultTrap(const UserfaultTrap&) = delete;
  UserfaultTrap& operator=(const UserfaultTrap&) = delete;

  const Caps& caps() const override { return caps_; }
  Status attach(size_t size, size_t align, Transfer transfer, void** address) override {
    return attach_blocks(size, align, 0, transfer, 0, address);
  }
  Status attach_blocks(size_t size, size_t align, size_t block_size, Transfer transfer, uintptr_t near,
                       void** address) override;
  Status attach_at(void* address, size_t size, Transfer transfer) override;
  Status dump(void* address, size_t size, CoreDump dump) override;
  Status detach(void* address, size_t size) override;
  Status unmap(void* address, size_t size) override;
  Status wait(std::span<Event> out, int timeout_ms, size_t* count) override;
  bool serve_by(Serve serve, void* user) override {
    if (faults_ != nullptr) faults_->serve_by(serve, user);
    return faults_ != nullptr;
  }
  int event_descriptor() const override { return faults_ != nullptr ? faults_->news() : fd_; }
  void interrupt() override;
  Status fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) override;
  Status fill_zero(void* address, size_t size) override;
  Status take(void* address, size_t size, void* frame, Transfer transfer, PinWait wait) override;
  Status put_back(void* address, size_t size, void* frame) override;
  Status drop(std::span<const Range> ranges) override;
  Status protect(void* address, size_t size) override;
  Status unprotect(void* address, size_t size) override;
  Status fail(void* address, size_t size) override;
  Status unfail(void* address, size_t size) override;
  Status map_file(void* address, size_t size, int fd, uint64_t offset, bool shared) override;
  Status unmap_file(void* address, size_t size) override;
  Status wake(void* address, size_t size) override;
  Status reserve_frames(size_t size, bool huge, void** address) override;
  Status populate_frames(void* address, size_t size, int node) override;
  Status release_many(std::span<const Range> ranges) override;

 private:
  Status check_transfer(const char* call, Transfer transfer, uintptr_t start, size_t size, uintptr_t frame) const;
  Status clear_tables(uintptr_t start, size_t size);
  Status make_anew(void* address, size_t size);
  Status arm_range(uintptr_t start, size_t size, Transfer transfer, CoreDump dump);
  CoreDump dump_of(const void* address) const;
  Status take_pages(uintptr_t start, size_t size, uintptr_t frame) {
    return taking_.take(start, size, frame, dump_of(reinterpret_cast<void*>(start)), PinWait::brief);
  }
  Status place_pages(uintptr_t start, size_t size, uintptr_t frame, Transfer transfer, Protect protect);
  Status undo_fill(uintptr_t start, size_t size, size_t done, uintptr_t frame, Transfer transfer, Protect protect,
                   Status why);
  Status put_again(uintptr_t start, size_t size);
  Status fill_loudly(uintptr_t start, size_t size, uintptr_t frame, Transfer transfer, Protect protect);
  Outcome copy_rest(uintptr_t start, size_t size, uintptr_t frame, size_t moved);
  Status drop_unseen(std::span<const Range> ranges);
  void drop_batch(std::span<const Range> ranges, size_t* dropped);
  size_t read_faults(std::span<Event> out, int* error);

  const int fd_, self_, pagemap_, event_, empty_file_;
  const bool frees_tables_;
  const CoreDump dump_;  // default for ranges without a setting
  const Caps caps_;
  RangeMap ranges_;
  const std::unique_ptr<SignalFaults> faults_;  // nullptr: the kernel sends messages
  Waking waking_;
  Taking taking_;
};

UserfaultTrap::~UserfaultTrap() {
  Range left;
  while (ranges_.first_owned(&left)) {
    core::log(core::Level::error, "trap: %s at 0x%zx still attached at the end; accesses of it get SIGBUS from now on",
              core::human_bytes(left.size).c_str(), left.address);
    if (!detach(reinterpret_cast<void*>(left.address), left.size).ok()) {
      // If the descriptor leaks, accesses of the range hang; if it is closed, they read zeros in
      // place of data.
      core::log(core::Level::error, "trap: cannot end it; accesses of its ranges will wait forever");
      return;
    }
  }
  for (const int fd : {fd_, event_, empty_file_, self_, pagemap_}) core::close_and_forget(fd);
}

Status UserfaultTrap::arm_range(uintptr_t start, size_t size, Transfer transfer, CoreDump dump) {
  const bool moves = transfer == Transfer::move;
  const uint64_t mode = os::kRegisterMissing | (caps_.write_protect ? os::kRegisterWp : 0);
  return arm(fd_, start, size, mode, moves && !frees_tables_ ? HugePages::yes : HugePages::no, dump);
}

CoreDump UserfaultTrap::dump_of(const void* address) const {
  RangeMap::Entry entry;
  return ranges_.find(at(address), &entry) ? entry.dump : dump_;
}

Status UserfaultTrap::dump(void* address, size_t size, CoreDump dump) {
  if (Status s = check_range("dump", at(address), size); !s.ok()) return s;
  const int error = os::advise(at(address), size, dump == CoreDump::no ? MADV_DONTDUMP : MADV_DODUMP);
  if (error != 0)
    return core::system_error(error, "cannot keep %zu bytes at %p %s core dumps", size, address,
                              dump == CoreDump::no ? "out of" : "in");
  if (ranges_.set_dump(at(address), size, dump)) return {};
  return core::error(EINVAL, "dump: no range of %zu bytes is attached at %p", size, address);
}

Status UserfaultTrap::attach_blocks(size_t size, size_t align, size_t /*block_size*/, Transfer transfer, uintptr_t near,
                                    void** address) {
  core::must_be_outside("Trap::attach");
  if (!core::is_power_of_two(align) || align < core::kPage)
    return core::error(EINVAL, "attach: alignment %zu must be a power of two of at least %zu", align, core::kPage);
  if (Status s = check_transfer("attach", transfer, 0, size, 0); !s.ok()) return s;
  if (transfer == Transfer::move) align = std::max(align, core::kHugePage);
  uintptr_t start = 0;
  if (Status s = reserve_space(size, align, &start, near); !s.ok()) return s;
  if (Status s = arm_range(start, size, transfer, dump_); !s.ok()) {
    munmap(reinterpret_cast<void*>(start), size);
    return s;
  }
  taking_.prepare();
  try {
    ranges_.set(start, size, transfer, true, dump_);
  } catch (const std::bad_alloc&) {
    munmap(reinterpret_cast<void*>(start), size);
    return core::error(ENOMEM, "attach: no memory to record %zu bytes", size);
  }
  *address = reinterpret_cast<void*>(start);
  return {};
}

Status UserfaultTrap::attach_at(void* address, size_t size, Transfer transfer) {
  core::must_be_outside("Trap::attach_at");
  if (Status s = check_transfer("attach_at", transfer, at(address), size, 0); !s.ok()) return s;
  const CoreDump dump = dump_of(address);
  if (Status s = replace_with_space(at(address), size); !s.ok()) return s;
  core::step("trap.attach_at.shut");
  // On failure the range stays inaccessible: accesses fail visibly and read nothing.
  if (Status s = arm_range(at(address), size, transfer, dump); !s.ok()) return s;
  taking_.prepare();
  try {
    ranges_.set(at(address), size, transfer, false, dump);
  } catch (const std::bad_alloc&) {  // as for any other failure here
    replace_with_space(at(address), size).ignore();
    return core::error(ENOMEM, "attach_at: no memory to record %zu bytes", size);
  }
  return {};
}

Status UserfaultTrap::detach(void* address, size_t size) {
  core::must_be_outside("Trap::detach");
  if (Status s = check_range("detach", at(address), size); !s.ok()) return s;
  Status s = replace_with_sigbus(empty_file_, at(address), size);
  core::step("trap.detach.mapped");
  // Parked threads are queued at the descriptor, not at the mapping that is gone: wake them to look
  // again.
  s.ok() ? waking_.wake_where_nothing_is(at(address), size) : waking_.wake(at(address), size);
  if (s.ok()) ranges_.erase(at(address), size);
  return s;
}

Status UserfaultTrap::unmap(void* address, size_t size) {
  core::must_be_outside("Trap::unmap");
  if (Status s = check_range("unmap", at(address), size); !s.ok()) return s;
  if (munmap(address, size) != 0) {
    Status s = core::system_error(errno, "unmap: cannot unmap %zu bytes at %p", size, address);
    if (shut(fd_, pagemap_, at(address), size)) ranges_.erase(at(address), size);
    waking_.wake(at(address), size);
    return s;
  }
  ranges_.erase(at(address), size);
  waking_.wake(at(address), size);
  return {};
}

size_t UserfaultTrap::read_faults(std::span<Event> out, int* error) {
  std::array<uffd_msg, 64> messages;
  size_t count = 0;
  *error = 0;
  if (faults_ != nullptr) return faults_->take(out);
  while (count < out.size()) {
    const size_t room = std::min(messages.size(), out.size() - count);
    const ssize_t got = read(fd_, messages.data(), room * sizeof messages[0]);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) *error = errno;
      break;
    }
    const size_t read_now = static_cast<size_t>(got) / sizeof messages[0];
    for (size_t i = 0; i < read_now; ++i) {
      const uffd_msg& m = messages[i];
      if (m.event != UFFD_EVENT_PAGEFAULT) continue;  // the only kind that is enabled
      const uint64_t flags = m.arg.pagefault.flags;
      out[count++] = {Event::Kind::fault,
                      {core::round_down(m.arg.pagefault.address, core::kPage),
                       (flags & UFFD_PAGEFAULT_FLAG_WP) != 0      ? FaultKind::write_protect
                       : (flags & UFFD_PAGEFAULT_FLAG_WRITE) != 0 ? FaultKind::write
                                                                  : FaultKind::read,
                       m.arg.pagefault.feat.ptid}};
    }
    if (read_now < room) break;
  }
  return count;
}

Status UserfaultTrap::wait(std::span<Event> out, int timeout_ms, size_t* count) {
  core::must_be_outside("Trap::wait");
  *count = 0;
  if (out.empty()) return core::error(EINVAL, "wait: no room for an event");
  int error = 0;
  // Under load an event is always waiting: skip the poll.
  *count = read_faults(out, &error);
  if (*count != 0) return {};
  if (error == 0) {
    std::array<pollfd, 2> wanted{{{event_descriptor(), POLLIN, 0}, {event_, POLLIN, 0}}};
    const int ready = poll(wanted.data(), wanted.size(), timeout_ms);
    // -EINVAL: RLIMIT_NOFILE is below two. Look for faults every millisecond then.
    if (ready < 0 && errno == EINVAL) usleep(1000);
    if (ready < 0 && errno != EINTR && errno != EINVAL) return core::system_error(errno, "wait: poll");
    if (ready <= 0) return {};
    if ((wanted[1].revents & POLLIN) != 0) {
      uint64_t times;
      if (read(event_, &times, sizeof times) < 0 && errno != EAGAIN)
        return core::system_error(errno, "wait: reading the eventfd");
      return {};
    }
    *count = read_faults(out, &error);
  }
  if (error != 0) return core::system_error(error, "wait: reading the userfaultfd");
  return {};
}

void UserfaultTrap::interrupt() {
  const int saved = errno;
  const uint64_t one = 1;
  // EAGAIN: 2^64 - 2 interrupts are pending; one more changes nothing.
  [[maybe_unused]] const ssize_t n = write(event_, &one, sizeof one);
  errno = saved;
}

Status UserfaultTrap::check_transfer(const char* call, Transfer transfer, uintptr_t start, size_t size,
                                     uintptr_t frame) const {
  if (Status s = check_range(call, start, size); !s.ok()) return s;
  switch (transfer) {
    case Transfer::copy:
      if (frame % core::kPage != 0)
        return core::error(EINVAL, "%s: frame 0x%zx is not aligned to %zu bytes", call, frame, core::kPage);
      return {};
    case Transfer::move:
      if (!caps_.move)
        return core::error(EOPNOTSUPP, "%s: moving pages needs UFFDIO_MOVE (Linux 6.8); use Transfer::copy", call);
      if ((start | size | frame) % core::kHugePage != 0)
        return core::error(EINVAL, "%s: moving needs multiples of 2 MiB: address 0x%zx, size %zu, frame 0x%zx", call,
                           start, size, frame);
      return {};
    case Transfer::install:
      break;
  }
  return core::error(EOPNOTSUPP, "%s: userfaultfd cannot map frames in place; that needs the module", call);
}

// Cleans up after a fill that stopped half way. `done` bytes are visible, and stores may have
// changed them. They go back into the frame, so that the frame has the block's bytes, and `why` is
// returned. If they cannot go back, the rest is filled; returns ok if that works.
Status UserfaultTrap::undo_fill(uintptr_t start, size_t size, size_t done, uintptr_t frame, Transfer transfer,
                                Protect protect, Status why) {
  if (done == 0) return why;
  core::step("trap.fill.undo");
  Status back;
  if (transfer == Transfer::copy && protect == Protect::yes) {
    back = taking_.drop(start, done);  // no store was possible: the frame has the same bytes
  } else if (transfer == Transfer::copy) {
    void* scratch = nullptr;
    back = reserve_frames(core::round_up(done, core::kHugePage), false, &scratch);
    if (back.ok()) {
      back = take_pages(start, done, at(scratch));
      if (back.ok() && core::read_guarded_untrapped(reinterpret_cast<void*>(frame), scratch, done) != 0)
        back = core::error(EFAULT, "the bytes taken back cannot be read");
      munmap(scratch, core::round_up(done, core::kHugePage));
    }
  } else {
    back = take_pages(start, done, frame);
  }
  if (back.ok()) return why;
  // It cannot go back, but perhaps forward. Copy the rest, since moving pages may be what is
  // refused.
  if (back.code() != -ENOTRECOVERABLE && waking_.copy_in(start + done, frame + done, size - done, protect).error == 0) {
    if (transfer == Transfer::move) os::drop(frame, size);
    waking_.wake(start, size);
    return {};
  }
  return core::error(
      ENOTRECOVERABLE,
      "fill: the range at 0x%zx is torn, %zu bytes are in place and cannot be taken back (%.*s); first error: %.*s",
      start, done, static_cast<int>(back.text().size()), back.text().data(), static_cast<int>(why.text().size()),
      why.text().data());
}

// Frees the page tables of an absent range. Checks first: dropping pages that a mistaken caller has
// there would lose them.
Status UserfaultTrap::clear_tables(uintptr_t start, size_t size) {
  constexpr uint64_t kAny = os::kScanPresent | os::kScanSwapped;
  const int any = os::any_page(pagemap_, start, size, kAny);
  if (any > 0 && os::any_page(pagemap_, start, size, kAny, os::kScanGuard) != 0)
    return core::system_error(EEXIST, "fill: %zu bytes at 0x%zx are not absent: a page is there already", size, start);
  // If the check or the drop fails, the tables stay, and the fill is slow but correct.
  if (any >= 0) os::drop(start, size);
  return {};
}

// Copies the rest of a range, part of which the program has locked or given other rights: the
// kernel moves no pages there. Copied pages stay protected until all are in place, so that the
// frame has the same bytes.
Outcome UserfaultTrap::copy_rest(uintptr_t start, size_t size, uintptr_t frame, size_t moved) {
  const Outcome rest = waking_.copy_in(start + moved, frame + moved, size - moved, Protect::yes);
  if (rest.error == 0) {
    // If refused, the next store reports it again.
    write_protect_pages(fd_, start + moved, size - moved, false);
    os::drop(frame, size);
    return {0, size};
  }
  const bool undone = rest.done == 0 || taking_.drop(start + moved, rest.done).ok();
  return {rest.error, undone ? moved : moved + rest.done};
}

// Takes present, unprotected pages out and puts them back by a transfer that wakes their waiters.
// Returns -ENOTRECOVERABLE if some are lost. On another error all are in place.
Status UserfaultTrap::put_again(uintptr_t start, size_t size) {
  void* aside = nullptr;
  const size_t room = core::round_up(size, core::kHugePage);
  if (Status s = reserve_frames(room, false, &aside); !s.ok()) return s;
  Status s = take_pages(start, size, at(aside));
  core::step("trap.put_again");
  if (s.ok()) {
    const Outcome out = copy_pages(fd_, pagemap_, start, at(aside), size, false);
    const size_t left = size - out.done;
    if (out.error != 0 &&
        move_pages(fd_, pagemap_, start + out.done, at(aside) + out.done, left, Holes::keep, kFillBusyNs).error != 0)
      s = core::error(ENOTRECOVERABLE, "fill: %zu of %zu bytes at 0x%zx cannot be put in place again (errno %d)", left,
                      size, start, -out.error);
  }
  munmap(aside, room);
  return s;
}

// Called when UFFDIO_WAKE is refused for the first time. The transfer before was quiet, so it has
// not woken the waiters, and for protected pages nothing else wakes them. Makes the transfer again,
// now with a wake. No store has changed protected pages, so the frame has the same bytes.
Status UserfaultTrap::fill_loudly(uintptr_t start, size_t size, uintptr_t frame, Transfer transfer, Protect protect) {
  if (protect == Protect::no) {
    if (waking_.let_go_on(start, size) == 0) return {};
    if (Status s = put_again(start, size); s.ok() || s.code() == -ENOTRECOVERABLE) return s;
  }
  if (transfer == Transfer::copy && protect == Protect::yes && taking_.drop(start, size).ok()) {
    const Outcome out = waking_.copy_in(start, frame, size, protect);
    if (out.error == 0) return {};
    if (out.done != 0) taking_.drop(start, out.done).ignore();
    return core::system_error(out.error, "fill: %zu of %zu bytes at 0x%zx, once more", out.done, size, start);
  }
  VMEM_LOG_ONCE(core::Level::error, "threads that wait for a block cannot be woken, and wait on");
  return {};
}

Status UserfaultTrap::fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) {
  core::must_be_outside("Trap::fill");
  const uintptr_t start = at(address);
  if (Status s = check_transfer("fill", transfer, start, size, at(frame)); !s.ok()) return s;
  if (protect == Protect::yes && (transfer == Transfer::move || !caps_.write_protect))
    return core::error(EOPNOTSUPP, "fill: %s cannot be write-protected as they become visible",
                       transfer == Transfer::move ? "moved pages" : "pages of this kernel");
  return place_pages(start, size, at(frame), transfer, protect);
}

// Puts the pages in place and wakes the range. Frees the page tables of small pages where it can,
// so that the frame and the range can each be one huge page next time.
Status UserfaultTrap::place_pages(uintptr_t start, size_t size, uintptr_t frame, Transfer transfer, Protect protect) {
  const bool huge = (start | size | frame) % core::kHugePage == 0;
  const bool clears = transfer == Transfer::move && frees_tables_ && huge;
  if (clears) {
    if (Status s = clear_tables(start, size); !s.ok()) return s;
  }
  core::step("trap.fill.begin");
  const bool quiet = os::quietly() != 0 || faults_ != nullptr;
  Outcome out = transfer == Transfer::move ? move_pages(fd_, pagemap_, start, frame, size, Holes::populate, kFillBusyNs)
                                           : waking_.copy_in(start, frame, size, protect);
  if (out.error == -EINVAL && transfer == Transfer::move && caps_.write_protect)
    out = copy_rest(start, size, frame, out.done);
  if (out.error != 0) {
    const char* hint = out.error == -EEXIST ? " (a page is there already: the range was not absent)"
                       : out.error == -EBUSY
                           ? " (a page of the frame is pinned: by I/O in flight or a registered buffer)"
                       : out.error == -ENOENT ? " (the range or the frame is not attached as one mapping)"
                                              : "";
    return undo_fill(start, size, out.done, frame, transfer, protect,
                     core::system_error(out.error, "fill: %zu of %zu bytes at 0x%zx%s", out.done, size, start, hint));
  }
  core::step("trap.fill.filled");
  const bool woken = !quiet || waking_.wake(start, size) == 0;
  if (quiet && os::quietly() == 0 && (!woken || protect == Protect::yes)) {
    if (Status s = fill_loudly(start, size, frame, transfer, protect); !s.ok()) return s;
  }
  // The frame is empty except for bytes that guard pages kept out.
  if (clears || (out.passed && transfer == Transfer::move)) os::drop(frame, size);
  return {};
}

Status UserfaultTrap::put_back(void* address, size_t size, void* frame) {
  core::must_be_outside("Trap::put_back");
  if (Status s = check_transfer("put_back", Transfer::copy, at(address), size, at(frame)); !s.ok()) return s;
  Status s = place_pages(at(address), size, at(frame), caps_.move ? Transfer::move : Transfer::copy, Protect::no);
  if (s.ok() && !caps_.move) os::drop(at(frame), size);
  return s;
}

Status UserfaultTrap::fill_zero(void* address, size_t size) {
  if (Status s = check_range("fill_zero", at(address), size); !s.ok()) return s;
  const bool quiet = os::quietly() != 0 || faults_ != nullptr;
  const Outcome out = zero_pages(fd_, pagemap_, at(address), size);
  if (out.error == 0) {
    if (quiet && waking_.wake(at(address), size) != 0 && waking_.let_go_on(at(address), size) != 0) {
      if (Status s = put_again(at(address), size); s.code() == -ENOTRECOVERABLE) return s;
    }
    return {};
  }
  Status why = core::system_error(out.error, "fill_zero: %zu of %zu bytes at %p%s", out.done, size, address,
                                  out.error == -EEXIST ? " (a page is there already: the range was not absent)" : "");
  if (out.done == 0) return why;
  // The first page allocates the page table, so this takes a range of more than 2 MiB and no memory
  // at all. The part in place cannot be removed: a thread may have stored to it.
  return core::error(ENOTRECOVERABLE, "%.*s; the range is torn", static_cast<int>(why.text().size()),
                     why.text().data());
}

Status UserfaultTrap::take(void* address, size_t size, void* frame, Transfer transfer, PinWait wait) {
  core::must_be_outside("Trap::take");
  if (Status s = check_transfer("take", transfer, at(address), size, at(frame)); !s.ok()) return s;
  core::step("trap.take.begin");
  if (transfer == Transfer::copy) return taking_.take_anyhow(at(address), size, at(frame), dump_of(address), wait);
  return taking_.take(at(address), size, at(frame), dump_of(address), wait);
}

void UserfaultTrap::drop_batch(std::span<const Range> ranges, size_t* dropped) {
  std::array<iovec, 64> batch;
  while (*dropped < ranges.size()) {
    const size_t n = std::min(batch.size(), ranges.size() - *dropped);
    if (n < 2) return;
    for (size_t i = 0; i < n; ++i) {
      const Range& r = ranges[*dropped + i];
      batch[i] = {reinterpret_cast<void*>(r.address), r.size};
    }
    long bytes = os::advise_many(self_, batch.data(), n, MADV_DONTNEED);
    if (bytes <= 0) return;
    size_t whole = 0;
    while (whole < n && bytes >= static_cast<long>(batch[whole].iov_len))
      bytes -= static_cast<long>(batch[whole++].iov_len);
    *dropped += whole;
    if (whole < n) return;  // the loop over single ranges finds the error of the next
  }
}

Status UserfaultTrap::drop(std::span<const Range> ranges) {
  core::must_be_outside("Trap::drop");
  for (const Range& r : ranges) {
    if (Status s = check_range("drop", r.address, r.size); !s.ok()) return s;
  }
  if (caps_.pins == Pins::unseen) return drop_unseen(ranges);
  for (const Range& r : ranges) {
    if (Status s = taking_.drop(r.address, r.size); !s.ok()) return s;
  }
  return {};
}

// Drops without a check for pins: this kernel cannot see them, or the pages were already taken out
// of their range.
Status UserfaultTrap::drop_unseen(std::span<const Range> ranges) {
  size_t dropped = 0;
  if (caps_.batch_drop) drop_batch(ranges, &dropped);
  for (; dropped < ranges.size(); ++dropped) {
    const Range& r = ranges[dropped];
    const int error = os::drop(r.address, r.size);
    if (error == 0) continue;
    if (error != -EPERM)
      return core::system_error(error, "drop: %zu bytes at 0x%zx, after %zu of %zu ranges", r.size, r.address, dropped,
                                ranges.size());
    if (Status s = drop_unsealed(r); !s.ok()) return s;
  }
  return {};
}

Status UserfaultTrap::release_many(std::span<const Range> ranges) {
  return drop_unseen(ranges);
}

Status UserfaultTrap::protect(void* address, size_t size) {
  core::must_be_outside("Trap::protect");
  if (Status s = check_range("protect", at(address), size); !s.ok()) return s;
  if (!caps_.write_protect) return core::error(EOPNOTSUPP, "protect: this kernel cannot write-protect (Linux 5.7 can)");
  const int error = waking_.protect(at(address), size);
  if (error == 0) return {};
  return core::system_error(error, "protect: %zu bytes at %p%s", size, address,
                            error == -ENOENT ? " (not attached, or attached for moving)" : "");
}

Status UserfaultTrap::unprotect(void* address, size_t size) {
  if (Status s = check_range("unprotect", at(address), size); !s.ok()) return s;
  if (!caps_.write_protect) return core::error(EOPNOTSUPP, "unprotect: this kernel cannot write-protect");
  int error = write_protect_pages(fd_, at(address), size, false);
  if (error == -EPERM || error == -EIO) {
    VMEM_LOG_ONCE(core::Level::error,
                  "UFFDIO_WRITEPROTECT is refused. Was ioctl forbidden after libvmem had started? Blocks that are "
                  "changed and copied cannot leave memory any more, nor be synced");
    error = waking_.let_go_on(at(address), size);
  }
  if (error == 0) {
    waking_.woken(at(address), size);
    return {};
  }
  return core::system_error(error, "unprotect: %zu bytes at %p%s", size, address,
                            error == -ENOENT ? " (not attached, or attached for moving)" : "");
}

Status UserfaultTrap::fail(void* address, size_t size) {
  if (Status s = check_range("fail", at(address), size); !s.ok()) return s;
  const bool quiet = os::quietly() != 0 || faults_ != nullptr;
  Outcome out;
  if (caps_.poison) out = poison_pages(fd_, pagemap_, at(address), size);
  if (caps_.poison && !forbidden(out.error)) {
    if (out.error != 0) {
      // Only marks were placed and no thread was woken: dropping them loses nothing.
      if (out.done != 0) os::drop(at(address), out.done);
      return core::system_error(out.error, "fail: %zu bytes at %p%s", size, address,
                                out.error == -EEXIST ? " (the range is not absent)" : "");
    }
    // If the wake is refused for the first time, set the marks again, which now wakes.
    if (quiet && waking_.wake(at(address), size) != 0 && os::drop(at(address), size) == 0)
      out = poison_pages(fd_, pagemap_, at(address), size);
    if (out.error == 0) return {};
  }
  if (Status s = replace_with_sigbus(empty_file_, at(address), size); !s.ok()) return s;
  const int error = waking_.wake_where_nothing_is(at(address), size);
  if (error == 0) return {};
  return core::system_error(error, "fail: threads that wait for %zu bytes at %p cannot be woken", size, address);
}

Status UserfaultTrap::unfail(void* address, size_t size) {
  if (Status s = check_range("unfail", at(address), size); !s.ok()) return s;
  if (caps_.poison) {
    if (const int error = os::drop(at(address), size); error != 0)
      return core::system_error(error, "unfail: %zu bytes at %p", size, address);
    // If make_anew() failed before, the empty file is mapped here and not the trap; marking shows
    // which. Mark the whole range: dropping a single page would leave its page table, in the way of
    // a huge page.
    const Outcome out = poison_pages(fd_, pagemap_, at(address), size);
    if (out.done != 0) os::drop(at(address), out.done);
    if (out.error != -ENOENT && !forbidden(out.error)) return {};
  }
  return make_anew(address, size);
}

Status UserfaultTrap::map_file(void* address, size_t size, int fd, uint64_t offset, bool shared) {
  core::must_be_outside("Trap::map_file");
  if (Status s = check_range("map_file", at(address), size); !s.ok()) return s;
  bool replaced = false;
  Status s = replace_with_file(fd, offset, shared, at(address), size, dump_of(address), &replaced);
  // The range now has the file, or no mapping: the kernel may unmap the old one and then fail.
  if (!s.ok() && (replaced || msync(address, size, MS_ASYNC) != 0)) make_anew(address, size).ignore();
  waking_.wake(at(address), size);
  return s;
}

Status UserfaultTrap::unmap_file(void* address, size_t size) {
  core::must_be_outside("Trap::unmap_file");
  return make_anew(address, size);
}

Status UserfaultTrap::make_anew(void* address, size_t size) {
  // Attach again as attach_at() does: an access during this gets SIGSEGV instead of SIGBUS.
  RangeMap::Entry entry;
  if (!ranges_.find(at(address), &entry)) return core::error(EINVAL, "unfail: nothing is attached at %p", address);
  Status s = replace_with_space(at(address), size);
  if (s.ok()) {
    core::step("trap.anew.shut");
    s = arm_range(at(address), size, entry.transfer, entry.dump);
  }
  if (s.ok()) return {};
  // A half-made range would have no trap and no access, and might not even be our address space.
  if (Status back = replace_with_sigbus(empty_file_, at(address), size); !back.ok())
    VMEM_LOG_OFTEN(core::Level::error, "trap: accesses of %zu bytes at %p get SIGSEGV: %.*s", size, address,
                   static_cast<int>(back.text().size()), back.text().data());
  return s;
}

Status UserfaultTrap::wake(void* address, size_t size) {
  if (Status s = check_range("wake", at(address), size); !s.ok()) return s;
  const int error = waking_.wake(at(address), size);
  return error == 0 ? Status() : core::system_error(error, "wake: %zu bytes at %p", size, address);
}

Status UserfaultTrap::reserve_frames(size_t size, bool huge, void** address) {
  if (Status s = check_range("reserve_frames", 0, size); !s.ok()) return s;
  uintptr_t start = 0;
  if (Status s = reserve_space(size, core::kHugePage, &start); !s.ok()) return s;
  const uint64_t mode = caps_.move ? os::kRegisterWp : 0;
  if (Status s = arm(fd_, start, size, mode, huge ? HugePages::yes : HugePages::no); !s.ok()) {
    munmap(reinterpret_cast<void*>(start), size);
    return s;
  }
  *address = reinterpret_cast<void*>(start);
  return {};
}

// Populating clears frames without memory; clearing them again would double the time.
Status UserfaultTrap::populate_frames(void* address, size_t size, int) {
  const bool empty = os::any_page(pagemap_, at(address), size, os::kScanPresent | os::kScanSwapped) == 0;
  if (!empty || os::advise(at(address), size, os::kMadvPopulateWrite) != 0) memset(address, 0, size);
  return {};
}

}  // namespace

Status make_userfault_trap(const UserfaultOptions& options, std::unique_ptr<Trap>* out) {
  Probed probed;
  if (Status s = probe(options, &probed); !s.ok()) return s;
  const int event = core::keep_from_children(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const int empty_file = core::keep_from_children(memfd_create("vmem-absent", MFD_CLOEXEC));
  if (event < 0 || empty_file < 0) {
    Status s = core::system_error(errno, "userfaultfd: cannot create an %s", event < 0 ? "eventfd" : "empty memfd");
    for (const int fd : {event, empty_file, probed.fd, probed.self, probed.pagemap}) core::close_and_forget(fd);
    return s;
  }
  std::unique_ptr<SignalFaults> faults;
  if (options.in_signal_handler) faults = std::make_unique<SignalFaults>();
  auto trap = std::make_unique<UserfaultTrap>(probed, event, empty_file,
                                              options.core_dump ? CoreDump::yes : CoreDump::no, std::move(faults));
  if (Status s = trap->start(); !s.ok()) return s;
  *out = std::move(trap);
  return {};
}

}  // namespace vmem::trap
