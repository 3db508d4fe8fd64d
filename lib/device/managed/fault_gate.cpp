// The parking handler. Functions marked [handler] run inside it: they use atomics, futexes and
// sigaction only, take no lock and allocate nothing.
//
// The handler runs with every signal blocked, but waits for a gate with the mask of the interrupted
// code: other signals are delivered to a parked thread, and their handlers may even jump out of it.
//
// No lock is taken while another is held:
// - install_mutex: count of installs, the chain of previous handlers
// - ranges_mutex: writers of the range table (the handler reads it without)
// - hook_mutex: start and end of the park thread
#include "device/managed/fault_gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "core/log.h"
#include "core/step.h"
#include "core/thread.h"

namespace vmem::device::fault_gate {

namespace {

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

long futex(Word* word, int op, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// --- ranges ---------------------------------------------------------------------------------------------------------

struct Slot {
  std::atomic<uintptr_t> begin{0};  // 0: unused
  std::atomic<uintptr_t> end{0};
  std::atomic<std::atomic<uint8_t>*> gates{nullptr};
};
Slot slots[kMaxRanges];
std::atomic<size_t> slots_used{0};  // slots from here on were never used
std::mutex ranges_mutex;
// By start, so that writers need not scan. Protected by ranges_mutex. Never destroyed, like all
// that libvmem's threads use: they run on while the process exits.
std::map<uintptr_t, Slot*>& by_address() {
  static auto* map = new std::map<uintptr_t, Slot*>;
  return *map;
}
Word readers{0};   // handlers inside lookup()
Word epoch{0};     // changes whenever gates change; parked threads wait on it
Word sleepers{0};  // may be too large: a handler that was jumped out of never subtracts itself

struct Counters {
  std::atomic<uint64_t> parked{0};
  Word waiting{0};
} counters;

// [handler] Inside a reader section.
Slot* find(uintptr_t address) {
  const size_t used = slots_used.load(std::memory_order_acquire);
  for (size_t i = 0; i < used; ++i) {
    const uintptr_t begin = slots[i].begin.load(std::memory_order_seq_cst);
    if (begin != 0 && begin <= address && address < slots[i].end.load(std::memory_order_relaxed)) return &slots[i];
  }
  return nullptr;
}

// Needs ranges_mutex.
Slot* find_locked(uintptr_t address) {
  auto it = by_address().upper_bound(address);
  if (it == by_address().begin()) return nullptr;
  Slot* slot = std::prev(it)->second;
  return address < slot->end.load(std::memory_order_relaxed) ? slot : nullptr;
}

// [handler] False: not a registered range.
bool lookup(uintptr_t address, Gate* out) {
  // Pairs with remove(): either it sees this reader, or this reader sees the slot emptied.
  readers.fetch_add(1, std::memory_order_seq_cst);
  Slot* slot = find(address);
  if (slot != nullptr) {
    const uintptr_t begin = slot->begin.load(std::memory_order_relaxed);
    std::atomic<uint8_t>* gates = slot->gates.load(std::memory_order_acquire);
    // The slot may have been emptied since find(); its gates live until this reader leaves.
    *out = begin == 0 ? Gate::open : static_cast<Gate>(gates[(address - begin) / kGateUnit].load());
  }
  readers.fetch_sub(1, std::memory_order_seq_cst);
  return slot != nullptr;
}

// Gates have changed, possibly closed. The epoch counts closing, too: a second fault of one
// instruction in one epoch then proves that no move explains it (settle_touch()).
void advance(bool wake) {
  epoch.fetch_add(1, std::memory_order_seq_cst);
  if (!wake) return;
  // Pairs with the order in wait_epoch(): a sleeper is counted before the kernel compares the epoch.
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex(&epoch, FUTEX_WAKE, INT_MAX);
}

// [handler] Sleeps, with the interrupted code's signal mask, until the epoch may differ from
// `seen`.
void wait_epoch(uint32_t seen, const sigset_t& interrupted, const sigset_t& all) {
  counters.waiting.fetch_add(1, std::memory_order_relaxed);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  pthread_sigmask(SIG_SETMASK, &interrupted, nullptr);
  futex(&epoch, FUTEX_WAIT, seen);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  counters.waiting.fetch_sub(1, std::memory_order_relaxed);
}

// --- the hook -------------------------------------------------------------------------------------------------------

struct Ask {
  enum : uint32_t { unused, claimed, posted, yes, no };
  Word state{unused};
  uintptr_t address = 0;  // written by the claiming thread before `posted`
  bool store = false;
};
constexpr size_t kAsks = 64;
Ask asks[kAsks];
Word asks_freed{0};  // changes when one becomes unused
Word asks_posted{0};
std::atomic<bool> hook_running{false};
std::mutex hook_mutex;
// Never destroyed: a process may exit while the thread runs. Made at the first use, which may be in
// a constructor of the program that runs before those of this file.
Hook& hook() {  // called by the park thread only
  static auto* hook = new Hook;
  return *hook;
}
std::thread& hook_thread() {
  static auto* thread = new std::thread;
  return *thread;
}

void answer(Ask& ask, bool verdict) {
  ask.state.store(verdict ? Ask::yes : Ask::no, std::memory_order_release);
  futex(&ask.state, FUTEX_WAKE, 1);
}

void hook_loop() {
  for (;;) {
    const uint32_t seen = asks_posted.load(std::memory_order_seq_cst);
    const bool running = hook_running.load(std::memory_order_seq_cst);
    for (Ask& ask : asks) {
      if (ask.state.load(std::memory_order_acquire) != Ask::posted) continue;
      core::step("park.asked");
      answer(ask, !running || hook()(ask.address, ask.store));
    }
    if (!running) return;
    futex(&asks_posted, FUTEX_WAIT, seen);
  }
}

// [handler] True: try the instruction again.
bool ask_hook(uintptr_t address, bool store) {
  Ask* mine = nullptr;
  while (mine == nullptr) {
    const uint32_t seen = asks_freed.load(std::memory_order_seq_cst);
    if (!hook_running.load(std::memory_order_seq_cst)) return false;
    for (Ask& ask : asks) {
      uint32_t expected = Ask::unused;
      if (ask.state.compare_exchange_strong(expected, Ask::claimed, std::memory_order_acquire)) {
        mine = &ask;
        break;
      }
    }
    if (mine == nullptr) futex(&asks_freed, FUTEX_WAIT, seen);
  }
  mine->address = address;
  mine->store = store;
  mine->state.store(Ask::posted, std::memory_order_seq_cst);
  asks_posted.fetch_add(1, std::memory_order_seq_cst);
  futex(&asks_posted, FUTEX_WAKE, 1);
  bool verdict = true;
  for (;;) {
    uint32_t state = mine->state.load(std::memory_order_seq_cst);
    if (state == Ask::posted) {
      // The park thread's last scan came before the post. Take the request back; the next round
      // sees that the thread has ended.
      if (!hook_running.load(std::memory_order_seq_cst) &&
          mine->state.compare_exchange_strong(state, Ask::claimed, std::memory_order_acq_rel))
        break;
      futex(&mine->state, FUTEX_WAIT, Ask::posted);
      continue;
    }
    verdict = state == Ask::yes;
    break;
  }
  mine->state.store(Ask::unused, std::memory_order_release);
  asks_freed.fetch_add(1, std::memory_order_seq_cst);
  futex(&asks_freed, FUTEX_WAKE, INT_MAX);
  return verdict;
}

// --- the chain of handlers installed by others ----------------------------------------------------------------------

struct Previous {
  struct sigaction action;
  Previous* older;
  std::atomic<bool> spent{false};  // SA_RESETHAND: has had its one call
};
std::mutex install_mutex;
unsigned installs = 0;                   // protected by install_mutex
unsigned chain_length = 0;               // protected by install_mutex
std::atomic<Previous*> newest{nullptr};  // nodes are never freed: a handler may be inside one
std::atomic<pid_t> owner{0};
constexpr unsigned kMaxChain = 64;

// A handler installed over ours may call ours as its previous one. Such a delivery has a mark in
// the part of its siginfo that the kernel leaves zero: then the handler below the marked one is
// next, and no handler runs twice.
struct Mark {
  uint64_t magic;
  Previous* called;
};
constexpr uint64_t kMagic = 0x6b7261706d656d76;
constexpr size_t kMarkOffset = sizeof(siginfo_t) - sizeof(Mark);
static_assert(sizeof(siginfo_t) == 128, "the kernel fills 48 bytes and clears the rest");

// [handler]
void die(int sig, bool synchronous) {
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(sig, &standard, nullptr);
  // A fault happens again when the handler returns, and then dumps core at the right place. A sent
  // signal does not: send it again.
  if (synchronous) return;
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, sig);
  syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), sig);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
}

