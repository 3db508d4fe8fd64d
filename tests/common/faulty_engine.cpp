#include "common/faulty_engine.h"

#include <algorithm>
#include <cerrno>

#include "core/mutex.h"
#include "core/thread.h"

namespace vmem::store {

namespace {

constexpr size_t kSector = 512;

// Half of the size in whole pages, or in sectors if it is less than a page.
size_t half(size_t size) {
  const size_t pages = core::round_down(size / 2, core::kPage);
  return pages != 0 ? pages : core::round_down(size / 2, kSector);
}

}  // namespace

core::Status FaultyEngine::wrap(std::unique_ptr<Engine> inner, uint64_t seed, std::unique_ptr<FaultyEngine>* out) {
  auto* base = dynamic_cast<EngineBase*>(inner.get());
  if (base == nullptr) return core::error(EINVAL, "only an engine of make_engine can be wrapped");
  (void)inner.release();  // owned by `base` now
  std::unique_ptr<FaultyEngine> engine(new FaultyEngine(std::unique_ptr<EngineBase>(base), seed));
  core::Status status = core::start_thread(
      "vmem-inject", [raw = engine.get()] { raw->run(); }, &engine->thread_);
  if (status.ok()) *out = std::move(engine);
  return status;
}

FaultyEngine::FaultyEngine(std::unique_ptr<EngineBase> inner, uint64_t seed) : inner_(inner.release()), random_(seed) {
  inner_->set_injector(this);
}

FaultyEngine::~FaultyEngine() {
  {
    core::MutexLock lock(mutex_);
    stopping_ = true;                               // from here on submit() applies no rules
    while (releasing_ != 0) mutex_.wait(changed_);  // its requests may be the last ones we wait for
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  delete inner_;  // requests in flight still complete through this object
}

FaultyEngine::RuleId FaultyEngine::add_rule(const Fault& fault) {
  core::MutexLock lock(mutex_);
  rules_.push_back(Rule{fault});
  return static_cast<RuleId>(rules_.size() - 1);
}

void FaultyEngine::remove_rule(RuleId rule) {
  core::MutexLock lock(mutex_);
  rules_.at(static_cast<size_t>(rule)).removed = true;
}

void FaultyEngine::clear_rules() {
  core::MutexLock lock(mutex_);
  for (Rule& rule : rules_) rule.removed = true;
}

void FaultyEngine::wait_failed() const {
  core::MutexLock lock(mutex_);
  while (failing_ != 0) mutex_.wait(changed_);
}

uint64_t FaultyEngine::fired(RuleId rule) const {
  core::MutexLock lock(mutex_);
  return rules_.at(static_cast<size_t>(rule)).fired;
}

bool FaultyEngine::wait_hanging(size_t count, unsigned timeout_ms) const {
  core::MutexLock lock(mutex_);
  const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (hanging_.size() < count && mutex_.wait_until(changed_, end)) {
  }
  return hanging_.size() >= count;
}

void FaultyEngine::release() {
  std::vector<Io*> all;
  {
    core::MutexLock lock(mutex_);
    all.swap(hanging_);
    ++releasing_;
  }
  inner_->submit(all);
  core::MutexLock lock(mutex_);
  --releasing_;
  changed_.notify_all();
}

EngineStats FaultyEngine::stats() const {
  EngineStats out = inner_->stats();
  core::MutexLock lock(mutex_);
  out.errors += errors_;
  return out;
}

bool FaultyEngine::matches(const Fault& fault, const Io& io) {
  if (fault.op && *fault.op != io.op) return false;
  if (fault.urgency && *fault.urgency != io.urgency) return false;
  if (fault.file && *fault.file != io.file) return false;
  if (fault.action == Fault::Action::flip_bit && io.op != Io::Op::read) return false;
  if (fault.action == Fault::Action::torn_write && io.op != Io::Op::write) return false;
  return io.offset < fault.end && io.offset + std::max<size_t>(io.size, 1) > fault.begin;
}

// Returns the rule that fires for this request, or for one attempt of it.
const Fault* FaultyEngine::fire(const Io& io, bool attempt) {
  for (Rule& rule : rules_) {
    if (rule.removed || attempt != (rule.fault.action == Fault::Action::short_transfer)) continue;
    if (rule.fired >= rule.fault.limit || !matches(rule.fault, io)) continue;
    ++rule.matched;
    if (rule.fault.nth != 0 && rule.matched != rule.fault.nth) continue;
    if (rule.fault.probability < 1 && std::uniform_real_distribution<>(0, 1)(random_) >= rule.fault.probability)
      continue;
    ++rule.fired;
    return &rule.fault;
  }
  return nullptr;
}

size_t FaultyEngine::attempt_limit(const Io& io, size_t want) {
  core::MutexLock lock(mutex_);
  const size_t part = half(want);
  return part != 0 && fire(io, true) != nullptr ? part : want;
}

// Applies the fault; adds to `now` what goes to the inner engine at once.
void FaultyEngine::apply(const Fault& fault, Io* io, std::vector<Io*>* now) {
  switch (fault.action) {
    case Fault::Action::error:
      ++errors_;
      ++failing_;
      later_.emplace(Clock::now(), Later{io, fault.error});
      break;
    case Fault::Action::delay:
      later_.emplace(Clock::now() + std::chrono::milliseconds(fault.delay_ms), Later{io, 0});
      break;
    case Fault::Action::hang:
      hanging_.push_back(io);
      break;
    case Fault::Action::flip_bit:
    case Fault::Action::torn_write: {
      auto* stand = new Stand{*io, io, this, fault.action == Fault::Action::flip_bit};
      if (!stand->flip) stand->io.size = half(io->size);
      stand->io.done = on_stand_done;
      stand->io.progress = nullptr;  // the bit is wrong from the beginning
      stand->io.user = stand;
      now->push_back(&stand->io);
      break;
    }
    case Fault::Action::short_transfer:
      now->push_back(io);
      break;
  }
}

void FaultyEngine::on_stand_done(Io& io) {
  const std::unique_ptr<Stand> stand(static_cast<Stand*>(io.user));
  Io& original = *stand->original;
  original.result = io.result;
  original.transferred = io.transferred;
  if (!stand->flip) {
    original.result = 0;
    original.transferred = original.size;
  } else if (io.result == 0 && io.transferred != 0) {
    core::MutexLock lock(stand->engine->mutex_);
    const uint64_t bit = stand->engine->random_() % (8 * io.transferred);
    static_cast<unsigned char*>(io.buffer)[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
  }
  if (original.done != nullptr) original.done(original);
}

void FaultyEngine::submit(std::span<Io* const> batch) {
  std::vector<Io*> now;
  now.reserve(batch.size());
  {
    core::MutexLock lock(mutex_);
    for (Io* io : batch) {
      const Fault* fault = stopping_ ? nullptr : fire(*io, false);
      if (fault != nullptr) {
        apply(*fault, io, &now);
      } else {
        now.push_back(io);
      }
    }
  }
  if (now.size() != batch.size()) changed_.notify_all();
  inner_->submit(now);
}

// Completes failed requests and submits delayed ones; when stopping, submits the hanging ones too.
void FaultyEngine::run() noexcept {
  core::MutexLock lock(mutex_);
  for (;;) {
    const bool due = !later_.empty() && (stopping_ || later_.begin()->first <= Clock::now());
    if (due) {
      const Later next = later_.begin()->second;
      later_.erase(later_.begin());
      lock.unlock();
      if (next.error == 0) {
        inner_->submit({&next.io, 1});
      } else {
        next.io->result = -next.error;
        next.io->transferred = 0;
        if (next.io->done != nullptr) next.io->done(*next.io);
      }
      lock.lock();
      if (next.error != 0 && --failing_ == 0) changed_.notify_all();
    } else if (stopping_) {
      std::vector<Io*> all;
      all.swap(hanging_);
      lock.unlock();
      inner_->submit(all);
      return;
    } else if (later_.empty()) {
      mutex_.wait(changed_);
    } else {
      const Clock::time_point until = later_.begin()->first;
      mutex_.wait_until(changed_, until);
    }
  }
}

}  // namespace vmem::store
