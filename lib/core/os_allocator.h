// Memory that does not come from malloc. The application may replace malloc by one that takes a
// lock which a thread holds while it waits for a block, or that keeps its memory in a region. So
// all memory allocated or freed under the pager's lock comes from here: from the kernel in large
// pieces, divided under a lock that is held only briefly.
//
// - Containers use the allocator Own<T> or a name from below. A class whose objects are made with
//   `new` derives from OwnNew.
// - If there is no memory they throw bad_alloc, which does not use malloc either.
// - Unused memory goes back to the kernel, except its addresses and a few pages.
// - A test that counts calls of malloc under the lock finds what was forgotten.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/own_exception.h"

namespace vmem::core {

// Returns memory aligned to at least 16 bytes. Throws bad_alloc.
void* own_allocate(size_t bytes);
// bytes: the size passed to own_allocate().
void own_free(void* at, size_t bytes) noexcept;

// Makes the allocator usable in forked children. Call before the first thread starts; may be called
// again.
void keep_own_memory_in_children();

// Tests: returns true to refuse an allocation.
using MemoryHook = bool (*)();
inline std::atomic<MemoryHook> memory_hook{nullptr};

template <typename T>
struct Own {
  using value_type = T;
  Own() = default;
  template <typename U>
  Own(const Own<U>&) {}  // NOLINT(google-explicit-constructor): as every allocator
  T* allocate(size_t count) {
    static_assert(alignof(T) <= 16);
    if (count > SIZE_MAX / 2 / bytes(1)) throw_bad_alloc();
    return static_cast<T*>(own_allocate(bytes(count)));
  }
  void deallocate(T* at, size_t count) noexcept { own_free(at, bytes(count)); }
  template <typename U>
  bool operator==(const Own<U>&) const {
    return true;
  }

 private:
  static constexpr size_t bytes(size_t count) {
    return count * sizeof(T);  // NOLINT(bugprone-sizeof-expression): T may be a pointer
  }
};

template <typename T>
using OwnVector = std::vector<T, Own<T>>;
template <typename T>
using OwnList = std::list<T, Own<T>>;
template <typename Key, typename T>
using OwnMap = std::map<Key, T, std::less<Key>, Own<std::pair<const Key, T>>>;
template <typename Key, typename T>
using OwnHashMap = std::unordered_map<Key, T, std::hash<Key>, std::equal_to<Key>, Own<std::pair<const Key, T>>>;
using OwnString = std::basic_string<char, std::char_traits<char>, Own<char>>;

struct OwnNew {
  static void* operator new(size_t bytes) { return own_allocate(bytes); }
  static void operator delete(void* at, size_t bytes) noexcept { own_free(at, bytes); }
};

}  // namespace vmem::core
