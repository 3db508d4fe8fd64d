#include "core/fatal.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "core/log.h"

namespace vmem::core {

void fatal(const char* format, ...) {
  log_to_stderr();  // the lines that led to it
  va_list args;
  va_start(args, format);
  fputs("libvmem: fatal: ", stderr);
  vfprintf(stderr, format, args);
  fputs("\n", stderr);
  va_end(args);
  abort();
}

}  // namespace vmem::core
