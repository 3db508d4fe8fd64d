#include "store/extent_allocator.h"

#include <algorithm>
#include <bit>

#include "core/types.h"

namespace vmem::store {

namespace {

constexpr uint64_t kWordBits = 64;

// Returns `count` set bits, starting at bit `from`.
constexpr uint64_t word_mask(uint64_t from, uint64_t count) {
  return (count == kWordBits ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << from;
}

// Calls visit(chunk, word, mask) for every word of the range, until it returns false.
template <typename Visit>
bool for_each_word(uint64_t first, uint64_t pages, Visit visit) {
  while (pages != 0) {
    const uint64_t bit = first % kWordBits;
    const uint64_t count = std::min(pages, kWordBits - bit);
    const uint64_t in_chunk = first % ExtentAllocator::kChunkPages;
    if (!visit(first / ExtentAllocator::kChunkPages, in_chunk / kWordBits, word_mask(bit, count))) return false;
    first += count;
    pages -= count;
  }
  return true;
}

// Calls visit(start, length) for each run of free pages, lowest first, until it returns false.
template <typename Words, typename Visit>
void for_each_run(const Words& words, Visit visit) {
  uint64_t run = 0;
  uint64_t at = 0;
  for (const uint64_t word : words) {
    for (uint64_t bit = 0; bit < kWordBits;) {
      const uint64_t rest = word >> bit;
      if ((rest & 1) != 0) {
        const auto ones = std::min<uint64_t>(static_cast<uint64_t>(std::countr_one(rest)), kWordBits - bit);
        run += ones;
        bit += ones;
      } else {
        if (run != 0 && !visit(at + bit - run, run)) return;
        run = 0;
        bit += rest == 0 ? kWordBits - bit : static_cast<uint64_t>(std::countr_zero(rest));
      }
    }
    at += kWordBits;
  }
  if (run != 0) visit(at - run, run);
}

}  // namespace

ExtentAllocator::Summary ExtentAllocator::summarize(const Chunk& chunk) {
  Summary out;
  for_each_run(chunk.free, [&](uint64_t start, uint64_t length) {
    if (start == 0) out.prefix = length;
    if (start + length == kChunkPages) out.suffix = length;
    out.longest = std::max(out.longest, length);
    return true;
  });
  return out;
}

ExtentAllocator::Summary ExtentAllocator::combine(const Summary& left, const Summary& right, uint64_t child_pages) {
  Summary out;
  out.prefix = left.prefix == child_pages ? child_pages + right.prefix : left.prefix;
  out.suffix = right.suffix == child_pages ? child_pages + left.suffix : right.suffix;
  out.longest = std::max({left.longest, right.longest, left.suffix + right.prefix});
  return out;
}

void ExtentAllocator::rebuild() {
  for (size_t n = 0; n < leaves_; ++n) nodes_[leaves_ + n] = n < chunks_.size() ? summarize(chunks_[n]) : Summary{};
  uint64_t child_pages = kChunkPages;
  for (size_t level = leaves_ / 2; level != 0; level /= 2, child_pages *= 2) {
    for (size_t n = level; n < 2 * level; ++n) nodes_[n] = combine(nodes_[2 * n], nodes_[2 * n + 1], child_pages);
  }
}

void ExtentAllocator::update(size_t chunk) {
  size_t node = leaves_ + chunk;
  nodes_[node] = summarize(chunks_[chunk]);
  uint64_t child_pages = kChunkPages;
  while ((node /= 2) != 0) {
    const Summary next = combine(nodes_[2 * node], nodes_[2 * node + 1], child_pages);
    if (next == nodes_[node]) return;  // no node above can change either
    nodes_[node] = next;
    child_pages *= 2;
  }
}

void ExtentAllocator::reserve(uint64_t pages) {
  size_t chunks = (pages + kChunkPages - 1) / kChunkPages;
  if (chunks <= idle_list_.capacity()) return;
  chunks = std::max(chunks, idle_list_.capacity() + idle_list_.capacity() / 2);
  chunks_.reserve(chunks);
  nodes_.reserve(2 * std::bit_ceil(chunks));
  idle_list_.reserve(chunks);
}

void ExtentAllocator::grow(uint64_t pages) {
  if (pages == 0) return;
  const uint64_t size = size_ + pages;
  const size_t chunks = (size + kChunkPages - 1) / kChunkPages;
  const size_t leaves = std::max(leaves_, std::bit_ceil(chunks));
  chunks_.reserve(chunks);
  idle_list_.reserve(chunks);
  const bool taller = leaves != leaves_;
  if (taller) nodes_.resize(2 * leaves);
  chunks_.resize(chunks);
  if (taller) {
    leaves_ = leaves;
    rebuild();
  }
  const uint64_t first = size_;
  size_ = size;
  mark(first, pages, true, false);
}

void ExtentAllocator::shrink(uint64_t pages) {
  mark(size_ - pages, pages, false, false);
  size_ -= pages;
  const size_t chunks = (size_ + kChunkPages - 1) / kChunkPages;
  std::erase_if(idle_list_, [&](uint32_t chunk) { return chunk >= chunks; });
  chunks_.resize(chunks);
}

uint64_t ExtentAllocator::trailing_free_pages() const {
  // The root's suffix also counts leaves beyond the end, so walk the chunks.
  uint64_t run = 0;
  uint64_t end = size_;
  while (end != 0) {
    const size_t chunk = (end - 1) / kChunkPages;
    const uint64_t in_chunk = end - chunk * kChunkPages;
    const Summary& summary = nodes_[leaves_ + chunk];
    if (in_chunk == kChunkPages && summary.suffix < kChunkPages) return run + summary.suffix;
    if (in_chunk == kChunkPages || summary.prefix == in_chunk) {
      run += in_chunk;
      end -= in_chunk;
      continue;
    }
    while (end > chunk * kChunkPages && all_bits(end - 1, 1, true)) {
      ++run;
      --end;
    }
    return run;
  }
  return run;
}

bool ExtentAllocator::all_bits(uint64_t first, uint64_t pages, bool free) const {
  return for_each_word(first, pages, [&](size_t chunk, size_t word, uint64_t mask) {
    return (chunks_[chunk].free[word] & mask) == (free ? mask : 0);
  });
}

void ExtentAllocator::mark(uint64_t first, uint64_t pages, bool free, bool handed_out) {
  free_ = free ? free_ + pages : free_ - pages;
  const size_t begin = first / kChunkPages;
  const size_t end = (first + pages + kChunkPages - 1) / kChunkPages;
  for (size_t n = begin; n < end; ++n) idle_chunks_ -= is_idle(chunks_[n], nodes_[leaves_ + n]);
  for_each_word(first, pages, [&](size_t chunk, size_t word, uint64_t mask) {
    uint64_t& bits = chunks_[chunk].free[word];
    bits = free ? bits | mask : bits & ~mask;
    return true;
  });
  for (size_t n = begin; n < end; ++n) {
    Chunk& chunk = chunks_[n];
    if (handed_out) chunk.handed_out = true;
    update(n);
    if (!is_idle(chunk, nodes_[leaves_ + n])) continue;
    ++idle_chunks_;
    if (!chunk.listed) idle_list_.push_back(static_cast<uint32_t>(n));
    chunk.listed = true;
  }
}

uint64_t ExtentAllocator::find(uint64_t pages) const {
  size_t node = 1;
  uint64_t start = 0;  // first page under node
  uint64_t child_pages = leaves_ * kChunkPages / 2;
  while (node < leaves_) {
    const Summary& left = nodes_[2 * node];
    const Summary& right = nodes_[2 * node + 1];
    if (left.longest >= pages) {
      node = 2 * node;
    } else if (left.suffix + right.prefix >= pages) {
      return start + child_pages - left.suffix;
    } else {
      node = 2 * node + 1;
      start += child_pages;
    }
    child_pages /= 2;
  }
  uint64_t found = 0;
  for_each_run(chunks_[node - leaves_].free, [&](uint64_t at, uint64_t length) {
    found = start + at;
    return length < pages;
  });
  return found;
}

bool ExtentAllocator::allocate(uint64_t pages, uint64_t* first) {
  if (pages == 0 || longest_free_run() < pages) return false;
  *first = find(pages);
  mark(*first, pages, false, true);
  return true;
}

bool ExtentAllocator::release(uint64_t first, uint64_t pages) {
  if (pages == 0 || first > size_ || pages > size_ - first || !all_bits(first, pages, false)) return false;
  mark(first, pages, true, false);
  return true;
}

bool ExtentAllocator::take_idle(uint64_t max_pages, uint64_t* first, uint64_t* pages) {
  const auto idle = [&](size_t n) { return n < chunks_.size() && is_idle(chunks_[n], nodes_[leaves_ + n]); };
  while (!idle_list_.empty()) {
    const size_t n = idle_list_.back();
    idle_list_.pop_back();
    chunks_[n].listed = false;
    if (!idle(n)) continue;
    size_t end = n + 1;
    while ((end - n + 1) * kChunkPages <= max_pages && idle(end)) ++end;
    *first = n * kChunkPages;
    *pages = (end - n) * kChunkPages;
    mark(*first, *pages, false, false);
    return true;
  }
  return false;
}

void ExtentAllocator::release_idle(uint64_t first, uint64_t pages) {
  for (uint64_t n = first / kChunkPages; n < (first + pages) / kChunkPages; ++n) chunks_[n].handed_out = false;
  mark(first, pages, true, false);
}

bool ExtentAllocator::check() const {
  uint64_t free = 0;
  uint64_t idle = 0;
  for (size_t n = 0; n < chunks_.size(); ++n) {
    for (const uint64_t word : chunks_[n].free) free += static_cast<uint64_t>(std::popcount(word));
    if (nodes_[leaves_ + n] != summarize(chunks_[n])) return false;
    idle += is_idle(chunks_[n], nodes_[leaves_ + n]);
    if (is_idle(chunks_[n], nodes_[leaves_ + n]) && !chunks_[n].listed) return false;
  }
  for (size_t n = chunks_.size(); n < leaves_; ++n) {
    if (nodes_[leaves_ + n] != Summary{}) return false;
  }
  uint64_t child_pages = kChunkPages;
  for (size_t level = leaves_ / 2; level != 0; level /= 2, child_pages *= 2) {
    for (size_t n = level; n < 2 * level; ++n) {
      if (nodes_[n] != combine(nodes_[2 * n], nodes_[2 * n + 1], child_pages)) return false;
    }
  }
  for (uint64_t page = size_; page < chunks_.size() * kChunkPages; ++page) {
    if (!all_bits(page, 1, false)) return false;
  }
  return free == free_ && idle == idle_chunks_ && free_ <= size_;
}

}  // namespace vmem::store
