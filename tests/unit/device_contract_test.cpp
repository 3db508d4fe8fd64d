// The contract of device::Devices on simulated devices, and tests that only they allow: injected
// failures and delays.
#include "device/backend.h"
#include "device/sim/sim_device.h"
#include "device_contract_suite.h"
#include "ram/ram_bench.h"

namespace vmem::device::testing {
namespace {

class SimBench : public Bench {
 public:
  explicit SimBench(const SimOptions& options) {
    const core::Status s = make_sim_devices(options, &sim_);
    EXPECT_TRUE(s.ok()) << s.text();
  }
  SimDevices& sim() { return *sim_; }
  Devices& devices() override { return *sim_; }
  void* stream(int device) override { return sim_->create_stream(device); }
  void destroy(void* stream) override { sim_->destroy_stream(stream); }
  void set_current_device(int device) override { SimDevices::set_current_device(device); }
  void add(void* stream, uint64_t* words, size_t count, uint64_t value) override {
    launch(stream, [=](SimKernel& k) {
      auto* w = reinterpret_cast<uint64_t*>(k.at(words, count * 8, true));
      for (size_t i = 0; w != nullptr && i < count; ++i) w[i] += value;
    });
  }
  void sum(void* stream, const uint64_t* words, size_t count, uint64_t* sum) override {
    launch(stream, [=](SimKernel& k) {
      const auto* w = reinterpret_cast<const uint64_t*>(k.at(words, count * 8, false));
      if (w == nullptr) return;
      uint64_t total = 0;
      for (size_t i = 0; i < count; ++i) total += w[i];
      *sum = total;
    });
  }
  void stand_still(void* stream, std::atomic<uint32_t>* gate) override {
    launch(stream, [=](SimKernel&) {
      while (gate->load() == 0) std::this_thread::yield();
    });
  }
  core::Status synchronize(void* stream) override { return sim_->synchronize(stream); }
  void begin_capture(void* stream) override { sim_->capture(stream, true); }
  void end_capture(void* stream) override { sim_->capture(stream, false); }
  void reset(int device) override { sim_->lose(device, "cudaDeviceReset was called"); }
  uint64_t free_memory_slack() const override { return 0; }

