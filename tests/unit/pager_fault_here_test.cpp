// Faults that are served on the thread that makes them (trap::Trap::serve_by).
#include <gtest/gtest.h>

#include "pager_parts.h"

namespace vmem::pager::test {
namespace {

class FaultHere : public PagerParts {
 protected:
  bool serve(const void* at) {
    const bool served = host.faults.serve_here({reinterpret_cast<uintptr_t>(at), trap::FaultKind::read, 0});
    engine.until_idle();
    return served;
  }
  void set_dying(Region& r, bool dying) {
    BigLock lock(map.mutex());
    r.dying = dying;
  }
};

TEST_F(FaultHere, AnAbsentBlockIsThereAfterwards) {
  Region& r = region(2);
  EXPECT_TRUE(serve(r.address(1)));
  EXPECT_EQ(state(r, 1), State::resident);
  EXPECT_TRUE(serve(r.address(1))) << "it came between the access and the handler";
}

TEST_F(FaultHere, AnAddressOfNoRegionIsNotServed) {
  int mine = 0;
  EXPECT_FALSE(serve(&mine));
}

// Otherwise the thread would repeat its access until the region is gone, and freeing may wait for it.
TEST_F(FaultHere, AnAbsentBlockOfARegionThatIsBeingFreedIsNotServed) {
  Region& r = region(2);
  bring(r, 0);
  set_dying(r, true);
  EXPECT_TRUE(serve(r.address(0)));
  EXPECT_FALSE(serve(r.address(1)));
  set_dying(r, false);
}

}  // namespace
}  // namespace vmem::pager::test
