// vmem-sort: sorts a file larger than the memory it may use, by plain pointers and std algorithms.
//
// It sorts runs in a region, then merges them into a second region that is mapped over a new file.
// libvmem moves the blocks; the program only announces what it will read next and no longer needs.
// The new file gets its name once it is verified. If anything fails, existing files are untouched.
#include <endian.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/memory_limit.h"
#include "common/command_line.h"
#include "common/input.h"
#include "common/own_files.h"
#include "common/progress.h"
#include "common/raw_disk.h"
#include "core/status.h"
#include "core/text.h"
#include "vmem/vmem.hpp"

namespace {

// Returns the first eight bytes as a big-endian number, padded with zeros for a shorter key. If two
// prefixes differ, the keys compare the same way.
uint64_t prefix_of(const unsigned char* p, size_t n) {
  uint64_t first = 0;
  memcpy(&first, p, std::min(n, sizeof first));
  return be64toh(first);
}

template <size_t N>
struct Record {
  static_assert(N >= 8);
  unsigned char bytes[N];
  friend bool operator<(const Record& a, const Record& b) {
    const uint64_t x = prefix_of(a.bytes, N), y = prefix_of(b.bytes, N);
    return x != y ? x < y : memcmp(a.bytes, b.bytes, N) < 0;
  }
};

struct Settings {
  std::string input, output;
  uint64_t make = uint64_t{4} << 30, budget = 0;
  size_t record = 0;  // bytes; 0: lines of text
  bool in_place = false, keep = false, limit = false;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
};

std::string size_words(uint64_t bytes) {
  const double n = static_cast<double>(bytes);
  if (n < 1e3) return std::to_string(bytes) + " bytes";
  if (n < 1e6) return vmem::core::strprintf("%.1f kB", n / 1e3);
  return n < 1e9 ? vmem::core::strprintf("%.1f MB", n / 1e6) : vmem::core::strprintf("%.2f GB", n / 1e9);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The sum of one hash a record: independent of the order.
uint64_t hash(const unsigned char* p, size_t n) {
  uint64_t h = 0x9e3779b97f4a7c15u ^ n;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t w;
    memcpy(&w, p, 8);
    h = (h ^ w) * 0xbf58476d1ce4e5b9u;
    h ^= h >> 29;
  }
  for (; n != 0; ++p, --n) h = (h ^ *p) * 0x94d049bb133111ebu;
  return h ^ (h >> 32);
}

// A view of items in memory: records of a fixed size, or (record 0) lines with their newline.
struct Cursor {
  const unsigned char* at;
  const unsigned char* end;
  size_t record;
  size_t length() const {
    if (record != 0) return std::min(record, static_cast<size_t>(end - at));
    const void* newline = memchr(at, '\n', static_cast<size_t>(end - at));
    return newline == nullptr ? static_cast<size_t>(end - at)
                              : static_cast<size_t>(static_cast<const unsigned char*>(newline) - at) + 1;
  }
};

// Compares without the newline, so that the last line of a file may lack one.
int compare(const unsigned char* a, size_t n, const unsigned char* b, size_t m) {
  const int c = memcmp(a, b, std::min(n, m));
  return c != 0 ? c : n < m ? -1 : n > m ? 1 : 0;
}

size_t key_length(const unsigned char* p, size_t n, size_t record) {
  return record == 0 && n != 0 && p[n - 1] == '\n' ? n - 1 : n;
}

// Sorts the first items, as many as the index of offsets has room for, and returns their bytes. The
// index is small even for short lines, so runs are few: the merge keeps blocks of each in memory.
using Index = std::vector<uint32_t>;
size_t sort_items(const unsigned char* from, unsigned char* to, size_t size, size_t record, Index* index) {
  index->clear();
  Cursor c{from, from + size, record};
  for (; c.at < c.end && index->size() < index->capacity() && c.at - from <= UINT32_MAX; c.at += c.length())
    index->push_back(static_cast<uint32_t>(c.at - from));
  const bool whole = record == 0 && c.at[-1] == '\n';
  const auto length = [from, end = c.at, record](uint32_t item) {  // of its key
    return key_length(from + item, Cursor{from + item, end, record}.length(), record);
  };
  const auto before = [&](uint32_t a, uint32_t b) {
    // Most lines differ early; finding their ends takes longer.
    const size_t look = record != 0 ? 0 : std::min<size_t>(16, static_cast<size_t>(c.at - from) - std::max(a, b));
    for (size_t i = 0; i < look; ++i) {
      const unsigned char x = from[a + i], y = from[b + i];
      if (x != y) return y != '\n' && (x == '\n' || x < y);
      if (x == '\n') return false;
    }
    return compare(from + a, length(a), from + b, length(b)) < 0;
  };
  std::sort(index->begin(), index->end(), before);
  for (size_t i = 0; i < index->size(); ++i) {
    const size_t n = length((*index)[i]);
    memcpy(to, from + (*index)[i], n);
    to += n;
    if (record == 0 && (i + 1 < index->size() || whole)) *to++ = '\n';
  }
  return static_cast<size_t>(c.at - from);
}

// Sorts records of common sizes in place.
template <size_t N>
void sort_records(const unsigned char* from, unsigned char* to, size_t size) {
  memcpy(to, from, size);
  auto* first = reinterpret_cast<Record<N>*>(to);
  std::sort(first, first + size / N);
}

using InPlace = void(const unsigned char* from, unsigned char* to, size_t size);

InPlace* in_place_sort(size_t record) {
  switch (record) {
    case 8:
      return sort_records<8>;
    case 16:
      return sort_records<16>;
    case 32:
      return sort_records<32>;
    case 64:
      return sort_records<64>;
    case 100:
      return sort_records<100>;
    case 128:
      return sort_records<128>;
    default:
      return nullptr;
  }
}

struct Run {
  size_t offset, size;
};

// Cuts [0, size) into runs of whole items. A last line without a newline stays without.
std::vector<Run> cut(const unsigned char* data, size_t size, size_t target, size_t record) {
  std::vector<Run> runs;
  for (size_t at = 0; at < size;) {
    size_t n = std::min(target, size - at);
    if (at + n < size) {
      if (record != 0) {
        n = std::max(n - n % record, record);
      } else {
        const void* newline = memchr(data + at + n, '\n', size - at - n);
        n = newline == nullptr ? size - at
                               : static_cast<size_t>(static_cast<const unsigned char*>(newline) - (data + at)) + 1;
      }
    }
    runs.push_back({at, n});
    at += n;
  }
  return runs;
}

// Rethrows an exception of any thread once all threads have ended.
template <typename F>
void in_threads(unsigned count, const F& work) {
  std::mutex mutex;
  std::exception_ptr failed;
  const auto guarded = [&](unsigned t) {
    try {
      work(t);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (failed == nullptr) failed = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 1; t < count; ++t) threads.emplace_back(guarded, t);
  guarded(0);
  for (std::thread& t : threads) t.join();
  if (failed != nullptr) std::rethrow_exception(failed);
}

// Returns the sorted runs. A run with many small items becomes several, so that each thread's index
// takes at most `index_bytes`.
std::vector<Run> sort_runs(const vmem::region& input, const vmem::region& sorted, const std::vector<Run>& runs,
                           const Settings& s, size_t index_bytes, uint64_t* checksum) {
  const auto* in = static_cast<const unsigned char*>(input.data());
  auto* out = static_cast<unsigned char*>(sorted.data());
  Progress progress("sorting", input.size());
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> sum{0};
  InPlace* const in_place = in_place_sort(s.record);
  std::mutex mutex;
  std::vector<Run> made;
  const auto sort_them = [&] {
    const Run* last = nullptr;
    Index index;
    index.reserve(index_bytes / sizeof(Index::value_type));
    for (size_t i; (i = next.fetch_add(1)) < runs.size();) {
      const Run& run = runs[i];
      if (i + s.threads < runs.size()) {
        const Run& ahead = runs[i + s.threads];
        vmem::check(vmem_prefetch(in + ahead.offset, ahead.size, VMEM_HOST, nullptr));
      }
      uint64_t local = 0, unreported = 0;
      for (Cursor c{in + run.offset, in + run.offset + run.size, s.record}; c.at < c.end;) {
        const size_t n = c.length();
        local += hash(c.at, key_length(c.at, n, s.record));
        c.at += n;
        if ((unreported += n) > 4 << 20) progress.add(std::exchange(unreported, 0) / 2);
      }
      sum += local;
      for (size_t at = run.offset, end = run.offset + run.size; at < end;) {
        size_t n = end - at;
        if (in_place != nullptr) {
          in_place(in + at, out + at, n);
        } else {
          n = sort_items(in + at, out + at, n, s.record, &index);
        }
        const std::lock_guard lock(mutex);
        made.push_back({at, n});
        at += n;
      }
      vmem::check(vmem_advise(in + run.offset, run.size, VMEM_ADVISE_COLD, 0));
      vmem::check(vmem_prefetch(out + run.offset, run.size, VMEM_SSD, nullptr));
      // Most of it has left memory by now. This call reports a full SSD even if memory is left.
      if (last != nullptr) vmem::check(vmem_evict(out + last->offset, last->size, VMEM_SSD));
      last = &run;
      progress.add(run.size / 2);
    }
  };
  in_threads(s.threads, [&](unsigned) {
    try {
      sort_them();
    } catch (...) {
      next = runs.size();
      throw;
    }
  });
  *checksum = sum;
  std::ranges::sort(made, {}, &Run::offset);
  return made;
}

// Returns the first of the sorted items in [at, end) that is not below the key.
const unsigned char* not_below(const unsigned char* at, const unsigned char* end, size_t record,
                               const std::string& key) {
  while (at < end) {
    const unsigned char* middle = at + (end - at) / 2;
    if (record != 0) {
      middle = at + static_cast<size_t>(middle - at) / record * record;
    } else {
      const void* newline = memrchr(at, '\n', static_cast<size_t>(middle - at));
      middle = newline == nullptr ? at : static_cast<const unsigned char*>(newline) + 1;
    }
    const size_t n = Cursor{middle, end, record}.length();
    const auto* wanted = reinterpret_cast<const unsigned char*>(key.data());
    if (compare(middle, key_length(middle, n, record), wanted, key.size()) < 0) {
      at = middle + n;
    } else {
      end = middle;
    }
  }
  return at;
}

// The runs that one thread merges, and the destination.
struct Part {
  std::vector<Cursor> runs;
  unsigned char* to;
};

// Cuts the runs into parts of about the same size, by keys of the longest run.
std::vector<Part> divide(const unsigned char* data, unsigned char* to, const std::vector<Run>& runs, size_t record,
                         unsigned count) {
  std::vector<Cursor> rest;
  rest.reserve(runs.size());
  for (const Run& run : runs) rest.push_back({data + run.offset, data + run.offset + run.size, record});
  const Cursor longest = *std::ranges::max_element(rest, {}, [](const Cursor& c) { return c.end - c.at; });
  std::vector<Part> parts;
  for (unsigned p = 1; p <= count; ++p) {
    Part part{{}, to};
    std::string key;
    if (p < count) {
      const Cursor bound{longest.at + (longest.end - longest.at) * p / count, longest.end, record};
      // Skip to the start of the next item.
      const auto into = static_cast<size_t>(bound.at - longest.at);
      const size_t skip = record != 0 ? (record - into % record) % record : bound.length();
      const Cursor item{bound.at + std::min(skip, static_cast<size_t>(bound.end - bound.at)), bound.end, record};
      if (item.at < item.end)
        key.assign(reinterpret_cast<const char*>(item.at), key_length(item.at, item.length(), record));
    }
    for (Cursor& run : rest) {
      const unsigned char* const end = p == count ? run.end : not_below(run.at, run.end, record, key);
      if (run.at == end) continue;
      part.runs.push_back({run.at, end, record});
      to += end - run.at;
      if (record == 0 && end[-1] != '\n') ++to;  // a line without newline gets one, unless it is the last of all
      run.at = end;
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

void merge_part(const Part& part, const vmem::region& sorted, unsigned char* end, size_t record, size_t ahead,
                size_t block, Progress& progress) {  // ahead: blocks
  struct Head {
    Cursor cursor;
    size_t length, key;            // bytes of the item, and of its key
    uint64_t prefix;               // of its key
    const unsigned char* fetched;  // prefetched up to here
    const unsigned char* done;     // dropped up to here
  };
  const auto* data = static_cast<const unsigned char*>(sorted.data());
  const auto whole_blocks = [&](const unsigned char* p) { return p - static_cast<size_t>(p - data) % block; };
  std::vector<Head> heads;
  for (const Cursor& run : part.runs) heads.push_back({run, 0, 0, 0, run.at, run.at});
  const auto load = [&](Head& h) {
    if (h.cursor.at + ahead / 2 >= h.fetched && h.fetched < h.cursor.end) {
      const auto n = static_cast<size_t>(std::min(whole_blocks(h.fetched + ahead), h.cursor.end) - h.fetched);
      vmem::check(vmem_prefetch(h.fetched, n, VMEM_HOST, nullptr));
      h.fetched += n;
    }
    if (whole_blocks(h.cursor.at) > h.done) {  // merged bytes are no longer needed
      const unsigned char* const to = whole_blocks(h.cursor.at);
      vmem::check(vmem_advise(h.done, static_cast<size_t>(to - h.done), VMEM_ADVISE_DONT_NEED, 0));
      h.done = to;
    }
    h.length = h.cursor.length();
    h.key = key_length(h.cursor.at, h.length, record);
    h.prefix = prefix_of(h.cursor.at, h.key);
  };
  const auto later = [&](size_t a, size_t b) {
    if (heads[a].prefix != heads[b].prefix) return heads[a].prefix > heads[b].prefix;
    const int c = compare(heads[a].cursor.at, heads[a].key, heads[b].cursor.at, heads[b].key);
    return c != 0 ? c > 0 : a > b;
  };
  std::priority_queue<size_t, std::vector<size_t>, decltype(later)> queue(later);
  for (size_t i = 0; i < heads.size(); ++i) {
    load(heads[i]);
    queue.push(i);
  }
  unsigned char *to = part.to, *written = part.to;
  size_t unreported = 0;
  while (!queue.empty()) {
    const size_t i = queue.top();
    queue.pop();
    Head& h = heads[i];
    memcpy(to, h.cursor.at, h.key);
    to += h.key;
    if (record == 0 && to < end) *to++ = '\n';
    if ((unreported += h.length) > 4 << 20) {
      progress.add(std::exchange(unreported, 0));
      // These blocks are complete and not needed soon: evict them before blocks of the input.
      unsigned char* const whole = to - reinterpret_cast<uintptr_t>(to) % block;
      if (whole > written) vmem::check(vmem_prefetch(written, static_cast<size_t>(whole - written), VMEM_SSD, nullptr));
      written = std::max(written, whole);
    }
    h.cursor.at += h.length;
    if (h.cursor.at < h.cursor.end) {
      load(h);
      queue.push(i);
    }
  }
}

void merge(const vmem::region& sorted, const vmem::region& output, const std::vector<Run>& runs, const Settings& s,
           uint64_t budget, size_t block) {
  // Each thread uses of each run the current block, the next, and read-ahead: all must stay.
  const auto threads = static_cast<unsigned>(std::clamp<uint64_t>(budget / (runs.size() * 3 * block), 1, s.threads));
  const size_t ahead = std::clamp<size_t>(budget / 8 / (runs.size() * threads), 1, 32 << 20) / block * block;
  auto* const to = static_cast<unsigned char*>(output.data());
  Progress progress("merging", output.size());
  const auto parts = divide(static_cast<const unsigned char*>(sorted.data()), to, runs, s.record, threads);
  in_threads(threads, [&](unsigned t) {
    merge_part(parts[t], sorted, to + output.size(), s.record, std::max(ahead, block), block, progress);
  });
}

// Writes the rest of the result to its file, in pieces, to show progress.
void write_out(const vmem::region& output) {
  const auto* const data = static_cast<const unsigned char*>(output.data());
  const size_t piece = std::max<size_t>(output.size() / 16 / (2 << 20), 1) * (2 << 20);
  Progress progress("writing", output.size());
  for (size_t at = 0; at < output.size(); at += piece) {
    const size_t n = std::min(piece, output.size() - at);
    vmem::check(vmem_sync(data + at, n));
    progress.add(n);
  }
}

// Counts items that are out of order, plus one if the items differ from those of the input.
uint64_t mismatches(const vmem::region& output, size_t record, uint64_t checksum, uint64_t* items) {
  const auto* data = static_cast<const unsigned char*>(output.data());
  Progress progress("verifying", output.size());
  uint64_t sum = 0, wrong = 0;
  const unsigned char* before = nullptr;
  size_t before_key = 0, unreported = 0;
  for (Cursor c{data, data + output.size(), record}; c.at < c.end; ++*items) {
    const size_t n = c.length(), key = key_length(c.at, n, record);
    if (before != nullptr && compare(before, before_key, c.at, key) > 0) {
      if (wrong++ == 0) fprintf(stderr, "out of order at byte %zu\n", static_cast<size_t>(c.at - data));
    }
    sum += hash(c.at, key);
    before = c.at;
    before_key = key;
    c.at += n;
    if ((unreported += n) > 4 << 20) progress.add(std::exchange(unreported, 0));
  }
  if (sum != checksum) fprintf(stderr, "the output does not have the items of the input\n");
  return wrong + (sum != checksum);
}

std::system_error system_failure(const std::string& path) {
  return {errno, std::generic_category(), path};
}

struct stat status_of(const std::string& path) {
  struct stat s;
  if (stat(path.c_str(), &s) != 0) throw system_failure(path);
  if (!S_ISREG(s.st_mode)) throw std::runtime_error(path + " is no ordinary file: a sort has to map it");
  return s;
}

// The path of the result, with links resolved. `there`: it exists and is to be replaced.
struct Target {
  std::string path;
  bool there = false;
};

Target target_of(const Settings& s, const struct stat& input) {
  if (s.in_place) {
    if (input.st_nlink > 1)
      throw std::runtime_error(s.input +
                               " has other names (hard links), which --in-place would leave unsorted; use -o");
    return {std::filesystem::canonical(s.input), true};
  }
  std::string path = s.output;
  if (path.empty()) {
    path = s.input + ".sorted";
    // /dev/stdin and /proc/self/fd/3 name a file, but their folder cannot hold the result.
    const std::string folder = std::filesystem::canonical(std::filesystem::absolute(path).parent_path());
    if (folder == "/dev" || folder.starts_with("/proc/"))
      throw std::runtime_error(path + " is no place for the result: say where it goes with -o");
  }
  struct stat there;
  if (stat(path.c_str(), &there) != 0) {
    if (errno != ENOENT) throw system_failure(path);
    if (lstat(path.c_str(), &there) == 0) throw std::runtime_error(path + " is a link to what is not there");
    return {path};
  }
  if (there.st_dev == input.st_dev && there.st_ino == input.st_ino)
    throw std::runtime_error("input and output are one file, " + path + ": --in-place sorts a file where it is");
  (void)status_of(path);
  if (s.output.empty()) throw std::runtime_error(path + " is there already: say -o " + path + " to replace it");
  return {std::filesystem::canonical(path), true};
}

// Copies the access list and the user's attributes to the file that replaces `from`, but nothing
// that affects execution. Returns false if the attribute `name` cannot be kept.
bool copy_attributes(const std::string& from, int to, bool notes, std::string* name) {
  std::string names(XATTR_LIST_MAX, '\0'), value(XATTR_SIZE_MAX, '\0');
  const ssize_t all = listxattr(from.c_str(), names.data(), names.size());
  if (all < 0) return *name = "list", errno == ENOTSUP;
  for (size_t at = 0; at < static_cast<size_t>(all); at += name->size() + 1) {
    *name = names.data() + at;
    if (*name != "system.posix_acl_access" && (!notes || name->rfind("user.", 0) != 0)) continue;
    const ssize_t size = getxattr(from.c_str(), name->c_str(), value.data(), value.size());
    if (size < 0 || fsetxattr(to, name->c_str(), value.data(), static_cast<size_t>(size), 0) != 0) return false;
  }
  return true;
}

bool unchanged(const struct stat& a, const struct stat& b) {
  const auto same = [](const timespec& x, const timespec& y) { return x.tv_sec == y.tv_sec && x.tv_nsec == y.tv_nsec; };
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size && same(a.st_mtim, b.st_mtim) &&
         same(a.st_ctim, b.st_ctim);  // a writer may reset the mtime
}

// Gives the file the owner, group and mode of the file that it replaces. Until here only its owner
// could open it, and it must not become open to users who could not open the old file.
void give_away(const ownfiles::OwnFile& file, const Settings& s, const Target& target, const struct stat& old) {
  mode_t mode = old.st_mode & 0777;  // no set-user-ID: as after a write, the new bytes have no such permission
  struct stat now;
  // If the owner cannot be changed, fstat() below shows it.
  static_cast<void>(fchown(file.fd(), old.st_uid, old.st_gid) == 0 ||
                    fchown(file.fd(), static_cast<uid_t>(-1), old.st_gid) == 0);
  if (fstat(file.fd(), &now) != 0) throw system_failure(file.path());
  std::string attribute;
  const bool attributes = copy_attributes(target.path, file.fd(), s.in_place, &attribute);
  if (s.in_place) {
    if (now.st_uid != old.st_uid)
      throw std::runtime_error(s.input + " belongs to another user, and the sorted file would belong to you: use -o");
    if (now.st_gid != old.st_gid)
      throw std::runtime_error(s.input + " is of a group that you cannot give to the sorted file: use -o");
    if (!attributes)
      throw std::runtime_error(s.input + " has attributes that the sorted file cannot have (" + attribute +
                               "): use -o");
  } else if (now.st_gid != old.st_gid || !attributes) {
    mode &= ~mode_t{070};
  }
  if (fchmod(file.fd(), mode) != 0) throw system_failure(file.path());
}

void put_in_place(ownfiles::OwnFile& file, const Settings& s, const Target& target, const input::File& input) {
  input.must_be_unchanged();
  if (!target.there) return s.output.empty() ? file.put_as_new(target.path) : file.put_in_place_of(target.path);
  const struct stat old = status_of(target.path);
  if (s.in_place && !unchanged(old, input.status()))
    throw std::runtime_error(s.input + " was changed meanwhile: it is left as it is");
  give_away(file, s, target, old);
  file.put_in_place_of(target.path);
}

int run(Settings s) {
  ownfiles::handle_signals();
  const bool made = s.input.empty();
  std::optional<ownfiles::PrivateFolder> folder;
  std::optional<ownfiles::OwnFile> input_file;
  if (made) {
    if (s.in_place) throw input::Refused("--in-place needs a file");
    if (s.record == 0) s.record = 64;
    if (s.make < s.record)
      throw input::Refused("--make is less than a record of " + std::to_string(s.record) + " bytes");
    folder.emplace("vmem-sort");
    s.input = folder->path() + "/in";
    s.make -= s.make % s.record;
    input_file.emplace(s.input);
    fprintf(stderr, "vmem-sort: no file was given, so it makes one: %s in %s (--help: how to give one)\n",
            size_words(s.make).c_str(), folder->path().c_str());
    Progress progress("making", s.make);
    if (const std::string e = rawdisk::fill(input_file->path(), s.make, 1, [&](uint64_t n) { progress.add(n); });
        !e.empty())
      throw std::runtime_error(input_file->path() + ": " + e);
  }
  const std::string source = made ? input_file->path() : s.input;
  const input::File given(source);
  const struct stat before = given.status();
  const auto size = static_cast<uint64_t>(before.st_size);
  const Target target = ownfiles::as_named([&] { return target_of(s, before); });
  if (s.record != 0 && size % s.record != 0)
    throw input::Refused(source + ": its " + std::to_string(size) + " bytes are no whole number of records of " +
                         std::to_string(s.record));
  // A new file has the mode of the input, as with cp, and its owner may write to it.
  const mode_t mode = target.there ? 0600 : made ? 0666 : (before.st_mode & 0777) | 0600;
  auto output_file = ownfiles::as_named([&] {
    // Try this on an empty file, so that a refusal comes before the sort rather than after it.
    if (s.in_place) give_away(ownfiles::OwnFile(target.path, 0600), s, target, before);
    return ownfiles::OwnFile(target.path, mode);
  });
  if (size == 0) {
    put_in_place(output_file, s, target, given);
    printf("vmem-sort: %s is empty, and so is %s\n", vmem::core::printable(source).c_str(),
           vmem::core::printable(target.path).c_str());
    return 0;
  }
  struct statvfs disk;
  if (fstatvfs(output_file.fd(), &disk) == 0 && disk.f_bavail * disk.f_frsize < size)
    throw std::runtime_error(target.path + ": " + std::to_string(size) + " bytes are needed beside it, " +
                             std::to_string(disk.f_bavail * disk.f_frsize) + " are free");

  const uint64_t memory = s.budget != 0 ? s.budget : std::max<uint64_t>(size / 4, 64 << 20);
  // Each thread sorts a run in memory; the merge needs a few blocks of every run: both must fit.
  s.threads = static_cast<unsigned>(std::clamp<uint64_t>(memory / (64 << 20), 1, s.threads));
  uint64_t block = 2 << 20;
  while (block > (64 << 10) && 24 * s.threads * 4 * block > memory) block /= 2;
  vmem::set("block_size", std::to_string(block));
  // An index needs no more entries than there are items; a line has at least one byte.
  const uint64_t needed = (size / std::max<size_t>(s.record, 1) + 1) * sizeof(Index::value_type);
  const size_t index_bytes = in_place_sort(s.record) != nullptr ? 0 : std::min(memory / (6 * s.threads), needed);
  if (const uint64_t all = index_bytes * s.threads, there = vmem::api::usable_memory(""); all > there)
    throw input::Refused(
        vmem::core::strprintf("--budget %zu: the index takes %zu bytes of memory, there are %zu", memory, all, there));
  vmem::set("host_budget", std::to_string(std::max<uint64_t>(memory - index_bytes * s.threads, 8 << 20)));  // minimum
  vmem::check(vmem_init());
  const uint64_t budget = std::stoull(vmem::get("host_budget"));
  const std::string share = vmem::core::strprintf(" (1/%.1f)", static_cast<double>(size) / static_cast<double>(memory));
  printf("vmem-sort: %s, %s of %s, memory budget %s%s, %u threads\n", vmem::core::printable(source).c_str(),
         size_words(size).c_str(), s.record == 0 ? "lines" : (std::to_string(s.record) + "-byte records").c_str(),
         size_words(memory).c_str(), size > memory ? share.c_str() : "", s.threads);
  fflush(stdout);

  // The limit: raw io_uring on the same file, in the same run.
  rawdisk::Plan plan;
  plan.span = plan.total = std::min<uint64_t>(size, uint64_t{2} << 30) / plan.block * plan.block;
  rawdisk::Result raw;
  if (plan.span != 0 && (made || s.limit)) {
    const Progress progress("the disk", plan.total);
    raw = rawdisk::run(source, plan);
  }

  // Reserve all space now, so that no other file takes it during the merge.
  if (fallocate(output_file.fd(), 0, 0, static_cast<off_t>(size)) != 0 &&
      ((errno != EOPNOTSUPP && errno != ENOSYS) || ftruncate(output_file.fd(), static_cast<off_t>(size)) != 0))
    throw system_failure(output_file.path());
  const double start = now();
  uint64_t checksum = 0, wrong, items = 0;
  double sorted_at, merged_at;
  {
    vmem::region input(size, source, 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    input.name("input");
    vmem::region sorted(size, VMEM_HOST_ONLY);
    sorted.name("runs");
    const auto parts = cut(static_cast<const unsigned char*>(input.data()), size,
                           std::max<uint64_t>(budget / (5 * s.threads), 1 << 20), s.record);
    const auto runs = sort_runs(input, sorted, parts, s, index_bytes, &checksum);
    sorted_at = now();
    input.free();
    vmem::region output(size, output_file.again(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    output.name("output");
    merge(sorted, output, runs, s, budget, block);
    sorted.free();
    write_out(output);
    merged_at = now();
    output.advise(VMEM_ADVISE_SEQUENTIAL);
    wrong = mismatches(output, s.record, checksum, &items);
    output.free();
  }
  const double end = now();
  const struct vmem_stats v = vmem::stats();
  const double moved = static_cast<double>(v.read_bytes + v.write_bytes) / 1e9;
  const double gbs = moved / (end - start);
  const double touched = static_cast<double>(v.faults + v.prefetched_blocks);
  printf("\n| what | figure |\n|---|---|\n");
  printf("| sort runs / merge / verify | %.1f / %.1f / %.1f s |\n", sorted_at - start, merged_at - sorted_at,
         end - merged_at);
  printf("| total | %.1f s, %.2f GB/s of input |\n", end - start, static_cast<double>(size) / 1e9 / (end - start));
  printf("| SSD read / written | %.2f / %.2f GB |\n", static_cast<double>(v.read_bytes) / 1e9,
         static_cast<double>(v.write_bytes) / 1e9);
  printf("| faults (mean, longest) | %llu (%.0f us, %.1f ms) |\n", static_cast<unsigned long long>(v.faults),
         v.faults != 0 ? static_cast<double>(v.fault_ns_total) / 1e3 / static_cast<double>(v.faults) : 0,
         static_cast<double>(v.fault_ns_max) / 1e6);
  printf("| blocks read before they were asked for | %.1f %% (%llu used, %llu wasted) |\n",
         touched != 0 ? 100 * static_cast<double>(v.prefetched_blocks) / touched : 0,
         static_cast<unsigned long long>(v.prefetch_hits), static_cast<unsigned long long>(v.prefetch_wasted));
  printf("| evictions | %llu, %llu of them without a write |\n", static_cast<unsigned long long>(v.evictions),
         static_cast<unsigned long long>(v.clean_drops));
  printf("| disk traffic | %.2f GB/s |\n", gbs);
  if (raw.error.empty() && raw.read_gbs > 0) {
    printf("| raw limit in this run (io_uring, huge pages, reads) | %.2f GB/s: traffic is %.2f of it |\n", raw.read_gbs,
           gbs / raw.read_gbs);
  }
  printf("| verified | %llu mismatches in %llu %s |\n", static_cast<unsigned long long>(wrong),
         static_cast<unsigned long long>(items), s.record == 0 ? "lines" : "records");
  if (wrong != 0) {
    fprintf(stderr, "vmem-sort: the result is wrong and was thrown away; %s is as it was\n",
            vmem::core::printable(source).c_str());
    return 1;
  }
  if (!made || s.keep || !s.output.empty()) {
    put_in_place(output_file, s, target, given);
    printf("\nsorted: %s\n", vmem::core::printable(target.path).c_str());
  }
  if (made && s.keep) {
    input_file->put_in_place_of(s.input);
    printf("unsorted: %s\n", vmem::core::printable(s.input).c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Sorts a file larger than memory. Without a file it makes one of random 64-byte records."};
  Settings s;
  app.add_option("file", s.input, "file to sort, by lines of text");
  auto* output = app.add_option("-o,--output", s.output, "sorted file (default: FILE.sorted, which must not exist)");
  app.add_flag("--in-place", s.in_place,
               "put the sorted file in the place of the one that is sorted, when it is whole and verified")
      ->excludes(output);
  app.add_option("--record-bytes", s.record, "sort records of this many bytes, by their bytes, in place of lines")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--make", s.make, "bytes to make when no file is given")->transform(size_from(1));
  app.add_option("--budget", s.budget, "memory it may use (default: a quarter of the file, at least 64 MiB)")
      ->transform(size_of(vmem::core::Option::host_budget));
  app.add_option("--threads", s.threads, "threads that sort runs")->check(CLI::Range(1, 256));
  app.add_flag("--limit", s.limit, "measure what the disk can do first, for comparison (always with data it made)");
  app.add_flag("--keep", s.keep, "keep the files that were made");
  return run_program(app, "vmem-sort", argc, argv, [&] { return run(s); });
}
