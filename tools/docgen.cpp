// docgen FOLDER [HEADER] writes the generated pages of the documentation: FOLDER/settings.md and
// FOLDER/man/vmem-settings.7 from the table of settings, and FOLDER/man/libvmem-tier.3 from HEADER
// (include/vmem/vmem.h). docgen --calls FOLDER [HEADER] writes one manual page for each call of
// HEADER, FOLDER/CALL.3vmem, and nothing else.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "core/options.h"

namespace {

bool write(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  out << text;
  out.close();
  if (!out) std::fprintf(stderr, "docgen: cannot write %s\n", path.c_str());
  return static_cast<bool>(out);
}

// Escapes a line of text for roff, so that none of it is a request or an escape.
std::string roff(const std::string& line, bool code) {
  std::string out;
  for (const char c : line) {
    if (c == '\\') {
      out += "\\e";
    } else if (code && c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return !out.empty() && (out[0] == '.' || out[0] == '\'') ? "\\&" + out : out;
}

// Strips a comment's markers and returns one paragraph per element.
std::vector<std::string> paragraphs(const std::vector<std::string>& comment) {
  std::vector<std::string> out{""};
  for (std::string line : comment) {
    for (const char* sign : {"/*", "*/"}) {
      if (const size_t at = line.find(sign); at != std::string::npos) line.erase(at, 2);
    }
    const size_t star = line.find_first_not_of(' ');
    if (star != std::string::npos && line[star] == '*') line.erase(0, star + 1);
    const size_t first = line.find_first_not_of(' '), last = line.find_last_not_of(' ');
    if (first == std::string::npos) {
      if (!out.back().empty()) out.emplace_back();
    } else {
      out.back() += (out.back().empty() ? "" : "\n") + roff(line.substr(first, last - first + 1), false);
    }
  }
  if (out.back().empty()) out.pop_back();
  return out;
}

// A declaration with the comment above it.
struct Item {
  std::vector<std::string> comment, code;
};

std::vector<Item> items_of(const std::string& header) {
  std::ifstream in(header);
  std::vector<Item> items{Item{}};
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    const bool begins = line.rfind("/*", 0) == 0;
    if (begins && !items.back().code.empty()) items.emplace_back();
    if (begins || inside) {
      items.back().comment.push_back(line);
      inside = line.find("*/") == std::string::npos;
    } else if (line.empty()) {
      if (!items.back().code.empty()) items.emplace_back();
    } else {
      items.back().code.push_back(line);
    }
  }
  return items;
}

// Returns true for guards, pragmas and similar lines, which readers do not need.
bool machinery(const Item& item) {
  if (item.code.empty()) return true;
  const std::string& first = item.code.front();
  return first.rfind("#if", 0) == 0 || first.rfind("#include", 0) == 0 || first.rfind("#endif", 0) == 0;
}

// Returns the name of the call that a line of code declares, or "".
std::string call_of(const std::string& line) {
  const size_t open = line.find('(');
  if (open == std::string::npos || line[0] == '\t' || line[0] == ' ' || line[0] == '#') return "";
  const size_t begin = line.find_last_of(" *", open);
  const std::string name = line.substr(begin + 1, open - begin - 1);
  return name.rfind("vmem_", 0) == 0 ? name : "";
}

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

// Returns true if `text` contains `name` as a whole word.
bool mentions(const std::string& text, const std::string& name) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    if ((at == 0 || !is_name(text[at - 1])) && (at + name.size() == text.size() || !is_name(text[at + name.size()]))) {
      return true;
    }
  }
  return false;
}

std::string joined(const std::vector<std::string>& lines, const char* between) {
  std::string out;
  for (const std::string& line : lines) out += (out.empty() ? "" : between) + line;
  return out;
}

// Marks up a comment for a manual page: `x` in italics, errors with a minus sign that can be
// searched for.
std::string marked(const std::string& text) {
  std::string out;
  bool inside = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '`') {
      inside = !inside;
      out += inside ? "\\fI" : "\\fR";
    } else if (text[i] == '-' && i + 2 < text.size() && text[i + 1] == 'E' && std::isupper(text[i + 2]) != 0) {
      out += "\\-";
    } else {
      out += text[i];
    }
  }
  return out;
}

// Summarizes a call in a line: the start of its comment, up to the first sign that ends or
// interrupts a sentence.
std::string summary(const std::vector<std::string>& comment) {
  std::string text;
  for (const char c : comment.empty() ? std::string() : comment.front()) {
    if (c != '`') text += c == '\n' ? ' ' : c;
  }
  size_t end = text.size();
  for (const char* sign : {"; ", ": ", " ("}) end = std::min(end, text.find(sign));
  for (size_t at = text.find(". "); at < end; at = text.find(". ", at + 1)) {
    if (at > 0 && text[at - 1] != '.') end = at;  // not an ellipsis
  }
  text.resize(end);
  if (!text.empty() && text.back() == '.') text.pop_back();
  // Leaves a name in capitals as it is.
  if (text.size() > 1 && std::isupper(text[1]) == 0) text[0] = static_cast<char>(std::tolower(text[0]));
  return text;
}

// Returns the comment above the include guard, which holds for every call.
std::string about(const std::vector<Item>& items) {
  std::string out;
  for (const Item& item : items) {
    if (item.code.empty() || item.code.front().rfind("#ifndef", 0) != 0) continue;
    for (const std::string& p : paragraphs(item.comment)) {
      if (p.find("SPDX") == std::string::npos) out += ".PP\n" + marked(p) + "\n";
    }
  }
  return out;
}

