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
constexpr size_t kTogetherBytes = size_t{32} << 20;  // .. while they are copied the next are mapped
constexpr size_t kFirstTogether = 4;                 // .. of groups with the token, beside as many and more of others
constexpr size_t kHintsTogether = 8;                 // .. of hints, which nobody waits for
constexpr size_t kVictimsTogether = 16;              // at least: to look at pins costs the same for one
constexpr uint64_t kHold = 20000000;                 // ns in which a group that looks for its block has seen it
constexpr uint64_t kPinned = 500000000;  // ns that kernels get to give up what they have, when all is taken back
constexpr uint64_t kFailed = 500000000;  // ns until a block that could not be had may be asked for again
constexpr size_t kMarkers = 2 * policy::ReadAhead::kStreams;
constexpr uint64_t kMarkerLook = 100000;  // ns between looks for those who have had a marker
constexpr size_t kLoansTogether = 64;
constexpr uint64_t kLook = 1000000;     // ns between looks for those who want what is lent
constexpr size_t kLooks = 4096;         // .. loans in a look
constexpr uint64_t kPromote = 2000000;  // ns between looks at how much is loaded from it
constexpr size_t kPromotions = 64;      // blocks that come for that, in a look; where no frame is free, fewer
constexpr size_t kRow = 1024;           // bytes of the link's time that a pin of what is in place is taken to cost
constexpr size_t kMapping = size_t{4} << 20;  // .. and to map a block in place of another one
constexpr uint64_t kLookShare = 8;     // looks take this part of the time at most: they are slow where the link is busy
constexpr uint64_t kBehind = 2000000;  // ns for releases: the kernel that asks may be what they are queued behind

// Adds the time of its life.
class Timed {
 public:
  explicit Timed(uint64_t* sum) : sum_(sum), begun_(pager::now_ns()) {}
  ~Timed() { *sum_ += pager::now_ns() - begun_; }
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
  over_.reserve(3 * frames_.size());  // until a make_room(), by that, and what is there in the end
  unwritten_.reserve(3 * frames_.size());
  ask_.tells_stores = true;
  ask_.patience_ns = kBehind;
  ask_.moves_blocks = true;
}

vmem_range PagingService::bytes_of(uint32_t block) const {
  const uintptr_t at = range_.first + block * range_.block_size;
  return {reinterpret_cast<const void*>(at), std::min(range_.block_size, range_.end - at), access_, 0};
}

// A word that could not be stored: what kernels believe is not known any more.
bool PagingService::broken() {
  if (broken_ || port_.failure.ok()) return broken_;
  broken_ = true;
  core::log(core::Level::error, "kernels of device %d are served no more blocks: %.*s", range_.device,
            static_cast<int>(port_.failure.text().size()), port_.failure.text().data());
  range_.words->end(Answer::ended).ignore();
  return true;
}

bool PagingService::round(pager::Pager& pager) {
  if (broken_) {
    if (const uint64_t now = pager::now_ns(); now - looked_ns_ >= kLook) {
      looked_ns_ = now;
      end_loans_of_broken(pager);
    }
    return false;
  }
  retry_failed(pager::now_ns());
  bool done = take_requests();
  const uint64_t begun = pager::now_ns();
  if (!markers_.empty()) look_at_markers(begun);
  if (!loans_.empty()) look_after_loans(pager, begun);
  lend(pager);
  serve(pager, first_, kFirstTogether);
  serve(pager, needed_, kTogether);
  if (needed_.empty()) serve(pager, prefetch_, kHintsTogether);
  end_leases(pager);
  done |= port_.progressed;
  tell();
  if (done) spent_.serving_ns += pager::now_ns() - begun;
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

// What is there already was requested before it came, and is dropped: whoever still wants it asks again.
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

// What comes next, if the block goes on with a stream.
void PagingService::read_ahead(uint32_t block, bool marker) {
  const auto window = readahead_.on_fault(block, marker, {frames_.size() / 2, 0});
  if (!window) return;
  for (uint32_t i = 0; i < window->count; ++i) {
    hint(window->first + i * static_cast<uint64_t>(window->stride), Ahead::stream);
  }
  if (markers_.size() < kMarkers) markers_.push_back({static_cast<uint32_t>(window->marker)});
}

// False: it is none, or on its way, or there.
bool PagingService::hint(uint64_t block, Ahead why) {
  if (block >= range_.blocks || states_.kind(static_cast<uint32_t>(block)) != Kind::not_present) return false;
  const auto b = static_cast<uint32_t>(block);
  if (urgency_[b] != Urgency{}) return false;
  ahead_[b] = why;
  prefetch_.push(b);
  return true;
}

// What was asked for behind this block before. When somebody has one in the middle of it, more.
void PagingService::read_recorded(uint32_t block) {
  const std::span<const uint32_t> next = recorded_.on_request(block);
  bool any = false;
  for (const uint32_t b : next) any |= hint(b, Ahead::record);
  if (any && markers_.size() < kMarkers) markers_.push_back({next[next.size() / 2], 0, false, Ahead::record});
}

// A group that has had one tells nobody: its pins are looked at. What is known of them may be as old as kMarkerLook.
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
    const Marker one = marker;  // had, or gone again
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
  // One of them cannot be had, or not all at once.
  for (const uint32_t b : batch_) {
    if (!bring_alone(pager, b)) queue_of(b).push(b);
  }
}

