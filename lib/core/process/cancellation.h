// Holds off pthread_cancel during a call of the library. The C library unwinds a cancelled thread
// in any call that may wait. That would leave our call half done, or end the process where the
// unwinding meets a noexcept function. A cancelled thread ends after the call instead, at the
// application's next cancellation point.
#pragma once

#include <pthread.h>

namespace vmem::core {

// Disables cancellation of this thread during its scope, including application code that the call
// runs.
class NoCancellation {
 public:
  NoCancellation() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancellation() { pthread_setcancelstate(before_, nullptr); }
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace vmem::core
