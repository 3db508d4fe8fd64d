#include "pager/account/device_set.h"

#include <cerrno>
#include <new>

#include "core/clock.h"
#include "core/log.h"
#include "core/signals.h"

namespace vmem::pager {

using core::Level;

namespace {

constexpr size_t kMaxLines = 64;                // for each region and kind of range
constexpr uint64_t kSayEvery = 10'000'000'000;  // ns between lines that others have memory of a device

// Logs runs of blocks: neighbours with the same words are one line.
class Runs {
 public:
  Runs(const Region& r, const char* what) : r_(r), what_(what) {}
  ~Runs() {
    end();
    if (lines_ > kMaxLines) core::log(Level::error, "debug:   .. and %zu more ranges %s", lines_ - kMaxLines, what_);
  }
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;
  // Call in the order of the blocks. Blocks with the words "" are left out.
  void add(BlockIndex first, BlockIndex last, const core::OwnString& words) {
    if (words == words_ && first == last_ + 1) {
      last_ = last;
      return;
    }
    end();
    words_ = words;
    first_ = first;
    last_ = last;
  }

 private:
  void end() {
    if (words_.empty() || ++lines_ > kMaxLines) return;
    core::log(Level::error, "debug:   %s: %p, offset %s, %s: %s", what_, static_cast<void*>(r_.address(first_)),
              core::human_bytes(first_ * r_.block_size).c_str(),
              core::human_bytes((last_ - first_ + 1) * r_.block_size).c_str(), words_.c_str());
  }
  const Region& r_;
  const char* what_;
  core::OwnString words_;
  BlockIndex first_ = 0, last_ = 0;
  size_t lines_ = 0;
};

core::OwnString words_of(const Leases& leases) {
  core::OwnString text;
  for (const Lease& l : leases) {
    const char* access = (l.access & VMEM_WRITE) == 0 ? "READ" : (l.access & VMEM_READ) == 0 ? "WRITE" : "READ|WRITE";
    if (!text.empty()) text += "; ";
    text += l.location < 0 ? core::OwnString("host") : core::textf("device %d, stream %p", l.location, l.stream);
    text += core::textf(", %s, ", access);
    text += l.count != 0 ? core::textf("acquired %u times", l.count)
                         : "released, but its stream has not reached the release";
  }
  return text;
}

core::OwnString place_of(const Region& r, const core::Block& block) {
  switch (block.state) {
    case State::unpopulated:
      return r.from_file() ? "in its file only" : "never written";
    case State::stored:
      return "on the SSD";
    case State::poisoned:
      return "nowhere: its bytes are not available";
    case State::promoting:
    case State::demoting:
      return core::textf("moving (%s, device %u)", core::state_name(block.state), block.device);
    case State::on_device:
      return core::textf("on device %u", block.device);
    default:
      return "in host memory";
  }
}

}  // namespace

Status holds_a_block(uint64_t device_budget, uint64_t block) {
  if (device_budget >= block) return {};
  return error(EINVAL, "device_budget %s holds no block of %s", core::human_bytes(device_budget).c_str(),
               core::human_bytes(block).c_str());
}

Status DeviceSet::use(int d) {
  if (Status s = devices_->health(d); !s.ok()) {
    Lock lock(map_.mutex());
    saw_loss(d, s);
    return s;
  }
  {
    Lock lock(map_.mutex());
    if (gpus_[static_cast<size_t>(d)].budget.begun()) return {};
  }
  device::Memory memory;
  {
    const core::SignalsBlocked blocked;  // the driver starts its threads
    if (Status s = devices_->memory(d, &memory); !s.ok()) return s;
  }
  Lock lock(map_.mutex());
  DeviceBudget& budget = gpus_[static_cast<size_t>(d)].budget;
  if (budget.begun()) return {};
  const uint64_t wanted = tunables_.device_budget != 0 ? tunables_.device_budget : memory.free / 5 * 4;
  if (Status s = holds_a_block(wanted, devices_->unit()); !s.ok()) return s;
  if (wanted > memory.free) {
    return error(ENOMEM, "device_budget %s is above what device %d has free, %s of %s; lower it",
                 core::human_bytes(wanted).c_str(), d, core::human_bytes(memory.free).c_str(),
                 core::human_bytes(memory.total).c_str());
  }
  budget.begin(wanted, devices_->unit());
  map_.resize_policies();
  return {};
}

Status DeviceSet::check_stream(int d, void* stream) {
  bool used = false;
  {
    Lock lock(map_.mutex());
    used = gpus_[static_cast<size_t>(d)].budget.begun();
  }
  if (Status s = used ? Status() : use(d); !s.ok()) return s;
  Status s = devices_->check_stream(stream, d);  // also asks whether the device is well
  if (s.ok()) return s;
  const Status health = devices_->health(d);
  Lock lock(map_.mutex());
  saw_loss(d, health);
  return s;
}

uint64_t DeviceSet::kept(int d) {
  device::Memory memory = {};
  return devices_->memory(d, &memory).ok() ? memory.kept : 0;
}

void DeviceSet::follow_down(int d, uint64_t kept) {
  DeviceState& g = gpus_[static_cast<size_t>(d)];
  if (!g.budget.follow_down(kept)) return;
  work_.notify_one();  // a worker has to look whether there is more
  map_.resize_policies();
  const uint64_t now = now_ns();
  if (g.said_short_ns != 0 && now < g.said_short_ns + kSayEvery) return;
  g.said_short_ns = now;
  core::log(core::Level::warning,
            "other programs use memory of device %d: of its budget of %s, blocks may use %s for now", d,
            core::human_bytes(g.budget.budget()).c_str(), core::human_bytes(g.budget.limit()).c_str());
}

// With setting debug, logs regions, leases and blocks, so that the missing lease can be found. That
// is the state when the library noticed the loss: blocks may have moved since the illegal access.
void DeviceSet::saw_loss(int d, const Status& s) try {
  DeviceState& g = gpus_[static_cast<size_t>(d)];
  if (s.ok() || g.lost || !g.budget.begun()) return;
  g.lost = g.rescue = true;
  work_.notify_one();
  if (!core::debug()) return;
  core::log(Level::error, "debug: %.*s; %zu regions, %s on the device, %s leased there",
            static_cast<int>(s.text().size()), s.text().data(), map_.regions().size(),
            core::human_bytes(g.budget.charged()).c_str(), core::human_bytes(g.budget.leased()).c_str());
  for (const auto& [base, r] : map_.regions()) {
    if (!r->gpu) continue;
    core::log(Level::error, "debug: region %s%llu at %p, %s", r->name.empty() ? "" : (r->name + " #").c_str(),
              static_cast<unsigned long long>(r->id), static_cast<void*>(r->base), core::human_bytes(r->size).c_str());
    {
      Runs leased(*r, "leased");
      r->leases.visit(0, r->blocks - 1, [&](BlockIndex first, BlockIndex last, const Leases& leases) {
        leased.add(first, last, words_of(leases));
        return true;
      });
      if (r->leases.empty()) core::log(Level::error, "debug:   no lease");
    }
    Runs absent(*r, "not present");
    for (BlockIndex b = 0; b < r->blocks; ++b) {
      const core::Block& block = r->table[b];
      const bool here = block.state == State::on_device && block.device == d;
      absent.add(b, b, here ? "" : place_of(*r, block));
    }
  }
  core::log(Level::error,
            "debug: a kernel that accesses a range that is not present has no lease for it: vmem_acquire() it before "
            "the launch, on the same stream; the kernel's log (Xid 31) names the address");
} catch (const std::bad_alloc&) {
  core::log(Level::error, "debug: no memory to say more");
}

void DeviceSet::look_for_loss() {
  for (size_t d = 0; d < size(); ++d) {
    {
      Lock lock(map_.mutex());
      if (!gpus_[d].budget.begun() || gpus_[d].lost) continue;
    }
    if (devices_->probe(static_cast<int>(d)).ok()) continue;
    const Status health = devices_->health(static_cast<int>(d));
    Lock lock(map_.mutex());
    saw_loss(static_cast<int>(d), health);
  }
}

std::string DeviceSet::check() {
  core::OwnVector<uint64_t> used(gpus_.size()), leased(gpus_.size());
  for (auto& [base, r] : map_.regions()) {
    if (!r->gpu) continue;
    for (BlockIndex b = r->table.next_populated(0); b < r->blocks; b = r->table.next_populated(b + 1)) {
      if (core::on_a_device(r->table[b].state)) used[r->table[b].device] += r->block_size;
    }
    r->leases.visit(0, r->blocks - 1,
                    [&, size = r->block_size](BlockIndex first, BlockIndex last, const Leases& leases) {
                      const int location = leases.front().location;
                      if (location >= 0) leased[static_cast<size_t>(location)] += (last - first + 1) * size;
                      return true;
                    });
  }
  for (size_t d = 0; d < gpus_.size(); ++d) {
    if (std::string s = gpus_[d].budget.check(used[d], leased[d]); !s.empty())
      return core::strprintf("device %zu: %s", d, s.c_str());
  }
  return "";
}

Status check_location(int location, size_t devices, bool allow_ssd) {
  if (location == VMEM_HOST || (allow_ssd && location == VMEM_SSD)) return {};
  if (location >= 0 && static_cast<size_t>(location) < devices) return {};
  if (location >= 0 && devices != 0) {
    return error(ENODEV, "there is no device %d: this process has %zu", location, devices);
  }
  if (location >= 0) {
    return error(ENODEV, "there is no device %d: no device tier is in use (setting device, or no GPU and driver)",
                 location);
  }
  return error(EINVAL, "location %d is not accepted here; give a device ordinal, VMEM_HOST%s", location,
               allow_ssd ? " or VMEM_SSD" : "");
}

}  // namespace vmem::pager
