// Want of memory by injection: operator new of the whole binary (memory_test.cpp) refuses what is said here.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>

#include "vmem/vmem.h"

namespace systest {

// Which allocation of this thread is refused next: the n-th from now on, and those after it too unless `once`.
inline constinit thread_local int64_t refused_in = -1;
inline constinit thread_local bool once = false;
inline constinit thread_local uint64_t refusals = 0;

// Of the library's threads, and of calls under Starving, each so-many-th is refused; 0: none.
inline constinit std::atomic<uint64_t> refuse_every{0};
inline constinit thread_local bool starving = false;

struct Starving {
  Starving() { starving = true; }
  ~Starving() { starving = false; }
};

// Calls with each of its allocations refused in turn, until it needs no more of them. Every answer is of this thread.
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
