#include "trap/probe.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "core/log.h"
#include "core/process/fork.h"
#include "core/thread.h"
#include "core/types.h"
#include "trap/mapping.h"
#include "trap/os.h"
#include "trap/transfer.h"

namespace vmem::trap {

namespace {

using core::kHugePage;
using core::kPage;

struct Opened {
  int fd = -1;
  bool user_mode_only = false;
};

core::Status no_descriptor(int error) {
  return core::system_error(error, "userfaultfd: no descriptor is free; raise `ulimit -n` or close some");
}

core::Status cannot_open(int device, int full, int limited) {
  if (limited == -EMFILE || limited == -ENFILE) return no_descriptor(-limited);
  if (full == -ENOSYS && limited == -ENOSYS)
    return core::error(ENOSYS, "this kernel has no userfaultfd (CONFIG_USERFAULTFD), or a seccomp filter hides it");
  const auto words = [](int error) {
    return error == 1 ? std::string("not tried") : std::string(strerrordesc_np(-error));
  };
  return core::error(
      EPERM,
      "userfaultfd is not permitted: /dev/userfaultfd: %s; system call: %s; limited to user-mode faults: %s. Any one "
      "of these enables it, the narrowest first: in a container, a seccomp profile that allows userfaultfd(2); access "
      "to /dev/userfaultfd (Linux 6.1) for one group, or given to the container; `sysctl "
      "vm.unprivileged_userfaultfd=1`, which lets every user of the machine hold up system calls and so eases attacks "
      "on the kernel; CAP_SYS_PTRACE, with which the program can read and change every process",
      words(device).c_str(), words(full).c_str(), words(limited).c_str());
}

core::Status open_best(const UserfaultOptions& options, Opened* out) {
  int device = 1, full = 1;
  if (options.allow_privileged) {
    if (options.allow_device) {
      device = os::open_by_device();
      if (device >= 0) {
        *out = {device, false};
        return {};
      }
    }
    full = os::open_by_syscall(0);
    if (full >= 0) {
      *out = {full, false};
      return {};
    }
  }
  int limited = os::open_by_syscall(os::kUserModeOnly);
  // Before 5.11 the flag is unknown; there any user may open the full one unless the sysctl forbids
  // it.
  if (limited == -EINVAL) limited = os::open_by_syscall(0);
  if (limited >= 0) {
    *out = {limited, true};
    return {};
  }
  return cannot_open(device, full, limited);
}

// Scratch memory: a trapped range and a frame range, 2 MiB each.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (start_ != 0) munmap(reinterpret_cast<void*>(start_), 2 * kHugePage);
  }
  core::Status make(int fd, uint64_t region_mode, uint64_t frame_mode) {
    if (core::Status s = reserve_space(2 * kHugePage, kHugePage, &start_); !s.ok()) return s;
    if (core::Status s = arm(fd, region(), kHugePage, region_mode, HugePages::yes); !s.ok()) return s;
    return arm(fd, frame(), kHugePage, frame_mode, HugePages::yes);
  }
  uintptr_t region() const { return start_; }
  uintptr_t frame() const { return start_ + kHugePage; }

 private:
  uintptr_t start_ = 0;
};

volatile uint64_t* words_at(uintptr_t address) {
  return reinterpret_cast<volatile uint64_t*>(address);
}

// Moves pages in and out. The bytes must have moved, and the emptied side must read as zeros.
bool try_move(int fd, int pagemap, const Scratch& scratch, size_t size) {
  volatile uint64_t* frame = words_at(scratch.frame());
  const size_t last = size / sizeof(uint64_t) - 1;
  for (size_t page = 0; page < size; page += kPage) frame[page / sizeof(uint64_t)] = 1;
  frame[0] = 0x5ca1ab1e;
  frame[last] = 0xdecade;
  if (move_pages(fd, pagemap, scratch.region(), scratch.frame(), size, Holes::populate, kTakeBusyNs).error != 0)
    return false;
  volatile uint64_t* region = words_at(scratch.region());
  if (region[0] != 0x5ca1ab1e || region[last] != 0xdecade) return false;
  if (move_pages(fd, pagemap, scratch.frame(), scratch.region(), size, Holes::keep, kTakeBusyNs).error != 0)
    return false;
  const bool same = frame[0] == 0x5ca1ab1e && frame[last] == 0xdecade;
  os::advise(scratch.frame(), kHugePage, MADV_DONTNEED);
  return same && frame[0] == 0;
}

// The memory and the descriptors that the probes take at most.
core::Status have_room(int fd) {
  Scratch first, second;
  for (Scratch* scratch : {&first, &second})
    if (core::Status s = scratch->make(fd, os::kRegisterMissing, 0); !s.ok()) return s;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return no_descriptor(errno);
  const int third = eventfd(0, EFD_CLOEXEC);
  const int error = errno;
  close(ends[0]);
  close(ends[1]);
  if (third < 0) return no_descriptor(error);
  close(third);
  return {};
}

