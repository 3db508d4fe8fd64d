#include "pager/block/block_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "core/fatal.h"

namespace vmem::core {

namespace {

constexpr uint16_t bit(State s) {
  return static_cast<uint16_t>(1u << static_cast<unsigned>(s));
}

constexpr uint16_t kAbsent = bit(State::unpopulated) | bit(State::stored);
constexpr uint16_t kTaken = bit(State::isolating) | bit(State::writing_back);

}  // namespace

const char* state_name(State state) {
  static const char* const kNames[] = {"unpopulated", "stored",       "reading",  "staged",    "mapping",   "resident",
                                       "isolating",   "writing_back", "poisoned", "promoting", "on_device", "demoting"};
  return state < State::count_ ? kNames[static_cast<size_t>(state)] : "?";
}

BlockTable::~BlockTable() {
  free(used_);
  if (mapped_ != 0) {
    munmap(table_, mapped_);
  } else {
    free(table_);
  }
}

Status BlockTable::create(uint64_t blocks) {
  const size_t bytes = blocks * sizeof(Block);
  // Small tables come from the heap, so that thousands of small regions do not use up mappings.
  if (bytes <= 64 * 1024) {
    table_ = static_cast<Block*>(calloc(blocks, sizeof(Block)));
    if (table_ == nullptr) return error(ENOMEM, "no memory for a table of %zu bytes", bytes);
    footprint_ = bytes;
  } else {
    // Map it without access first: under mlockall(MCL_FUTURE) the kernel would fill all its pages.
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      return system_error(errno, "no address space for a block table of %s", human_bytes(bytes).c_str());
    }
    if (munlock(at, bytes) != 0 || mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) {
      const int why = errno;
      munmap(at, bytes);
      return system_error(why, "no memory for a block table of %s", human_bytes(bytes).c_str());
    }
    madvise(at, bytes, MADV_DONTFORK);
    madvise(at, bytes, MADV_NOHUGEPAGE);  // a huge page would exceed the footprint
    table_ = static_cast<Block*>(at);
    mapped_ = bytes;
  }
  blocks_ = blocks;
  const uint64_t chunks = (blocks + kChunk - 1) / kChunk;
  used_ = static_cast<uint8_t*>(calloc(chunks, 1));
  if (used_ == nullptr) return error(ENOMEM, "no memory for %s of counts", human_bytes(chunks).c_str());
  committed_.assign(chunks, false);
  footprint_ += chunks / 8;
  empty_.fill(kNone);
  return {};
}

// The legal changes: `make check` compares them with the table of the room's README.md, which names
// the calls that make each of them.
void BlockTable::begin_read(BlockIndex i) {
  change(i, kAbsent | bit(State::poisoned), State::reading);
}
void BlockTable::end_read(BlockIndex i) {
  change(i, bit(State::reading), State::staged);
}
void BlockTable::abandon_read(BlockIndex i) {
  change(i, bit(State::reading), absent(i));
}
void BlockTable::begin_install(BlockIndex i) {
  change(i, bit(State::reading) | bit(State::staged) | kTaken, State::mapping);
}
void BlockTable::end_install(BlockIndex i) {
  change(i, bit(State::mapping), State::resident);
}
void BlockTable::abandon_install(BlockIndex i) {
  change(i, bit(State::mapping), State::staged);
}
void BlockTable::begin_isolate(BlockIndex i) {
  change(i, bit(State::staged) | bit(State::resident), State::isolating);
}
void BlockTable::begin_write(BlockIndex i) {
  change(i, bit(State::isolating), State::writing_back);
}
void BlockTable::keep_staged(BlockIndex i) {
  change(i, kTaken, State::staged);
}
void BlockTable::keep_in_place(BlockIndex i) {
  change(i, kTaken, State::resident);
}
void BlockTable::let_go(BlockIndex i) {
  change(i, kTaken, absent(i));
}
void BlockTable::begin_promote(BlockIndex i, int device) {
  change(i, kAbsent | bit(State::staged) | bit(State::isolating), State::promoting);
  set_device(i, device);
}
void BlockTable::end_promote(BlockIndex i) {
  change(i, bit(State::promoting), State::on_device);
}
void BlockTable::abandon_promote(BlockIndex i) {
  change(i, bit(State::promoting), absent(i));
}
void BlockTable::abandon_promote_staged(BlockIndex i) {
  change(i, bit(State::promoting), State::staged);
}
void BlockTable::begin_demote(BlockIndex i) {
  change(i, bit(State::on_device), State::demoting);
}
void BlockTable::abandon_demote(BlockIndex i) {
  change(i, bit(State::demoting), State::on_device);
}
void BlockTable::end_demote(BlockIndex i) {
  change(i, bit(State::demoting), absent(i));
}
void BlockTable::end_demote_staged(BlockIndex i) {
  change(i, bit(State::demoting), State::staged);
}
void BlockTable::end_demote_in_place(BlockIndex i) {
  change(i, bit(State::demoting), State::resident);
}
void BlockTable::poison(BlockIndex i) {
  change(i,
         kAbsent | bit(State::reading) | bit(State::mapping) | bit(State::isolating) | bit(State::promoting) |
             bit(State::demoting),
         State::poisoned);
}
void BlockTable::revive(BlockIndex i) {
  change(i, bit(State::poisoned), absent(i));
}
void BlockTable::forget_contents(BlockIndex i) {
  change(i, bit(State::stored), State::unpopulated);
}

