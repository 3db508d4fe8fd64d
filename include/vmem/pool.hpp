/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small allocations: vmem::pool, a std::pmr::memory_resource over regions. Header-only, over
 * <vmem/vmem.h>.
 *
 *   vmem::pool pool({.region_bytes = 1 << 30});
 *   std::pmr::vector<double> numbers(&pool);
 *
 * Granularity. An allocation takes whole granules of 4 KiB and begins at one: 1 byte costs 4 KiB.
 * That suits buffers, vectors and values of a cache. For objects smaller than about a granule
 * (nodes of maps and lists) put a standard pool on top, which cuts its memory from this pool into
 * objects:
 *
 *   std::pmr::unsynchronized_pool_resource small(&pool);   // synchronized_pool_resource for several threads
 *   std::pmr::map<std::uint64_t, std::pmr::string> map(&small);
 *
 * Blocks. libvmem moves blocks, not granules: neighbours in a block come and go together. Small
 * blocks suit small values used at random, so a pool has VMEM_BLOCK_AUTO by default. Leases act on
 * blocks too: align allocations that are leased on a device to the block size, and their neighbours
 * too.
 *
 * Book-keeping is in ordinary memory (12 bytes for each granule of a shared region, allocated with
 * the region). Allocating and freeing access no byte of a region, so they cause no fault and no
 * I/O.
 *
 * New memory has indeterminate contents. Freed memory keeps its bytes, and libvmem may write them
 * to the SSD, until it is used again or trim() discards it.
 *
 * Threads. Every call is thread-safe, under one lock. Allocating and freeing take a bounded number
 * of steps in each shared region, and block only where a comment says so. Do not use a pool in
 * signal handlers, in a forked child, or behind malloc or operator new: libvmem itself uses those
 * while it serves a fault.
 *
 * Lifetime. Memory lives until it is deallocated or the pool ends, which must be before
 * vmem_shutdown().
 */
#ifndef VMEM_POOL_HPP
#define VMEM_POOL_HPP

#if __cplusplus < 202002L
#error "<vmem/pool.hpp> needs C++20: compile with -std=c++20 (vmem::vmem of the CMake package asks for it)"
#endif

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "vmem/pool_granules.hpp"
#include "vmem/vmem.hpp"

namespace vmem {

/* A failed allocation; what() says why, with the numbers. */
class pool_error : public std::bad_alloc {
 public:
  __attribute__((format(printf, 2, 3))) explicit pool_error(const char* format, ...) noexcept {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(words_, sizeof words_, format, arguments);
    va_end(arguments);
  }
  const char* what() const noexcept override { return words_; }

 private:
  char words_[400];
};

struct pool_options {
  /*
   * Bytes of the regions that allocations share, rounded up to 2 MiB; at most 2 TiB. Larger
   * allocations get a region of their own, which deallocation frees. Address space only: memory
   * that is never accessed costs nothing.
   */
  std::size_t region_bytes = std::size_t{256} << 20;
  /*
   * Each further region is twice as large as the one before, up to this many bytes. 0: all have
   * region_bytes.
   */
  std::size_t region_limit_bytes = 0;
  /*
   * Limit for all regions together; allocations beyond it fail. libvmem finds out at an access, by
   * SIGBUS, that budget and SSD are full. A limit below host_budget + ssd_budget makes that a
   * pool_error of the allocation instead.
   */
  std::size_t limit_bytes = SIZE_MAX;
  /* As for vmem_alloc: 0 or VMEM_HOST_ONLY. */
  unsigned flags = 0;
  /* Name of each region, followed by a number. */
  std::string name = "pool";
  /*
   * Attributes of each region, as in struct vmem_region_attr. VMEM_BLOCK_AUTO suits objects that
   * are accessed at random, wholly or in part; 2 MiB suits objects that are leased, or accessed in
   * the order of their creation. 0: setting block_size.
   */
  std::size_t block_size = VMEM_BLOCK_AUTO;
  int advice = 0;
  int core_dump = 0; /* 1 in core dumps, -1 not; 0: setting core_dump */
  /*
   * Called when deallocate() gets something that it cannot free: a pointer that is not of this
   * pool, one inside an allocation, one that was freed already, or another size than was allocated.
   * Nothing is freed then. `words` says which, with the numbers. Runs on the calling thread,
   * without a lock; must not throw. nullptr: the words go to stderr and the program aborts, as with
   * free(): by then it has written to memory of others.
   */
  void (*on_misuse)(const char* words, void* user) = nullptr;
  void* misuse_user = nullptr;
};

struct pool_stats {
  std::size_t in_use_bytes;       /* of live allocations, in whole granules */
  std::size_t reserved_bytes;     /* of all regions: in use or free */
  std::size_t largest_free_bytes; /* largest allocation that needs no new region */
  std::size_t allocations;        /* live */
  std::size_t regions;            /* shared regions, and those of one allocation */
  std::size_t own_regions;        /* regions of one allocation */
  std::size_t misuses;            /* calls of on_misuse so far */
  double fragmentation; /* share of the free bytes of shared regions outside their region's largest free run */
};

class pool final : public std::pmr::memory_resource {
 public:
  static constexpr std::size_t granule_bytes = 4096;

