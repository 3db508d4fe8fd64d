// docgen FOLDER [HEADER]: writes the pages of the documentation that come from the code: FOLDER/settings.md and
// FOLDER/man/vmem-settings.7 from the table of settings, FOLDER/man/libvmem-tier.3 from HEADER (include/vmem/vmem.h).
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

// A line of text for roff: nothing in it is a request or an escape.
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

// A comment's lines without its signs, one paragraph per element.
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

// What is declared, with the comment over it.
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

// Guards, pragmas and the like: not for readers.
bool machinery(const Item& item) {
  if (item.code.empty()) return true;
  const std::string& first = item.code.front();
  return first.rfind("#if", 0) == 0 || first.rfind("#include", 0) == 0 || first.rfind("#endif", 0) == 0;
}

std::string manual(const std::string& header) {
  const std::vector<Item> items = items_of(header);
  std::string body, about;
  std::set<std::string> calls;
  for (const Item& item : items) {
    if (machinery(item)) {
      // The comment over the include guard says what the whole is.
      if (!item.code.empty() && item.code.front().rfind("#ifndef", 0) == 0) {
        for (const std::string& p : paragraphs(item.comment)) {
          if (p.find("SPDX") == std::string::npos) about += ".PP\n" + p + "\n";
        }
      }
      continue;
    }
    body += ".PP\n.EX\n";
    for (const std::string& line : item.code) {
      body += roff(line, true) + "\n";
      const size_t open = line.find('(');
      if (open == std::string::npos || line[0] == '\t' || line[0] == '#') continue;
      const size_t begin = line.find_last_of(" *", open);
      const std::string name = line.substr(begin + 1, open - begin - 1);
      if (name.rfind("vmem_", 0) == 0) calls.insert(name);
    }
    body += ".EE\n";
    for (const std::string& p : paragraphs(item.comment)) body += ".RS 4\n" + p + "\n.RE\n";
  }
  std::string names;
  for (const std::string& call : calls) names += ",\n" + call;
  return ".\\\" Generated from include/vmem/vmem.h by `make docs`; do not edit.\n"
         ".TH LIBVMEM-TIER 3 \"\" libvmem \"libvmem\"\n.SH NAME\nlibvmem-tier" +
         names +
         "\n\\- one address range over GPU memory, host memory and NVMe\n.SH SYNOPSIS\n.B #include "
         "<vmem/vmem.h>\n.PP\nLink with "
         "\\-lvmem (pkg-config: vmem).\n.SH DESCRIPTION\n" +
         about + ".SH CALLS\n" + body + ".SH SEE ALSO\n.BR vmemctl (1),\n.BR vmem-settings (7)\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: docgen FOLDER [HEADER]\n");
    return 2;
  }
  const std::string folder = argv[1], header = argc == 3 ? argv[2] : "include/vmem/vmem.h";
  const std::string page = manual(header);
  if (page.find("vmem_alloc") == std::string::npos) {
    std::fprintf(stderr, "docgen: %s is not vmem.h, or not there\n", header.c_str());
    return 1;
  }
  const bool good = write(folder + "/settings.md", vmem::core::options_markdown()) &&
                    write(folder + "/man/vmem-settings.7", vmem::core::options_manual()) &&
                    write(folder + "/man/libvmem-tier.3", page);
  return good ? 0 : 1;
}
