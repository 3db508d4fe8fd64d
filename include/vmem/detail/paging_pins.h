// The group's accesses to the words of one block: pins, their ends, and requests. paging_group.h
// says when.
#pragma once

#include "vmem/detail/paging_protocol.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

template <typename Atomics>
class Pins {
 protected:
  VMEM_PAGING explicit Pins(const Table<Atomics>& table) : table_(table) {}

  // not_yet: nothing is pinned. home: null unless the block may be in place.
  VMEM_PAGING Answer pin(uint32_t block, Intent intent, uint64_t* home = nullptr) {
    // A look that leaves no trace: waiting groups do not disturb an eviction.
    const uint64_t state = Atomics::load(&table_.state[block]), asked = Atomics::load(&table_.asked[block]);
    const bool in_place = kind_of(state) == Kind::in_place && home != nullptr;
    if (kind_of(state) != Kind::present && !in_place) return refusal(state);
    Atomics::add(&table_.use[block], kPinned);  // [pin]
    // If this generation has passed the mark does no harm: nothing compares with it any more. If it
    // has not, and the pin comes too late, a block counts as written that was not.
    if (intent == Intent::write) {
      raise(&table_.written[block], generation_of(state));  // [mark]
      stores_ = true;
    }
    Atomics::fence();                                                    // [pin], [bytes], [alias]
    const uint64_t again = Atomics::load_acquire(&table_.state[block]);  // [pin]
    // The same word: the block was there all the time, and the mark is of the pinned generation.
    if (again == state && in_place) {
      *home = Atomics::load(&table_.home[block]);  // [bytes]: stored before the state
      return Answer::present;
    }
    if (again == state) {
      if (asked != fenced_word(generation_of(state))) fence_arrival(block, generation_of(state));
      return Answer::present;
    }
    Atomics::add(&table_.use[block], kRefused);
    return refusal(again);
  }

  // [alias]
  VMEM_PAGING void fence_arrival(uint32_t block, uint64_t generation) {
    Atomics::fence_aliases();
    Atomics::fence();  // the release
    raise(&table_.asked[block], fenced_word(generation));
  }

  VMEM_PAGING static Answer refusal(uint64_t state) {
    return kind_of(state) == Kind::failed ? error_of(state) : Answer::not_yet;
  }

  // [unpin]
  template <typename List>
  VMEM_PAGING void unpin(const List& list, uint32_t count) {
    if (stores_) Atomics::fence_aliases();  // [alias]
    for (uint32_t i = count; i-- > 0;) Atomics::add_release(&table_.use[list[i]], kReleased);
  }

  template <typename List>
  VMEM_PAGING Answer pin_some(const List& list, uint32_t count, Intent intent, uint32_t* pinned) {
    for (; *pinned < count; ++*pinned) {
      const Answer answer = pin(list[*pinned], intent);
      if (answer != Answer::present) return answer;
    }
    return Answer::present;
  }

  // Takes and releases a pin on a block that came since this group waited for it, while the group
  // waits for another one: the block need not stay until it is used.
  VMEM_PAGING void let_go(uint32_t block) {
    if (pin(block, Intent::read) == Answer::present) unpin(&block, 1);
  }

  // Generations never wrap, so larger is later. Leaves a later one as it is.
  VMEM_PAGING static void raise(typename Atomics::template Word<uint64_t>* word, uint64_t least) {
    uint64_t found = Atomics::load(word);
    while (found < least && !Atomics::swap_if(word, &found, least)) continue;
  }

  // Requests a block that is not present, or that is in place and should be present, once per
  // generation and urgency. False: the ring was full and the block is not requested; a group that
  // waits asks again. Every order is relaxed: `asked` carries nothing but itself.
  VMEM_PAGING bool ask(uint32_t block, Urgency urgency) {
    const uint64_t state = Atomics::load(&table_.state[block]);
    const bool leaves_its_place = kind_of(state) == Kind::in_place && urgency > Urgency::rows;
    if (kind_of(state) != Kind::not_present && !leaves_its_place) return true;
    const uint64_t want = asked_word(generation_of(state), urgency);
    uint64_t found = Atomics::load(&table_.asked[block]);
    do {
      if (found >= want) return true;  // at least as urgent, or for a generation that this group has not seen yet
    } while (!Atomics::swap_if(&table_.asked[block], &found, want));
    if (push(block, urgency)) return true;
    // Groups that saw our mark would wait for what was never requested; without it they ask again.
    // If the mark is no longer ours, another group has made a request of its own.
    uint64_t mine = want;
    Atomics::swap_if(&table_.asked[block], &mine, found);
    return false;
  }

  // [ring]: each cell has one owner at a time. False: the ring is full, as far as the server has
  // said. No group loads a cell: cells are in the host's memory, and loads by many groups at once
  // hold up all other traffic on the link.
  VMEM_PAGING bool push(uint32_t block, Urgency urgency) {
    uint64_t position = Atomics::load(&table_.control->ring_head);
    do {
      // If the position is behind it, another group has claimed it, and the swap finds the latest.
      const uint64_t taken = Atomics::load(&table_.control->ring_taken);
      if (position >= taken && position - taken >= table_.cells) return false;
    } while (!Atomics::swap_if(&table_.control->ring_head, &position, position + 1));
    Atomics::store(&table_.ring[position & (table_.cells - 1)],
                   cell_word(static_cast<uint32_t>(position) + 1, block, urgency));
    if constexpr (Atomics::kWakes) {
      Atomics::fence();  // [asleep]
      if (Atomics::load(&table_.control->asleep) != 0) Atomics::wake(&table_.control->asleep);
    }
    return true;
  }

  Table<Atomics> table_;

 private:
  bool stores_ = false;  // it has pinned a block for writing before
};

}  // namespace vmem::paging
