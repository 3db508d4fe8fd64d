// Shared by the trap's tests: the backends that the contract suite runs over, a thread that serves
// faults, and a way to survive SIGBUS and SIGSEGV. Add further backends to backends().
#pragma once

#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "trap/trap.h"

namespace vmem::trap::testing {

struct Backend {
  std::string name;
  std::function<core::Status(std::unique_ptr<Trap>*)> make;
};
inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.name;
}

std::vector<Backend> backends();

// Reads faults on its own thread and calls `serve` for each there. Stops when destroyed.
class Server {
 public:
  Server(Trap& trap, std::function<void(const Fault&)> serve);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

 private:
  Trap& trap_;
  std::function<void(const Fault&)> serve_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Reads the next fault on the calling thread. Has no time-out: the test runner has one.
Fault next_fault(Trap& trap);

// Loads the word. Returns 0 and sets *value, or returns the signal (SIGBUS, SIGSEGV) that the
// access raised. Any thread.
int load(const volatile uint64_t* word, uint64_t* value);

// Word `index` of a block in generation `generation`: never 0, and different for every pair.
inline uint64_t pattern(uint64_t generation, uint64_t index) {
  return (generation + 1) << 32 | (index + 1);
}
void write_pattern(void* block, size_t size, uint64_t generation);
// Returns the index of the first word that is not pattern(generation, index), or -1.
int64_t first_wrong(const void* block, size_t size, uint64_t generation);

size_t count_mappings();

}  // namespace vmem::trap::testing
