// How a call of the C API begins and ends.
//
// - No exception passes.
// - Every failure leaves a message for vmem_last_error.
// - The application gets the lines that the call logged, with no lock held.
#pragma once

#include <cerrno>
#include <cstdio>
#include <new>

#include "api/last_error.h"
#include "api/runtime.h"
#include "core/process/cancellation.h"
#include "core/stack.h"
#include "core/status.h"

namespace vmem::api {

// Runs a call's body; the stack is large enough.
template <typename Body>
__attribute__((noinline)) int guarded_here(Body& body) noexcept {
  const core::NoCancellation whole;
  const DeliverLog deliver;
  const Runtime::Call call;
  if (call.refused()) return report(-EDEADLK, "the process exits from inside another call of libvmem on this thread");
  try {
    const core::Status s = body();
    return s.ok() ? 0 : report(s.code(), s.text());
  } catch (const std::bad_alloc&) {
    return report(-ENOMEM, "no memory for bookkeeping");
  } catch (const std::exception& e) {
    char words[256];
    snprintf(words, sizeof words, "unexpected failure: %s", e.what());
    return report(-EIO, words);
  } catch (...) {
    return report(-EIO, "unexpected failure");
  }
}

// Runs a call's body and turns its exceptions (no memory for bookkeeping) into errors.
template <typename Body>
int guarded(Body body) noexcept {
  int rc = 0;
  if (core::with_stack([&] { rc = guarded_here(body); })) return rc;
  return report(-ENOMEM,
                "this thread has little stack left, and there is no memory, or no mapping (vm.max_map_count), for "
                "another one; give it a stack of 256 KiB");
}

template <typename Body>
int with_pager(Body body) noexcept {
  return guarded([&]() -> core::Status {
    Runtime::Use pager;
    if (core::Status s = Runtime::get().use(&pager); !s.ok()) return s;
    return body(pager);
  });
}

}  // namespace vmem::api
