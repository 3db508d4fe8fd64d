// Allocation failures while blocks move to and from a device: the call that meets one returns an
// error, no block is lost, none stays in a transition, and the library's own threads continue.
#include <array>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "child.h"
#include "refusals.h"
#include "sim_support.h"

namespace {

using namespace systest;

constexpr size_t kPage = 4096, kBlocks = 6, kWords = kBlock / 8, kPages = kBlock / kPage;

class MemoryOnDevice : public SimTest {
 protected:
  void SetUp() override {
    start(1, {{"fault_timeout_ms", "300"}});
    if (IsSkipped()) return;
    ASSERT_EQ(vmem_alloc(&at_, kBlocks * kBlock, 0), 0) << vmem_last_error();
    words_ = static_cast<uint64_t*>(at_);
    for (size_t i = 0; i < kBlocks * kWords; ++i) words_[i] = stamp(i, 1);
  }
  uint64_t* block(size_t b) const { return words_ + b * kWords; }
  // A kernel changes a word of the block, which is then only on the device.
  void change(size_t b) {
    store_on_device(block(b) + 3, stamp(b * kWords + 3, ++round_));
    rounds_[b] = round_;
  }
  // Checks by the CPU, wherever the block is.
  void expect_right(size_t b) const {
    ASSERT_EQ(*static_cast<volatile uint64_t*>(block(b) + 3), stamp(b * kWords + 3, rounds_[b])) << "block " << b;
    ASSERT_EQ(*static_cast<volatile uint64_t*>(block(b) + 4), stamp(b * kWords + 4, 1)) << "block " << b;
  }
  // Checks every word of all blocks, in place and after a way through the SSD; then frees them.
  void expect_all_right_and_free() {
    for (const bool moved : {false, true}) {
      if (moved) {
        EXPECT_EQ(vmem_evict(at_, kBlocks * kBlock, VMEM_SSD), 0) << vmem_last_error();
      }
      for (size_t i = 0; i < kBlocks * kWords; ++i) {
        const uint64_t round = i % kWords == 3 ? rounds_[i / kWords] : 1;
        ASSERT_EQ(words_[i], stamp(i, round)) << i << (moved ? ", from the SSD" : "");
      }
    }
    EXPECT_EQ(vmem::api::Runtime::get().check(), "");
    EXPECT_EQ(vmem_free(at_), 0) << vmem_last_error();
  }

