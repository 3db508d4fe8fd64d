#include "device/presence.h"

#include <dirent.h>
#include <unistd.h>

#include <fstream>

namespace vmem::device {

Presence gpu_presence(const std::string& root) {
  const auto exists = [&](const char* path) { return access((root + path).c_str(), F_OK) == 0; };
  // A container may hide the bus. The Windows subsystem for Linux has neither bus nor node, but
  // /dev/dxg.
  const bool windows = exists("/dev/dxg");
  bool gpu = exists("/dev/nvidia0") || windows;
  const std::string bus = root + "/sys/bus/pci/devices";
  DIR* dir = opendir(bus.c_str());
  while (const dirent* entry = dir != nullptr ? readdir(dir) : nullptr) {
    const auto says = [&](const char* file, const char* what) {
      std::ifstream in(bus + "/" + entry->d_name + file);
      std::string line;
      return std::getline(in, line) && line.starts_with(what);
    };
    gpu = gpu || (says("/vendor", "0x10de") && says("/class", "0x03"));
  }
  if (dir != nullptr) closedir(dir);
  if (!gpu) return Presence::no_gpu;
  return exists("/proc/driver/nvidia/version") || windows ? Presence::driver : Presence::no_driver;
}

}  // namespace vmem::device
