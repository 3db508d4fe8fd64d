// Text that a terminal may be shown. Names, paths and what other programs say may hold anything: a control character
// moves the cursor or sets the title, one of direction turns the rest of a line around, so that it reads as another.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace vmem::core {

// Length of the UTF-8 sequence at `at`; 0 when it is broken, or a character that prints nothing and steers what others
// print: controls, line separators, bidirectional marks, embeddings, overrides and isolates, invisible ones, tags.
size_t printable_sequence(std::string_view text, size_t at);

// Each such character, and each byte of a broken sequence, becomes '?'. In place; the text never grows. Returns its new
// length; takes no memory.
size_t make_printable(char* text, size_t length);
std::string printable(std::string_view text);

}  // namespace vmem::core
