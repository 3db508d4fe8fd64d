// The device tier through the C API: disk to device and back, host frames to device and back,
// random blocks, first touch, leases of present blocks. Compared in one run with raw io_uring, raw
// pinned copies, the loop an expert writes by hand, and CUDA's own prefetch of managed memory.
//
// It does not measure: more than two GPUs, many threads that lease at once, pressure from other
// programs, compression, kernels that compute much (examples/vmem-stream does).
//
// At most --bytes + --budget of managed memory are alive at a time, and never more than an eighth
// of the free memory.
#include <sys/statfs.h>
#include <sys/utsname.h>

#include <CLI/CLI.hpp>
#include <fstream>

#include "gpu_limits.h"
#include "tier_peers.h"

namespace gpubench {

namespace {

class TierBench : public PeerRows {
 public:
  using PeerRows::PeerRows;

  // False: something failed, or a word was wrong.
  bool run() {
    from_disk();
    random_blocks();
    to_disk();
    for (const uint64_t step : {2 * kMiB, 8 * kMiB, 32 * kMiB}) {
      if (step <= span_) host_and_device(step);
    }
    both_ways();
    between_devices();
    first_touch();
    leases();
    loads();
    resident_kernel();
    table_.print();
    if (kernels_.wrong() != 0) printf("\nWRONG: %llu words were not what had been written\n", kernels_.wrong());
    if (!s_.json.empty()) save();
    return !table_.failed() && kernels_.wrong() == 0;
  }

 private:
  void save() const {
    utsname u;
    uname(&u);
    struct statfs f = {};
    statfs(s_.folder.c_str(), &f);
    char when[64];
    const time_t t = time(nullptr);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime(&t));
    char type[32];
    snprintf(type, sizeof type, "0x%lx", static_cast<unsigned long>(f.f_type));
    Json out{{"when", when},
             {"device", app_.words()},
             {"kernel", u.release},
             {"file_system", type},
             {"bytes", s_.bytes},
             {"device_budget", s_.budget},
             {"host_budget", s_.host_budget},
             {"part", s_.part},
             {"rounds", s_.rounds},
             {"wrong_words", kernels_.wrong()},
             {"block", s_.block},
             {"body", s_.device}};
    out["rows"] = table_.json();
    std::ofstream(s_.json) << out.dump(1) << "\n";
  }
};

int run(Settings s) {
  std::string why;
  const bool handles = s.device.ends_with("handles");
  const auto app = gpuapp::make_app(s.device, &why);
  if (app == nullptr) {
    printf("SKIPPED: no CUDA device: %s\n", why.c_str());
    return 77;
  }
  const bool sim = app->simulated();
  const auto standard = [](uint64_t& value, uint64_t wanted) { value = value != 0 ? value : wanted; };
  standard(s.bytes, sim ? 128 * kMiB : 2048 * kMiB);
  standard(s.budget, s.bytes / 4);
  standard(s.host_budget, sim ? 192 * kMiB : 2048 * kMiB);
  standard(s.part, sim ? 4 * kMiB : 32 * kMiB);
  if (s.bytes % s.part != 0 || s.part % kBlock != 0) {
    fprintf(stderr, "--bytes must be a multiple of --part, and that of 2 MiB\n");
    return 1;
  }
  if (!sim && !handles) vmem::gpu::require_managed(s.bytes + s.budget, vmem::gpu::managed_limit());
  vmem::set("device", app->setting());
  vmem::set("device_block_size", std::to_string(s.block));
  vmem::set("ssd_path", s.folder);
  vmem::set("device_budget", std::to_string(s.budget));
  vmem::set("host_budget", std::to_string(s.host_budget));
  vmem::check(vmem_init());
  bool good = false;
  {
    printf("%s%s; %llu MiB of data, device_budget %llu MiB, host_budget %llu MiB, parts of %llu MiB, median of %d\n\n",
           app->words().c_str(), (", device=" + s.device).c_str(), static_cast<unsigned long long>(s.bytes / kMiB),
           static_cast<unsigned long long>(s.budget / kMiB), static_cast<unsigned long long>(s.host_budget / kMiB),
           static_cast<unsigned long long>(s.part / kMiB), s.rounds);
    TierBench bench(*app, s);
    good = bench.run();
  }
  vmem_shutdown();
  return good ? 0 : 1;
}

}  // namespace

}  // namespace gpubench

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  setvbuf(stderr, nullptr, _IOLBF, 0);
  CLI::App app{"The device tier beside raw limits, the loop written by hand, and CUDA's own prefetch."};
  gpubench::Settings s;
  const auto size = CLI::AsSizeValue(false);
  app.add_option("--device", s.device, "auto, managed, handles, or sim and sim-handles: for the logic alone")
      ->check(CLI::IsMember({"auto", "managed", "handles", "sim", "sim-handles"}));
  app.add_option("--block", s.block, "device_block_size (2 MiB); rows with smaller calls are left out")
      ->transform(size);
  app.add_option("--bytes", s.bytes, "data on the disk, and the largest region (2 GiB)")->transform(size);
  app.add_option("--budget", s.budget, "device_budget (a quarter of the data)")->transform(size);
  app.add_option("--host-budget", s.host_budget, "host_budget (2 GiB)")->transform(size);
  app.add_option("--part", s.part, "bytes leased at once where data is streamed (32 MiB)")->transform(size);
  app.add_option("--span", s.span, "bytes that are moved between host memory and the device at once (256 MiB)")
      ->transform(size);
  app.add_option("--rounds", s.rounds, "times each row is measured")->check(CLI::Range(1, 100));
  app.add_option("--folder", s.folder, "where the disk's files are made ($TMPDIR, or /var/tmp)");
  app.add_option("--fast", s.fast, "a folder in memory for the rows named fast (/dev/shm)");
  app.add_option("--only", s.only,
                 "rows whose keys begin so, comma-separated: in,fast,out,change,random,h2d,d2h,duplex,peer,"
                 "touch,lease,load,kernel");
  app.add_option("-o,--json", s.json, "also write the figures there");
  CLI11_PARSE(app, argc, argv);
  try {
    return gpubench::run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "tier_bench: %s\n", e.what());
    return 1;
  }
}
