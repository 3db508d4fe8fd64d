// The program drops pages (madvise) at any step of their block's transition, under every setting
// that decides which thread reads the block: no thread waits forever, and each page keeps its
// contents or becomes zeros. Every read of a region asserts that no thread that serves faults does
// it (core/fault_server.h), so that untested paths are covered too.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <string_view>
#include <tuple>

#include "core/step.h"
#include "support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kPage = 4096;

struct Drops {
  std::atomic<std::byte*> at{nullptr};
  std::atomic<size_t> size{0};
  std::atomic<uint64_t> times{0};
  std::atomic<bool> all{true};
  static void step(const char* name);
};
Drops drops;

void Drops::step(const char* name) {
  std::byte* const from = drops.at.load();
  if (from == nullptr) return;
  // A block that is all zeros before it is compared is not written.
  if (!drops.all && !std::string_view(name).starts_with("store.") && name != std::string_view("evict.decided")) return;
  madvise(from, drops.size, MADV_DONTNEED);
  ++drops.times;
}

// While it lives, drops all pages of the range at every step that any thread makes, or only at the
// steps of a write.
class Dropping {
 public:
  Dropping(void* at, size_t size, bool all) {
    drops.size = size;
    drops.all = all;
    drops.at = static_cast<std::byte*>(at);
    vmem::core::step_hook = Drops::step;
  }
  ~Dropping() {
    vmem::core::step_hook = nullptr;
    drops.at = nullptr;
  }
  Dropping(const Dropping&) = delete;
  Dropping& operator=(const Dropping&) = delete;
};

bool on_module() {
  return access("/dev/vmem", R_OK | W_OK) == 0;
}

// block, compression, encryption, engine
using Way = std::tuple<const char*, const char*, const char*, const char*>;

class DroppedPages : public SystemTest, public testing::WithParamInterface<Way> {
 protected:
  void start() {
    const auto& [block, compression, encryption, engine] = GetParam();
    configure({{"host_budget", "64MiB"},
               {"block_size", block},
               {"compression", compression},
               {"encryption", encryption},
               {"io_engine", engine},
               {"io_threads", "1"},
               {"io_depth", "2"},
               {"readahead", "0"}});
  }
  // Returns the number of bytes that are neither 7 nor in a page of zeros.
  static size_t wrong(const unsigned char* bytes, size_t size) {
    size_t bad = 0;
    for (size_t at = 0; at < size; at += kPage) {
      const unsigned char first = bytes[at];
      bad += first != 0 && first != 7;
      for (size_t i = at; i < std::min(size, at + kPage); ++i) bad += bytes[i] != first;
    }
    return bad;
  }
};

TEST_P(DroppedPages, StopNothingWhereBlocksGoToTheStore) {
  start();
  if (IsSkipped()) return;
  if (on_module()) GTEST_SKIP() << "advice drops nothing there";
  vmem::region region(16 << 20, VMEM_HOST_ONLY);  // more than the buffers for encryption
  auto bytes = region.view<unsigned char>();
  for (int round = 0; round < 4; ++round) {
    memset(bytes.data(), 7, bytes.size());
    {
      const Dropping now(region.data(), region.size(), round % 2 != 0);
      region.sync();
      region.evict();
      EXPECT_TRUE(bytes[0] == 0 || bytes[0] == 7);
    }
    region.evict();
    EXPECT_EQ(wrong(bytes.data(), bytes.size()), 0u);
  }
  EXPECT_GT(drops.times, 0u);
  EXPECT_EQ(vmem::stats().checksum_errors, 0u);
}

// The file ends in the middle of a page, and of a block.
TEST_P(DroppedPages, StopNothingWhereBlocksGoToAFile) {
  start();
  if (IsSkipped()) return;
  if (on_module()) GTEST_SKIP() << "advice drops nothing there";
  constexpr size_t kBytes = (4 << 20) - (size_t{32} << 10) - 123;
  TempFile file(kBytes);
  {
    vmem::region region(kBytes, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
    auto bytes = region.view<unsigned char>();
    for (int round = 0; round < 4; ++round) {
      memset(bytes.data(), 7, kBytes);
      {
        const Dropping now(region.data(), vmem::core::round_up(kBytes, kPage), round % 2 != 0);
        region.sync();
        region.evict();
        EXPECT_TRUE(bytes[kBytes - 1] == 0 || bytes[kBytes - 1] == 7);
      }
      region.evict();
      EXPECT_EQ(wrong(bytes.data(), kBytes), 0u);
    }
  }
  const std::vector<unsigned char> has = file.read();
  ASSERT_EQ(has.size(), kBytes);
  EXPECT_EQ(wrong(has.data(), kBytes), 0u);
}
INSTANTIATE_TEST_SUITE_P(Ways, DroppedPages,
                         testing::Combine(testing::Values("64KiB", "2MiB"), testing::Values("none", "lz4"),
                                          testing::Values("off", "on"), testing::Values("auto", "threads")),
                         [](const auto& way) {
                           return std::string(std::get<0>(way.param)) + "_" + std::get<1>(way.param) + "_encryption_" +
                                  std::get<2>(way.param) + "_" + std::get<3>(way.param);
                         });

class DroppedFilePages : public SystemTest {};

// The file was truncated, so the block must go. Data stored at that time survives where the
// file still exists.
TEST_F(DroppedFilePages, AStoreToOneWhileItsFileIsCutIsKept) {
  static std::atomic<unsigned char*> page;
  static const char* path;
  systest::move_no_pages();
  configure({{"host_budget", "64MiB"}, {"block_size", "64KiB"}, {"io_engine", "threads"}, {"readahead", "0"}});
  if (IsSkipped()) return;
  if (on_module()) GTEST_SKIP() << "advice drops nothing there";
  TempFile file(128 << 10);
  vmem::region region(128 << 10, file.path(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY);
  auto bytes = region.view<unsigned char>();
  memset(bytes.data() + (64 << 10), 7, 64 << 10);
  path = file.path().c_str();
  page = bytes.data() + (64 << 10);
  vmem::core::step_hook = [](const char* step) {
    if (step == std::string_view("evict.decided")) {
      EXPECT_EQ(truncate(path, 96 << 10), 0);
    }
    unsigned char* const at = step == std::string_view("evict.written") ? page.exchange(nullptr) : nullptr;
    if (at == nullptr || madvise(at, kPage, MADV_DONTNEED) != 0) return;
    *static_cast<volatile unsigned char*>(at) = 42;
  };
  vmem_evict(bytes.data() + (64 << 10), 64 << 10, VMEM_SSD);
  vmem::core::step_hook = nullptr;
  EXPECT_EQ(page, nullptr);
  EXPECT_EQ(bytes[64 << 10], 42);
  region.sync();
  const std::vector<unsigned char> has = file.read();
  ASSERT_EQ(has.size(), size_t{96} << 10) << "no longer than it was cut";
  EXPECT_EQ(has[64 << 10], 42);
  EXPECT_EQ(has[(64 << 10) + 1], 0);
  EXPECT_EQ(has[(68 << 10)], 7);
}

}  // namespace
