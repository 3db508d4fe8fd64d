#include "pager/neighbours.h"

#include "core/break.h"

namespace vmem::pager {

void protect_in_place(trap::Trap& trap, std::span<Move* const> moves) {
  if (core::broken("write_protect")) return;
  const auto stays = [](const Move& m) { return m.in_place && !m.clean; };
  for (size_t i = 0, n = 1; i < moves.size(); i += n, n = 1) {
    Move& first = *moves[i];
    if (!stays(first)) continue;
    while (i + n < moves.size() && stays(*moves[i + n]) && moves[i + n]->region == first.region &&
           moves[i + n]->block == first.block + n)
      ++n;
    const size_t size = first.region->block_size;
    first.status = trap.protect(first.image, n * size);
    if (n == 1 || first.status.ok()) continue;
    for (Move* m : moves.subspan(i, n)) m->status = trap.protect(m->image, size);  // each has a reason of its own
  }
}

}  // namespace vmem::pager