// [handler] Does what the kernel would have done without us.
void pass_on(int sig, siginfo_t* info, void* context, const sigset_t& interrupted) {
  const bool synchronous = info->si_code > 0;
  Mark mark;
  std::memcpy(&mark, reinterpret_cast<char*>(info) + kMarkOffset, sizeof mark);
  Previous* next = mark.magic == kMagic ? mark.called->older : newest.load(std::memory_order_acquire);
  if (next == nullptr) return die(sig, synchronous);
  const struct sigaction& action = next->action;
  const bool plain = (action.sa_flags & SA_SIGINFO) == 0;
  if (plain && action.sa_handler == SIG_IGN && !synchronous) return;
  if (plain && (action.sa_handler == SIG_IGN || action.sa_handler == SIG_DFL)) return die(sig, synchronous);
  if ((action.sa_flags & SA_RESETHAND) != 0 && next->spent.exchange(true)) return die(sig, synchronous);

  mark = {kMagic, next};
  std::memcpy(reinterpret_cast<char*>(info) + kMarkOffset, &mark, sizeof mark);
  sigset_t mask = interrupted;
  for (int s = 1; s < NSIG; ++s)
    if (sigismember(&action.sa_mask, s) == 1) sigaddset(&mask, s);
  if ((action.sa_flags & SA_NODEFER) == 0) sigaddset(&mask, sig);
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  if (plain)
    action.sa_handler(sig);
  else
    action.sa_sigaction(sig, info, context);
}