std::vector<std::string> calls_of(const Item& item) {
  std::vector<std::string> out;
  for (const std::string& line : item.code) {
    if (const std::string name = call_of(line); !name.empty()) out.push_back(name);
  }
  return out;
}

// Returns the page of the calls that `item` declares, with the types and constants that they name.
std::string call_page(const std::vector<Item>& items, const Item& item) {
  const std::vector<std::string> calls = calls_of(item);
  const std::vector<std::string> text = paragraphs(item.comment);
  const std::string all = joined(item.code, "\n") + "\n" + joined(text, "\n");
  std::string title = calls.front(), types;
  for (char& c : title) c = static_cast<char>(std::toupper(c));
  for (const Item& other : items) {
    if (machinery(other) || !calls_of(other).empty()) continue;
    bool wanted = false;
    for (const std::string& line : other.code) {
      const size_t from = line.rfind("struct ", 0) == 0    ? 7
                          : line.rfind("enum ", 0) == 0    ? 5
                          : line.rfind("#define ", 0) == 0 ? 8
                                                           : 0;
      if (from == 0) continue;
      size_t end = from;
      while (end < line.size() && is_name(line[end])) ++end;
      wanted = wanted || mentions(all, line.substr(from, end - from));
    }
    if (!wanted) continue;
    types += ".PP\n.EX\n";
    for (const std::string& line : other.code) types += roff(line, true) + "\n";
    types += ".EE\n";
    for (const std::string& p : paragraphs(other.comment)) types += ".PP\n" + marked(p) + "\n";
  }
  std::string out = ".\\\" Generated from include/vmem/vmem.h; do not edit.\n.TH " + title +
                    " 3vmem \"\" libvmem \"libvmem\"\n.SH NAME\n" + joined(calls, ",\n") + "\n\\- " + summary(text) +
                    "\n.SH SYNOPSIS\n.nf\n.B #include <vmem/vmem.h>\n.PP\n";
  for (const std::string& line : item.code) out += ".B " + roff(line, true) + "\n";
  out += ".fi\n.PP\nLink with \\-lvmem (pkg-config: vmem).\n.SH DESCRIPTION\n";
  for (const std::string& p : text) out += ".PP\n" + marked(p) + "\n";
  if (!types.empty()) out += ".SH TYPES AND CONSTANTS\n" + types;
  if (item.code.front().rfind("int ", 0) == 0) {
    out += ".SH RETURN VALUE\n0, or a negative errno;\n.BR vmem_last_error (3vmem)\nthen has the message.\n";
  }
  return out + ".SH SEE ALSO\nRules for every call:\n.BR libvmem\\-tier (3)\n";
}

bool write_calls(const std::string& folder, const std::vector<Item>& items) {
  bool good = true;
  for (const Item& item : items) {
    if (machinery(item)) continue;
    const std::vector<std::string> calls = calls_of(item);
    for (const std::string& call : calls) {
      std::string path = folder, text = ".so man3/";
      path.append("/").append(call).append(".3vmem");
      text.append(calls.front()).append(".3vmem\n");
      good = write(path, call == calls.front() ? call_page(items, item) : text) && good;
    }
  }
  return good;
}

std::string manual(const std::vector<Item>& items) {
  std::string body;
  std::set<std::string> calls;
  for (const Item& item : items) {
    if (machinery(item)) continue;
    body += ".PP\n.EX\n";
    for (const std::string& line : item.code) {
      body += roff(line, true) + "\n";
      if (const std::string name = call_of(line); !name.empty()) calls.insert(name);
    }
    body += ".EE\n";
    for (const std::string& p : paragraphs(item.comment)) body += ".RS 4\n" + marked(p) + "\n.RE\n";
  }
  std::string pages;
  for (const std::string& call : calls) pages += ".BR " + call + " (3vmem),\n";
  return ".\\\" Generated from include/vmem/vmem.h by `make docs`; do not edit.\n"
         ".TH LIBVMEM-TIER 3 \"\" libvmem \"libvmem\"\n.SH NAME\nlibvmem-tier"
         "\n\\- one address range over GPU memory, host memory and NVMe\n.SH SYNOPSIS\n.B #include "
         "<vmem/vmem.h>\n.PP\nLink with "
         "\\-lvmem (pkg-config: vmem).\n.SH DESCRIPTION\n" +
         about(items) + ".SH CALLS\n" + body + ".SH SEE ALSO\n" + pages + ".BR vmemctl (1),\n.BR vmem-settings (7)\n";
}

}  // namespace

int main(int argc, char** argv) {
  const bool calls = argc > 1 && std::string(argv[1]) == "--calls";
  if (calls) {
    --argc;
    ++argv;
  }
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: docgen [--calls] FOLDER [HEADER]\n");
    return 2;
  }
  const std::string folder = argv[1], header = argc == 3 ? argv[2] : "include/vmem/vmem.h";
  const std::vector<Item> items = items_of(header);
  const std::string page = manual(items);
  if (page.find("vmem_alloc") == std::string::npos) {
    std::fprintf(stderr, "docgen: %s is not vmem.h, or not there\n", header.c_str());
    return 1;
  }
  if (calls) return write_calls(folder, items) ? 0 : 1;
  const bool good = write(folder + "/settings.md", vmem::core::options_markdown()) &&
                    write(folder + "/man/vmem-settings.7", vmem::core::options_manual()) &&
                    write(folder + "/man/libvmem-tier.3", page);
  return good ? 0 : 1;
}