  /*
   * Takes no memory yet. Throws vmem::error (EINVAL) for bad options. A bad block_size, advice or
   * core_dump is a pool_error of the first allocation.
   */
  explicit pool(pool_options options = {}) : options_(std::move(options)) {
    const std::size_t most = detail::granule_map::max_count / 2 * granule_bytes;
    if (options_.region_limit_bytes == 0) options_.region_limit_bytes = options_.region_bytes;
    if (options_.region_bytes == 0 || options_.region_limit_bytes > most ||
        options_.region_limit_bytes < options_.region_bytes) {
      throw error(-EINVAL, "vmem::pool: region_bytes " + std::to_string(options_.region_bytes) +
                               ", region_limit_bytes " + std::to_string(options_.region_limit_bytes) +
                               ": accepted are 1 to " + std::to_string(most) + ", the limit not below the first");
    }
    options_.region_bytes = round_up(options_.region_bytes, region_align);
    options_.region_limit_bytes = round_up(options_.region_limit_bytes, region_align);
    if ((options_.flags & ~VMEM_HOST_ONLY) != 0)
      throw error(-EINVAL, "vmem::pool: flags " + std::to_string(options_.flags) + "; 0 or VMEM_HOST_ONLY");
    next_region_bytes_ = options_.region_bytes;
  }
  pool(const pool&) = delete;
  pool& operator=(const pool&) = delete;
  /*
   * Frees every region, with all that is still allocated. Regions with live leases stay, without an
   * owner: see release().
   */
  ~pool() override { free_regions(true); }

  /*
   * Frees every region, with all that is still allocated, so that the pool begins anew. Throws
   * vmem::error (EBUSY) if regions have live leases: those stay, with their allocations. Waits for
   * I/O under way; other calls wait meanwhile.
   */
  void release() {
    const std::lock_guard lock(mutex_);
    const freed result = free_regions(true);
    if (result.failure != 0 || result.leased) throw error(result.failure != 0 ? result.failure : -EBUSY);
  }

  /*
   * Frees the regions in which nothing is allocated, and tells libvmem that the free bytes of the
   * others are dead (VMEM_ADVISE_DONT_NEED on each free run). That frees memory and SSD of the
   * blocks wholly inside, except blocks under a lease. Returns the bytes of the freed regions.
   * Waits for I/O under way; other calls on the pool wait meanwhile. Throws vmem::error, after the
   * rest, if libvmem refused something for another reason than a lease.
   */
  std::size_t trim() {
    const std::lock_guard lock(mutex_);
    freed result = free_regions(false);
    const auto dead = [&](std::uintptr_t address, std::size_t bytes) {
      result.note(vmem_advise(reinterpret_cast<const void*>(address), bytes, VMEM_ADVISE_DONT_NEED, VMEM_HOST));
    };
    for (const auto& entry : regions_) {
      const std::uintptr_t base = entry.first;
      const region_record& r = entry.second;
      if (r.map != nullptr) {
        r.map->for_each_free(
            [&](std::size_t begin, std::size_t length) { dead(base + begin * granule_bytes, length * granule_bytes); });
      } else if (r.own_granules == 0) {
        dead(base, r.bytes);
      }
    }
    if (result.failure != 0) throw error(result.failure);
    return result.bytes;
  }

