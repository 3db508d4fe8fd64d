#include "store/space.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "core/log.h"
#include "core/mutex.h"
#include "core/step.h"
#include "core/thread.h"
#include "store/space_path.h"

namespace vmem::store {

namespace {

constexpr size_t kMaxExtent = core::kMaxBlock + core::kPage;
static_assert(kMaxExtent / core::kPage <= core::Extent::kMostPages);
constexpr uint64_t kMinGrowth = 2048;     // pages: 8 MiB
constexpr uint64_t kMaxGrowth = 65536;    // pages: 256 MiB
constexpr uint64_t kTrimPages = 16384;    // idle pages that make trimming worthwhile: 64 MiB
constexpr uint64_t kTrimStep = 16384;     // pages out of use at once while their hole is punched
constexpr uint64_t kShrinkStep = 262144;  // pages cut off by one ftruncate: 1 GiB
constexpr int kMostTrimDelays = 12;
constexpr size_t kMaxTrouble = 128;  // bytes of text
// 1 TiB: 38 MiB of address space for each path.
constexpr uint64_t kMostReserved = (uint64_t{1} << 40) / core::kPage;

class FileSpace final : public Space {
 public:
  FileSpace(std::vector<std::unique_ptr<SpacePath>> paths, const SpaceOptions& options)
      : paths_(std::move(paths)),
        trim_delay_(options.trim_delay),
        full_delay_(options.full_delay),
        budget_pages_(options.budget / core::kPage) {}
  ~FileSpace() override;
  core::Status start();

  core::Status allocate(size_t size, unsigned codec, std::span<core::Extent> out) override;
  bool reserve(uint64_t bytes) override;
  void unreserve(uint64_t bytes) override;
  void release(core::Extent extent) override;
  void avoid(core::Extent extent) override;
  unsigned paths() const override { return static_cast<unsigned>(paths_.size()); }
  bool expected_to_fail(core::Extent extent) const override;
  FileId file(core::Extent extent) const override { return paths_[extent.path()]->id; }
  void set_budget(uint64_t bytes) override;
  uint64_t used() const override;
  core::OwnString describe(core::Extent extent) const override;

 private:
  bool allocate_run(unsigned start, uint64_t pages, bool may_grow_freely, unsigned* path, uint64_t* first)
      VMEM_REQUIRES(mutex_);
  bool grow(SpacePath& path, uint64_t pages) VMEM_REQUIRES(mutex_);
  bool give_back(unsigned path, uint64_t first, uint64_t pages) VMEM_REQUIRES(mutex_);
  core::Status no_room(size_t size, size_t count, const char* why) const;
  core::Status full(size_t size, size_t count) const VMEM_REQUIRES(mutex_);

  static bool should_punch(const SpacePath& path);
  static uint64_t pages_to_shrink(const SpacePath& path);
  static bool should_trim(const SpacePath& path) { return should_punch(path) || pages_to_shrink(path) != 0; }
  bool trim_due() const VMEM_REQUIRES(mutex_);
  void trim(SpacePath& path) VMEM_REQUIRES(mutex_);
  void run_trimmer() noexcept;