// False: it is to be tried again, since it could be had if kernels had less, or once other leases have ended.
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
  const uint64_t now = pager::now_ns();
  ++marks_;
  ++spent_.leases;
  spent_.blocks += count;
  port_.arrives = !core::broken("kernel_arrival");
  for (size_t i = 0; i < count; ++i) {
    Frame& frame = frames_[free_.back()];
    free_.pop_back();
    // One less: as if somebody had had it, so that the clock passes over it once.
    const uint32_t takes = paging::takes_of(range_.words->use(blocks[i]));
    frame = {blocks[i], true, marks_, now, takes - 1, takes, std::exchange(ahead_[blocks[i]], Ahead::no)};
    spent_.ahead += frame.ahead != Ahead::no ? 1 : 0;
    states_.publish(blocks[i], std::exchange(urgency_[blocks[i]], Urgency{}));
  }
  port_.arrives = false;
  port_.keep(range_.words->mark(marks_));
}

// Of those that a little is to be loaded from what the pager can lend; the others have to come.
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
  // What is on the device is leased where there is a frame for it; else it need not take another one's.
  const uint64_t begun = pager::now_ns();
  const size_t lent = pager.staging_loans().lend(range_, std::span(asking_).first(count), homes_, free_.empty());
  spent_.lending_ns += pager::now_ns() - begun;
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
    if (port_.failure.ok()) states_.lend(b);  // else groups would load from where another loan was
  }
  spent_.staging_loans += lent;
}

// No new pins. What it is wanted for, if anything, is in urgency_.
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
    // The first ones of what is wanted overwrite what has been looked at.
    const std::span<uint32_t> asked(asking_);
    const size_t wanted = pager.staging_loans().wanted(range_, asked.first(count), asked);
    for (size_t i = 0; i < wanted; ++i) recall(loans_[loan_of_[asking_[i]]]);
  }
  if (now - promoted_ns_ >= std::max(kPromote, kLookShare * look_took_ns_)) promote(pager, now);
  if (recalled_ != 0) end_loans(pager);
}

// From what is in place as much has been loaded as to page it in takes: it comes, into a frame that is free, or whose
// block nobody has had since the clock came by, which this moves on slowly. Where all blocks are had, none is better on
// the device than another.
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

// Of what was recalled, and no group has any more.
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
      if (loan.comes) urgency_[loan.block] = std::max(urgency_[loan.block], Urgency::needed);  // it is not lent again
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

// Some word was not stored, and what is lent is given up all the same: whoever waits for it may be who would end the
// range. What kernels believe of it is what could be stored just now.
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

// No kernel loads from any of them: they have ended, or their device is lost.
void PagingService::end_all_loans(pager::Pager& pager) {
  for (size_t i = 0, n = 0; i < loans_.size(); i += n) {
    for (n = 0; n < asking_.size() && i + n < loans_.size(); ++n) asking_[n] = loans_[i + n].block;
    pager.staging_loans().end(range_, std::span(asking_).first(n));
  }
  loans_.clear();
  recalled_ = 0;
}

