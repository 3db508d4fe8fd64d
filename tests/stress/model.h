// The model of each region: every word's value, every block's leases, and the contents of the file
// behind it. Nothing here asks the library.
//
// A word's value contains its place and a version: it shows whether a block is lost, stale or
// misplaced. Each cell of 2 MiB, the largest block used here, has a lock over its words and its
// blocks' leases. A thread that holds the locks of a range knows exactly what the range contains
// and what a call on it must return. The library never takes these locks.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "common.h"

namespace stress {

// Scales budgets and data with the block size of devices; else none would fit.
inline unsigned scale = 1;
inline std::string scaled(const std::string& mebibytes) {
  return std::to_string(scale * strtoull(mebibytes.c_str(), nullptr, 10)) + "MiB";
}
inline size_t cell_words = (2 << 20) / 8;  // words of the largest block
constexpr int kAnywhere = -100;            // a block's lease location: no lease

enum class Kind { anonymous, shared, private_copy, read_only };
inline const char* name_of(Kind k) {
  static const char* const names[] = {"anonymous", "shared", "private", "read-only"};
  return names[static_cast<int>(k)];
}

// Live leases of a block, by all threads.
struct BlockLeases {
  uint16_t count = 0, writers = 0;
  int location = kAnywhere;
  bool written = false;  // had a WRITE lease since it last had no lease: one record a stream may still say so
};

// Words [at, at + count).
struct Part {
  size_t at, count;
};

struct Held {
  Part part;
  unsigned access;
  int location;
  void* stream;
};

struct Region {
  std::shared_mutex life;  // shared: it exists; exclusive: it is being replaced
  int number = 0;
  Kind kind = Kind::anonymous;
  bool gpu = false, adapts = false;       // has a device tier; block size is auto
  bool guards = false;                    // a thread changes the rights of its pages
  size_t size = 0, block = 0, words = 0;  // bytes; bytes; whole words
  uint64_t* memory = nullptr;
  std::string path;
  int fd = -1;
  uint64_t offset = 0;  // of the region's first byte in the file
  std::vector<uint64_t> shadow;
  std::vector<BlockLeases> leases;
  std::unique_ptr<std::mutex[]> cells;
  std::atomic<int> live{0};  // live leases of all blocks
  std::atomic<uint32_t> version{1};

  bool writable() const { return kind != Kind::read_only; }
  size_t block_of(size_t word) const { return word * 8 / block; }
  static size_t end_of(Part p) { return p.at + p.count; }
  uint64_t value(size_t word, uint32_t v) const { return uint64_t{v} << 32 | static_cast<uint32_t>(word); }
  static uint64_t in_file(size_t word) { return uint64_t{1} << 63 | word; }
  // The value of a word whose contents were dropped.
  uint64_t original(size_t word) const { return path.empty() ? 0 : in_file(word + offset / 8); }

  struct Locked {
    std::vector<std::unique_lock<std::mutex>> cells;
  };
  Locked lock(Part p) const {
    Locked l;
    for (size_t c = p.at / cell_words; c <= (end_of(p) - 1) / cell_words; ++c) l.cells.emplace_back(cells[c]);
    return l;
  }

  // Call with the locks of the part's cells.
  bool leased_elsewhere(Part p, int location) const {
    for (size_t b = block_of(p.at); b <= block_of(end_of(p) - 1); ++b)
      if (leases[b].count != 0 && leases[b].location != location) return true;
    return false;
  }
  void add(Part p, unsigned access, int location) {
    for (size_t b = block_of(p.at); b <= block_of(end_of(p) - 1); ++b) {
      BlockLeases& l = leases[b];
      ++l.count, l.location = location;
      if ((access & VMEM_WRITE) != 0) ++l.writers, l.written = true;
    }
    ++live;
  }
  void remove(Part p, unsigned access) {
    for (size_t b = block_of(p.at); b <= block_of(end_of(p) - 1); ++b) {
      BlockLeases& l = leases[b];
      if ((access & VMEM_WRITE) != 0) --l.writers;
      if (--l.count == 0) l = {};
    }
    --live;
  }

  // Updates the words for a dont-need of the part. Returns true if some block was leased and
  // therefore kept.
  bool drop(Part p) {
    bool kept = false;
    const size_t per = block / 8, last = (words * 8 == size && end_of(p) == words) ? leases.size() : end_of(p) / per;
    for (size_t b = (p.at + per - 1) / per; b < last; ++b) {
      if (leases[b].count != 0) {
        kept = true;
        continue;
      }
      if (kind == Kind::shared) continue;  // written and evicted: the same bytes
      for (size_t w = b * per; w < std::min(words, (b + 1) * per); ++w) shadow[w] = original(w);
    }
    return kept;
  }

