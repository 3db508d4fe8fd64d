// Sizes of structs, counts, addresses: every call checks each before it uses it. A refusal says
// why, and nothing beyond the struct is written.
#include <cerrno>
#include <climits>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace {

using systest::SystemTest;

constexpr size_t kSize = size_t{1} << 20;

// An out struct with a guard area after it.
template <typename T>
struct Guarded {
  alignas(T) unsigned char bytes[3 * sizeof(T)];
  Guarded() { memset(bytes, 0xa5, sizeof bytes); }
  T* at(size_t offset = 0) { return reinterpret_cast<T*>(bytes + offset); }
  T* sized(uint64_t size) {
    memcpy(bytes, &size, sizeof size);
    return at();
  }
  // Returns whether nothing from `first` on has changed.
  bool whole(size_t first) const {
    for (size_t i = first; i < sizeof bytes; ++i)
      if (bytes[i] != 0xa5) return false;
    return true;
  }
};

class Arguments : public SystemTest {
 protected:
  void start() {
    configure({{"device", "none"}, {"host_budget", "32MiB"}});
    if (IsSkipped()) return;
    ASSERT_EQ(vmem_alloc(&region, kSize, VMEM_HOST_ONLY), 0) << vmem_last_error();
  }
  void TearDown() override {
    vmem_free(region);
    SystemTest::TearDown();
  }
  void* region = nullptr;
};

struct Call {
  const char* name;
  std::function<int()> call;
  const char* says = "";  // the message contains this
};

void refused(const std::vector<Call>& calls) {
  for (const Call& c : calls) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(c.call(), -EINVAL) << vmem_last_error();
    EXPECT_NE(std::string(vmem_last_error()).find(c.says), std::string::npos) << vmem_last_error();
  }
}

// The struct of an answer, with each size that a caller may pass.
template <typename T>
void answers(const char* name, const std::function<int(T*)>& call) {
  SCOPED_TRACE(name);
  for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{8}, uint64_t{15}, uint64_t{4097}, uint64_t{1} << 32,
                              UINT64_MAX - 7, UINT64_MAX}) {
    Guarded<T> out;
    EXPECT_EQ(call(out.sized(size)), -EINVAL) << size;
    EXPECT_NE(std::string(vmem_last_error()).find(std::to_string(size)), std::string::npos) << vmem_last_error();
    EXPECT_TRUE(out.whole(sizeof size)) << size;
  }
  EXPECT_EQ(call(nullptr), -EINVAL);
  Guarded<T> odd;
  EXPECT_EQ(call(odd.at(1)), -EINVAL) << "not aligned";
  EXPECT_TRUE(odd.whole(0));
  for (const uint64_t size : {uint64_t{40}, uint64_t{41}, uint64_t{sizeof(T)}, uint64_t{2 * sizeof(T)}}) {
    Guarded<T> out;
    EXPECT_EQ(call(out.sized(size)), 0) << size << vmem_last_error();
    EXPECT_TRUE(out.whole(std::min<size_t>(size, sizeof(T)))) << size << ": more was written than there is room for";
  }
}

TEST_F(Arguments, AnswersFitTheStructThatTheyAreGiven) {
  start();
  if (IsSkipped()) return;
  answers<vmem_residency>("vmem_query", [&](vmem_residency* out) { return vmem_query(region, kSize, out); });
  answers<struct vmem_stats>("vmem_stats", [](struct vmem_stats* out) { return vmem_stats(out); });
}

TEST_F(Arguments, AttributesOfNoSuchSizeAreRefused) {
  start();
  if (IsSkipped()) return;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{8}, size_t{4097}, size_t{1} << 40, SIZE_MAX}) {
    Guarded<vmem_region_attr> attr;
    memset(attr.bytes, 0, sizeof attr.bytes);
    attr.at()->size = size;
    void* p = nullptr;
    EXPECT_EQ(vmem_create(&p, kSize, attr.at()), -EINVAL) << size;
    EXPECT_NE(std::string(vmem_last_error()).find(std::to_string(size)), std::string::npos) << vmem_last_error();
    EXPECT_EQ(p, nullptr);
  }
  Guarded<vmem_region_attr> odd;
  void* p = nullptr;
  EXPECT_EQ(vmem_create(&p, kSize, odd.at(1)), -EINVAL) << "not aligned";
}

