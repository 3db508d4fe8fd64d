// Injects failures of the disk and of the simulated device for a while.
#pragma once

#include <atomic>
#include <memory>

#include "common.h"
#include "common/faulty_engine.h"
#include "device/sim/sim_device.h"

namespace stress {

using vmem::device::SimOp;
using vmem::store::Fault;
using vmem::store::FaultyEngine;
using vmem::store::Io;

inline Fault fault(Fault::Action action, Io::Op op, double probability, int error = EIO) {
  Fault f;
  f.action = action, f.op = op, f.probability = probability, f.error = error, f.delay_ms = 3;
  return f;
}

// Adds a random choice of faults until the rules are cleared. Sets `failing` and `reads_fail`
// before the first request can fail.
inline void inject(FaultyEngine* disk, Random& random, bool failures, bool simulated, std::atomic<bool>& failing,
                   std::atomic<bool>& reads_fail) {
  disk->clear_rules();
  // Faults that a caller never sees.
  if (random.one_in(2)) disk->add_rule(fault(Fault::Action::short_transfer, Io::Op::read, 0.2));
  if (random.one_in(2)) disk->add_rule(fault(Fault::Action::short_transfer, Io::Op::write, 0.2));
  if (random.one_in(3)) disk->add_rule(fault(Fault::Action::delay, Io::Op::write, 0.1));
  if (!failures || random.one_in(2)) return;
  failing = true;
  if (random.one_in(2)) disk->add_rule(fault(Fault::Action::error, Io::Op::write, 0.3));
  if (random.one_in(3)) disk->add_rule(fault(Fault::Action::error, Io::Op::write, 0.5, ENOSPC));
  if (random.one_in(3)) {
    reads_fail = true;
    disk->add_rule(fault(Fault::Action::error, Io::Op::read, 0.03));
  }
  if (random.one_in(3)) {
    reads_fail = true;
    // Only in the library's own store: the library cannot verify bytes of a file that it reads for
    // the first time.
    Fault flip = fault(Fault::Action::flip_bit, Io::Op::read, 0.03);
    flip.file = 0;
    disk->add_rule(flip);
  }
  if (simulated && random.one_in(2)) {
    auto state = std::make_shared<std::atomic<uint64_t>>(random());
    vmem::device::current_sim()->set_hook([state](SimOp op, int, uintptr_t, size_t) -> vmem::core::Status {
      if (op != SimOp::map && op != SimOp::populate && op != SimOp::pin) return {};
      Random draw(state->fetch_add(1));
      return draw.one_in(20) ? vmem::core::error(ENOMEM, "as the test wants it") : vmem::core::Status();
    });
  }
}

}  // namespace stress
