// What a group does to the words of one block: pins and their ends, and requests. paging_group.h says when.
#pragma once

#include "vmem/detail/paging_protocol.h"
#include "vmem/detail/paging_types.h"

namespace vmem::paging {

template <typename Atomics>
class Pins {
 protected:
  VMEM_PAGING explicit Pins(const Table<Atomics>& table) : table_(table) {}

  // not_yet: nothing is pinned. home: not null where the block may be in place.
  VMEM_PAGING Answer pin(uint32_t block, Intent intent, uint64_t* home = nullptr) {
    // A look that leaves no trace: waiting groups do not disturb an eviction.
    const uint64_t state = Atomics::load(&table_.state[block]), asked = Atomics::load(&table_.asked[block]);
    const bool in_place = kind_of(state) == Kind::in_place && home != nullptr;
    if (kind_of(state) != Kind::present && !in_place) return refusal(state);
    Atomics::add(&table_.use[block], kPinned);  // [pin]
    // If this generation has passed, the mark does no harm: nobody compares with it any more. If it has not, and the
    // pin comes too late, a block counts as written that was not.
    if (intent == Intent::write) {
      raise(&table_.written[block], generation_of(state));  // [mark]
      stores_ = true;
    }
    Atomics::fence();                                                    // [pin], [bytes], [alias]
    const uint64_t again = Atomics::load_acquire(&table_.state[block]);  // [pin]
    // The same word: the block was there all the time, and what was marked is what is pinned.
    if (again == state && in_place) {
      *home = Atomics::load(&table_.home[block]);  // [bytes]: it was stored before the state
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

  // A block that came since this group waited for it, which waits for another now: it need not stay until it is had.
  VMEM_PAGING void let_go(uint32_t block) {
    if (pin(block, Intent::read) == Answer::present) unpin(&block, 1);
  }

  // Generations never come round, so larger is later; who finds a later one leaves it.
  VMEM_PAGING static void raise(typename Atomics::template Word<uint64_t>* word, uint64_t least) {
    uint64_t found = Atomics::load(word);
    while (found < least && !Atomics::swap_if(word, &found, least)) continue;
  }

  // Requests a block that is not present, or is in place and to be present, once a generation and urgency. False: it is
  // not requested for now, because the ring was full; whoever waits asks again. Every order is relaxed: `asked` carries
  // nothing but itself.
  VMEM_PAGING bool ask(uint32_t block, Urgency urgency) {
    const uint64_t state = Atomics::load(&table_.state[block]);
    const bool leaves_its_place = kind_of(state) == Kind::in_place && urgency > Urgency::rows;
    if (kind_of(state) != Kind::not_present && !leaves_its_place) return true;
    const uint64_t want = asked_word(generation_of(state), urgency);
    uint64_t found = Atomics::load(&table_.asked[block]);
    do {
      if (found >= want) return true;  // as urgently at least; or for a generation that this group has not seen yet
    } while (!Atomics::swap_if(&table_.asked[block], &found, want));
    if (push(block, urgency)) return true;
    // Others that saw our mark wait for what was never requested: without it they ask again. Where it is no longer
    // ours, somebody with a request of his own has come.
    uint64_t mine = want;
    Atomics::swap_if(&table_.asked[block], &mine, found);
    return false;
  }

  // [ring]: each cell has one owner at a time. False: full, as far as the server has said. No group loads a cell: they
  // are in the host's memory, and many groups that load there at once hold up all else that goes over the link.
  VMEM_PAGING bool push(uint32_t block, Urgency urgency) {
    uint64_t position = Atomics::load(&table_.control->ring_head);
    do {
      // Behind it: another group has claimed the position, and this finds the latest.
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
  bool stores_ = false;  // it has pinned something for writing, at some time
};

}  // namespace vmem::paging
