// Tracks the free pages of one store path. Pure; not thread-safe. Units are pages of 4 KiB.
//
// It has one bit for each page, in chunks of 8 MiB, and over the chunks a tree with the longest
// free run under each node. Live extents cost nothing, adjacent free runs merge without work, and
// fragmentation costs no memory: about 300 bytes per 8 MiB of file (38 MiB per TiB).
//
// Invariants (check() verifies them):
// - free_pages is the number of set bits; bits at and beyond size_pages are clear.
// - summary(chunk) describes its bits; summary(node) = combine(children).
// - An idle chunk has only free pages, and was handed out since its space last went back to the
//   file system.
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

  // Allocates memory for `pages` in all. If it throws bad_alloc, nothing has changed.
  void reserve(uint64_t pages);
  // Adds free pages at the end. Beyond reserve() it may throw bad_alloc; then nothing has changed.
  void grow(uint64_t pages);
  // Removes `pages` at the end, which must be free.
  void shrink(uint64_t pages);

  // Takes the lowest free run of that length. Returns false if there is none. O(log size).
  bool allocate(uint64_t pages, uint64_t* first);
  // Returns false, and changes nothing, if any of the pages is free already or out of range.
  // O(pages/64 + log size).
  bool release(uint64_t first, uint64_t pages);

  // Takes a run of idle chunks, at most max_pages long, out of use, so that the caller can punch a
  // hole there. The caller then returns it with release_idle(), punched or not.
  bool take_idle(uint64_t max_pages, uint64_t* first, uint64_t* pages);
  void release_idle(uint64_t first, uint64_t pages);
  uint64_t idle_pages() const { return idle_chunks_ * kChunkPages; }

  // Verifies the invariants from scratch, for tests. O(size).
  bool check() const;

 private:
  struct Chunk {
    std::array<uint64_t, kChunkPages / 64> free{};  // bit set: page free
    bool handed_out = false;                        // since grow() or release_idle()
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
  core::OwnVector<Summary> nodes_;       // 1 is the root, 2n and 2n+1 its children; chunks start at leaves_
  size_t leaves_ = 0;                    // a power of two
  core::OwnVector<uint32_t> idle_list_;  // chunks that were idle when listed; capacity for all
};

}  // namespace vmem::store
