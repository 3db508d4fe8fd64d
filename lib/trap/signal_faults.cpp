#include "trap/signal_faults.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>

#include "core/log.h"
#include "core/process/cancellation.h"
#include "core/process/descriptor.h"
#include "core/process/fork.h"
#include "core/signals.h"
#include "core/stack.h"
#include "core/step.h"
#include "core/types.h"
#include "trap/os.h"

namespace vmem::trap {

namespace {

using core::Status;

constinit std::atomic<SignalFaults*> current{nullptr};
constinit std::atomic<unsigned> inside{0};  // handlers that may use it
constinit std::atomic<pid_t> owner{0};
struct sigaction before;  // the handler that was there; written before ours is installed

// Addresses that nobody serves, by thread. The page may have come, or the trap may have gone, between
// the access and the handler, so the access runs again once.
constinit std::array<std::atomic<uint64_t>, 1024> nobodys{};

bool seen_before(const Fault& fault) {
  const uint64_t key = fault.address ^ fault.thread;
  std::atomic<uint64_t>& slot = nobodys[fault.thread % nobodys.size()];
  uint64_t expected = key;
  if (slot.compare_exchange_strong(expected, 0)) return true;
  slot.store(key);
  return false;
}

FaultKind kind_of(const ucontext_t* context) {
#if defined(__x86_64__)
  // Bits of the processor's page fault: 0, the page is present; 1, a store.
  const auto error = static_cast<uint64_t>(context->uc_mcontext.gregs[REG_ERR]);
  if ((error & 2) == 0) return FaultKind::read;
  return (error & 1) != 0 ? FaultKind::write_protect : FaultKind::write;
#elif defined(__aarch64__)
  const auto* record = reinterpret_cast<const _aarch64_ctx*>(context->uc_mcontext.__reserved);
  while (record->magic != 0 && record->size != 0) {
    if (record->magic == ESR_MAGIC) {
      const uint64_t esr = reinterpret_cast<const esr_context*>(record)->esr;
      if ((esr >> 6 & 1) == 0) return FaultKind::read;
      return (esr & 0x3c) == 0x0c ? FaultKind::write_protect : FaultKind::write;  // 0b0011xx: a permission fault
    }
    record = reinterpret_cast<const _aarch64_ctx*>(reinterpret_cast<const char*>(record) + record->size);
  }
  return FaultKind::write;
#else
#error "say here how to tell a load from a store"
#endif
}

}  // namespace

struct SignalFaults::Parked {
  Fault fault;
  std::atomic<uint32_t> woken{0};
  bool reported = false;
  Parked *before = nullptr, *after = nullptr;
};

SignalFaults::~SignalFaults() {
  SignalFaults* mine = this;
  if (current.compare_exchange_strong(mine, nullptr)) {
    while (inside.load() != 0) usleep(100);
    core::library_threads_take_faults(false);
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if (now.sa_sigaction == on_signal) sigaction(SIGBUS, &before, nullptr);
  }
  core::close_and_forget(news_);
}

Status SignalFaults::start(int userfaultfd, int pagemap) {
  fd_ = userfaultfd;
  pagemap_ = pagemap;
  news_ = core::keep_from_children(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (news_ < 0) return core::system_error(errno, "no eventfd for faults");
  if (owner.exchange(getpid()) != getpid()) {  // what is there is a parent's
    current.store(nullptr);
    inside.store(0);
  }
  SignalFaults* none = nullptr;
  if (!current.compare_exchange_strong(none, this))
    return core::error(EBUSY, "another trap of this process serves faults in its handler of SIGBUS");
  struct sigaction ours = {}, now;
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigfillset(&ours.sa_mask);
  sigaction(SIGBUS, nullptr, &now);
  if (now.sa_sigaction != on_signal) {
    before = now;
    sigaction(SIGBUS, &ours, nullptr);
  }
  core::library_threads_take_faults(true);
  return {};
}

void SignalFaults::serve_by(Trap::Serve server, void* user) {
  server_.store(nullptr);
  while (serving_.load() != 0) usleep(100);  // the last server may end now
  user_ = user;
  server_.store(server);
}

void SignalFaults::list(Parked& one) {
  const core::MutexLock lock(mutex_);
  one.after = first_;
  if (first_ != nullptr) first_->before = &one;
  first_ = &one;
}

void SignalFaults::unlist(Parked& one) {
  const core::MutexLock lock(mutex_);
  (one.before == nullptr ? first_ : one.before->after) = one.after;
  if (one.after != nullptr) one.after->before = one.before;
}

void SignalFaults::wake(uintptr_t start, size_t size) {
  const core::MutexLock lock(mutex_);
  for (Parked* one = first_; one != nullptr; one = one->after) {
    if (one->fault.address - start >= size || one->woken.exchange(1) != 0) continue;
    // Under the lock: the thread leaves the list before its stack frame ends.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&one->woken), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
}

size_t SignalFaults::take(std::span<Event> out) {
  uint64_t times;
  if (read(news_, &times, sizeof times) < 0 && errno != EAGAIN) return 0;
  size_t count = 0;
  const core::MutexLock lock(mutex_);
  for (Parked* one = first_; one != nullptr; one = one->after) {
    if (one->reported) continue;
    if (count == out.size()) {
      const uint64_t more = 1;
      [[maybe_unused]] const ssize_t n = write(news_, &more, sizeof more);
      break;
    }
    one->reported = true;
    out[count++] = {Event::Kind::fault, one->fault, 0};
  }
  return count;
}

// Sleeps until the page is woken, or a signal is due that the interrupted code does not block.
void SignalFaults::park(Parked& mine, const sigset_t& interrupted) {
  constexpr timespec kLook{0, 50000000};
  while (mine.woken.load() == 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&mine.woken), FUTEX_WAIT_PRIVATE, 0, &kLook, nullptr, 0);
    // Without a server nobody has looked at the page since the access, and it may have come meanwhile.
    if (mine.woken.load() != 0 || server_.load() == nullptr) return;
    sigset_t due;
    sigpending(&due);
    for (int s = 1; s < NSIG; ++s) {
      if (sigismember(&due, s) == 1 && sigismember(&interrupted, s) == 0) return;
    }
  }
}

bool SignalFaults::serve_here(Trap::Serve server, const Fault& fault) const {
  bool served = false;
  const auto body = [&] { served = server(fault, user_); };
  using Body = decltype(body);
  // Alternate stacks are small, and a look at the bounds of a stack may need memory.
  if (!core::on_own_stack([](void* b) { (*static_cast<const Body*>(b))(); },
                          const_cast<void*>(static_cast<const void*>(&body))))
    body();
  return served;
}

// Without a server: whether the page is watched, and not failed.
bool SignalFaults::waits(const Fault& fault) const {
  constexpr uint64_t kFailed = uint64_t{1} << 62;  // in /proc/self/pagemap; no page of a range is swapped out
  constexpr uintptr_t kNowhere = core::kPage;      // no memory is there: the call puts nothing in place
  size_t none = 0;
  if (os::copy(fd_, fault.address, kNowhere, core::kPage, false, &none) == -ENOENT) return false;
  uint64_t state = 0;
  return !os::page_states(pagemap_, fault.address, 1, &state) || (state & kFailed) == 0;
}

bool SignalFaults::serve(const Fault& fault, const sigset_t& interrupted) {
  const core::NoCancellation whole;
  Parked mine{fault};
  list(mine);
  serving_.fetch_add(1);
  const Trap::Serve server = server_.load();
  bool ours = server != nullptr && serve_here(server, fault);
  serving_.fetch_sub(1);
  if (server == nullptr && waits(fault)) {
    ours = true;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(news_, &one, sizeof one);
  }
  core::step("trap.parked");
  if (ours) park(mine, interrupted);
  unlist(mine);
  return ours;
}

// With every signal blocked.
void SignalFaults::on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  auto* const interrupted = static_cast<ucontext_t*>(context);
  bool again = false;
  if (info->si_code == BUS_ADRERR && owner.load() == getpid()) {
    inside.fetch_add(1);
    if (SignalFaults* const faults = current.load(); faults != nullptr) {
      const Fault fault{core::round_down(reinterpret_cast<uintptr_t>(info->si_addr), core::kPage), kind_of(interrupted),
                        static_cast<uint32_t>(gettid())};
      const bool served = faults->serve(fault, interrupted->uc_sigmask);
      again = served || !seen_before(fault);
      if (served) nobodys[fault.thread % nobodys.size()].store(0, std::memory_order_relaxed);
    }
    inside.fetch_sub(1);
  }
  errno = saved;
  if (!again) pass_on(number, info, context);
}

// Does what the kernel would have done without us.
void SignalFaults::pass_on(int number, siginfo_t* info, void* context) {
  const bool synchronous = info->si_code > 0;
  const bool plain = (before.sa_flags & SA_SIGINFO) == 0;
  if (plain && before.sa_handler == SIG_IGN && !synchronous) return;
  if (plain && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)) {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(number, &standard, nullptr);
    // The access happens again when the handler returns. A sent signal does not: it is sent again.
    if (!synchronous) syscall(SYS_tgkill, getpid(), gettid(), number);
    return;
  }
  sigset_t mask = static_cast<ucontext_t*>(context)->uc_sigmask;
  for (int s = 1; s < NSIG; ++s) {
    if (sigismember(&before.sa_mask, s) == 1) sigaddset(&mask, s);
  }
  if ((before.sa_flags & SA_NODEFER) == 0) sigaddset(&mask, number);
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  if (plain) {
    before.sa_handler(number);
  } else {
    before.sa_sigaction(number, info, context);
  }
}

}  // namespace vmem::trap
