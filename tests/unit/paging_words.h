// The words of a range of blocks in process memory, for tests of the protocol of kernels that ask.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/paging_host.h"
#include "device/paging_server.h"
#include "vmem/detail/paging_group.h"

namespace pagingtest {

using vmem::paging::Answer;
using vmem::paging::HostAtomics;
using vmem::paging::Intent;
using vmem::paging::Kind;
using vmem::paging::Request;
using vmem::paging::Urgency;
using Group = vmem::paging::Group<HostAtomics>;
using Queue = vmem::paging::RequestQueue<HostAtomics>;

// The words of some blocks; each test acts as server and as group.
template <typename Atomics>
class WordsOf {
 public:
  using Port = vmem::paging::DirectPort<Atomics>;
  using States = vmem::paging::BlockStates<Port>;

  WordsOf(uint32_t blocks, uint32_t frames, uint32_t cells)
      : words_(4 * blocks + cells), use_(blocks), known_(blocks), cells_(cells), frames_(frames), port_(table()) {
    vmem::paging::initialise(table());
  }
  vmem::paging::Table<Atomics> table() {
    const auto blocks = static_cast<uint32_t>(use_.size());
    uint64_t* const first = words_.data();
    uint64_t* const ring = first + 4 * blocks;
    return {first,  first + blocks, first + 2 * blocks, use_.data(), &control_, ring, cells_,
            blocks, frames_,        first + 3 * blocks};
  }
  States states() { return {&port_, known_.data()}; }
  vmem::paging::Control<Atomics>& control() { return control_; }
  void end(Answer why) { port_.end(why); }
  Port* port() { return &port_; }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint32_t> use_;
  std::vector<typename States::Known> known_;
  vmem::paging::Control<Atomics> control_;
  uint32_t cells_, frames_;
  Port port_;
};
using Words = WordsOf<HostAtomics>;
using States = Words::States;

// Returns the ring's contents in order: block and urgency.
inline std::vector<std::pair<uint32_t, Urgency>> taken(Words& words, Queue& queue) {
  std::vector<std::pair<uint32_t, Urgency>> all;
  for (Request request; queue.take(&request, words.port());) all.emplace_back(request.block, request.urgency);
  return all;
}
using Requests = std::vector<std::pair<uint32_t, Urgency>>;

}  // namespace pagingtest
