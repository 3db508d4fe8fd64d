// Checks that registers of 8 bytes, in regions whose blocks move all the time, are linearizable.
// CPU threads and leased device work read, write and swap them, and record the time before and
// after each operation. Afterwards each register's history must be as if each operation had
// happened at one instant between its two times.
//
// Every value is written once, so a read identifies the write it saw, and O(n log n) suffices: P.
// B. Gibbons, E. Korach, "Testing Shared Memories", SIAM J. Comput. 26(4), 1997, section 4. A write
// and the reads of its value are a cluster; its zone lies between its first end f and its last
// begin s. The zone is forward if f < s (the register held the value all that time), else backward.
// A history is linearizable if and only if no read ended before its write began, no two forward
// zones overlap, and no backward zone lies within a forward one.
// its write began, no two forward zones overlap, and no backward zone lies within a forward one.
#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>

#include "common.h"
#include "device_work.h"

namespace {

using stress::differs;
using stress::Random;
using stress::RegisterOp;

struct Settings {
  double seconds = 10;
  unsigned threads = 4, movers = 2, registers = 48, device_block = 2;
  int devices = 2;
  uint64_t bytes = 24 << 20, seed = 1;
  std::string budget = "24MiB", transfer = "auto", device = "none", trap = "uffd";
  bool delays = true;
};

struct Operation {
  uint64_t begin, end, value;
  uint32_t place;
  bool write;
};

// Returns "" if the operations on one register, which held `initial` before, are linearizable.
// Sorts them.
std::string judge(std::vector<Operation>& history, uint64_t initial) {
  struct Zone {
    uint64_t first_end = UINT64_MAX, last_begin = 0, value = 0;
    const Operation* write = nullptr;
  };
  const auto say = [](const char* what, uint64_t a, uint64_t b) {
    char text[200];
    snprintf(text, sizeof text, "%s: value %#llx, value %#llx", what, static_cast<unsigned long long>(a),
             static_cast<unsigned long long>(b));
    return std::string(text);
  };
  std::unordered_map<uint64_t, Zone> clusters;
  const Operation before{0, 0, initial, 0, true};
  clusters[initial] = {0, 0, initial, &before};
  for (const Operation& o : history) {
    if (!o.write) continue;
    Zone& z = clusters[o.value];
    if (z.write != nullptr) return say("a value was written twice: the test is wrong", o.value, o.value);
    z = {o.end, o.begin, o.value, &o};
  }
  for (const Operation& o : history) {
    if (o.write) continue;
    const auto it = clusters.find(o.value);
    if (it == clusters.end()) return say("a read saw what nobody wrote", o.value, initial);
    if (o.end < it->second.write->begin) return say("a read ended before its write began", o.value, o.value);
    it->second.first_end = std::min(it->second.first_end, o.end);
    it->second.last_begin = std::max(it->second.last_begin, o.begin);
  }
  std::map<uint64_t, Zone> forward;  // by begin of the zone, the first end
  for (const auto& [value, z] : clusters) {
    if (z.first_end >= z.last_begin) continue;
    const auto [it, fresh] = forward.emplace(z.first_end, z);
    if (!fresh) return say("two values held at one time", value, it->second.value);
  }
  uint64_t until = 0, holder = 0;
  for (const auto& [begin, z] : forward) {
    if (begin < until) return say("two values held at one time", holder, z.value);
    until = z.last_begin, holder = z.value;
  }
  for (const auto& [value, z] : clusters) {
    if (z.first_end < z.last_begin) continue;
    auto it = forward.upper_bound(z.last_begin);
    if (it == forward.begin()) continue;
    --it;
    // Strictly within: at equal times either order is possible.
    if (it->first < z.last_begin && z.first_end < it->second.last_begin)
      return say("a value was written and gone while another was held", value, it->second.value);
  }
  return "";
}

// Tests the judge on histories that are known to be right or wrong.
void check_judge() {
  struct Case {
    std::vector<Operation> history;
    bool right;
  };
  const auto w = [](uint64_t b, uint64_t e, uint64_t v) { return Operation{b, e, v, 0, true}; };
  const auto r = [](uint64_t b, uint64_t e, uint64_t v) { return Operation{b, e, v, 0, false}; };
  Case cases[] = {
      {{w(1, 2, 7), r(3, 4, 7)}, true},
      {{w(1, 2, 7), r(3, 4, 0)}, false},                                      // stale
      {{w(1, 5, 7), r(2, 3, 7), r(4, 6, 0)}, false},                          // new, then old
      {{w(1, 5, 7), r(2, 3, 0), r(4, 6, 7)}, true},                           //
      {{w(1, 2, 7), w(3, 4, 8), r(5, 6, 7)}, false},                          // lost write
      {{w(1, 9, 7), w(1, 9, 8), r(2, 3, 7), r(4, 5, 8)}, true},               //
      {{w(1, 9, 7), w(1, 9, 8), r(2, 3, 7), r(4, 5, 8), r(6, 7, 7)}, false},  // back again
      {{r(1, 2, 7), w(3, 4, 7)}, false},                                      // from the future
      {{r(1, 2, 9)}, false},                                                  // from nowhere
      {{w(1, 2, 7), w(4, 5, 8), r(6, 9, 8), r(3, 10, 7)}, true},              //
  };
  for (size_t i = 0; i < std::size(cases); ++i)
    if (judge(cases[i].history, 0).empty() != cases[i].right) differs("the judge is wrong about history %zu", i);
}

struct Place {
  uint64_t* word;
  bool gpu;
  uint64_t initial = 0;
};

struct Area {
  char* memory;
  size_t size, block;
  bool gpu;
};

Settings settings;
std::vector<Area> areas;
std::vector<Place> places;
std::unique_ptr<stress::DeviceWork> gpus;  // null: none
std::atomic<uint64_t> alive{0}, judged{0}, by_device{0};
std::atomic<uint64_t> next_value{1};

// Returns a ticket from one counter that all CPUs share. Clocks of CPUs may differ for a moment, on
// virtual machines by more than an operation takes.
uint64_t now() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

void allow(int rc, const char* what) {
  if (rc != 0 && rc != -EBUSY && rc != -ENOMEM) differs("%s: %d %s", what, rc, vmem_last_error());
}

constexpr uint64_t kLoad = 7;
RegisterOp drawn(uint64_t draw) {
  RegisterOp o;
  if (draw % 8 < 3) o.kind = RegisterOp::write;
  if (draw % 8 == 3) o.kind = RegisterOp::swap;
  if (o.kind != RegisterOp::read) o.value = next_value.fetch_add(1);
  return o;
}

// A swap is a write at the instant of its read: record it as both.
void record(const RegisterOp& o, uint32_t place, std::vector<Operation>& out) {
  if (o.kind != RegisterOp::write) out.push_back({o.begin, o.end, o.seen, place, false});
  if (o.kind != RegisterOp::read) out.push_back({o.begin, o.end, o.value, place, true});
}

void operate(uint64_t* word, uint32_t place, uint64_t draw, std::vector<Operation>& out) {
  std::atomic_ref<uint64_t> r(*word);
  RegisterOp o = drawn(draw);
  o.begin = now();
  if (o.kind == RegisterOp::read) o.seen = r.load();
  if (o.kind == RegisterOp::write) r.store(o.value);
  if (o.kind == RegisterOp::swap) o.seen = r.exchange(o.value);
  o.end = now();
  record(o, place, out);
}

// Runs one kernel under a lease. Kernels of other streams of the device may lease the block at the
// same time.
void operate_at(int device, void* stream, uint32_t p, const std::vector<uint64_t>& draws, std::vector<Operation>& out) {
  uint64_t* const word = places[p].word;
  const int rc = vmem_acquire(word, 8, VMEM_READ | VMEM_WRITE, device, stream);
  allow(rc, "acquire at a device");
  if (rc != 0) return;
  std::vector<RegisterOp> ops;
  for (const uint64_t draw : draws) ops.push_back(drawn(draw));
  const uint64_t begin = now();
  gpus->begin_registers(stream, word, ops, now);
  allow(vmem_release(word, 8, stream), "release at a device");
  gpus->synchronize(stream);
  const uint64_t end = now();
  for (RegisterOp& o : ops) {
    if (o.begin == 0) o.begin = begin, o.end = end;
    record(o, p, out);
  }
  by_device += ops.size();
}

// Performs some operations on one place.
void work(Random& random, void* const* streams, std::vector<Operation>& out) {
  const size_t p = random.below(places.size());
  Place& place = places[p];
  const unsigned count = 1 + static_cast<unsigned>(random.below(16));
  if (!place.gpu) {
    for (unsigned i = 0; i < count; ++i) operate(place.word, static_cast<uint32_t>(p), random(), out);
    return;
  }
  // CPU and device do not use one block at a time; which comes next is a race. On devices with
  // their own page tables the CPU needs no lease: the block comes to host memory, or the CPU is
  // shown a copy until it stores.
  if (random.one_in(2)) {
    if (stress::separate(settings.device) && random.one_in(2)) {
      const bool loads = random.one_in(2);  // loads leave a shown copy for the next lease to meet
      for (unsigned i = 0; i < count; ++i) operate(place.word, static_cast<uint32_t>(p), loads ? kLoad : random(), out);
      return;
    }
    const int rc = vmem_acquire(place.word, 8, VMEM_READ | VMEM_WRITE, VMEM_HOST, nullptr);
    allow(rc, "acquire for the CPU");
    if (rc != 0) return;
    for (unsigned i = 0; i < count; ++i) operate(place.word, static_cast<uint32_t>(p), random(), out);
    allow(vmem_release(place.word, 8, nullptr), "release for the CPU");
    return;
  }
  const int d = static_cast<int>(random.below(static_cast<uint64_t>(gpus->devices())));
  std::vector<uint64_t> draws(count);
  for (uint64_t& draw : draws) draw = random();
  operate_at(d, streams[d], static_cast<uint32_t>(p), draws, out);
}

void move(Random& random) {
  // Mostly picks a place with a register; the rest of the memory only keeps the budget short.
  const Area& a = areas[random.below(areas.size())];
  char* at = a.memory + random.below(a.size);
  size_t n = 1 + random.below(std::min<size_t>(a.size - static_cast<size_t>(at - a.memory), 2 << 20));
  if (random.below(4) != 0) at = reinterpret_cast<char*>(places[random.below(places.size())].word), n = 8;
  switch (random.below(8)) {
    case 0:
      return allow(vmem_sync(at, n), "sync");
    case 1:
      return allow(vmem_prefetch(at, n, VMEM_HOST, nullptr), "prefetch");
    case 2:
      return allow(vmem_prefetch(at, n, VMEM_SSD, nullptr), "prefetch to the SSD");
    case 3:
      if (a.gpu && at >= a.memory && at < a.memory + a.size) {
        const int d = static_cast<int>(random.below(static_cast<uint64_t>(gpus->devices())));
        return allow(vmem_prefetch(at, n, d, nullptr), "prefetch to a device");
      }
      return allow(vmem_evict(at, n, VMEM_HOST), "evict to the host");
    case 4:  // a sweep, which makes reclaim work
      if (!a.gpu)
        for (size_t i = 0; i < a.size; i += 4096) (void)*static_cast<volatile char*>(a.memory + i);
      return;
    default:
      return allow(vmem_evict(at, n, VMEM_SSD), "evict");
  }
}

int run(uint64_t seed) {
  stress::catch_sigbus();
  check_judge();
  vmem_log([](int, const char*, void*) {}, nullptr);
  gpus = stress::make_device_work(settings.device, settings.devices);
  const int devices = gpus != nullptr ? gpus->devices() : 0;
  const uint64_t device_block = uint64_t{settings.device_block} << 20;
  if (gpus != nullptr && settings.budget == "24MiB")  // staging frames take half
    settings.budget = std::to_string(20 * device_block);
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, std::string>>{{"device", settings.device},
                                                                  {"device_block_size", std::to_string(device_block)},
                                                                  {"host_budget", settings.budget},
                                                                  {"trap", settings.trap},
                                                                  {"transfer", settings.transfer},
                                                                  {"evict_threads", "2"},
                                                                  {"io_threads", "2"},
                                                                  {"readahead", "1MiB"}})
    stress::configure(name, value);
  if (devices != 0) stress::configure("device_budget", std::to_string(4 * device_block));
  stress::start();
  Random first(seed);
  int fd = -1;
  const std::string path = stress::temp_file(&fd);
  if (ftruncate(fd, static_cast<off_t>(settings.bytes)) != 0) differs("ftruncate: %s", strerror(errno));
  static const std::pair<const char*, size_t> kBlocks[] = {{"4KiB", 4096}, {"64KiB", 65536}, {"2MiB", 2 << 20}};
  for (unsigned i = 0; i < 4; ++i) {
    const auto& [name, block] = kBlocks[i % 3];
    const bool gpu = devices != 0 && i >= 2;
    stress::configure("block_size", name);
    void* p = nullptr;
    const size_t size = settings.bytes / 4;
    const int rc = i == 1 ? vmem_map(&p, size, path.c_str(), 0, VMEM_MAP_SHARED | VMEM_HOST_ONLY)
                          : vmem_alloc(&p, size, gpu ? 0 : VMEM_HOST_ONLY);
    if (rc != 0) differs("region %u: %d %s", i, rc, vmem_last_error());
    areas.push_back({static_cast<char*>(p), size, gpu ? device_block : block, gpu});
    if (i == 3 && stress::separate(settings.device))  // there, loads without a lease are shown copies
      allow(vmem_advise(p, size, VMEM_ADVISE_SET_READ_MOSTLY, 0), "advise");
    for (size_t at = 0; at < size; at += 4096) *reinterpret_cast<uint64_t*>(areas[i].memory + at + 8) = first();
  }
  // Several registers share a block, some a cache line; none is at offset 8 of a page.
  for (unsigned i = 0; i < settings.registers; ++i) {
    const Area& a = areas[i % areas.size()];
    const size_t page = first.below(std::min<size_t>(a.size, 3 * a.block) / 4096);
    places.push_back({reinterpret_cast<uint64_t*>(a.memory + page * 4096 + 64 + 8 * first.below(16)), a.gpu});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.word < b.word; });
  places.erase(
      std::unique(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.word == b.word; }),
      places.end());
  if (settings.delays) vmem::core::step_hook.store(stress::delay);
  std::atomic<bool> over{false};
  std::thread watcher = stress::watch(alive, over, 90);
  std::vector<std::vector<void*>> streams(settings.threads);
  for (auto& list : streams)
    for (int d = 0; d < devices; ++d) list.push_back(gpus->create_stream(d));

  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings.seconds);
  for (unsigned round = 0; std::chrono::steady_clock::now() < until; ++round) {
    std::atomic<bool> end{false};
    std::vector<std::vector<Operation>> parts(settings.threads);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < settings.threads; ++t) {
      threads.emplace_back([&, t] {
        Random random(seed * 1000003 + round * 101 + t);
        while (!end && parts[t].size() < 200000) work(random, streams[t].data(), parts[t]), ++alive;
      });
    }
    for (unsigned t = 0; t < settings.movers; ++t) {
      threads.emplace_back([&, t] {
        Random random(seed * 1000003 + round * 101 + 50 + t);
        while (!end) move(random);
      });
    }
    usleep(400000);
    end = true;
    for (std::thread& t : threads) t.join();
    std::vector<std::vector<Operation>> histories(places.size());
    for (const auto& part : parts)
      for (const Operation& o : part) histories[o.place].push_back(o);
    for (size_t p = 0; p < places.size(); ++p) {
      // Adds the final value as one more read.
      if (places[p].gpu) {
        const int rc = vmem_acquire(places[p].word, 8, VMEM_READ, VMEM_HOST, nullptr);
        if (rc != 0) differs("acquire between rounds: %d %s", rc, vmem_last_error());
      }
      const uint64_t last = *static_cast<volatile uint64_t*>(places[p].word);
      if (places[p].gpu) allow(vmem_release(places[p].word, 8, nullptr), "release");
      const uint64_t before = now(), after = now();
      histories[p].push_back({before, after, last, static_cast<uint32_t>(p), false});
      judged += histories[p].size();
      const std::string verdict = judge(histories[p], places[p].initial);
      if (!verdict.empty())
        differs("seed %llu, round %u, register %zu at %p (%zu operations): %s", static_cast<unsigned long long>(seed),
                round, p, static_cast<void*>(places[p].word), histories[p].size(), verdict.c_str());
      places[p].initial = last;
    }
  }
  over = true;
  watcher.join();
  vmem::core::step_hook.store(nullptr);
  for (auto& list : streams)
    for (void* s : list) gpus->destroy_stream(s);
  if (gpus != nullptr)
    for (const std::string& v : gpus->violations()) differs("the device saw: %s", v.c_str());
  struct vmem_stats s = {};
  s.size = sizeof s;
  vmem_stats(&s);
  vmem_shutdown();
  close(fd);
  unlink(path.c_str());
  printf(
      "seed %llu: %llu operations judged (%llu by devices) on %zu registers, %llu faults, %llu evictions, no "
      "difference\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(judged.load()),
      static_cast<unsigned long long>(by_device.load()), places.size(), static_cast<unsigned long long>(s.faults),
      static_cast<unsigned long long>(s.evictions));
  if (judged < 1000 || s.evictions < 20) differs("too little happened to be worth anything");
  if (devices != 0 && by_device == 0) differs("no device worked");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Linearizability of registers in memory that moves."};
  app.add_option("--seconds", settings.seconds);
  app.add_option("--threads", settings.threads);
  app.add_option("--movers", settings.movers);
  app.add_option("--registers", settings.registers);
  app.add_option("--bytes", settings.bytes, "of all regions")->transform(CLI::AsSizeValue(false));
  app.add_option("--budget", settings.budget);
  app.add_option("--transfer", settings.transfer);
  app.add_flag_callback("--no-move", stress::move_no_pages, "as on kernels that move no pages");
  app.add_option("--trap", settings.trap);
  app.add_option("--device", settings.device, stress::kDevices);
  app.add_option("--device-block", settings.device_block, "MiB");
  app.add_option("--devices", settings.devices, "so many simulated ones");
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-delays", settings.delays);
  CLI11_PARSE(app, argc, argv);
  return run(settings.seed);
}
