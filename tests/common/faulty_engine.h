// An engine that fails on demand, for tests of the layers above. It wraps a real engine and applies
// rules to requests. Without rules it changes nothing, not even which requests are merged.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/mutex.h"
#include "store/engine.h"
#include "store/engine_base.h"

namespace vmem::store {

// A rule: which requests it matches, when it fires, and what it does. Unset fields match
// everything.
struct Fault {
  enum class Action : uint8_t {
    error,           // completes with -`error`, transfers nothing
    short_transfer,  // below the retry layer: one system call transfers about half of the requested size
    delay,           // submitted after delay_ms
    flip_bit,        // reads: flips one bit of the data and reports success
    torn_write,      // writes: only the first half reaches the file, but success is reported
    hang,            // submitted when release() is called
  };
  Action action = Action::error;
  int error = 5 /* EIO */;
  unsigned delay_ms = 0;

  std::optional<Io::Op> op;
  std::optional<core::Urgency> urgency;
  std::optional<FileId> file;
  uint64_t begin = 0, end = UINT64_MAX;  // bytes of the file; matches requests that overlap

  uint64_t nth = 0;             // fires only for the nth match, from 1; 0: for each
  double probability = 1;       // that the rule fires for a match
  uint64_t limit = UINT64_MAX;  // fires at most this often
};

// Thread-safe. Rules are tried in the order in which they were added; the first that fires decides.
// short_transfer is drawn for each attempt, the other actions once for each request. The destructor
// waits for all requests, including hanging ones.
class FaultyEngine final : public Engine, private Injector {
 public:
  using RuleId = int;

  // inner: an engine of make_engine; anything else: -EINVAL.
  static core::Status wrap(std::unique_ptr<Engine> inner, uint64_t seed, std::unique_ptr<FaultyEngine>* out);
  ~FaultyEngine() override;

  RuleId add_rule(const Fault& fault);
  void remove_rule(RuleId rule);
  void clear_rules();
  // Blocks until every request that a rule failed has completed.
  void wait_failed() const;
  // Returns how often the rule fired. Works after the rule was removed.
  uint64_t fired(RuleId rule) const;

  // Blocks until `count` requests hang. Returns false after timeout_ms.
  bool wait_hanging(size_t count, unsigned timeout_ms) const;
  // Submits all hanging requests.
  void release();

  EngineBase& inner() { return *inner_; }

  const char* name() const override { return "faulty"; }
  void submit(std::span<Io* const> batch) override;
  core::Status add_file(int fd, FileId* id) override { return inner_->add_file(fd, id); }
  void remove_file(FileId id) override { inner_->remove_file(id); }
  void run_errand(Errand& errand) override { inner_->run_errand(errand); }
  EngineStats stats() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Rule {
    Fault fault;
    bool removed = false;
    uint64_t matched = 0;
    uint64_t fired = 0;
  };
  // Replaces a request whose data or size is tampered with.
  struct Stand {
    Io io;
    Io* original;
    FaultyEngine* engine;
    bool flip;
  };
  struct Later {
    Io* io;
    int error;  // 0: submit it; else complete with -error
  };

  FaultyEngine(std::unique_ptr<EngineBase> inner, uint64_t seed);
  size_t attempt_limit(const Io& io, size_t want) override;
  static bool matches(const Fault& fault, const Io& io);
  const Fault* fire(const Io& io, bool attempt) VMEM_REQUIRES(mutex_);
  void apply(const Fault& fault, Io* io, std::vector<Io*>* now) VMEM_REQUIRES(mutex_);
  static void on_stand_done(Io& io);
  void run() noexcept;

  EngineBase* const inner_;  // owned; not a unique_ptr: its reset() would hide it from callbacks that still submit
  mutable core::Mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Rule> rules_ VMEM_GUARDED_BY(mutex_);
  std::mt19937_64 random_ VMEM_GUARDED_BY(mutex_);
  std::multimap<Clock::time_point, Later> later_ VMEM_GUARDED_BY(mutex_);
  std::vector<Io*> hanging_ VMEM_GUARDED_BY(mutex_);
  uint64_t errors_ VMEM_GUARDED_BY(mutex_) = 0;
  size_t failing_ VMEM_GUARDED_BY(mutex_) = 0;  // requests that will complete with an error
  bool stopping_ VMEM_GUARDED_BY(mutex_) = false;
  unsigned releasing_ VMEM_GUARDED_BY(mutex_) = 0;  // threads in release()
  std::thread thread_;
};

}  // namespace vmem::store