// `from_any` is a set of states, one bit each.
void BlockTable::change(BlockIndex i, uint16_t from_any, State to) {
  Block& block = table_[i];
  const State from = block.state;
  if ((from_any & bit(from)) == 0) {
    fatal("block %llu: it is %s, and cannot become %s here", static_cast<unsigned long long>(i), state_name(from),
          state_name(to));
  }
  block.state = to;
  if (from != State::unpopulated) --counts_[static_cast<size_t>(from)];
  if (to != State::unpopulated) ++counts_[static_cast<size_t>(to)];
  const uint64_t chunk = i / kChunk;
  if (from == State::unpopulated && to != State::unpopulated) {
    ++used_[chunk];
    if (mapped_ == 0 || committed_[chunk]) return;
    committed_[chunk] = true;
    footprint_ += kPage + 1;  // the page, and its count in used_
  } else if (to == State::unpopulated && --used_[chunk] == 0 && mapped_ != 0) {
    if (empty_[(next_empty_ + empty_.size() - 1) % empty_.size()] == chunk) return;
    const uint64_t oldest = std::exchange(empty_[next_empty_], chunk);
    next_empty_ = (next_empty_ + 1) % empty_.size();
    if (oldest != kNone && oldest != chunk) give_back(oldest);
  }
}

// Gives the memory of a chunk back, unless an entry says more than that its block was never written
// or is zeros again.
void BlockTable::give_back(uint64_t chunk) {
  if (used_[chunk] != 0 || !committed_[chunk]) return;
  Block* const first = table_ + chunk * kChunk;
  for (uint64_t k = 0; k < std::min(kChunk, blocks_ - chunk * kChunk); ++k) {
    if ((first[k].flags & static_cast<uint16_t>(~kDigest)) != 0) return;
  }
  if (madvise(first, kPage, MADV_DONTNEED) != 0) return;
  committed_[chunk] = false;
  footprint_ -= kPage + 1;
}

BlockIndex BlockTable::next_populated(BlockIndex from) const {
  constexpr uint64_t kMost = 65536;  // pages
  for (uint64_t i = 0; i < kMost && from < blocks_ && used_[from / kChunk] == 0; ++i) {
    from = (from / kChunk + 1) * kChunk;
  }
  return from < blocks_ ? from : blocks_;
}

std::string BlockTable::check() const {
  uint64_t counts[static_cast<size_t>(State::count_)] = {};
  for (BlockIndex i = next_populated(0); i < blocks_; i = next_populated(i + 1)) {
    if (table_[i].state != State::unpopulated) ++counts[static_cast<size_t>(table_[i].state)];
  }
  for (size_t s = 1; s < static_cast<size_t>(State::count_); ++s) {
    if (counts[s] != counts_[s]) {
      return strprintf("state %s: counted %llu, found %llu", state_name(static_cast<State>(s)),
                       static_cast<unsigned long long>(counts_[s]), static_cast<unsigned long long>(counts[s]));
    }
  }
  return "";
}

}  // namespace vmem::core
