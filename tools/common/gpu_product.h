// Matrix products for the examples. cuBLAS computes them; it is loaded on demand, so the program
// also starts without it. On the simulated device, or without a device, a CPU computes them.
//   run   Y = X * W of square 16-bit matrices: fp16, fp32 sums; on the simulated device whole numbers modulo 65536
//   tile  C += A * B of t x t fp32 numbers
#pragma once

#include "common/gpu_app.h"
#ifdef VMEM_HAVE_CUDA
#include <cublas_v2.h>
#include <dlfcn.h>
#endif

namespace gpuapp {

class Product {
 public:
  virtual ~Product() = default;
  virtual std::string words() const = 0;
  // Row-major: y and x are rows x n in plain device memory, w is n x n there or in a region (leased). Asynchronous.
  virtual void run(const void* x, const void* w, void* y, size_t rows, size_t n, bool plain_w, void* stream) = 0;
  // Row-major tiles in regions, all three leased. Asynchronous.
  virtual void tile(const float* a, const float* b, float* c, size_t t, void* stream) = 0;
};

// Computes C += A * B on the calling thread.
inline void multiply_tile(const float* a, const float* b, float* c, size_t t) {
  for (size_t i = 0; i < t; ++i) {
    for (size_t k = 0; k < t; ++k) {
      const float x = a[i * t + k];
      for (size_t j = 0; j < t; ++j) c[i * t + j] += x * b[k * t + j];
    }
  }
}

class SimProduct final : public Product {
 public:
  std::string words() const override { return "a CPU"; }
  void run(const void* x, const void* w, void* y, size_t rows, size_t n, bool plain_w, void* stream) override {
    SimApp::launch(stream, [=](SimApp::Kernel& kernel) {
      const auto* in = static_cast<const uint16_t*>(x);
      const auto* weights = static_cast<const uint16_t*>(plain_w ? w : kernel.at(w, n * n * 2, false));
      auto* out = static_cast<uint16_t*>(y);
      if (weights == nullptr) return;
      memset(out, 0, rows * n * 2);
      for (size_t r = 0; r < rows; ++r) {
        for (size_t k = 0; k < n; ++k) {
          const uint32_t a = in[r * n + k];
          for (size_t c = 0; c < n; ++c) {
            out[r * n + c] = static_cast<uint16_t>(out[r * n + c] + a * weights[k * n + c]);
          }
        }
      }
    });
  }
  void tile(const float* a, const float* b, float* c, size_t t, void* stream) override {
    SimApp::launch(stream, [=](SimApp::Kernel& kernel) {
      const size_t size = t * t * sizeof(float);
      const auto* left = reinterpret_cast<const float*>(kernel.at(a, size, false));
      const auto* right = reinterpret_cast<const float*>(kernel.at(b, size, false));
      auto* out = reinterpret_cast<float*>(kernel.at(c, size, true));
      if (left != nullptr && right != nullptr && out != nullptr) multiply_tile(left, right, out, t);
    });
  }
};

#ifdef VMEM_HAVE_CUDA
class CublasProduct final : public Product {
 public:
  // path: the library's path; "" tries the usual names. Throws if no library is found.
  explicit CublasProduct(const std::string& path) {
    std::string tried;
    for (const std::string& name : path.empty()
                                       ? std::vector<std::string>{"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                                                  "/usr/local/cuda/lib64/libcublas.so"}
                                       : std::vector<std::string>{path}) {
      library_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) {
        name_ = name;
        break;
      }
      tried = dlerror();
    }
    if (library_ == nullptr) throw std::runtime_error("cuBLAS is needed (--cublas PATH): " + tried);
    find("cublasCreate_v2", &create_);
    find("cublasDestroy_v2", &destroy_);
    find("cublasSetStream_v2", &set_stream_);
    find("cublasGemmEx", &gemm_);
    find("cublasGetVersion_v2", &version_);
    must(create_(&handle_), "cublasCreate");
  }
  ~CublasProduct() override { destroy_(handle_); }  // the library stays loaded: its threads may still run
  std::string words() const override {
    int v = 0;
    version_(handle_, &v);
    char text[300];
    snprintf(text, sizeof text, "cuBLAS %d.%d.%d (%s)", v / 10000, v / 100 % 100, v % 100, name_.c_str());
    return text;
  }
  void run(const void* x, const void* w, void* y, size_t rows, size_t n, bool, void* stream) override {
    const float one = 1, zero = 0;
    const int m = static_cast<int>(n);
    must(set_stream_(handle_, static_cast<cudaStream_t>(stream)), "cublasSetStream");
    // Row-major Y = X W is column-major Y' = W' X'.
    must(gemm_(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m, static_cast<int>(rows), m, &one, w, CUDA_R_16F, m, x, CUDA_R_16F,
               m, &zero, y, CUDA_R_16F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
         "cublasGemmEx");
  }
  void tile(const float* a, const float* b, float* c, size_t t, void* stream) override {
    const float one = 1;
    const int m = static_cast<int>(t);
    must(set_stream_(handle_, static_cast<cudaStream_t>(stream)), "cublasSetStream");
    must(gemm_(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m, m, m, &one, b, CUDA_R_32F, m, a, CUDA_R_32F, m, &one, c,
               CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
         "cublasGemmEx");
  }

 private:
  static void must(cublasStatus_t s, const char* what) {
    if (s != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": status " + std::to_string(s));
  }
  template <typename Function>
  void find(const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(library_, name));
    if (*out == nullptr) throw std::runtime_error(name_ + " has no " + name);
  }
  void* library_ = nullptr;
  std::string name_;
  cublasHandle_t handle_ = nullptr;
  decltype(&cublasCreate_v2) create_ = nullptr;
  decltype(&cublasDestroy_v2) destroy_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasGetVersion_v2) version_ = nullptr;
  cublasStatus_t (*gemm_)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                          cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                          cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
};
#endif

inline std::unique_ptr<Product> make_product(const App& app, [[maybe_unused]] const std::string& cublas) {
  if (app.simulated()) return std::make_unique<SimProduct>();
#ifdef VMEM_HAVE_CUDA
  return std::make_unique<CublasProduct>(cublas);
#else
  throw std::runtime_error("built without CUDA");
#endif
}

}  // namespace gpuapp
