// Injects allocation failures: operator new of the whole binary (memory_test.cpp) fails as set
// here.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>

#include "vmem/vmem.h"

namespace systest {

// The allocation of this thread that fails: the n-th from now on, and unless `once` all later ones
// too.
inline constinit thread_local int64_t refused_in = -1;
inline constinit thread_local bool once = false;
inline constinit thread_local uint64_t refusals = 0;

// Every n-th allocation of the library's threads, and of calls under Starving, fails; 0: none.
inline constinit std::atomic<uint64_t> refuse_every{0};
inline constinit thread_local bool starving = false;

struct Starving {
  Starving() { starving = true; }
  ~Starving() { starving = false; }
};

// Repeats a call, with each of its allocations failing in turn, until it needs no more of them.
// Counts only this thread's allocations.
template <typename Call, typename Then>
void refuse_each(Call call, Then then) {
  for (const bool only_once : {true, false}) {
    for (int n = 0;; ++n) {
      ASSERT_LT(n, 2000) << "the call never got through";
      refusals = 0;
      once = only_once;
      refused_in = n;
      const int rc = call(n);
      refused_in = -1;
      if (rc != 0) {
        EXPECT_STRNE(vmem_last_error(), "");
      }
      then(n, rc);
      if (refusals == 0 || testing::Test::HasFatalFailure()) break;
    }
  }
}

}  // namespace systest