// --- the handler ----------------------------------------------------------------------------------------------------

enum class Cause : uint8_t { load, store, other };

// [handler]
Cause cause_of(const ucontext_t* context, uintptr_t* pc) {
#if defined(__x86_64__)
  const auto error = static_cast<uint64_t>(context->uc_mcontext.gregs[REG_ERR]);
  *pc = static_cast<uintptr_t>(context->uc_mcontext.gregs[REG_RIP]);
  if ((error & 16) != 0) return Cause::other;  // instruction fetch
  return (error & 2) != 0 ? Cause::store : Cause::load;
#elif defined(__aarch64__)
  *pc = context->uc_mcontext.pc;
  const auto* record = reinterpret_cast<const _aarch64_ctx*>(context->uc_mcontext.__reserved);
  while (record->magic != 0 && record->size != 0) {
    if (record->magic == ESR_MAGIC) {
      const uint64_t esr = reinterpret_cast<const esr_context*>(record)->esr;
      if ((esr >> 26 & 0x3e) != 0x24) return Cause::other;  // not a data abort
      return (esr >> 6 & 1) != 0 ? Cause::store : Cause::load;
    }
    record = reinterpret_cast<const _aarch64_ctx*>(reinterpret_cast<const char*>(record) + record->size);
  }
  return Cause::other;
#else
#error "say here how to tell a load from a store"
#endif
}

// An access that faulted under a gate that has opened since looks like one that no gate explains. A
// retry tells them apart: only the same instruction that faults on the same byte, with no gate
// changed in between, goes further.
struct LastRetry {
  std::atomic<pid_t> thread{0};  // owner; only that thread accesses the rest
  std::atomic<uintptr_t> address{0}, pc{0};
  std::atomic<uint32_t> epoch{0}, count{0};
};
// No thread-local storage: what the handler may use without allocating (initial-exec) must fit the
// little room that the C library keeps for libraries loaded late. If other libraries have used it
// up, dlopen fails.
std::array<LastRetry, 1024> last_retries;
constexpr size_t kRetryProbes = 16;

// [handler] Returns the calling thread's entry. If all its places are taken, by threads that may
// have ended, it takes the first. Two living threads that share one make each other retry once
// more, never less.
LastRetry& last_retry() {
  const pid_t me = gettid();
  const size_t home = static_cast<size_t>(me);
  for (size_t i = 0; i < kRetryProbes; ++i) {
    LastRetry& slot = last_retries[(home + i) % last_retries.size()];
    pid_t owned = slot.thread.load(std::memory_order_relaxed);
    if (owned == me || (owned == 0 && slot.thread.compare_exchange_strong(owned, me, std::memory_order_relaxed)))
      return slot;
  }
  LastRetry& slot = last_retries[home % last_retries.size()];
  slot.thread.store(me, std::memory_order_relaxed);
  slot.address.store(0, std::memory_order_relaxed);
  return slot;
}
constexpr uint32_t kMaxAsks = 64;  // the hook said "retry" and nothing changed: it is wrong, end the loop