 private:
  void launch(void* stream, SimFunction f) { sim_->launch(stream, std::move(f)).ignore(); }
  std::unique_ptr<SimDevices> sim_;
};

SimOptions options(int devices, bool handles = false, size_t unit = kUnit) {
  SimOptions o;
  o.handles = handles;
  o.unit = unit;
  o.devices = devices;
  o.memory_bytes = 80 * unit;
  return o;
}
std::unique_ptr<Bench> one(std::string*) {
  return std::make_unique<SimBench>(options(1));
}
std::unique_ptr<Bench> four(std::string*) {
  return std::make_unique<SimBench>(options(4));
}
std::unique_ptr<Bench> one_on_handles(std::string*) {
  return std::make_unique<SimBench>(options(1, true));
}
template <size_t kUnits>
std::unique_ptr<Bench> one_on_handles_of(std::string*) {
  return std::make_unique<SimBench>(options(1, true, kUnits * kUnit));
}
std::unique_ptr<Bench> four_on_handles(std::string*) {
  return std::make_unique<SimBench>(options(4, true));
}

// With the largest units a test has up to 3 GiB of frames and units; a sanitizer needs several
// times as much.
std::vector<Backend> backends() {
  std::vector<Backend> all{{"one", one},
                           {"four", four},
                           {"handles", one_on_handles},
                           {"four_on_handles", four_on_handles},
                           {"handles_of_4_mib", one_on_handles_of<2>},
                           {"handles_of_8_mib", one_on_handles_of<4>}};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  all.push_back({"handles_of_64_mib", one_on_handles_of<32>});
#endif
  return all;
}

INSTANTIATE_TEST_SUITE_P(Sim, DeviceContract, ::testing::ValuesIn(backends()),
                         [](const auto& i) { return std::string(i.param.name); });

INSTANTIATE_TEST_SUITE_P(Sim, DeviceBasics, ::testing::ValuesIn(backends()),
                         [](const auto& i) { return std::string(i.param.name); });
INSTANTIATE_TEST_SUITE_P(Ram, DeviceBasics, ::testing::Values(Backend{"ram", make_ram_bench}),
                         [](const auto& i) { return std::string(i.param.name); });

INSTANTIATE_TEST_SUITE_P(Sim, DeviceLoss,
                         ::testing::Values(Backend{"one", one}, Backend{"four", four},
                                           Backend{"handles", one_on_handles},
                                           Backend{"four_on_handles", four_on_handles}),
                         [](const auto& i) { return std::string(i.param.name); });

INSTANTIATE_TEST_SUITE_P(Sim, UnitInParts,
                         ::testing::Values(Backend{"handles", one_on_handles},
                                           Backend{"four_on_handles", four_on_handles}),
                         [](const auto& i) { return std::string(i.param.name); });

// --- simulated devices only

class DeviceSim : public DeviceContract {
 protected:
  void TearDown() override {
    sim().set_hook(nullptr);
    DeviceContract::TearDown();
  }
  SimDevices& sim() { return static_cast<SimBench*>(bench_.get())->sim(); }
};
INSTANTIATE_TEST_SUITE_P(Sim, DeviceSim,
                         ::testing::Values(Backend{"two",
                                                   [](std::string*) -> std::unique_ptr<Bench> {
                                                     return std::make_unique<SimBench>(options(2));
                                                   }}),
                         [](const auto& i) { return std::string(i.param.name); });

class DeviceSimOnHandles : public DeviceSim {};
INSTANTIATE_TEST_SUITE_P(Sim, DeviceSimOnHandles, ::testing::Values(Backend{"four", four_on_handles}),
                         [](const auto& i) { return std::string(i.param.name); });

// While the pager brings a block from the disk, it cannot hold back advice for the block.
TEST_P(DeviceSimOnHandles, WhatIsAdvisedWhileABlockIsBeingMappedIsFollowed) {
  uint64_t* base = reserve(2);
  VMEM_OK(populate(range(base, 0, 2)));
  std::vector<Copy> copies;
  for (size_t u = 0; u < 2; ++u) {
    fill_frame(u, 3 * u);
    copies.push_back({at(base) + u * unit_, frame(u), unit_});
  }
  Ticket done;
  VMEM_OK(d_->copy_in(0, copies, &done));
  core::Status advised = core::error(EINVAL, "nobody has advised");
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t) {
    if (op == SimOp::map)
      std::thread([&] { advised = d_->advise(range(base, 0, 2).front(), Advice::accessed_by, 1, true); }).join();
    return core::Status();
  });
  VMEM_OK(d_->map(range(base, 0, 2)));
  sim().set_hook(nullptr);
  VMEM_OK(advised);
  void* other = bench_->stream(1);
  VMEM_OK(d_->order_after(done, other, 1));
  bench_->sum(other, base, 2 * words_, sum_cell());
  VMEM_OK(bench_->synchronize(other));
  EXPECT_EQ(*sum_cell(), sum_of(0) + sum_of(3));
  bench_->destroy(other);
}

