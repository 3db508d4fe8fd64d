// What is lost, and what of it can be saved. A device is lost: with setting debug, what libvmem knew then, so that the
// lease that was missing can be found.
#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "core/log.h"
#include "core/step.h"
#include "pager/clock.h"
#include "pager/pager.h"
#include "store/digest.h"

namespace vmem::pager {

using core::BlockIndex;
using core::Level;
using core::State;
using core::Status;

namespace {

constexpr size_t kMaxLines = 64;  // of ranges, for each region and kind

// Lines about runs of blocks with the same words; neighbours are one line.
class Runs {
 public:
  Runs(const Region& r, const char* what) : r_(r), what_(what) {}
  ~Runs() {
    end();
    if (lines_ > kMaxLines) core::log(Level::error, "debug:   .. and %zu more ranges %s", lines_ - kMaxLines, what_);
  }
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;
  // Blocks come in order; "" for one that is of no interest.
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
    text += l.count != 0 ? core::textf("acquired %u times", l.count) : "released, but its stream has not got there";
  }
  return text;
}

core::OwnString place_of(const Region& r, const core::Block& block) {
  switch (block.state) {
    case State::untouched:
      return r.from_file() ? "in its file only" : "never written";
    case State::stored:
      return "on the SSD";
    case State::failed:
      return "nowhere: its bytes could not be had";
    case State::entering:
    case State::leaving:
      return core::textf("moving (%s, device %u)", core::state_name(block.state), block.device);
    case State::on_device:
      return core::textf("on device %u", block.device);
    default:
      return "in host memory";
  }
}

}  // namespace

// Locked. Some call failed, and the device was asked then: if it is lost, that is said, once. The books say how things
// stood when libvmem noticed; between the illegal touch and now blocks may have moved.
void Pager::saw_loss(int d, const Status& s) try {
  Gpu& g = gpus_[static_cast<size_t>(d)];
  if (s.ok() || g.lost || !g.budget.begun()) return;
  g.lost = g.rescue = true;
  gpu_work_.notify_one();
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

// Locked on entry and on return. What host memory has of a lost device's blocks, in place for the CPU or in a staging
// frame, may be all there is: it is the block from now on. False: there is none.
bool Pager::rescue(Lock& lock) {
  Batch batch;
  for (size_t d = 0; d < gpus_.size() && batch.empty(); ++d) {
    if (!std::exchange(gpus_[d].rescue, false)) continue;
    for (const auto& [base, r] : map_.regions()) {
      if (!r->gpu || r->dying || r->lost) continue;
      for (BlockIndex b = r->table.next_touched(0); b < r->blocks && !batch.full(); b = r->table.next_touched(b + 1)) {
        const core::Block& block = r->table[b];
        if (block.state != State::on_device || block.device != d) continue;
        if (!map_.residents()[block.aux].shown && !map_.copies().has(block.aux)) continue;
        if (Move* m = begin_leave(*r, b, Leave::host)) {
          batch.push_back(m);
        } else {
          gpus_[d].rescue = true;  // no memory: later
        }
      }
    }
    if (batch.full()) gpus_[d].rescue = true;  // there may be more
  }
  if (batch.empty()) return false;
  leave_batch(lock, batch.all());
  return true;
}

void Pager::look_for_loss() {
  for (size_t d = 0; d < device_count(); ++d) {
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

}  // namespace vmem::pager
