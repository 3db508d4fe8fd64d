// A vector of at most N elements that never allocates, like std::inplace_vector. For work that must
// go on without memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace vmem::core {

// The caller checks full() before adding, or knows that there is room.
template <typename T, size_t N>
class InplaceVector {
 public:
  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == N; }
  size_t size() const { return size_; }
  static constexpr size_t capacity() { return N; }
  void clear() { size_ = 0; }
  void push_back(const T& what) { items_[size_++] = what; }
  T& operator[](size_t i) { return items_[i]; }
  const T& operator[](size_t i) const { return items_[i]; }
  T& front() { return items_[0]; }
  T& back() { return items_[size_ - 1]; }
  T* begin() { return items_.data(); }
  T* end() { return items_.data() + size_; }
  const T* begin() const { return items_.data(); }
  const T* end() const { return items_.data() + size_; }
  // Keeps the order of the others.
  template <typename Which>
  void erase_if(Which which) {
    size_ = static_cast<size_t>(std::remove_if(begin(), end(), which) - begin());
  }
  std::span<T> all() { return {begin(), size_}; }
  std::span<const T> all() const { return {begin(), size_}; }

 private:
  std::array<T, N> items_{};
  size_t size_ = 0;
};

}  // namespace vmem::core
