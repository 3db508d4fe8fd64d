// Regions of the process that this one was forked from. A child of fork() inherits none of their
// memory.
//
// - PROT_NONE mappings reserve their addresses in the child, so no new mapping lands there. An old
//   pointer then reads nothing else, and an old object destroyed in the child frees none of the
//   child's regions.
// - If the program handles no SIGSEGV, a message explains why an access of them ends the child.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmem::core {

struct Addresses;

// Addresses that a child reserves while this object lives. If there is no memory for the note, the
// child does not know them.
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

// True if `at` lies in a region of the process that this one was forked from.
bool is_inherited(const void* at);
}  // namespace vmem::core
