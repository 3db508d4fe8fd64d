// Regions of the process that this one was forked from. A child of fork() has none of their memory. Their addresses are
// kept from whatever the child maps, by mappings without access: an old pointer reads nothing else, and an old object
// that ends in the child frees no region of the child's own. Where the program handles no SIGSEGV, a line says why an
// access of them ends the child.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::core {

struct Addresses;

// Addresses that a child is to know, for as long as it lives. Without memory for that, the child does not know them.
class NotedAddresses {
 public:
  NotedAddresses() = default;
  ~NotedAddresses();
  NotedAddresses(const NotedAddresses&) = delete;
  NotedAddresses& operator=(const NotedAddresses&) = delete;
  void set(const void* start, size_t size);

 private:
  Addresses* noted_ = nullptr;
};

// Whether this is in a region of the process that this one was forked from.
bool is_inherited(const void* at);
}  // namespace vmem::core