// [handler] True: try the instruction again.
bool settle_touch(uintptr_t address, uintptr_t pc, Cause cause, const sigset_t& interrupted, const sigset_t& all) {
  bool waited = false;
  for (;;) {
    const uint32_t seen = epoch.load(std::memory_order_seq_cst);
    Gate gate;
    if (!lookup(address, &gate)) return waited;
    if (gate == Gate::shut || (gate == Gate::writers && cause == Cause::store)) {
      if (!waited) counters.parked.fetch_add(1, std::memory_order_relaxed);
      waited = true;
      wait_epoch(seen, interrupted, all);
      continue;
    }
    if (waited) return true;
    constexpr auto relaxed = std::memory_order_relaxed;
    LastRetry& last = last_retry();
    if (last.address.load(relaxed) != address || last.pc.load(relaxed) != pc || last.epoch.load(relaxed) != seen) {
      last.address.store(address, relaxed);
      last.pc.store(pc, relaxed);
      last.epoch.store(seen, relaxed);
      last.count.store(0, relaxed);
      return true;
    }
    if (last.count.fetch_add(1, relaxed) >= kMaxAsks) return false;
    return ask_hook(address, cause == Cause::store);
  }
}

// [handler]
void on_signal(int sig, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  sigset_t all, entry_mask, interrupted;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &entry_mask);  // not full yet if another handler calls us
  sigemptyset(&interrupted);
  // The kernel's mask is 8 bytes; the rest of glibc's is other data in this frame.
  std::memcpy(&interrupted, &static_cast<ucontext_t*>(context)->uc_sigmask, 8);
  uintptr_t pc = 0;
  bool again = false;
  if ((info->si_code == SEGV_ACCERR || info->si_code == SEGV_MAPERR) &&
      owner.load(std::memory_order_relaxed) == getpid()) {  // in a forked child no thread opens gates
    const Cause cause = cause_of(static_cast<ucontext_t*>(context), &pc);
    if (cause != Cause::other)
      again = settle_touch(reinterpret_cast<uintptr_t>(info->si_addr), pc, cause, interrupted, all);
  }
  if (!again) {
    errno = saved_errno;
    pass_on(sig, info, context, interrupted);
  }
  pthread_sigmask(SIG_SETMASK, &entry_mask, nullptr);
  errno = saved_errno;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_signal;
}

// Needs install_mutex. Puts our handler in front and chains the one found there behind it.
core::Status put_in_front() {
  struct sigaction now;
  if (sigaction(SIGSEGV, nullptr, &now) != 0) return core::system_error(errno, "cannot read the SIGSEGV handler");
  if (is_ours(now)) return {};
  Previous* node = newest.load(std::memory_order_relaxed);
  while (node != nullptr && (node->action.sa_sigaction != now.sa_sigaction || node->action.sa_flags != now.sa_flags))
    node = node->older;
  if (node == nullptr) {
    if (chain_length == kMaxChain)
      return core::error(ELOOP,
                         "the SIGSEGV handler was replaced by %u different others; CPU touches of moving blocks can no "
                         "longer be held. Install handlers before vmem_init",
                         kMaxChain);
    node = new (std::nothrow) Previous{now, newest.load(std::memory_order_relaxed)};
    if (node == nullptr) return core::error(ENOMEM, "no memory to record another SIGSEGV handler");
    ++chain_length;
  }
  node->spent.store(false);
  newest.store(node, std::memory_order_release);
  struct sigaction ours = {};
  ours.sa_sigaction = &on_signal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigfillset(&ours.sa_mask);
  if (sigaction(SIGSEGV, &ours, nullptr) != 0) return core::system_error(errno, "cannot install the SIGSEGV handler");
  return {};
}

}  // namespace

core::Status install() {
  std::lock_guard lock(install_mutex);
  owner.store(getpid());
  if (core::Status s = put_in_front(); !s.ok()) return s;
  ++installs;
  return {};
}

void uninstall() {
  std::lock_guard lock(install_mutex);
  if (installs == 0 || --installs != 0) return;
  struct sigaction now;
  Previous* node = newest.load(std::memory_order_relaxed);
  // A handler in front may call ours: then ours stays, and passes everything on.
  if (node != nullptr && sigaction(SIGSEGV, nullptr, &now) == 0 && is_ours(now))
    sigaction(SIGSEGV, &node->action, nullptr);
}

