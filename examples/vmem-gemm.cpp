// vmem-gemm: C = A * B with matrices four times larger than the memory it may use: the device's
// memory, if there is a device. The program leases the tiles that it multiplies and prefetches the
// next two. The matrices are stored tile by tile, so each tile is one range. They come from .npy
// files or are generated from small whole numbers. Samples of every tile of C are compared with
// sums computed separately.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/blas.h"
#include "common/command_line.h"
#include "common/gpu_app.h"
#include "common/gpu_memory.h"
#include "common/gpu_product.h"
#include "common/input.h"
#include "common/npy.h"
#include "common/own_files.h"
#include "common/progress.h"
#include "core/text.h"
#include "vmem/vmem.hpp"

namespace {

struct Settings {
  std::string device = "auto", cublas, blas, left, right, output;
  uint64_t budget = 0, n = 0, tile = 0;
  bool spoil = false;
};

// Bytes of a matrix of this many tiles. The product of two valid files may have more bytes than
// there are addresses.
size_t bytes_of(size_t down, size_t across, size_t t) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(down, across, &bytes) || __builtin_mul_overflow(bytes, t * t * 4, &bytes))
    throw input::Refused("a matrix of " + std::to_string(down) + " x " + std::to_string(across) +
                         " tiles is too large");
  return bytes;
}

// rows x columns floats in t x t tiles; the last tile of a row or column is padded with zeros.
class Matrix {
 public:
  Matrix(size_t rows, size_t columns, size_t t, unsigned flags, const char* name)
      : t_(t), down_((rows + t - 1) / t), across_((columns + t - 1) / t), region_(bytes_of(down_, across_, t), flags) {
    region_.name(name);
  }
  float* tile(size_t i, size_t j) const { return region_.view<float>().data() + (i * across_ + j) * t_ * t_; }
  float& at(size_t i, size_t j) const { return tile(i / t_, j / t_)[i % t_ * t_ + j % t_]; }
  size_t down() const { return down_; }
  size_t across() const { return across_; }

  // Walks tile by tile: a row of a tile is one piece of the file's row.
  template <typename Piece>
  void each_piece(size_t rows, size_t columns, Piece piece) const {
    Progress progress("files", rows * columns);
    for (size_t i = 0; i < rows; i += t_) {
      for (size_t j = 0; j < columns; j += t_) {
        for (size_t r = i; r < std::min(i + t_, rows); ++r) {
          const size_t count = std::min(t_, columns - j);
          piece(r, j, &at(r, j), count);
          progress.add(count);
        }
      }
    }
  }

 private:
  size_t t_, down_, across_;
  vmem::region region_;
};

// Element (i, j) of A (which 0) or B (1): -4 to 4.
int number(size_t which, size_t i, size_t j) {
  uint64_t z = (i << 32 | j) * 0x9e3779b97f4a7c15u + which * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 32)) * 0x94d049bb133111ebu;
  return static_cast<int>((z >> 32) % 9) - 4;
}

// The application's main loop. A tile of C stays leased until its sums are complete. The order of k
// reverses from one tile to the next, so that the last tile of A is the first again.
template <typename Multiply>
void multiply_all(const Matrix& a, const Matrix& b, const Matrix& c, size_t t, int where, void* stream,
                  Multiply multiply) {
  const size_t bytes = 4 * t * t, columns = c.across(), depth = a.across(), steps = c.down() * columns * depth;
  const auto step = [&](size_t n) -> std::array<size_t, 3> {
    const size_t j = n / depth % columns, k = n % depth;
    return {n / depth / columns, j, j % 2 == 0 ? k : depth - 1 - k};
  };
  Progress progress("multiplying", steps);
  std::optional<vmem::lease> sums;
  for (size_t n = 0; n < steps; ++n) {
    const auto [i, j, k] = step(n);
    if (n % depth == 0) sums.emplace(c.tile(i, j), bytes, VMEM_READ | VMEM_WRITE, where, stream);
    const vmem::lease left(a.tile(i, k), bytes, VMEM_READ, where, stream);
    const vmem::lease right(b.tile(k, j), bytes, VMEM_READ, where, stream);
    const auto [next_i, next_j, next_k] = step(std::min(n + 1, steps - 1));
    vmem::check(vmem_prefetch(a.tile(next_i, next_k), bytes, where, nullptr));
    vmem::check(vmem_prefetch(b.tile(next_k, next_j), bytes, where, nullptr));
    multiply(a.tile(i, k), b.tile(k, j), c.tile(i, j));
    if ((n + 1) % depth == 0) sums.reset();
    progress.add(1);
  }
}

struct Shape {
  size_t rows, depth, columns;
};

