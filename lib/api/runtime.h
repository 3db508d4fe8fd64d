// The process's one runtime: its settings, and the pager once a call needs it.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "api/fair_mutex.h"
#include "api/leases.h"
#include "core/options.h"
#include "core/signals.h"
#include "core/status.h"
#include "kernel_paging/kernels.h"
#include "pager/pager_gate.h"
#include "publish/publisher.h"

namespace vmem::api {

class Runtime {
 public:
  // Returns the runtime, which is never destroyed: threads may touch regions until the process is
  // gone.
  static Runtime& get();

  using Use = pager::PagerGate::Use;

  // Marks this thread as inside a call. A signal handler may call exit() in one. The thread may
  // then hold any of our locks, so exit() waits for none, and calls that destructors make on the
  // thread are refused.
  class Call {
   public:
    Call();
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    bool refused() const;
    // Returns whether this thread may hold our locks. Inside the log's sink, also on the log's own
    // thread, it holds none.
    static bool may_hold_locks();

   private:
    core::SignalsDeferred deferred_;  // the thread may hold what an access of a handler waits for
  };

  // Starts the pager if there is none. Returns -ECHILD in a child that cannot begin anew.
  core::Status use(Use* out);
  // The same without starting one: *out is null if there is none.
  core::Status use_if_running(Use* out) { return gate_.use(out); }
  core::Status set(std::string_view name, std::string_view value);
  core::Status get(std::string_view name, std::string* value);
  core::Options& options() { return options_; }
  Leases& leases() { return leases_; }
  Kernels& kernels() { return kernels_; }
  // For exit(), which may call it repeatedly: writes changed blocks of shared files, and hides this
  // process from vmemctl. The threads stay, and the program may go on accessing regions.
  void finish();
  // Returns the path where this process is published; "" if it is not.
  std::string published_at();
  void shutdown();
  // In a forked child, which starts with the settings of its parent.
  static void inherit_settings();
  // For tests: the pager's consistency check; "" if there is no pager.
  std::string check();

 private:
  struct Finishing;
  Runtime();
  core::Status load_environment() VMEM_REQUIRES(setup_);
  core::Status start();
  core::Status set_locked(std::string_view name, std::string_view value) VMEM_REQUIRES(setup_);
  core::Status get_locked(std::string_view name, std::string* value) VMEM_REQUIRES(setup_);
  void update_publication() VMEM_REQUIRES(setup_);
  // Like set() and get(), for requests from outside, on the publisher's thread. Both return
  // -ECANCELED once `stop` is set, since the thread that stops the publisher holds the lock that
  // they need. Live settings only.
  core::Status set_from_outside(const std::atomic<bool>& stop, std::string_view name, std::string_view value);
  core::Status get_from_outside(const std::atomic<bool>& stop, std::string_view name, std::string* value);
  bool lock_setup(const std::atomic<bool>& stop) VMEM_TRY_ACQUIRE(true, setup_);
  core::Status apply(core::Option option) VMEM_REQUIRES(setup_);
  core::Status stop_if_idle(const char* name) VMEM_REQUIRES(setup_);
  void end_pager();
  void hide();
  void write_shared_files(Finishing* finishing);

  core::Options options_;
  FairMutex setup_;        // one thread starts, stops or changes settings
  pager::PagerGate gate_;  // closed while its pager changes; after setup_
  Leases leases_{gate_};
  Kernels kernels_{gate_};
  std::unique_ptr<publish::Publisher> publisher_ VMEM_GUARDED_BY(setup_);  // null: this process is not published
  bool environment_read_ VMEM_GUARDED_BY(setup_) = false;
  std::atomic<bool> nothing_to_write_{false};  // the pager ends
  std::atomic<bool> gave_up_{false};  // exit waited in vain: from now on it writes only blocks that need no device
};

// Builds a pager from settings: trap, engine and store, with their fallbacks. Tests call it with
// settings of their own.
core::Status build_pager(core::Options& options, std::unique_ptr<pager::Pager>* out);

}  // namespace vmem::api
