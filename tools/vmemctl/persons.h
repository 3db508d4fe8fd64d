// Who is behind a user: a person has the subordinate ids that /etc/subuid gives to him, tens of thousands, and can be
// each of them (user namespaces, containers). What is a user's share is a person's.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <istream>
#include <memory>
#include <vector>

#include "publications.h"

namespace vmemctl {

class Persons {
 public:
  Persons() = default;
  // The lines of /etc/subuid: NAME-OR-NUMBER:FIRST:COUNT. Those that say something else are left out.
  explicit Persons(std::istream& subuid);
  // The user whose subordinate id this is, or the user.
  uid_t of(uid_t user) const;

 private:
  struct Range {
    uid_t first, count, person;
  };
  std::vector<Range> ranges_;
};

// Puts each person's first folder before anybody's second: who has thousands makes nobody wait but himself. Gives all
// of a person's folders one share of kMaxOfAPerson publications.
void take_turns(const Persons& persons, std::vector<Folder>* folders);

}  // namespace vmemctl
