#include "kernel_paging/paging_service.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "core/break.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/step.h"
#include "pager/pager.h"

namespace vmem::api {

using core::Status;
using paging::Answer;
using paging::Kind;
using paging::Urgency;

namespace {

constexpr size_t kTogether = 16;                     // blocks of one lease
constexpr size_t kTogetherBytes = size_t{32} << 20;  // bytes of one lease: while they are copied, the next are mapped
constexpr size_t kFirstTogether = 4;     // blocks of one lease for groups with the token: others get their share
constexpr size_t kHintsTogether = 8;     // blocks of one lease for hints, for which no group waits
constexpr size_t kVictimsTogether = 16;  // at least: a look at the pins costs the same for one block
constexpr uint64_t kHold = 20000000;     // ns: a group that looks for its block has seen it by then
constexpr uint64_t kPinned = 500000000;  // ns that take_back() gives kernels to release their blocks
constexpr uint64_t kFailed = 500000000;  // ns until kernels may request a failed block again
constexpr size_t kMarkers = 2 * policy::ReadAhead::kStreams;
constexpr uint64_t kMarkerLook = 100000;  // ns between looks at the pins of markers
constexpr size_t kLoansTogether = 64;
constexpr uint64_t kLook = 1000000;           // ns between looks for threads that wait for lent blocks
constexpr size_t kLooks = 4096;               // loans in one such look
constexpr uint64_t kPromote = 2000000;        // ns between counts of the loads from lent blocks
constexpr size_t kPromotions = 64;            // promotions after one count; fewer if no frame is free
constexpr size_t kRow = 1024;                 // cost of a pin in place, as bytes over the link
constexpr size_t kMapping = size_t{4} << 20;  // cost of mapping a block in place of another, as bytes over the link
constexpr uint64_t kLookShare = 8;            // counts take at most 1/8 of the time: a busy link slows them
constexpr uint64_t kBehind = 2000000;  // ns to wait for releases: they may be queued behind the kernel that requests

// Adds its lifetime to *sum.
class Timed {
 public:
  explicit Timed(uint64_t* sum) : sum_(sum), begun_(core::now_ns()) {}
  ~Timed() { *sum_ += core::now_ns() - begun_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  uint64_t* const sum_;
  const uint64_t begun_;
};

Answer answer_for(const Status& why) {
  switch (-why.code()) {
    case ENOMEM:
    case ENOSPC:
      return Answer::no_memory;
    case EBUSY:
      return Answer::busy;
    default:
      return Answer::io_error;
  }
}

}  // namespace

PagingService::PagingService(pager::KernelRange range, unsigned access)
    : range_(std::move(range)),
      access_(access),
      port_{range_.words.get()},
      known_(range_.blocks),
      states_(&port_, known_.data()),
      requests_(range_.words->table()),
      first_(range_.blocks),
      needed_(range_.blocks),
      rows_(range_.blocks),
      prefetch_(range_.blocks),
      failed_(range_.blocks),
      failed_ns_(range_.blocks),
      urgency_(range_.blocks),
      frames_(range_.frames),
      readahead_(range_.blocks, range_.readahead),
      recorded_(range_.blocks, std::min(range_.readahead, range_.frames / 4)),
      ahead_(range_.blocks) {
  for (uint32_t f = range_.frames; f-- > 0;) free_.push_back(f);
  victims_.reserve(frames_.size());
  batch_.reserve(kTogether);
  markers_.reserve(kMarkers);
  if (range_.words->reads_host()) {
    loans_.reserve(range_.blocks);
    loan_of_.resize(range_.blocks);
    asking_.resize(std::max<size_t>(kLooks, kLoansTogether));
    homes_.resize(kLoansTogether);
  }
  ranges_.reserve(kTogether);
  over_.reserve(3 * frames_.size());  // before a make_room(), by it, and at the end
  unwritten_.reserve(3 * frames_.size());
  ask_.tells_stores = true;
  ask_.patience_ns = kBehind;
  ask_.moves_blocks = true;
}

vmem_range PagingService::bytes_of(uint32_t block) const {
  const uintptr_t at = range_.first + block * range_.block_size;
  return {reinterpret_cast<const void*>(at), std::min(range_.block_size, range_.end - at), access_, 0};
}

// Returns true if a word could not be stored, and ends the service then: which states kernels see
// is unknown.
bool PagingService::broken() {
  if (broken_ || port_.failure.ok()) return broken_;
  broken_ = true;
  core::log(core::Level::error, "kernels of device %d get no more blocks: %.*s", range_.device,
            static_cast<int>(port_.failure.text().size()), port_.failure.text().data());
  range_.words->end(Answer::ended).ignore();
  return true;
}

bool PagingService::round(pager::Pager& pager) {
  if (broken_) {
    if (const uint64_t now = core::now_ns(); now - looked_ns_ >= kLook) {
      looked_ns_ = now;
      end_loans_of_broken(pager);
    }
    return false;
  }
  retry_failed(core::now_ns());
  bool done = take_requests();
  const uint64_t begun = core::now_ns();
  if (!markers_.empty()) look_at_markers(begun);
  if (!loans_.empty()) look_after_loans(pager, begun);
  lend(pager);
  serve(pager, first_, kFirstTogether);
  serve(pager, needed_, kTogether);
  if (needed_.empty()) serve(pager, prefetch_, kHintsTogether);
  end_leases(pager);
  done |= port_.progressed;
  tell();
  if (done) spent_.serving_ns += core::now_ns() - begun;
  broken();
  return done;
}

PagingService::BlockQueue& PagingService::queue_of(uint32_t block) {
  switch (urgency_[block]) {
    case Urgency::prefetch:
      return prefetch_;
    case Urgency::first:
      return first_;
    case Urgency::rows:
      return rows_;
    default:
      return needed_;
  }
}

// Drops a request for a block that is no longer absent: the request is older than the block's
// arrival. A group that still wants the block requests it again.
bool PagingService::take_requests() {
  bool any = false;
  for (Request request; requests_.take(&request, &port_);) {
    any = true;
    const uint32_t b = request.block;
    if (b >= range_.blocks) continue;
    const Kind kind = states_.kind(b);
    if (kind == Kind::in_place && request.urgency > Urgency::rows) {
      urgency_[b] = request.urgency;
      recall(loans_[loan_of_[b]]);
      continue;
    }
    if (kind != Kind::not_present) continue;
    if (request.urgency > Urgency::rows && urgency_[b] <= Urgency::rows) {
      ahead_[b] = Ahead::no;
      read_ahead(b, false);
      read_recorded(b);
    }
    urgency_[b] = std::max(urgency_[b], request.urgency);
    queue_of(b).push(b);
  }
  return any;
}

// Requests the next blocks as hints, if the block continues a stream.
void PagingService::read_ahead(uint32_t block, bool marker) {
  const auto window = readahead_.on_fault(block, marker, {frames_.size() / 2, 0});
  if (!window) return;
  for (uint32_t i = 0; i < window->count; ++i) {
    hint(window->first + i * static_cast<uint64_t>(window->stride), Ahead::stream);
  }
  if (markers_.size() < kMarkers) markers_.push_back({static_cast<uint32_t>(window->marker)});
}

// Returns false if the block is outside the range, requested already, or not absent.
bool PagingService::hint(uint64_t block, Ahead why) {
  if (block >= range_.blocks || states_.kind(static_cast<uint32_t>(block)) != Kind::not_present) return false;
  const auto b = static_cast<uint32_t>(block);
  if (urgency_[b] != Urgency{}) return false;
  ahead_[b] = why;
  prefetch_.push(b);
  return true;
}

// Requests as hints the blocks that followed this one in the recorded order. A use of the middle
// one, the marker, requests more.
void PagingService::read_recorded(uint32_t block) {
  const std::span<const uint32_t> next = recorded_.on_request(block);
  bool any = false;
  for (const uint32_t b : next) any |= hint(b, Ahead::record);
  if (any && markers_.size() < kMarkers) markers_.push_back({next[next.size() / 2], 0, false, Ahead::record});
}

// Reads further ahead for markers that groups have used. Groups do not report a use, so this looks
// at the markers' pins, which may be as old as kMarkerLook.
void PagingService::look_at_markers(uint64_t now) {
  if (now - settled_ns_ > kMarkerLook) settle();
  if (broken()) return;
  for (size_t i = 0; i < markers_.size();) {
    Marker& marker = markers_[i];
    const uint32_t use = range_.words->use(marker.block), takes = paging::takes_of(use);
    const bool there = states_.kind(marker.block) == Kind::present;
    const bool had = there && marker.came && (takes != marker.takes || paging::pins_of(use) != 0);
    if (there && !marker.came) marker = {marker.block, takes, true, marker.kind};
    if (!had && (there || (!marker.came && ahead_[marker.block] != Ahead::no))) {
      ++i;
      continue;
    }
    const Marker one = marker;  // used, or evicted again
    marker = markers_.back();
    markers_.pop_back();
    if (!had) continue;
    one.kind == Ahead::record ? read_recorded(one.block) : read_ahead(one.block, true);
  }
}

void PagingService::serve(pager::Pager& pager, BlockQueue& queue, size_t most) {
  while (!queue.empty() && states_.kind(queue.front()) != Kind::not_present) queue.pop();
  if (queue.empty()) return;
  const size_t wanted = std::min({queue.size(), most, std::max<size_t>(2, kTogetherBytes / range_.block_size)});
  if (free_.size() < wanted) make_room(pager, wanted - free_.size());
  batch_.clear();
  while (!queue.empty() && batch_.size() < std::min(wanted, free_.size())) {
    const uint32_t b = queue.front();
    queue.pop();
    if (states_.kind(b) == Kind::not_present) batch_.push_back(b);
  }
  if (!batch_.empty() && !broken()) bring(pager);
}

Status PagingService::lease(pager::Pager& pager, const uint32_t* blocks, size_t count) try {
  const Timed timed(&spent_.leasing_ns);
  core::step("asking.leasing");
  ranges_.clear();
  for (size_t i = 0; i < count; ++i) ranges_.push_back(bytes_of(blocks[i]));
  void* const stream = range_.words->arrivals();
  if (Status s = pager.acquire_requests().ask(ranges_, range_.device, stream, &ask_); !s.ok()) return s;
  return pager.acquire(ranges_, range_.device, stream, &ask_);
} catch (const std::bad_alloc&) {
  return core::error(ENOMEM, "no memory for bookkeeping");
}

void PagingService::bring(pager::Pager& pager) {
  if (batch_.size() > 1) {
    if (lease(pager, batch_.data(), batch_.size()).ok()) return publish(batch_.data(), batch_.size());
  }
  // A block cannot be leased, or not all of them at once.
  for (const uint32_t b : batch_) {
    if (!bring_alone(pager, b)) queue_of(b).push(b);
  }
}

// Returns false if it must be tried again: the lease may succeed when kernels hold fewer blocks, or
// when other leases have ended.
bool PagingService::bring_alone(pager::Pager& pager, uint32_t block) {
  Status s = lease(pager, &block, 1);
  while ((s.code() == -ENOMEM || s.code() == -EAGAIN) && make_room(pager, 1) != 0) {
    end_leases(pager);
    s = lease(pager, &block, 1);
  }
  if (s.ok()) {
    publish(&block, 1);
    return true;
  }
  if (ask_.cancelled.load(std::memory_order_relaxed)) return false;
  if (s.code() == -EAGAIN || s.code() == -EALREADY) return false;
  if (s.code() == -ENOMEM && free_.size() < frames_.size()) return false;
  fail(block, s);
  return true;
}

void PagingService::publish(const uint32_t* blocks, size_t count) {
  core::step("asking.publishing");
  const uint64_t now = core::now_ns();
  ++marks_;
  ++spent_.leases;
  spent_.blocks += count;
  port_.arrives = !core::broken("kernel_arrival");
  for (size_t i = 0; i < count; ++i) {
    Frame& frame = frames_[free_.back()];
    free_.pop_back();
    // Record one use less than there was: the clock then sees a use and passes over the block once.
    const uint32_t takes = paging::takes_of(range_.words->use(blocks[i]));
    frame = {blocks[i], true, marks_, now, takes - 1, takes, std::exchange(ahead_[blocks[i]], Ahead::no)};
    spent_.ahead += frame.ahead != Ahead::no ? 1 : 0;
    states_.publish(blocks[i], std::exchange(urgency_[blocks[i]], Urgency{}));
  }
  port_.arrives = false;
  port_.keep(range_.words->mark(marks_));
}

// Lends the blocks of rows_ that the pager has in staging frames. The others have to come.
void PagingService::lend(pager::Pager& pager) {
  size_t count = 0;
  for (; !rows_.empty() && count < kLoansTogether; rows_.pop()) {
    const uint32_t b = rows_.front();
    // A group may have asked for more since.
    if (states_.kind(b) != Kind::not_present || urgency_[b] != Urgency::rows) continue;
    if (loans_.capacity() == 0) {
      needed_.push(b);
    } else {
      asking_[count++] = b;
    }
  }
  if (count == 0 || broken()) return;
  core::step("asking.lending");
  // If a frame is free, a block that is on the device is leased. If none is, it leaves the device
  // and is lent, so that it needs no other block's frame.
  const uint64_t begun = core::now_ns();
  const size_t lent = pager.staging_loans().lend(range_, std::span(asking_).first(count), homes_, free_.empty());
  spent_.lending_ns += core::now_ns() - begun;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t b = asking_[i];
    if (i >= lent) {
      needed_.push(b);
      continue;
    }
    urgency_[b] = {};
    loan_of_[b] = static_cast<uint32_t>(loans_.size());
    loans_.push_back({b, paging::takes_of(range_.words->use(b))});
    port_.keep(range_.words->set_home(b, reinterpret_cast<uintptr_t>(homes_[i])));
    if (port_.failure.ok()) states_.lend(b);  // else groups would load from an older loan's address
  }
  spent_.staging_loans += lent;
}

// Stops new pins. If kernels want the block on the device, urgency_ says so.
void PagingService::recall(Loan& loan) {
  if (std::exchange(loan.over, true)) return;
  states_.begin_eviction(loan.block);
  ++recalled_;
}

void PagingService::look_after_loans(pager::Pager& pager, uint64_t now) {
  if (recalled_ == 0 && now - looked_ns_ < kLook) return;
  if (now - looked_ns_ >= kLook && !broken()) {
    looked_ns_ = now;
    size_t count = 0;
    for (size_t i = 0; i < std::min(kLooks, loans_.size()); ++i) {
      Loan& loan = loans_[looked_++ % loans_.size()];
      if (loan.over) continue;
      asking_[count++] = loan.block;
    }
    // The result overwrites the front of the input, which wanted() has read by then.
    const std::span<uint32_t> asked(asking_);
    const size_t wanted = pager.staging_loans().wanted(range_, asked.first(count), asked);
    for (size_t i = 0; i < wanted; ++i) recall(loans_[loan_of_[asking_[i]]]);
  }
  if (now - promoted_ns_ >= std::max(kPromote, kLookShare * look_took_ns_)) promote(pager, now);
  if (recalled_ != 0) end_loans(pager);
}

// Promotes lent blocks whose loads have cost as much as paging them in. They get free frames, or
// frames whose blocks no group has used since the clock last came by. The search for those moves
// the clock only a little. If all blocks are in use, none is better on the device than another.
void PagingService::promote(pager::Pager& pager, uint64_t now) {
  promoted_ns_ = now;
  settle();
  if (broken()) return;
  size_t hot = 0;
  for (Loan& loan : loans_) {
    const uint32_t takes = paging::takes_of(range_.words->use(loan.block));
    loan.loads += static_cast<uint8_t>(takes - std::exchange(loan.takes, takes));
    const size_t enough = free_.empty() ? range_.block_size + kMapping : range_.block_size / 4;
    if (!loan.over && loan.loads * kRow >= enough && hot < kPromotions) asking_[hot++] = loan.block;
  }
  if (hot == 0) return;
  if (free_.empty()) make_room(pager, std::min(hot, size_t{8}), frames_.size() / 64 + 1);
  for (size_t i = 0; i < std::min(hot, free_.size()); ++i) {
    Loan& loan = loans_[loan_of_[asking_[i]]];
    loan.comes = true;
    recall(loan);
  }
}

// Ends the recalled loans of blocks that no group has.
void PagingService::end_loans(pager::Pager& pager) {
  settle();
  if (!broken()) end_recalled(pager);
}

void PagingService::end_recalled(pager::Pager& pager) {
  while (recalled_ != 0) {
    size_t count = 0;
    for (size_t i = 0; i < loans_.size() && count < asking_.size();) {
      const Loan loan = loans_[i];
      if (!loan.over || states_.in_use(loan.block)) {
        ++i;
        continue;
      }
      states_.finish(loan.block);
      if (loan.comes) urgency_[loan.block] = std::max(urgency_[loan.block], Urgency::needed);  // not lent again
      asking_[count++] = loan.block;
      loans_[i] = loans_.back();
      loan_of_[loans_[i].block] = static_cast<uint32_t>(i);
      loans_.pop_back();
    }
    if (count == 0) return;
    recalled_ -= count;
    pager.staging_loans().end(range_, std::span(asking_).first(count));
    for (size_t i = 0; i < count; ++i)
      if (urgency_[asking_[i]] != Urgency{}) queue_of(asking_[i]).push(asking_[i]);
  }
}

// Ends loans although a word could not be stored, because the thread that waits for a lent block
// may be the one that would end the range. Stores the states of all lent blocks again; if that
// works, kernels know of the recall.
void PagingService::end_loans_of_broken(pager::Pager& pager) {
  if (loans_.empty()) return;
  if (range_.words->lost()) return end_all_loans(pager);
  bool told = true;
  for (Loan& loan : loans_) {
    recall(loan);
    told &= range_.words->set_state(loan.block, known_[loan.block].state, false).ok();
  }
  if (told && range_.words->settle().ok()) end_recalled(pager);
}

// Requires that no kernel loads from any loan: all have ended, or the device is lost.
void PagingService::end_all_loans(pager::Pager& pager) {
  for (size_t i = 0, n = 0; i < loans_.size(); i += n) {
    for (n = 0; n < asking_.size() && i + n < loans_.size(); ++n) asking_[n] = loans_[i + n].block;
    pager.staging_loans().end(range_, std::span(asking_).first(n));
  }
  loans_.clear();
  recalled_ = 0;
}

void PagingService::fail(uint32_t block, const Status& why) {
  VMEM_LOG_OFTEN(core::Level::warning, "a block that a kernel of device %d requested is not available: %.*s",
                 range_.device, static_cast<int>(why.text().size()), why.text().data());
  urgency_[block] = {};
  states_.fail(block, answer_for(why));
  failed_ns_[block] = core::now_ns();
  failed_.push(block);
}

void PagingService::retry_failed(uint64_t now) {
  while (!failed_.empty() && now - failed_ns_[failed_.front()] > kFailed) {
    states_.retry(failed_.front());
    failed_.pop();
  }
}

// Collects in victims_ at most `most` frames whose blocks no group seems to have; returns how many.
// The clock passes once over blocks that groups have used since it last came by.
size_t PagingService::choose_victims(size_t most, uint64_t now, size_t looks) {
  victims_.clear();
  const uint64_t reached = range_.words->reached();
  for (size_t seen = 0; seen < looks && victims_.size() < most; ++seen) {
    const auto f = static_cast<uint32_t>(hand_++ % frames_.size());
    Frame& frame = frames_[f];
    if (!frame.used || frame.mark > reached || states_.kind(frame.block) != Kind::present) continue;
    if (std::find(victims_.begin(), victims_.end(), f) != victims_.end()) continue;
    const uint32_t use = range_.words->use(frame.block);
    if (paging::pins_of(use) != 0 && !core::broken("kernel_pins")) continue;
    if (states_.untaken(frame.block) && now - frame.since_ns < kHold) continue;
    if (std::exchange(frame.takes, paging::takes_of(use)) != paging::takes_of(use)) continue;
    victims_.push_back(f);
  }
  return victims_.size();
}

void PagingService::settle() {
  const uint64_t begun = core::now_ns();
  states_.settle();
  settled_ns_ = core::now_ns();
  look_took_ns_ = settled_ns_ - begun;
  spent_.looking_ns += look_took_ns_;
  ++spent_.looks;
}

// Evicts blocks that no group has, to free `frames` frames; returns how many it freed, which may be
// more or fewer. Victims are chosen by pins as old as the last settle(). looks: frames that the
// clock looks at; SIZE_MAX: each one twice.
size_t PagingService::make_room(pager::Pager& pager, size_t frames, size_t looks) {
  if (broken_ || free_.size() == frames_.size() || over_.size() > frames_.size()) return 0;
  const bool all = looks == SIZE_MAX;
  if (all) looks = 2 * frames_.size();
  const size_t most = all ? std::max(frames, std::min(kVictimsTogether, frames_.size() / 4)) : frames;
  if (choose_victims(most, core::now_ns(), looks) == 0) {
    if (!all) return 0;
    settle();
    if (broken() || choose_victims(most, core::now_ns(), looks) == 0) return 0;
  }
  for (const uint32_t f : victims_) states_.begin_eviction(frames_[f].block);
  core::step("asking.evicting");
  settle();
  if (broken()) return 0;
  size_t got = 0;
  for (const uint32_t f : victims_) {
    const uint32_t b = frames_[f].block;
    if (states_.in_use(b) && !core::broken("kernel_pins")) {
      states_.cancel(b);
      ++spent_.passed;
      continue;
    }
    is_over(b);
    states_.finish(b);
    if (frames_[f].ahead != Ahead::no && paging::takes_of(range_.words->use(b)) == frames_[f].came) {
      frames_[f].ahead == Ahead::record ? recorded_.on_waste() : readahead_.on_waste(b);
      ++spent_.wasted;
    }
    frames_[f].used = false;
    free_.push_back(f);
    ++got;
  }
  end_leases(pager);
  return got;
}

// Queues the end of the block's lease. No group can store to the block in this generation any more:
// the last settle() has shown that.
void PagingService::is_over(uint32_t block) {
  over_.push_back(bytes_of(block));
  const bool written = broken_ || states_.was_written(block);
  if ((access_ & VMEM_WRITE) != 0 && (!written || core::broken("kernel_stores"))) unwritten_.push_back(over_.back());
}

// Ends the leases in over_. If memory is short they stay there, and the next call tries again.
void PagingService::end_leases(pager::Pager& pager) try {
  if (over_.empty()) return;
  const Timed timed(&spent_.ending_ns);
  core::step("asking.releasing");
  if (!unwritten_.empty()) pager.kernel_ranges().not_changed(unwritten_, range_.device);
  unwritten_.clear();
  const Status s = pager.release(over_, range_.words->arrivals(), range_.words->departures(), true);
  if (s.ok() || s.code() == -EINVAL) over_.clear();
} catch (const std::bad_alloc&) {
}

void PagingService::tell() {
  if (!std::exchange(port_.progressed, false)) return;
  port_.keep(range_.words->progress(++progress_));
}

void PagingService::end_asking() {
  range_.words->end(Answer::ended).ignore();
}

void PagingService::take_back(pager::Pager& pager) {
  const uint64_t until = core::now_ns() + kPinned;
  std::fill(urgency_.begin(), urgency_.end(), Urgency{});
  for (bool some = true; some && !broken(); core::step("asking.taking_back")) {
    some = false;
    const bool last = core::now_ns() > until;
    const uint64_t reached = range_.words->reached();
    for (Frame& frame : frames_) {
      if (frame.used && frame.mark <= reached && states_.kind(frame.block) == Kind::present)
        states_.begin_eviction(frame.block);
    }
    for (Loan& loan : loans_) recall(loan);
    if (recalled_ != 0) end_loans(pager);
    some = !loans_.empty() && !last;
    states_.settle();
    if (broken()) break;  // the loans end below
    for (Frame& frame : frames_) {
      if (!frame.used) continue;
      if (states_.kind(frame.block) != Kind::evicting || states_.in_use(frame.block)) {
        some |= !last;
        if (last && states_.kind(frame.block) == Kind::evicting) states_.cancel(frame.block);
        continue;
      }
      is_over(frame.block);
      states_.finish(frame.block);
      frame.used = false;
    }
    end_leases(pager);
    some |= !over_.empty() && !last;
    if (some) usleep(1000);
  }
  for (; broken_ && !loans_.empty(); usleep(1000)) {
    end_loans_of_broken(pager);
    if (core::now_ns() > until) break;
  }
}

void PagingService::cancel() {
  ask_.cancelled.store(true, std::memory_order_relaxed);
}

bool PagingService::give_leases_back(pager::Pager& pager) {
  uint32_t pinned = 0;
  if (!broken()) states_.settle();
  broken();  // then `written` may be old
  for (Frame& frame : frames_) {
    if (!frame.used) continue;
    frame.used = false;
    if (!broken_) pinned += paging::pins_of(range_.words->use(frame.block)) != 0 ? 1 : 0;
    is_over(frame.block);
  }
  end_all_loans(pager);
  if (pinned != 0 && port_.failure.ok()) {
    core::log(core::Level::warning, "kernels of device %d ended without a release of %u blocks that they had acquired",
              range_.device, pinned);
  }
  end_leases(pager);
  if (over_.empty()) say_what_it_took();
  return over_.empty();
}

void PagingService::say_what_it_took() {
  const auto ms = [](uint64_t ns) { return static_cast<double>(ns) / 1e6; };
  core::log(core::Level::info,
            "kernels of device %d had %llu blocks by %llu leases in %.1f ms: %.1f to take leases, %.1f to look at pins "
            "(%llu times, %llu blocks in use), %.1f to end leases; %llu were lent in place in %.1f ms, %llu read "
            "ahead, %llu of them unused",
            range_.device, static_cast<unsigned long long>(spent_.blocks),
            static_cast<unsigned long long>(spent_.leases), ms(spent_.serving_ns), ms(spent_.leasing_ns),
            ms(spent_.looking_ns), static_cast<unsigned long long>(spent_.looks),
            static_cast<unsigned long long>(spent_.passed), ms(spent_.ending_ns),
            static_cast<unsigned long long>(spent_.staging_loans), ms(spent_.lending_ns),
            static_cast<unsigned long long>(spent_.ahead), static_cast<unsigned long long>(spent_.wasted));
}

}  // namespace vmem::api
