// Attributes of one region: they hold whatever the settings are, and what is not accepted makes no region.
#include <sys/mman.h>

#include <cerrno>

#include "support.h"
#include "vmem/pool.hpp"

namespace {

using systest::SystemTest;
using systest::TempFile;

constexpr size_t kMiB = size_t{1} << 20;

class Attributes : public SystemTest {
 protected:
  static struct vmem_region_attr attr() {
    struct vmem_region_attr a = {};
    a.size = sizeof a;
    a.flags = VMEM_HOST_ONLY;
    return a;
  }
  static uint64_t host_bytes(const void* at, size_t size) {
    struct vmem_residency r = {};
    r.size = sizeof r;
    EXPECT_EQ(vmem_query(at, size, &r), 0) << vmem_last_error();
    return r.host_bytes;
  }
};

TEST_F(Attributes, EachRegionHasItsBlockSizeWhateverTheSetting) {
  configure({{"block_size", "2MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  for (const size_t block : {size_t{4} << 10, size_t{64} << 10, size_t{1} << 20, size_t{0}}) {
    vmem::region region(16 * kMiB, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = block});
    region.view<char>()[5 * kMiB] = 1;
    EXPECT_EQ(region.query().host_bytes, block != 0 ? block : 2 * kMiB);
  }
}

TEST_F(Attributes, AdviceHoldsFromTheFirstFault) {
  configure({{"block_size", "64KiB"}, {"readahead", "1MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  const TempFile file(4 * kMiB);
  const auto read_ahead = [&](int advice) {
    const vmem::region region(
        4 * kMiB,
        vmem::attributes{
            .flags = VMEM_HOST_ONLY | VMEM_MAP_READ, .block_size = 64 << 10, .advice = advice, .path = file.path()});
    const uint64_t before = vmem::stats().prefetched_blocks;
    const auto bytes = region.view<volatile unsigned char>();
    unsigned sum = 0;
    for (size_t at = 0; at < bytes.size(); at += 64 << 10) sum += bytes[at];
    EXPECT_GT(sum, 0u);
    return vmem::stats().prefetched_blocks - before;
  };
  EXPECT_EQ(read_ahead(VMEM_ADVISE_RANDOM), 0u);
  EXPECT_GT(read_ahead(VMEM_ADVISE_SEQUENTIAL), 0u);
}

TEST_F(Attributes, CodecAndNameAreTheRegions) {
  configure({{"block_size", "64KiB"}, {"compression", "none"}, {"device", "none"}});
  if (IsSkipped()) return;
  uint64_t used[2];
  for (const bool coded : {false, true}) {
    vmem::region region(
        4 * kMiB, vmem::attributes{.flags = VMEM_HOST_ONLY, .codec = coded ? "lz4" : "none", .name = "attributed"});
    for (uint64_t& word : region.view<uint64_t>()) word = 7;
    const uint64_t before = vmem::stats().ssd_bytes;
    region.evict();
    used[coded ? 1 : 0] = vmem::stats().ssd_bytes - before;
    for (const uint64_t word : region.view<uint64_t>()) ASSERT_EQ(word, 7u);
  }
  EXPECT_EQ(used[0], 4 * kMiB);
  EXPECT_LT(used[1], used[0]) << "a block that finds no buffer to encode into is stored as it is";
}

TEST_F(Attributes, AFileIsGivenByPathOrDescriptor) {
  configure({{"block_size", "64KiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  const int fd = memfd_create("attributes", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const auto content = TempFile::content(kMiB, 3);
  ASSERT_EQ(write(fd, content.data(), kMiB), static_cast<ssize_t>(kMiB));
  struct vmem_region_attr a = attr();
  a.fd = fd;
  a.flags |= VMEM_MAP_SHARED;
  a.offset = 64 << 10;
  void* at = nullptr;
  ASSERT_EQ(vmem_create(&at, kMiB - (64 << 10), &a), 0) << vmem_last_error();
  EXPECT_EQ(memcmp(at, content.data() + (64 << 10), kMiB - (64 << 10)), 0);
  static_cast<unsigned char*>(at)[10] = static_cast<unsigned char>(content[(64 << 10) + 10] + 1);
  ASSERT_EQ(vmem_free(at), 0) << vmem_last_error();
  unsigned char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, (64 << 10) + 10), 1);
  EXPECT_EQ(byte, static_cast<unsigned char>(content[(64 << 10) + 10] + 1));
  close(fd);
}

TEST_F(Attributes, WhatIsNotAcceptedMakesNoRegion) {
  configure({{"device", "none"}});
  if (IsSkipped()) return;
  void* at = nullptr;
  const auto refused = [&](auto change) {
    struct vmem_region_attr a = attr();
    change(a);
    return vmem_create(&at, kMiB, &a);
  };
  EXPECT_EQ(refused([](auto& a) { a.size = 8; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.block_size = 3 << 20; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.block_size = 2048; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.block_size = 64 << 20; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.codec = "zip"; }), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("\"zip\""), std::string::npos) << vmem_last_error();
  EXPECT_EQ(refused([](auto& a) { a.advice = VMEM_ADVISE_WILL_NEED; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.checksum = 2; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.flags = 0x8000; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.flags = VMEM_MAP_READ | VMEM_MAP_SHARED; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.offset = 4096; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.path = "/etc/passwd"; }), -EINVAL);
  EXPECT_LT(refused([](auto& a) {
              a.flags |= VMEM_MAP_READ;
              a.fd = -1;
            }),
            0);
  EXPECT_EQ(vmem_create(nullptr, kMiB, nullptr), -EINVAL);
  EXPECT_EQ(at, nullptr);
  EXPECT_EQ(vmem::stats().regions, 0u);
}

TEST_F(Attributes, AStructOfALaterVersionIsTakenWhereItAsksForNothingNew) {
  configure({{"device", "none"}});
  if (IsSkipped()) return;
  struct {
    struct vmem_region_attr attr;
    uint64_t later;
  } wide = {attr(), 0};
  wide.attr.size = sizeof wide;
  void* at = nullptr;
  ASSERT_EQ(vmem_create(&at, kMiB, &wide.attr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(at), 0);
  wide.later = 1;
  EXPECT_EQ(vmem_create(&at, kMiB, &wide.attr), -E2BIG);
  at = nullptr;
  ASSERT_EQ(vmem_create(&at, kMiB, nullptr), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(at), 0);
}

TEST_F(Attributes, OfAPoolAreThoseOfItsRegions) {
  configure({{"block_size", "2MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  vmem::pool_options options;
  options.flags = VMEM_HOST_ONLY;
  options.block_size = 16 << 10;
  options.advice = VMEM_ADVISE_RANDOM;
  vmem::pool pool(options);
  void* const p = pool.allocate(kMiB, 64);
  *static_cast<char*>(p) = 1;
  EXPECT_EQ(host_bytes(p, kMiB), size_t{16} << 10);
  pool.deallocate(p, kMiB, 64);
}

}  // namespace
