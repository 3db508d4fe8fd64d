// The paging protocol's own source under Relacy, which tries every value that the C++ memory model
// lets a load return, and every schedule within a bound. The first argument weakens one memory
// order (see Weak); then Relacy must find an error. Prints what was run. Status: 0 no error found,
// 1 an error found, 2 no such argument.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>

#include "device/paging_host.h"
#include "device/paging_server.h"
#include "vmem/detail/paging_group.h"
// Included last: it defines macros with the names of functions.
#include <relacy/relacy.hpp>

namespace {

using vmem::paging::Answer;
using vmem::paging::Control;
using vmem::paging::Group;
using vmem::paging::Intent;
using vmem::paging::Table;
using vmem::paging::Urgency;

const char* const kWeak[] = {"nothing",     "pin_fence",       "settle_fence",  "wake_fence",
                             "sleep_fence", "publish_release", "unpin_release", "unpin_acquire"};
enum Weak { nothing, pin_fence, settle_fence, wake_fence, sleep_fence, publish_release, unpin_release, unpin_acquire };
Weak weak = nothing;

constexpr unsigned kServer = 0;

// Each test below uses only one kind of fence on each side.
struct Checked {
  template <typename T>
  using Word = rl::atomic<T>;
  static constexpr bool kWakes = true;
  static inline bool sleeping = false;  // selects the fences of [asleep]; else those of [pin]

  template <typename T>
  static T load(rl::atomic<T>* word) {
    return word->load(rl::mo_relaxed, $);
  }
  template <typename T>
  static T load_acquire(rl::atomic<T>* word) {
    // A group's acquire load exists for ThreadSanitizer only.
    const bool needed = rl::thread_index() == kServer && weak != unpin_acquire;
    return word->load(needed ? rl::mo_acquire : rl::mo_relaxed, $);
  }
  template <typename T>
  static void store(rl::atomic<T>* word, T value) {
    word->store(value, rl::mo_relaxed, $);
  }
  template <typename T>
  static void store_release(rl::atomic<T>* word, T value) {
    word->store(value, weak == publish_release ? rl::mo_relaxed : rl::mo_release, $);
  }
  template <typename T>
  static T add(rl::atomic<T>* word, T value) {
    return word->fetch_add(value, rl::mo_relaxed, $);
  }
  template <typename T>
  static T add_release(rl::atomic<T>* word, T value) {
    return word->fetch_add(value, weak == unpin_release ? rl::mo_relaxed : rl::mo_release, $);
  }
  template <typename T>
  static bool swap_if(rl::atomic<T>* word, T* found, T wanted) {
    return word->compare_exchange_strong(*found, wanted, rl::mo_relaxed, $);
  }
  static void fence() {
    const bool server = rl::thread_index() == kServer;
    if (weak == (sleeping ? server ? sleep_fence : wake_fence : server ? settle_fence : pin_fence)) return;
    rl::atomic_thread_fence(rl::mo_seq_cst, $);
  }
  static void fence_aliases() {}  // each word has one address here
  static uint64_t now() { return 1; }
  static void pause() { rl::yield(1, $); }
  static void wake(rl::atomic<uint32_t>* asleep) { store(asleep, uint32_t{0}); }
};

template <unsigned kBlocks>
struct Words {
  rl::atomic<uint64_t> state[kBlocks], asked[kBlocks], written[kBlocks], ring[2];
  rl::atomic<uint32_t> use[kBlocks];
  Control<Checked> control;
  Table<Checked> table() { return {state, asked, written, use, &control, ring, 2, kBlocks, kBlocks}; }
};

using Port = vmem::paging::DirectPort<Checked>;
using States = vmem::paging::BlockStates<Port>;

// One block comes and goes while groups pin it. No access may race with a copy, and an eviction
// must see every store.
template <unsigned kGroups, Intent kIntent>
struct Evictions : rl::test_suite<Evictions<kGroups, kIntent>, kGroups + 1> {
  static constexpr uint32_t kGarbage = 1000;
  Words<1> words;
  rl::var<uint32_t> frame;
  uint32_t store = 1;  // owned by the server

