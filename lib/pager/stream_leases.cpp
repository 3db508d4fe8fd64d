#include "pager/stream_leases.h"

#include <algorithm>

namespace vmem::pager {

bool StreamLeases::any(const Region& r) const {
  return std::any_of(endings_.begin(), endings_.end(), [&](const Ending& e) {
    return std::any_of(e.spans.begin(), e.spans.end(), [&](const SpanOf& s) { return s.region == &r; });
  });
}

void StreamLeases::add(std::list<Ending>& from, std::list<Ending>::iterator release) {
  release->id = ++last_;
  release->oldest =
      std::none_of(endings_.begin(), endings_.end(), [&](const Ending& e) { return e.same_lane(*release); });
  endings_.splice(endings_.end(), from, release);
}

size_t StreamLeases::oldest(uint64_t after, std::span<const Ending*> out) const {
  size_t count = 0;
  for (auto e = endings_.begin(); e != endings_.end() && count < out.size(); ++e) {
    if (e->id > after && e->oldest && e->recorded) out[count++] = &*e;
  }
  return count;
}

const Ending* StreamLeases::find(uint64_t id) const {
  const auto e = std::find_if(endings_.begin(), endings_.end(), [&](const Ending& x) { return x.id == id; });
  return e != endings_.end() ? &*e : nullptr;
}

void StreamLeases::end(const Ending& release, std::list<Ending>* to) {
  const auto e = std::find_if(endings_.begin(), endings_.end(), [&](const Ending& x) { return &x == &release; });
  const auto next = std::find_if(std::next(e), endings_.end(), [&](const Ending& x) { return x.same_lane(*e); });
  if (next != endings_.end() && e->oldest) next->oldest = true;
  to->splice(to->end(), endings_, e);
}

void StreamLeases::forget(const Region& r) {
  for (Ending& e : endings_) std::erase_if(e.spans, [&](const SpanOf& s) { return s.region == &r; });
}

std::string StreamLeases::check() const {
  uint64_t before = 0;
  for (auto e = endings_.begin(); e != endings_.end(); ++e) {
    if (e->id <= before || e->id > last_) return "releases at devices are not in the order of their numbers";
    before = e->id;
    const bool first = std::none_of(endings_.begin(), e, [&](const Ending& x) { return x.same_lane(*e); });
    if (first != e->oldest) return first ? "nobody asks for the oldest release of a lane" : "a lane has two oldest";
  }
  return "";
}

}  // namespace vmem::pager