bool probe_move(int fd, int pagemap) {
  Scratch small, huge;  // two, because small pages leave page tables that would split the huge one
  return small.make(fd, os::kRegisterMissing, os::kRegisterWp).ok() && try_move(fd, pagemap, small, kPage) &&
         huge.make(fd, os::kRegisterMissing, os::kRegisterWp).ok() && try_move(fd, pagemap, huge, kHugePage);
}

bool fill_page(int fd, const Scratch& scratch, uintptr_t at, bool protect) {
  *words_at(scratch.frame()) = 0xf111;
  return copy_pages(fd, -1, at, scratch.frame(), kPage, protect).error == 0;
}

bool probe_write_protect(int fd) {
  Scratch scratch;
  const uint64_t mode = os::kRegisterMissing | os::kRegisterWp;
  if (!scratch.make(fd, mode, 0).ok() || !fill_page(fd, scratch, scratch.region(), true)) return false;
  if (write_protect_pages(fd, scratch.region(), kPage, false) != 0) return false;
  *words_at(scratch.region()) = 1;  // would park forever if still protected: no thread reads faults yet
  return write_protect_pages(fd, scratch.region(), kPage, true) == 0;
}

bool probe_poison(int fd) {
  Scratch scratch;
  if (!scratch.make(fd, os::kRegisterMissing, 0).ok()) return false;
  if (poison_pages(fd, -1, scratch.region(), kPage).error != 0) return false;
  // unfail() relies on this: dropping removes the mark, and the page can be filled.
  if (os::advise(scratch.region(), kPage, MADV_DONTNEED) != 0) return false;
  return zero_pages(fd, -1, scratch.region(), kPage).error == 0;
}

bool probe_remap(int fd) {
  Scratch scratch;
  if (!scratch.make(fd, os::kRegisterMissing, 0).ok() || !fill_page(fd, scratch, scratch.region(), false)) return false;
  if (os::remap(scratch.region(), kPage, scratch.frame()) != 0) return false;
  // The fill succeeds only if the page is empty and still watched.
  return *words_at(scratch.frame()) == 0xf111 && fill_page(fd, scratch, scratch.region(), false);
}

// A page table that a small page left in a range would split a huge page moved there next. Returns
// true if dropping the range also frees the table.
bool probe_table_reclaim(int fd, int pagemap) {
  Scratch scratch;
  if (!scratch.make(fd, os::kRegisterMissing | os::kRegisterWp, os::kRegisterWp).ok()) return false;
  if (zero_pages(fd, -1, scratch.region(), kPage).error != 0) return false;
  if (os::advise(scratch.region(), kHugePage, MADV_DONTNEED) != 0) return false;
  *words_at(scratch.frame()) = 1;
  // If no huge page is available now, the test shows nothing; the cautious result is false.
  if (os::any_page(pagemap, scratch.frame(), kHugePage, os::kScanHuge) != 1) return false;
  if (os::any_page(pagemap, scratch.region(), kHugePage, os::kScanPresent | os::kScanSwapped) != 0) return false;
  return move_pages(fd, pagemap, scratch.region(), scratch.frame(), kHugePage, Holes::populate, kTakeBusyNs).error ==
             0 &&
         os::any_page(pagemap, scratch.region(), kHugePage, os::kScanHuge) == 1;
}

bool probe_batch_drop(int fd, int self) {
  Scratch scratch;
  if (!scratch.make(fd, os::kRegisterMissing, 0).ok()) return false;
  std::array<iovec, 2> ranges{};
  for (size_t i = 0; i < ranges.size(); ++i) {
    const uintptr_t at = scratch.region() + 2 * i * kPage;
    if (!fill_page(fd, scratch, at, false)) return false;
    ranges[i] = {reinterpret_cast<void*>(at), kPage};
  }
  if (os::advise_many(self, ranges.data(), ranges.size(), MADV_DONTNEED) != 2 * static_cast<long>(kPage)) return false;
  for (const iovec& r : ranges) {  // a page that is still there would refuse
    if (!fill_page(fd, scratch, reinterpret_cast<uintptr_t>(r.iov_base), false)) return false;
  }
  return true;
}

// A thread reads from a pipe into an absent page. Returns true if that fault is reported and, once
// filled, the call succeeds.
bool probe_system_calls(int fd) {
  Scratch scratch;
  if (!scratch.make(fd, os::kRegisterMissing, 0).ok()) return false;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  const int finished = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  bool served = false;
  if (finished >= 0 && write(ends[1], "x", 1) == 1) {
    char* target = reinterpret_cast<char*>(scratch.region());
    ssize_t got = 0;
    std::thread reader;
    const auto read_into_page = [&] {
      got = read(ends[0], target, 1);
      const uint64_t one = 1;
      if (write(finished, &one, sizeof one) < 0) got = -1;
    };
    // Without a thread, claim nothing.
    if (core::start_thread("vmem-probe", read_into_page, &reader).ok()) {
      std::array<pollfd, 2> wait{{{fd, POLLIN, 0}, {finished, POLLIN, 0}}};
      poll(wait.data(), wait.size(), 1000);
      uffd_msg message{};
      const bool reported = read(fd, &message, sizeof message) == sizeof message;
      if (!fill_page(fd, scratch, scratch.region(), false)) munmap(target, kPage);
      os::wake(fd, scratch.region(), kPage);
      reader.join();
      served = reported && got == 1 && *static_cast<volatile char*>(target) == 'x';
    }
  }
  if (finished >= 0) close(finished);
  close(ends[0]);
  close(ends[1]);
  return served;
}

}  // namespace

