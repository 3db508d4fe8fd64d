// Finds the person behind a user. /etc/subuid gives a person tens of thousands of subordinate ids,
// and the person can act as each of them (user namespaces, containers). A person therefore gets one
// user's share.
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
  // Parses the lines of /etc/subuid, NAME-OR-NUMBER:FIRST:COUNT, and ignores others.
  explicit Persons(std::istream& subuid);
  // Returns the user who owns this subordinate id, or the user itself.
  uid_t of(uid_t user) const;

 private:
  struct Range {
    uid_t first, count, person;
  };
  std::vector<Range> ranges_;
};

// Puts each person's first folder before any person's second, so that a person with thousands
// delays only that person. All folders of a person get one share of kMaxOfAPerson publications.
void take_turns(const Persons& persons, std::vector<Folder>* folders);

}  // namespace vmemctl