// The expected sum of products for an element of C, for fp32 additions in any order.
class Sum {
 public:
  void add(double product) {
    (product < 0 ? down_ : up_) += std::fabs(product);
    largest_ = std::max(largest_, std::fabs(product));
    sum_ += product;
    ++terms_;
  }
  // Whole numbers must be equal. For other numbers the rounding errors of this many additions are
  // allowed, relative to the sum of the magnitudes, plus the smallest fp32 number for each. An
  // infinity is right if the sum can reach it. NaN is right if both infinities can be reached or an
  // input is NaN.
  bool is(double c, bool whole) const {
    const double share = static_cast<double>(terms_ + 1) * 0x1p-24, most = FLT_MAX * (1 - share);
    if (std::isnan(sum_)) return std::isnan(c);
    if (std::isnan(c)) return up_ >= most && down_ >= most;
    if (std::isinf(c)) return (c > 0 ? up_ : down_) >= most;
    if (std::isinf(sum_) || largest_ > 2.0 * FLT_MAX) return false;
    const double allowed = whole ? 0 : (up_ + down_) * share + static_cast<double>(terms_ + 1) * 0x1p-149;
    return std::fabs(c - sum_) <= allowed;
  }

 private:
  double sum_ = 0, up_ = 0, down_ = 0, largest_ = 0;
  size_t terms_ = 0;
};

// Checks 16 elements of every tile of C.
size_t wrong_samples(const Matrix& a, const Matrix& b, const Matrix& c, const Shape& n, size_t t, bool made,
                     size_t* samples) {
  size_t wrong = 0;
  for (size_t tile = 0; tile < c.down() * c.across(); ++tile) {
    const size_t row = tile / c.across() * t, column = tile % c.across() * t;
    const vmem::lease lease(&c.at(row, column), 4 * t * t, VMEM_READ);
    for (size_t s = 0; s < 16; ++s, ++*samples) {
      const size_t i = row + (s * 977 + tile * 31) % std::min(t, n.rows - row);
      const size_t j = column + (s * 379 + tile * 17) % std::min(t, n.columns - column);
      Sum sum;
      for (size_t k = 0; k < n.depth; ++k) {
        const double x = made ? number(0, i, k) : static_cast<double>(a.at(i, k));
        const double y = made ? number(1, k, j) : static_cast<double>(b.at(k, j));
        sum.add(x * y);
      }
      wrong += !sum.is(static_cast<double>(c.at(i, j)), made);
    }
  }
  return wrong;
}

// Compares a matrix with its file, using a second reader.
size_t differences(const Matrix& m, const npy::File& file) {
  npy::Plain again(file.file());
  std::vector<float> piece;
  size_t wrong = 0;
  m.each_piece(file.rows, file.columns, [&](size_t row, size_t column, const float* at, size_t count) {
    piece.assign(at, at + count);
    wrong += again.differences(row * file.columns + column, piece.data(), count);
  });
  return wrong;
}

