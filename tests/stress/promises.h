// Threads that store and sync the words of one shared file, for the programs that check its
// contents after a loss of power.
#pragma once

#include <map>
#include <utility>

#include "common.h"

namespace stress {

// Maps a whole file.
inline uint64_t* map_shared(const std::string& path, uint64_t bytes) {
  void* p = nullptr;
  if (const int rc = vmem_map(&p, bytes, path.c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY); rc != 0)
    differs("map: %d %s", rc, vmem_last_error());
  return static_cast<uint64_t*>(p);
}

// A thread of several owns the words with its remainder: the last version that it stored to each.
class OwnWords {
 public:
  OwnWords(uint64_t* words, size_t count, unsigned thread, unsigned threads, std::atomic<uint64_t>& version,
           uint64_t seed)
      : random_(seed), words_(words), count_(count), thread_(thread), threads_(threads), version_(version) {}
  // Makes a call on some words of the file, mostly stores. *promised: the words that the call, if a
  // sync, has promised to keep.
  bool step(std::vector<std::pair<uint32_t, uint64_t>>* promised) {
    const size_t at = random_.below(count_),
                 n = std::min<size_t>(count_ - at, 1 + random_.below(random_.one_in(8) ? 60000 : 900));
    if (random_.below(3) != 0) {
      for (size_t i = at; i < at + n; i += 1 + random_.below(200)) {
        const size_t w = i / threads_ * threads_ + thread_;
        if (w >= count_) continue;
        mine_[w] = version_.fetch_add(1);
        static_cast<volatile uint64_t*>(words_)[w] = mine_[w];
      }
      return false;
    }
    if (random_.one_in(3)) {
      if (const int rc = vmem_evict(words_ + at, n * 8, VMEM_SSD); rc != 0)
        differs("evict: %d %s", rc, vmem_last_error());
      return false;
    }
    if (const int rc = vmem_sync(words_ + at, n * 8); rc != 0) differs("sync: %d %s", rc, vmem_last_error());
    for (auto it = mine_.lower_bound(at); it != mine_.end() && it->first < at + n; ++it)
      promised->emplace_back(static_cast<uint32_t>(it->first), it->second);
    return true;
  }

 private:
  Random random_;
  uint64_t* const words_;
  const size_t count_;
  const unsigned thread_, threads_;
  std::atomic<uint64_t>& version_;
  std::map<size_t, uint64_t> mine_;
};

}  // namespace stress
