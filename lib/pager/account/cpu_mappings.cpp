#include "pager/account/cpu_mappings.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/break.h"
#include "core/fatal.h"
#include "core/log.h"

namespace vmem::pager {

CpuFault* CpuMappings::find(const Region& r, BlockIndex b) {
  const auto it = std::find_if(accesses_.begin(), accesses_.end(),
                               [&](const CpuFault& a) { return a.region == &r && a.block == b; });
  return it == accesses_.end() ? nullptr : &*it;
}

// Wakes the waiting threads, which make their accesses again.
void CpuMappings::answered(Region& r, BlockIndex b) {
  r.table.answer_faults(b);
  trap_.wake(r.address(b), r.block_size).ignore();
}

bool CpuMappings::ask(Region& r, BlockIndex b, uint64_t now_ns, const Since& failed) {
  Frame& frame = frame_table_[r.table[b].aux];
  if (frame.dev.asked) return false;
  CpuFault access{&r, b, now_ns, waits_.look(now_ns)};
  if (failed.since_ns != 0) access = {&r, b, failed.since_ns, failed.mark, now_ns + kTryAgain};
  access.loads = true;
  if (!accesses_.push_back(access)) {
    answered(r, b);  // the access is reported again
    return false;
  }
  frame.dev.asked = true;
  return true;
}

CpuMappings::iterator CpuMappings::begun(iterator which) {
  frame_table_[which->region->table[which->block].aux].dev.asked = false;
  return accesses_.erase(which);
}

bool CpuMappings::met(Region& r, BlockIndex b, const trap::Fault& fault, uint64_t now_ns) {
  const Block& block = r.table[b];
  Frame& frame = frame_table_[block.aux];
  if (frame.dev.stale && fault.kind == trap::FaultKind::write_protect) {
    trap_.unprotect(r.address(b), r.block_size).ignore();
    return false;
  }
  // Or the program dropped a page of the copy itself (madvise). If the block is stale, only the
  // CPU has its bytes, and the page is zeros now; fill_zero() fails if the page is there. If not,
  // the device has its bytes.
  const bool missing = frame.dev.cpu_mapped && fault.kind != trap::FaultKind::write_protect;
  if (missing && frame.dev.stale) trap_.fill_zero(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
  const bool late = missing && (frame.dev.stale || frame.dev.missed < kReportedLate);
  if (late) ++frame.dev.missed;
  if (!split_ || frame.dev.answers_sigbus || late) {
    // The access met the trap before the block was made over it, or before the copy was shown.
    // It has been woken since, or is woken here.
    trap_.wake(reinterpret_cast<void*>(fault.address), core::kPage).ignore();
    return false;
  }
  if ((block.flags & core::kFaultPending) == 0) core::add(counters_.faults);
  r.table.mark(b, core::kFaultPending);
  const bool load = fault.kind == trap::FaultKind::read, first = !frame.dev.asked;
  if (!load) r.table.mark(b, core::kStorePending);
  const bool fresh = ask(r, b, now_ns);
  CpuFault* const access = find(r, b);
  if (access == nullptr) return fresh;
  access->loads = load || (access->loads && !first);
  if (frame.dev.apart) return fresh;  // the access is reported again
  const uintptr_t page = core::round_down(fault.address, core::kPage);
  if (load && access->load_at == 0) access->load_at = page;
  auto& stores = access->stores;
  if (!load && !stores.full() && std::find(stores.begin(), stores.end(), page) == stores.end()) stores.push_back(page);
  return fresh;
}

bool CpuMappings::answer(Region& r, BlockIndex b, uint64_t now_ns, const Since& failed) {
  const Block& block = r.table[b];
  if (frame_table_[block.aux].dev.stale) {  // accesses that met its protection while it was copied go on
    r.table.answer_faults(b);
    trap_.unprotect(r.address(b), r.block_size).ignore();
    return ask(r, b, now_ns, failed);  // queued until the block has left
  }
  if ((block.flags & core::kFaultPending) == 0) return false;
  if (!split_) {
    answered(r, b);
    return false;
  }
  const bool fresh = ask(r, b, now_ns, failed);
  // The page of a store that came while the block moved is not known yet: it is reported again.
  if ((block.flags & core::kStorePending) != 0) trap_.wake(r.address(b), r.block_size).ignore();
  return fresh;
}

// Whether to give up: tries keep failing, or there is no memory and nothing under way will bring
// any. A stale block is in place, so no access waits for it; it is tried until it leaves.
bool CpuMappings::over(const CpuFault& access) const {
  const Frame& frame = frame_table_[access.region->table[access.block].aux];
  return !access.starved && !frame.dev.stale && (access.gives_up || waits_.hopeless(access.mark));
}

// The order of these questions matters.
CpuMappings::Next CpuMappings::next(CpuFault& access, const Around& around) {
  Region& r = *access.region;
  const BlockIndex b = access.block;
  const Block& block = r.table[b];
  const uint64_t now = around.now_ns;
  if (!r.dying && (block.state == State::promoting || block.state == State::demoting)) return Next::wait;
  if (r.dying || block.state != State::on_device || !frame_table_[block.aux].dev.asked) return Next::erase;
  Frame& frame = frame_table_[block.aux];
  if (frame.dev.apart) {
    if (now < access.not_before) return Next::wait;
    if (!unrefuse(r, b)) {
      access.not_before = now + kTryAgain;
      return Next::wait;
    }
    answered(r, b);  // accesses that came since begin to wait
  }
  if (!around.lost && around.lent) {
    access.lent_ns += access.looked_ns == 0 ? 0 : std::min(now - access.looked_ns, kLookedAt);
    access.looked_ns = now;
    return access.lent_ns >= around.lent_most_ns && !frame.dev.answers_sigbus && !frame.dev.cpu_mapped
               ? Next::refuse_lent
               : Next::wait;
  }
  if (!frame.dev.answers_sigbus) access.starved = false;  // a transition took SIGBUS back, and the wait goes on
  if (!access.starved && (frame.dev.answers_sigbus || frame.dev.apart) &&
      (now < access.not_before || !unrefuse(r, b))) {
    if (now >= access.not_before) access.not_before = now + kTryAgain;
    return Next::wait;
  }
  if (frame.dev.cpu_mapped && !frame.dev.stale && !around.lost && frame.dev.missed == kReportedLate &&
      (block.flags & core::kFaultPending) != 0)
    return around.may_hide ? Next::hide : Next::wait;  // pages of the copy are gone
  if (!frame.dev.stale && !access.starved && (block.flags & core::kFaultPending) == 0) {
    frame.dev.asked = false;
    return Next::erase;
  }
  if (now < access.not_before || (around.leased && (frame.dev.stale || around.elsewhere))) return Next::wait;
  const bool store = (block.flags & core::kStorePending) != 0;
  const bool no_room = around.leased && store && !around.room;
  const bool answers = around.leased || (around.shows && !store && !frame.dev.stale && !around.lost);
  if (frame.dev.cpu_mapped && answers) {
    if (no_room) {
      if (!around.may_hide || !waits_.hopeless(access.mark)) return Next::wait;
      access.gives_up = true;  // it cannot be refused while a copy is shown
      return Next::hide;
    }
    if (store) return Next::change;
    answered(r, b);
    return Next::again;
  }
  access.gives_up = access.gives_up && no_room;
  const bool ends = over(access);
  if (ends && no_room && (access.gives_up || !access.loads)) return Next::refuse_store;
  if (ends && access.not_before != 0 && frame.dev.cpu_mapped && !around.lost)
    return around.may_hide ? Next::hide : Next::wait;                 // it cannot be refused while a copy is shown
  const bool shows = !no_room || (access.loads && !access.gives_up);  // stores alone have no use for a copy
  if (!shows || (ends && access.not_before != 0)) return stays(access, now);
  const bool shown_unleased = around.shows && !store && !frame.dev.cpu_mapped && access.not_before == 0;
  return around.leased || shown_unleased ? Next::show : Next::move;
}

CpuMappings::Next CpuMappings::stays(CpuFault& access, uint64_t now_ns) const {
  if (over(access)) return Next::refuse;
  if (access.starved) access.not_before = now_ns + kAskAgain;
  return Next::wait;
}

void CpuMappings::refuse(CpuFault& access, Next why, uint64_t now_ns) {
  const Frame& frame = frame_table_[access.region->table[access.block].aux];
  fail(access, why == Next::refuse_store);
  if (why == Next::refuse_lent) return;
  access.starved = frame.dev.answers_sigbus;
  access.not_before = now_ns + (why == Next::refuse_store && frame.dev.apart ? kTryAgain : kAskAgain);
}

void CpuMappings::fail(CpuFault& access, bool stores) {
  Region& r = *access.region;
  const Block& block = r.table[access.block];
  Frame& frame = frame_table_[block.aux];
  if (frame.dev.answers_sigbus || !unrefuse(r, access.block)) return;
  access.gives_up = false;
  // A trap that reports blocks instead of pages refuses whole blocks.
  if (stores && !trap_.caps().one_report && !access.stores.empty() && !access.stores.full()) {
    frame.dev.apart = true;
    for (const uintptr_t page : access.stores)
      frame.dev.apart &= trap_.fail(reinterpret_cast<void*>(page), core::kPage).ok();
    if (frame.dev.apart) {
      answered(r, access.block);  // loads are reported again
      return;
    }
    frame.dev.apart = true;
    if (!unrefuse(r, access.block)) return;
  }
  frame.dev.answers_sigbus = trap_.fail(r.address(access.block), r.block_size).ok();
  if (frame.dev.answers_sigbus) r.table.answer_faults(access.block);
}

bool CpuMappings::unrefuse(Region& r, BlockIndex b) {
  const auto unfail = [this](void* at, size_t size) {
    const Status s = trap_.unfail(at, size);
    if (!s.ok()) VMEM_LOG_ONCE(core::Level::error, "%.*s", static_cast<int>(s.text().size()), s.text().data());
    return s.ok() || core::broken("unfail_retry");
  };
  Frame& frame = frame_table_[r.table[b].aux];
  if (frame.dev.answers_sigbus && unfail(r.address(b), r.block_size)) frame.dev.answers_sigbus = false;
  if (frame.dev.answers_sigbus || !frame.dev.apart) return !frame.dev.answers_sigbus;
  CpuFault* const access = find(r, b);
  if (access != nullptr)  // the entry stays until this is done
    access->stores.erase_if([&](uintptr_t page) { return unfail(reinterpret_cast<void*>(page), core::kPage); });
  frame.dev.apart = access != nullptr && !access->stores.empty();
  return !frame.dev.apart;
}

bool CpuMappings::expect() {
  if (!shown_.reserve(shown_.size() + expected_ + 1)) return false;
  ++expected_;
  return true;
}

void CpuMappings::show(Region& r, BlockIndex b, uint64_t now_ns) {
  --expected_;
  if (!shown_.push_back({&r, b, now_ns})) core::fatal("there is no room for a copy that was expected");
  Frame& frame = frame_table_[r.table[b].aux];
  frame.dev.cpu_mapped = true;
  frame.dev.missed = 0;
  answered(r, b);  // a store that met the protection before is reported again
}

void CpuMappings::change(Region& r, BlockIndex b) {
  frame_table_[r.table[b].aux].dev.stale = true;
  ++r.counts.device_stale;
  device_stale_bytes_ += r.block_size;
  trap_.unprotect(r.address(b), r.block_size).ignore();
  r.table.answer_faults(b);
}

void CpuMappings::forget(Region& r, BlockIndex b) {
  Frame& frame = frame_table_[r.table[b].aux];
  if (!frame.dev.cpu_mapped) return;
  frame.dev.cpu_mapped = false;
  if (std::exchange(frame.dev.stale, false)) {
    --r.counts.device_stale;
    device_stale_bytes_ -= r.block_size;
  }
  shown_.erase_if([&](const CpuMapping& s) { return s.region == &r && s.block == b; });
}

void CpuMappings::forget(const Region& r) {
  accesses_.erase_if([&](const CpuFault& a) { return a.region == &r; });
  shown_.erase_if([&](const CpuMapping& s) { return s.region == &r; });
}

std::string CpuMappings::check() const {
  size_t shown = 0;
  uint64_t device_stale_bytes = 0;
  std::map<const Region*, uint64_t> stale;
  for (FrameId id = 0; id < frame_table_.size(); ++id) {
    const Frame& frame = frame_table_[id];
    if (frame.region == nullptr || frame.is_copy) continue;
    const Region& r = *frame.region;
    const auto is_this = [&](const auto& entry) { return entry.region == &r && entry.block == frame.block; };
    const auto wrong = [&](const char* what) {
      return core::strprintf("%s: region %llu, block %llu", what, static_cast<unsigned long long>(r.id),
                             static_cast<unsigned long long>(frame.block));
    };
    const bool on_device = r.table[frame.block].state == State::on_device;
    if (on_device && frame.dev.asked && std::none_of(accesses_.begin(), accesses_.end(), is_this))
      return wrong("a block is marked as requested, and no access waits for it");
    if (on_device && (frame.dev.answers_sigbus || frame.dev.apart) && !frame.dev.asked)
      return wrong("accesses get SIGBUS, and no request is left to undo that");
    if (frame.dev.cpu_mapped != (std::count_if(shown_.begin(), shown_.end(), is_this) == 1))
      return wrong("the mark of a block mapped for the CPU and the list of such blocks disagree");
    shown += frame.dev.cpu_mapped ? 1 : 0;
    if (!frame.dev.stale) continue;
    if (!frame.dev.cpu_mapped) return wrong("a block is stale, and is not mapped for the CPU");
    device_stale_bytes += r.block_size;
    if (++stale[&r] > r.counts.device_stale) return wrong("more blocks are stale than their region says");
  }
  for (const auto& [region, count] : stale)
    if (count != region->counts.device_stale) return "fewer blocks are stale than their region says";
  if (shown != shown_.size() || device_stale_bytes != device_stale_bytes_) {
    return core::strprintf("%zu blocks are mapped for the CPU, %zu are listed; stale_bytes %llu, counted %llu", shown,
                           shown_.size(), static_cast<unsigned long long>(device_stale_bytes_),
                           static_cast<unsigned long long>(device_stale_bytes));
  }
  return "";
}

}  // namespace vmem::pager