int run(Settings s) {
  std::string why = "--device cpu";
  const auto app = s.device == "cpu" ? nullptr : gpuapp::make_app(s.device, &why);
  if (app == nullptr && s.device != "auto" && s.device != "cpu") throw std::runtime_error("no GPU: " + why);
  const bool cuda = app != nullptr && !app->simulated();
  if (s.n == 0) s.n = cuda ? 8192 : 1536;
  if (s.tile == 0) s.tile = cuda ? 1024 : 256;
  Shape n{s.n, s.n, s.n};
  std::optional<npy::File> left, right;
  std::optional<npy::NewFile> product_file;
  if (!s.left.empty()) {
    if (s.right.empty()) throw input::Refused("two files are multiplied: give a second one");
    left.emplace(s.left), right.emplace(s.right);
    if (left->columns != right->rows)
      throw input::Refused(s.left + " has " + std::to_string(left->columns) + " columns, " + s.right + " " +
                           std::to_string(right->rows) + " rows: no product");
    n = {left->rows, left->columns, right->columns};
  } else if (s.n % s.tile != 0) {
    throw input::Refused("--n " + std::to_string(s.n) + " is no multiple of --tile " + std::to_string(s.tile));
  }
  std::optional<ownfiles::OwnFile> output;
  if (!s.output.empty()) {
    ownfiles::handle_signals();
    ownfiles::as_named([&] {
      ownfiles::must_be_new(s.output);
      output.emplace(s.output);
    });
    product_file.emplace(output->again(), n.rows, n.columns);
  }
  const uint64_t bytes = (n.rows * n.depth + n.depth * n.columns + n.rows * n.columns) * sizeof(float);
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
    const blas::Library cpu(s.blas);
    printf("vmem-gemm: on %s\n", vmem::core::printable(app ? app->words() + ", " + product->words()
                                                           : "the CPU (" + why + "), by " + cpu.words())
                                     .c_str());
    const unsigned flags = app != nullptr ? 0 : VMEM_HOST_ONLY;
    const Matrix a(n.rows, n.depth, s.tile, flags, "A"), b(n.depth, n.columns, s.tile, flags, "B"),
        c(n.rows, n.columns, s.tile, flags, "C");
    if (left) {
      std::vector<float> piece(s.tile);  // read into plain memory: a system call must not wait for a block
      a.each_piece(n.rows, n.depth, [&](size_t row, size_t column, float* at, size_t count) {
        left->read(row, column, piece.data(), count);
        std::copy_n(piece.data(), count, at);
      });
      b.each_piece(n.depth, n.columns, [&](size_t row, size_t column, float* at, size_t count) {
        right->read(row, column, piece.data(), count);
        std::copy_n(piece.data(), count, at);
      });
    } else {
      for (size_t i = 0; i < s.n; ++i) {
        for (size_t j = 0; j < s.n; ++j) a.at(i, j) = number(0, i, j), b.at(i, j) = number(1, i, j);
      }
    }
    const double start = rawdisk::now();
    void* const on = stream ? stream->get() : nullptr;
    multiply_all(a, b, c, s.tile, app != nullptr ? 0 : VMEM_HOST, on, [&](auto* x, auto* y, auto* z) {
      if (product != nullptr) {
        product->tile(x, y, z, s.tile, on);
      } else if (cpu.found()) {
        cpu.tile(x, y, z, s.tile);
      } else {
        gpuapp::multiply_tile(x, y, z, s.tile);
      }
    });
    if (stream) stream->synchronize();
    const double seconds = rawdisk::now() - start;
    const double additions =
        static_cast<double>(n.rows) * static_cast<double>(n.depth) * static_cast<double>(n.columns);
    printf("vmem-gemm: %zu x %zu, %.1f MB with %.1f MB of memory: %.2f s, %.1f GFLOP/s, %.1f MB read from the SSD\n",
           n.rows, n.columns, 1e-6 * static_cast<double>(bytes), 1e-6 * static_cast<double>(s.budget), seconds,
           2e-9 * additions / seconds, 1e-6 * static_cast<double>(vmem::stats().read_bytes));
    if (s.spoil) c.at(0, 0) += 1;
    size_t samples = 0;
    wrong = wrong_samples(a, b, c, n, s.tile, !left, &samples);
    printf("vmem-gemm: verified: %zu mismatches in %zu samples\n", wrong, samples);
    if (left) {
      const size_t differ = differences(a, *left) + differences(b, *right);
      printf("vmem-gemm: verified: %zu numbers are not as in the files\n", differ);
      left->file().must_be_unchanged();
      right->file().must_be_unchanged();
      wrong += differ;
    }
    if (product_file && wrong == 0) {
      std::vector<float> piece(s.tile);
      c.each_piece(n.rows, n.columns, [&](size_t row, size_t column, const float* at, size_t count) {
        std::copy_n(at, count, piece.data());
        product_file->write(row, column, piece.data(), count);
      });
      output->put_as_new(s.output);
    }
  }
  vmem_shutdown();
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"C = A * B with matrices larger than the memory it may use."};
  Settings s;
  app.add_option("A", s.left, "matrix of float32, a .npy file; without it A and B are made");
  app.add_option("B", s.right, "as many rows as A has columns");
  app.add_option("-o,--output", s.output, "new .npy file for the product");
  app.add_option("--n", s.n, "rows and columns (8192 on CUDA, else 1536)")->check(CLI::Range(64, 131072));
  app.add_option("--tile", s.tile, "rows and columns of a tile (1024 on CUDA, else 256)")->check(CLI::Range(64, 16384));
  app.add_option("--budget", s.budget, "memory (default: a quarter of all)")
      ->transform(size_of(vmem::core::Option::host_budget));
  app.add_option("--device", s.device,
                 "auto (a GPU, else the CPU), cpu, managed, handles, or sim and sim-handles: simulated devices")
      ->check(CLI::IsMember({"auto", "cpu", "managed", "handles", "sim", "sim-handles"}));
  app.add_option("--blas", s.blas, "the BLAS library for the CPU (default: one that is installed; none: a plain loop)");
  app.add_option("--cublas", s.cublas, "the cuBLAS library to load");
  app.add_flag("--spoil", s.spoil, "change a number before they are verified: exit code 1");
  return run_program(app, "vmem-gemm", argc, argv, [&] { return run(s); });
}
