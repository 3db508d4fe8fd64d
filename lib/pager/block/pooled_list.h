// A list that returns its entries to a pool. It needs no memory up to its former length, or the
// length given to reserve(). Not thread-safe: the pager's lock protects it.
#pragma once

#include <cstddef>
#include <iterator>
#include <new>

#include "core/os_allocator.h"

namespace vmem::pager {

template <typename T>
class PooledList {
 public:
  using iterator = typename core::OwnList<T>::iterator;

  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  T& front() { return items_.front(); }
  const T& front() const { return items_.front(); }
  iterator begin() { return items_.begin(); }
  iterator end() { return items_.end(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

  // Makes room for `entries` in all. Returns false without memory; some room may have been added.
  [[nodiscard]] bool reserve(size_t entries) noexcept {
    try {
      while (items_.size() + spare_.size() < entries) spare_.emplace_back();
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  // Returns false, and changes nothing, without memory.
  [[nodiscard]] bool insert(iterator before, const T& what) noexcept {
    if (spare_.empty() && !reserve(items_.size() + 1)) return false;
    spare_.front() = what;
    items_.splice(before, spare_, spare_.begin());
    return true;
  }
  [[nodiscard]] bool push_back(const T& what) noexcept { return insert(items_.end(), what); }
  [[nodiscard]] bool push_front(const T& what) noexcept { return insert(items_.begin(), what); }
  iterator erase(iterator which) {
    const iterator next = std::next(which);
    spare_.splice(spare_.begin(), items_, which);
    return next;
  }
  void pop_front() { erase(items_.begin()); }
  void move_front(iterator before) { items_.splice(before, items_, items_.begin()); }
  void clear() { spare_.splice(spare_.begin(), items_); }
  template <typename Which>
  void erase_if(Which which) {
    for (iterator i = items_.begin(); i != items_.end();) i = which(*i) ? erase(i) : std::next(i);
  }

 private:
  core::OwnList<T> items_, spare_;
};

}  // namespace vmem::pager