core::Status probe(const UserfaultOptions& options, Probed* out) {
  // A handshake that asks for features uses up its descriptor: one to ask, one to keep.
  Opened asked;
  if (core::Status s = open_best(options, &asked); !s.ok()) return s;
  uint64_t offered = 0;
  int error = os::handshake(asked.fd, 0, &offered);
  close(asked.fd);
  if (error != 0) return core::system_error(error, "userfaultfd refuses the handshake of API 0x%llx", UFFD_API);

  Opened opened;
  if (core::Status s = open_best(options, &opened); !s.ok()) return s;
  opened.fd = core::keep_from_children(opened.fd);
  const uint64_t sigbus = options.in_signal_handler ? os::kFeatureSigbus : 0;
  const uint64_t wanted =
      offered & (os::kFeatureWp | os::kFeatureThreadId | os::kFeaturePoison | os::kFeatureMove | sigbus);
  error = os::handshake(opened.fd, wanted, &offered);
  if (error != 0) {
    core::close_and_forget(opened.fd);
    return core::system_error(error, "userfaultfd refuses features 0x%llx that it offered",
                              static_cast<unsigned long long>(wanted));
  }
  const int fd = opened.fd;
  const bool wp = (wanted & os::kFeatureWp) != 0;
  Probed probed;
  probed.fd = fd;
  const auto give_up = [&](core::Status why) {
    core::close_and_forget(fd);
    core::close_and_forget(probed.self);
    core::close_and_forget(probed.pagemap);
    return why;
  };
  // Without memory or a descriptor for the probes, the kernel would seem to lack what it has.
  if (core::Status s = have_room(fd); !s.ok()) return give_up(std::move(s));
  probed.caps.name = options.in_signal_handler ? "userfaultfd with SIGBUS" : "userfaultfd";
  // Frames are registered for write protection, which never triggers: the kernel moves pages only
  // into a registered mapping, and a frame must not trap.
  //
  // The page map shows what really moved if the kernel miscounts (see move_pages), and which pages
  // are guard pages.
  probed.pagemap = core::keep_from_children(open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC));
  if (probed.pagemap < 0 && (errno == EMFILE || errno == ENFILE)) return give_up(no_descriptor(errno));
  probed.caps.move = options.allow_move && wp && (wanted & os::kFeatureMove) != 0 && probed.pagemap >= 0 &&
                     probe_move(fd, probed.pagemap);
  if (probed.caps.move) probed.caps.pins = Pins::taken_away;
  probed.frees_tables = probed.caps.move && options.allow_table_reclaim && probe_table_reclaim(fd, probed.pagemap);
  probed.caps.write_protect = options.allow_write_protect && wp && probe_write_protect(fd);
  probed.caps.poison = options.allow_poison && (wanted & os::kFeaturePoison) != 0 && probe_poison(fd);
  if (options.in_signal_handler && ((wanted & sigbus) == 0 || !probed.caps.poison)) {
    return give_up(core::error(ENOSYS,
                               "this kernel cannot serve faults in a signal handler (UFFD_FEATURE_SIGBUS and "
                               "UFFDIO_POISON, Linux 6.6); set trap to uffd"));
  }
  probed.take_by_remap = probe_remap(fd);
  probed.caps.system_calls = !options.in_signal_handler && !opened.user_mode_only && probe_system_calls(fd);
  if (options.allow_process_madvise) {
    probed.self = core::keep_from_children(os::open_self());
    probed.caps.batch_drop = probed.self >= 0 && probe_batch_drop(fd, probed.self);
  }
  if (!probed.caps.batch_drop && probed.self >= 0) {
    core::close_and_forget(probed.self);
    probed.self = -1;
  }
  if (!probed.caps.move && !probed.take_by_remap) {
    return give_up(
        core::error(ENOSYS,
                    "this kernel can neither move pages out of a trapped range (UFFDIO_MOVE, Linux 6.8) nor remap them "
                    "(MREMAP_DONTUNMAP, Linux 5.7): nothing could be evicted"));
  }
  core::log(core::Level::info,
            "userfaultfd: move %d, write protection %d, poison %d, system calls %d, batch drop %d, table "
            "reclaim %d",
            probed.caps.move, probed.caps.write_protect, probed.caps.poison, probed.caps.system_calls,
            probed.caps.batch_drop, probed.frees_tables);
  *out = probed;
  return {};
}

}  // namespace vmem::trap
