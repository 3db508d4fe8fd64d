// The classes of the device tier, each on those below it, on two devices that act as the test says.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "core/clock.h"
#include "edit_block.h"
#include "pager_parts.h"

namespace vmem::pager::test {

// Answer only questions about health and memory, unless the test permits more.
class FakeDevices : public device::Devices {
 public:
  const char* name() const override { return "fake"; }
  explicit FakeDevices(size_t devices = 2) : info_(devices) {
    for (size_t d = 0; d < devices; ++d) {
      info_[d] = {static_cast<int>(d), "", "", -1, 0, std::vector(devices, device::Link::nvlink)};
      info_[d].links[d] = device::Link::self;
    }
  }
  int count() const override { return static_cast<int>(info_.size()); }
  const device::Info& info(int d) const override { return info_[static_cast<size_t>(d)]; }
  core::Status memory(int, device::Memory* out) override {
    ++asked_memory;
    *out = {free, total, 0};
    return {};
  }
  core::Status health(int d) override { return lost == d ? core::error(EIO, "as the test wants it") : core::Status(); }
  core::Status probe(int d) override {
    ++probes;
    return health(d);
  }
  static constexpr uint64_t kMiB = uint64_t{1} << 20;
  uint64_t free = 100 * kMiB, total = 100 * kMiB;
  int lost = -1;
  bool streams = false;  // stream calls are allowed
  bool reached = false;  // streams have reached all recorded events
  int record_error = 0;
  size_t ordered = 0;                   // how often a stream was ordered after a copy
  bool transitions = false;             // blocks may be moved
  static constexpr uint8_t kByte = 90;  // every byte of a block on a device
  std::atomic<size_t> copied = 0;       // copies from the devices
  int unmap_error = 0, migrate_error = 0, prepare_error = 0, copy_error = 0;
  struct Came {
    uintptr_t block;
    size_t size;  // bytes
    bool part, after;
    friend bool operator==(const Came&, const Came&) = default;
  };
  std::vector<Came> came_in;                      // copies to the devices
  std::atomic<size_t> prepared = 0, punched = 0;  // blocks
  std::atomic<size_t> waits = 0;                  // for copies
  std::atomic<size_t> polled = 0;                 // events of streams
  std::atomic<size_t> migrated = 0;               // ranges, or attempts
  std::function<void(int to)> while_migrating;
  std::function<void()> while_preparing, while_waiting;
  std::vector<uint64_t> came;  // the first words that copies brought to the devices
  size_t asked_memory = 0, probes = 0, pinned = 0;

  core::Status reserve(size_t, size_t, int, void**) override { return no(); }
  core::Status release(void*) override { return no(); }
  core::Status populate(std::span<const device::Range> ranges, int, bool*) override {
    if (prepare_error != 0) return core::error(prepare_error, "as the test wants it");
    prepared += ranges.size();
    if (while_preparing) while_preparing();
    return moved(-1);
  }
  core::Status copy_in(int d, std::span<const device::Copy> copies, device::Ticket* done) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // several workers copy
    if (copy_error != 0) return core::error(copy_error, "as the test wants it");
    for (const device::Copy& copy : copies)
      came_in.push_back({copy.block, copy.size, copy.part, copy.after != nullptr});
    for (const device::Copy& copy : copies)
      came.push_back(copy.frame != nullptr ? *static_cast<const uint64_t*>(copy.frame) : 0);
    if (streams) *done = std::make_shared<device::Event>();
    return moved(d);
  }
  core::Status copy_out(int d, std::span<const device::Copy> copies, device::Ticket*) override {
    for (const device::Copy& copy : copies) memset(copy.frame, kByte, copy.size);
    copied += copies.size();
    return moved(d);
  }
  core::Status open(std::span<const device::Range>, device::Access) override { return moved(-1); }
  core::Status write_protect(std::span<const device::Range>, device::Access) override { return moved(-1); }
  core::Status unmap(std::span<const device::Range>) override {
    return unmap_error != 0 ? core::error(unmap_error, "as the test wants it") : moved(-1);
  }
  core::Status punch(std::span<const device::Range> ranges) override {
    punched += ranges.size();
    return moved(-1);
  }
  core::Status rearm(std::span<const device::Range>) override { return no(); }
  core::Status migrate(std::span<const device::Range> ranges, int to, int, std::span<core::Status> each) override {
    migrated += ranges.size();
    if (while_migrating) while_migrating(to);
    for (size_t i = 0; i < ranges.size(); ++i)
      each[i] = migrate_error != 0 ? core::error(migrate_error, "as the test wants it") : moved(-1);
    return {};
  }
  core::Status advise(device::Range, device::Advice, int, bool) override { return no(); }
  core::Status host_resident_bytes(device::Range, uint64_t*) override { return no(); }
  core::Status check_stream(void*, int) override { return streams ? core::Status() : no(); }
  core::Status order_after(const device::Ticket&, void*, int) override {
    ++ordered;
    return streams ? core::Status() : no();
  }
  core::Status record(void*, int, device::Ticket* out) override {
    if (!streams) return no();
    if (record_error != 0) return core::error(record_error, "as the test wants it");
    *out = std::make_shared<device::Event>();
    return {};
  }
  core::Status poll(const device::Ticket&, bool* done) override {
    if (!streams) return no();
    ++polled;
    *done = reached;
    return lost >= 0 ? core::error(EIO, "as the test wants it") : core::Status();
  }
  core::Status wait(const device::Ticket&) override {
    ++waits;
    if (while_waiting) while_waiting();
    return moved(-1);
  }
  core::Status drain(int) override { return no(); }
  core::Status pin(void*, size_t) override {
    ++pinned;
    return {};
  }
  core::Status unpin(void*) override {
    --pinned;
    return {};
  }

