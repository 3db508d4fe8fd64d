// Memory is returned: after any use of a region, the library's memory and the process's resident
// memory are as before.
#include <unistd.h>

#include <fstream>
#include <tuple>

#include "common/patience.h"
#include "sim_support.h"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kMiB = size_t{1} << 20, kSize = 96 * kMiB, kPage = 4096;
constexpr size_t kSlack = 12 * kMiB;  // tables, I/O buffers for one block size, memory that the system keeps

size_t resident() {
  size_t all = 0, pages = 0;
  std::ifstream("/proc/self/statm") >> all >> pages;
  return pages * kPage;
}

void store(void* region, size_t size) {
  auto* const words = static_cast<uint64_t*>(region);
  for (size_t i = 0; i < size / 8; i += kPage / 8) words[i] = systest::stamp(i, 3);
}

struct Use {
  const char* name;
  bool frees;  // else the region stays, with nothing of it in memory
  void (*with)(std::byte* region);
  const char* compression = "none";
};

void PrintTo(const Use& use, std::ostream* out) {
  *out << use.name;
}

int evict(std::byte* region) {
  return vmem_evict(region, kSize, VMEM_SSD);
}

const Use kUses[] = {
    {"stored to, freed", true, [](std::byte*) {}},
    {"evicted, freed", true, [](std::byte* r) { EXPECT_EQ(evict(r), 0) << vmem_last_error(); }},
    {"evicted", false, [](std::byte* r) { EXPECT_EQ(evict(r), 0) << vmem_last_error(); }},
    {"compressed, evicted", false, [](std::byte* r) { EXPECT_EQ(evict(r), 0) << vmem_last_error(); }, "lz4"},
    {"synced, freed", true, [](std::byte* r) { EXPECT_EQ(vmem_sync(r, kSize), 0) << vmem_last_error(); }},
    {"synced with all, evicted", false,
     [](std::byte* r) {
       EXPECT_EQ(vmem_sync(nullptr, 0), 0) << vmem_last_error();
       EXPECT_EQ(evict(r), 0) << vmem_last_error();
     }},
    {"not needed", false,
     [](std::byte* r) { EXPECT_EQ(vmem_advise(r, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error(); }},
    {"evicted and read again, not needed", false,
     [](std::byte* r) {
       EXPECT_EQ(evict(r), 0) << vmem_last_error();
       for (size_t i = 0; i < kSize; i += kPage)
         ASSERT_EQ(reinterpret_cast<uint64_t&>(r[i]), systest::stamp(i / 8, 3)) << i;
       EXPECT_EQ(vmem_advise(r, kSize, VMEM_ADVISE_DONT_NEED, 0), 0) << vmem_last_error();
     }},
    {"sent away by a hint", false,
     [](std::byte* r) { EXPECT_EQ(vmem_prefetch(r, kSize, VMEM_SSD, nullptr), 0) << vmem_last_error(); }},
    {"leased, evicted, freed", true,
     [](std::byte* r) {
       for (size_t at = 0; at < kSize; at += kMiB)
         EXPECT_EQ(vmem_acquire(r + at, kPage, VMEM_WRITE, VMEM_HOST, nullptr), 0) << vmem_last_error();
       for (size_t at = 0; at < kSize; at += kMiB)
         EXPECT_EQ(vmem_release(r + at, kPage, nullptr), 0) << vmem_last_error();
       EXPECT_EQ(evict(r), 0) << vmem_last_error();
     }},
    {"squeezed by a lower budget, freed", true,
     [](std::byte*) {
       ASSERT_EQ(vmem_set("host_budget", "64MiB"), 0) << vmem_last_error();
       ASSERT_TRUE(vmem::test::eventually([] { return vmem::stats().host_bytes <= 64 * kMiB; }));
       ASSERT_EQ(vmem_set("host_budget", "256MiB"), 0) << vmem_last_error();
     }},
};

class GivenBack : public SystemTest, public testing::WithParamInterface<std::tuple<const char*, Use>> {};

class GivenBackByDevices : public systest::SimTest {};

TEST_P(GivenBack, WhateverCameBefore) {
  const auto& [block, use] = GetParam();
  configure({{"host_budget", "256MiB"}, {"block_size", block}, {"compression", use.compression}});
  if (IsSkipped()) return;
  {  // memory that the first region allocates for all later ones stays
    vmem::region first(4 * kMiB, VMEM_HOST_ONLY);
    store(first.data(), 4 * kMiB);
    first.evict();
  }
  ASSERT_TRUE(vmem::test::eventually([] { return vmem::stats().host_bytes < kSlack; })) << vmem::stats().host_bytes;
  const size_t held = vmem::stats().host_bytes, had = resident();
  void* region = nullptr;
  ASSERT_EQ(vmem_alloc(&region, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* const bytes = static_cast<std::byte*>(region);
  store(bytes, kSize);
  ASSERT_GE(vmem::stats().host_bytes, kSize);
  use.with(bytes);
  if (use.frees) {
    ASSERT_EQ(vmem_free(region), 0) << vmem_last_error();
  }
  EXPECT_TRUE(vmem::test::eventually([&] { return vmem::stats().host_bytes <= held + kSlack; }))
      << vmem::stats().host_bytes / kMiB << " MiB are held, " << held / kMiB << " were";
  if (!systest::kSanitized) {
    EXPECT_TRUE(vmem::test::eventually([&] { return resident() <= had + kSlack; }))
        << resident() / kMiB << " MiB are in memory, " << had / kMiB << " were";
  }
  if (!use.frees) {
    EXPECT_EQ(vmem_free(region), 0) << vmem_last_error();
  }
}

// Also staging frames for a block size that no region has any more.
TEST_F(GivenBackByDevices, StagingFramesThatNoRegionNeeds) {
  const size_t held = vmem::stats().host_bytes;
  {
    vmem::region region(16 * kMiB);
    store(region.data(), region.size());
    region.prefetch(0);
    region.evict();
    EXPECT_GT(vmem::stats().host_bytes, held + 8 * kMiB) << "staging frames";
  }
  EXPECT_TRUE(vmem::test::eventually([&] { return vmem::stats().host_bytes <= held + kMiB; }))
      << vmem::stats().host_bytes / kMiB << " MiB are held, " << held / kMiB << " were";
}

INSTANTIATE_TEST_SUITE_P(Uses, GivenBack, testing::Combine(testing::Values("64KiB", "2MiB"), testing::ValuesIn(kUses)));

}  // namespace