  pool_stats stats() const {
    const std::lock_guard lock(mutex_);
    pool_stats s = {
        in_use_granules_ * granule_bytes, reserved_bytes_, 0, allocations_, regions_.size(), 0, misuses_, 0};
    std::size_t free = 0, in_largest = 0;
    for (const auto& [address, r] : regions_) {
      if (r.map == nullptr) {
        ++s.own_regions;
        continue;
      }
      const std::size_t largest = r.map->largest_free() * granule_bytes;
      s.largest_free_bytes = std::max(s.largest_free_bytes, largest);
      in_largest += largest;
      free += r.map->free_count() * granule_bytes;
    }
    if (free != 0) s.fragmentation = 1 - static_cast<double>(in_largest) / static_cast<double>(free);
    return s;
  }

  /* True if p points into one of the pool's regions, allocated or free. */
  bool owns(const void* p) const {
    const std::lock_guard lock(mutex_);
    return find(regions_, p) != regions_.end();
  }

 private:
  /* Regions begin at multiples of this. */
  static constexpr std::size_t region_align = std::size_t{2} << 20;

  struct region_record {
    std::size_t bytes;
    std::unique_ptr<detail::granule_map> map;  // null: the region has one allocation
    std::size_t own_granules;                  // one allocation: its granules; 0 when it was deallocated under a lease
    std::size_t own_begin;                     // one allocation: its first granule
  };
  using region_table = std::map<std::uintptr_t, region_record>;
  struct freed {
    std::size_t bytes = 0;
    int failure = 0;  // first error other than a lease
    bool leased = false;
    void note(int rc) {
      if (rc == -EBUSY) {
        leased = true;
      } else if (failure == 0) {
        failure = rc;
      }
    }
  };

  static std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

  /*
   * Throws pool_error: no region could be made, the limit is reached, or the numbers are bad. 0
   * bytes take a granule. Tries regions in the order of their creation, so that young ones run
   * empty. Makes a region under the lock.
   */
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (!std::has_single_bit(alignment)) {
      throw pool_error("vmem::pool: alignment %zu for %zu bytes is no power of two", alignment, bytes);
    }
    if (bytes > SIZE_MAX / 4 || alignment > SIZE_MAX / 4) {
      throw pool_error("vmem::pool: %zu bytes aligned to %zu: more than there are addresses", bytes, alignment);
    }
    const std::size_t granules = std::max<std::size_t>((bytes + granule_bytes - 1) / granule_bytes, 1);
    const std::size_t align = std::max(alignment, granule_bytes);
    // Bytes of a region in which the allocation fits wherever the region begins.
    const std::size_t needed = granules * granule_bytes + (align > region_align ? align - region_align : 0);
    const std::lock_guard lock(mutex_);
    if (needed > options_.region_bytes) return allocate_own(bytes, granules, align, needed);
    for (const region_table::value_type* entry : shared_) {
      if (void* p = take(*entry, granules, align); p != nullptr) return p;
    }
    return take(add_shared(bytes, needed), granules, align);
  }

  /*
   * Frees the allocation's own region, if it has one, and then waits for I/O on it, without the
   * lock.
   */
  void do_deallocate(void* p, std::size_t bytes, std::size_t) override {
    char words[400];
    region_table::node_type own;
    {
      const std::lock_guard lock(mutex_);
      const auto found = find(regions_, p);
      if (give(found, p, bytes, words, sizeof words)) {
        if (found->second.map != nullptr) return;
        own = regions_.extract(found);
      } else {
        ++misuses_;
      }
    }
    if (own.empty()) {
      misuse(words);
      return;
    }
    const int rc = vmem_free(reinterpret_cast<void*>(own.key()));
    const std::lock_guard lock(mutex_);
    if (rc == 0) {
      reserved_bytes_ -= own.mapped().bytes;
    } else {
      regions_.insert(std::move(own));  // leased: trim() tries again
    }
  }

  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  /* mutex_ is held in the following functions. */