 private:
  std::mutex mutex_;
  core::Status moved(int d) { return !transitions ? no() : d >= 0 ? health(d) : core::Status(); }
  static core::Status no() {
    ADD_FAILURE() << "a call that is none of its business";
    return core::error(EIO, "none of its business");
  }
  std::vector<device::Info> info_;
};

struct WithDevices {
  explicit WithDevices(std::unique_ptr<FakeDevices> its) : devices_(std::move(its)) {}
  std::unique_ptr<FakeDevices> devices_;
  FakeDevices& devices = *devices_;
};

class DeviceParts : protected WithDevices, public PagerParts {
 protected:
  static constexpr size_t kUnit = device::kUnit;

  explicit DeviceParts(std::unique_ptr<FakeDevices> its_devices = std::make_unique<FakeDevices>(),
                       std::unique_ptr<FakeTrap> its_trap = std::make_unique<FakeTrap>(), Config config = {})
      : WithDevices(std::move(its_devices)), PagerParts(std::move(its_trap), devices_.get(), std::move(config)) {}
  // A region with blocks of 2 MiB, which may be on devices.
  Region& device_region(size_t count, size_t block_size = kUnit) {
    Region& r = region(count, Backing::anonymous, block_size);
    core::BigLock lock(map.mutex());
    r.gpu = true;
    ++staging.of(r.block_size).regions;
    return r;
  }
  // Puts an unpopulated block on a device in use, as after a promotion; remove() undoes that.
  void place(Region& r, core::BlockIndex b, int d) VMEM_LOCKED {
    const auto pool = static_cast<uint8_t>(kDevicePools + d);
    ASSERT_TRUE(map.reserve_block());
    map.new_entry(r, b, nullptr, pool);
    change(r.table, b, core::State::unpopulated, core::State::promoting);
    edit(r.table, b).device = static_cast<uint8_t>(d);
    metadata_charges.charge(r);
    gpus[static_cast<size_t>(d)].budget.charge(r.block_size);
    change(r.table, b, core::State::promoting, core::State::on_device);
    map.admit(r, b, map.nonresident_age().shadow());
  }
  // Puts block 0 on device 0, with changes.
  void place_changed(Region& r) {
    devices.transitions = true;
    ASSERT_TRUE(gpus.use(0).ok());
    core::BigLock lock(map.mutex());
    place(r, 0, 0);
    edit(r.table, 0).flags |= core::kDirty;
  }
  void remove(Region& r, core::BlockIndex b) VMEM_LOCKED {
    gpus[r.table[b].device].budget.credit(r.block_size);
    change(r.table, b, core::State::on_device, core::State::demoting);
    map.free_entry(b, r);
    change(r.table, b, core::State::demoting, core::State::unpopulated);
    metadata_charges.charge(r);
  }
  // Sets a budget that is large enough for staging frames, and makes some for the region.
  void supply_frames(const Region& r) {
    uint64_t mark = 0;
    {
      core::BigLock lock(map.mutex());
      budget.set(uint64_t{80} << 20);
      reserve.follow_budget();
      mark = clock.look(now_ns());
    }
    ASSERT_TRUE(staging_allocator.want(r, mark).ok());
  }
  // Leases at the host.
  void lease(Region& r, core::BlockIndex b, unsigned access) {
    core::BigLock lock(map.mutex());
    ASSERT_TRUE(lease_manager.grant({&r, b, b}, access, VMEM_HOST, nullptr).ok());
  }
  void end_lease(Region& r, core::BlockIndex b, unsigned access) {
    core::BigLock lock(map.mutex());
    lease_manager.take_back({&r, b, b}, access, VMEM_HOST, nullptr);
  }
  void TearDown() override {
    {
      core::BigLock lock(map.mutex());
      EXPECT_EQ(cpu_mappings.check(), "");
      EXPECT_EQ(lease_manager.check(), "");
      EXPECT_EQ(releases.check(), "");
      EXPECT_EQ(gpus.check(), "");
    }
    PagerParts::TearDown();
  }
  std::optional<uint8_t> short_of_staging(uint8_t first) override { return staging_allocator.is_short(first); }

