// Makes text safe for a terminal. Names, paths and messages of other programs may contain anything:
// a control character moves the cursor or sets the title, and a direction character makes the rest
// of a line read as something else.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace vmem::core {

// Returns the length of the UTF-8 sequence at `at`. Returns 0 if it is broken, or if the character
// is invisible or changes how others print: controls, line separators, bidirectional marks,
// embeddings, overrides and isolates, invisible characters, tags.
size_t printable_sequence(std::string_view text, size_t at);

// Replaces each such character, and each byte of a broken sequence, by '?' in place. Returns the
// new length, which is never larger. Does not allocate.
size_t make_printable(char* text, size_t length);
std::string printable(std::string_view text);

}  // namespace vmem::core
