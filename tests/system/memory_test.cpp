// Want of memory inside a call: an error of that call, and nothing is left half done.
#include <array>
#include <cstdlib>
#include <new>

#include "support.h"

namespace {

// Which allocation of this thread is refused next: the n-th from now on, and those after it too unless `once`.
constinit thread_local int64_t refused_in = -1;
constinit thread_local bool once = false;
constinit thread_local uint64_t refusals = 0;

bool refuse() {
  if (refused_in < 0 || refused_in-- > 0) return false;
  if (!once) refused_in = 0;
  ++refusals;
  return true;
}

}  // namespace

// The whole binary's.
void* operator new(size_t size) {
  void* const p = refuse() ? nullptr : malloc(size != 0 ? size : 1);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept {
  free(p);
}
void operator delete(void* p, size_t) noexcept {
  free(p);
}

namespace {

using systest::stamp;
using systest::SystemTest;

constexpr size_t kBlock = 64 << 10, kBlocks = 256;

class Memory : public SystemTest {
 protected:
  // Calls with each of its allocations refused in turn, until it needs no more of them. Every answer is of this thread.
  template <typename Call, typename Then>
  static void refuse_each(Call call, Then then) {
    for (const bool only_once : {true, false}) {
      for (int n = 0;; ++n) {
        ASSERT_LT(n, 2000) << "the call never got through";
        refusals = 0;
        once = only_once;
        refused_in = n;
        const int rc = call(n);
        refused_in = -1;
        if (rc != 0) {
          EXPECT_STRNE(vmem_last_error(), "");
        }
        then(n, rc);
        if (refusals == 0 || HasFatalFailure()) break;
      }
    }
  }
};

TEST_F(Memory, AnErrorNeedsNone) {
  configure({});
  if (IsSkipped()) return;
  vmem::region region(kBlock, VMEM_HOST_ONLY);
  auto* const inside = static_cast<char*>(region.data()) + 1;
  refuse_each([&](int) { return vmem_free(inside); },
              [&](int, int rc) { EXPECT_TRUE(rc == -EINVAL || rc == -ENOMEM) << rc; });
  refuse_each([&](int) { return vmem_set("host_budget", "much"); },
              [&](int, int rc) { EXPECT_TRUE(rc == -EINVAL || rc == -ENOMEM) << rc; });
  refuse_each([&](int) { return vmem_set("no_such_setting", "1"); },
              [&](int, int rc) { EXPECT_TRUE(rc == -ENOENT || rc == -ENOMEM) << rc; });
  vmem_free(inside);
  EXPECT_NE(std::string(vmem_last_error()).find("1 bytes inside"), std::string::npos) << vmem_last_error();
}

TEST_F(Memory, AnAcquireThatFailsHasLeasedNothing) {
  configure({{"block_size", "64KiB"}, {"host_budget", "64MiB"}});
  if (IsSkipped()) return;
  void* p = nullptr;
  ASSERT_EQ(vmem_alloc(&p, kBlocks * kBlock, VMEM_HOST_ONLY), 0) << vmem_last_error();
  auto* const bytes = static_cast<char*>(p);
  const auto word = [&](size_t block) { return reinterpret_cast<uint64_t*>(bytes + block * kBlock + 8); };
  for (size_t b = 0; b < kBlocks; b += 2) *word(b) = stamp(b, 1);
  ASSERT_EQ(vmem_evict(p, kBlocks * kBlock, VMEM_SSD), 0) << vmem_last_error();
  // Two blocks, one of them never stored to, and in two ranges: others at each try.
  const auto first = [](int n) { return static_cast<size_t>(n) * 2 % kBlocks; };
  size_t failed = 0;
  refuse_each(
      [&](int n) {
        return vmem_acquire(bytes + first(n) * kBlock, 2 * kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr);
      },
      [&](int n, int rc) {
        if (rc == 0) {
          EXPECT_EQ(vmem_release(bytes + first(n) * kBlock, 2 * kBlock, nullptr), 0) << vmem_last_error();
        } else {
          ++failed;
          EXPECT_EQ(rc, -ENOMEM) << vmem_last_error();
          for (size_t b : {first(n), first(n) + 1}) {
            EXPECT_EQ(vmem_release(bytes + b * kBlock, kBlock, nullptr), -EINVAL) << "block " << b << " is leased";
          }
        }
        EXPECT_EQ(*word(first(n)), stamp(first(n), 1));
      });
  EXPECT_GT(failed, 4u);
  const auto ranges = [&](size_t b) {
    return std::vector<vmem_range>{{bytes + b * kBlock, kBlock, VMEM_READ, 0},
                                   {bytes + (b + 1) * kBlock, kBlock, VMEM_WRITE, 0}};
  };
  refuse_each(
      [&](int n) {
        const std::array<vmem_range, 2> two{{{bytes + first(n) * kBlock, kBlock, VMEM_READ, 0},
                                             {bytes + (first(n) + 1) * kBlock, kBlock, VMEM_WRITE, 0}}};
        return vmem_acquire_ranges(two.data(), two.size(), VMEM_HOST, nullptr);
      },
      [&](int n, int rc) {
        const auto two = ranges(first(n));
        EXPECT_EQ(vmem_release_ranges(two.data(), 2, nullptr), rc == 0 ? 0 : -EINVAL) << vmem_last_error();
      });
  // A release that fails has released nothing.
  ASSERT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ, VMEM_HOST, nullptr), 0);
  refuse_each([&](int) { return vmem_release(p, 2 * kBlock, nullptr); },
              [&](int, int rc) {
                if (rc != 0) return;
                EXPECT_EQ(vmem_acquire(p, 2 * kBlock, VMEM_READ, VMEM_HOST, nullptr), 0);
              });
  EXPECT_EQ(vmem_release(p, 2 * kBlock, nullptr), 0) << vmem_last_error();
  for (size_t b = 0; b < kBlocks; ++b) ASSERT_EQ(*word(b), b % 2 == 0 ? stamp(b, 1) : 0) << b;
  EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
}

}  // namespace