  DeviceSet& gpus = ctx.device_set;
  DeviceQueues& queues = ctx.queues;
  LeaseManager& lease_manager = leases_.lease_manager;
  StreamReleases& releases = leases_.releases;
  DeviceBlocks& blocks = tier.blocks;
  StagingAllocator& staging_allocator = tier.staging_allocator;
  ManagedHoles& holes = tier.managed_holes;
  PeerMigrator& migrator = tier.peer_migrator;
  Demoter& demoter = tier.demoter;
  CpuMapper& cpu_mapper = tier.cpu_mapper;
  DeviceReclaim& room = tier.device_reclaim;
  RangeFlush& range_flush = calls.range_flush;
};

// Adds the classes that promote blocks to device 0, whose budget holds four; the test is their
// worker.
class PromotionParts : public DeviceParts {
 protected:
  using DeviceParts::DeviceParts;
  void SetUp() override {
    tunables.device_budget = 4 * kUnit;
    devices.transitions = true;
    ASSERT_TRUE(gpus.use(0).ok());
    ASSERT_TRUE(gpus.use(1).ok());
  }
  Region& supplied(size_t count, size_t block_size = kUnit) {
    Region& r = device_region(count, block_size);
    supply_frames(r);
    return r;
  }
  // Requests the blocks on device 0; reads those that can be read.
  void request(Region& r, core::BlockIndex first, core::BlockIndex last,
               core::Urgency urgency = core::Urgency::prefetch, bool idle = true) {
    DeferredWork after;
    {
      core::BigLock lock(map.mutex());
      const void* owner = urgency == core::Urgency::acquire ? &r : nullptr;
      ASSERT_TRUE(promotion_requests.push_back({&r, first, last, 0, urgency, owner}));
      promoter.pump(after);
    }
    page_in.run(after);
    if (idle) engine.until_idle();
  }
  size_t ready() {
    core::BigLock lock(map.mutex());
    return gpus[0].ready.size();
  }
  // Runs as a worker does.
  void arrive() {
    Batch batch;
    {
      core::BigLock lock(map.mutex());
      for (Transition* m : gpus[0].ready) batch.push_back(m);
      gpus[0].ready.clear();
    }
    copy_in.run(batch, 0);
  }
  void bring_with(Region& r, core::BlockIndex b, uint64_t value) {
    if (!buffers_) {
      core::BigLock lock(map.mutex());
      buffers_ = frames.want_bounce(r.block_size, 2 * r.block_size, 2 * r.block_size).ok();
    }
    bring(r, b);
    put(r, b, value);
  }
  void put_away(Region& r, core::BlockIndex b, uint64_t value) {
    bring_with(r, b, value);
    evict(r, b);
  }
  // Removes a block that is on a device.
  void take_away(Region& r, core::BlockIndex b) {
    core::BigLock lock(map.mutex());
    edit(r.table, b).flags = 0;
    if (r.table[b].extent) space.release(r.table[b].extent);
    edit(r.table, b).extent = {};
    remove(r, b);
  }
  uint64_t charged(size_t d = 0) {
    core::BigLock lock(map.mutex());
    return gpus[d].budget.charged();
  }

  ReclaimRequests& evictions = host.reclaim_requests;
  PooledList<PromotionRequest>& promotion_requests = queues.promotion_requests;
  PooledList<DemotionRequest>& demotion_requests = queues.demotion_requests;
  Promoter& promoter = tier.promoter;
  PipelinedCopy& pipelined_copy = tier.pipelined_copy;
  CopyIn& copy_in = tier.copy_in;

 private:
  bool buffers_ = false;
};

}  // namespace vmem::pager::test
