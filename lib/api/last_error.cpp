#include "api/last_error.h"

#include <algorithm>
#include <cstring>

#include "core/log.h"
#include "core/text.h"

namespace vmem::api {

namespace {

// The message of this thread's last failure. Plain bytes need no memory and no destructor, so that
// vmem_last_error works when memory is short and while the process exits.
constinit thread_local char words_of_failure[1024] = "";

}  // namespace

int report(int code, std::string_view words) noexcept {
  const size_t length = std::min(words.size(), sizeof words_of_failure - 1);
  memcpy(words_of_failure, words.data(), length);
  words_of_failure[core::make_printable(words_of_failure, length)] = '\0';  // the cut may split a character
  return code;
}

const char* last_error() noexcept {
  return words_of_failure;
}

DeliverLog::DeliverLog() {
  core::begin_call_that_logs();
}

DeliverLog::~DeliverLog() {
  if (!core::end_call_that_logs()) return;
  char message[sizeof words_of_failure];
  memcpy(message, words_of_failure, sizeof message);
  core::deliver_log_of_call();
  memcpy(words_of_failure, message, sizeof message);
}

}  // namespace vmem::api
