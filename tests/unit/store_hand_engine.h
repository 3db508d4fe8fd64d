// An engine without threads, for long transfers, which go in parts: the test decides what is issued
// and ends when.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "store/engine_base.h"
#include "store_test_util.h"

namespace vmem::store::test {

inline constexpr size_t kMiB = size_t{1} << 20;

// Transfers under way have numbers, in the order in which they were issued.
class HandEngine final : public EngineBase {
 public:
  explicit HandEngine(unsigned depth) : EngineBase(depth) {}
  const char* name() const override { return "hand"; }

  // Issues transfers while the depth has room, at most `most`; returns how many.
  size_t issue(size_t most = SIZE_MAX) {
    core::MutexLock lock(mutex_);
    size_t count = 0;
    for (Transfer* t; count < most && (t = take()) != nullptr; ++count) issued_.push_back({t, t->chain(), *t->chain()});
    return count;
  }
  size_t issued() const { return issued_.size(); }
  const Io& io(size_t n) const { return issued_.at(n).as_issued; }
  bool is(size_t n, const Io& io) const { return issued_.at(n).chain == &io; }  // the whole, not a part
  void move(size_t n) {                                                         // transfers as the kernel does
    Transfer* const t = issued_.at(n).transfer;
    while (!t->advance(perform(t->prepare(nullptr)))) {
    }
    end(t);
  }
  void fail(size_t n, int error, size_t after = 0) {
    Transfer* const t = issued_.at(n).transfer;
    t->prepare(nullptr);
    if (after != 0) {
      ASSERT_FALSE(t->advance(static_cast<ssize_t>(after)));
      t->prepare(nullptr);
    }
    ASSERT_TRUE(t->advance(-error));
    end(t);
  }
  // Calls done() of finished requests; returns how many.
  size_t deliver_all() {
    size_t count = 0;
    for (;; ++count) {
      Io* io = nullptr;
      {
        core::MutexLock lock(mutex_);
        io = next_finished();
      }
      if (io == nullptr) return count;
      deliver(io);
      core::MutexLock lock(mutex_);
      --outstanding_;
    }
  }
  // Calls progress() while there is progress to report, at most `most` times; returns how often.
  size_t tell(size_t most = SIZE_MAX) {
    for (size_t count = 0;; ++count) {
      Io* io = nullptr;
      {
        core::MutexLock lock(mutex_);
        io = count < most ? next_to_tell() : nullptr;
      }
      if (io == nullptr) return count;
      EngineBase::tell(io);
    }
  }
  bool quiet() const {
    core::MutexLock lock(mutex_);
    return idle();
  }

 private:
  uint64_t pick_sleepers(size_t) override VMEM_REQUIRES(mutex_) { return 0; }
  void wake(uint64_t) override {}
  void end(Transfer* t) {
    core::MutexLock lock(mutex_);
    retire(t);
  }
  struct Issued {
    Transfer* transfer;  // may be gone later
    const Io* chain;
    Io as_issued;
  };
  std::vector<Issued> issued_;
};

// One read or write of `size` bytes at `offset` of a file.
struct Long {
  Long(unsigned depth, Io::Op op, size_t file_size, uint64_t offset, size_t size, bool direct = true)
      : file(file_size, direct), buffer(size), engine(depth) {
    std::mt19937_64 random(9);
    buffer.fill(random);
    EXPECT_TRUE(engine.add_file(file.fd(), &id).ok());
    io.op = op;
    io.file = id;
    io.offset = offset;
    io.buffer = buffer.data();
    io.size = size;
    io.done = [](Io& over) { ++*static_cast<int*>(over.user); };
    io.user = &done;
  }
  void submit() {
    Io* const one = &io;
    engine.submit({&one, 1});
  }
  // Expects the file's bytes, and zeros after them.
  void expect_read(size_t from_file) {
    EXPECT_EQ(io.transferred, from_file);
    EXPECT_TRUE(file.matches(io.offset, buffer.data(), from_file));
    if (io.result == 0) {
      EXPECT_TRUE(test::all_zero(buffer.data() + from_file, io.size - from_file));
    }
  }

  TempFile file;
  Buffer buffer;
  HandEngine engine;
  FileId id = 0;
  Io io;
  int done = 0;
};

// Calls body() with each order of 0 .. count - 1.
template <typename Body>
void each_order(size_t count, Body body) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  do {
    body(order);
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace vmem::store::test