// A kernel of a real device would be dead by now. Here it is a thread that has looked its block up.
TEST_P(DeviceSim, AKernelThatOutlivesItsDeviceAndTheRangeHarmsNobody) {
  uint64_t* base = reserve(2);
  bring(base, 0, 1);
  std::atomic<bool> found{false}, given_back{false};
  sim()
      .launch(stream_,
              [&](SimKernel& k) {
                auto* word = reinterpret_cast<volatile uint64_t*>(k.at(base, sizeof *base, true));
                found = true;
                while (!given_back) std::this_thread::yield();
                if (word != nullptr) *word = 7;
              })
      .ignore();
  while (!found) std::this_thread::yield();
  sim().reset("reset by the test");
  release(base);
  std::vector<void*> others;  // mappings that could now lie at the block's old address
  for (int i = 0; i < 8; ++i) {
    others.push_back(mmap(nullptr, 2 * unit_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(others.back(), MAP_FAILED);
  }
  given_back = true;
  bench_->destroy(stream_);  // waits for it
  stream_ = nullptr;
  for (void* other : others) {
    const auto* words = static_cast<const uint64_t*>(other);
    EXPECT_TRUE(std::all_of(words, words + 2 * words_, [](uint64_t w) { return w == 0; }));
    munmap(other, 2 * unit_);
  }
}

TEST_P(DeviceSim, AFailedPrepareLeavesHolesThatCanBeMadeAgain) {
  uint64_t* base = reserve(6);
  for (SimOp op : {SimOp::map, SimOp::populate, SimOp::advise}) {
    VMEM_OK(d_->advise(range(base, 0, 6)[0], Advice::read_mostly, 0, true));
    std::atomic<int> calls{0};
    sim().set_hook([&](SimOp o, int, uintptr_t, size_t) {
      return o == op && ++calls == 2 ? core::error(ENOMEM, "injected: no memory for this") : core::Status();
    });
    bool torn = false;
    const std::vector<Range> apart = {{at(base), unit_}, {at(base) + 2 * unit_, unit_}, {at(base) + 4 * unit_, unit_}};
    VMEM_REFUSED(ENOMEM, d_->populate(apart, 1, &torn));
    EXPECT_TRUE(torn);
    EXPECT_EQ(used(1), 0u);
    sim().set_hook(nullptr);
    VMEM_OK(d_->rearm(apart));
    VMEM_OK(populate(apart, 1));
    EXPECT_EQ(used(1), 3 * unit_);
    VMEM_OK(d_->punch(apart));
  }
}

TEST_P(DeviceSim, MoreThanADeviceHasIsRefusedAndNoted) {
  uint64_t* base = reserve(96);
  VMEM_OK(populate(range(base, 0, 80)));
  bool torn = false;
  VMEM_REFUSED(ENOMEM, d_->populate(range(base, 80, 1), 0, &torn));
  EXPECT_TRUE(torn);
  EXPECT_EQ(used(0), 80 * unit_);
  EXPECT_EQ(sim().violations().size(), 1u);
  VMEM_OK(populate(range(base, 80, 1), 1));
}

TEST_P(DeviceSim, BothDirectionsRunAtOnce) {
  uint64_t* base = reserve(2);
  bring(base, 0, 5);
  VMEM_OK(populate(range(base, 1, 1)));
  auto out_ended = std::make_shared<std::atomic<bool>>(false);
  // The copy in cannot end before the copy out.
  sim().set_hook([out_ended](SimOp op, int, uintptr_t, size_t) {
    while (op == SimOp::copy_in && !*out_ended) std::this_thread::yield();
    return core::Status();
  });
  fill_frame(2, 9);
  const Copy in{at(base) + unit_, frame(2), unit_}, out{at(base), frame(1), unit_};
  Ticket in_done, out_done;
  VMEM_OK(d_->copy_in(0, std::span(&in, 1), &in_done));
  VMEM_OK(d_->copy_out(0, std::span(&out, 1), &out_done));
  VMEM_OK(d_->wait(out_done));
  bool done = true;
  VMEM_OK(d_->poll(in_done, &done));
  EXPECT_FALSE(done);
  *out_ended = true;
  VMEM_OK(d_->wait(in_done));
  EXPECT_EQ(frame(1)[0], 5u);
  EXPECT_EQ(kernel_sum(base + words_, words_), sum_of(9));
  EXPECT_TRUE(sim().violations().empty());
}

TEST_P(DeviceSim, AKernelThatDoesNotWaitForTheCopyIsCaught) {
  uint64_t* base = reserve(1);
  VMEM_OK(populate(range(base, 0, 1)));
  auto go = std::make_shared<std::atomic<bool>>(false);  // outlives the test in a copy's hook
  sim().set_hook([go](SimOp op, int, uintptr_t, size_t) {
    while (op == SimOp::copy_in && !*go) std::this_thread::yield();
    return core::Status();
  });
  const Copy copy{at(base), frame(0), unit_};
  Ticket done;
  VMEM_OK(d_->copy_in(0, std::span(&copy, 1), &done));
  bench_->sum(stream_, base, words_, sum_cell());
  VMEM_REFUSED(EIO, bench_->synchronize(stream_));
  *go = true;
  EXPECT_EQ(sim().violations().size(), 1u);
}

TEST_P(DeviceSim, PunchingABlockThatIsBeingCopiedIsRefused) {
  uint64_t* base = reserve(1);
  bring(base, 0, 1);
  auto go = std::make_shared<std::atomic<bool>>(false);  // outlives the test in a copy's hook
  sim().set_hook([go](SimOp op, int, uintptr_t, size_t) {
    while (op == SimOp::copy_out && !*go) std::this_thread::yield();
    return core::Status();
  });
  const Copy copy{at(base), frame(1), unit_};
  Ticket done;
  VMEM_OK(d_->copy_out(0, std::span(&copy, 1), &done));
  VMEM_REFUSED(EBUSY, d_->punch(range(base, 0, 1)));
  *go = true;
  VMEM_OK(d_->wait(done));
  VMEM_OK(d_->punch(range(base, 0, 1)));
}

TEST_P(DeviceSim, AFailedCopyLosesItsDeviceOnly) {
  uint64_t* base = reserve(2);
  bring(base, 1, 7, 1);
  VMEM_OK(populate(range(base, 0, 1)));
  sim().set_hook([&](SimOp op, int device, uintptr_t, size_t) {
    return op == SimOp::copy_in && device == 0 ? core::error(EIO, "injected: the link is down") : core::Status();
  });
  const Copy copy{at(base), frame(0), unit_};
  Ticket done;
  VMEM_OK(d_->copy_in(0, std::span(&copy, 1), &done));
  const core::Status s = d_->wait(done);
  EXPECT_EQ(s.code(), -EIO);
  EXPECT_NE(s.text().find("the link is down"), std::string_view::npos) << s.text();
  copy_out(base, 1, 1, 1);
  EXPECT_EQ(frame(1)[0], 7u);
}

TEST_P(DeviceSim, AdviceIsAppliedAgainWhenABlockIsRemade) {
  uint64_t* base = reserve(4);
  std::atomic<size_t> advised{0};
  sim().set_hook([&](SimOp op, int, uintptr_t, size_t size) {
    if (op == SimOp::advise) advised += size / unit_;
    return core::Status();
  });
  VMEM_OK(d_->advise(range(base, 0, 2)[0], Advice::read_mostly, 0, true));
  VMEM_OK(d_->advise(range(base, 1, 2)[0], Advice::accessed_by, 1, true));
  EXPECT_EQ(advised, 0u);  // nothing is made yet
  VMEM_OK(populate(range(base, 0, 4)));
  EXPECT_EQ(advised, 4u);
  VMEM_OK(d_->punch(range(base, 0, 4)));
  VMEM_OK(d_->advise(range(base, 0, 4)[0], Advice::read_mostly, 0, false));
  VMEM_OK(populate(range(base, 0, 4)));
  EXPECT_EQ(advised, 6u);
}

TEST_P(DeviceSim, MakingDevicesByName) {
  std::unique_ptr<Devices> made;
  std::string why;
  VMEM_OK(make_devices(kNone, kUnit, &made, &why));
  EXPECT_EQ(made, nullptr);
  EXPECT_FALSE(why.empty());
  VMEM_OK(make_devices("sim", kUnit, &made, &why));
  ASSERT_NE(made, nullptr);
  EXPECT_STREQ(made->name(), "sim");
}

TEST(DeviceMake, WithoutADriverThereIsNoDeviceTierAndItSaysWhy) {
  std::unique_ptr<Devices> made;
  std::string why;
  VMEM_OK(make_devices(kAutomatic, kUnit, &made, &why));
  if (made != nullptr) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_GT(why.size(), 20u) << why;
  VMEM_REFUSED(ENODEV, make_devices("handles", kUnit, &made, &why));
  EXPECT_EQ(made, nullptr);
  VMEM_REFUSED(ENODEV, make_devices("handles", kUnit, &made, &why));  // twice: the first try must leave nothing behind
}

}  // namespace
}  // namespace vmem::device::testing
