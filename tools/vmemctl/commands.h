// The commands. Each returns an exit code, or throws Failure with a message and a code.
#pragma once

#include <string>
#include <vector>

#include "common.h"

namespace vmemctl {

struct StatusOptions {
  int pid = 0;           // 0: every process
  double seconds = 0.5;  // rates are measured over this time; 0: no rates
};
int status(const Common& common, const StatusOptions& options);

struct TopOptions {
  int pid = 0;
  double interval = 1;  // seconds
  bool once = false;    // one frame, plain text
  int columns = 200;    // of that frame
  std::string sort = "size", filter;
};
int top(const Common& common, const TopOptions& options);

struct TuneOptions {
  int pid = 0;
  bool machine = false;                  // knobs of the module
  std::vector<std::string> assignments;  // NAME=VALUE, or NAME to show it; none: all
  std::string sysfs = "/sys/class/misc/vmem";
};
int tune(const Common& common, const TuneOptions& options);

struct BenchOptions {
  std::string path;    // a folder on the SSD; "": the setting ssd_path
  std::string output;  // settings file; "" none
  std::string device = "auto";
  std::string size = "1GiB";  // of the test file
  double seconds = 0.5;       // each measurement
  double spread = 5;          // per cent; figures to choose from must be this exact
  bool force = false;
};
int bench(const Common& common, const BenchOptions& options);

struct DoctorOptions {
  std::string root;  // prefix of /proc, /sys and /dev, for tests
  std::string path;  // where the SSD tier would be; "" follows the setting ssd_path
};
int doctor(const Common& common, const DoctorOptions& options);

struct ExportOptions {
  std::string listen = "127.0.0.1:9448";
  bool once = false;               // to standard output
  std::vector<std::string> hosts;  // host names accepted in requests
  std::string sysfs = "/sys/class/misc/vmem";
};
int serve_metrics(const Common& common, const ExportOptions& options);

}  // namespace vmemctl
