// Several threads scan regions larger than the budget; the bytes read are counted. Blocks read
// ahead for one thread are not evicted for another one, so nothing is read twice.
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

struct Case {
  const char* name;
  bool file;  // else the store
  size_t block;
  const char* budget;
  size_t bytes;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// Opens when that many threads have arrived.
class Gate {
 public:
  explicit Gate(unsigned wanted) : wanted_(wanted) {}
  void arrive() {
    std::lock_guard lock(mutex_);
    ++arrived_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= wanted_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned wanted_, arrived_ = 0;
};

class Scan : public SystemTest, public ::testing::WithParamInterface<Case> {
 protected:
  static constexpr unsigned kThreads = 8;
  static constexpr size_t kStep = 4096;

  void start() {
    configure(
        {{"block_size", std::to_string(GetParam().block)}, {"host_budget", GetParam().budget}, {"readahead", "64MiB"}});
  }

  // Makes a region whose bytes are all in its file or in the store: word i * kStep is stamp(i).
  void fill() {
    const size_t bytes = GetParam().bytes;
    if (GetParam().file) {
      file_.emplace();
      FILE* out = fopen(file_->path().c_str(), "wb");
      ASSERT_NE(out, nullptr);
      std::vector<uint64_t> page(kStep / sizeof(uint64_t));
      for (size_t i = 0; i < bytes / kStep; ++i) {
        page[0] = systest::stamp(i, 0);
        ASSERT_EQ(fwrite(page.data(), kStep, 1, out), 1u);
      }
      ASSERT_EQ(fclose(out), 0);
      region_ = vmem::region(bytes, file_->path(), 0, VMEM_MAP_READ | VMEM_HOST_ONLY);
    } else {
      region_ = vmem::region(bytes, VMEM_HOST_ONLY);
      for (size_t i = 0; i < bytes / kStep; ++i) word(i) = systest::stamp(i, 0);
      region_.evict();
    }
    ASSERT_EQ(region_.query().host_bytes, 0u);
    region_.advise(VMEM_ADVISE_SEQUENTIAL);
  }

  // Thread t reads its part. All begin before any continues, so that the beginnings of the parts
  // are known. If `slow`, thread 0 pauses half way until the others are done.
  void read_in_parts(bool slow) {
    const size_t pages = GetParam().bytes / kStep;
    Gate begun(kThreads), half(slow ? 1 : 0), others(kThreads - 1);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const size_t first = pages * t / kThreads, last = pages * (t + 1) / kThreads;
        read(first, first + 1);
        begun.arrive();
        begun.wait();
        if (t == 0 && slow) {
          read(first, (first + last) / 2);
          half.arrive();
          others.wait();
          read((first + last) / 2, last);
        } else {
          half.wait();
          read(first, last);
          others.arrive();
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }

  uint64_t& word(size_t page) { return region_.view<uint64_t>()[page * (kStep / sizeof(uint64_t))]; }

  void read(size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      if (word(i) != systest::stamp(i, 0)) {
        ADD_FAILURE() << "page " << i;
        return;
      }
    }
  }

  // Returns the bytes that `scan` reads from disk.
  template <typename F>
  static uint64_t reads(F scan) {
    const uint64_t before = vmem::stats().read_bytes;
    scan();
    return vmem::stats().read_bytes - before;
  }

  std::optional<TempFile> file_;
  vmem::region region_;
};

TEST_P(Scan, OfAPartByEachOfManyThreadsReadsEveryByteOnce) {
  start();
  if (IsSkipped()) return;
  fill();
  const uint64_t bytes = reads([&] { read_in_parts(false); });
  EXPECT_LE(bytes, GetParam().bytes + GetParam().bytes / 50);
  region_.free();
}

TEST_P(Scan, LeavesWhatASlowThreadHasAheadOfIt) {
  start();
  if (IsSkipped()) return;
  fill();
  const uint64_t bytes = reads([&] { read_in_parts(true); });
  EXPECT_LE(bytes, GetParam().bytes + GetParam().bytes / 50);
  region_.free();
}

// For a backward reader, the next bytes lie before its position.
TEST_P(Scan, BackwardsReadsEveryByteOnce) {
  start();
  if (IsSkipped()) return;
  fill();
  const size_t pages = GetParam().bytes / kStep;
  const uint64_t bytes = reads([&] {
    for (size_t i = pages; i-- > 0;) read(i, i + 1);
  });
  EXPECT_LE(bytes, GetParam().bytes + GetParam().bytes / 50);
  region_.free();
}

constexpr size_t kMiB = size_t{1} << 20;

INSTANTIATE_TEST_SUITE_P(Tiers, Scan,
                         ::testing::Values(Case{"File64K", true, 64 << 10, "16MiB", 128 * kMiB},
                                           Case{"Store64K", false, 64 << 10, "16MiB", 128 * kMiB},
                                           Case{"File2M", true, 2 << 20, "96MiB", 512 * kMiB},
                                           Case{"Store2M", false, 2 << 20, "96MiB", 512 * kMiB}),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