  /* Returns the region that p points into. */
  template <typename Table>
  static auto find(Table& table, const void* p) -> decltype(table.begin()) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    auto it = table.upper_bound(address);
    if (it == table.begin()) return table.end();
    --it;
    return address - it->first < it->second.bytes ? it : table.end();
  }

  /* Returns nullptr if the region has no room. */
  void* take(const region_table::value_type& entry, std::size_t granules, std::size_t align) {
    const auto& [address, r] = entry;
    const std::size_t phase = round_up(address, align) - address;
    const auto begin =
        r.map->take(static_cast<detail::granule_map::index>(granules), align / granule_bytes, phase / granule_bytes);
    if (begin == detail::granule_map::none) return nullptr;
    return taken(address + begin * granule_bytes, granules);
  }
  void* taken(std::uintptr_t address, std::size_t granules) {
    in_use_granules_ += granules;
    ++allocations_;
    return reinterpret_cast<void*>(address);
  }

  /* Returns false, and why, if it is no allocation of the pool. */
  bool give(region_table::iterator found, const void* p, std::size_t bytes, char* words, std::size_t size) {
    const std::size_t granules = std::max<std::size_t>(bytes / granule_bytes + (bytes % granule_bytes != 0), 1);
    if (found == regions_.end()) {
      std::snprintf(words, size, "vmem::pool: deallocate(%p, %zu): the address is in none of the %zu regions of \"%s\"",
                    p, bytes, regions_.size(), options_.name.c_str());
      return false;
    }
    auto& [address, r] = *found;
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(p) - address, at = offset / granule_bytes;
    const std::size_t length = r.map != nullptr    ? r.map->used_at(static_cast<detail::granule_map::index>(at))
                               : at == r.own_begin ? r.own_granules
                                                   : 0;
    if (offset % granule_bytes == 0 && length == granules) {
      in_use_granules_ -= granules;
      --allocations_;
      if (r.map != nullptr) {
        r.map->give(static_cast<detail::granule_map::index>(at));
      } else {
        r.own_granules = 0;
      }
      return true;
    }
    const detail::granule_map::run run = r.map != nullptr ? r.map->run_of(static_cast<detail::granule_map::index>(at))
                                                          : detail::granule_map::run{0, 0, r.own_granules != 0};
    const std::size_t begin = r.map != nullptr ? run.begin : r.own_begin;
    if (!run.used) {
      std::snprintf(words, size,
                    "vmem::pool: deallocate(%p, %zu): freed already, or never allocated: byte %zu of region %p", p,
                    bytes, offset, reinterpret_cast<void*>(address));
    } else if (offset != begin * granule_bytes) {
      std::snprintf(words, size,
                    "vmem::pool: deallocate(%p, %zu): %td bytes from the beginning of the allocation at %p", p, bytes,
                    static_cast<std::ptrdiff_t>(offset - begin * granule_bytes),
                    reinterpret_cast<void*>(address + begin * granule_bytes));
    } else {
      std::snprintf(words, size, "vmem::pool: deallocate(%p, %zu): the allocation has %zu granules of 4 KiB, not %zu",
                    p, bytes, length, granules);
    }
    return false;
  }

  /* Makes a region of at least `needed` bytes, at most `wanted`. Throws pool_error. */
  region_table::value_type& add_region(std::size_t bytes, std::size_t needed, std::size_t wanted, bool shared) {
    if (wanted > options_.limit_bytes - reserved_bytes_) free_regions(false);  // empty ones use up the limit
    const std::size_t room = (options_.limit_bytes - reserved_bytes_) / region_align * region_align;
    wanted = std::min(wanted, room);
    if (wanted < needed) {
      throw pool_error(
          "vmem::pool \"%s\": %zu bytes need a region of %zu, in whole 2 MiB, and %zu of limit_bytes %zu are reserved "
          "already, %zu in use",
          options_.name.c_str(), bytes, needed, reserved_bytes_, options_.limit_bytes,
          in_use_granules_ * granule_bytes);
    }
    region_record r{wanted, nullptr, 0, 0};
    if (shared) {
      r.map = std::make_unique<detail::granule_map>(static_cast<detail::granule_map::index>(wanted / granule_bytes));
      shared_.reserve(shared_.size() + 1);
    }
    // The node and the name are made before the region: nothing throws between them.
    const std::string name = options_.name + " " + std::to_string(made_);
    region_table::node_type node;
    {
      region_table one;
      one.emplace(0, std::move(r));
      node = one.extract(one.begin());
    }
    void* p = nullptr;
    struct vmem_region_attr attr = {};
    attr.size = sizeof attr;
    attr.block_size = options_.block_size;
    attr.advice = options_.advice;
    attr.core_dump = options_.core_dump;
    attr.name = name.c_str();
    attr.flags = options_.flags;
    if (const int rc = vmem_create(&p, wanted, &attr); rc != 0) {
      throw pool_error("vmem::pool \"%s\": %zu bytes need a region of %zu: %s", options_.name.c_str(), bytes, wanted,
                       vmem_last_error());
    }
    ++made_;
    node.key() = reinterpret_cast<std::uintptr_t>(p);
    region_table::value_type& entry = *regions_.insert(std::move(node)).position;
    if (shared) shared_.push_back(&entry);
    reserved_bytes_ += wanted;
    return entry;
  }
  region_table::value_type& add_shared(std::size_t bytes, std::size_t needed) {
    region_table::value_type& entry = add_region(bytes, needed, next_region_bytes_, true);
    next_region_bytes_ = std::min(next_region_bytes_ * 2, options_.region_limit_bytes);
    return entry;
  }
  void* allocate_own(std::size_t bytes, std::size_t granules, std::size_t align, std::size_t needed) {
    needed = round_up(needed, region_align);
    auto& [address, r] = add_region(bytes, needed, needed, false);
    const std::uintptr_t begin = round_up(address, align);
    r.own_granules = granules;
    r.own_begin = (begin - address) / granule_bytes;
    return taken(begin, granules);
  }

  /*
   * Frees the regions in which nothing is allocated, or all. Those that libvmem refuses to free
   * stay.
   */
  freed free_regions(bool all) {
    freed result;
    for (auto it = regions_.begin(); it != regions_.end();) {
      const region_record& r = it->second;
      const std::size_t used = r.map != nullptr ? r.map->count() - r.map->free_count() : r.own_granules;
      const bool wanted = all || used == 0;
      const int rc = wanted ? vmem_free(reinterpret_cast<void*>(it->first)) : 0;
      result.note(rc);
      if (!wanted || rc != 0) {
        ++it;
        continue;
      }
      if (used != 0) {
        in_use_granules_ -= used;
        allocations_ -= r.map != nullptr ? r.map->used_runs() : 1;
      }
      std::erase(shared_, &*it);
      reserved_bytes_ -= r.bytes;
      result.bytes += r.bytes;
      it = regions_.erase(it);
    }
    if (shared_.empty()) next_region_bytes_ = options_.region_bytes;
    return result;
  }

  void misuse(const char* words) const {
    if (options_.on_misuse != nullptr) {
      options_.on_misuse(words, options_.misuse_user);
      return;
    }
    std::fprintf(stderr, "%s\n", words);
    std::abort();
  }

  pool_options options_;
  mutable std::mutex mutex_;
  region_table regions_;                                 // by address; protected by mutex_, as all below
  std::vector<const region_table::value_type*> shared_;  // in the order of their creation
  std::size_t next_region_bytes_;
  std::size_t reserved_bytes_ = 0, in_use_granules_ = 0, allocations_ = 0, misuses_ = 0, made_ = 0;
};

}  // namespace vmem
#endif /* VMEM_POOL_HPP */
