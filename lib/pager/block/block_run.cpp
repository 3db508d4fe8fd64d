#include "pager/block/block_run.h"

#include "core/break.h"

namespace vmem::pager {

void protect_in_place(trap::Trap& trap, std::span<Transition* const> transitions) {
  if (core::broken("write_protect")) return;
  const auto stays = [](const Transition& m) { return m.write.in_place && !m.write.clean && !m.write.unprotected; };
  for (size_t i = 0, n = 1; i < transitions.size(); i += n, n = 1) {
    Transition& first = *transitions[i];
    if (!stays(first)) continue;
    while (i + n < transitions.size() && stays(*transitions[i + n]) && transitions[i + n]->region == first.region &&
           transitions[i + n]->block == first.block + n)
      ++n;
    const size_t size = first.region->block_size;
    first.status = trap.protect(first.image, n * size);
    if (n == 1 || first.status.ok()) continue;
    for (Transition* m : transitions.subspan(i, n))
      m->status = trap.protect(m->image, size);  // each has a reason of its own
  }
}

void place_together(const TransitionList& reads, std::span<ReadGroup> groups) {
  const auto one_read = [](const Transition& m, const Transition& next) {
    return goes_on(m, next) && next.coded == nullptr && next.io.file == m.io.file &&
           next.io.offset == m.io.offset + m.io.size;
  };
  const auto group = std::find_if(groups.begin(), groups.end(), [](const ReadGroup& t) { return t.left == 0; });
  if (group == groups.end()) return;
  for (Transition *m = reads.head, *last = nullptr; m != nullptr && (last == nullptr || one_read(*last, *m));
       m = m->next) {
    m->read.group = &*group;
    ++group->left;
    last = m;
  }
}

Batch take_run(TransitionList& transitions) {
  Batch run;
  run.push_back(transitions.pop());
  const auto stays_as_it_is = [](const Transition& m) {
    return m.read.group != nullptr && (m.protect || !m.region->writable());
  };
  while (!transitions.empty() && !run.full() && stays_as_it_is(*run.back()) && stays_as_it_is(*transitions.head) &&
         goes_on(*run.back(), *transitions.head))
    run.push_back(transitions.pop());
  return run;
}

}  // namespace vmem::pager
