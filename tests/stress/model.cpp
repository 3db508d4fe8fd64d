// A model-based test of the whole C API: threads make random calls on regions of every kind, beside
// injected failures of the disk and of a simulated device. The model (model.h) says what each byte
// must be and what each call must return. A difference prints the seed and each thread's last calls.
//
// Between stretches of calls, leases are released and failures end. Then every byte must be right,
// each failure reported exactly once, the files as the model says, and the statistics in agreement.
#include "model.h"

#include <CLI/CLI.hpp>
#include <chrono>

#include "api/runtime.h"
#include "common/faulty_engine.h"
#include "common/hooks.h"
#include "device_work.h"
#include "injection.h"

namespace {

using stress::differs;
using stress::Held;
using stress::Kind;
using stress::kPage;
using stress::Part;
using stress::part;
using stress::Random;
using stress::Region;
using stress::Worker;
using vmem::store::FaultyEngine;

struct Settings {
  double seconds = 10;
  unsigned threads = 6, regions = 4, processes = 1, device_block = 2;
  uint64_t bytes = 48 << 20, seed = 1, operations = 0;
  std::string budget = "48MiB", transfer = "auto", engine = "auto", device = "none", trap = "uffd";
  std::vector<std::string> blocks = {"4KiB", "64KiB", "2MiB", "auto"};
  bool delays = true, failures = true;
};

Settings settings;
thread_local const Worker* this_worker = nullptr;
std::vector<std::unique_ptr<Region>> regions;
std::vector<std::unique_ptr<Worker>> workers;
FaultyEngine* disk = nullptr;
std::unique_ptr<stress::DeviceWork> gpus;  // null: none
int devices = 0;

std::atomic<bool> stop{false}, stand_still{false};
std::atomic<bool> failing{false};     // failures are injected, or were since the last stillness
std::atomic<bool> reads_fail{false};  // the same, for reads
std::shared_mutex moving;             // shared: a call is made; exclusive: stillness
std::mutex setting;                   // held by the one thread that changes settings
std::atomic<uint64_t> alive{0}, refused{0}, calls{0}, errors{0}, buses{0};

void describe() {
  fprintf(stderr, "seed %llu, found by %s %u; the last calls:\n", static_cast<unsigned long long>(settings.seed),
          this_worker != nullptr ? "thread" : "no thread, in stillness;",
          this_worker != nullptr ? this_worker->number : 0);
  for (const auto& w : workers) {
    for (size_t i = w->logged > w->log.size() ? w->logged - w->log.size() : 0; i < w->logged; ++i)
      fprintf(stderr, "  %u: %s%s\n", w->number, w->log[i % w->log.size()].data(),
              i + 1 == w->logged && w->in_call ? " (and is in it)" : "");
  }
}

// --- what a call may answer -----------------------------------------------------------------------------------------

enum Beside : unsigned { nothing = 0, no_memory = 1, io = 2 };

// rc must be `want`. `beside` permits also: io: errors of injected failures; no_memory: -ENOMEM.
void expect(int rc, int want, unsigned beside, const char* what) {
  ++calls;
  if (rc != 0 && vmem_last_error()[0] == 0) differs("%s: %d without a message", what, rc);
  if (rc == want) return;
  if ((beside & no_memory) != 0 && rc == -ENOMEM) {
    ++refused;
    return;
  }
  if ((beside & io) != 0 && failing && (rc == -EIO || rc == -ENOSPC || rc == -ENOMEM)) {
    ++errors;
    return;
  }
  differs("%s: %d (%s), must be %d", what, rc, rc == 0 ? "" : vmem_last_error(), want);
}

// Runs `body`, a CPU access. SIGBUS is right only while reads fail: a failed write keeps the block.
template <typename Body>
bool access(const char* what, Body body) {
  if (!stress::raises_sigbus(body)) return true;
  ++buses;
  if (!reads_fail) differs("%s: SIGBUS", what);
  return false;
}

// --- regions --------------------------------------------------------------------------------------------------------

// The library must see a first change of rights at a sync (reliability.md, "Not promised").
void guard_once(Region& r) {
  if (r.words < 2 * kPage / 8) return;
  const auto store = [&](uint64_t* to) { *static_cast<volatile uint64_t*>(to) = r.value(0, 1); };
  if (access("the first store", [&] { store(r.memory); })) store(&r.shadow[0]);
  set_rights(r, 1, 1, PROT_NONE);
  expect(vmem_sync(r.memory, 1), 0, io, "sync beside a page without rights");
  set_rights(r, 1, 1, PROT_READ | PROT_WRITE);
}

void make(Region& r, Random& random) {
  {
    std::lock_guard guard(setting);
    const std::string block = settings.blocks[random.below(settings.blocks.size())];
    r.adapts = block == "auto";  // by attribute; the setting keeps its value
    if (!r.adapts) stress::configure("block_size", block);
    r.block = block == "4KiB" ? 4096 : block == "2MiB" ? 2 << 20 : 65536;
    r.kind = static_cast<Kind>(random.below(4));
    r.gpu = devices != 0 && random.below(3) != 0;
    if (r.gpu) r.block = size_t{settings.device_block} << 20;
    r.size = (stress::scale * settings.bytes / settings.regions + random.below(1 << 20)) / 8 * 8 +
             (random.one_in(3) ? 3 : 0);
    r.offset = random.below(3) * 4096;
    void* p = nullptr;
    static const unsigned kFlags[] = {0, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, VMEM_MAP_READ};
    const unsigned flags = kFlags[static_cast<int>(r.kind)] | (r.gpu ? 0 : VMEM_HOST_ONLY);
    if (r.kind != Kind::anonymous) r.make_file();
    const int rc = r.create(&p, r.size, flags);
    void* q = nullptr;
    if (rc == 0 && r.kind == Kind::shared)
      expect(r.create(&q, r.size, flags), -EBUSY, nothing, "a second SHARED mapping");
    if (rc == 0 && (r.kind == Kind::private_copy || r.kind == Kind::read_only)) {
      // A mapping may be longer than its file; the part inside the file must be right.
      const int longer = r.create(&q, r.size + 8192, flags);
      expect(longer, 0, no_memory | io, "map beyond the end of the file");
      if (longer == 0) expect(vmem_free(q), 0, io, "free a mapping beyond the end of the file");
    }
    r.memory = static_cast<uint64_t*>(p);
    if (rc != 0) {
      expect(rc, 0, no_memory | io, "making a region");
      r.remove_file();
      r.memory = nullptr;
      return;
    }
  }
  if (r.gpu && random.one_in(2)) advise_read_mostly(r);
  r.words = r.size / 8;
  r.shadow.resize(r.words);
  for (size_t i = 0; i < r.words; ++i) r.shadow[i] = r.original(i);
  // The device may change rights of pages that a backend maps (docs/reliability.md, "Not promised").
  r.guards = r.writable() && (!r.gpu || settings.device == "sim-handles") && random.one_in(2);
  if (r.guards) guard_once(r);
  r.leases.assign((r.size + r.block - 1) / r.block, {});
  r.cells = std::make_unique<std::mutex[]>(r.words / stress::cell_words + 1);
}

// Call with its life held exclusively.
void unmake(Region& r, const char* what) {
  if (r.memory == nullptr) return;
  const int rc = vmem_free(r.memory);
  expect(rc, r.live != 0 ? -EBUSY : 0, io, what);
  if (rc != 0) return;
  if (r.kind == Kind::shared) r.check_file({0, r.words}, "the file after vmem_free", [](size_t) { return false; });
  if (r.kind == Kind::private_copy || r.kind == Kind::read_only) r.check_file_untouched();
  r.memory = nullptr;
  r.remove_file();
}

// --- calls ----------------------------------------------------------------------------------------------------------

// Loads some words of the part, or loads and stores them.
void touch(Worker& w, Region& r, Part p, bool store, const char* what) {
  static const size_t kSteps[] = {1, 1, 64, 512};
  const size_t step = w.random.of(kSteps), end = std::min(p.at + p.count, p.at + 2000 * step);
  const uint32_t version = w.random.one_in(8) ? 0 : r.version++;
  size_t i = p.at;
  uint64_t seen = 0;
  bool good = true;
  access(what, [&] {
    for (; i < end; i += step) {
      seen = *static_cast<volatile uint64_t*>(r.memory + i);
      if (seen != r.shadow[i]) {
        good = false;
        return;
      }
      if (!store) continue;
      const uint64_t value = version == 0 ? 0 : r.value(i, version);
      *static_cast<volatile uint64_t*>(r.memory + i) = value;
      r.shadow[i] = value;
    }
  });
  if (!good) r.wrong(what, i, seen);
}

// alone: no other thread uses the region now, and no lease is live.
void use_cpu(Worker& w, Region& r, bool store, bool alone = false) {
  const Part p = part(r, w.random, 64 << 10);
  store = store && r.writable();
  const auto locked = r.lock(p);
  w.note("%s region %d words %zu+%zu", store ? "store" : "load", r.number, p.at, p.count);
  if (!r.gpu || alone) return touch(w, r, p, store, store ? "a store" : "a load");
  // CPU and device do not use one block at a time.
  const unsigned leased = VMEM_READ | (store ? VMEM_WRITE : 0u);
  const bool elsewhere = r.leased_elsewhere(p, VMEM_HOST);
  const int rc = vmem_acquire(r.memory + p.at, p.count * 8, leased, VMEM_HOST, nullptr);
  expect(rc, elsewhere ? -EBUSY : 0, no_memory | io, "acquire for the CPU");
  if (rc != 0) return;
  r.add(p, leased, VMEM_HOST);
  touch(w, r, p, store, "a leased access");
  expect(vmem_release(r.memory + p.at, p.count * 8, nullptr), 0, nothing, "release for the CPU");
  r.remove(p, leased);
}

void release(Worker& w, size_t which) {
  const auto [r, held] = w.held[which];
  const std::shared_lock life(r->life);  // a thread that replaces the region checks its leases twice
  const auto locked = r->lock(held.part);
  w.note("release region %d words %zu+%zu of %d", r->number, held.part.at, held.part.count, held.location);
  expect(vmem_release(r->memory + held.part.at, held.part.count * 8, held.stream), 0, nothing, "release");
  r->remove(held.part, held.access);
  w.held.erase(w.held.begin() + static_cast<std::ptrdiff_t>(which));
}

void lease_host(Worker& w, Region& r) {
  const Part p = part(r, w.random, 32 << 10);
  const unsigned leased = r.writable() && !w.random.one_in(3) ? VMEM_READ | VMEM_WRITE : VMEM_READ;
  const auto locked = r.lock(p);
  w.note("acquire region %d words %zu+%zu access %u", r.number, p.at, p.count, leased);
  if (r.kind == Kind::read_only && w.random.one_in(4))
    return expect(vmem_acquire(r.memory + p.at, p.count * 8, VMEM_WRITE, VMEM_HOST, nullptr), -EACCES, nothing,
                  "a WRITE lease of a read-only region");
  const bool elsewhere = r.leased_elsewhere(p, VMEM_HOST);
  int rc;
  if (const size_t half = p.count / 2; half != 0 && w.random.one_in(3)) {
    // The two ranges may share a block: then it has two leases, and the one release names it twice.
    const vmem_range both[] = {{r.memory + p.at, half * 8, leased, 0},
                               {r.memory + p.at + half, (p.count - half) * 8, leased, 0}};
    rc = vmem_acquire_ranges(both, 2, VMEM_HOST, nullptr);
    expect(rc, elsewhere ? -EBUSY : 0, no_memory | io, "acquire_ranges");
    if (rc != 0) return;
    r.add(p, leased, VMEM_HOST);
    touch(w, r, p, (leased & VMEM_WRITE) != 0, "an access under leases");
    expect(vmem_release_ranges(both, 2, nullptr), 0, nothing, "release_ranges");
    r.remove(p, leased);
    return;
  }
  rc = vmem_acquire(r.memory + p.at, p.count * 8, leased, VMEM_HOST, nullptr);
  expect(rc, elsewhere ? -EBUSY : 0, no_memory | io, "acquire");
  if (rc != 0) return;
  r.add(p, leased, VMEM_HOST);
  touch(w, r, p, (leased & VMEM_WRITE) != 0, "an access under a lease");
  w.held.push_back({&r, {p, leased, VMEM_HOST, nullptr}});
}

// Runs a kernel that checks and, with a WRITE lease, changes every 64th word of its part.
void lease_device(Worker& w, Region& r) {
  const int d = static_cast<int>(w.random.below(static_cast<uint64_t>(devices)));
  const Part p = part(r, w.random, 96 << 10);
  const bool store = r.writable() && !w.random.one_in(3);
  const unsigned leased = VMEM_READ | (store ? VMEM_WRITE : 0u);
  void* const stream = w.streams[d];
  const auto locked = r.lock(p);
  w.note("acquire region %d words %zu+%zu access %u at device %d", r.number, p.at, p.count, leased, d);
  const bool elsewhere = r.leased_elsewhere(p, d);
  const int rc = vmem_acquire(r.memory + p.at, p.count * 8, leased, d, stream);
  expect(rc, elsewhere ? -EBUSY : 0, no_memory | io, "acquire at a device");
  if (rc != 0) return;
  uint64_t* const base = r.memory + p.at;
  stress::Sweep sweep;
  sweep.base = base, sweep.count = p.count, sweep.first = p.at, sweep.store = store, sweep.version = r.version++;
  for (size_t i = 0; i < p.count; i += 64) sweep.want.push_back(r.shadow[p.at + i]);
  sweep.pause_us = w.random.one_in(3) ? static_cast<unsigned>(w.random.below(3000)) : 0;
  gpus->begin_sweep(stream, sweep);
  const bool hold = w.random.one_in(3);
  if (!hold) expect(vmem_release(base, p.count * 8, stream), 0, nothing, "release at a device");
  if (!hold && w.random.one_in(2)) {  // calls that are allowed while the kernel still runs
    const Part q = part(r, w.random, 64 << 10);
    switch (w.random.below(4)) {
      case 0:
        expect(vmem_evict(base, p.count * 8, VMEM_SSD), 0, io, "evict behind a kernel");
        break;
      case 1:
        expect(vmem_evict(base, p.count * 8, VMEM_HOST), 0, io, "evict to the host behind a kernel");
        break;
      case 2:
        expect(vmem_prefetch(r.memory + q.at, q.count * 8, VMEM_HOST, nullptr), 0, nothing, "prefetch");
        break;
      default:
        expect(vmem_prefetch(base, p.count * 8, (d + 1) % devices, nullptr), 0, nothing, "prefetch to a device");
    }
  }
  gpus->synchronize(stream);
  if (!sweep.ended) differs("a kernel under a lease was stopped");
  if (sweep.wrong_word != SIZE_MAX) r.wrong("a kernel", p.at + sweep.wrong_word, sweep.wrong_value);
  if (store)
    for (size_t i = 0; i < p.count; i += 64) r.shadow[p.at + i] = r.value(p.at + i, sweep.version);
  r.add(p, leased, d);
  if (!hold) return r.remove(p, leased);  // `written` stays if the blocks have other leases
  w.held.push_back({&r, {p, leased, d, stream}});
}

void sync(Worker& w, Region& r) {
  const Part p = part(r, w.random, 400 << 10);
  const auto locked = r.lock(p);
  bool writing = false, maybe = false;
  const size_t first = r.block_of(p.at), last = r.block_of(p.at + p.count - 1);
  for (size_t b = first; b <= last; ++b) writing |= r.leases[b].writers != 0, maybe |= r.leases[b].written;
  w.note("sync region %d words %zu+%zu", r.number, p.at, p.count);
  const int rc = vmem_sync(r.memory + p.at, p.count * 8);
  expect(rc, writing || (maybe && rc == -EBUSY) ? -EBUSY : 0, io, "sync");
  if ((rc == 0 || rc == -EBUSY) && r.kind == Kind::shared)
    r.check_file(p, "the file after vmem_sync", [&](size_t b) { return r.leases[b].written; });
}

void dont_need(Worker& w, Region& r) {
  const Part p = part(r, w.random, 500 << 10);
  const auto locked = r.lock(p);
  w.note("dont-need region %d words %zu+%zu", r.number, p.at, p.count);
  const std::vector<uint64_t> before(r.shadow.begin() + static_cast<std::ptrdiff_t>(p.at),
                                     r.shadow.begin() + static_cast<std::ptrdiff_t>(p.at + p.count));
  const bool was_failing = failing;
  const bool kept = r.drop(p);
  const int rc = vmem_advise(r.memory + p.at, p.count * 8, VMEM_ADVISE_DONT_NEED, 0);
  expect(rc, kept ? -EBUSY : 0, io, "dont-need");
  if (rc == 0 || rc == -EBUSY || !was_failing || (r.gpu && r.kind != Kind::shared)) return;
  // It stopped on the way: each word is now the old or the dropped one.
  for (size_t i = 0; i < p.count; ++i) {
    uint64_t now = 0;
    if (!access("after dont-need", [&] { now = static_cast<volatile uint64_t*>(r.memory)[p.at + i]; })) continue;
    if (now != before[i] && now != r.dropped(p.at + i)) r.wrong("after dont-need", p.at + i, now);
    r.shadow[p.at + i] = now;
  }
}

// Takes away rights of some pages while their blocks leave and other words of the blocks are used.
void guard(Worker& w, Region& r) {
  const Part p = part(r, w.random, 64 << 10);
  const auto locked = r.lock(p);
  const size_t first = (p.at * 8 + kPage - 1) / kPage, last = (p.at + p.count) * 8 / kPage;
  if (first >= last || r.leased_elsewhere(p, VMEM_HOST)) return;
  const size_t page = first + w.random.below(last - first), n = 1 + w.random.below(std::min<size_t>(last - page, 3));
  w.note("no rights: region %d pages %zu+%zu, evict words %zu+%zu", r.number, page, n, p.at, p.count);
  set_rights(r, page, n, PROT_NONE);
  expect(vmem_evict(r.memory + p.at, p.count * 8, VMEM_SSD), 0, io, "evict beside a page without rights");
  const size_t before = page * kPage / 8 - p.at, after = (page + n) * kPage / 8;
  if (before != 0) touch(w, r, {p.at, before}, w.random.one_in(2), "before a page without rights");
  if (after < p.at + p.count)
    touch(w, r, {after, p.at + p.count - after}, w.random.one_in(2), "behind a page without rights");
  if (w.random.one_in(2)) expect(vmem_evict(r.memory + p.at, p.count * 8, VMEM_SSD), 0, io, "evict once more");
  set_rights(r, page, n, PROT_READ | PROT_WRITE);
  touch(w, r, {page * kPage / 8, n * kPage / 8}, w.random.one_in(2), "pages that have their rights back");
}

void hint(Worker& w, Region& r) {
  const Part p = part(r, w.random, 600 << 10);
  void* const at = r.memory + p.at;
  const size_t n = p.count * 8;
  const uint64_t kind = w.random.below(10);
  w.note("hint %llu region %d words %zu+%zu", static_cast<unsigned long long>(kind), r.number, p.at, p.count);
  switch (kind) {
    case 0:
    case 1:
      return expect(vmem_prefetch(at, n, VMEM_HOST, nullptr), 0, io, "prefetch");
    case 2:
      return expect(vmem_prefetch(at, n, VMEM_SSD, nullptr), 0, io, "prefetch to the SSD");
    case 3:
      if (devices == 0) return expect(vmem_prefetch(at, n, 0, nullptr), -ENODEV, nothing, "prefetch to no device");
      return expect(vmem_prefetch(at, n, static_cast<int>(w.random.below(static_cast<uint64_t>(devices))), nullptr),
                    r.gpu ? 0 : -EINVAL, io, "prefetch to a device");
    case 4:
    case 5:
    case 6:
      return expect(vmem_evict(at, n, VMEM_SSD), 0, io, "evict");
    case 7:
      return expect(vmem_evict(at, n, VMEM_HOST), 0, io, "evict to the host");
    default: {
      static const int kAdvice[] = {VMEM_ADVISE_SEQUENTIAL,
                                    VMEM_ADVISE_RANDOM,
                                    VMEM_ADVISE_NORMAL,
                                    VMEM_ADVISE_COLD,
                                    VMEM_ADVISE_HOT,
                                    VMEM_ADVISE_PIN,
                                    VMEM_ADVISE_PRIORITY_LOW,
                                    VMEM_ADVISE_PRIORITY_NORMAL,
                                    VMEM_ADVISE_WILL_NEED,
                                    VMEM_ADVISE_PRIORITY_HIGH,
                                    VMEM_ADVISE_SET_READ_MOSTLY,
                                    VMEM_ADVISE_UNSET_READ_MOSTLY,
                                    VMEM_ADVISE_SET_PREFERRED_LOCATION,
                                    VMEM_ADVISE_UNSET_PREFERRED_LOCATION};
      const int to = static_cast<int>(w.random.below(static_cast<uint64_t>(devices) + 1)) - 1;  // or VMEM_HOST
      const int rc = vmem_advise(at, n, w.random.of(kAdvice), to);
      if (rc != -ENOSPC) return expect(rc, 0, io, "advise");  // a region holds 256 ranges of each kind
      expect(vmem_advise(r.memory, r.size, VMEM_ADVISE_NORMAL, 0), 0, nothing, "advise the whole region");
    }
  }
}

// Makes calls that must be refused, and queries.
void ask(Worker& w, Region& r) {
  const Part p = part(r, w.random, 600 << 10);
  const uint64_t kind = w.random.below(12);
  void* const at = r.memory + p.at;
  void* q = nullptr;
  w.note("ask %llu region %d words %zu+%zu", static_cast<unsigned long long>(kind), r.number, p.at, p.count);
  switch (kind) {
    case 0:
      return expect(vmem_sync(at, 0), -EINVAL, nothing, "sync of nothing");
    case 1:
      return expect(vmem_evict(at, r.size + (4 << 20), VMEM_SSD), -EINVAL, nothing, "evict beyond the region");
    case 2:
      return expect(vmem_evict(at, p.count * 8, -7), -EINVAL, nothing, "evict to nowhere");
    case 3:
      return expect(vmem_advise(at, p.count * 8, 99, 0), -EINVAL, nothing, "unknown advice");
    case 4:
      return expect(vmem_free(reinterpret_cast<char*>(r.memory) + 4096), -EINVAL, nothing, "free of an inner address");
    case 5:
      return expect(vmem_acquire(at, p.count * 8, 0, VMEM_HOST, nullptr), -EINVAL, nothing, "acquire for no access");
    case 6:
      return expect(vmem_alloc(&q, 0, 0), -EINVAL, nothing, "a region of no bytes");
    case 7:
      return expect(vmem_map(&q, 4096, "/nowhere/at/all", 0, VMEM_MAP_READ), -ENOENT, nothing, "map of no file");
    case 8:
      return expect(vmem_acquire(at, p.count * 8, VMEM_READ, 63, nullptr), -ENODEV, nothing, "acquire at no device");
    case 9: {
      const auto locked = r.lock(p);
      bool any = false;
      for (size_t b = r.block_of(p.at); b <= r.block_of(p.at + p.count - 1); ++b) any |= r.leases[b].count == 0;
      if (any) expect(vmem_release(at, p.count * 8, nullptr), -EINVAL, nothing, "release of what is not leased");
      return;
    }
    case 10:
      return expect(vmem_name(at, "a name"), 0, nothing, "name");
    default: {
      struct vmem_residency in = {};
      in.size = sizeof in;
      expect(vmem_query(at, p.count * 8, &in), 0, nothing, "query");
      const uint64_t sum = in.zero_bytes + in.ssd_bytes + in.host_bytes + in.device_bytes;
      if (sum != p.count * 8) differs("query: %llu bytes of %zu", static_cast<unsigned long long>(sum), p.count * 8);
      if (!r.gpu && in.device_bytes != 0) differs("query: a region without a device tier is on a device");
    }
  }
}

void change_setting(Worker& w) {
  static const char* const kChoices[][2] = {
      {"host_budget", "32MiB"},    {"host_budget", "40MiB"},      {"host_budget", "56MiB"},
      {"readahead", "0"},          {"readahead", "1MiB"},         {"readahead", "64MiB"},
      {"compression", "none"},     {"compression", "lz4"},        {"compression", "zstd"},
      {"staging_share", "20"},     {"staging_share", "60"},       {"device_budget", "16MiB"},
      {"device_budget", "32MiB"},  {"fault_timeout_ms", "20000"}, {"fault_timeout_ms", "30000"},
      {"peer_spill_percent", "0"}, {"peer_spill_percent", "50"},  {"peer_spill_percent", "80"}};
  const auto& [name, choice] = w.random.of(kChoices);
  const std::string value = strstr(name, "_budget") != nullptr ? stress::scaled(choice) : choice;
  std::lock_guard guard(setting);
  w.note("set %s=%s", name, value.c_str());
  const int rc = vmem_set(name, value.c_str());
  // Live leases may hold more than a lowered budget.
  if (!(rc == -EBUSY && strstr(name, "_budget") != nullptr)) expect(rc, 0, no_memory, "set");
  char now[64];
  expect(vmem_get(name, now, sizeof now), 0, nothing, "get");
  const char* const unit = strstr(choice, "MiB");
  const std::string want = unit != nullptr ? std::to_string(strtoull(value.c_str(), nullptr, 10) << 20) : value;
  if (rc == 0 && now != want) differs("%s was set to %s and is %s", name, value.c_str(), now);
  expect(vmem_set(name, "nonsense"), -EINVAL, nothing, "set to nonsense");
  expect(vmem_set("no_such_setting", "1"), -ENOENT, nothing, "set of an unknown name");
  expect(vmem_set("io_depth", "8"), -EBUSY, nothing, "set of what cannot change now");
}

void one(Worker& w) {
  Region& r = *regions[w.random.below(regions.size())];
  const uint64_t kind = w.random.below(1000);
  if (kind < 4) {
    std::unique_lock life(r.life, std::try_to_lock);
    if (!life) return;
    w.note("replace region %d", r.number);
    unmake(r, "free");
    if (r.memory == nullptr) make(r, w.random);
    return;
  }
  if (!w.held.empty() && (w.held.size() > 1 || kind % 8 == 0)) return release(w, w.random.below(w.held.size()));
  if (kind < 12) return change_setting(w);
  // An access without a lease waits for WRITE leases, whose holder may be waiting for this thread.
  if (kind >= 500 && kind < 600 && stress::separate(settings.device)) {
    const std::unique_lock life(r.life, std::try_to_lock);
    if (life && r.memory != nullptr && r.live == 0) use_cpu(w, r, kind < 530, true);
    return;
  }
  std::shared_lock life(r.life);
  if (r.memory == nullptr) {
    life.unlock();
    std::unique_lock again(r.life, std::try_to_lock);
    if (again && r.memory == nullptr) make(r, w.random);
    return;
  }
  if (kind < 60 && r.guards) return guard(w, r);
  if (kind < 350) return use_cpu(w, r, true);
  if (kind < 600) return use_cpu(w, r, false);
  if (kind < 700) return lease_host(w, r);
  if (kind < 800) return r.gpu ? lease_device(w, r) : use_cpu(w, r, true);
  if (kind < 830) return sync(w, r);
  if (kind < 850) return dont_need(w, r);
  if (kind < 950) return hint(w, r);
  ask(w, r);
}

// --- failures, and the stillness between ----------------------------------------------------------------------------

void check_region(Region& r, bool reported) {
  for (size_t at = 0; at < r.words; at += 65536) {
    const Part p{at, std::min<size_t>(65536, r.words - at)};
    // An acquire retries blocks that failed.
    int rc = vmem_acquire(r.memory + p.at, p.count * 8, VMEM_READ, VMEM_HOST, nullptr);
    for (unsigned i = 0, most = 20 * vmem::test::patience(); rc != 0 && i < most; ++i) {
      if (!reported || i == most - 1)
        differs("after stillness: acquire of region %d: %d %s", r.number, rc, vmem_last_error());
      usleep(100000);
      rc = vmem_acquire(r.memory + p.at, p.count * 8, VMEM_READ, VMEM_HOST, nullptr);
    }
    for (size_t i = p.at; i < p.at + p.count; ++i)
      if (r.memory[i] != r.shadow[i]) r.wrong("after stillness", i, r.memory[i]);
    expect(vmem_release(r.memory + p.at, p.count * 8, nullptr), 0, nothing, "release");
    ++alive;
  }
  // A sync reports the failures of the region's own file before those of the store, each once.
  int answer = vmem_sync(r.memory, r.size);
  if (answer != 0 && !reported) differs("after stillness: sync: %d %s", answer, vmem_last_error());
  for (int i = 0; i < 2 && answer != 0; ++i) answer = vmem_sync(r.memory, r.size);
  if (answer != 0) differs("after stillness: sync answers %d a third time: %s", answer, vmem_last_error());
  if (r.kind == Kind::shared) r.check_file({0, r.words}, "the file after stillness", [](size_t) { return false; });
}

void end_failures() {
  disk->clear_rules();
  disk->wait_failed();  // a failure must not be reported after the check
  if (stress::simulated(settings.device)) vmem::device::current_sim()->set_hook(nullptr);
}

void check_all() {
  end_failures();
  for (const auto& w : workers)
    while (!w->held.empty()) release(*w, 0);
  uint64_t count = 0;
  for (const auto& r : regions) {
    if (r->memory == nullptr) continue;
    ++count;
    check_region(*r, failing);
    alive += 1;
  }
  if (devices != 0) {
    for (const std::string& v : gpus->violations()) differs("the device saw: %s", v.c_str());
  }
  // Background work, such as read-ahead, ends without further calls.
  std::string books;
  for (unsigned i = 0; i < 100 * vmem::test::patience(); ++i) {
    books = vmem::api::Runtime::get().check();
    struct vmem_stats s = {};
    s.size = sizeof s;
    expect(vmem_stats(&s), 0, nothing, "stats");
    if (s.regions != count)
      differs("stats: %llu regions, there are %llu", static_cast<unsigned long long>(s.regions),
              static_cast<unsigned long long>(count));
    if (books.empty() && s.host_bytes > s.host_budget) books = "host_bytes are above host_budget";
    for (int d = 0; d < devices && books.empty(); ++d) {
      struct vmem_device_stats ds = {};
      ds.size = sizeof ds;
      expect(vmem_device_stats(d, &ds), 0, nothing, "device_stats");
      if (ds.leased_bytes != 0) books = "bytes are leased at a device, nobody has a lease";
      if (ds.used_bytes > ds.budget) books = "a device holds more than its budget";
    }
    if (books.empty()) break;
    usleep(50000);
  }
  if (!books.empty()) differs("the books: %s", books.c_str());
  failing = reads_fail = false;
}

// Prints the calls that stillness waits for.
void say_who_is_in_a_call(unsigned seconds) {
  for (const auto& w : workers)
    if (w->in_call && w->logged != 0)
      fprintf(stderr, "process %d stands still since %u s; thread %u is in: %s\n", getpid(), seconds, w->number,
              w->log[(w->logged - 1) % w->log.size()].data());
}

void still() {
  stand_still = true;
  stress::at_work = "waits for calls to end";
  // Calls may wait for minutes while failures continue and some writes still succeed, if the budget
  // was lowered by thousands of small blocks. After 5 s failures end; then every call must end.
  std::unique_lock alone(moving, std::try_to_lock);
  for (unsigned i = 1; !alone; ++i) {
    usleep(1000);
    (void)alone.try_lock();
    if (alone) break;
    if (i == 5000) end_failures();
    if (i % 15000 == 0) say_who_is_in_a_call(i / 1000);
  }
  stress::at_work = "looks at every region";
  check_all();
  stress::at_work = "calls";
  stand_still = false;
}

int run(uint64_t seed) {
  settings.seed = seed;
  stress::scale = std::max(1u, settings.device_block / 2);
  stress::cell_words = stress::scale * (size_t{2} << 20) / 8;
  stress::on_difference = describe;
  stress::catch_sigbus();
  vmem_log([](int, const char*, void*) {}, nullptr);
  vmem::api::test_hooks().wrap_engine =
      [](std::unique_ptr<vmem::store::Engine> inner) -> std::unique_ptr<vmem::store::Engine> {
    std::unique_ptr<FaultyEngine> made;
    if (!FaultyEngine::wrap(std::move(inner), settings.seed, &made).ok()) differs("the engine cannot be wrapped");
    disk = made.get();
    return made;
  };
  gpus = stress::make_device_work(settings.device, 2);
  devices = gpus != nullptr ? gpus->devices() : 0;
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"device", settings.device},
           {"device_block_size", std::to_string(settings.device_block << 20)},
           {"host_budget", stress::scaled(settings.budget)},
           {"trap", settings.trap},
           {"transfer", settings.transfer},
           {"io_engine", settings.engine},
           {"evict_threads", "2"},
           {"io_threads", "2"},
           {"fault_timeout_ms", "20000"}})
    stress::configure(name, value);
  if (devices != 0) stress::configure("device_budget", stress::scaled("32MiB"));
  stress::start();
  if (settings.delays) vmem::core::step_hook.store(stress::delay);
  Random first(seed);
  for (unsigned i = 0; i < settings.regions; ++i) {
    regions.push_back(std::make_unique<Region>());
    regions[i]->number = static_cast<int>(i);
    make(*regions[i], first);
  }
  for (unsigned i = 0; i < settings.threads; ++i) {
    workers.push_back(std::make_unique<Worker>(i, seed * 1000 + i));
    for (int d = 0; d < devices; ++d) workers[i]->streams.push_back(gpus->create_stream(d));
  }
  std::vector<std::thread> threads;
  std::atomic<unsigned> running{settings.threads};
  for (const auto& worker : workers) {
    threads.emplace_back([&w = *worker, &running] {
      this_worker = &w;
      while (!stop && (settings.operations == 0 || w.done < settings.operations)) {
        while (stand_still) usleep(200);
        std::shared_lock call(moving);
        w.in_call = true;
        one(w);
        w.in_call = false;
        ++w.done;
        ++alive;
      }
      --running;
    });
  }
  std::atomic<bool> over{false};  // the end may hang as well
  std::thread watcher = stress::watch(alive, over, 90);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings.seconds);
  while (running != 0 && std::chrono::steady_clock::now() < end) {
    stress::inject(disk, first, settings.failures, stress::simulated(settings.device), failing, reads_fail);
    usleep(300000 + static_cast<useconds_t>(first.below(900000)));
    still();
  }
  stop = true;
  stress::at_work = "waits for its threads at the end";
  for (std::thread& t : threads) t.join();
  stress::at_work = "looks at every region at the end";
  check_all();
  vmem::core::step_hook.store(nullptr);
  for (const auto& w : workers)
    for (void* stream : w->streams) gpus->destroy_stream(stream);
  struct vmem_stats s = {};
  s.size = sizeof s;
  vmem_stats(&s);
  stress::at_work = "frees every region";
  for (const auto& r : regions) {
    unmake(*r, "free at the end");
    ++alive;
  }
  stress::at_work = "shuts down";
  if (calls > 1000 && refused * 2 > calls) differs("more than half of the calls were refused for want of memory");
  vmem_shutdown();
  over = true;
  watcher.join();
  printf(
      "seed %llu: %llu calls (%llu refused for memory, %llu failed as injected), %llu faults, %llu evictions, "
      "%llu SIGBUS while reads failed, no difference\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(calls.load()),
      static_cast<unsigned long long>(refused.load()), static_cast<unsigned long long>(errors.load()),
      static_cast<unsigned long long>(s.faults), static_cast<unsigned long long>(s.evictions),
      static_cast<unsigned long long>(buses.load()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Random calls of the whole API beside a model of what must come of them."};
  app.add_option("--seconds", settings.seconds);
  app.add_option("--operations", settings.operations, "of each thread (0: time decides)");
  app.add_option("--threads", settings.threads);
  app.add_option("--regions", settings.regions);
  app.add_option("--processes", settings.processes, "side by side, seeds from --seed on");
  app.add_option("--bytes", settings.bytes, "of all regions")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", settings.budget);
  app.add_option("--transfer", settings.transfer);
  app.add_flag_callback("--no-move", stress::move_no_pages, "as on kernels that move no pages");
  app.add_option("--trap", settings.trap);
  app.add_option("--engine", settings.engine);
  app.add_option("--device", settings.device, stress::kDevices);
  app.add_option("--device-block", settings.device_block, "MiB");
  app.add_option("--blocks", settings.blocks);
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-delays", settings.delays);
  app.add_flag("!--no-failures", settings.failures);
  CLI11_PARSE(app, argc, argv);
  return stress::in_processes(settings.processes, settings.seed, run);
}
