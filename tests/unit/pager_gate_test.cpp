#include "pager/pager_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace vmem::pager {
namespace {

TEST(Gate, WhoIsAloneIsAlone) {
  Gate gate;
  std::atomic<bool> alone{false}, stop{false};
  std::atomic<unsigned> met{0}, entered{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        gate.enter();
        if (alone) ++met;
        ++entered;
        gate.leave();
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    Closed closed(gate);
    closed.drain();
    alone = true;
    const unsigned before = entered;
    if (i % 100 == 0) std::this_thread::yield();
    EXPECT_EQ(entered, before);
    alone = false;
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(met, 0u);
}

TEST(Gate, WhoComesWhileItIsClosedWaitsAndWhoIsInsideDoesNot) {
  Gate gate;
  gate.enter();
  gate.close();
  std::atomic<bool> open{false}, late_was_early{false};
  std::thread late([&] {
    gate.enter();
    late_was_early = !open;
    gate.leave();
  });
  gate.enter_at_exit();  // passes a closed gate
  gate.leave();
  gate.leave();
  gate.drain();
  open = true;
  gate.open();
  late.join();
  EXPECT_FALSE(late_was_early);
}

}  // namespace
}  // namespace vmem::pager
