// docgen FOLDER: writes the pages of the documentation that come from tables in the code: FOLDER/settings.md.
#include <cstdio>
#include <fstream>
#include <string>

#include "core/options.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: docgen FOLDER\n");
    return 2;
  }
  const std::string path = std::string(argv[1]) + "/settings.md";
  std::ofstream out(path, std::ios::trunc);
  out << vmem::core::options_markdown();
  out.close();
  if (!out) {
    std::fprintf(stderr, "docgen: cannot write %s\n", path.c_str());
    return 1;
  }
  return 0;
}
