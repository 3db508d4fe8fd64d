// Stops ThreadSanitizer from checking this thread's reads during its scope. The kernel keeps the
// bytes from changing by a write protection that the sanitizer does not see. Does nothing in other
// builds. An entry in tests/tsan.supp would not do: a program with more rights than its user reads
// no suppressions.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace vmem::core {

class UnwatchedReads {
 public:
#if defined(__SANITIZE_THREAD__)
  UnwatchedReads() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~UnwatchedReads() {
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  UnwatchedReads() {}
  ~UnwatchedReads() {}
#endif
  UnwatchedReads(const UnwatchedReads&) = delete;
  UnwatchedReads& operator=(const UnwatchedReads&) = delete;
};

}  // namespace vmem::core
