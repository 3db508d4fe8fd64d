// Attributes of one region: they apply whatever the settings are, and a refused attribute makes no
// region.
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>

#include "faulty_disk.h"
#include "support.h"
#include "vmem/pool.hpp"

namespace {

using systest::SystemTest;
using systest::TempFile;
using vmem::store::Fault;
using vmem::store::FaultyEngine;

constexpr size_t kMiB = size_t{1} << 20;

class Attributes : public SystemTest {
 protected:
  static struct vmem_region_attr attr() {
    struct vmem_region_attr a = {};
    a.size = sizeof a;
    a.flags = VMEM_HOST_ONLY;
    return a;
  }
  static uint64_t host_bytes(const void* at, size_t size) { return residency(at, size).host_bytes; }
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

TEST_F(Attributes, ABlockSizeOfAutoIsSmallBlocksByAttributeAndBySetting) {
  configure({{"block_size", "2MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  const auto first_block = [](size_t block_size) {
    vmem::region region(16 * kMiB, vmem::attributes{.flags = VMEM_HOST_ONLY, .block_size = block_size});
    region.view<char>()[5 * kMiB] = 1;
    return region.query().host_bytes;
  };
  EXPECT_EQ(first_block(VMEM_BLOCK_AUTO), uint64_t{64} << 10);
  EXPECT_EQ(first_block(0), 2 * kMiB);
  vmem::set("block_size", "auto");
  EXPECT_EQ(vmem::get("block_size"), "auto");
  EXPECT_EQ(first_block(0), uint64_t{64} << 10);
  EXPECT_EQ(first_block(2 * kMiB), 2 * kMiB);
}

TEST_F(Attributes, InADeviceTierAutoIsTwoMebibytes) {
  if (vmem_set("device", "sim") != 0) GTEST_SKIP() << "a library without the simulated device";
  configure({{"block_size", "2MiB"}});
  if (IsSkipped()) return;
  vmem::region region(16 * kMiB, vmem::attributes{.block_size = VMEM_BLOCK_AUTO});
  region.view<char>()[5 * kMiB] = 1;
  EXPECT_EQ(region.query().host_bytes, 2 * kMiB);
  region.free();
  vmem_shutdown();
  EXPECT_EQ(vmem_set("device", "auto"), 0);
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
  EXPECT_EQ(refused([](auto& a) { a.block_size = 2; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.block_size = 128 << 20; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.codec = "zip"; }), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("\"zip\""), std::string::npos) << vmem_last_error();
  EXPECT_EQ(refused([](auto& a) { a.advice = VMEM_ADVISE_WILL_NEED; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.checksum = 2; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.core_dump = 2; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.flags = 0x8000; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.flags = VMEM_MAP_READ | VMEM_MAP_SHARED; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.offset = 4096; }), -EINVAL);
  EXPECT_EQ(refused([](auto& a) { a.path = "/etc/passwd"; }), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("/etc/passwd"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(refused([](auto& a) { a.fd = 5; }), -EINVAL) << "a file, but no flag";
  EXPECT_NE(std::string(vmem_last_error()).find("fd 5"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(refused([](auto& a) {
              a.flags |= VMEM_MAP_READ;
              a.path = "/etc/passwd";
              a.fd = 5;
            }),
            -EINVAL)
      << "two files";
  EXPECT_EQ(refused([](auto& a) { a.address = reinterpret_cast<void*>(uintptr_t{0x201000}); }), -EINVAL);
  EXPECT_NE(std::string(vmem_last_error()).find("0x201000"), std::string::npos) << vmem_last_error();
  EXPECT_EQ(refused([](auto& a) {
              a.block_size = 32 * kMiB;
              a.address = reinterpret_cast<void*>(2 * kMiB);
            }),
            0)
      << "blocks no larger than the region needs";
  EXPECT_EQ(vmem_free(at), 0);
  at = nullptr;
  EXPECT_LT(refused([](auto& a) {
              a.flags |= VMEM_MAP_READ;
              a.fd = -1;
            }),
            0);
  EXPECT_EQ(vmem_create(nullptr, kMiB, nullptr), -EINVAL);
  EXPECT_EQ(at, nullptr);
  EXPECT_EQ(vmem::stats().regions, 0u);
}

// The system allocates address space from the top down, so the low end of a large hole stays
// unused.
TEST_F(Attributes, AnAddressIsTakenWhereItIsFreeAndNothingMappedIsReplaced) {
  configure({{"device", "none"}});
  if (IsSkipped()) return;
  constexpr size_t kHole = size_t{1} << 34, kAlign = 32 * kMiB;
  for (const size_t block : {size_t{4} << 10, 2 * kMiB, kAlign}) {
    // Make a new hole each time. Mappings of other threads go to the end of a free hole.
    void* const hole = mmap(nullptr, kHole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(hole, MAP_FAILED);
    auto* const wanted = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(hole) + 2 * kAlign) / kAlign * kAlign);
    const vmem::attributes attributes{.flags = VMEM_HOST_ONLY, .block_size = block, .address = wanted};
    vmem_shutdown();
    configure({{"host_budget", "512MiB"}});
    const vmem::region taken(2 * kAlign, attributes);
    EXPECT_NE(taken.data(), wanted) << "something is there";
    EXPECT_EQ(mprotect(wanted, 2 * kAlign, PROT_NONE), 0) << "and it is there still";
    ASSERT_EQ(munmap(hole, kHole), 0);
    {
      const vmem::region region(2 * kAlign, attributes);
      EXPECT_EQ(region.data(), wanted);
      region.view<char>()[kAlign] = 1;
      const vmem::region beside(2 * kAlign, attributes);
      EXPECT_NE(beside.data(), wanted) << "a region is there";
      EXPECT_EQ(region.view<char>()[kAlign], 1);
    }
  }
}

TEST_F(Attributes, AStructOfAnEarlierVersionIsTaken) {
  configure({{"device", "none"}});
  if (IsSkipped()) return;
  struct vmem_region_attr a = attr();
  a.size = offsetof(struct vmem_region_attr, address);
  a.address = reinterpret_cast<void*>(1);  // the struct ends before this field
  void* at = nullptr;
  ASSERT_EQ(vmem_create(&at, kMiB, &a), 0) << vmem_last_error();
  ASSERT_EQ(vmem_free(at), 0);
}

// Settings that change between two regions do not affect the first one.
TEST_F(Attributes, ChecksumIsTheRegions) {
  configure({{"block_size", "64KiB"}, {"device", "none"}, {"readahead", "0"}, {"checksum", "on"}});
  if (IsSkipped()) return;
  for (const int checksum : {1, -1}) {
    for (const char* setting : {"on", "off"}) {
      FaultyEngine* disk = nullptr;
      vmem_shutdown();
      systest::wrap_engine(&disk);
      configure({{"checksum", setting}});
      vmem::region region(kMiB, vmem::attributes{.flags = VMEM_HOST_ONLY, .checksum = checksum});
      memset(region.data(), 5, kMiB);
      region.evict();
      Fault flip;
      flip.action = Fault::Action::flip_bit;
      flip.op = vmem::store::Io::Op::read;
      disk->add_rule(flip);
      const int rc = vmem_acquire(region.data(), 1, VMEM_READ, VMEM_HOST, nullptr);
      EXPECT_EQ(rc, checksum == 1 ? -EIO : 0) << "setting " << setting << ": " << vmem_last_error();
      if (rc == 0) {
        EXPECT_EQ(vmem_release(region.data(), 1, nullptr), 0);
      }
      disk->clear_rules();
    }
  }
  vmem_shutdown();
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

// Memory allocated in small pieces is usually accessed at random: one word of it costs at most 64
// KiB.
TEST_F(Attributes, OfAPoolThatSaysNothingFollowUseWhateverTheSetting) {
  configure({{"block_size", "2MiB"}, {"device", "none"}});
  if (IsSkipped()) return;
  vmem::pool follows({.flags = VMEM_HOST_ONLY}), fixed({.flags = VMEM_HOST_ONLY, .block_size = 0});
  for (const auto& [pool, bytes] : {std::pair{&follows, size_t{64} << 10}, {&fixed, size_t{2} << 20}}) {
    void* const p = pool->allocate(4 * kMiB, 64);
    *static_cast<char*>(p) = 1;
    EXPECT_EQ(host_bytes(p, 4 * kMiB), bytes);
    pool->deallocate(p, 4 * kMiB, 64);
  }
}

}  // namespace
