// An engine that breaks on demand, for tests of everything above it: it wraps a real one and applies rules to what is
// submitted. Without rules it changes nothing, not even which requests are merged.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/mutex.h"
#include "store/engine_base.h"
#include "store/io.h"

namespace vmem::store {

// Which requests, when, and what happens to them. Unset fields match everything.
struct Fault {
  enum class Action : uint8_t {
    error,           // done with -`error`, nothing moves
    short_transfer,  // below the retry layer: one system call moves about half of what it was asked to
    delay,           // submitted after delay_ms
    flip_bit,        // reads: one bit of what was read is wrong, success is reported
    torn_write,      // writes: only the first half reaches the file, success is reported
    hang,            // submitted when release() is called
  };
  Action action = Action::error;
  int error = 5 /* EIO */;
  unsigned delay_ms = 0;

  std::optional<Io::Op> op;
  std::optional<core::Urgency> urgency;
  std::optional<FileId> file;
  uint64_t begin = 0, end = UINT64_MAX;  // bytes of the file; a request that overlaps matches

  uint64_t nth = 0;             // only the nth request that matches, from 1; 0: each
  double probability = 1;       // that a match fires
  uint64_t limit = UINT64_MAX;  // fires at most so often
};

// Thread-safe. The first rule that fires decides; rules are tried in the order in which they were added. short_transfer
// rules are asked for each attempt, the others for each request. Destruction waits for everything, hanging ones too.
class FaultyEngine final : public Engine, private Injector {
 public:
  using RuleId = int;

  // inner: an engine of make_engine; anything else -EINVAL.
  static core::Status wrap(std::unique_ptr<Engine> inner, uint64_t seed, std::unique_ptr<FaultyEngine>* out);
  ~FaultyEngine() override;

  RuleId add_rule(const Fault& fault);
  void remove_rule(RuleId rule);
  void clear_rules();
  // Blocks until every request that a rule failed is over.
  void wait_failed() const;
  // How often a rule fired; counted on after it was removed.
  uint64_t fired(RuleId rule) const;

  // Blocks until `count` requests hang. False after timeout_ms.
  bool wait_hanging(size_t count, unsigned timeout_ms) const;
  // Lets everything that hangs go on.
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
  // Stands in for a request whose data or size is tampered with.
  struct Stand {
    Io io;
    Io* original;
    FaultyEngine* engine;
    bool flip;
  };
  struct Later {
    Io* io;
    int error;  // 0: submit it; else done with -error
  };

  FaultyEngine(std::unique_ptr<EngineBase> inner, uint64_t seed);
  size_t attempt_limit(const Io& io, size_t want) override;
  static bool matches(const Fault& fault, const Io& io);
  const Fault* fire(const Io& io, bool attempt) VMEM_REQUIRES(mutex_);
  void apply(const Fault& fault, Io* io, std::vector<Io*>* now) VMEM_REQUIRES(mutex_);
  static void on_stand_done(Io& io);
  void run() noexcept;

  EngineBase* const inner_;  // owned; not a unique_ptr, whose reset() would hide it from callbacks that still submit
  mutable core::Mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Rule> rules_ VMEM_GUARDED_BY(mutex_);
  std::mt19937_64 random_ VMEM_GUARDED_BY(mutex_);
  std::multimap<Clock::time_point, Later> later_ VMEM_GUARDED_BY(mutex_);
  std::vector<Io*> hanging_ VMEM_GUARDED_BY(mutex_);
  uint64_t errors_ VMEM_GUARDED_BY(mutex_) = 0;
  size_t failing_ VMEM_GUARDED_BY(mutex_) = 0;  // requests that are to be done with an error
  bool stopping_ VMEM_GUARDED_BY(mutex_) = false;
  unsigned releasing_ VMEM_GUARDED_BY(mutex_) = 0;  // threads in release()
  std::thread thread_;
};

}  // namespace vmem::store
