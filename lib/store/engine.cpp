#include <cerrno>

#include "core/log.h"
#include "store/codec.h"
#include "store/engine_base.h"
#include "store/file.h"
#include "store/transfer.h"

namespace vmem::store {

void renew_in_child() {
  renew_flags_lock();
  renew_codec();
  leave_parents_files();
}

core::Status make_engine(const EngineOptions& options, std::unique_ptr<Engine>* out) {
  if (!options.allow_io_uring && options.require_io_uring) {
    return core::error(EINVAL, "io_uring is both required and not allowed");
  }
  if (options.allow_io_uring) {
    core::Status status = make_uring_engine(options, out);
    if (status.ok() || options.require_io_uring) return status;
    const int error = -status.code();
    const char* const advice = error == EPERM || error == EACCES
                                   ? "Allow it in the container's seccomp profile and set kernel.io_uring_disabled=0"
                               : error == ENOSYS ? "The kernel lacks it or a seccomp profile hides it"
                                                 : "The limits on memory, descriptors or processes may be too low";
    VMEM_LOG_ONCE(core::Level::warning, "I/O goes through threads, which is slower: %s. %s.", status.text().data(),
                  advice);
  }
  return make_thread_engine(options, out);
}

}  // namespace vmem::store
