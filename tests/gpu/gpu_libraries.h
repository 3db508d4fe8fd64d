// CUDA's libraries, if the machine has them: no test links against them.
#pragma once

#include <dlfcn.h>
#include <glob.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace vmem::gpu {

// A library such as "libcublas.so", from a toolkit or from a Python package. False: it is missing.
class Library {
 public:
  explicit Library(const std::string& name) {
    std::vector<std::string> patterns{name, name + ".13", name + ".12", name + ".2"};
    const char* home = getenv("CUDA_HOME");
    for (const std::string& folder :
         {std::string(home != nullptr ? home : "/usr/local/cuda") + "/lib64", std::string("/usr/local/cuda*/lib64"),
          std::string("/usr/local/lib/python3*/*-packages/nvidia/*/lib"),
          std::string("/usr/lib/python3*/*-packages/nvidia/*/lib"),
          std::string("/opt/*/lib/python3*/*-packages/nvidia/*/lib")})
      patterns.push_back(folder + "/" + name + ".*");
    for (const std::string& pattern : patterns) {
      glob_t found = {};
      if (pattern[0] != '/') {
        library_ = dlopen(pattern.c_str(), RTLD_NOW | RTLD_LOCAL);
      } else if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc && library_ == nullptr; ++i)
          library_ = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
      }
      globfree(&found);
      if (library_ == nullptr) continue;
      std::printf("%s: by %s\n", name.c_str(), pattern.c_str());
      return;
    }
  }
  ~Library() = default;  // its threads may outlive a dlclose
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  explicit operator bool() const { return library_ != nullptr; }
  template <typename Function>
  Function get(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

 private:
  void* library_ = nullptr;
};

}  // namespace vmem::gpu
