// A device is lost: with setting debug, what libvmem knew then, so that the lease that was missing can be found.
#include <algorithm>
#include <cerrno>

#include "core/log.h"
#include "pager/pager.h"

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
  void add(BlockIndex b, const std::string& words) {
    if (words == words_ && b == last_ + 1) {
      last_ = b;
      return;
    }
    end();
    words_ = words;
    first_ = last_ = b;
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
  std::string words_;
  BlockIndex first_ = 0, last_ = 0;
  size_t lines_ = 0;
};

std::string words_of(const std::vector<Lease>& leases) {
  std::string text;
  for (const Lease& l : leases) {
    const char* access = (l.access & VMEM_WRITE) == 0 ? "READ" : (l.access & VMEM_READ) == 0 ? "WRITE" : "READ|WRITE";
    if (!text.empty()) text += "; ";
    text += l.location < 0 ? std::string("host") : core::strprintf("device %d, stream %p", l.location, l.stream);
    text += core::strprintf(", %s, ", access);
    text += l.count != 0 ? core::strprintf("acquired %u times", l.count) : "released, but its stream has not got there";
  }
  return text;
}

std::string place_of(const Region& r, const core::Block& block) {
  switch (block.state) {
    case State::untouched:
      return r.from_file() ? "in its file only" : "never written";
    case State::stored:
      return "on the SSD";
    case State::failed:
      return "nowhere: its bytes could not be had";
    case State::entering:
    case State::leaving:
      return core::strprintf("moving (%s, device %u)", core::state_name(block.state), block.device);
    case State::on_device:
      return core::strprintf("on device %u", block.device);
    default:
      return "in host memory";
  }
}

}  // namespace

// Locked. A write of the block failed, and may have left a part of its bytes where the old ones were: no digest taken
// before proves anything now, not even when the program restores what was there. Until a write of all of it succeeds.
void Pager::mark_unknown(Region& r, BlockIndex b) {
  core::Block& block = r.table[b];
  if ((block.flags & core::kUnknown) == 0) ++unknown_blocks_;
  block.flags |= core::kUnknown;
  if (r.gpu) block.flags |= core::kDirty;
  block.flags &= static_cast<uint16_t>(~(core::kDigest | core::kProtected));
}

// Locked. The block was written, or its contents are of no interest any more.
void Pager::clear_unknown(core::Block& block) {
  if ((block.flags & core::kUnknown) == 0) return;
  --unknown_blocks_;
  block.flags &= static_cast<uint16_t>(~core::kUnknown);
}

// Locked. Some call failed: if it is because device d is lost, that is said, once. The books say how things stood when
// libvmem noticed; between the illegal touch and now blocks may have moved.
void Pager::saw_loss(int d) {
  Gpu& g = gpus_[static_cast<size_t>(d)];
  if (g.lost || g.budget == 0) return;
  const Status s = devices_->health(d);
  if (s.ok()) return;
  g.lost = true;
  if (!core::debug()) return;
  core::log(Level::error, "debug: %.*s; %zu regions, %s on the device, %s leased there",
            static_cast<int>(s.text().size()), s.text().data(), regions_.size(), core::human_bytes(g.used).c_str(),
            core::human_bytes(g.leased).c_str());
  for (const auto& [base, r] : regions_) {
    if (!r->gpu) continue;
    core::log(Level::error, "debug: region %s%llu at %p, %s", r->name.empty() ? "" : (r->name + " #").c_str(),
              static_cast<unsigned long long>(r->id), static_cast<void*>(r->base), core::human_bytes(r->size).c_str());
    {
      std::vector<BlockIndex> blocks;
      for (const auto& [b, leases] : r->leases) blocks.push_back(b);
      std::sort(blocks.begin(), blocks.end());
      Runs leased(*r, "leased");
      for (BlockIndex b : blocks) leased.add(b, words_of(r->leases.find(b)->second));
      if (blocks.empty()) core::log(Level::error, "debug:   no lease");
    }
    Runs absent(*r, "absent");
    for (BlockIndex b = 0; b < r->blocks; ++b) {
      const core::Block& block = r->table[b];
      const bool here = block.state == State::on_device && block.device == d;
      absent.add(b, here ? "" : place_of(*r, block));
    }
  }
  core::log(Level::error,
            "debug: a kernel that touches an absent range has no lease for it: vmem_acquire() it before the launch, on "
            "the same stream; the kernel's log (Xid 31) names the address");
}

void Pager::look_for_loss() {
  for (size_t d = 0; d < gpus_.size(); ++d) {
    {
      Lock lock(mutex_);
      if (gpus_[d].budget == 0 || gpus_[d].lost) continue;
    }
    device::Ticket ticket;
    const Status s = devices_->record(nullptr, static_cast<int>(d), &ticket);
    Lock lock(mutex_);
    if (!s.ok()) saw_loss(static_cast<int>(d));
  }
}

}  // namespace vmem::pager
