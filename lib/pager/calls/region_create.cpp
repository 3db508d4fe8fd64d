#include "pager/calls/region_create.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/process/map_over.h"
#include "core/process/mappings.h"
#include "core/scope_guard.h"
#include "core/step.h"
#include "pager/calls/calls.h"

namespace vmem::pager {

using core::kHugePage;

namespace {

constexpr size_t kMaxRegion = size_t{1} << 46;
// For regions whose blocks adapt. A group of blocks makes a huge page.
constexpr size_t kAdaptingBlock = 64 << 10;
constexpr uint32_t kAdaptingGroup = kHugePage / kAdaptingBlock;

// Returns the largest block size that the library itself chooses.
size_t largest_chosen(int advice) {
  switch (advice) {
    case VMEM_ADVISE_RANDOM:
      return device::kUnit;
    case VMEM_ADVISE_SEQUENTIAL:
      return size_t{32} << 20;
    default:
      return size_t{8} << 20;
  }
}

Status no_memory_for_region(size_t size) {
  return error(ENOMEM, "no memory for the tables of a region of %s", core::human_bytes(size).c_str());
}

Status open_file(const RegionSpec& what, bool direct, Region* r, store::Engine& engine) {
  if (what.offset % core::kPage != 0) {
    return error(EINVAL, "offset %llu is not a multiple of %zu", static_cast<unsigned long long>(what.offset),
                 core::kPage);
  }
  constexpr uint64_t kEnd = INT64_MAX;  // of any file
  if (what.offset > kEnd || what.size > kEnd - what.offset) {
    return error(EINVAL, "offset %llu + size %zu is beyond the largest file, %llu bytes",
                 static_cast<unsigned long long>(what.offset), what.size, static_cast<unsigned long long>(kEnd));
  }
  if (Status s = store::open_mapped(what.path, what.backing == Backing::file_shared, direct, &r->source.file,
                                    what.offset, what.size, what.lock);
      !s.ok())
    return s;
  core::ScopeGuard close([r] { store::close_mapped(&r->source.file); });  // also on bad_alloc
  const uint64_t have = r->source.file.file.size;
  if (r->source.file.file.block_device && what.offset + what.size > have) {  // it cannot grow as a file does
    return error(EINVAL, "block device %s has %llu bytes, but offset %llu + size %zu needs %llu", what.path.c_str(),
                 static_cast<unsigned long long>(have), static_cast<unsigned long long>(what.offset), what.size,
                 static_cast<unsigned long long>(what.offset) + what.size);
  }
  if (Status s = engine.add_file(r->source.file.file.fd, &r->source.id); !s.ok()) return s;
  close.dismiss();
  r->source.present = true;
  r->source.sparse = store::may_have_holes(r->source.file);
  r->source.offset = what.offset;
  return {};
}

}  // namespace

RegionCreate::RegionCreate(PagerContext& ctx, Calls& calls) : ctx_(ctx), host_(calls.host), tier_(calls.tier) {}

void close_file(Region* r, store::Engine& engine) {
  if (!r->source.present) return;
  engine.remove_file(r->source.id);
  store::close_mapped(&r->source.file);
}

Status give_addresses_back(trap::Trap& trap, const Region& r, void* base) {
  constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (r.reserved && core::map_over(reinterpret_cast<uintptr_t>(base), r.span, PROT_NONE, kReservation, -1, 0) == 0)
    return {};
  return trap.unmap(base, r.span);
}

// Larger blocks move faster, smaller ones waste less. If blocks are requested ahead, sizes above 8
// MiB gain little, and each miss moves more. Larger blocks do gain while blocks come and go at the
// same time, and where zeros are made: that is worth it for sequential access. A chosen size leaves
// room for several blocks on a device and in the staging frames.
Status RegionCreate::device_block(const RegionSpec& what, size_t* out) {
  constexpr uint64_t kSeveral = 16, kMostRounding = 3;  // percent of the region
  *out = 0;
  if (ctx_.devices == nullptr || what.host_only) return {};
  if (what.says_size()) {
    *out = what.block_size;
    if (*out >= device::kUnit && *out <= ctx_.devices->largest_unit()) return {};
    const std::string least = core::human_bytes(device::kUnit), most = core::human_bytes(ctx_.devices->largest_unit());
    return error(EINVAL, "block_size %s: a region with a device tier (%s) has blocks of %s%s%s; add VMEM_HOST_ONLY",
                 core::human_bytes(*out).c_str(), ctx_.devices->name(), least.c_str(), least == most ? "" : " to ",
                 least == most ? "" : most.c_str());
  }
  *out = ctx_.devices->unit();
  if (!ctx_.config.auto_device_blocks) return {};
  Lock lock(ctx_.map.mutex());
  uint64_t budget = UINT64_MAX;
  for (int d = 0; d < ctx_.devices->count(); ++d) {
    const DeviceBudget& of = ctx_.device_set[static_cast<size_t>(d)].budget;
    budget = std::min(budget, of.begun()                         ? of.budget()
                              : ctx_.tunables.device_budget != 0 ? ctx_.tunables.device_budget
                                                                 : ctx_.devices->info(d).total_bytes / 5 * 4);
  }
  size_t block = std::min(largest_chosen(what.advice), ctx_.devices->largest_unit());
  for (; block > device::kUnit; block /= 2) {
    const uint64_t rounding = core::round_up(what.size, block) - what.size;
    StagingPool& pool = ctx_.staging.of(block);
    if (rounding <= what.size / 100 * kMostRounding && kSeveral * block <= budget &&
        kSeveral * block <= pool.growth.most() && ctx_.staging.can_serve(block))
      break;
  }
  // Blocks that are too large are better than no region.
  for (size_t larger = 2 * block; !ctx_.staging.can_serve(block) && larger <= ctx_.devices->largest_unit();
       larger *= 2) {
    if (larger <= budget && ctx_.staging.can_serve(larger)) block = larger;
  }
  *out = block;
  return {};
}

// If a limit of the process is the cause, the message names it instead of the step that failed.
Status RegionCreate::create(const RegionSpec& what, void** ptr) {
  RegionSpec one = what;
  if (Status s = device_block(what, &one.device_block); !s.ok()) return s;
  // One mark for all sizes: together they wait for memory no longer than one would.
  const uint64_t mark = [this] {
    Lock lock(ctx_.map.mutex());
    return ctx_.deadline.look(now_ns());
  }();
  Status s;
  for (;; one.device_block /= 2) {
    core::step("create.trying");
    try {
      s = make(one, ptr, mark);
    } catch (const std::bad_alloc&) {
      s = no_memory_for_region(what.size);
    }
    // If the program gave no size, try smaller blocks: they need less memory.
    const bool chosen = ctx_.config.auto_device_blocks && !what.says_size();
    if (s.code() != -ENOMEM || !chosen || one.device_block <= device::kUnit) break;
  }
  if (s.code() != -ENOMEM) return s;
  return core::name_limit(s, ("a region of " + core::human_bytes(what.size)).c_str());
}

struct RegionCreate::Shape {
  bool gpu = false;
  size_t block_size = 0, alignment = 0;
  uint64_t blocks = 0;
};

Status RegionCreate::shape(const RegionSpec& what, Shape* out) {
  if (what.size == 0) return error(EINVAL, "size is 0; give the bytes of the region");
  if (what.size > kMaxRegion) {
    return error(EINVAL, "size %zu is above the largest region, %s", what.size, core::human_bytes(kMaxRegion).c_str());
  }
  const bool gpu = what.device_block != 0;
  size_t block_size = gpu ? what.device_block : what.adapts ? kAdaptingBlock : what.block_size;
  while (!gpu && block_size / 2 >= what.size && block_size > core::kMinBlock) block_size /= 2;
  const bool chosen = gpu && !what.says_size();  // a program that gives an address cannot know it
  const size_t alignment = chosen ? kHugePage : std::max(kHugePage, std::min(block_size, core::kMaxBlock));
  if (what.address % alignment != 0) {
    return error(EINVAL, "address %#zx is not accepted; give a multiple of %s, or 0", size_t{what.address},
                 core::human_bytes(alignment).c_str());
  }
  if (what.fixed && (what.address == 0 || gpu)) {
    return error(
        EINVAL, "VMEM_FIXED: %s",
        gpu ? "a region with a device tier is where the driver has room; add VMEM_HOST_ONLY" : "no address is given");
  }
  *out = {gpu, block_size, alignment, core::round_up(what.size, block_size) / block_size};
  return {};
}

// Fills in what is known before anything is allocated.
Status RegionCreate::describe(const RegionSpec& what, const Shape& shape, Region& r) {
  r.size = what.size;
  r.span = shape.blocks * shape.block_size;
  r.block_size = shape.block_size;
  r.blocks = shape.blocks;
  r.backing = what.backing;
  r.codec = what.codec;
  r.checksum = what.checksum;
  const trap::Caps& caps = ctx_.trap.caps();
  r.gpu = shape.gpu;
  r.absent = caps.absent;
  r.reserved = what.fixed;
  if (what.fixed && caps.install)
    return error(EOPNOTSUPP, "VMEM_FIXED: trap %s chooses the addresses of its ranges itself", caps.name);
  if (caps.install && !r.gpu) {
    r.transfer = Transfer::install;
    r.probes = r.block_size >= kHugePage;
  } else if (caps.move && ctx_.config.allow_move && r.block_size >= kHugePage && !r.gpu) {
    r.transfer = Transfer::move;
    r.probes = true;
  } else {
    r.transfer = Transfer::copy;
    if (!caps.write_protect) {
      return error(ENOTSUP, "trap %s can neither move pages nor write-protect them; Linux 5.7 or later is needed",
                   caps.name);
    }
  }
  return {};
}

// Reserves memory so that as many blocks as fit the budget, at most kMostReserved, can move without
// asking for memory. Further blocks ask when they need it, and wait for others to leave if there is
// none. Drops the lock now and then.
bool RegionCreate::reserve_blocks(Lock& lock, Region& r) {
  constexpr size_t kMostReserved = 65536, kMoves = 128, kWaiting = 256;
  const uint64_t at_once = r.gpu ? r.blocks : std::min<uint64_t>(r.blocks, ctx_.budget.wanted() / r.block_size);
  while (ctx_.map.frame_table().size() < std::min<uint64_t>(ctx_.totals.reserved_blocks + at_once, kMostReserved)) {
    if (!ctx_.map.reserve_entries(ctx_.map.frame_table().size() + 1)) return false;
    lock.give_way();
  }
  if (!ctx_.frames.want_slots(r.block_size) || !ctx_.map.reserve_transition(kMoves) ||
      !host_.waits.queue().reserve(kWaiting) || !host_.readahead_queue.reserve(kWaiting) ||
      !host_.failed.reserve(kWaiting) || !ctx_.metadata_charges.reserve())
    return false;
  r.charge.reserved_blocks = at_once;
  ctx_.totals.reserved_blocks += at_once;
  ctx_.metadata_charges.count();
  return true;
}

// Gets the region's first buffers. Wakes reclaim if the budget has no room for them. Drops the
// lock.
Status RegionCreate::want_buffers(Lock& lock, Region& r, uint64_t mark) {
  for (;; lock.sleep_for(ctx_.map.changed(), std::chrono::milliseconds(20))) {
    Status s = ctx_.frames.want_bounce(r.block_size, bounce_limit(r, ctx_), least_bounce(r));
    const uint64_t least = FramePool::least_bounce(r.block_size, least_bounce(r));
    if (s.ok() || !ctx_.reserve.fits(least) || ctx_.deadline.hopeless(mark)) {
      ctx_.reserve.want_nothing();
      return s;
    }
    ctx_.reserve.want(least);
    host_.pressure.wake_all_reclaim();
  }
}

Status RegionCreate::charge(Lock& lock, Region& r, uint64_t mark) {
  const uint64_t budget = ctx_.budget.limit(), overhead = ctx_.frames.least_overhead();
  if (budget < overhead + 4 * r.block_size) {
    return error(ENOMEM,
                 "host_budget %s holds fewer than 4 blocks of %s beside %s of tables and buffers; raise host_budget or "
                 "lower %s",
                 core::human_bytes(budget).c_str(), core::human_bytes(r.block_size).c_str(),
                 core::human_bytes(overhead).c_str(), r.gpu ? "device_block_size" : "block_size");
  }
  if (!reserve_blocks(lock, r)) return no_memory_for_region(r.size);
  r.charge.table_granted = std::min<size_t>(r.table.most(), ctx_.budget.wanted() / 32);
  if (r.bounces) {
    if (Status s = want_buffers(lock, r, mark); !s.ok()) {
      ctx_.totals.reserved_blocks -= std::exchange(r.charge.reserved_blocks, 0);
      return s;
    }
  }
  if (r.gpu) ++ctx_.staging.of(r.block_size).regions;
  ctx_.metadata_charges.charge(r);
  ctx_.reserve.add_region(r.block_size);
  if (ctx_.reserve.fits(0)) return {};
  Status s =
      error(ENOMEM,
            "host_budget %s has no room for a region of %s blocks: %s of tables and buffers, %s leased, %s "
            "for faults; raise host_budget, lower %s or release leases",
            core::human_bytes(ctx_.budget.limit()).c_str(), core::human_bytes(r.block_size).c_str(),
            core::human_bytes(ctx_.frames.least_overhead()).c_str(), core::human_bytes(ctx_.reserve.pinned()).c_str(),
            core::human_bytes(ctx_.reserve.bytes()).c_str(), r.gpu ? "device_block_size" : "block_size");
  credit(r);
  return s;
}

void RegionCreate::credit(Region& r) {
  ctx_.totals.reserved_blocks -= std::exchange(r.charge.reserved_blocks, 0);
  if (r.bounces) ctx_.frames.unwant_bounce(r.block_size);
  if (r.gpu && --ctx_.staging.of(r.block_size).regions == 0)
    ctx_.device_set.work().notify_all();  // others may use its frames
  ctx_.metadata_charges.credit(r);
  ctx_.reserve.remove_region(r.block_size);
}

// Allocates what the region's blocks need later, so that a lack of memory fails this call and not
// an access.
Status RegionCreate::have_what_it_needs(Region& r, uint64_t mark, bool* charged) {
  if (Status s = r.table.create(r.blocks); !s.ok()) return s;
  if (Status s = store::prepare_codec(r.codec); !s.ok()) return s;
  store::zero_digest(r.block_size);  // computed here, so that the first fault need not
  if (r.backing == Backing::anonymous || r.backing == Backing::file_private) {
    if (!ctx_.space.reserve(r.span)) return no_memory_for_region(r.size);
    r.charge.stored_span = r.span;
  }
  Lock lock(ctx_.map.mutex());
  Status s = charge(lock, r, mark);
  while (s.code() == -ENOMEM && tier_.staging_allocator.give_back(lock)) s = charge(lock, r, mark);
  *charged = s.ok();
  return s;
}

Status RegionCreate::have_addresses(const RegionSpec& what, const Shape& shape, const Region& r, uint64_t mark,
                                    void** base) {
  if (r.gpu) {
    if (Status s = tier_.staging_allocator.want(r, mark); !s.ok()) return s;
    int born = 0;  // the first healthy device
    while (born + 1 < ctx_.devices->count() && !ctx_.devices->health(born).ok()) ++born;
    if (Status s = ctx_.devices->reserve(r.span, r.block_size, born, base); !s.ok()) return s;
    if (Status s = ctx_.trap.attach_at(*base, r.span, r.transfer); !s.ok()) {
      ctx_.devices->release(*base).ignore();
      return s;
    }
  } else if (what.fixed) {
    *base = reinterpret_cast<void*>(what.address);
    if (Status s = core::check_reserved(what.address, r.span); !s.ok()) return s;
    if (Status s = ctx_.trap.attach_at(*base, r.span, r.transfer); !s.ok()) return s;
  } else if (Status s = ctx_.trap.attach_blocks(r.span, shape.alignment, r.block_size, r.transfer, what.address, base);
             !s.ok()) {
    return s;
  }
  if (what.core_dump == 0) return {};
  Status s = ctx_.trap.dump(*base, r.span, what.core_dump > 0 ? trap::CoreDump::yes : trap::CoreDump::no);
  if (s.ok()) return s;
  ctx_.trap.detach(*base, r.span).ignore();
  (r.gpu ? ctx_.devices->release(*base) : give_addresses_back(ctx_.trap, r, *base)).ignore();
  return s;
}

// mark: of the wait for the region's memory.
Status RegionCreate::make(const RegionSpec& what, void** ptr, uint64_t mark) {
  Shape its;
  if (Status s = shape(what, &its); !s.ok()) return s;
  uint64_t readahead;
  {
    Lock lock(ctx_.map.mutex());
    readahead = ctx_.tunables.readahead_bytes;
  }
  auto region = std::make_unique<Region>(its.blocks, static_cast<uint32_t>(readahead / its.block_size),
                                         what.adapts && !its.gpu ? kAdaptingGroup : 1);
  Region& r = *region;
  if (Status s = describe(what, its, r); !s.ok()) return s;
  core::OwnMap<uintptr_t, std::unique_ptr<Region>> alone;
  alone.emplace(0, nullptr);
  auto node = alone.extract(alone.begin());
  if (r.from_file()) {
    if (Status s = open_file(what, ctx_.config.direct_io, &r, ctx_.engine); !s.ok()) return s;
  }
  r.bounces = r.transfer == Transfer::copy || r.codec != store::Codec::raw;
  // On any failure, also for want of memory, nothing of the region is left.
  bool charged = false;
  core::ScopeGuard undo([&] {
    if (charged) {
      Lock lock(ctx_.map.mutex());
      credit(r);
    }
    ctx_.space.unreserve(r.charge.stored_span);
    close_file(&r, ctx_.engine);
  });
  void* base = nullptr;
  if (Status s = have_what_it_needs(r, mark, &charged); !s.ok()) return s;
  if (Status s = have_addresses(what, its, r, mark, &base); !s.ok()) return s;
  r.base = static_cast<std::byte*>(base);
  r.noted.set(base, r.span);
  node.key() = reinterpret_cast<uintptr_t>(base);
  node.mapped() = std::move(region);
  Lock lock(ctx_.map.mutex());
  if (r.transfer == Transfer::copy) ctx_.frames.place(base, r.span);
  r.id = ctx_.totals.next_region_id++;
  ctx_.map.regions().insert(std::move(node));
  undo.dismiss();
  *ptr = base;
  return {};
}

}  // namespace vmem::pager
