// An external merge sort over plain pointers, one thread: runs of the input are sorted in place, then merged. The same
// code for libvmem and for mmap: only the hints differ. For the algorithm: Knuth, The Art of Computer Programming,
// volume 3, section 5.4.1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <queue>
#include <vector>

namespace extsort {

struct Record {
  uint64_t word[8];
  bool operator<(const Record& other) const { return word[0] < other.word[0]; }
};

struct Memory {
  const Record* input = nullptr;
  Record* runs = nullptr;
  Record* output = nullptr;
  size_t count = 0;                                           // records of each
  size_t in_core = 0;                                         // records of a run
  size_t step = 0;                                            // records of a block: in_core and ahead are multiples
  size_t ahead = 0;                                           // records each run of the merge is fetched ahead
  std::function<void(const void*, size_t)> fetch, done_with;  // hints: soon needed; not needed any more, as it is
  std::function<void(const void*, size_t)> write_out;         // hint: complete, not wanted again soon
};

inline void sort(const Memory& m) {
  struct Head {
    const Record *at, *end, *fetched, *done;
  };
  std::vector<Head> heads;
  m.fetch(m.input, std::min(m.in_core, m.count) * sizeof(Record));
  for (size_t at = 0; at < m.count; at += m.in_core) {
    const size_t n = std::min(m.in_core, m.count - at), next = at + n;
    if (next < m.count) m.fetch(m.input + next, std::min(m.in_core, m.count - next) * sizeof(Record));
    memcpy(static_cast<void*>(m.runs + at), m.input + at, n * sizeof(Record));
    m.done_with(m.input + at, n * sizeof(Record));
    std::sort(m.runs + at, m.runs + next);
    m.write_out(m.runs + at, n * sizeof(Record));
    heads.push_back({m.runs + at, m.runs + next, m.runs + at, m.runs + at});
  }
  const auto need = [&](Head& h) {
    if (h.at + m.ahead / 2 < h.fetched || h.fetched == h.end) return;
    const size_t n = std::min(m.ahead, static_cast<size_t>(h.end - h.fetched));
    m.fetch(h.fetched, n * sizeof(Record));
    h.fetched += n;
    const size_t used = static_cast<size_t>(h.at - h.done) / m.step * m.step;
    if (used != 0) m.done_with(h.done, used * sizeof(Record));
    h.done += used;
  };
  const auto later = [&](size_t a, size_t b) { return *heads[b].at < *heads[a].at; };
  std::priority_queue<size_t, std::vector<size_t>, decltype(later)> queue(later);
  for (size_t i = 0; i < heads.size(); ++i) {
    need(heads[i]);
    queue.push(i);
  }
  const size_t part = 8 * m.step;
  for (Record *to = m.output, *written = to; !queue.empty(); ++to) {
    if (static_cast<size_t>(to - written) == part) {
      m.write_out(written, part * sizeof(Record));
      written = to;
    }
    const size_t i = queue.top();
    queue.pop();
    *to = *heads[i].at++;
    if (heads[i].at == heads[i].end) continue;
    need(heads[i]);
    queue.push(i);
  }
}

inline uint64_t sum_of(const Record* r, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t h = 0;
    for (const uint64_t w : r[i].word) h = (h ^ w) * 0x9e3779b97f4a7c15u;
    sum += h;
  }
  return sum;
}

// Whether `sorted` has the records of `input`, in order.
inline bool right(const Record* input, const Record* sorted, size_t count) {
  return std::is_sorted(sorted, sorted + count) && sum_of(input, count) == sum_of(sorted, count);
}

}  // namespace extsort
