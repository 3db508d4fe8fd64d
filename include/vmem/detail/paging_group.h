// The group's side of the protocol: a warp or a thread block, of which one thread makes the calls.
// The group has a barrier after an acquire, before its accesses, and one after these, before the
// release.
#pragma once

#include "vmem/detail/paging_pins.h"
#include "vmem/detail/paging_protocol.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

// To avoid deadlocks:
// - acquire() waits, so it refuses a group that holds pins: acquire together what is needed
//   together. try_acquire() and prefetch() never wait, and are always allowed.
// - A group that holds pins waits for no group that may be acquiring (a barrier of the grid, a
//   lock, a queue). The protocol cannot see that; acquires then end with no_progress.
// - Release pins soon: a block leaves only when no group has it.
//
// One object per group; it shares nothing. A list may have a block more than once. kRounds: tries
// without the token; with it, the group that has waited longest comes first.
template <typename Atomics, uint32_t kRounds = 4>
class Group : private Pins<Atomics> {
  using Pins<Atomics>::table_;
  using Pins<Atomics>::pin;
  using Pins<Atomics>::pin_some;
  using Pins<Atomics>::unpin;
  using Pins<Atomics>::let_go;
  using Pins<Atomics>::ask;

 public:
  // patience: how long, in units of Atomics::now(), an acquire waits while the server makes no
  // progress for any group. longest: how long it waits in all.
  VMEM_PAGING Group(const Table<Atomics>& table, uint64_t patience, uint64_t longest = ~uint64_t{0})
      : Pins<Atomics>(table), patience_(patience), longest_(longest) {}

  // Whether to go on waiting. Progress for any group counts: a group far back in the queue will
  // still be served.
  class Watch {
   public:
    VMEM_PAGING Watch(const Table<Atomics>& table, uint64_t patience, uint64_t longest)
        : control_(table.control),
          patience_(patience),
          longest_(longest),
          seen_(Atomics::load(&control_->progress)),
          since_(0),
          begun_(0) {}
    VMEM_PAGING Answer check() {
      const uint32_t ended = Atomics::load(&control_->ended);
      if (ended != 0) return static_cast<Answer>(ended);
      const uint64_t progress = Atomics::load(&control_->progress), now = Atomics::now();
      if (begun_ == 0) begun_ = now;
      if (since_ == 0 || progress != seen_) {
        seen_ = progress;
        since_ = now;
      }
      if (now - begun_ > longest_) return Answer::timed_out;
      return now - since_ > patience_ ? Answer::no_progress : Answer::present;
    }

   private:
    Control<Atomics>* control_;
    uint64_t patience_, longest_, seen_, since_, begun_;
  };

  VMEM_PAGING Watch watch() const { return Watch(table_, patience_, longest_); }

  // Pins the block, or requests it and returns not_yet.
  VMEM_PAGING Answer try_acquire(uint32_t block, Intent intent) {
    if (block >= table_.blocks) return Answer::out_of_range;
    const Answer answer = pin(block, intent);
    if (answer == Answer::present) {
      ++held_;
    } else if (answer == Answer::not_yet) {
      ask(block, Urgency::wait);
      // Otherwise only a group that waits looks at this.
      if (Atomics::load(&table_.control->ended) != 0) return ended();
    }
    return answer;
  }

  // As try_acquire, for a group that only loads a little. The block may be in place: *home is then
  // the address of its bytes, and otherwise 0 (they are at the block's own address). A pin in place
  // waits for nothing.
  VMEM_PAGING Answer try_read(uint32_t block, uint64_t* home) {
    *home = 0;
    if (block >= table_.blocks) return Answer::out_of_range;
    const Answer answer = pin(block, Intent::read, home);
    if (answer == Answer::present) {
      ++held_;
    } else if (answer == Answer::not_yet) {
      ask(block, Urgency::rows);
      if (Atomics::load(&table_.control->ended) != 0) return ended();
    }
    return answer;
  }

  // A hint, which may be lost when many groups ask at once.
  VMEM_PAGING void prefetch(uint32_t block) {
    if (block < table_.blocks) ask(block, Urgency::prefetch);
  }

  // Requests a block that the group tries to read repeatedly from here on, among others.
  VMEM_PAGING void request(uint32_t block) {
    if (block < table_.blocks) ask(block, Urgency::rows);
  }

  VMEM_PAGING Answer acquire(uint32_t block, Intent intent) { return acquire_all(&block, 1, intent); }

