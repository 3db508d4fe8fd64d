// Rates of the processes over time, for top.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "processes.h"

namespace vmemctl {

class Histories {
 public:
  struct Rows {
    std::deque<double> read, written, faults;  // newest last
  };

  // Called after each look: adds the rates since the one before and forgets processes that have
  // gone.
  void add(const std::vector<Process>& before, const std::vector<Process>& now) {
    std::map<Key, Rows> kept;
    for (const Process& p : now) {
      const auto known = all_.find(key(p));
      Rows rows = known != all_.end() ? std::move(known->second) : Rows();
      const Process* earlier = same_process(before, p);
      const Rates r = earlier != nullptr ? rates(*earlier, p) : Rates();
      if (r.known) add(r, &rows);
      kept.insert_or_assign(key(p), std::move(rows));
    }
    all_ = std::move(kept);
  }
  // Returns null if the process was not there at the last look.
  const Rows* of(const Process& p) const {
    const auto it = all_.find(key(p));
    return it != all_.end() ? &it->second : nullptr;
  }
  size_t size() const { return all_.size(); }

 private:
  // Uses nothing that a publication says: its user could imitate another process.
  using Key = std::tuple<uid_t, pid_t, std::string>;
  static Key key(const Process& p) { return {p.owner, p.pid, p.name}; }

  static void add(const Rates& r, Rows* rows) {
    constexpr size_t kFrames = 120;
    for (auto [list, value] : {std::pair(&rows->read, r.ssd_read), std::pair(&rows->written, r.ssd_written),
                               std::pair(&rows->faults, r.faults)}) {
      list->push_back(value);
      if (list->size() > kFrames) list->pop_front();
    }
  }

  std::map<Key, Rows> all_;
};

}  // namespace vmemctl