void PagingService::fail(uint32_t block, const Status& why) {
  VMEM_LOG_OFTEN(core::Level::warning, "a block that a kernel of device %d asks for cannot be had: %.*s", range_.device,
                 static_cast<int>(why.text().size()), why.text().data());
  urgency_[block] = {};
  states_.fail(block, answer_for(why));
  failed_ns_[block] = pager::now_ns();
  failed_.push(block);
}

void PagingService::retry_failed(uint64_t now) {
  while (!failed_.empty() && now - failed_ns_[failed_.front()] > kFailed) {
    states_.retry(failed_.front());
    failed_.pop();
  }
}

// Frames whose blocks nobody seems to have, into victims_: a clock that passes once over those that were had since it
// came by last.
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
  const uint64_t begun = pager::now_ns();
  states_.settle();
  settled_ns_ = pager::now_ns();
  look_took_ns_ = settled_ns_ - begun;
  spent_.looking_ns += look_took_ns_;
  ++spent_.looks;
}

// So many frames more, if blocks can be found that nobody has. What is known of pins is as old as the last settle().
// looks: frames that are looked at; each twice where nothing is said.
size_t PagingService::make_room(pager::Pager& pager, size_t frames, size_t looks) {
  if (broken_ || free_.size() == frames_.size() || over_.size() > frames_.size()) return 0;
  const bool all = looks == SIZE_MAX;
  if (all) looks = 2 * frames_.size();
  const size_t most = all ? std::max(frames, std::min(kVictimsTogether, frames_.size() / 4)) : frames;
  if (choose_victims(most, pager::now_ns(), looks) == 0) {
    if (!all) return 0;
    settle();
    if (broken() || choose_victims(most, pager::now_ns(), looks) == 0) return 0;
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

// After the last settle() nobody stores to it in this generation.
void PagingService::is_over(uint32_t block) {
  over_.push_back(bytes_of(block));
  const bool written = broken_ || states_.was_written(block);
  if ((access_ & VMEM_WRITE) != 0 && (!written || core::broken("kernel_stores"))) unwritten_.push_back(over_.back());
}

// Of blocks that no kernel has any more. What could not be ended for want of memory is tried again.
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
  const uint64_t until = pager::now_ns() + kPinned;
  std::fill(urgency_.begin(), urgency_.end(), Urgency{});
  for (bool some = true; some && !broken(); core::step("asking.taking_back")) {
    some = false;
    const bool last = pager::now_ns() > until;
    const uint64_t reached = range_.words->reached();
    for (Frame& frame : frames_) {
      if (frame.used && frame.mark <= reached && states_.kind(frame.block) == Kind::present)
        states_.begin_eviction(frame.block);
    }
    for (Loan& loan : loans_) recall(loan);
    if (recalled_ != 0) end_loans(pager);
    some = !loans_.empty() && !last;
    states_.settle();
    if (broken()) break;  // its loans end below
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
    if (pager::now_ns() > until) break;
  }
}

void PagingService::cancel() {
  ask_.cancelled.store(true, std::memory_order_relaxed);
}

bool PagingService::give_leases_back(pager::Pager& pager) {
  uint32_t pinned = 0;
  if (!broken()) states_.settle();
  broken();  // what is known of stores may be old
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
  core::log(
      core::Level::info,
      "kernels of device %d had %llu blocks by %llu leases in %.1f ms: %.1f to take leases, %.1f to look at pins "
      "(%llu times, %llu blocks in use), %.1f to end leases; %llu were lent in place in %.1f ms, %llu read ahead, "
      "%llu of them for nobody",
      range_.device, static_cast<unsigned long long>(spent_.blocks), static_cast<unsigned long long>(spent_.leases),
      ms(spent_.serving_ns), ms(spent_.leasing_ns), ms(spent_.looking_ns),
      static_cast<unsigned long long>(spent_.looks), static_cast<unsigned long long>(spent_.passed),
      ms(spent_.ending_ns), static_cast<unsigned long long>(spent_.staging_loans), ms(spent_.lending_ns),
      static_cast<unsigned long long>(spent_.ahead), static_cast<unsigned long long>(spent_.wasted));
}

}  // namespace vmem::api