  void before() {
    Checked::sleeping = false;
    vmem::paging::initialise(words.table());
    frame($) = kGarbage;
  }
  void thread(unsigned index) { index == kServer ? serve() : ask(); }

  void serve() {
    Port port(words.table());
    typename States::Known known[1];
    States states(&port, known);
    for (int turn = 0; turn < 2; ++turn) {
      frame($) = store;
      states.publish(0, Urgency::prefetch);
      states.begin_eviction(0);
      states.settle();
      while (states.in_use(0)) Checked::pause();
      const bool written = states.was_written(0);
      const uint32_t bytes = frame($);
      RL_ASSERT(written || bytes == store);
      store = bytes;
      frame($) = kGarbage;
      states.finish(0);
    }
  }
  void ask() {
    Group<Checked> group(words.table(), ~uint64_t{0});
    for (int turn = 0; turn < 2; ++turn) {
      if (group.try_acquire(0, kIntent) != Answer::present) continue;
      const uint32_t bytes = frame($);
      RL_ASSERT(bytes < kGarbage);
      if (kIntent == Intent::write) frame($) = bytes + 1;
      group.release(0);
    }
  }
};

// Groups wait for blocks and wake a sleeping server. Each group must be served and see the bytes.
// kRounds 0: groups take the token at once.
template <unsigned kGroups, uint32_t kRounds = 4>
struct Requests : rl::test_suite<Requests<kGroups, kRounds>, kGroups + 1> {
  Words<kGroups> words;
  rl::var<uint32_t> frame[kGroups];

  void before() {
    Checked::sleeping = true;
    vmem::paging::initialise(words.table());
  }
  void thread(unsigned index) { index == kServer ? serve() : ask(index - 1); }

  void serve() {
    Port port(words.table());
    typename States::Known known[kGroups];
    States states(&port, known);
    vmem::paging::RequestQueue<Checked> queue(words.table());
    for (unsigned served = 0; served < kGroups;) {
      vmem::paging::Request request;
      if (queue.take(&request, &port)) {
        RL_ASSERT(request.block < kGroups);
        if (states.kind(request.block) != vmem::paging::Kind::not_present) continue;
        frame[request.block]($) = request.block + 1;
        states.publish(request.block, request.urgency);
        ++served;
      } else if (queue.may_sleep()) {
        while (Checked::load(&words.control.asleep) != 0) Checked::pause();
      }
    }
  }
  void ask(uint32_t block) {
    Group<Checked, kRounds> group(words.table(), ~uint64_t{0});
    RL_ASSERT(group.acquire(block, Intent::read) == Answer::present);
    RL_ASSERT(frame[block]($) == block + 1);
    group.release(block);
  }
};

template <typename Test>
bool run(const char* name, unsigned bound) {
  std::ostream nowhere(nullptr);  // the stream's buffer would be freed in another execution than it was allocated in
  rl::test_params params;
  params.search_type = rl::fair_context_bound_scheduler_type;
  params.context_bound = bound;
  params.iteration_count = 100000000;  // more than there are
  params.output_stream = params.progress_stream = &nowhere;
  const bool good = rl::simulate<Test>(params);
  std::cout << name << ": " << params.stop_iteration << " executions, " << rl::test_result_str(params.test_result)
            << std::endl;
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    size_t which = 0;
    while (which < std::size(kWeak) && strcmp(argv[1], kWeak[which]) != 0) ++which;
    if (which == std::size(kWeak)) return 2;
    weak = static_cast<Weak>(which);
  }
  // Bounds the switches away from a thread that could continue; within the bound Relacy tries all
  // schedules and all values that a load may return.
  const unsigned more = getenv("VMEM_LONG") != nullptr ? 1 : 0;
  bool good = run<Requests<1>>("a request", 3 + more);
  good = good && run<Requests<2>>("two requests", 1 + more);
  good = good && run<Requests<2, 0>>("two with the token", 1 + more);
  good = good && run<Evictions<1, Intent::write>>("a writer", 3 + more);
  good = good && run<Evictions<2, Intent::read>>("two readers", 2 + more);
  return good ? 0 : 1;
}
