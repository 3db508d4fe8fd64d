// An array that grows without moving its elements. Growing by one chunk costs one chunk, however
// large the array is.
#pragma once

#include <cstddef>
#include <memory>

#include "core/os_allocator.h"

namespace vmem::policy {

template <typename T>
class Chunks {
 public:
  static constexpr size_t kStep = 1024;
  size_t size() const { return chunks_.size() * kStep; }
  T& operator[](size_t i) { return chunks_[i / kStep]->items[i % kStep]; }
  const T& operator[](size_t i) const { return chunks_[i / kStep]->items[i % kStep]; }
  // Grows to at least `count` elements. Throws bad_alloc; the elements stay, and some chunks may
  // have been added.
  void grow(size_t count) {
    while (size() < count) {
      if (chunks_.size() == chunks_.capacity()) chunks_.reserve(2 * chunks_.size() + 16);
      chunks_.push_back(std::make_unique<Chunk>());
    }
  }

 private:
  struct Chunk : core::OwnNew {
    T items[kStep] = {};
  };
  core::OwnVector<std::unique_ptr<Chunk>> chunks_;
};

}  // namespace vmem::policy
