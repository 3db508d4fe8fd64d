#include "pager/block/neighbours.h"

#include <algorithm>

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

void place_together(const MoveList& reads, std::span<Together> groups) {
  const auto one_read = [](const Move& m, const Move& next) {
    return goes_on(m, next) && next.coded == nullptr && next.io.file == m.io.file &&
           next.io.offset == m.io.offset + m.io.size;
  };
  const auto group = std::find_if(groups.begin(), groups.end(), [](const Together& t) { return t.left == 0; });
  if (group == groups.end()) return;
  for (Move *m = reads.head, *last = nullptr; m != nullptr && (last == nullptr || one_read(*last, *m)); m = m->next) {
    m->together = &*group;
    ++group->left;
    last = m;
  }
}

Batch take_run(MoveList& moves) {
  Batch run;
  run.push_back(moves.pop());
  const auto stays_as_it_is = [](const Move& m) {
    return m.together != nullptr && (m.protect || !m.region->writable());
  };
  while (!moves.empty() && !run.full() && stays_as_it_is(*run.back()) && stays_as_it_is(*moves.head) &&
         goes_on(*run.back(), *moves.head))
    run.push_back(moves.pop());
  return run;
}

}  // namespace vmem::pager
