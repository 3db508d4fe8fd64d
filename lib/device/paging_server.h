// The server's side of the paging protocol: takes requests from the ring, and changes the states of
// blocks safely beside running groups. The caller decides which block comes when, into which frame
// and at whose cost, and makes the copies and mappings.
#pragma once

#include <cstdint>

#include "vmem/detail/paging_protocol.h"

namespace vmem::paging {

struct Request {
  uint32_t block;
  Urgency urgency;
};

// The consumer's end of the ring, for one thread.
template <typename Atomics>
class RequestQueue {
 public:
  explicit RequestQueue(const Table<Atomics>& table) : table_(table) {}

  // Takes the next request, or returns false.
  // - A request may be old: its block may be present by now, or being paged in. The caller then
  //   drops it. Nothing is lost: a group that still wants the block asks for its next generation.
  // - Groups may claim cells again after port->taken(), which is called once per eighth of the
  //   cells. So the ring looks full to them only while it has requests to take.
  template <typename Port>
  bool take(Request* request, Port* port) {
    auto* const cell = &table_.ring[tail_ & (table_.cells - 1)];
    const uint64_t word = Atomics::load(cell);  // [ring]
    if (sequence_of(word) != static_cast<uint32_t>(tail_ + 1)) return false;
    *request = {block_of(word), urgency_of(word)};
    if (++tail_ - told_ >= (table_.cells + 7) / 8) port->taken(told_ = tail_);
    return true;
  }

  // Called before the server sleeps. False: there is a request after all. A cell that is claimed
  // and not yet written counts as none: its group looks at `asleep` after it has written.
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

// The states of the blocks. A block has one owner at a time, and only the owner makes calls for it:
// first the thread that pages it in, then the thread that may evict it. If these are two threads, a
// lock of theirs hands the block over.
//
// Port is the host's access to the words of a device:
//   void set_state(uint32_t block, uint64_t word)   a release: after all that this thread did and all
//                          that was copied
//   void settle()          a sequentially consistent fence. On a device: the states are stored, and
//                          use() and written() return what was read after that
//   uint32_t use(uint32_t block)       an acquire
//   uint64_t written(uint32_t block)
//   void taken(uint64_t)               so many cells of the ring were taken
//   void progress(); void end(Answer)
//
// Duties of the caller, without which groups may wait for ever:
// - It serves requests other than prefetches in order of arrival, those of the group with the token
//   first. It serves all in the end; fail() ends a request that it cannot serve.
// - Nothing that the service needs waits for a group: no lock, no stream, no kernel.
// - To get a frame it tries one victim after the other. While it waits for a block's pins, it takes
//   any other block that loses its own: one group may wait with pins, and they could be those.
// - A block that a group waits for is no victim while untaken() says so, but only for a time: the
//   group may have given up, and a request may be old. The time is right if a group that looks for
//   a block has seen it by then.
template <typename Port>
class BlockStates {
 public:
  struct Known {
    uint64_t state = state_word(Kind::not_present, kFirstGeneration);
    uint32_t use = 0;
    bool held = false;
  };
  // known: one for each block, in the server's memory, so that it need not read the states.
  BlockStates(Port* port, Known* known) : port_(port), known_(known) {}

  Kind kind(uint32_t block) const { return kind_of(known_[block].state); }

  // not present -> present. The bytes are in place, and mapped where groups access them: [bytes].
  void publish(uint32_t block, Urgency urgency) {
    known_[block].held = urgency >= Urgency::wait || urgency == Urgency::rows;
    set(block, Kind::present, 0);
    port_->progress();
  }
  // True if no group has had the block since it was published for a group that waits.
  bool untaken(uint32_t block) {
    Known& known = known_[block];
    if (known.held && takes_of(port_->use(block)) != takes_of(known.use)) known.held = false;
    return known.held;
  }

  // present -> evicting, for one block or many; then settle() once, then in_use() for each: [pin].
  void begin_eviction(uint32_t block) { set(block, Kind::evicting, 0); }
  void settle() { port_->settle(); }
  // Called after settle(). False: no group accesses the block or will in this generation, and all
  // stores to it are visible.
  bool in_use(uint32_t block) {
    known_[block].use = port_->use(block);
    return pins_of(known_[block].use) != 0;
  }
  // Called after in_use() returned false. False: no group can have stored to the block in this
  // generation: [mark].
  bool was_written(uint32_t block) { return port_->written(block) == generation_of(known_[block].state); }

  // evicting -> present: a group has the block, or it is spared.
  void cancel(uint32_t block) { set(block, Kind::present, 0); }
  // evicting -> not present. No group accesses the block any more: another may have its frame.
  void finish(uint32_t block) {
    set(block, Kind::not_present, 1);
    port_->progress();
  }

  // not present -> in place: groups may load the bytes where Port has said that they are. Ends as a
  // present block does, by begin_eviction(), settle(), in_use() and finish(), but is not spared:
  // its pins wait for nothing.
  void lend(uint32_t block) {
    known_[block].held = false;
    set(block, Kind::in_place, 0);
    port_->progress();
  }

  // not present -> failed: groups that ask for the block get the error.
  void fail(uint32_t block, Answer error) {
    set(block, Kind::failed, 0, error);
    port_->progress();
  }
  // failed -> not present: groups may request the block again.
  void retry(uint32_t block) { set(block, Kind::not_present, 1); }

  // Ends all waits, present and future: no state changes any more. Present blocks stay present.
  // Their memory and the table may go when the kernels have ended.
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
