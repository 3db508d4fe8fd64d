#include "store/engine_base.h"

#include <fcntl.h>

#include <cstring>
#include <utility>

#include "core/log.h"
#include "core/step.h"

namespace vmem::store {

namespace {

constexpr unsigned kMaxDepth = 1024;

bool is_background(size_t lane) {
  return lane > static_cast<size_t>(core::Urgency::acquire);
}

}  // namespace

thread_local const EngineBase* EngineBase::own_thread = nullptr;

void EngineBase::List::push(Io* io) {
  io->next = nullptr;
  (head == nullptr ? head : tail->next) = io;
  tail = io;
}

Io* EngineBase::List::pop() {
  Io* io = head;
  if (io != nullptr) head = io->next;
  return io;
}

EngineBase::EngineBase(unsigned depth)
    : depth_(std::clamp(depth, 1u, kMaxDepth)), background_depth_(depth_ - depth_ / 8), transfers_(depth_) {
  to_tell_.reserve(depth_ + core::kUrgencies);  // each has a part in flight, or is the first of its queue
  for (Transfer& transfer : transfers_) {
    transfer.next_free = free_;
    free_ = &transfer;
  }
}

void EngineBase::submit(std::span<Io* const> batch) {
  if (batch.empty()) return;
  uint64_t sleepers = 0;
  {
    core::MutexLock lock(mutex_);
    size_t transfers = 0;
    for (Io* io : batch) {
      io->result = 0;
      io->transferred = 0;
      io->parts = {.moved = io->size};
      transfers += in_parts(*io) ? io->size / kPartBytes : 1;
      List& queue = queues_[lane(*io)];
      // Its parts will no longer be limited.
      if (queue.head != nullptr && waits_for_its_parts(queue)) transfers += parts_left(*queue.head);
      queue.push(io);
    }
    outstanding_ += batch.size();
    if (own_thread != this && in_flight_ < depth_) sleepers = pick_sleepers(transfers);
  }
  core::step("store.submitted");
  if (sleepers != 0) wake(sleepers);
}

bool EngineBase::read_here(Io& io) {
  constexpr size_t kMost = size_t{128} << 10;
  if (io.op != Io::Op::read || io.size > kMost || injector() != nullptr) return false;
  FileSlot slot;
  {
    core::MutexLock lock(mutex_);
    if (io.file < files_.size()) slot = files_[io.file].slot;
  }
  core::step("store.issue");
  const ssize_t got = pread(slot.fd, io.buffer, io.size, static_cast<off_t>(io.offset));
  core::step("store.finish");
  if (got != static_cast<ssize_t>(io.size)) return false;
  io.result = 0;
  io.transferred = io.size;
  core::MutexLock lock(mutex_);
  ++stats_.reads;
  stats_.read_bytes += io.size;
  return true;
}

bool EngineBase::joins(const Io& before, const Io& next, size_t bytes) {
  return next.op == before.op && next.op != Io::Op::flush && next.file == before.file &&
         next.within_file == before.within_file && next.offset == before.offset + before.size && next.size != 0 &&
         bytes + next.size <= kMaxMergedBytes;
}

// Returns the most urgent lane that may issue a transfer now, or queues_.size() if none may. A read
// that waits for its parts does not stop less urgent lanes: they may go to other disks, and its own
// disk may be stalled. But the slots of its remaining parts stay reserved.
size_t EngineBase::next_lane() const {
  size_t taken = in_flight_, background = background_in_flight_;
  for (size_t n = 0; n < queues_.size(); ++n) {
    if (queues_[n].head == nullptr) continue;
    if (taken >= depth_ || (is_background(n) && background >= background_depth_)) break;
    if (!waits_for_its_parts(queues_[n])) return n;
    const size_t waiting = parts_left(*queues_[n].head);
    taken += waiting;
    if (is_background(n)) background += waiting;
  }
  return queues_.size();
}

bool EngineBase::launchable() const {
  return free_ != nullptr && next_lane() != queues_.size();
}

Transfer* EngineBase::take() {
  if (free_ == nullptr) return nullptr;
  const size_t n = next_lane();
  if (n == queues_.size()) return nullptr;
  if (is_background(n)) ++background_in_flight_;
  Transfer* transfer = free_;
  free_ = transfer->next_free;
  ++in_flight_;
  start_next(queues_[n], transfer);
  return transfer;
}

// Starts the first Io of the queue with the neighbours that join it, or its next part. An Io in
// parts stays in the queue until its last part starts.
void EngineBase::start_next(List& queue, Transfer* transfer) {
  Io* const first = queue.head;
  const FileSlot slot = first->file < files_.size() ? files_[first->file].slot : FileSlot{};
  if (in_parts(*first)) {
    Io::Parts& parts = first->parts;
    const size_t from = parts.begun;
    const size_t bytes = std::min(first->size - from, kPartBytes - (first->offset + from) % kPartBytes);
    parts.begun += bytes;
    ++parts.under_way;
    if (parts.begun == first->size) queue.pop();
    transfer->start_part(first, from, bytes, slot);
    return;
  }
  Io* last = queue.pop();
  unsigned count = 1;
  size_t bytes = first->size;
  while (queue.head != nullptr && count < kMaxPieces && first->size != 0 && joins(*last, *queue.head, bytes)) {
    last = last->next = queue.pop();
    bytes += last->size;
    ++count;
  }
  stats_.merged += count - 1;
  flush_begins(*first);
  transfer->start(first, count, slot);
}

void EngineBase::flush_begins(const Io& io) {
  if (io.op == Io::Op::flush && io.file < files_.size()) ++files_[io.file].flushes;
}

// The kernel reports a failure to write a descriptor's bytes only once. Several files here may
// share one descriptor, and several threads may flush one of them: each file gets the error.
void EngineBase::flush_ended(Io& io) {
  if (io.op != Io::Op::flush || io.file >= files_.size()) return;
  File& file = files_[io.file];
  if (file.slot.fd < 0 || file.flushes == 0) return;
  --file.flushes;
  const int earlier = std::exchange(file.lost, 0);
  if (io.result == 0) {
    io.result = earlier;
    return;
  }
  for (File& other : files_) {
    if (other.slot.fd == file.slot.fd && (&other != &file || other.flushes != 0)) other.lost = io.result;
  }
}

void EngineBase::retire(Transfer* transfer) {
  --in_flight_;
  if (is_background(lane(*transfer->chain()))) --background_in_flight_;
  stats_.retries += transfer->retries();
  if (Io* const whole = transfer->whole(); whole != nullptr) {
    transfer->leave_whole();
    part_ended(whole, *transfer->chain());
  } else {
    for (Io* io = transfer->chain(); io != nullptr;) {
      Io* const next = io->next;
      flush_ended(*io);
      ended(io);
      io = next;
    }
  }
  transfer->next_free = free_;
  free_ = transfer;
}

void EngineBase::part_ended(Io* whole, const Io& part) {
  Io::Parts& parts = whole->parts;
  const auto from = static_cast<size_t>(part.offset - whole->offset);
  --parts.under_way;
  if (part.transferred != 0) parts.last = std::max(parts.last, from + part.transferred);
  if (part.transferred < part.size) parts.moved = std::min(parts.moved, from + part.transferred);
  if (part.result != 0 && (parts.error == 0 || from < parts.failed_at)) {
    parts.error = part.result;
    parts.failed_at = from;
  }
  if (parts.error != 0 && parts.begun < whole->size) {
    queues_[lane(*whole)].pop();  // it is the first there, as it has begun
    parts.begun = whole->size;
  }
  const bool over = parts.under_way == 0 && parts.begun == whole->size;
  if (over || parts.error != 0) {
    drop_progress(whole);
  } else {
    note_progress(whole);
  }
  if (over && !parts.telling) conclude(whole);
}

// Its last part is over, and progress() is not running.
void EngineBase::conclude(Io* whole) {
  whole->result = whole->parts.error;
  whole->transferred = whole->parts.moved;
  ended(whole);
}

// Returns how many bytes from the beginning have moved without a gap.
size_t EngineBase::come(const Io& whole) const {
  size_t bytes = std::min(whole.parts.begun, whole.parts.moved);
  for (const Transfer& transfer : transfers_) {
    if (transfer.whole() == &whole)
      bytes = std::min(bytes, static_cast<size_t>(transfer.chain()->offset - whole.offset));
  }
  return bytes;
}

void EngineBase::note_progress(Io* whole) {
  Io::Parts& parts = whole->parts;
  if (whole->progress == nullptr || whole->op != Io::Op::read || parts.untold || parts.telling) return;
  if (come(*whole) <= parts.told) return;
  parts.untold = true;
  to_tell_.push_back(whole);
}

void EngineBase::drop_progress(Io* whole) {
  if (std::exchange(whole->parts.untold, false)) to_tell_.erase(std::find(to_tell_.begin(), to_tell_.end(), whole));
}

Io* EngineBase::next_to_tell() {
  if (to_tell_.empty()) return nullptr;
  Io* const io =
      *std::min_element(to_tell_.begin(), to_tell_.end(), [](const Io* a, const Io* b) { return lane(*a) < lane(*b); });
  drop_progress(io);
  Io::Parts& parts = io->parts;
  parts.told = std::min<size_t>(come(*io), parts.told + kPartBytes - (io->offset + parts.told) % kPartBytes);
  parts.telling = true;
  return io;
}

void EngineBase::tell(Io* io) {
  core::step("store.tell");
  io->progress(*io, io->parts.told);
  const core::MutexLock lock(mutex_);
  Io::Parts& parts = io->parts;
  parts.telling = false;
  if (parts.under_way == 0 && parts.begun == io->size) {
    conclude(io);
  } else if (parts.error == 0) {
    note_progress(io);
  }
}

void EngineBase::ended(Io* io) {
  if (io->result != 0) {
    ++stats_.errors;
  } else if (io->op == Io::Op::read) {
    ++stats_.reads;
    stats_.read_bytes += io->transferred;
  } else if (io->op == Io::Op::write) {
    ++stats_.writes;
    stats_.write_bytes += io->transferred;
  }
  finished_bytes_ += io->size;
  finished_[lane(*io)].push(io);
}

Io* EngineBase::next_finished() {
  for (List& list : finished_) {
    Io* io = list.pop();
    if (io == nullptr) continue;
    finished_bytes_ -= io->size;
    return io;
  }
  return nullptr;
}

void EngineBase::deliver(Io* io) {
  core::step("store.deliver");
  io->next = nullptr;
  // The file ended inside a part, and a later part found it longer: zero everything from there on.
  if (io->op == Io::Op::read && io->result == 0 && io->parts.last > io->transferred)
    memset(static_cast<char*>(io->buffer) + io->transferred, 0, io->parts.last - io->transferred);
  if (io->done != nullptr) io->done(*io);
}

core::Status EngineBase::add_file(int fd, FileId* id) {
  const int flags = descriptor_flags(fd);
  if (flags < 0) return core::system_error(flags, "cannot use descriptor %d for I/O", fd);
  const FileSlot slot{fd, (flags & O_DIRECT) != 0};
  core::MutexLock files(file_mutex_);
  {
    core::MutexLock lock(mutex_);
    if (free_files_.empty()) {
      *id = static_cast<FileId>(files_.size());
      free_files_.reserve(files_.size() + 1);  // so that remove_file() cannot fail
      files_.push_back({slot});
    } else {
      *id = free_files_.back();
      free_files_.pop_back();
      files_[*id] = {slot};
    }
  }
  file_added(*id, slot);
  return {};
}

void EngineBase::remove_file(FileId id) {
  core::MutexLock files(file_mutex_);
  bool known;
  {
    core::MutexLock lock(mutex_);
    known = id < files_.size() && files_[id].slot.fd >= 0;
    if (known) files_[id] = {};
  }
  if (!known) {
    VMEM_LOG_ONCE(core::Level::error, "An unknown file was taken out of the I/O engine. This is a defect in libvmem.");
    return;
  }
  file_removed(id);
  core::MutexLock lock(mutex_);
  free_files_.push_back(id);
}

EngineStats EngineBase::stats() const {
  core::MutexLock lock(mutex_);
  return stats_;
}

}  // namespace vmem::store
