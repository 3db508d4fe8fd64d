#include "trap/kmod_trap.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "core/inplace_vector.h"
#include "core/log.h"
#include "core/outside_lock.h"
#include "core/process/fork.h"
#include "core/step.h"
#include "trap/mapping.h"
#include "trap/os.h"

namespace vmem::trap {

using core::error;
using core::Status;
using core::system_error;

namespace {

uintptr_t at(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

int call(int fd, unsigned long request, void* argument) {
  return ioctl(fd, request, argument) == 0 ? 0 : -errno;
}

constexpr size_t kMostRange = size_t{1} << 46;  // limit of vmem_create

// Returns the block size for a range that is attached without one.
size_t block_of(size_t size) {
  if (core::is_power_of_two(size) && size <= core::kMaxBlock) return size;
  return size % core::kHugePage == 0 ? core::kHugePage : core::kPage;
}

// Returns false for an unknown event type.
bool event_of(const vmem_event& e, Event* out) {
  switch (e.type) {
    case VMEM_EVENT_FAULT:
      out->kind = Event::Kind::fault;
      out->fault = {static_cast<uintptr_t>(e.address),
                    (e.flags & VMEM_FAULT_PROTECTED) != 0 ? FaultKind::write_protect
                    : (e.flags & VMEM_FAULT_WRITE) != 0   ? FaultKind::write
                                                          : FaultKind::read,
                    e.thread};
      return true;
    case VMEM_EVENT_PRESSURE:
      out->kind = Event::Kind::pressure;
      out->bytes = e.bytes;
      return true;
    case VMEM_EVENT_KNOBS:
      out->kind = Event::Kind::tunables;
      return true;
    default:
      return false;
  }
}

Status not_move(const char* who, Transfer transfer) {
  if (transfer != Transfer::move) return {};
  return error(EOPNOTSUPP, "%s: the module installs frames, or copies into its own; it does not move pages", who);
}

}  // namespace

Status OffsetMap::make_room(size_t size, Room* out) try {
  core::OwnMap<uintptr_t, Entry> alone;
  alone.emplace(0, Entry{});
  *out = alone.extract(alone.begin());
  return {};
} catch (const std::bad_alloc&) {
  return error(ENOMEM, "no memory to record %s", core::human_bytes(size).c_str());
}

void OffsetMap::set(uintptr_t start, const Entry& entry, Room room) {
  room.key() = start;
  room.mapped() = entry;
  const core::MutexLock lock(mutex_);
  if (auto at = entries_.insert(std::move(room)); !at.inserted) at.position->second = entry;
}

bool OffsetMap::take(uintptr_t start, size_t size, Entry* out) {
  const core::MutexLock lock(mutex_);
  const auto it = entries_.find(start);
  if (it == entries_.end() || it->second.size != size) return false;
  *out = it->second;
  entries_.erase(it);
  return true;
}

bool OffsetMap::find(uintptr_t start, size_t size, uintptr_t* begin, Entry* out) const {
  const core::MutexLock lock(mutex_);
  auto it = entries_.upper_bound(start);
  if (it == entries_.begin()) return false;
  --it;
  const size_t inside = start - it->first;
  if (inside >= it->second.size || size > it->second.size - inside) return false;
  *begin = it->first;
  *out = it->second;
  return true;
}

bool OffsetMap::take_overlap(uintptr_t start, size_t size, Entry* out) {
  const core::MutexLock lock(mutex_);
  auto it = entries_.lower_bound(start);
  if (it != entries_.begin() && std::prev(it)->first + std::prev(it)->second.size > start) --it;
  if (it == entries_.end() || it->first >= start + size) return false;
  *out = it->second;
  entries_.erase(it);
  return true;
}

bool OffsetMap::first(uintptr_t* begin, Entry* out) const {
  const core::MutexLock lock(mutex_);
  const auto it = std::find_if(entries_.begin(), entries_.end(), [](const auto& e) { return e.second.owned; });
  if (it == entries_.end()) return false;
  *begin = it->first;
  *out = it->second;
  return true;
}

uintptr_t OffsetMap::accessed(uintptr_t address, uint64_t offset) const {
  const core::MutexLock lock(mutex_);
  const auto holds = [offset](const auto& e) { return offset - e.second.offset < e.second.size; };
  auto it = entries_.upper_bound(address);
  if (it != entries_.begin()) --it;
  if (it == entries_.end() || !holds(*it)) it = std::find_if(entries_.begin(), entries_.end(), holds);
  if (it == entries_.end()) return address;
  const uintptr_t block = it->first + (offset - it->second.offset);
  return address - block < it->second.unit ? address : block;
}

KmodTrap::KmodTrap(int fd, int event, uint32_t batch_max, size_t largest, bool system_calls)
    : fd_(fd), event_(event), batch_max_(batch_max), largest_(largest) {
  caps_.install = true;
  caps_.write_protect = true;
  caps_.poison = true;
  caps_.system_calls = system_calls;
  caps_.batch_drop = true;
  caps_.pins = Pins::protected_;
  caps_.absent = core::Absent::elsewhere;  // protecting a block removes its pages from the page tables
  caps_.one_report = true;
  caps_.name = "kmod";
}

KmodTrap::~KmodTrap() {
  uintptr_t begin = 0;
  if (OffsetMap::Entry left{}; regions_.first(&begin, &left)) {
    core::log(core::Level::error, "trap: %s at 0x%zx still attached at the end; accesses of it get SIGBUS from now on",
              core::human_bytes(left.size).c_str(), begin);
  }
  // Mappings keep the context alive; this makes absent blocks raise SIGBUS at once.
  call(fd_, VMEM_IOC_SHUTDOWN, nullptr);
  core::close_and_forget(fd_);
  core::close_and_forget(event_);
}

Status KmodTrap::create(uint32_t kind, size_t size, size_t unit, uint64_t* offset) {
  vmem_create c{};
  c.kind = kind;
  c.size = size;
  c.unit = static_cast<uint32_t>(unit);
  if (const int err = call(fd_, VMEM_IOC_CREATE, &c); err != 0) {
    return system_error(err, "the module refuses a range of %s in units of %s%s", core::human_bytes(size).c_str(),
                        core::human_bytes(unit).c_str(),
                        err == -EPERM ? "; /sys/class/misc/vmem/trap_enabled is 0" : "");
  }
  *offset = c.offset;
  return {};
}

void KmodTrap::destroy(uint64_t offset) {
  vmem_destroy d{offset};
  call(fd_, VMEM_IOC_DESTROY, &d);
}

Status KmodTrap::map_over(uintptr_t start, size_t size, uint64_t offset) {
  void* p = mmap(reinterpret_cast<void*>(start), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
                 static_cast<off_t>(offset));
  if (p != MAP_FAILED) return {};
  return system_error(errno, "cannot map %s of the module at 0x%zx", core::human_bytes(size).c_str(), start);
}

Status KmodTrap::create_at(uint32_t kind, uintptr_t start, OffsetMap::Entry* entry) {
  if (Status s = create(kind, entry->size, entry->unit, &entry->offset); !s.ok()) return s;
  core::step("trap.created");
  Status s = map_over(start, entry->size, entry->offset);
  if (!s.ok()) destroy(entry->offset);
  return s;
}

Status KmodTrap::create_in_space(uint32_t kind, size_t align, uintptr_t near, OffsetMap* map, OffsetMap::Entry entry,
                                 void** address) {
  OffsetMap::Room room;
  uintptr_t start = 0;
  if (Status s = OffsetMap::make_room(entry.size, &room); !s.ok()) return s;
  if (Status s = reserve_space(entry.size, align, &start, near); !s.ok()) return s;
  if (Status s = create_at(kind, start, &entry); !s.ok()) {
    munmap(reinterpret_cast<void*>(start), entry.size);
    return s;
  }
  map->set(start, entry, std::move(room));
  *address = reinterpret_cast<void*>(start);
  return {};
}

Status KmodTrap::attach(size_t size, size_t align, Transfer transfer, void** address) {
  return attach_blocks(size, align, block_of(size), transfer, 0, address);
}

Status KmodTrap::attach_blocks(size_t size, size_t align, size_t block_size, Transfer transfer, uintptr_t near,
                               void** address) {
  core::must_be_outside("Trap::attach_blocks");
  if (!core::is_power_of_two(align) || align < core::kPage)
    return error(EINVAL, "attach: alignment %zu must be a power of two of at least %zu", align, core::kPage);
  if (Status s = check_range("attach", 0, size); !s.ok()) return s;
  if (Status s = not_move("attach", transfer); !s.ok()) return s;
  if (size > kMostRange) {
    return error(ENOMEM, "attach: %s is more than a range of the module holds (%s)", core::human_bytes(size).c_str(),
                 core::human_bytes(kMostRange).c_str());
  }
  return create_in_space(VMEM_KIND_REGION, std::max(align, core::kHugePage), near, &regions_,
                         {size, 0, std::min(block_size, largest_), true}, address);
}

Status KmodTrap::attach_at(void* address, size_t size, Transfer transfer) {
  core::must_be_outside("Trap::attach_at");
  if (Status s = check_range("attach_at", at(address), size); !s.ok()) return s;
  if (Status s = not_move("attach_at", transfer); !s.ok()) return s;
  uintptr_t begin = 0;
  if (OffsetMap::Entry whole{}; regions_.find(at(address), size, &begin, &whole) && size < whole.size &&
                                (at(address) - begin) % whole.unit == 0 && size % whole.unit == 0) {
    return attach_hole(address, size, begin, whole);
  }
  const size_t copied = size % core::kHugePage == 0 ? core::kHugePage : core::kPage;
  OffsetMap::Entry entry{size, 0, transfer == Transfer::copy ? copied : std::min(block_of(size), largest_), false};
  OffsetMap::Room room;
  if (Status s = OffsetMap::make_room(size, &room); !s.ok()) return s;
  // A single mmap: a concurrent access finds the old mapping or the trap.
  if (Status s = create_at(VMEM_KIND_REGION, at(address), &entry); !s.ok()) return s;
  core::step("trap.attach_at.mapped");
  // The blocks that were at this address are unreachable now.
  for (OffsetMap::Entry old{}; regions_.take_overlap(at(address), size, &old);) {
    destroy(old.offset);
    release_copies(old.offset, old.unit, old.size / old.unit);
  }
  regions_.set(at(address), entry, std::move(room));
  return {};
}

Status KmodTrap::detach(void* address, size_t size) {
  core::must_be_outside("Trap::detach");
  if (Status s = check_range("detach", at(address), size); !s.ok()) return s;
  OffsetMap::Entry entry{};
  if (regions_.take(at(address), size, &entry)) {
    vmem_destroy d{entry.offset};
    const int err = call(fd_, VMEM_IOC_DESTROY, &d);
    if (err != 0) return system_error(err, "detach: the module does not end the range at 0x%zx", at(address));
    release_copies(entry.offset, entry.unit, size / entry.unit);
    return {};
  }
  uint64_t offset = 0;
  size_t unit = 0, count = 0;
  if (Status s = blocks("detach", address, size, &offset, &unit, &count); !s.ok()) return s;
  if (Status s = each("detach", VMEM_OP_REMOVE, offset, unit, count, -ENOENT); !s.ok()) return s;
  release_copies(offset, unit, count);
  return each("detach", VMEM_OP_FAIL, offset, unit, count, -EALREADY);
}

Status KmodTrap::unmap(void* address, size_t size) {
  core::must_be_outside("Trap::unmap");
  if (Status s = check_range("unmap", at(address), size); !s.ok()) return s;
  if (munmap(address, size) != 0) return system_error(errno, "unmap: %zu bytes at 0x%zx", size, at(address));
  return {};
}

Status KmodTrap::wait(std::span<Event> out, int timeout_ms, size_t* count) {
  core::must_be_outside("Trap::wait");
  *count = 0;
  if (out.empty()) return error(EINVAL, "wait: room for at least one event is needed");
  std::array<pollfd, 2> polled{{{fd_, POLLIN, 0}, {event_, POLLIN, 0}}};
  if (poll(polled.data(), polled.size(), timeout_ms) < 0 && errno != EINTR) {
    if (errno != EINVAL) return system_error(errno, "wait: poll");
    usleep(1000);  // RLIMIT_NOFILE is below two: look for faults every millisecond
  }
  if (polled[1].revents != 0) {
    uint64_t ignored = 0;
    if (read(event_, &ignored, sizeof ignored) == sizeof ignored) return {};
  }
  std::array<vmem_event, 64> events;
  const size_t room = std::min(out.size(), events.size());
  const ssize_t n = read(fd_, events.data(), room * sizeof(vmem_event));
  if (n < 0) return errno == EAGAIN || errno == EINTR ? Status() : system_error(errno, "wait: reading events");
  for (size_t i = 0; i < static_cast<size_t>(n) / sizeof(vmem_event); ++i) {
    Event event;
    if (!event_of(events[i], &event)) continue;
    // The application may have moved a mapping or have two; another process has its own.
    if (event.kind == Event::Kind::fault)
      event.fault.address = regions_.accessed(event.fault.address, events[i].offset);
    out[(*count)++] = event;
  }
  return {};
}

void KmodTrap::interrupt() {
  const uint64_t one = 1;
  // If the counter is full, the event is signalled already.
  [[maybe_unused]] const ssize_t n = write(event_, &one, sizeof one);
}

Status KmodTrap::blocks(const char* who, const void* address, size_t size, uint64_t* offset, size_t* unit,
                        size_t* count) const {
  if (Status s = check_range(who, at(address), size); !s.ok()) return s;
  uintptr_t begin = 0;
  OffsetMap::Entry entry{};
  if (!regions_.find(at(address), size, &begin, &entry))
    return error(ENOENT, "%s: %zu bytes at 0x%zx are in no attached range", who, size, at(address));
  const size_t inside = at(address) - begin;
  if (inside % entry.unit != 0 || size % entry.unit != 0) {
    return error(EINVAL, "%s: %zu bytes at 0x%zx are not whole blocks of %s", who, size, at(address),
                 core::human_bytes(entry.unit).c_str());
  }
  *offset = entry.offset + inside;
  *unit = entry.unit;
  *count = size / entry.unit;
  return {};
}

Status KmodTrap::frames(const char* who, const void* address, size_t size, uint64_t* offset, size_t* unit) const {
  if (Status s = check_range(who, at(address), size); !s.ok()) return s;
  uintptr_t begin = 0;
  OffsetMap::Entry entry{};
  if (!arenas_.find(at(address), size, &begin, &entry))
    return error(EINVAL, "%s: %zu bytes at 0x%zx are in no arena of this trap", who, size, at(address));
  const size_t inside = at(address) - begin;
  if (inside % entry.unit != 0 || size % entry.unit != 0) {
    return error(EINVAL, "%s: %zu bytes at 0x%zx are not whole frames of %s", who, size, at(address),
                 core::human_bytes(entry.unit).c_str());
  }
  *offset = entry.offset + inside;
  *unit = entry.unit;
  return {};
}

int KmodTrap::batch(std::span<vmem_op> ops) {
  constexpr size_t kNoMemory = 8;  // operations that need no memory
  for (size_t most = batch_max_; !ops.empty();) {
    const auto part = ops.first(std::min(ops.size(), most));
    vmem_batch b{};
    b.ops = reinterpret_cast<uintptr_t>(part.data());
    b.count = static_cast<uint32_t>(part.size());
    if (const int err = call(fd_, VMEM_IOC_BATCH, &b); err == 0) {
      ops = ops.subspan(part.size());
    } else if (err == -ENOMEM && part.size() > kNoMemory) {
      most = kNoMemory;
    } else {
      return err;
    }
  }
  return 0;
}

Status KmodTrap::each(const char* who, uint32_t op, uint64_t offset, size_t unit, size_t count, int fine) {
  Status first;
  std::array<vmem_op, KmodOps::kFew> room;
  for (size_t done = 0; done < count; done += room.size()) {
    const std::span<vmem_op> ops(room.data(), std::min(count - done, room.size()));
    std::fill(ops.begin(), ops.end(), vmem_op{});
    for (size_t i = 0; i < ops.size(); ++i) {
      ops[i].op = op;
      ops[i].block = offset + (done + i) * unit;
    }
    if (const int err = batch(ops); err != 0) return system_error(err, "%s: the module refuses the batch", who);
    for (const vmem_op& o : ops) {
      if (o.result != 0 && o.result != fine && first.ok())
        first = system_error(o.result, "%s: block at offset 0x%llx", who, static_cast<unsigned long long>(o.block));
    }
  }
  return first;
}

Status KmodTrap::fill(void* address, size_t size, void* frame, Transfer transfer, Protect protect) {
  core::must_be_outside("Trap::fill");
  uint64_t block = 0, slot = 0;
  size_t unit = 0, count = 0, frame_unit = 0;
  if (Status s = check_range("fill", at(address), size); !s.ok()) return s;
  if (Status s = check_range("fill", at(frame), size); !s.ok()) return s;
  if (Status s = not_move("fill", transfer); !s.ok()) return s;
  if (transfer == Transfer::copy) return copy_in(address, size, frame, protect);
  if (Status s = blocks("fill", address, size, &block, &unit, &count); !s.ok()) return s;
  if (Status s = frames("fill", frame, size, &slot, &frame_unit); !s.ok()) return s;
  KmodOps room(count);
  const std::span<vmem_op> ops = room.all();
  for (size_t i = 0; i < count; ++i) {
    ops[i].op = VMEM_OP_INSTALL;
    ops[i].flags = protect == Protect::yes ? VMEM_OPF_PROTECT : 0;
    ops[i].block = block + i * unit;
    ops[i].frame = slot + i * unit;
  }
  if (const int err = batch(ops); err != 0) return system_error(err, "fill: the module refuses the batch");
  const auto bad = std::find_if(ops.begin(), ops.end(), [](const vmem_op& o) { return o.result != 0; });
  if (bad == ops.end()) return {};
  const int err = bad->result;
  core::step("trap.fill.undo");
  // All or nothing: remove the installed blocks. Stores made since are kept: the frame is the same
  // memory.
  take_back(ops);
  return system_error(err, "fill: block at 0x%zx", at(address) + static_cast<size_t>(bad - ops.begin()) * unit);
}

void KmodTrap::take_back(std::span<const vmem_op> ops) {
  for (const vmem_op& o : ops) {
    if (o.result != 0) continue;
    while (each("fill: undo", VMEM_OP_REMOVE, o.block, 1, 1, -ENOENT).code() == -EBUSY) usleep(1000);
  }
}

Status KmodTrap::fill_zero(void* address, size_t size) {
  if (Status s = check_range("fill_zero", at(address), size); !s.ok()) return s;
  return error(EOPNOTSUPP, "fill_zero: the module has no zero page; populate_frames() gives zeroed frames");
}

Status KmodTrap::take(void* address, size_t size, void* frame, Transfer transfer, PinWait) {
  core::must_be_outside("Trap::take");
  uint64_t block = 0, slot = 0;
  size_t unit = 0, count = 0, frame_unit = 0;
  if (Status s = check_range("take", at(address), size); !s.ok()) return s;
  if (Status s = not_move("take", transfer); !s.ok()) return s;
  if (transfer == Transfer::copy) return copy_out(address, size, frame);
  if (Status s = blocks("take", address, size, &block, &unit, &count); !s.ok()) return s;
  if (Status s = frames("take", frame, size, &slot, &frame_unit); !s.ok()) return s;
  KmodOps room(count);
  const std::span<vmem_op> ops = room.all();
  for (size_t i = 0; i < count; ++i) {
    ops[i].op = VMEM_OP_QUERY;
    ops[i].block = block + i * unit;
  }
  if (const int err = batch(ops); err != 0) return system_error(err, "take: the module refuses the batch");
  for (size_t i = 0; i < count; ++i) {
    if ((ops[i].state & VMEM_STATE_PRESENT) == 0)
      return error(ENOENT, "take: the block at 0x%zx is absent", at(address) + i * unit);
    if (ops[i].frame != slot + i * unit) {
      return error(EINVAL, "take: the block at 0x%zx stands in another frame than the one given",
                   at(address) + i * unit);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    Status s = each("take", VMEM_OP_REMOVE, block + i * unit, unit, 1, 0);
    if (s.ok()) continue;
    core::step("trap.take.undo");
    for (size_t back = 0; back < i; ++back) {
      vmem_op o{};
      o.op = VMEM_OP_INSTALL;
      o.block = block + back * unit;
      o.frame = slot + back * unit;
      if (batch({&o, 1}) != 0 || o.result != 0)
        VMEM_LOG_OFTEN(core::Level::error, "take: a block that was taken cannot be put back: %d", o.result);
    }
    return s;
  }
  return {};
}

Status KmodTrap::drop(std::span<const Range> ranges) {
  core::must_be_outside("Trap::drop");
  Status first;
  core::InplaceVector<vmem_op, KmodOps::kFew> ops;
  const auto flush = [&] {
    if (const int err = batch(ops.all()); err != 0) {
      if (first.ok()) first = system_error(err, "drop: the module refuses the batch");
      return;
    }
    for (const vmem_op& o : ops) {
      if (o.result == 0) {
        release_copies(o.block, 1, 1);
      } else if (o.result != -ENOENT && first.ok()) {
        first = system_error(o.result, "drop: block at offset 0x%llx", static_cast<unsigned long long>(o.block));
      }
    }
    ops.clear();
  };
  for (const Range& range : ranges) {
    uint64_t offset = 0;
    size_t unit = 0, count = 0;
    if (Status s = blocks("drop", reinterpret_cast<void*>(range.address), range.size, &offset, &unit, &count); !s.ok())
      return s;
    for (size_t done = 0, n = 0; count > 1 && done < count; done += n) {
      n = std::min(count - done, KmodOps::kFew);
      if (Status s = drop_together(offset + done * unit, unit, n); !s.ok()) return s;
    }
    if (count > 1) continue;
    vmem_op o{};
    o.op = VMEM_OP_REMOVE;
    o.block = offset;
    if (ops.full()) flush();
    if (!first.ok()) return first;
    ops.push_back(o);
  }
  flush();
  return first;
}

Status KmodTrap::drop_together(uint64_t offset, size_t unit, size_t count) {
  std::array<vmem_op, KmodOps::kFew> room{};
  const std::span<vmem_op> ops(room.data(), count);
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].op = VMEM_OP_REMOVE;
    ops[i].block = offset + i * unit;
  }
  const auto failed = [](const vmem_op& o) { return o.result != 0 && o.result != -ENOENT; };
  int err = batch(ops);
  const auto bad = std::find_if(ops.begin(), ops.end(), failed);
  if (err == 0 && bad == ops.end()) {
    release_copies(offset, unit, ops.size());
    return {};
  }
  if (err == 0) err = bad->result;
  core::step("trap.drop.undo");
  bool whole = true;
  for (const vmem_op& gone : ops) {
    if (gone.result != 0) continue;
    vmem_op o{};
    o.op = VMEM_OP_INSTALL;
    o.flags = (gone.state & VMEM_STATE_PROTECTED) != 0 ? VMEM_OPF_PROTECT : 0;
    o.block = gone.block;
    o.frame = gone.frame;
    if (batch({&o, 1}) != 0 || o.result != 0) whole = false;
  }
  if (whole || err != -EBUSY)
    return system_error(err, "drop: blocks from offset 0x%llx on", static_cast<unsigned long long>(offset));
  // The removed blocks cannot come back. Remove the rest too; accesses wait until the pins are
  // gone.
  Status s;
  while ((s = each("drop", VMEM_OP_REMOVE, offset, unit, ops.size(), -ENOENT)).code() == -EBUSY) usleep(1000);
  if (s.ok()) release_copies(offset, unit, ops.size());
  return s;
}

// One operation on every block of the range.
#define VMEM_EACH(name, op, fine, check)                                                    \
  Status KmodTrap::name(void* address, size_t size) {                                       \
    check;                                                                                  \
    uint64_t offset = 0;                                                                    \
    size_t unit = 0, count = 0;                                                             \
    if (Status s = blocks(#name, address, size, &offset, &unit, &count); !s.ok()) return s; \
    return each(#name, op, offset, unit, count, fine);                                      \
  }
VMEM_EACH(protect, VMEM_OP_PROTECT, 0, core::must_be_outside("Trap::protect"))
VMEM_EACH(unprotect, VMEM_OP_UNPROTECT, 0, )
VMEM_EACH(fail, VMEM_OP_FAIL, -EALREADY, )
VMEM_EACH(unfail, VMEM_OP_UNFAIL, -ENODATA, )
#undef VMEM_EACH

Status KmodTrap::wake(void* address, size_t size) {
  uint64_t offset = 0;
  size_t unit = 0, count = 0;
  Status s = blocks("wake", address, size, &offset, &unit, &count);
  if (s.code() == -ENOENT) return {};  // the range is gone, and its waiters with it
  if (!s.ok()) return s;
  return each("wake", VMEM_OP_WAKE, offset, unit, count, -ESHUTDOWN);
}

Status KmodTrap::reserve_frames(size_t size, bool huge, void** address) {
  (void)huge;  // frames are as large as memory allows
  if (Status s = reserve_arena(size, block_of(size), address); !s.ok()) return s;
  if (Status s = populate_frames(*address, size, -1); !s.ok()) {
    release_arena(*address, size).ignore();  // nothing is populated, or it goes with the context
    return s;
  }
  return {};
}

Status KmodTrap::reserve_arena(size_t size, size_t frame_size, void** address) {
  if (Status s = check_range("reserve_frames", 0, size); !s.ok()) return s;
  return create_in_space(VMEM_KIND_POOL, core::kHugePage, 0, &arenas_, {size, 0, std::min(frame_size, largest_), false},
                         address);
}

Status KmodTrap::populate_frames(void* address, size_t size, int node) {
  vmem_populate p{};
  uint64_t offset = 0;
  size_t unit = 0;
  if (Status s = frames("populate_frames", address, size, &offset, &unit); !s.ok()) return s;
  p.offset = offset;
  p.count = static_cast<uint32_t>(size / unit);
  p.node = node;
  const int err = call(fd_, VMEM_IOC_POPULATE, &p);
  if (err == 0) return {};
  if (p.done != 0) {
    vmem_release r{p.offset, p.done, 0};
    call(fd_, VMEM_IOC_RELEASE, &r);
  }
  return system_error(err, "no memory for %s of frames%s", core::human_bytes(size).c_str(),
                      err == -EDQUOT ? "; a limit in /sys/class/misc/vmem: of the machine, a user or a context" : "");
}

Status KmodTrap::release_frames(void* address, size_t size) {
  vmem_release r{};
  uint64_t offset = 0;
  size_t unit = 0;
  if (Status s = frames("release_frames", address, size, &offset, &unit); !s.ok()) return s;
  r.offset = offset;
  r.count = static_cast<uint32_t>(size / unit);
  const int err = call(fd_, VMEM_IOC_RELEASE, &r);
  if (err == 0 || err == -ENOENT) return {};
  return system_error(err, "release_frames: frame %u of %u at 0x%zx", r.done, r.count, at(address));
}

Status KmodTrap::release_arena(void* address, size_t size) {
  OffsetMap::Entry entry{};
  if (!arenas_.take(at(address), size, &entry))
    return error(EINVAL, "release_arena: no arena of %zu bytes at 0x%zx", size, at(address));
  munmap(address, size);
  // One slot at a time: an empty slot must not keep the next from being released. A pinned one goes
  // with the context.
  Status first;
  for (size_t inside = 0; inside < size; inside += entry.unit) {
    vmem_release r{entry.offset + inside, 1, 0};
    const int err = call(fd_, VMEM_IOC_RELEASE, &r);
    if (err != 0 && err != -ENOENT && first.ok())
      first = system_error(err, "release_arena: frame at 0x%zx", at(address) + inside);
  }
  if (!first.ok()) return first;
  vmem_destroy d{entry.offset};
  const int err = call(fd_, VMEM_IOC_DESTROY, &d);
  return err == 0 ? Status() : system_error(err, "release_arena: the module keeps the arena");
}

Status KmodTrap::knobs(Knobs* out) {
  vmem_info info{};
  if (const int err = call(fd_, VMEM_IOC_INFO, &info); err != 0) return system_error(err, "the module's tunables");
  *out = {info.frame_limit,      info.context_limit, info.readahead_bytes,
          info.fault_timeout_ms, info.watermark_low, info.watermark_high};
  return {};
}

Status Trap::release_frames(void* address, size_t size) {
  const int error = os::drop(at(address), size);
  if (error == 0) return {};
  return system_error(error, "release_frames: %zu bytes at 0x%zx", size, at(address));
}

Status Trap::release_many(std::span<const Range> ranges) {
  Status first;
  for (const Range& r : ranges) {
    Status s = release_frames(reinterpret_cast<void*>(r.address), r.size);
    if (first.ok()) first = std::move(s);
  }
  return first;
}

Status Trap::release_arena(void* address, size_t size) {
  if (munmap(address, size) == 0) return {};
  return system_error(errno, "release_arena: %zu bytes at 0x%zx", size, at(address));
}

Status make_kmod_trap(const KmodOptions& options, std::unique_ptr<Trap>* out) {
  const int fd = core::keep_from_children(open(options.device, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (fd < 0) {
    const int err = errno;
    if (err == ENOENT || err == ENXIO)
      return error(ENOENT, "the module vmem is not loaded: no %s; `modprobe vmem` loads it", options.device);
    return system_error(err, "cannot open %s%s", options.device,
                        err == EACCES ? "; the user must be in the group that owns it (vmem)" : "");
  }
  vmem_hello hello{};
  hello.version = VMEM_UAPI_VERSION;
  hello.need = VMEM_FEATURE_TRAP | VMEM_FEATURE_PROTECT;
  if (const int err = call(fd, VMEM_IOC_HELLO, &hello); err != 0) {
    core::close_and_forget(fd);
    if (err == -EPROTONOSUPPORT) {
      return error(
          err, "the module speaks version %u of its interface, this library version %d; install both from one release",
          hello.version, VMEM_UAPI_VERSION);
    }
    return system_error(err, "the module lacks what is needed (features 0x%llx)%s",
                        static_cast<unsigned long long>(hello.features),
                        (hello.features & VMEM_FEATURE_TRAP) == 0 ? "; /sys/class/misc/vmem/trap_enabled is 0" : "");
  }
  bool system_calls = false;
  if ((hello.features & VMEM_FEATURE_KERNEL_FAULTS) != 0) {
    hello.version = VMEM_UAPI_VERSION;
    hello.need |= VMEM_FEATURE_KERNEL_FAULTS;
    system_calls = call(fd, VMEM_IOC_HELLO, &hello) == 0;
  }
  if (hello.batch_max == 0 || hello.unit_max < core::kHugePage || !core::is_power_of_two(hello.unit_max)) {
    core::close_and_forget(fd);
    return error(EPROTO,
                 "the module takes %u calls at a time and blocks up to %u bytes; install it and the library from one "
                 "release",
                 hello.batch_max, hello.unit_max);
  }
  const int event = core::keep_from_children(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event < 0) {
    const int err = errno;
    core::close_and_forget(fd);
    return system_error(err, "eventfd");
  }
  *out = std::make_unique<KmodTrap>(fd, event, hello.batch_max, hello.unit_max, system_calls);
  return {};
}

}  // namespace vmem::trap