TEST_F(Arguments, SizesOfRangesAreRefusedBeforeTheyAreAdded) {
  start();
  if (IsSkipped()) return;
  const std::vector<std::pair<const char*, std::function<int(const void*, size_t)>>> calls = {
      {"vmem_prefetch", [](const void* p, size_t n) { return vmem_prefetch(p, n, VMEM_HOST, nullptr); }},
      {"vmem_advise", [](const void* p, size_t n) { return vmem_advise(p, n, VMEM_ADVISE_COLD, 0); }},
      {"vmem_acquire", [](const void* p, size_t n) { return vmem_acquire(p, n, VMEM_READ, VMEM_HOST, nullptr); }},
      {"vmem_release", [](const void* p, size_t n) { return vmem_release(p, n, nullptr); }},
      {"vmem_evict", [](const void* p, size_t n) { return vmem_evict(p, n, VMEM_SSD); }},
      {"vmem_sync", [](const void* p, size_t n) { return vmem_sync(p, n); }},
      {"vmem_query",
       [](const void* p, size_t n) {
         vmem_residency out = {};
         out.size = sizeof out;
         return vmem_query(p, n, &out);
       }},
      {"vmem_export",
       [](const void* p, size_t n) {
         int fd = -1;
         return vmem_export(p, n, 0, &fd);
       }},
  };
  auto* const at = static_cast<std::byte*>(region);
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    for (const size_t size : {size_t{0}, kSize + 1, SIZE_MAX, SIZE_MAX - 4095, SIZE_MAX / 2 + 1,
                              size_t{0} - reinterpret_cast<uintptr_t>(region)}) {
      EXPECT_EQ(call(region, size), -EINVAL) << size;
      EXPECT_EQ(call(at + 4096, size), -EINVAL) << size;
    }
    EXPECT_EQ(call(nullptr, 1), -EINVAL);
    EXPECT_EQ(call(at + kSize, 1), -EINVAL);
    EXPECT_EQ(call(reinterpret_cast<void*>(UINTPTR_MAX), 1), -EINVAL);
  }
}

