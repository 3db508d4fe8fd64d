// For as long as one lives, ThreadSanitizer does not watch what its thread reads: bytes that the kernel keeps from
// changing meanwhile, by a write protection that the sanitizer does not see. Nothing in other builds. In a program with
// other rights than its user's no list of suppressions is read, so that one in tests/tsan.supp does not do.
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