core::Status check() {
  struct sigaction now;
  if (sigaction(SIGSEGV, nullptr, &now) == 0 && is_ours(now)) return {};
  std::lock_guard lock(install_mutex);
  if (installs == 0) return core::error(EINVAL, "the parking handler is not installed");
  if (core::Status s = put_in_front(); !s.ok()) return s;
  VMEM_LOG_ONCE(core::Level::warning,
                "another SIGSEGV handler was installed over libvmem's, which holds CPU threads that touch moving "
                "blocks; libvmem has put its own in front again and passes other faults on. Install handlers before "
                "vmem_init to close the window in between.");
  return {};
}

core::Status add(void* base, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  if (begin == 0 || size == 0 || begin % kGateUnit != 0 || size % kGateUnit != 0)
    return core::error(EINVAL, "cannot park touches of %#zx bytes at %p: both must be multiples of 2 MiB", size, base);
  void* gates = mmap(nullptr, size / kGateUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0);  // zero pages: every gate open
  if (gates == MAP_FAILED) return core::system_error(errno, "no memory for %zu gates", size / kGateUnit);
  std::lock_guard lock(ranges_mutex);
  const size_t used = slots_used.load(std::memory_order_relaxed);
  size_t i = 0;
  while (i < used && slots[i].begin.load(std::memory_order_relaxed) != 0) ++i;
  if (i == kMaxRanges) {
    munmap(gates, size / kGateUnit);
    return core::error(ENOSPC, "%zu regions with a device tier exist, which is the limit", kMaxRanges);
  }
  try {
    by_address()[begin] = &slots[i];
  } catch (const std::bad_alloc&) {
    munmap(gates, size / kGateUnit);
    return core::error(ENOMEM, "no memory to record a region with a device tier");
  }
  slots[i].end.store(begin + size, std::memory_order_relaxed);
  slots[i].gates.store(static_cast<std::atomic<uint8_t>*>(gates), std::memory_order_release);
  slots[i].begin.store(begin, std::memory_order_seq_cst);
  if (i == used) slots_used.store(used + 1, std::memory_order_release);
  return {};
}

void remove(void* base) {
  std::lock_guard lock(ranges_mutex);
  auto it = by_address().find(reinterpret_cast<uintptr_t>(base));
  if (it == by_address().end()) return;
  Slot* slot = it->second;
  by_address().erase(it);
  const size_t size = slot->end.load() - slot->begin.load();
  slot->begin.store(0, std::memory_order_seq_cst);
  advance(true);
  while (readers.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
  munmap(slot->gates.load(), size / kGateUnit);
  slot->gates.store(nullptr);
}

bool set(uintptr_t address, size_t size, Gate gate) {
  bool opened = false;
  {
    std::lock_guard lock(ranges_mutex);
    Slot* slot = find_locked(address);
    if (slot == nullptr || size > slot->end.load() - address) return false;
    std::atomic<uint8_t>* gates = slot->gates.load(std::memory_order_relaxed);
    const uintptr_t begin = slot->begin.load(std::memory_order_relaxed);
    const size_t last = (address - begin + size - 1) / kGateUnit;
    for (size_t i = (address - begin) / kGateUnit; i <= last; ++i)
      opened |= gates[i].exchange(static_cast<uint8_t>(gate), std::memory_order_seq_cst) > static_cast<uint8_t>(gate);
  }
  advance(opened);
  return true;
}

Gate gate(uintptr_t address) {
  Gate out = Gate::open;
  lookup(address, &out);
  return out;
}

core::Status set_hook(Hook next) {
  std::lock_guard lock(hook_mutex);
  if (hook_thread().joinable()) {
    hook_running.store(false, std::memory_order_seq_cst);
    asks_posted.fetch_add(1, std::memory_order_seq_cst);
    futex(&asks_posted, FUTEX_WAKE, INT_MAX);
    hook_thread().join();
    // Threads that posted after the last scan, or wait for a free entry, look again.
    for (Ask& ask : asks) futex(&ask.state, FUTEX_WAKE, 1);
    asks_freed.fetch_add(1, std::memory_order_seq_cst);
    futex(&asks_freed, FUTEX_WAKE, INT_MAX);
  }
  hook() = std::move(next);
  if (!hook()) return {};
  hook_running.store(true, std::memory_order_seq_cst);
  core::Status status = core::start_thread("vmem-park", hook_loop, &hook_thread());
  if (!status.ok()) {
    hook_running.store(false);
    hook() = nullptr;
  }
  return status;
}

Stats stats() {
  return Stats{counters.parked.load(), counters.waiting.load()};
}

}  // namespace vmem::device::fault_gate
