// Several folders for the SSD store, of which one fails: the others have room, and no call fails.
#include <cerrno>
#include <filesystem>

#include "faulty_disk.h"
#include "support.h"

namespace {

using systest::SystemTest;
using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

constexpr size_t kMiB = size_t{1} << 20, kSize = 24 * kMiB;

struct Way {
  const char *block, *compression, *encryption, *engine;
};

class StorePaths : public SystemTest, public testing::WithParamInterface<std::tuple<int, Way>> {
 protected:
  void start(const std::string& paths) {
    const Way& way = std::get<1>(GetParam());
    systest::wrap_engine(&disk);
    configure({{"host_budget", "16MiB"},
               {"ssd_path", paths},
               {"block_size", way.block},
               {"compression", way.compression},
               {"encryption", way.encryption},
               {"io_engine", way.engine}});
  }
  // Files are numbered in the order of the paths.
  void fail_path(vmem::store::FileId file) {
    Fault fault;
    fault.op = Io::Op::write;
    fault.error = std::get<0>(GetParam());
    fault.file = file;
    rule = disk->add_rule(fault);
  }
  static void fill(std::span<uint64_t> words, uint64_t generation) {
    for (size_t i = 0; i < words.size(); ++i) words[i] = systest::stamp(i, generation);
  }
  static size_t wrong(std::span<const uint64_t> words, uint64_t generation) {
    size_t n = 0;
    for (size_t i = 0; i < words.size(); ++i) n += words[i] != systest::stamp(i, generation);
    return n;
  }
  const std::string folder = systest::temp_folder();
  FaultyEngine* disk = nullptr;
  FaultyEngine::RuleId rule = 0;
};

TEST_P(StorePaths, AnotherTakesWhatOneRefuses) {
  start(folder + ":" + folder);
  if (IsSkipped()) return;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  fill(words, 1);
  fail_path(0);
  EXPECT_EQ(vmem_sync(region.data(), kSize), 0) << vmem_last_error();
  EXPECT_GT(disk->fired(rule), 0u);
  EXPECT_EQ(vmem_evict(region.data(), kSize, VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(words, 1), 0u);
  EXPECT_EQ(vmem::stats().unknown_blocks, 0u);
}

TEST_P(StorePaths, AnotherTakesWhatLayOnOneThatRefusesNow) {
  start(folder + ":" + folder);
  if (IsSkipped()) return;
  vmem::region region(kSize, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  fill(words, 1);
  region.evict();
  fail_path(0);
  fill(words, 2);
  EXPECT_EQ(vmem_sync(region.data(), kSize), 0) << vmem_last_error();
  EXPECT_GT(disk->fired(rule), 0u);
  EXPECT_EQ(vmem_evict(region.data(), kSize, VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(words, 2), 0u);
  EXPECT_EQ(vmem::stats().unknown_blocks, 0u);
}

TEST_P(StorePaths, WhereAllRefuseItIsSaidAndTheContentsStay) {
  start(folder + ":" + folder);
  if (IsSkipped()) return;
  vmem::region region(4 * kMiB, VMEM_HOST_ONLY);
  auto words = region.view<uint64_t>();
  fill(words, 1);
  fail_path(0);
  fail_path(1);
  EXPECT_EQ(vmem_sync(region.data(), region.size()), -std::get<0>(GetParam())) << vmem_last_error();
  EXPECT_EQ(wrong(words, 1), 0u);
  disk->clear_rules();
  // Both are avoided for a moment, but used if there is no other.
  EXPECT_EQ(vmem_sync(region.data(), region.size()), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(region.data(), region.size(), VMEM_SSD), 0) << vmem_last_error();
  EXPECT_EQ(wrong(words, 1), 0u);
}

constexpr Way kWays[] = {{"64KiB", "none", "off", "auto"},
                         {"2MiB", "none", "off", "threads"},
                         {"64KiB", "lz4", "off", "threads"},
                         {"2MiB", "none", "on", "auto"}};
INSTANTIATE_TEST_SUITE_P(Failures, StorePaths,
                         testing::Combine(testing::Values(ENOSPC, EDQUOT, EFBIG, EIO, EROFS),
                                          testing::ValuesIn(kWays)));

}  // namespace
