#include "persons.h"

#include <pwd.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <utility>

namespace vmemctl {

namespace {

bool number(const std::string& digits, uid_t* out) {
  if (digits.empty() || digits.size() > 10 || digits.find_first_not_of("0123456789") != std::string::npos) return false;
  const unsigned long long n = std::stoull(digits);
  *out = static_cast<uid_t>(n);
  return n < UINT32_MAX;
}

}  // namespace

Persons::Persons(std::istream& subuid) {
  for (std::string line; std::getline(subuid, line);) {
    std::istringstream words(line);
    std::string name, first, count;
    Range r{};
    if (!std::getline(words, name, ':') || !std::getline(words, first, ':') || !std::getline(words, count)) continue;
    if (!number(first, &r.first) || !number(count, &r.count)) continue;
    if (const passwd* p = getpwnam(name.c_str()); p != nullptr) {
      r.person = p->pw_uid;
    } else if (!number(name, &r.person)) {
      continue;
    }
    ranges_.push_back(r);
  }
}

uid_t Persons::of(uid_t user) const {
  for (const Range& r : ranges_) {
    if (user - r.first < r.count) return r.person;
  }
  return user;
}

void take_turns(const Persons& persons, std::vector<Folder>* folders) {
  std::map<uid_t, std::shared_ptr<std::atomic<size_t>>> shares;
  std::map<uid_t, size_t> seen;
  for (Folder& folder : *folders) {
    const uid_t person = persons.of(folder.owner);
    auto& share = shares[person];
    if (!share) share = std::make_shared<std::atomic<size_t>>(kMaxOfAPerson);
    folder.share = share;
    folder.person = person;
    folder.turn = seen[person]++;
  }
  std::stable_sort(folders->begin(), folders->end(), [](const Folder& a, const Folder& b) { return a.turn < b.turn; });
}

}  // namespace vmemctl
