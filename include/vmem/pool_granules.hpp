/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Book-keeping of vmem::pool for one region: which granules are free. It is in ordinary memory, 12
 * bytes a granule. It never accesses the region, which would bring its blocks back from the SSD. An
 * implementation detail of <vmem/pool.hpp>: not for several threads at once, and a wrong argument
 * is undefined.
 *
 * Runs of free granules are in lists by size class, adjacent ones are joined as soon as they are
 * free, and a bitmap says which classes have a run. This is segregated fit with boundary tags, as
 * in TLSF (Masmano, Ripoll, Crespo, Real, "TLSF: a new dynamic memory allocator for real-time
 * systems", ECRTS 2004), with two differences. The tags are beside the memory instead of in it. And
 * it looks at a bounded number of runs of a class, which fits better than taking the first. The
 * cost of taking and giving does not depend on the number of runs.
 *
 * Tags: the first granule of a run has its length and whether it is used or free; the last granule
 * of a free run has its length; those between are `inside`. Lengths and positions are in granules.
 */
#ifndef VMEM_POOL_GRANULES_HPP
#define VMEM_POOL_GRANULES_HPP

#if __cplusplus < 202002L
#error "<vmem/pool_granules.hpp> needs C++20: compile with -std=c++20 (vmem::vmem of the CMake package asks for it)"
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

namespace vmem::detail {

class granule_map {
 public:
  using index = std::uint32_t;
  static constexpr index none = UINT32_MAX;
  static constexpr index max_count = (index{1} << 30) - 1;

  struct run {
    index begin, length;
    bool used;
  };

  /* A map of `count` free granules, 1 to max_count. Throws std::bad_alloc. */
  explicit granule_map(index count) : granules_(count), free_(count) {
    heads_.fill(none);
    insert(0, count);
  }

  index count() const { return static_cast<index>(granules_.size()); }
  index free_count() const { return free_; }
  index used_runs() const { return used_runs_; }

  /*
   * Takes `length` granules that begin at phase, or a multiple of align after it. align is a power
   * of two, phase is less than align. Returns the first of them, or none.
   */
  index take(index length, std::uint64_t align = 1, std::uint64_t phase = 0) {
    for (unsigned c = next_class(class_of(length)); c < classes; c = next_class(c + 1)) {
      unsigned looked = 0;
      for (index g = heads_[c]; g != none && looked < looks_per_class; g = granules_[g].next, ++looked) {
        const std::uint64_t begin = phase + (g < phase ? 0 : (g - phase + align - 1) / align * align);
        const index end = g + granules_[g].length;
        if (begin + length > end) continue;
        remove(g);
        const auto first = static_cast<index>(begin);
        if (first > g) insert(g, first - g);
        if (first + length < end) insert(first + length, end - first - length);
        granules_[first].length = length & longest;
        granules_[first].tag = used;
        free_ -= length;
        ++used_runs_;
        return first;
      }
    }
    return none;
  }

  /* Frees the run that begins here and that take() returned. */
  void give(index begin) {
    index length = granules_[begin].length;
    granules_[begin].tag = inside;
    free_ += length;
    --used_runs_;
    if (const index after = begin + length; after < count() && granules_[after].tag == free) {
      length += granules_[after].length;
      remove(after);
    }
    if (begin != 0 && (granules_[begin - 1].tag == free || granules_[begin - 1].tag == free_end)) {
      begin -= granules_[begin - 1].length;
      length += granules_[begin].length;
      remove(begin);
    }
    insert(begin, length);
  }

  /* Returns the length of the used run that begins here, or 0. */
  index used_at(index g) const { return granules_[g].tag == used ? granules_[g].length : 0; }

  /* Returns the run of a granule. Goes through all runs before it; for messages. */
  run run_of(index g) const {
    index begin = 0;
    while (begin + granules_[begin].length <= g) begin += granules_[begin].length;
    return {begin, granules_[begin].length, granules_[begin].tag == used};
  }

  index largest_free() const {
    index largest = 0;
    for (unsigned c = classes; c-- > 0 && largest == 0;) {
      for (index g = heads_[c]; g != none; g = granules_[g].next) {
        largest = std::max<index>(largest, granules_[g].length);
        if (c < exact_classes) break;  // all have one length
      }
    }
    return largest;
  }

  /* Calls visit(begin, length) for every free run; visit must not change the runs. */
  template <typename Visit>
  void for_each_free(Visit visit) const {
    for (unsigned c = next_class(0); c < classes; c = next_class(c + 1)) {
      for (index g = heads_[c]; g != none; g = granules_[g].next) visit(g, index{granules_[g].length});
    }
  }

  /* Returns "", or what is wrong with the tags and lists; for tests. */
  std::string check() const {
    index free_granules = 0, free_runs = 0, runs = 0, listed = 0;
    bool after_free = false;
    for (index g = 0; g < count();) {
      const granule& first = granules_[g];
      const std::string place = "the run at granule " + std::to_string(g);
      if ((first.tag != used && first.tag != free) || first.length == 0 || first.length > count() - g)
        return place + " has no valid tag";
      for (index i = g + 1; i < g + first.length; ++i) {
        const bool last = i + 1 == g + first.length;
        if (granules_[i].tag != (last && first.tag == free ? free_end : inside)) return place + " has a tag inside";
      }
      if (first.tag == free) {
        if (granules_[g + first.length - 1].length != first.length) return place + " ends with another length";
        if (after_free) return place + " was not joined with the one before it";
        free_granules += first.length;
        ++free_runs;
      }
      after_free = first.tag == free;
      ++runs;
      g += first.length;
    }
    for (unsigned c = 0; c < classes; ++c) {
      if ((heads_[c] != none) != ((bitmap_[c / 64] >> (c % 64) & 1) != 0))
        return "the bit of class " + std::to_string(c) + " is wrong";
      for (index g = heads_[c], before = none; g != none; before = g, g = granules_[g].next, ++listed) {
        if (granules_[g].tag != free || class_of(granules_[g].length) != c || granules_[g].previous != before)
          return "granule " + std::to_string(g) + " is wrongly listed";
      }
    }
    if (listed != free_runs) return "there are free runs in no list";
    if (runs - free_runs != used_runs_) return "the count of used runs is wrong";
    return free_granules == free_ ? "" : "the count of free granules is wrong";
  }

 private:
  enum tag_of : unsigned { inside, used, free, free_end };
  static constexpr unsigned length_bits = 30;
  static constexpr index longest = (index{1} << length_bits) - 1;
  struct granule {
    index length : length_bits = 0;
    index tag : 2 = inside;
    index next = none, previous = none;  // if tag is free: in the list of its class
  };

  /* A class for each length up to 31, then eight for each doubling. */
  static constexpr unsigned exact_classes = 32, classes = exact_classes + (30 - 5) * 8, looks_per_class = 16;
  static unsigned class_of(index length) {
    if (length < exact_classes) return length;
    const unsigned top = static_cast<unsigned>(std::bit_width(length)) - 1;
    return exact_classes + (top - 5) * 8 + ((length >> (top - 3)) & 7);
  }
  /* Returns the first class from c on that has a run, or `classes`. */
  unsigned next_class(unsigned c) const {
    for (; c < classes; c = (c / 64 + 1) * 64) {
      if (const std::uint64_t bits = bitmap_[c / 64] >> (c % 64); bits != 0)
        return c + static_cast<unsigned>(std::countr_zero(bits));
    }
    return classes;
  }

  void insert(index begin, index length) {
    const unsigned c = class_of(length);
    granules_[begin + length - 1].tag = free_end;
    granules_[begin + length - 1].length = length & longest;
    granules_[begin].length = length & longest;
    granules_[begin].tag = free;
    granules_[begin].previous = none;
    granules_[begin].next = heads_[c];
    if (heads_[c] != none) granules_[heads_[c]].previous = begin;
    heads_[c] = begin;
    bitmap_[c / 64] |= std::uint64_t{1} << (c % 64);
  }
  void remove(index begin) {
    granule& g = granules_[begin];
    const unsigned c = class_of(g.length);
    if (g.next != none) granules_[g.next].previous = g.previous;
    if (g.previous != none) {
      granules_[g.previous].next = g.next;
    } else if ((heads_[c] = g.next) == none) {
      bitmap_[c / 64] &= ~(std::uint64_t{1} << (c % 64));
    }
    granules_[begin + g.length - 1].tag = inside;
    g.tag = inside;
  }

  std::vector<granule> granules_;
  index free_, used_runs_ = 0;
  std::array<index, classes> heads_;
  std::array<std::uint64_t, (classes + 63) / 64> bitmap_ = {};
};

}  // namespace vmem::detail
#endif /* VMEM_POOL_GRANULES_HPP */