  // Pins all blocks list[0] to list[count - 1], or none and returns an error.
  //
  // - A group that lacks a block gives up the others before it waits, so that no group waits for
  //   memory that a waiting group holds.
  // - That alone could go on for ever, each group evicting what another has just got. So after some
  //   rounds a group waits for the token.
  // - A group with the token keeps the blocks that it gets. Tokens are given for no more blocks
  //   than there are frames for.
  // - A group that wants one block needs the token, too, if others have taken the block each time.
  template <typename List>
  VMEM_PAGING Answer acquire_all(const List& list, uint32_t count, Intent intent) {
    if (held_ != 0) return Answer::would_deadlock;
    if (count > table_.frames) return Answer::too_many;
    for (uint32_t i = 0; i < count; ++i) {
      if (list[i] >= table_.blocks) return Answer::out_of_range;
    }
    Watch watch = this->watch();
    uint32_t waited = 0;
    for (uint32_t round = 0;; ++round) {
      uint32_t pinned = 0;
      Answer answer = pin_some(list, count, intent, &pinned);
      if (answer == Answer::present) return held(count);
      if (waited > pinned) let_go(list[waited]);
      unpin(list, pinned);
      if (answer != Answer::not_yet) return answer;
      if (round == kRounds) return acquire_with_token(list, count, intent, &watch);
      answer = wait_for(list, pinned, count, Urgency::wait, &watch);
      if (answer != Answer::present) return answer;
      waited = pinned;
    }
  }

  // Releases a block that any of these calls has pinned, after all accesses.
  VMEM_PAGING void release(uint32_t block) { release_all(&block, 1); }
  template <typename List>
  VMEM_PAGING void release_all(const List& list, uint32_t count) {
    unpin(list, count);
    held_ -= count;
  }

  VMEM_PAGING uint32_t held() const { return held_; }

 private:
  VMEM_PAGING Answer held(uint32_t count) {
    held_ += count;
    return Answer::present;
  }
  VMEM_PAGING Answer ended() const { return static_cast<Answer>(Atomics::load(&table_.control->ended)); }

  // Waits for list[which] until a pin may succeed or bring an error (returns present), or until the
  // group must stop waiting. It asks again each time: the block may have come and gone, or the ring
  // may have been full. It also requests the blocks after it, but none of these is held for a group
  // that does not look for it, unless the group has the token.
  template <typename List>
  VMEM_PAGING Answer wait_for(const List& list, uint32_t which, uint32_t count, Urgency urgency, Watch* watch) {
    const Urgency others = urgency == Urgency::first ? Urgency::first : Urgency::needed;
    for (uint32_t i = which; i < count; ++i) ask(list[i], i == which ? urgency : others);
    for (;;) {
      const Kind kind = kind_of(Atomics::load(&table_.state[list[which]]));
      if (kind == Kind::present || kind == Kind::failed) return Answer::present;
      ask(list[which], urgency);
      const Answer answer = watch->check();
      if (answer != Answer::present) return answer;
      Atomics::pause();
    }
  }

  // The group that has waited longest has the next turn. Each group stores its ticket in `turn` if
  // it finds a younger one or none, and takes the token if it finds its own. A group that has the
  // token or gives up takes its ticket back, and the others store theirs again. So a group that has
  // given up leaves nothing behind, and an older group is passed over only while it does not look.
  // The token passes no data, only permission to wait: every order is relaxed.
  VMEM_PAGING Answer wait_for_token(uint32_t count, Watch* watch) {
    auto* const control = table_.control;
    const uint64_t ticket = Atomics::add(&control->tickets, uint64_t{1}) + 1;
    Answer answer = Answer::present;
    while (answer == Answer::present) {
      uint64_t turn = Atomics::load(&control->turn);
      if (turn == 0 || turn > ticket) {
        Atomics::swap_if(&control->turn, &turn, ticket);
        continue;
      }
      uint32_t taken = Atomics::load(&control->token);
      if (turn == ticket && token_allows(table_, taken, count)) {
        if (Atomics::swap_if(&control->token, &taken, taken + count)) break;
        continue;
      }
      answer = watch->check();
      Atomics::pause();
    }
    uint64_t mine = ticket;
    Atomics::swap_if(&control->turn, &mine, uint64_t{0});
    return answer;
  }

  template <typename List>
  VMEM_PAGING Answer acquire_with_token(const List& list, uint32_t count, Intent intent, Watch* watch) {
    if (const Answer answer = wait_for_token(count, watch); answer != Answer::present) return answer;
    uint32_t pinned = 0;
    Answer answer = Answer::present;
    while (answer == Answer::present && pinned < count) {
      answer = pin_some(list, count, intent, &pinned);
      if (answer != Answer::not_yet) continue;
      answer = wait_for(list, pinned, count, Urgency::first, watch);
    }
    Atomics::add(&table_.control->token, uint32_t{0} - count);
    if (answer == Answer::present) return held(count);
    unpin(list, pinned);
    return answer;
  }

  uint64_t patience_, longest_;
  uint32_t held_ = 0;
};

}  // namespace vmem::paging
