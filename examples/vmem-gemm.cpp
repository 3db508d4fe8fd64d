// vmem-gemm: C = A * B with matrices four times larger than the memory, of the device where there is one, that it may
// use. A tile of each is leased where it is multiplied, the next two are prefetched. The matrices are stored tile by
// tile: a tile is a range. Their numbers are small and whole, so that samples of every tile of C can be compared
// exactly.
#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <optional>
#include <string>

#include "common/gpu_app.h"
#include "common/gpu_memory.h"
#include "common/gpu_product.h"
#include "vmem/vmem.hpp"

namespace {

struct Settings {
  std::string device = "auto", cublas;
  uint64_t budget = 0, n = 0, tile = 0;
  bool spoil = false;
};

// n x n floats in t x t tiles.
class Matrix {
 public:
  Matrix(size_t n, size_t t, unsigned flags, const char* name) : t_(t), tiles_(n / t), region_(n * n * 4, flags) {
    region_.name(name);
  }
  float* tile(size_t i, size_t j) const { return region_.view<float>().data() + (i * tiles_ + j) * t_ * t_; }
  float& at(size_t i, size_t j) const { return tile(i / t_, j / t_)[i % t_ * t_ + j % t_]; }
  size_t tiles() const { return tiles_; }

 private:
  size_t t_, tiles_;
  vmem::region region_;
};

// Element (i, j) of A (which 0) or B (1): -4 to 4.
int number(size_t which, size_t i, size_t j) {
  uint64_t z = (i << 32 | j) * 0x9e3779b97f4a7c15u + which * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 32)) * 0x94d049bb133111ebu;
  return static_cast<int>((z >> 32) % 9) - 4;
}

// What an application writes. A tile of C stays leased until its sums are complete; the order of the k turns round from
// one tile to the next, so that the last tile of A is the first again.
template <typename Multiply>
void multiply_all(const Matrix& a, const Matrix& b, const Matrix& c, size_t t, int where, void* stream,
                  Multiply multiply) {
  const size_t tiles = a.tiles(), bytes = 4 * t * t, steps = tiles * tiles * tiles;
  const auto step = [&](size_t n) -> std::array<size_t, 3> {
    const size_t j = n / tiles % tiles, k = n % tiles;
    return {n / tiles / tiles, j, j % 2 == 0 ? k : tiles - 1 - k};
  };
  std::optional<vmem::lease> sums;
  for (size_t n = 0; n < steps; ++n) {
    const auto [i, j, k] = step(n);
    if (n % tiles == 0) sums.emplace(c.tile(i, j), bytes, VMEM_READ | VMEM_WRITE, where, stream);
    const vmem::lease left(a.tile(i, k), bytes, VMEM_READ, where, stream);
    const vmem::lease right(b.tile(k, j), bytes, VMEM_READ, where, stream);
    const auto [next_i, next_j, next_k] = step(std::min(n + 1, steps - 1));
    vmem::check(vmem_prefetch(a.tile(next_i, next_k), bytes, where, stream));
    vmem::check(vmem_prefetch(b.tile(next_k, next_j), bytes, where, stream));
    multiply(a.tile(i, k), b.tile(k, j), c.tile(i, j));
    if ((n + 1) % tiles == 0) sums.reset();
  }
}

// Of every tile of C, 16 elements.
size_t wrong_samples(const Matrix& c, size_t n, size_t t) {
  size_t wrong = 0;
  for (size_t tile = 0; tile < c.tiles() * c.tiles(); ++tile) {
    const size_t row = tile / c.tiles() * t, column = tile % c.tiles() * t;
    const vmem::lease lease(&c.at(row, column), 4 * t * t, VMEM_READ);
    for (size_t s = 0; s < 16; ++s) {
      const size_t i = row + (s * 977 + tile * 31) % t, j = column + (s * 379 + tile * 17) % t;
      long long sum = 0;
      for (size_t k = 0; k < n; ++k) sum += number(0, i, k) * number(1, k, j);
      wrong += c.at(i, j) != static_cast<float>(sum);
    }
  }
  return wrong;
}