  void* at_ = nullptr;
  uint64_t* words_ = nullptr;
  uint64_t round_ = 1;
  std::array<uint64_t, kBlocks> rounds_{1, 1, 1, 1, 1, 1};
};

void may_lack_memory(int rc) {
  EXPECT_TRUE(rc == 0 || rc == -ENOMEM) << rc << ": " << vmem_last_error();
}

TEST_F(MemoryOnDevice, BlocksLeaveOrStay) {
  if (IsSkipped()) return;
  const auto calls = {
      +[](uint64_t* b) { return vmem_evict(b, kBlock, VMEM_HOST); },
      +[](uint64_t* b) { return vmem_evict(b, kBlock, VMEM_SSD); },
      +[](uint64_t* b) { return vmem_sync(b, kBlock); },
      +[](uint64_t* b) { return vmem_prefetch(b, kBlock, VMEM_HOST, nullptr); },
      +[](uint64_t* b) { return vmem_prefetch(b, kBlock, VMEM_SSD, nullptr); },
      +[](uint64_t* b) { return vmem_advise(b, kBlock, VMEM_ADVISE_HOT, 0); },
      +[](uint64_t* b) { return vmem_advise(b, kBlock, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0); },
      +[](uint64_t* b) { return vmem_advise(b, kBlock, VMEM_ADVISE_SET_ACCESSED_BY, 0); },
      +[](uint64_t* b) {
        const int rc = vmem_acquire(b, kBlock, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr);
        refused_in = -1;
        if (rc == 0) {
          EXPECT_EQ(vmem_release(b, kBlock, nullptr), 0) << vmem_last_error();
        }
        return rc;
      },
  };
  size_t failed = 0, which = 0;
  for (auto* call : calls) {
    const size_t b = which++ % kBlocks;
    refuse_each(
        [&](int) {
          const int64_t mine = std::exchange(refused_in, -1);
          change(b);
          refused_in = mine;
          return call(block(b));
        },
        [&](int, int rc) {
          failed += rc != 0;
          may_lack_memory(rc);
          expect_right(b);
        });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(failed, calls.size());
  expect_all_right_and_free();
}

TEST_F(MemoryOnDevice, LeasesAreHadWholeOrNotAtAll) {
  if (IsSkipped()) return;
  size_t failed = 0;
  // The blocks come from the SSD and from host memory, or are already on the device.
  refuse_each(
      [&](int n) {
        const int64_t mine = std::exchange(refused_in, -1);
        const size_t b = static_cast<size_t>(n) % (kBlocks - 1);
        EXPECT_EQ(vmem_evict(block(b), 2 * kBlock, n % 3 == 0 ? VMEM_SSD : VMEM_HOST), 0) << vmem_last_error();
        refused_in = mine;
        return vmem_acquire(block(b), 2 * kBlock, VMEM_READ | VMEM_WRITE, 0, stream_);
      },
      [&](int n, int rc) {
        const size_t b = static_cast<size_t>(n) % (kBlocks - 1);
        may_lack_memory(rc);
        failed += rc != 0;
        if (rc != 0) {
          EXPECT_EQ(vmem_release(block(b), kBlock, stream_), -EINVAL) << "leased";
        } else {
          launch_store(stream_, block(b) + 3, stamp(b * kWords + 3, ++round_));
          rounds_[b] = round_;
          EXPECT_EQ(vmem_release(block(b), 2 * kBlock, stream_), 0) << vmem_last_error();
          EXPECT_TRUE(sim().synchronize(stream_).ok());
        }
        expect_right(b);
      });
  // A release that fails has released nothing.
  ASSERT_EQ(vmem_acquire(block(0), 2 * kBlock, VMEM_READ | VMEM_WRITE, 0, stream_), 0) << vmem_last_error();
  refuse_each([&](int) { return vmem_release(block(0), 2 * kBlock, stream_); },
              [&](int, int rc) {
                may_lack_memory(rc);
                failed += rc != 0;
                if (rc != 0) return;
                EXPECT_EQ(vmem_acquire(block(0), 2 * kBlock, VMEM_READ | VMEM_WRITE, 0, stream_), 0)
                    << vmem_last_error();
              });
  EXPECT_EQ(vmem_release(block(0), 2 * kBlock, stream_), 0) << vmem_last_error();
  // A hint may have no effect.
  refuse_each([&](int n) { return vmem_prefetch(block(static_cast<size_t>(n) % kBlocks), kBlock, 0, nullptr); },
              [&](int n, int rc) {
                may_lack_memory(rc);
                expect_right(static_cast<size_t>(n) % kBlocks);
              });
  EXPECT_GT(failed, 8u);
  expect_all_right_and_free();
}

TEST_F(MemoryOnDevice, ContentsGoWithTheCallThatSucceeds) {
  if (IsSkipped()) return;
  bool gone = false;
  refuse_each(
      [&](int) {
        const int64_t mine = std::exchange(refused_in, -1);
        change(1);
        gone = false;
        refused_in = mine;
        return vmem_advise(block(1), kBlock, VMEM_ADVISE_DONT_NEED, 0);
      },
      [&](int, int rc) {
        may_lack_memory(rc);
        gone = rc == 0;
        if (gone) {
          EXPECT_EQ(*static_cast<volatile uint64_t*>(block(1) + 3), 0u);
          for (size_t i = 0; i < kWords; ++i) block(1)[i] = stamp(kWords + i, 1);
          rounds_[1] = 1;
        } else {
          expect_right(1);
        }
      });
  EXPECT_TRUE(gone);
  expect_all_right_and_free();
}

// Adjacent regions with blocks on a device, and a region that shows a file: the call that reports
// success has freed them.
TEST_F(MemoryOnDevice, RegionsAreFreed) {
  if (IsSkipped()) return;
  change(0);
  const TempFile file(kBlock);
  refuse_each(
      [&](int n) {
        const int64_t mine = std::exchange(refused_in, -1);
        std::array<void*, 3> others{};
        for (void*& p : others) {
          EXPECT_EQ(vmem_alloc(&p, kBlock, 0), 0) << vmem_last_error();
          store_on_device(static_cast<uint64_t*>(p), 5);
        }
        void* mapped = nullptr;
        EXPECT_EQ(vmem_map(&mapped, kBlock, file.path().c_str(), 0, VMEM_MAP_SHARED), 0) << vmem_last_error();
        store_on_device(static_cast<uint64_t*>(mapped), stamp(7, static_cast<uint64_t>(n)));
        int worst = 0;
        for (void* p : {others[1], others[0], others[2], mapped}) {
          refused_in = mine;
          const int rc = vmem_free(p);
          refused_in = -1;
          if (rc == 0) continue;
          worst = rc;
          EXPECT_EQ(vmem_free(p), 0) << vmem_last_error();
        }
        uint64_t word = 0;
        memcpy(&word, file.read().data(), sizeof word);
        EXPECT_EQ(word, stamp(7, static_cast<uint64_t>(n)));
        if (worst != 0) {
          // sets the message for callers that read it
          EXPECT_EQ(vmem_free(reinterpret_cast<void*>(8)), -EINVAL);
        }
        return worst;
      },
      [&](int, int rc) { may_lack_memory(rc); });
  expect_all_right_and_free();
}

// The library's own threads get no memory, every n-th time or always, while blocks move between all
// tiers.
class DeviceWithoutMemory : public SystemTest, public testing::WithParamInterface<const char*> {};

TEST_P(DeviceWithoutMemory, BlocksMoveAndEveryByteIsRight) {
  configure({});
  if (IsSkipped()) return;
  vmem_shutdown();
  const pid_t child = start_child("DeviceWithoutMemoryChild.DISABLED_Pages", {{"VMEM_TEST_EVERY", GetParam()},
                                                                              {"VMEM_DEVICE", "sim"},
                                                                              {"VMEM_HOST_BUDGET", "96MiB"},
                                                                              {"VMEM_DEVICE_BUDGET", "16MiB"},
                                                                              {"VMEM_FAULT_TIMEOUT_MS", "500"},
                                                                              {"VMEM_READAHEAD", "0"}});
  EXPECT_EQ(wait_for_child(child, 300), 0);
}
INSTANTIATE_TEST_SUITE_P(Moves, DeviceWithoutMemory, testing::Values("1", "3", "7"));

constexpr size_t kAll = 16, kThreads = 2;

struct Shared {
  uint64_t* words = nullptr;
  std::vector<uint64_t> has;  // for each page and thread
  uint64_t* word(size_t page, size_t thread) const { return words + page * (kPage / 8) + thread; }
};

void store_and_load(Shared& region, size_t thread) {
  std::minstd_rand dice(static_cast<unsigned>(thread + 1));
  for (uint64_t round = 1; round <= 3000; ++round) {
    const size_t page = dice() % (kAll * kPages);
    uint64_t& has = region.has[page * (kThreads + 1) + thread];
    const uint64_t seen = *static_cast<volatile uint64_t*>(region.word(page, thread));
    if (seen != has) {
      ADD_FAILURE() << "page " << page << ", thread " << thread << ": " << seen << " for " << has;
      return;
    }
    if (dice() % 2 == 0)
      *static_cast<volatile uint64_t*>(region.word(page, thread)) = has = stamp(page * kThreads + thread, round);
  }
}

// Brings the blocks to host memory if possible. In any case no block of the range is in a
// transition afterwards.
void bring_to_rest(uint64_t* at, size_t size) {
  const int rc = vmem_evict(at, size, VMEM_HOST);
  if (rc != 0) {
    EXPECT_EQ(rc, -ENOMEM) << vmem_last_error();
    // The evict ended early. Advice waits for blocks in transition.
    EXPECT_EQ(vmem_advise(at, size, VMEM_ADVISE_UNSET_READ_MOSTLY, 0), 0) << vmem_last_error();
  }
}

// A device stores to its words when it gets leases; calls move the blocks. No CPU thread touches
// them while they may come to the device: it could access a block between its mapping and its
// closing.
void lease_and_call(Shared& region, vmem::device::SimDevices& sim) {
  std::minstd_rand dice(99);
  void* const stream = sim.create_stream(0);
  for (uint64_t round = 1; round <= 250; ++round) {
    const size_t first = dice() % kAll, count = 1 + dice() % std::min<size_t>(kAll - first, 3);
    uint64_t* const at = region.word(first * kPages, 0);
    const unsigned what = dice() % 9;
    if (what == 8) {
      bring_to_rest(at, count * kBlock);
      for (size_t page = first * kPages; page < (first + count) * kPages; page += 1 + dice() % 50) {
        uint64_t& has = region.has[page * (kThreads + 1) + kThreads];
        const uint64_t seen = *static_cast<volatile uint64_t*>(region.word(page, kThreads));
        EXPECT_EQ(seen, has) << "page " << page;
        *static_cast<volatile uint64_t*>(region.word(page, kThreads)) = has = stamp(page, round);
      }
      continue;
    }
    const bool lease = what >= 6;
    int rc = 0;
    {
      const Starving on;
      rc = what == 0   ? vmem_sync(at, count * kBlock)
           : what == 1 ? vmem_evict(at, count * kBlock, VMEM_SSD)
           : what == 2 ? vmem_evict(at, count * kBlock, VMEM_HOST)
           : what == 3 ? vmem_prefetch(at, count * kBlock, VMEM_SSD, nullptr)
           : what == 4 ? vmem_prefetch(at, count * kBlock, 0, nullptr)
           : what == 5 ? vmem_advise(at, count * kBlock, VMEM_ADVISE_SET_PREFERRED_LOCATION, 0)
                       : vmem_acquire(at, count * kBlock, VMEM_READ | VMEM_WRITE, 0, stream);
      if (rc != 0) {
        EXPECT_EQ(rc, -ENOMEM) << what << ": " << vmem_last_error();
      }
    }
    if (!lease || rc != 0) continue;
    const size_t page = first * kPages + dice() % (count * kPages);
    uint64_t& has = region.has[page * (kThreads + 1) + kThreads];
    uint64_t* const word = region.word(page, kThreads);
    const uint64_t expected = has, next = stamp(page, round);
    has = next;
    EXPECT_TRUE(sim.launch(stream,
                           [=](vmem::device::SimKernel& k) {
                             auto* w = reinterpret_cast<uint64_t*>(k.at(word, 8, true));
                             EXPECT_TRUE(w != nullptr && *w == expected) << "page " << page;
                             if (w != nullptr) *w = next;
                           })
                    .ok());
    do {
      const Starving on;
      rc = vmem_release(at, count * kBlock, stream);
    } while (rc == -ENOMEM && refuse_every.exchange(0) != 0);  // a release that fails has released nothing
    EXPECT_EQ(rc, 0) << vmem_last_error();
  }
  sim.destroy_stream(stream);
}

TEST(DeviceWithoutMemoryChild, DISABLED_Pages) {
  ASSERT_EQ(vmem_init(), 0) << vmem_last_error();
  Shared host, region;
  void* at = nullptr;
  for (Shared* r : {&host, &region}) {
    ASSERT_EQ(vmem_alloc(&at, kAll * kBlock, 0), 0) << vmem_last_error();
    r->words = static_cast<uint64_t*>(at);
    r->has.assign(kAll * kPages * (kThreads + 1), 0);
  }
  vmem::device::SimDevices& sim = *vmem::device::current_sim();
  // Starts its threads.
  EXPECT_EQ(vmem_prefetch(at, kAll * kBlock, 0, nullptr), 0) << vmem_last_error();
  EXPECT_EQ(vmem_evict(at, kAll * kBlock, VMEM_SSD), 0) << vmem_last_error();

  const uint64_t every = strtoull(getenv("VMEM_TEST_EVERY"), nullptr, 10);
  refuse_every = every;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { store_and_load(host, t); });
  threads.emplace_back([&] { lease_and_call(region, sim); });
  for (std::thread& t : threads) t.join();
  const auto all_right = [&] {
    for (const Shared* r : {&host, &region}) {
      for (size_t i = 0; i < r->has.size(); ++i)
        ASSERT_EQ(*r->word(i / (kThreads + 1), i % (kThreads + 1)), r->has[i]) << i;
    }
  };
  bring_to_rest(region.words, kAll * kBlock);
  all_right();
  refuse_every = 0;
  vmem_sync(at, kAll * kBlock);  // reports once the writes that failed before
  EXPECT_EQ(vmem_sync(at, kAll * kBlock), 0) << vmem_last_error();
  for (const Shared* r : {&host, &region}) {
    EXPECT_EQ(vmem_evict(r->words, kAll * kBlock, VMEM_SSD), 0) << vmem_last_error();
  }
  all_right();
  EXPECT_EQ(vmem::api::Runtime::get().check(), "");
  for (const std::string& v : sim.violations()) ADD_FAILURE() << v;
  // Free and shut down without memory.
  EXPECT_EQ(vmem_prefetch(at, kBlock, 0, nullptr), 0) << vmem_last_error();
  refuse_every = every;
  {
    const Starving on;
    vmem_shutdown();
  }
  refuse_every = 0;
}

}  // namespace
