#include "trap/mapping.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "core/process/map_over.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/os.h"

namespace vmem::trap {

namespace {

constexpr int kSpaceFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

core::Status no_space(int error, size_t size) {
  if (std::abs(error) == EPERM)
    return core::system_error(error, "%s of address space cannot be replaced (it is sealed by mseal?)",
                              core::human_bytes(size).c_str());
  if (std::abs(error) == EAGAIN) {
    return core::system_error(error,
                              "cannot map %s of address space under mlockall(MCL_FUTURE) (raise `ulimit -l`, or call "
                              "mlockall with MCL_CURRENT alone)",
                              core::human_bytes(size).c_str());
  }
  return core::system_error(error,
                            "cannot map %s of address space (ENOMEM: raise `ulimit -v`, `ulimit -d`, "
                            "vm.max_map_count, or leave vm.overcommit_memory at 0 or 1)",
                            core::human_bytes(size).c_str());
}

}  // namespace

core::Status check_range(const char* call, uintptr_t start, size_t size) {
  if (size != 0 && size % core::kPage == 0 && start % core::kPage == 0 && start + size > start) return {};
  return core::error(EINVAL, "%s: address 0x%zx and size %zu must be multiples of %zu bytes, the size not 0", call,
                     start, size, core::kPage);
}

core::Status reserve_space(size_t size, size_t align, uintptr_t* start, uintptr_t near) {
  const size_t spare = align > core::kPage ? align - core::kPage : 0;
  if (size + spare < size) return core::error(EINVAL, "size %zu with alignment %zu wraps around", size, align);
  if (near != 0 && near % align == 0) {
    auto* const wanted = reinterpret_cast<void*>(near);
    void* const got = mmap(wanted, size, PROT_NONE, kSpaceFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == wanted) {
      *start = near;
      return {};
    }
    if (got != MAP_FAILED) munmap(got, size);  // before Linux 4.17, the address is a hint
  }
  void* at = mmap(nullptr, size + spare, PROT_NONE, kSpaceFlags, -1, 0);
  if (at == MAP_FAILED) return no_space(errno, size + spare);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  const uintptr_t aligned = core::round_up(begin, align);
  if (aligned > begin) munmap(at, aligned - begin);
  const size_t tail = begin + spare - aligned;
  if (tail != 0) munmap(reinterpret_cast<void*>(aligned + size), tail);
  *start = aligned;
  return {};
}

core::Status replace_with_space(uintptr_t start, size_t size) {
  const int error = core::map_over(start, size, PROT_NONE, kSpaceFlags, -1, 0);
  return error != 0 ? no_space(error, size) : core::Status();
}

namespace {

// Applied to every new mapping: it may have other settings than the one it replaces.
core::Status keep_to_process(uintptr_t start, size_t size, CoreDump dump) {
  if (const int error = os::advise(start, size, MADV_DONTFORK); error != 0)
    return core::system_error(error, "cannot keep %zu bytes at 0x%zx out of forked children", size, start);
  const bool out = dump == CoreDump::no;
  if (const int error = os::advise(start, size, out ? MADV_DONTDUMP : MADV_DODUMP); error != 0)
    return core::system_error(error, "cannot keep %zu bytes at 0x%zx %s core dumps", size, start,
                              out ? "out of" : "in");
  // A page that the kernel merges with an equal one loses its write protection (seen on 6.18), so
  // stores would go unseen. PR_SET_MEMORY_MERGE merges a whole process. EINVAL: a kernel that
  // merges nothing.
  if (const int error = os::advise(start, size, MADV_UNMERGEABLE); error != 0 && error != -EINVAL)
    return core::system_error(error, "cannot keep %zu bytes at 0x%zx from being merged", size, start);
  return {};
}

}  // namespace

core::Status arm(int fd, uintptr_t start, size_t size, uint64_t mode, HugePages huge, CoreDump dump) {
  if (core::Status s = keep_to_process(start, size, dump); !s.ok()) return s;
  const int error_huge = os::advise(start, size, huge == HugePages::yes ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  // EINVAL: a kernel without transparent huge pages; small pages will do.
  if (error_huge != 0 && error_huge != -EINVAL)
    return core::system_error(error_huge, "cannot set the page size of %zu bytes at 0x%zx", size, start);
  if (mode != 0) {
    if (const int error = os::enroll(fd, start, size, mode); error != 0)
      return core::system_error(error, "cannot register %zu bytes at 0x%zx with userfaultfd", size, start);
  }
  // mlockall(MCL_FUTURE) locks the range: it would be populated to its last page.
  if (munlock(reinterpret_cast<void*>(start), size) != 0) return no_space(errno, size);
  if (mprotect(reinterpret_cast<void*>(start), size, PROT_READ | PROT_WRITE) != 0) return no_space(errno, size);
  return {};
}

core::Status replace_with_sigbus(int empty_file, uintptr_t start, size_t size) {
  // Mapping over the range frees its pages while faults of the whole process wait. So drop most
  // pages before, while faults are served. Do not map in pieces: the number of mappings is limited.
  constexpr size_t kPiece = size_t{64} << 20;
  for (size_t at = 0; size > kPiece && at < size; at += kPiece)
    os::advise(start + at, std::min(kPiece, size - at), MADV_DONTNEED);
  return replace_with_file(empty_file, 0, true, start, size);
}

core::Status replace_with_file(int fd, uint64_t offset, bool shared, uintptr_t start, size_t size, CoreDump dump,
                               bool* replaced) {
  const int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_NORESERVE;
  const int error = core::map_over(start, size, PROT_READ | PROT_WRITE, flags, fd, offset);
  if (error != 0) return no_space(error, size);
  if (replaced != nullptr) *replaced = true;
  core::step("trap.file.mapped");
  return keep_to_process(start, size, dump);
}

void RangeMap::cut(uintptr_t start, size_t size) {
  const uintptr_t end = start + size;
  auto it = entries_.upper_bound(start);
  if (it != entries_.begin() && std::prev(it)->first + std::prev(it)->second.size > start) --it;
  while (it != entries_.end() && it->first < end) {
    const uintptr_t from = it->first, to = from + it->second.size;
    Entry rest = it->second;  // used if to > end
    rest.size = to - end;
    if (from < start) {
      if (to > end) entries_.emplace(end, rest);
      it->second.size = start - from;
      ++it;
    } else if (to > end) {
      auto node = entries_.extract(it);
      node.key() = end;
      node.mapped() = rest;
      it = std::next(entries_.insert(std::move(node)).position);
    } else {
      it = entries_.erase(it);
    }
  }
}

void RangeMap::set(uintptr_t start, size_t size, Transfer transfer, bool owned, CoreDump dump) {
  const core::MutexLock lock(mutex_);
  if (const auto after = entries_.upper_bound(start); after != entries_.begin() && !owned) {
    const auto& [from, known] = *std::prev(after);
    if (from + known.size >= start + size && known.transfer == transfer && !known.owned && known.dump == dump) return;
  }
  // Neighbours are not merged, so that erasing one needs no memory.
  std::map<uintptr_t, Entry> alone;
  alone.emplace(start, Entry{size, transfer, owned, dump});
  cut(start, size);
  entries_.merge(alone);
}

bool RangeMap::set_dump(uintptr_t start, size_t size, CoreDump dump) {
  const core::MutexLock lock(mutex_);
  const auto it = entries_.find(start);
  if (it == entries_.end() || it->second.size != size) return false;
  it->second.dump = dump;
  return true;
}

void RangeMap::erase(uintptr_t start, size_t size) {
  const core::MutexLock lock(mutex_);
  cut(start, size);
}

bool RangeMap::find(uintptr_t address, Entry* out) const {
  const core::MutexLock lock(mutex_);
  auto it = entries_.upper_bound(address);
  if (it == entries_.begin()) return false;
  --it;
  if (it->first + it->second.size <= address) return false;
  *out = it->second;
  return true;
}

bool RangeMap::first_owned(Range* out) const {
  const core::MutexLock lock(mutex_);
  for (const auto& [start, entry] : entries_) {
    if (entry.owned) {
      *out = {start, entry.size};
      return true;
    }
  }
  return false;
}

}  // namespace vmem::trap