  const std::vector<std::unique_ptr<SpacePath>> paths_;
  const std::chrono::milliseconds trim_delay_, full_delay_;
  std::atomic<bool> refused_{false};  // some path has been full; before that, expected_to_fail() skips the lock
  mutable core::Mutex mutex_;
  uint64_t budget_pages_ VMEM_GUARDED_BY(mutex_);
  uint64_t used_pages_ VMEM_GUARDED_BY(mutex_) = 0;  // live extents and those being allocated
  uint64_t reserved_pages_ VMEM_GUARDED_BY(mutex_) = 0;
  unsigned next_path_ VMEM_GUARDED_BY(mutex_) = 0;  // changes with every allocation
  bool stopping_ VMEM_GUARDED_BY(mutex_) = false;
  bool hurry_ VMEM_GUARDED_BY(mutex_) = false;     // trim without delay
  bool trimming_ VMEM_GUARDED_BY(mutex_) = false;  // some ranges are briefly out of use
  std::condition_variable trimmer_;                // work for the trimmer
  std::condition_variable trimmed_;                // trimming_ became false
  std::thread thread_;
};

core::Status FileSpace::start() {
  return core::start_thread(
      "vmem-trim", [this] { run_trimmer(); }, &thread_);
}

FileSpace::~FileSpace() {
  {
    core::MutexLock lock(mutex_);
    stopping_ = true;
  }
  trimmer_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool FileSpace::reserve(uint64_t bytes) try {
  core::MutexLock lock(mutex_);
  const uint64_t pages = std::min(reserved_pages_ + bytes / core::kPage, kMostReserved);
  const uint64_t most = std::min(pages, budget_pages_);
  for (const auto& path : paths_) {
    // Includes fragments, and growth ahead of need. Most of it is address space until it is
    // written.
    path->extents.reserve(std::min(path->limit_pages, path->head_pages + most + most / 4 + kMaxGrowth));
    path->trouble.reserve(kMaxTrouble);
  }
  reserved_pages_ += bytes / core::kPage;
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

void FileSpace::unreserve(uint64_t bytes) {
  core::MutexLock lock(mutex_);
  reserved_pages_ -= bytes / core::kPage;
}

core::Status FileSpace::no_room(size_t size, size_t count, const char* why) const {
  return core::error(ENOSPC, "no room on SSD for %zu block%s of %s: %s", count, count == 1 ? "" : "s",
                     core::human_bytes(size).c_str(), why);
}

core::Status FileSpace::allocate(size_t size, unsigned codec, std::span<core::Extent> out) {
  if (size == 0 || size % core::kPage != 0 || size > kMaxExtent) {
    return core::error(EINVAL, "an extent of %zu bytes: a multiple of 4 KiB up to %zu is possible", size, kMaxExtent);
  }
  if (codec > 3) return core::error(EINVAL, "codec number %u does not fit an extent", codec);
  const uint64_t pages = size / core::kPage;
  const uint64_t total = pages * out.size();

  core::MutexLock lock(mutex_);
  if (used_pages_ > budget_pages_ || total > budget_pages_ - used_pages_) {
    return core::error(ENOSPC,
                       "no room on SSD for %zu block%s of %s: ssd_budget is %s and %s are in use. Raise ssd_budget or "
                       "free regions",
                       out.size(), out.size() == 1 ? "" : "s", core::human_bytes(size).c_str(),
                       core::human_bytes(budget_pages_ * core::kPage).c_str(),
                       core::human_bytes(used_pages_ * core::kPage).c_str());
  }
  used_pages_ += total;  // now, because grow() drops the lock

  const unsigned start = next_path_++ % static_cast<unsigned>(paths_.size());
  size_t have = 0;
  size_t group = out.size();
  while (have < out.size()) {
    group = std::min(group, out.size() - have);
    unsigned path = 0;
    uint64_t first = 0;
    if (allocate_run(start, group * pages, group == 1, &path, &first)) {
      for (size_t n = 0; n < group; ++n) {
        out[have++] = core::Extent::make(path, (first + n * pages) * core::kPage, size, codec);
      }
    } else if (group > 1) {
      group = (group + 1) / 2;
    } else {
      break;
    }
  }
  if (have == out.size()) return {};

  used_pages_ -= total;
  for (size_t n = 0; n < have; ++n) give_back(out[n].path(), out[n].offset() / core::kPage, pages);
  std::fill(out.begin(), out.end(), core::Extent{});
  return full(size, out.size());
}

core::Status FileSpace::full(size_t size, size_t count) const try {
  core::OwnString why = core::textf("%s in use", core::human_bytes(used_pages_ * core::kPage).c_str());
  for (const auto& path : paths_) {
    why += core::textf("; %s is full at %s%s%s", path->name.c_str(),
                       core::human_bytes(path->extents.size_pages() * core::kPage).c_str(),
                       path->trouble.empty() ? "" : ": ", path->trouble.c_str());
  }
  return no_room(size, count, why.c_str());
} catch (const std::bad_alloc&) {
  return no_room(size, count, "and no memory to say why");
}

// Takes a run from the first path, in turn from `start`, that has one or can grow one. For a run of
// several blocks, a path grows only while little of it is free; otherwise smaller groups will do.
bool FileSpace::allocate_run(unsigned start, uint64_t pages, bool may_grow_freely, unsigned* path, uint64_t* first) {
  const auto count = static_cast<unsigned>(paths_.size());
  const auto now = std::chrono::steady_clock::now();
  // Paths that were found full come last, and only for a single block.
  for (unsigned n = 0; n < (may_grow_freely ? 2 * count : count); ++n) {
    *path = (start + n) % count;
    SpacePath& at = *paths_[*path];
    if ((at.full_until > now) != (n >= count)) continue;
    for (;;) {
      if (at.extents.allocate(pages, first)) {
        at.live_pages += pages;
        return true;
      }
      const uint64_t slack = std::max(kTrimPages, at.extents.size_pages() / 4);
      if (!may_grow_freely && at.extents.free_pages() > slack) break;
      if (!grow(at, pages)) {
        if (should_trim(at)) {  // the disk may be full: trimming this path makes room
          hurry_ = true;
          trimmer_.notify_one();
        }
        if (!trimming_) break;
        while (trimming_) mutex_.wait(trimmed_);
        if (!at.extents.allocate(pages, first)) break;
        at.live_pages += pages;
        return true;
      }
    }
  }
  return false;
}

// Makes a free run of `pages` at the end of the path's file, unless another thread just did. Drops
// the lock while the file system works. Returns false if the path is full.
bool FileSpace::grow(SpacePath& path, uint64_t pages) {
  mutex_.unlock();
  core::MutexLock resize(path.resize_mutex);
  mutex_.lock();
  if (path.extents.longest_free_run() >= pages) return true;
  const uint64_t end = path.extents.size_pages();
  const uint64_t need = pages - std::min(pages, path.extents.trailing_free_pages());
  const uint64_t room = path.limit_pages - end;
  if (need > room) return false;
  const uint64_t budget_left = budget_pages_ > used_pages_ ? budget_pages_ - used_pages_ : 0;
  const uint64_t ahead = std::min({std::clamp(end / 8, kMinGrowth, kMaxGrowth), room, budget_left});
  uint64_t step = std::max(need, ahead);
  mutex_.unlock();
  core::step("space.grow");
  int error = extend_file(path, end, step);
  if (error != 0 && step != need) error = extend_file(path, end, step = need);
  mutex_.lock();
  if (error == 0) {
    try {
      path.extents.grow(step);
      path.trouble.clear();
      return true;
    } catch (const std::bad_alloc&) {
      // For the free map: the file is longer than the map says, and the next try does not extend it
      // further.
      error = ENOMEM;
    }
  }
  const char* const words = strerrordesc_np(error);  // untranslated: a locale's catalogue would be read here
  const char* const what = words != nullptr ? words : "unknown error";
  path.trouble.assign(what, std::min(strlen(what), path.trouble.capacity()));
  return false;
}

bool FileSpace::give_back(unsigned path, uint64_t first, uint64_t pages) {
  SpacePath& at = *paths_[path];
  if (!at.extents.release(first, pages)) return false;
  at.live_pages -= pages;
  return true;
}

void FileSpace::release(core::Extent extent) {
  bool known = extent && extent.path() < paths_.size();
  bool due = false;
  if (known) {
    core::MutexLock lock(mutex_);
    const uint64_t pages = extent.length() / core::kPage;
    known = give_back(extent.path(), extent.offset() / core::kPage, pages);
    if (known) used_pages_ -= pages;
    due = should_trim(*paths_[extent.path()]);
  }
  if (due) trimmer_.notify_one();
  if (!known) {
    VMEM_LOG_ONCE(core::Level::error, "Extent %016lx was released but is not in use. This is a defect in libvmem.",
                  static_cast<unsigned long>(extent.bits));
  }
}

void FileSpace::avoid(core::Extent extent) {
  if (!extent || extent.path() >= paths_.size()) return;
  core::MutexLock lock(mutex_);
  paths_[extent.path()]->full_until = std::chrono::steady_clock::now() + full_delay_;
  refused_.store(true, std::memory_order_relaxed);
}

bool FileSpace::expected_to_fail(core::Extent extent) const {
  if (!refused_.load(std::memory_order_relaxed) || !extent || extent.path() >= paths_.size()) return false;
  core::MutexLock lock(mutex_);
  return paths_[extent.path()]->full_until > std::chrono::steady_clock::now();
}

void FileSpace::set_budget(uint64_t bytes) {
  core::MutexLock lock(mutex_);
  budget_pages_ = bytes / core::kPage;
}

uint64_t FileSpace::used() const {
  core::MutexLock lock(mutex_);
  return used_pages_ * core::kPage;
}

core::OwnString FileSpace::describe(core::Extent extent) const {
  if (!extent || extent.path() >= paths_.size()) return "nowhere in the store";
  return core::textf("path %s, offset %lu", paths_[extent.path()]->name.c_str(),
                     static_cast<unsigned long>(extent.offset()));
}

bool FileSpace::should_punch(const SpacePath& path) {
  return path.punch && path.extents.idle_pages() >= std::max(kTrimPages, path.live_pages / 8);
}

uint64_t FileSpace::pages_to_shrink(const SpacePath& path) {
  const uint64_t size = path.extents.size_pages();
  if (!path.shrinkable || path.live_pages != 0 || size <= path.original_pages) return 0;
  return std::min(size - path.original_pages, path.extents.trailing_free_pages());
}

bool FileSpace::trim_due() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const auto& path) { return should_trim(*path); });
}

void FileSpace::trim(SpacePath& path) {
  if (should_punch(path) && path.live_pages != 0) {
    uint64_t first = 0;
    uint64_t pages = 0;
    while (!stopping_ && path.punch && path.extents.take_idle(kTrimStep, &first, &pages)) {
      trimming_ = true;
      mutex_.unlock();
      core::step("space.punch");
      const bool punched = punch_hole(path, first, pages) == 0;
      mutex_.lock();
      path.punch = punched;
      path.extents.release_idle(first, pages);
      trimming_ = false;
      trimmed_.notify_all();
    }
  }
  while (!stopping_ && pages_to_shrink(path) != 0) {
    mutex_.unlock();
    core::MutexLock resize(path.resize_mutex);
    mutex_.lock();
    const uint64_t pages = std::min(pages_to_shrink(path), kShrinkStep);
    if (pages == 0) continue;
    path.extents.shrink(pages);
    const uint64_t size = path.extents.size_pages();
    mutex_.unlock();
    core::step("space.shrink");
    // Extents beyond `size` cannot be handed out now: growing needs resize_mutex.
    const bool cut = shrink_file(path, size) == 0;
    mutex_.lock();
    if (!cut) path.shrinkable = false;
  }
}

void FileSpace::run_trimmer() noexcept {
  core::MutexLock lock(mutex_);
  while (!stopping_) {
    while (!stopping_ && !trim_due()) mutex_.wait(trimmer_);
    unsigned seen = 0;
    int delays = 0;
    do {
      seen = next_path_;
      const auto end = std::chrono::steady_clock::now() + trim_delay_;
      while (!stopping_ && !hurry_ && mutex_.wait_until(trimmer_, end)) {
      }
      if (stopping_) return;
    } while (!hurry_ && seen != next_path_ && ++delays < kMostTrimDelays);
    hurry_ = false;
    for (const auto& path : paths_) trim(*path);
  }
}

}  // namespace

core::Status make_space(const SpaceOptions& options, Engine& engine, std::unique_ptr<Space>* out) {
  std::vector<std::string> names;
  if (core::Status status = split_paths(options.paths, &names); !status.ok()) return status;
  std::vector<std::unique_ptr<SpacePath>> paths;
  for (const std::string& name : names) {
    std::unique_ptr<SpacePath> path;
    if (core::Status status = open_space_path(name, options.direct, engine, &path); !status.ok()) return status;
    paths.push_back(std::move(path));
  }
  auto space = std::make_unique<FileSpace>(std::move(paths), options);
  if (core::Status status = space->start(); !status.ok()) return status;
  *out = std::move(space);
  return {};
}

}  // namespace vmem::store
