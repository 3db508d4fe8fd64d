// Files, disk failures, concurrent threads and kernels, several devices, and the loss of one.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/step.h"
#include "device_fixture.h"
#include "faulty_disk.h"
#include "watched.h"

namespace systest {

TEST_P(DeviceTier, MappedFilesAreReadAndChangedByKernels) {
  start();
  TempFile file(32 * kMiB, 3);
  const size_t n = 32 * kWordsPerMiB;
  void* s = stream();
  {
    vmem::region r(32 * kMiB, file.path(), 0, VMEM_MAP_SHARED);
    VMEM_DO(acquire(words(r), n / 2, VMEM_READ | VMEM_WRITE, s));
    app_->set(s, words(r), n / 2, 0, 5);
    VMEM_DO(release(words(r), n / 2, s));
    VMEM_DO(vmem_sync(r.data(), r.size()));
    const auto bytes = file.read();
    EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()), n / 2, 0, 5), 0u);
    VMEM_DO(acquire(words(r) + n / 2, n / 2, VMEM_READ | VMEM_WRITE, s));
    app_->set(s, words(r) + n / 2, n / 2, n / 2, 6);
    VMEM_DO(release(words(r) + n / 2, n / 2, s));
  }
  const auto bytes = file.read();
  EXPECT_EQ(cpu_wrong(reinterpret_cast<const uint64_t*>(bytes.data()) + n / 2, n / 2, n / 2, 6), 0u)
      << "free writes what kernels changed";
  vmem::region again(32 * kMiB, file.path(), 0, VMEM_MAP_READ);
  EXPECT_EQ(acquire(words(again), n, VMEM_WRITE, s), -EACCES);
  VMEM_DO(acquire(words(again), n / 2, VMEM_READ, s));
  app_->check(s, words(again), n / 2, 0, 5);
  VMEM_DO(release(words(again), n / 2, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTier, AReadErrorAndAFlippedBitFailTheAcquireAndLeaseNothing) {
  vmem::store::FaultyEngine* disk = nullptr;
  systest::wrap_engine(&disk);
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  LogLines log;
  void* s = stream();
  using Fault = vmem::store::Fault;
  for (const auto action : {Fault::Action::error, Fault::Action::flip_bit}) {
    Fault fault;
    fault.action = action;
    fault.op = vmem::store::Io::Op::read;
    disk->add_rule(fault);
    EXPECT_EQ(acquire(words(r), n, VMEM_READ, s), -EIO);
    EXPECT_EQ(device_stats().leased_bytes, 0u);
    disk->clear_rules();
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    app_->check(s, words(r), n, 0, 1);
    VMEM_DO(release(words(r), n, s));
    ASSERT_TRUE(app_->synchronize(s).ok());
    r.evict();
  }
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_EQ(cpu_wrong(words(r), n, 0, 1), 0u);
}

TEST_P(DeviceTier, ASlowDiskDelaysAnAcquireAndNobodyElse) {
  vmem::store::FaultyEngine* disk = nullptr;
  systest::wrap_engine(&disk);
  start();
  vmem::region cold(8 * kMiB, 0), warm(8 * kMiB, 0);
  const size_t n = cold.size() / 8;
  cpu_set(words(cold), n, 0, 1);
  cold.evict();
  void *a = stream(), *b = stream();
  VMEM_DO(acquire(words(warm), n, VMEM_READ | VMEM_WRITE, b));
  vmem::store::Fault slow;
  slow.action = vmem::store::Fault::Action::delay;
  slow.delay_ms = kSanitized ? 500 : 2000;
  slow.op = vmem::store::Io::Op::read;
  disk->add_rule(slow);
  std::atomic<bool> there{false};
  std::thread waits([&] {
    EXPECT_EQ(acquire(words(cold), n, VMEM_READ, a), 0) << vmem_last_error();
    there = true;
  });
  for (uint64_t round = 1; round <= 200 && !there; ++round) {
    app_->set(b, words(warm), n, 0, round);
    ASSERT_TRUE(app_->synchronize(b).ok());
    app_->check(b, words(warm), n, 0, round);
  }
  waits.join();
  app_->check(a, words(cold), n, 0, 1);
  VMEM_DO(release(words(cold), n, a));
  VMEM_DO(release(words(warm), n, b));
  ASSERT_TRUE(app_->synchronize(a).ok());
  ASSERT_TRUE(app_->synchronize(b).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

// Touches without a lease while blocks are on the device, leave it and come back to the host. (A
// touch without a lease while a block enters is the program's error: docs/internals.md.)
TEST_P(DeviceTier, CpuReadersAndWritersBesideBlocksThatLeaveLoseNothing) {
  start();
  vmem::region r(24 * kMiB, 0);
  const size_t n = r.size() / 8;
  // words; the last word of each piece is the CPU's, kernels only read the others
  constexpr size_t kPiece = 8192;
  cpu_set(words(r), n, 0, 1);
  std::vector<uint64_t> counts(n / kPiece);
  void* s = stream();
  for (int pass = 0; pass < (kSanitized ? 4 : 12); ++pass) {
    VMEM_DO(acquire(words(r), n, VMEM_READ, s));
    for (size_t p = 0; p < n; p += 8 * kPiece) app_->check(s, words(r) + p, kPiece - 1, p, 1);
    VMEM_DO(release(words(r), n, s));
    std::atomic<bool> stop{false};
    std::atomic<size_t> bad{0};
    std::vector<std::thread> cpus;
    for (size_t t = 0; t < 3; ++t) {
      cpus.emplace_back([&, t] {
        std::mt19937_64 random(t + 10 * static_cast<uint64_t>(pass));
        while (!stop) {
          const size_t i = random() % (counts.size() / 3) * 3 + t, at = i * kPiece + kPiece - 1;
          volatile uint64_t* w = words(r) + at;
          if (counts[i] != 0 ? *w != counts[i] : at % kStampStride == 0 && *w != stamp(at, 1)) ++bad;
          *w = ++counts[i];
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    VMEM_DO(vmem_evict(r.data(), r.size(), pass % 2 == 0 ? VMEM_SSD : VMEM_HOST));
    std::this_thread::sleep_for(std::chrono::milliseconds(pass % 3 * 5));
    stop = true;
    for (std::thread& t : cpus) t.join();
    ASSERT_EQ(bad, 0u) << pass;
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  EXPECT_EQ(app_->wrong(), 0u);
  r.evict();
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    ASSERT_EQ(words(r)[i * kPiece + kPiece - 1], counts[i]) << i;
  }
}

// Kernels of several streams and CPU threads take turns: they check every word of a block and
// change it, while blocks are prefetched, evicted, synced and advised, and regions come and go. If
// devices have page tables of their own, the CPU also loads and stores without a lease, and beside
// a kernel's READ lease. Lasts a fixed number of turns, or VMEM_SOAK_SECONDS. VMEM_SOAK_WATCHED:
// uses watched.h, in a process of its own.
TEST_P(DeviceTier, CpuAndKernelsTakeTurnsByLeases) {
  start();
  vmem::region r(128 * kMiB, 0);
  const size_t block = 2 * kWordsPerMiB, blocks = r.size() / (2 * kMiB);
  const char* soak = getenv("VMEM_SOAK_SECONDS");
  const bool own_page_tables = GetParam().own_page_tables;
  const bool watched = getenv("VMEM_SOAK_WATCHED") != nullptr;
  ASSERT_TRUE(!watched || watch(r.data(), r.size()));
  const int looking = pagemaps();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(soak != nullptr ? atoi(soak) : 0);
  const int turns = kSanitized ? 40 : 120;
  std::vector<uint64_t> rounds(blocks);
  std::vector<std::mutex> owners(blocks);  // held by the thread that changes a block
  std::atomic<size_t> bad{0}, all_turns{0};
  const auto must = [&](int rc, const char* what) {
    if (rc == 0) return;
    if (bad++ < 5) ADD_FAILURE() << what << ": " << rc << " " << vmem_last_error();
  };
  const auto party = [&](unsigned seed, void* s, int device) {
    std::mt19937_64 random(seed);
    for (int turn = 0; soak != nullptr ? std::chrono::steady_clock::now() < end && bad == 0 : turn < turns; ++turn) {
      // Every third turn uses blocks of the thread's own, and does not wait for the stream.
      const size_t b = turn % 3 != 0 ? random() % (blocks / 2) : blocks / 2 + random() % (blocks / 16) * 8 + seed - 1;
      std::lock_guard owner(owners[b]);
      uint64_t* w = words(r) + b * block;
      const uint64_t round = rounds[b]++;
      if (s == nullptr && own_page_tables && turn % 2 == 0) {
        if (round != 0) bad += cpu_wrong(w, block, b * block, round);
        cpu_set(w, block, b * block, round + 1);
      } else if (s == nullptr) {
        must(vmem_acquire(w, block * 8, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr), "host lease");
        if (round != 0) bad += cpu_wrong(w, block, b * block, round);
        cpu_set(w, block, b * block, round + 1);
        must(vmem_release(w, block * 8, nullptr), "host release");
      } else if (own_page_tables && turn % 5 == 0) {
        must(acquire(w, block, VMEM_READ, s, device), "lease for reading");
        if (round != 0) bad += cpu_wrong(w, block, b * block, round);
        if (turn % 10 == 0) {
          cpu_set(w, block, b * block, round + 1);
        } else {
          --rounds[b];
        }
        if (round != 0) app_->check(s, w, block, b * block, round);  // the data that it acquired
        must(release(w, block, s), "release");
        if (turn % 3 != 0 && !app_->synchronize(s).ok()) ++bad;
      } else {
        must(acquire(w, block, VMEM_READ | VMEM_WRITE, s, device), "lease");
        if (round != 0) app_->check(s, w, block, b * block, round);
        app_->set(s, w, block, b * block, round + 1);
        must(release(w, block, s), "release");
        // Leases order a block's transitions, not the kernels of two streams.
        if (turn % 3 != 0 && !app_->synchronize(s).ok()) ++bad;
      }
      if (turn % 7 == 0) must(vmem_evict(w, block * 8, turn % 2 == 0 ? VMEM_SSD : VMEM_HOST), "evict");
      if (turn % 11 == 0) must(vmem_prefetch(w, block * 8, turn % 3 - 2, nullptr), "prefetch");
      if (turn % 13 == 0) must(vmem_sync(w, block * 8), "sync");
      if (turn % 17 == 0) must(vmem_advise(w, block * 8, VMEM_ADVISE_SET_READ_MOSTLY + turn % 2, 0), "advise");
      if (turn % 29 == 0) {
        vmem::region other(6 * kMiB, 0);
        other.view<uint64_t>()[5] = turn;
        other.prefetch(0);
        if (s != nullptr) {
          must(acquire(words(other), other.size() / 8, VMEM_READ | VMEM_WRITE, s, device), "lease of another region");
          app_->set(s, words(other), other.size() / 8, 0, 9);
          must(release(words(other), other.size() / 8, s), "release of another region");
        }
      }  // freed with work in progress
      ++all_turns;
    }
  };
  std::vector<void*> s;
  for (int i = 0; i < 4; ++i) s.push_back(stream(i % devices_));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) threads.emplace_back(party, i + 1, s[i], static_cast<int>(i) % devices_);
  for (unsigned i = 4; i < 8; ++i) threads.emplace_back(party, i + 1, nullptr, 0);
  for (std::thread& t : threads) t.join();
  for (void* one : s) ASSERT_TRUE(app_->synchronize(one).ok());
  EXPECT_EQ(bad, 0u);
  EXPECT_EQ(app_->wrong(), 0u);
  EXPECT_TRUE(!watched || pagemaps() == looking) << pagemaps();
  for (size_t k = 0; k < blocks; ++k) {
    if (rounds[k] == 0) continue;
    ASSERT_EQ(cpu_wrong(words(r) + k * block, block, k * block, rounds[k]), 0u) << k;
  }
  const auto v = vmem::stats();
  std::printf("%zu turns, %llu MiB in, %llu MiB out, %llu MiB read, %llu MiB written, %llu faults\n", all_turns.load(),
              static_cast<unsigned long long>(v.host_to_device_bytes >> 20),
              static_cast<unsigned long long>(v.device_to_host_bytes >> 20),
              static_cast<unsigned long long>(v.read_bytes >> 20), static_cast<unsigned long long>(v.write_bytes >> 20),
              static_cast<unsigned long long>(v.faults));
}

TEST_P(DeviceTier, BlocksMoveBetweenDevicesByLeases) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  start();
  vmem::region r(16 * kMiB, 0);
  const size_t n = r.size() / 8;
  std::vector<void*> s;
  for (int d = 0; d < devices_; ++d) s.push_back(stream(d));
  uint64_t round = 0;
  for (int turn = 0; turn < 3 * devices_; ++turn) {
    const int d = turn % devices_;
    VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s[static_cast<size_t>(d)], d));
    if (round != 0) app_->check(s[static_cast<size_t>(d)], words(r), n, 0, round);
    app_->set(s[static_cast<size_t>(d)], words(r), n, 0, ++round);
    if (turn % 2 == 0) {
      EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s[static_cast<size_t>((d + 1) % devices_)], (d + 1) % devices_),
                -EBUSY);
    }
    VMEM_DO(release(words(r), n, s[static_cast<size_t>(d)]));
    within_budget(d);
  }
  EXPECT_EQ(acquire(words(r), 8, VMEM_READ, s[1], 0), -EINVAL) << "a stream of another device";
  for (void* one : s) ASSERT_TRUE(app_->synchronize(one).ok());
  EXPECT_EQ(cpu_wrong(words(r), n, 0, round), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

// Until the last byte has moved, both devices hold the block.
TEST_P(DeviceTier, ABlockOnItsWayBetweenDevicesCountsForBoth) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  start();
  vmem::region r(8 * kMiB, 0);
  const size_t n = r.size() / 8;
  void* s[] = {stream(0), stream(1)};
  VMEM_DO(acquire(words(r), n, VMEM_READ | VMEM_WRITE, s[0], 0));
  app_->set(s[0], words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s[0]));
  ASSERT_TRUE(app_->synchronize(s[0]).ok());
  on_its_way_ = false;
  vmem::core::step_hook.store([](const char* step) {
    if (std::strcmp(step, "device.migrating") != 0) return;
    on_its_way_ = true;
    while (on_its_way_) std::this_thread::yield();
  });
  VMEM_DO(vmem_prefetch(r.data(), r.size(), 1, nullptr));
  while (!on_its_way_) std::this_thread::yield();
  EXPECT_EQ(device_stats(0).used_bytes, r.size());
  EXPECT_EQ(device_stats(1).used_bytes, r.size());
  vmem::core::step_hook.store(nullptr);
  on_its_way_ = false;
  EXPECT_TRUE(until([&] { return device_stats(0).used_bytes == 0; }));
  EXPECT_EQ(device_stats(1).used_bytes, r.size());
  EXPECT_EQ(device_stats(1).in_bytes, r.size());
  VMEM_DO(acquire(words(r), n, VMEM_READ, s[1], 1));
  app_->check(s[1], words(r), n, 0, 1);
  VMEM_DO(release(words(r), n, s[1]));
  ASSERT_TRUE(app_->synchronize(s[1]).ok());
  EXPECT_EQ(app_->wrong(), 0u);
}

// A region larger than a device's budget, but no larger than that and the spare budget of the next
// device.
TEST_P(DeviceTier, WhatHasNoRoomGoesToAPeerAndComesBackAndGivesWay) {
  if (devices_ < 2) GTEST_SKIP() << "one device";
  if (!app_->linked(0, 1)) GTEST_SKIP() << "devices 0 and 1 have no NVLink between them";
  start({{"peer_spill_percent", "50"}});
  device_stats(1);  // marks it as used from here on
  const vmem::region r(44 * kMiB, 0), own(32 * kMiB, 0);
  const size_t n = r.size() / 8, part = 4 * kWordsPerMiB;
  auto* const w = static_cast<uint64_t*>(r.data());
  void *s = stream(0), *s1 = stream(1);
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t at = 0; at < n; at += part) {
      VMEM_DO(acquire(w + at, part, VMEM_READ | VMEM_WRITE, s));
      if (round != 1) app_->check(s, w + at, part, at, round - 1);
      app_->set(s, w + at, part, at, round);
      VMEM_DO(release(w + at, part, s));
      within_budget();
      within_budget(1);
    }
  }
  ASSERT_TRUE(app_->synchronize(s).ok());
  const auto here = device_stats(0), there = device_stats(1);
  EXPECT_GE(there.guest_bytes, 12 * kMiB);
  EXPECT_LE(there.guest_bytes, 16 * kMiB);
  EXPECT_GT(here.to_peers, here.from_peers);
  EXPECT_GT(here.from_peers, 0u);
  VMEM_DO(acquire(static_cast<uint64_t*>(own.data()), own.size() / 8, VMEM_READ | VMEM_WRITE, s1, 1));
  EXPECT_EQ(device_stats(1).guest_bytes, 0u);
  VMEM_DO(release(static_cast<uint64_t*>(own.data()), own.size() / 8, s1));
  ASSERT_TRUE(app_->synchronize(s1).ok());
  EXPECT_EQ(cpu_wrong(w, n, 0, 3), 0u);
  EXPECT_EQ(app_->wrong(), 0u);
}

TEST_P(DeviceTierLoss, ALostDeviceIsAnErrorWithWordsAndNothingHangs) {
  start();
  vmem::region r(32 * kMiB, 0), other(8 * kMiB, VMEM_HOST_ONLY);
  const size_t n = r.size() / 8;
  cpu_set(words(r), n, 0, 1);
  r.evict();
  void* s = stream();
  VMEM_DO(acquire(words(r), n / 2, VMEM_READ, s));
  app_->check(s, words(r), n / 2, 0, 1);
  VMEM_DO(release(words(r), n / 2, s));
  ASSERT_TRUE(app_->synchronize(s).ok());
  LogLines log;
  app_->lose(0);
  EXPECT_EQ(acquire(words(r) + n / 2, n / 2, VMEM_READ, s), -EIO);
  EXPECT_GT(std::string(vmem_last_error()).size(), 20u);
  EXPECT_EQ(cpu_wrong(words(r) + n / 2, n / 2, n / 2, 1), 0u) << "what was elsewhere is there";
  words(other)[0] = 1;
  other.evict();
  EXPECT_EQ(words(other)[0], 1u);
}

}  // namespace systest