TEST_F(Arguments, CountsAreRefusedBeforeTheyAreMultiplied) {
  start();
  if (IsSkipped()) return;
  const vmem_range range{region, kSize, VMEM_READ, 0};
  const auto* const odd = reinterpret_cast<const vmem_range*>(reinterpret_cast<const char*>(&range) + 1);
  struct vmem_lease* lease = nullptr;
  const std::vector<std::pair<const char*, std::function<int(const vmem_range*, size_t)>>> calls = {
      {"vmem_acquire_ranges",
       [](const vmem_range* r, size_t n) { return vmem_acquire_ranges(r, n, VMEM_HOST, nullptr); }},
      {"vmem_release_ranges", [](const vmem_range* r, size_t n) { return vmem_release_ranges(r, n, nullptr); }},
      {"vmem_lease", [&](const vmem_range* r, size_t n) { return vmem_lease(&lease, r, n, VMEM_HOST, nullptr); }},
      {"vmem_lease_async",
       [&](const vmem_range* r, size_t n) {
         return vmem_lease_async(&lease, r, n, VMEM_HOST, nullptr, nullptr, nullptr);
       }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    EXPECT_EQ(call(nullptr, 0), -EINVAL);
    EXPECT_EQ(call(nullptr, 1), -EINVAL);
    EXPECT_EQ(call(&range, 0), -EINVAL);
    EXPECT_EQ(call(odd, 1), -EINVAL) << "not aligned";
    for (const size_t count :
         {SIZE_MAX, SIZE_MAX / sizeof range, SIZE_MAX / sizeof range + 1, SIZE_MAX / 2 + 1, (size_t{1} << 24) + 1}) {
      EXPECT_EQ(call(&range, count), -EINVAL) << count;
      EXPECT_NE(std::string(vmem_last_error()).find(std::to_string(count)), std::string::npos) << vmem_last_error();
    }
    EXPECT_EQ(lease, nullptr);
  }
  EXPECT_EQ(vmem_lease(nullptr, &range, 1, VMEM_HOST, nullptr), -EINVAL);
}

TEST_F(Arguments, WhatIsMissingOrCannotBeIsRefused) {
  start();
  if (IsSkipped()) return;
  alignas(8) unsigned char room[32];
  memset(room, 0xa5, sizeof room);
  auto** const odd = reinterpret_cast<void**>(room + 1);
  vmem_region_attr far = {};
  far.size = sizeof far;
  far.path = "/proc/self/exe";
  far.flags = VMEM_MAP_READ | VMEM_HOST_ONLY;
  far.offset = UINT64_MAX - 4095;
  void* p = nullptr;
  char value[8];
  refused({{"create", [&] { return vmem_create(nullptr, kSize, nullptr); }, "null"},
           {"create, odd", [&] { return vmem_create(odd, kSize, nullptr); }, "aligned"},
           {"create, 0", [&] { return vmem_create(&p, 0, nullptr); }},
           {"create, most", [&] { return vmem_create(&p, SIZE_MAX, nullptr); }},
           {"create, half", [&] { return vmem_create(&p, SIZE_MAX / 2 + 1, nullptr); }},
           {"create, offset", [&] { return vmem_create(&p, 8192, &far); }},
           {"alloc", [&] { return vmem_alloc(nullptr, kSize, 0); }, "null"},
           {"alloc, odd", [&] { return vmem_alloc(odd, kSize, 0); }, "aligned"},
           {"map", [&] { return vmem_map(nullptr, kSize, "/proc/self/exe", 0, VMEM_MAP_READ); }, "null"},
           {"map, odd", [&] { return vmem_map(odd, kSize, "/proc/self/exe", 0, VMEM_MAP_READ); }, "aligned"},
           {"map, no path", [&] { return vmem_map(&p, kSize, nullptr, 0, VMEM_MAP_READ); }, "path"},
           {"map, offset", [&] { return vmem_map(&p, 8192, "/proc/self/exe", UINT64_MAX - 4095, VMEM_MAP_READ); }},
           {"set", [] { return vmem_set(nullptr, "1"); }, "null"},
           {"set, no value", [] { return vmem_set("io_depth", nullptr); }, "null"},
           {"set, long", [] { return vmem_set("io_depth", std::string(1 << 20, '9').c_str()); }},
           {"set, wraps", [] { return vmem_set("readahead", "99999999999999999999GiB"); }},
           {"set, wraps once", [] { return vmem_set("readahead", "18014398509481984KiB"); }},
           {"get", [&] { return vmem_get("io_depth", nullptr, 8); }, "null"},
           {"get, no name", [&] { return vmem_get(nullptr, value, sizeof value); }, "null"},
           {"name", [&] { return vmem_name(region, nullptr); }, "null"},
           {"export, odd", [&] { return vmem_export(region, kSize, 0, reinterpret_cast<int*>(room + 1)); }, "aligned"},
           {"kernel", [&] { return vmem_kernel_begin(nullptr, region, kSize, VMEM_READ, 0, 0, nullptr); }, "null"}});
  EXPECT_EQ(p, nullptr);
  for (const unsigned char c : room) EXPECT_EQ(c, 0xa5);
  memset(value, 0xa5, sizeof value);
  EXPECT_EQ(vmem_get("io_depth", value, 0), -ERANGE);
  EXPECT_EQ(vmem_get("io_depth", value, 1), -ERANGE);
  EXPECT_EQ(static_cast<unsigned char>(value[0]), 0xa5);
  for (const int code : {INT_MIN, INT_MIN + 1, INT_MAX, -1, 4096}) EXPECT_NE(vmem_strerror(code), nullptr);
  struct vmem_device_stats device = {};
  device.size = sizeof device;
  for (const int d : {INT_MIN, -1, 64, INT_MAX}) EXPECT_LT(vmem_device_stats(d, &device), 0) << d;
}

}  // namespace
