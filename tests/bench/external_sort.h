// An external merge sort over plain pointers: runs of the input are sorted in place, then merged.
// One thread does this, or several threads with a share of the keys each. libvmem and mmap run the
// same code; only the hints differ. The algorithm is described in Knuth, The Art of Computer
// Programming, volume 3, section 5.4.1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <queue>
#include <thread>
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
  size_t count = 0;    // records of each buffer
  size_t in_core = 0;  // records per run
  size_t step = 0;     // records per block: in_core and ahead are multiples
  size_t ahead = 0;    // records fetched ahead for each run of the merge
  unsigned threads = 1;
  // hints: soon needed; no longer needed, and unchanged
  std::function<void(const void*, size_t)> fetch, done_with;
  std::function<void(const void*, size_t)> write_out;  // hint: complete, and not needed soon
};

// A run is a fifth of the memory; the next run on its way in takes another fifth, and the run being
// written a third one.
inline Memory plan(const void* input, void* runs, void* output, uint64_t bytes, uint64_t memory, unsigned threads = 1) {
  constexpr uint64_t kStep = 2 << 20;
  Memory m;
  m.input = static_cast<const Record*>(input);
  m.runs = static_cast<Record*>(runs);
  m.output = static_cast<Record*>(output);
  m.count = bytes / sizeof(Record);
  m.step = kStep / sizeof(Record);
  m.in_core = std::max<uint64_t>(memory / 5 / kStep, 1) * kStep / sizeof(Record);
  const uint64_t run_count = (m.count + m.in_core - 1) / m.in_core;
  m.ahead = std::clamp<uint64_t>(memory / 8 / threads / run_count / kStep, 1, 16) * kStep / sizeof(Record);
  m.threads = threads;
  return m;
}

template <typename F>
void in_threads(unsigned threads, const F& work) {
  std::vector<std::thread> team;
  for (unsigned t = 1; t < threads; ++t) team.emplace_back([&work, t] { work(t); });
  work(0);
  for (std::thread& each : team) each.join();
}

struct Run {
  const Record *at, *end;
};

// Merges the runs into `to`, in key order.
inline void merge(const Memory& m, const std::vector<Run>& runs, Record* to) {
  struct Head {
    const Record *at, *end, *fetched, *done;
  };
  std::vector<Head> heads;
  const auto need = [&](Head& h) {
    if (h.at + m.ahead / 2 < h.fetched || h.fetched == h.end) return;
    const size_t n = std::min(m.ahead, static_cast<size_t>(h.end - h.fetched));
    m.fetch(h.fetched, n * sizeof(Record));
    h.fetched += n;
    // Give up whole blocks only: giving up a part of a block has no effect.
    const Record* const used = h.at - static_cast<size_t>(h.at - m.runs) % m.step;
    if (used > h.done) m.done_with(h.done, static_cast<size_t>(used - h.done) * sizeof(Record));
    h.done = std::max(h.done, used);
  };
  const auto later = [&](size_t a, size_t b) { return *heads[b].at < *heads[a].at; };
  std::priority_queue<size_t, std::vector<size_t>, decltype(later)> queue(later);
  for (const Run& run : runs) {
    if (run.at != run.end) heads.push_back({run.at, run.end, run.at, run.at});
  }
  for (size_t i = 0; i < heads.size(); ++i) {
    need(heads[i]);
    queue.push(i);
  }
  const size_t part = 8 * m.step;
  for (Record* written = to; !queue.empty(); ++to) {
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

inline void sort(const Memory& m) {
  std::vector<Run> runs;
  for (size_t at = 0; at < m.count; at += m.in_core)
    runs.push_back({m.runs + at, m.runs + at + std::min(m.in_core, m.count - at)});
  const auto soon = [&](size_t i) {
    if (i < runs.size())
      m.fetch(m.input + (runs[i].at - m.runs), static_cast<size_t>(runs[i].end - runs[i].at) * sizeof(Record));
  };
  soon(0);
  for (size_t i = 0; i < runs.size(); ++i) {
    soon(i + 1);
    Record* const to = m.runs + (runs[i].at - m.runs);
    const Record* const from = m.input + (runs[i].at - m.runs);
    const auto n = static_cast<size_t>(runs[i].end - runs[i].at);
    const auto part = [&](unsigned t) { return n * t / m.threads; };
    in_threads(m.threads, [&](unsigned t) {
      memcpy(static_cast<void*>(to + part(t)), from + part(t), (part(t + 1) - part(t)) * sizeof(Record));
    });
    m.done_with(from, n * sizeof(Record));
    for (unsigned t = 1; t < m.threads; ++t) std::nth_element(to + part(t - 1), to + part(t), to + n);
    in_threads(m.threads, [&](unsigned t) { std::sort(to + part(t), to + part(t + 1)); });
    m.write_out(to, n * sizeof(Record));
  }
  // Each thread has a share of the keys, split by the quantiles of the first run; that is close
  // enough for random keys.
  std::vector<std::vector<Run>> parts(m.threads);
  for (unsigned left = m.threads; left > 0; --left) {
    const Run first = runs.front();
    const Record bound = first.at == first.end ? Record{} : first.at[(first.end - first.at - 1) / left];
    for (Run& run : runs) {
      const Record* const to = left == 1 ? run.end : std::lower_bound(run.at, run.end, bound);
      parts[m.threads - left].push_back({run.at, to});
      run.at = to;
    }
  }
  std::vector<Record*> to = {m.output};
  for (const auto& part : parts) {
    Record* end = to.back();
    for (const Run& run : part) end += run.end - run.at;
    to.push_back(end);
  }
  in_threads(m.threads, [&](unsigned t) { merge(m, parts[t], to[t]); });
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

// Returns whether `sorted` has the records of `input`, in order.
inline bool right(const Record* input, const Record* sorted, size_t count) {
  return std::is_sorted(sorted, sorted + count) && sum_of(input, count) == sum_of(sorted, count);
}

}  // namespace extsort