int run(Settings s) {
  std::string why = "--device cpu";
  const auto app = s.device == "cpu" ? nullptr : gpuapp::make_app(s.device, &why);
  if (app == nullptr && s.device == "cuda") throw std::runtime_error("no GPU: " + why);
  const bool cuda = app != nullptr && !app->simulated();
  if (s.n == 0) s.n = cuda ? 8192 : 1536;
  if (s.tile == 0) s.tile = cuda ? 1024 : 256;
  if (s.n % s.tile != 0) throw std::runtime_error("--n is no multiple of --tile");
  const uint64_t bytes = 3 * s.n * s.n * sizeof(float);
  if (s.budget == 0) s.budget = std::max<uint64_t>(bytes / 4, 8 << 20);
  vmem::set("device", app != nullptr ? app->setting() : "none");
  if (app != nullptr) vmem::set("device_budget", std::to_string(s.budget));
  vmem::set("host_budget", std::to_string(app != nullptr ? std::max<uint64_t>(bytes / 2, 64 << 20) : s.budget));
  if (app == nullptr) vmem::set("block_size", "256KiB");
  vmem::check(vmem_init());
  size_t wrong = 0;
  {
    const auto product = app != nullptr ? gpuapp::make_product(*app, s.cublas) : nullptr;
    std::optional<gpuapp::Stream> stream;
    if (app != nullptr) stream.emplace(*app);
    printf("vmem-gemm: on %s\n", (app ? app->words() + ", " + product->words() : "the CPU (" + why + ")").c_str());
    const unsigned flags = app != nullptr ? 0 : VMEM_HOST_ONLY;
    const Matrix a(s.n, s.tile, flags, "A"), b(s.n, s.tile, flags, "B"), c(s.n, s.tile, flags, "C");
    for (size_t i = 0; i < s.n; ++i) {
      for (size_t j = 0; j < s.n; ++j) a.at(i, j) = number(0, i, j), b.at(i, j) = number(1, i, j);
    }
    const double start = rawdisk::now();
    void* const on = stream ? stream->get() : nullptr;
    multiply_all(a, b, c, s.tile, app != nullptr ? 0 : VMEM_HOST, on, [&](auto* x, auto* y, auto* z) {
      product != nullptr ? product->tile(x, y, z, s.tile, on) : gpuapp::multiply_tile(x, y, z, s.tile);
    });
    if (stream) stream->synchronize();
    const double seconds = rawdisk::now() - start, n = static_cast<double>(s.n);
    printf("vmem-gemm: %zu x %zu, %.1f MB with %.1f MB of memory: %.2f s, %.1f GFLOP/s, %.1f MB read from the SSD\n",
           s.n, s.n, 1e-6 * static_cast<double>(bytes), 1e-6 * static_cast<double>(s.budget), seconds,
           2e-9 * n * n * n / seconds, 1e-6 * static_cast<double>(vmem::stats().read_bytes));
    if (s.spoil) c.at(0, 0) += 1;
    wrong = wrong_samples(c, s.n, s.tile);
    printf("vmem-gemm: %s: %zu samples differ\n", wrong == 0 ? "right" : "WRONG", wrong);
  }
  vmem_shutdown();
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"C = A * B with matrices larger than the memory it may use."};
  Settings s;
  app.add_option("--n", s.n, "rows and columns (8192 on CUDA, else 1536)")->check(CLI::Range(64, 131072));
  app.add_option("--tile", s.tile, "rows and columns of a tile (1024 on CUDA, else 256)")->check(CLI::Range(64, 16384));
  app.add_option("--budget", s.budget, "memory (default: a quarter of all)")->transform(CLI::AsSizeValue(false));
  app.add_option("--device", s.device, "auto (a GPU, else the CPU), cuda, cpu, or sim: a simulated device")
      ->check(CLI::IsMember({"auto", "cuda", "cpu", "sim"}));
  app.add_option("--cublas", s.cublas, "the cuBLAS library to load");
  app.add_flag("--spoil", s.spoil, "change a number before they are verified: exit code 1");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(s);
  } catch (const std::exception& e) {
    fprintf(stderr, "vmem-gemm: %s\n", e.what());
    return 1;
  }
}
