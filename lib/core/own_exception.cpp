#include "core/own_exception.h"

#include <cxxabi.h>
#include <unwind.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <new>
#include <typeinfo>

#include "core/outside_lock.h"

namespace vmem::core {

// Needs libstdc++; other libraries throw with malloc. So do sanitizers: they own all memory, and
// intercept throws.
#if defined(__GLIBCXX__) && !defined(__ARM_EABI_UNWINDER__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)

namespace {

// In the Itanium C++ ABI (section 2.2) an exception's header lies before it, and ends with the
// unwinder's header. libstdc++ fills the headers in, as for std::make_exception_ptr. The catcher
// ends the exception through the unwinder's `exception_cleanup`, which is ours. Do not keep such an
// exception in an exception_ptr, which assumes memory from malloc.
struct Place {
  alignas(16) std::array<std::byte, 256> head;  // 128 are in use
  alignas(16) std::array<std::byte, 16> exception;
  std::atomic<bool> used;
};
// Enough for all that may be in flight: one of the thread that holds the lock, and those that have
// dropped it on their way to a catcher.
constinit std::array<Place, 64> places{};

struct Globals {  // __cxa_eh_globals
  void* caught;
  unsigned uncaught;
};

void end(_Unwind_Reason_Code, _Unwind_Exception* header) {
  auto* const exception = reinterpret_cast<std::byte*>(header + 1);
  reinterpret_cast<std::bad_alloc*>(exception)->~bad_alloc();
  for (Place& place : places) {
    if (place.exception.data() == exception) place.used.store(false, std::memory_order_release);
  }
}

}  // namespace

void throw_bad_alloc() {
  if (big_locks_held == 0) throw std::bad_alloc();
  for (Place& place : places) {
    if (place.used.exchange(true, std::memory_order_acquire)) continue;
    place.head.fill({});
    void* const exception = place.exception.data();
    new (exception) std::bad_alloc();
    abi::__cxa_init_primary_exception(exception, const_cast<std::type_info*>(&typeid(std::bad_alloc)), nullptr);
    _Unwind_Exception* const header = static_cast<_Unwind_Exception*>(exception) - 1;
    header->exception_cleanup = end;
    ++reinterpret_cast<Globals*>(abi::__cxa_get_globals())->uncaught;
    _Unwind_RaiseException(header);
    abi::__cxa_begin_catch(header);  // no frame catches it
    std::terminate();
  }
  throw std::bad_alloc();
}

#else

void throw_bad_alloc() {
  throw std::bad_alloc();
}

#endif

}  // namespace vmem::core
