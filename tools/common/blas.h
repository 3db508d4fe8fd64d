// C += A * B for t x t fp32 matrices, by a BLAS library loaded at run time or by a plain loop. Used
// by the examples.
#pragma once

#include <dlfcn.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "common/input.h"

namespace blas {

class Library {
 public:
  // path: the library's path; "" tries the usual names; "none" uses the loop.
  explicit Library(const std::string& path) {
    if (path == "none") return;
    const std::vector<std::string> usual = {"libopenblas.so.0", "libmkl_rt.so.2", "libblis.so.4", "libblas.so.3"};
    for (const std::string& name : path.empty() ? usual : std::vector<std::string>{path}) {
      void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      sgemm_ = reinterpret_cast<Sgemm>(dlsym(library, "sgemm_"));
      if (sgemm_ == nullptr) continue;
      Dl_info info;
      name_ = name;
      // Finds the real file: several libraries install a link libblas.so.3.
      if (dladdr(reinterpret_cast<void*>(sgemm_), &info) != 0 && info.dli_fname != nullptr) {
        char* real = realpath(info.dli_fname, nullptr);
        name_ = real != nullptr ? real : info.dli_fname;
        free(real);
      }
      return;
    }
    if (!path.empty()) throw input::Refused(path + " is no BLAS that can be loaded");
  }
  std::string words() const { return sgemm_ != nullptr ? "BLAS of " + name_ : "a plain loop: no BLAS was found"; }
  bool found() const { return sgemm_ != nullptr; }
  // Row-major: computes C' = B' * A' because the library is column-major.
  void tile(const float* a, const float* b, float* c, size_t t) const {
    const int n = static_cast<int>(t);
    const float one = 1;
    sgemm_("N", "N", &n, &n, &n, &one, b, &n, a, &n, &one, c, &n);
  }

 private:
  using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                         const int*, const float*, const int*, const float*, float*, const int*);
  Sgemm sgemm_ = nullptr;
  std::string name_;
};

}  // namespace blas