  [[noreturn]] void wrong(const char* where, size_t word, uint64_t found_value) const {
    const uint64_t want = shadow[word];
    differs(
        "%s: word %zu of region %d (%s%s, %sblocks of %zu KiB, %zu bytes at %p): %#llx (version %u of word %u), "
        "must be %#llx (version %u)",
        where, word, number, name_of(kind), gpu ? ", device" : "", adapts ? "adapting " : "", block >> 10, size,
        static_cast<const void*>(memory), static_cast<unsigned long long>(found_value),
        static_cast<unsigned>(found_value >> 32), static_cast<unsigned>(found_value),
        static_cast<unsigned long long>(want), static_cast<unsigned>(want >> 32));
  }
  // Compares the part with the file. Blocks for which `except` holds may differ.
  template <typename Except>
  void check_file(Part p, const char* where, Except except) const {
    std::vector<uint64_t> bytes(p.count);
    const ssize_t n = pread(fd, bytes.data(), p.count * 8, static_cast<off_t>(offset + p.at * 8));
    if (n != static_cast<ssize_t>(p.count * 8)) differs("%s: pread of the file: %zd", where, n);
    for (size_t i = 0; i < p.count; ++i)
      if (bytes[i] != shadow[p.at + i] && !except(block_of(p.at + i))) wrong(where, p.at + i, bytes[i]);
  }
  // Returns the value of a word after its block was dropped: for a shared file that refused
  // changes, the file's.
  uint64_t dropped(size_t word) const {
    uint64_t value = shadow[word];
    if (kind != Kind::shared) return value;
    if (pread(fd, &value, 8, static_cast<off_t>(offset + word * 8)) != 8) differs("pread: %s", strerror(errno));
    return value;
  }
  // Files of read-only and private regions never change.
  void check_file_untouched() const {
    std::vector<uint64_t> bytes(words);
    if (pread(fd, bytes.data(), words * 8, static_cast<off_t>(offset)) != static_cast<ssize_t>(words * 8))
      differs("pread of the file: %s", strerror(errno));
    for (size_t i = 0; i < words; ++i)
      if (bytes[i] != original(i)) differs("the file of %s region %d changed at word %zu", name_of(kind), number, i);
  }

  // Calls vmem_alloc or vmem_map; with attributes if the blocks adapt.
  int create(void** p, size_t bytes, unsigned flags) const {
    if (adapts) {
      struct vmem_region_attr attr = {};
      attr.size = sizeof attr;
      attr.block_size = VMEM_BLOCK_AUTO;
      attr.offset = kind == Kind::anonymous ? 0 : offset;
      attr.path = kind == Kind::anonymous ? nullptr : path.c_str();
      attr.flags = flags;
      return vmem_create(p, bytes, &attr);
    }
    if (kind == Kind::anonymous) return vmem_alloc(p, bytes, flags);
    return vmem_map(p, bytes, path.c_str(), offset, flags);
  }

  // Makes a new file for a region of `size` bytes at `offset`.
  void make_file() {
    path = temp_file(&fd);
    std::vector<uint64_t> bytes((offset + size) / 8 + 1);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = in_file(i);
    if (pwrite(fd, bytes.data(), offset + size, 0) != static_cast<ssize_t>(offset + size))
      differs("cannot fill %s: %s", path.c_str(), strerror(errno));
  }
  void remove_file() {
    if (fd < 0) return;
    close(fd);
    unlink(path.c_str());
    fd = -1;
    path.clear();
  }
};

inline constexpr size_t kPage = 4096;
inline void set_rights(Region& r, size_t page, size_t pages, int rights) {
  if (mprotect(reinterpret_cast<char*>(r.memory) + page * kPage, pages * kPage, rights) != 0)
    differs("mprotect: %s", strerror(errno));
}
// From then on, on devices with their own page tables, loads of the region without a lease are
// shown copies.
inline void advise_read_mostly(Region& r) {
  if (vmem_advise(r.memory, r.size, VMEM_ADVISE_SET_READ_MOSTLY, 0) != 0) differs("advise: %s", vmem_last_error());
}

// Returns a random part of the region: mostly short, sometimes some blocks.
inline Part part(const Region& r, Random& random, size_t most) {
  const size_t at = random.below(r.words);
  const size_t n = random.below(8) == 0 ? most : std::min<size_t>(most, 16384);
  return {at, 1 + random.below(std::min(r.words - at, n))};
}

// One thread's state. Remembers its calls for the message of a difference.
struct Worker {
  Worker(unsigned n, uint64_t seed) : number(n), random(seed) {}
  const unsigned number;
  Random random;
  std::vector<void*> streams;  // by device
  std::vector<std::pair<Region*, Held>> held;
  std::array<std::array<char, 160>, 24> log = {};
  size_t logged = 0;
  uint64_t done = 0;
  std::atomic<bool> in_call{false};  // whether the last call of the log is under way

  __attribute__((format(printf, 2, 3))) void note(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(log[logged++ % log.size()].data(), log[0].size(), format, arguments);
    va_end(arguments);
  }
};

}  // namespace stress
