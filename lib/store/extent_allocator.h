// Which pages of one store path are free. Pure; not thread-safe. Units: pages of 4 KiB.
//
// One bit a page in chunks of 8 MiB, and over the chunks a tree that knows the longest free run under each node. So
// live extents cost nothing, neighbouring free runs are one run by nature, and the worst fragmentation costs no more
// than the best: about 300 bytes per 8 MiB of file (38 MiB per TiB).
//
// Invariants (check() verifies them):
//   free_pages = number of set bits;  bits at and beyond size_pages are clear
//   summary(chunk) describes its bits;  summary(node) = combine(children)
//   idle chunk: every page free, and handed out since it was last given back to the file system
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/os_allocator.h"

namespace vmem::store {

class ExtentAllocator {
 public:
  static constexpr uint64_t kChunkPages = 2048;

  uint64_t size_pages() const { return size_; }
  uint64_t free_pages() const { return free_; }
  uint64_t longest_free_run() const { return nodes_.empty() ? 0 : nodes_[1].longest; }
  uint64_t trailing_free_pages() const;

  // Memory for that many pages in all. May throw bad_alloc, and then nothing has changed.
  void reserve(uint64_t pages);
  // Adds free pages at the end. Beyond reserve() it may throw bad_alloc, and then nothing has changed.
  void grow(uint64_t pages);
  // Takes away `pages` at the end; they must be free.
  void shrink(uint64_t pages);

  // The lowest free run of that length. False: there is none. O(log size).
  bool allocate(uint64_t pages, uint64_t* first);
  // False, and nothing changes, when any of the pages is free already or lies outside. O(pages/64 + log size).
  bool release(uint64_t first, uint64_t pages);

  // Free space worth giving back: takes a run of idle chunks of at most max_pages out of use, so that the caller may
  // punch a hole there, and then put it back with release_idle (punched or not).
  bool take_idle(uint64_t max_pages, uint64_t* first, uint64_t* pages);
  void release_idle(uint64_t first, uint64_t pages);
  uint64_t idle_pages() const { return idle_chunks_ * kChunkPages; }

  // Verifies the invariants from scratch; for tests. O(size).
  bool check() const;

 private:
  struct Chunk {
    std::array<uint64_t, kChunkPages / 64> free{};  // bit set: page free
    bool handed_out = false;                        // since grow or release_idle
    bool listed = false;                            // in idle_list_
  };
  struct Summary {
    uint64_t prefix = 0, longest = 0, suffix = 0;  // free run at the start, anywhere, at the end
    friend bool operator==(const Summary&, const Summary&) = default;
  };

  static Summary summarize(const Chunk& chunk);
  static Summary combine(const Summary& left, const Summary& right, uint64_t child_pages);
  static bool is_idle(const Chunk& chunk, const Summary& summary) {
    return chunk.handed_out && summary.longest == kChunkPages;
  }
  bool all_bits(uint64_t first, uint64_t pages, bool free) const;
  void mark(uint64_t first, uint64_t pages, bool free, bool handed_out);
  void update(size_t chunk);
  void rebuild();
  uint64_t find(uint64_t pages) const;

  uint64_t size_ = 0;
  uint64_t free_ = 0;
  uint64_t idle_chunks_ = 0;
  core::OwnVector<Chunk> chunks_;
  core::OwnVector<Summary> nodes_;       // 1 is the root, 2n and 2n+1 its children; leaves_ .. are the chunks
  size_t leaves_ = 0;                    // a power of two
  core::OwnVector<uint32_t> idle_list_;  // chunks that were idle when listed; room reserved for all
};

}  // namespace vmem::store
