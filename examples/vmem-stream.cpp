// vmem-stream: a chain of large matrix products whose weights lie in a file four times larger than
// the device memory the program may use. Each layer is leased while a stream multiplies with it;
// the next one is prefetched at the same time.
//
// All of the paging is in one_pass(). The rest makes the file, measures the machine's limits in the
// same run, and computes the chain again on plain device memory that plain reads fill.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "common/command_line.h"
#include "common/gpu_app.h"
#include "common/gpu_memory.h"
#include "common/gpu_product.h"
#include "common/input.h"
#include "common/own_files.h"
#include "common/raw_disk.h"
#include "core/text.h"
#include "vmem/vmem.hpp"

namespace {

constexpr int kNothingToRunOn = 77;
constexpr uint64_t kMiB = 1 << 20, kBlock = 2 * kMiB;

struct Settings {
  std::string file, device = "auto", cublas;
  uint64_t make = 2048 * kMiB, budget = 0, host_budget = 1024 * kMiB;
  size_t n = 0, rows = 0;
  int passes = 3, ahead = 1;
  bool keep = false;
};

struct Pass {
  double seconds = 0, computed = 0;  // seconds: the whole pass; computed: the products alone, by the GPU's clock
};

// An fp16 number of random sign with a magnitude in [2^power, 2^(power + 1)), as bits.
uint16_t half_bits(uint64_t random, int power) {
  return static_cast<uint16_t>((random & 0x8000) | (static_cast<uint64_t>(power + 15) << 10) | (random & 0x3ff));
}

uint64_t mix(uint64_t z) {
  z = (z + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Writes weights of such a size that the values neither grow nor vanish through the layers.
void make_weights(const std::string& path, uint64_t bytes, size_t n) {
  const int power = static_cast<int>(std::lround((-std::log2(static_cast<double>(n)) - 1.22) / 2));
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  std::vector<uint16_t> part(4 * kMiB / 2);
  for (uint64_t at = 0; at < bytes; at += part.size() * 2) {
    for (size_t i = 0; i < part.size(); i += 4) {
      const uint64_t r = mix(at / 8 + i);
      for (size_t k = 0; k < 4; ++k) part[i + k] = half_bits(r >> (16 * k), power);
    }
    const uint64_t size = std::min<uint64_t>(part.size() * 2, bytes - at);
    out.write(reinterpret_cast<const char*>(part.data()), static_cast<std::streamsize>(size));
  }
  out.close();
  if (!out) throw std::system_error(errno, std::generic_category(), path);
  // Flush now, so that the disk is idle when reading is measured.
  if (const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

// The chain, with two alternating buffers.
class Chain {
 public:
  Chain(gpuapp::App& app, gpuapp::Product& product, size_t n, size_t rows, size_t layers)
      : n_(n),
        rows_(rows),
        layers_(layers),
        product_(product),
        input_(app, bytes()),
        a_(app, bytes()),
        b_(app, bytes()) {
    const gpuapp::Pinned numbers(app, std::min<size_t>(bytes(), 32 * kMiB));
    const gpuapp::Stream stream(app);
    auto* x = reinterpret_cast<uint16_t*>(numbers.data());
    for (size_t i = 0; i < numbers.size() / 2; ++i) x[i] = half_bits(mix(i), -1);
    for (size_t at = 0; at < bytes(); at += numbers.size()) {
      app.copy(input_.data() + at, x, std::min(numbers.size(), bytes() - at), stream.get());
    }
    stream.synchronize();
  }
  size_t bytes() const { return rows_ * n_ * 2; }
  size_t layer_bytes() const { return n_ * n_ * 2; }
  size_t layers() const { return layers_; }
  void multiply(size_t layer, const void* w, bool plain_w, void* stream) {
    const void* x = (layer == 0 ? input_ : layer % 2 == 0 ? b_ : a_).data();
    product_.run(x, w, (layer % 2 == 0 ? a_ : b_).data(), rows_, n_, plain_w, stream);
  }
  char* result() { return (layers_ % 2 == 1 ? a_ : b_).data(); }

 private:
  size_t n_, rows_, layers_;
  gpuapp::Product& product_;
  gpuapp::Plain input_, a_, b_;
};

// The application's main loop: lease a layer, multiply, release, and announce the next one early.
Pass one_pass(gpuapp::App& app, Chain& chain, const std::string& file, int ahead) {
  const size_t size = chain.layer_bytes();
  vmem::region weights(size * chain.layers(), file, 0, VMEM_MAP_READ);
  weights.name("weights");
  const char* const w = static_cast<const char*>(weights.data());
  const gpuapp::Stream stream(app);
  std::vector<std::pair<gpuapp::MarkPtr, gpuapp::MarkPtr>> marks;
  const double start = rawdisk::now();
  size_t asked = 0;
  for (size_t layer = 0; layer < chain.layers(); ++layer) {
    for (; asked < chain.layers() && asked <= layer + static_cast<size_t>(ahead); ++asked) {
      vmem::check(vmem_prefetch(w + asked * size, size, 0, nullptr));
    }
    const vmem::lease lease(w + layer * size, size, VMEM_READ, 0, stream.get());
    auto before = app.mark(stream.get());
    chain.multiply(layer, w + layer * size, false, stream.get());
    marks.emplace_back(std::move(before), app.mark(stream.get()));
  }
  stream.synchronize();
  Pass pass{rawdisk::now() - start, 0};
  for (const auto& [before, after] : marks) pass.computed += after->seconds_since(*before);
  return pass;
}

// The same chain without libvmem: plain reads into a pinned buffer, a copy to plain device memory, the product.
void plain_pass(gpuapp::App& app, Chain& chain, const std::string& file) {
  const size_t size = chain.layer_bytes();
  const gpuapp::Pinned buffer(app, size);
  const gpuapp::Plain weights(app, size);
  const gpuapp::Stream stream(app);
  std::ifstream in(file, std::ios::binary);
  for (size_t layer = 0; layer < chain.layers(); ++layer) {
    in.read(buffer.data(), static_cast<std::streamsize>(size));
    if (!in) throw std::runtime_error(file + " cannot be read to its end");
    app.copy(weights.data(), buffer.data(), size, stream.get());
    chain.multiply(layer, weights.data(), true, stream.get());
    stream.synchronize();
  }
}

// Bytes of plain device memory that differ from `kept`.
uint64_t differences(gpuapp::App& app, const char* result, const std::vector<char>& kept) {
  const gpuapp::Pinned part(app, 32 * kMiB);
  const gpuapp::Stream stream(app);
  uint64_t wrong = 0;
  for (size_t at = 0; at < kept.size(); at += part.size()) {
    const size_t size = std::min(part.size(), kept.size() - at);
    app.copy(part.data(), result + at, size, stream.get());
    stream.synchronize();
    if (memcmp(part.data(), kept.data() + at, size) == 0) continue;
    for (size_t i = 0; i < size; ++i) wrong += part.data()[i] != kept[at + i];
  }
  return wrong;
}

std::vector<char> keep(gpuapp::App& app, const char* result, size_t bytes) {
  std::vector<char> kept(bytes);
  const gpuapp::Pinned part(app, 32 * kMiB);
  const gpuapp::Stream stream(app);
  for (size_t at = 0; at < bytes; at += part.size()) {
    const size_t size = std::min(part.size(), bytes - at);
    app.copy(part.data(), result + at, size, stream.get());
    stream.synchronize();
    memcpy(kept.data() + at, part.data(), size);
  }
  return kept;
}

// Returns the number of rows for which a product takes nine tenths of the time that reading its
// layer takes: overlap helps most there. The three buffers of rows take at most an eighth of the
// free memory.
size_t balanced_rows(gpuapp::App& app, gpuapp::Product& product, size_t n, double read_gbs) {
  if (app.simulated()) return 8;
  constexpr size_t kTry = 8192;
  const size_t most = std::min<uint64_t>(app.free_bytes() / 8, 3072 * kMiB) / (3 * n * 2) / 256 * 256;
  const size_t rows = std::min(kTry, most);
  const gpuapp::Plain w(app, n * n * 2), x(app, rows * n * 2), y(app, rows * n * 2);
  const gpuapp::Stream stream(app);
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto before = app.mark(stream.get());
    product.run(x.data(), w.data(), y.data(), rows, n, true, stream.get());
    const auto after = app.mark(stream.get());
    stream.synchronize();
    best = std::min(best, after->seconds_since(*before));
  }
  const double io = static_cast<double>(n * n * 2) / 1e9 / read_gbs;
  const auto wanted = static_cast<size_t>(0.9 * io / best * static_cast<double>(rows));
  return std::clamp<size_t>(wanted / 256 * 256, std::min<size_t>(256, most), most);
}

int run(Settings s) {
  std::optional<input::File> given;
  if (!s.file.empty()) given.emplace(s.file);
  std::string why;
  const auto app = gpuapp::make_app(s.device, &why);
  if (app == nullptr) {
    printf("vmem-stream: needs a GPU, and there is none to use here (%s): nothing was run\n",
           vmem::core::printable(why).c_str());
    return kNothingToRunOn;
  }
  if (s.n == 0) s.n = app->simulated() ? 1024 : 4096;
  if (app->simulated()) s.make = std::min(s.make, 64 * kMiB);
  if (s.n % 64 != 0) throw input::Refused("--n " + std::to_string(s.n) + " is no multiple of 64");
  const uint64_t layer = s.n * s.n * 2;
  vmem::set("device", app->setting());
  vmem::set("host_budget", std::to_string(s.host_budget));
  const bool made = s.file.empty();
  uint64_t size = s.make;
  if (!made) {
    const uint64_t all = given->size();
    if (all % layer != 0)
      throw input::Refused(s.file + ": its " + std::to_string(all) + " bytes are no whole number of layers of " +
                           std::to_string(layer) + " (--n)");
    size = std::min(all, std::max(s.make, 4096 * kMiB));
  }
  if (size > app->managed_limit()) {
    size = app->managed_limit();
    printf("vmem-stream: the first %.2f GB only: an eighth of the free device memory, at most 8 GiB\n",
           static_cast<double>(size) / 1e9);
  }
  const size_t layers = size / layer;
  if (layers < 4) throw input::Refused("too little for four layers of " + std::to_string(layer) + " bytes");
  size = layers * layer;
  // One layer in use, one being prefetched.
  const uint64_t in_blocks = layer % kBlock == 0 ? layer : (layer / kBlock + 2) * kBlock;
  if (s.budget == 0) s.budget = std::max(size / 4, (1 + static_cast<uint64_t>(s.ahead)) * in_blocks);
  if (s.budget < in_blocks)
    throw input::Refused("--budget " + std::to_string(s.budget) + " has no room for a layer, in whole blocks " +
                         std::to_string(in_blocks) + " bytes");
  vmem::set("device_budget", std::to_string(s.budget));
  vmem::check(vmem_init());
  ownfiles::handle_signals();
  std::optional<ownfiles::PrivateFolder> folder;
  std::optional<ownfiles::OwnFile> weights;
  int rc = 1;
  {
    const auto product = gpuapp::make_product(*app, s.cublas);
    printf("vmem-stream: %s\nvmem-stream: 16-bit products by %s\n", vmem::core::printable(app->words()).c_str(),
           vmem::core::printable(product->words()).c_str());
    if (made) {
      folder.emplace("vmem-stream");
      weights.emplace(folder->path() + "/weights");
      s.file = weights->path();
      make_weights(s.file, size, s.n);
      if (s.keep) {
        s.file = folder->path() + "/weights";
        weights->put_in_place_of(s.file);
      }
    }
    rawdisk::Plan plan;
    plan.span = plan.total = size / plan.block * plan.block;
    std::vector<double> raws;
    for (int i = 0; i < s.passes; ++i) {
      const rawdisk::Result raw = rawdisk::run(s.file, plan);
      if (!raw.error.empty()) throw std::runtime_error("raw reads of " + s.file + ": " + raw.error);
      raws.push_back(raw.read_gbs);
    }
    std::sort(raws.begin(), raws.end());
    const double raw = raws[raws.size() / 2];
    double copy = 0;
    {
      gpuapp::Pinned host(*app, 64 * kMiB);
      gpuapp::Plain device(*app, 64 * kMiB);
      gpuapp::copy_rate(*app, host, device, 32 * kMiB, 64 * kMiB, true);
      copy = gpuapp::copy_rate(*app, host, device, 32 * kMiB, (app->simulated() ? 64 : 1024) * kMiB, true);
    }
    if (s.rows == 0) s.rows = balanced_rows(*app, *product, s.n, raw);
    printf("vmem-stream: %zu layers of %zu x %zu, %.2f GB of weights in %s, device budget %.2f GB (1/%.1f), %zu rows\n",
           layers, s.n, s.n, static_cast<double>(size) / 1e9, vmem::core::printable(s.file).c_str(),
           static_cast<double>(s.budget) / 1e9, static_cast<double>(size) / static_cast<double>(s.budget), s.rows);
    Chain chain(*app, *product, s.n, s.rows, layers);
    std::vector<char> kept;
    std::vector<Pass> passes;
    uint64_t wrong = 0;
    for (int i = 0; i < s.passes; ++i) {
      passes.push_back(one_pass(*app, chain, s.file, s.ahead));
      printf("vmem-stream: pass %d: %.3f s\n", i + 1, passes.back().seconds);
      if (i == 0) {
        kept = keep(*app, chain.result(), chain.bytes());
      } else {
        wrong += differences(*app, chain.result(), kept);
      }
    }
    plain_pass(*app, chain, s.file);
    wrong += differences(*app, chain.result(), kept);
    // Weights given by the user may really produce equal bytes.
    const bool all_equal_bytes = made && std::all_of(kept.begin(), kept.end(), [&](char c) { return c == kept[0]; });

    std::sort(passes.begin(), passes.end(), [](const Pass& a, const Pass& b) { return a.seconds < b.seconds; });
    const Pass median = passes[passes.size() / 2];
    const double gb = static_cast<double>(size) / 1e9, gbs = gb / median.seconds, io = gb / raw;
    const double bound = std::max(io, median.computed);
    struct vmem_device_stats d = {};
    d.size = sizeof d;
    vmem::check(vmem_device_stats(0, &d));
    printf("\n| what | figure |\n|---|---|\n");
    printf("| time of a pass, median of %d (lowest to highest) | %.3f s (%.3f to %.3f) |\n", s.passes, median.seconds,
           passes.front().seconds, passes.back().seconds);
    printf("| SSD -> host -> device | %.2f GB/s |\n", gbs);
    printf("| raw limit in this run (io_uring, huge pages, reads) | %.2f GB/s: the pass reached %.2f of it |\n", raw,
           gbs / raw);
    printf("| raw limit in this run (pinned copy to the device, 32 MiB) | %.1f GB/s |\n", copy);
    printf("| the GPU computed | %.3f s, %.1f %% of the time |\n", median.computed,
           100 * median.computed / median.seconds);
    printf("| time against max(compute, reading at the raw limit) | %.3f against %.3f s: %.3f |\n", median.seconds,
           bound, median.seconds / bound);
    printf("| reading and computing in turn would take | %.3f s |\n", io + median.computed);
    printf("| device memory that libvmem may use | %.2f GB |\n", static_cast<double>(d.budget) / 1e9);
    printf("| evicted from the device | %llu blocks, %llu of them without a copy |\n",
           static_cast<unsigned long long>(d.evictions), static_cast<unsigned long long>(d.clean_drops));
    const bool good = wrong == 0 && !all_equal_bytes;
    if (good) {
      printf("| result | equal, bit for bit, to plain device memory fed by plain reads, in every pass |\n");
    } else {
      printf("| result | WRONG: %llu bytes differ from plain device memory%s |\n",
             static_cast<unsigned long long>(wrong), all_equal_bytes ? "; every byte of the result is the same" : "");
    }
    rc = good ? 0 : 1;
  }
  vmem_shutdown();
  return rc;
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  CLI::App app{"A chain of matrix products with weights from a file, larger than the device memory it may use."};
  Settings s;
  app.add_option("file", s.file, "weights: n x n matrices of fp16, one after the other (default: made, and removed)");
  app.add_option("--make", s.make, "bytes of weights to make, or to use of a file")->transform(size_from(1));
  app.add_option("--budget", s.budget, "device memory libvmem may use (default: a quarter of the weights)")
      ->transform(size_of(vmem::core::Option::device_budget));
  app.add_option("--host-budget", s.host_budget, "host memory libvmem may use")
      ->transform(size_of(vmem::core::Option::host_budget));
  app.add_option("--n", s.n, "rows and columns of a layer, a multiple of 64 (4096)")->check(CLI::Range(64, 32768));
  app.add_option("--rows", s.rows, "rows of the input (default: so many that computing takes as long as reading)")
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--passes", s.passes, "times the chain is run")->check(CLI::Range(1, 100));
  app.add_option("--ahead", s.ahead, "layers prefetched ahead")->check(CLI::Range(0, 16));
  app.add_option("--device", s.device,
                 "auto, managed, handles, or sim and sim-handles: simulated devices, small and slow")
      ->check(CLI::IsMember({"auto", "managed", "handles", "sim", "sim-handles"}));
  app.add_option("--cublas", s.cublas, "the cuBLAS library to load");
  app.add_flag("--keep", s.keep, "keep the file that was made");
  return run_program(app, "vmem-stream", argc, argv, [&] { return run(s); });
}
