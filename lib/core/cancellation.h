// pthread_cancel and the library. The C library ends a cancelled thread in any call that may wait, by unwinding: what a
// call of ours has begun would stay half done, and an unwinding that meets a function which throws nothing ends the
// process. So a thread that is cancelled in a call ends after it, at the application's next cancellation point.
#pragma once

#include <pthread.h>

namespace vmem::core {

// For as long as it lives this thread is not cancelled. Around the application's code that a call runs as well.
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
