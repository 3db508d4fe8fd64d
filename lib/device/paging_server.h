// What the server does, for kernels that ask for blocks: it takes requests from the ring, and changes the states of
// blocks. Which block comes when, into which frame and at whose cost, is its caller's business, and so are copies and
// mappings; here is what makes them safe beside running groups.
#pragma once

#include <cstdint>

#include "vmem/detail/paging_protocol.h"

namespace vmem::paging {

struct Request {
  uint32_t block;
  Urgency urgency;
};

// The consumer's end of the ring: one thread.
template <typename Atomics>
class RequestQueue {
 public:
  explicit RequestQueue(const Table<Atomics>& table) : table_(table) {}

  // A request may be older than it looks: of a block that is present by now, or being paged in. It is dropped then, and
  // nothing is lost: who still wants the block asks again for its next generation.
  // What was taken groups may claim again; that is said for an eighth of the cells at a time. Where they find none
  // though some have been taken, there are others to be taken yet.
  template <typename Port>
  bool take(Request* request, Port* port) {
    auto* const cell = &table_.ring[tail_ & (table_.cells - 1)];
    const uint64_t word = Atomics::load(cell);  // [ring]
    if (sequence_of(word) != static_cast<uint32_t>(tail_ + 1)) return false;
    *request = {block_of(word), urgency_of(word)};
    if (++tail_ - told_ >= (table_.cells + 7) / 8) port->taken(told_ = tail_);
    return true;
  }

  // Before it sleeps: false if there is a request after all. A cell that is claimed and not written yet counts as none:
  // its group looks at `asleep` after it has written.
  bool may_sleep() {
    Atomics::store(&table_.control->asleep, uint32_t{1});
    Atomics::fence();  // [asleep]
    const uint64_t word = Atomics::load(&table_.ring[tail_ & (table_.cells - 1)]);
    if (sequence_of(word) != static_cast<uint32_t>(tail_ + 1)) return true;
    awake();
    return false;
  }
  void awake() { Atomics::store(&table_.control->asleep, uint32_t{0}); }

 private:
  Table<Atomics> table_;
  uint64_t tail_ = 0, told_ = 0;
};

// The states of the blocks. A block has one owner at a time, who alone calls for it: whoever pages it in, then whoever
// may evict it. They may be two threads; what hands it over from one to the other is a lock of theirs.
//
// Port is how the host gets at the words of a device:
//   void set_state(uint32_t block, uint64_t word)   behind all that this thread did and all that was copied: a release
//   void settle()          a sequentially consistent fence. On a device: the states are there, and what use() and
//                          written() say from here on was read after that
//   uint32_t use(uint32_t block)       an acquire
//   uint64_t written(uint32_t block)
//   void taken(uint64_t)               of the ring's cells, so many
//   void progress(); void end(Answer)
//
// What the caller owes the groups, or they may wait for ever:
// - Requests but prefetches are served in the order of their arrival, those of the group with the token first; all in
//   the end, and each that cannot be ends in fail(). Nothing that the service needs waits for a group: no lock, no
//   stream, no kernel.
// - Who needs a frame tries one victim after the other. It may wait for a block's pins only while it would take any
//   other that loses its own: one group may wait with pins, and they could be those.
// - A block that a group waits for is no victim while untaken() says so, but for a time only: the group may have given
//   up, and a request be older than it looks. The time is right when a group that looks for a block has seen it by
//   then.
template <typename Port>
class BlockStates {
 public:
  struct Known {
    uint64_t state = state_word(Kind::not_present, kFirstGeneration);
    uint32_t use = 0;
    bool held = false;
  };
  // known: one for each block, in the server's memory. It writes the states and need not read them.
  BlockStates(Port* port, Known* known) : port_(port), known_(known) {}

  Kind kind(uint32_t block) const { return kind_of(known_[block].state); }

  // not present -> present. Its bytes are in place, and where groups access it: [bytes].
  void publish(uint32_t block, Urgency urgency) {
    known_[block].held = urgency >= Urgency::wait || urgency == Urgency::rows;
    set(block, Kind::present, 0);
    port_->progress();
  }
  // Nobody has had it since it was published for somebody who waits.
  bool untaken(uint32_t block) {
    Known& known = known_[block];
    if (known.held && takes_of(port_->use(block)) != takes_of(known.use)) known.held = false;
    return known.held;
  }

  // present -> evicting, for one block or many; then settle() once, then in_use() of each: [pin].
  void begin_eviction(uint32_t block) { set(block, Kind::evicting, 0); }
  void settle() { port_->settle(); }
  // Not false before settle(). False: nobody accesses it, and nobody will in this generation; what was stored is there.
  bool in_use(uint32_t block) {
    known_[block].use = port_->use(block);
    return pins_of(known_[block].use) != 0;
  }
  // After in_use() said no. False: no group can have stored to it in this generation: [mark].
  bool was_written(uint32_t block) { return port_->written(block) == generation_of(known_[block].state); }

  // evicting -> present: somebody has it, or it is spared.
  void cancel(uint32_t block) { set(block, Kind::present, 0); }
  // evicting -> present, written back: it is clean from here on. Nobody may have it.
  void keep_clean(uint32_t block) { set(block, Kind::present, 1); }
  // evicting -> not present. Groups access it no more: its frame may go to another.
  void finish(uint32_t block) {
    set(block, Kind::not_present, 1);
    port_->progress();
  }

  // not present -> in place: groups may load its bytes where Port has said that they are. It ends as what is present
  // does, by begin_eviction(), settle(), in_use() and finish(), but is not spared: those pins wait for nobody.
  void lend(uint32_t block) {
    known_[block].held = false;
    set(block, Kind::in_place, 0);
    port_->progress();
  }

  // not present -> failed: whoever asks for it is told.
  void fail(uint32_t block, Answer error) {
    set(block, Kind::failed, 0, error);
    port_->progress();
  }
  // failed -> not present: may be requested again.
  void retry(uint32_t block) { set(block, Kind::not_present, 1); }

  // Ends all that wait, and all that will: nothing changes a state any more. What is present stays so; its memory may
  // go when the kernels have ended, and so may the table.
  void end(Answer why) { port_->end(why); }

 private:
  void set(uint32_t block, Kind kind, uint64_t later, Answer error = Answer::present) {
    Known& known = known_[block];
    known.state = state_word(kind, generation_of(known.state) + later, error);
    port_->set_state(block, known.state);
  }

  Port* port_;
  Known* known_;
};

}  // namespace vmem::paging
