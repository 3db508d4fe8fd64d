#include "trap_backends.h"

#include <array>
#include <fstream>

namespace vmem::trap::testing {

namespace {

thread_local sigjmp_buf jump;
thread_local volatile sig_atomic_t armed = 0;

void on_signal(int number) {
  if (!armed) {
    signal(number, SIG_DFL);  // not ours: the repeated access ends the process
    return;
  }
  armed = 0;
  siglongjmp(jump, number);
}

void install_handlers() {
  static const bool done = [] {
    struct sigaction action {};
    action.sa_handler = on_signal;
    sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGSEGV, &action, nullptr);
    return true;
  }();
  (void)done;
}

Backend userfault(const char* name, UserfaultOptions options) {
  return {name, [options](std::unique_ptr<Trap>* out) { return make_userfault_trap(options, out); }};
}

}  // namespace

std::vector<Backend> backends() {
  UserfaultOptions no_move, no_poison, user_mode, no_wp, no_reclaim, oldest, in_handler;
  no_move.allow_move = false;
  no_poison.allow_poison = false;
  user_mode.allow_privileged = false;
  no_wp.allow_write_protect = false;
  no_reclaim.allow_table_reclaim = false;
  in_handler.in_signal_handler = true;
  oldest.allow_move = oldest.allow_poison = oldest.allow_write_protect = oldest.allow_process_madvise = false;
  return {userfault("uffd", {}),
          userfault("uffd_no_move", no_move),
          userfault("uffd_no_poison", no_poison),
          userfault("uffd_user_mode", user_mode),
          userfault("uffd_no_wp", no_wp),
          userfault("uffd_no_table_reclaim", no_reclaim),
          userfault("uffd_oldest", oldest),
          {"signal",
           [in_handler](std::unique_ptr<Trap>* out) {
             install_handlers();  // ours passes on to them
             return make_userfault_trap(in_handler, out);
           }},
          {"kmod", [](std::unique_ptr<Trap>* out) { return make_kmod_trap({}, out); }}};
}

Server::Server(Trap& trap, std::function<void(const Fault&)> serve) : trap_(trap), serve_(std::move(serve)) {
  thread_ = std::thread([this] {
    std::array<Event, 16> events;
    while (!stop_) {
      size_t count = 0;
      if (core::Status s = trap_.wait(events, -1, &count); !s.ok()) {
        fprintf(stderr, "wait: %s\n", std::string(s.text()).c_str());
        abort();
      }
      for (size_t i = 0; i < count; ++i)
        if (events[i].kind == Event::Kind::fault) serve_(events[i].fault);
    }
  });
}

Server::~Server() {
  stop_ = true;
  trap_.interrupt();
  thread_.join();
}

Fault next_fault(Trap& trap) {
  std::array<Event, 1> events;
  for (size_t count = 0;;) {
    if (core::Status s = trap.wait(events, -1, &count); !s.ok()) {
      fprintf(stderr, "wait: %s\n", std::string(s.text()).c_str());
      abort();
    }
    if (count == 1 && events[0].kind == Event::Kind::fault) return events[0].fault;
  }
}

int load(const volatile uint64_t* word, uint64_t* value) {
  install_handlers();
  const int number = sigsetjmp(jump, 1);
  if (number != 0) return number;
  armed = 1;
  // Relaxed: under TSan a stronger access would park with a lock of the sanitizer held.
  const uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  armed = 0;
  *value = seen;
  return 0;
}

void write_pattern(void* block, size_t size, uint64_t generation) {
  uint64_t* words = static_cast<uint64_t*>(block);
  for (size_t i = 0; i < size / sizeof(uint64_t); ++i) words[i] = pattern(generation, i);
}

int64_t first_wrong(const void* block, size_t size, uint64_t generation) {
  const uint64_t* words = static_cast<const uint64_t*>(block);
  for (size_t i = 0; i < size / sizeof(uint64_t); ++i) {
    if (__atomic_load_n(words + i, __ATOMIC_RELAXED) != pattern(generation, i)) return static_cast<int64_t>(i);
  }
  return -1;
}

size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

}  // namespace vmem::trap::testing
