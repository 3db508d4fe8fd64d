// The message of each thread's last failure.
#pragma once

#include <string_view>

namespace vmem::api {

// report() stores the calling thread's last failure and returns `code`. Both need no memory, and
// may be called while the process exits.
int report(int code, std::string_view words) noexcept;
const char* last_error() noexcept;

// Delivers the lines that a call logged to the application when the call ends, with no lock held.
// The sink may call the library; the call's own message is kept.
class DeliverLog {
 public:
  DeliverLog();
  ~DeliverLog();
  DeliverLog(const DeliverLog&) = delete;
  DeliverLog& operator=(const DeliverLog&) = delete;
};

}  // namespace vmem::api
