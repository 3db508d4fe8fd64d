// Asks the driver of this machine questions that a pager has and that no documentation answers.
// Each question runs in a process of its own, because the answer may be a dead CUDA context. It
// reports and judges nothing. Usage: ask_bench [QUESTION]; without an argument it asks all of them.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "core/types.h"
#include "device/backend.h"
#include "gpu_limits.h"
#include "kernels.h"

using namespace vmem;
using device::Access;
using device::kUnit;

namespace {

constexpr size_t kUnits = 4;
constexpr size_t kWords = kUnit / sizeof(uint64_t);

struct Setting {
  std::unique_ptr<device::Devices> d;
  uint64_t* block = nullptr;
  uint64_t* frame = nullptr;
  uint64_t* sum = nullptr;
  cudaStream_t stream = nullptr;
  device::Range first{}, all{};
} s;

void must(const core::Status& status) {
  if (status.ok()) return;
  std::printf("FAILED before the question: %s\n", std::string(status.text()).c_str());
  _exit(1);
}
std::string words(const core::Status& status) {
  return status.ok() ? "ok" : std::string(status.text());
}
void open(Access access) {
  must(s.d->open(std::span(&s.first, 1), access));
}
void hold(Access access) {
  must(s.d->write_protect(std::span(&s.first, 1), access));
}
// The CPU loads or stores one page of the first block, without changing it.
void touch(bool store) {
  volatile uint64_t* word = s.block + 512 * 7;
  const uint64_t value = *word;
  if (store) *word = value;
}
std::string synchronized() {
  const cudaError_t e = cudaStreamSynchronize(s.stream);
  return e == cudaSuccess ? "ok" : cudaGetErrorString(e);
}
void kernel_reads() {
  gpu::sum(s.stream, s.block, kWords, s.sum);
  const std::string e = synchronized();
  const uint64_t right = (kWords - 1) * kWords / 2;
  std::printf("%s%s\n", e.c_str(), e == "ok" ? *s.sum == right ? ", bytes right" : ", bytes WRONG" : "");
}
void kernel_writes() {
  gpu::add(s.stream, s.block, kWords, 1);
  std::printf("%s\n", synchronized().c_str());
}
void copy_out() {
  std::memset(s.frame, 0xee, kUnit);
  const device::Copy copy{s.first.address, s.frame, kUnit};
  device::Ticket done;
  core::Status status = s.d->copy_out(0, std::span(&copy, 1), &done);
  if (status.ok()) status = s.d->wait(done);
  size_t wrong = 0;
  for (size_t w = 0; w < kWords; ++w) wrong += s.frame[w] != w;
  std::printf("%s, %zu words wrong\n", words(status).c_str(), wrong);
}
// Prints the lines of /proc/self/maps for the four blocks.
void print_mappings() {
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[512];
  int n = 0;
  while (maps != nullptr && fgets(line, sizeof line, maps) != nullptr) {
    uintptr_t begin = 0, end = 0;
    char access[8] = "", path[256] = "";
    if (std::sscanf(line, "%zx-%zx %7s %*s %*s %*s %255s", &begin, &end, access, path) < 3) continue;
    if (end <= s.all.address || begin >= s.all.address + s.all.size) continue;
    std::printf("%s block %zd to %zd: %s %s", n++ == 0 ? "" : ";",
                (static_cast<ssize_t>(begin) - static_cast<ssize_t>(s.all.address)) / static_cast<ssize_t>(kUnit),
                (static_cast<ssize_t>(end) - static_cast<ssize_t>(s.all.address)) / static_cast<ssize_t>(kUnit), access,
                path[0] != 0 ? path : "anonymous");
  }
  if (maps != nullptr) fclose(maps);
  std::printf("%s\n", n == 0 ? " nothing mapped" : "");
}

struct Question {
  const char* name;
  const char* text;
  void (*ask)();
};
constexpr Question kQuestions[] = {
    {"shut-kernel", "kernel loads from a block that is PROT_NONE, no page on the CPU", [] { kernel_reads(); }},
    {"shut-kernel-store", "kernel stores to a block that is PROT_NONE, no page on the CPU", [] { kernel_writes(); }},
    {"shut-kernel-touched", "kernel loads from a block that is PROT_NONE, a page on the CPU",
     [] {
       open(Access::read_write);
       touch(true);
       hold(Access::none);
       kernel_reads();
     }},
    {"shut-copy-touched", "copy out of a block that is PROT_NONE, a page on the CPU",
     [] {
       open(Access::read_write);
       touch(true);
       hold(Access::none);
       copy_out();
     }},
    {"read-copy-touched", "copy out of a block that is PROT_READ, a page on the CPU",
     [] {
       open(Access::read_write);
       touch(true);
       hold(Access::read);
       copy_out();
     }},
    {"read-kernel-touched", "kernel loads from a block that is PROT_READ, a page read by the CPU",
     [] {
       open(Access::read);
       touch(false);
       kernel_reads();
     }},
    {"read-store", "kernel stores to a block that is PROT_READ, no page on the CPU",
     [] {
       open(Access::read);
       kernel_writes();
     }},
    {"read-store-touched", "kernel stores to a block that is PROT_READ, a page read by the CPU",
     [] {
       open(Access::read);
       touch(false);
       kernel_writes();
     }},
    {"reset", "mappings after cudaDeviceReset (block 0 made and open, 1 made and shut, 2 and 3 a hole)",
     [] {
       open(Access::read_write);
       print_mappings();
       cudaDeviceReset();
       print_mappings();
       std::printf("health: %s\n", words(s.d->health(0)).c_str());
       std::fflush(stdout);
       _exit(0);
     }},
};

void set_up() {
  std::string why;
  must(device::make_devices("managed", device::kUnit, &s.d, &why));
  cudaSetDevice(0);
  gpu::load_all();
  cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking);
  void* p = mmap(nullptr, 2 * kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  must(s.d->pin(p, 2 * kUnit));
  s.frame = static_cast<uint64_t*>(p);
  s.sum = s.frame + kWords;
  void* base = nullptr;
  must(s.d->reserve(kUnits * kUnit, 0, &base));
  s.block = static_cast<uint64_t*>(base);
  const auto address = reinterpret_cast<uintptr_t>(base);
  s.first = {address, kUnit};
  s.all = {address, kUnits * kUnit};
  const device::Range two{address, 2 * kUnit};
  bool torn = false;
  must(s.d->populate(std::span(&two, 1), 0, &torn));
  for (size_t w = 0; w < kWords; ++w) s.frame[w] = w;
  const device::Copy copy{address, s.frame, kUnit};
  device::Ticket done;
  must(s.d->copy_in(0, std::span(&copy, 1), &done));
  must(s.d->wait(done));
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc > 1) {
    for (const Question& q : kQuestions)
      if (std::strcmp(q.name, argv[1]) == 0) {
        alarm(20);  // ends the process if the driver never answers
        const uint64_t limit = gpu::managed_limit();
        if (limit == 0) {
          std::printf("SKIPPED: no CUDA device\n");
          return 77;
        }
        gpu::require_managed(kUnits * kUnit, limit);
        set_up();
        std::printf("ask %s: ", q.text);
        q.ask();
        std::fflush(stdout);
        _exit(0);  // the context may be dead: skip all cleanup
      }
    std::printf("no such question: %s\n", argv[1]);
    return 1;
  }
  int worst = 0;
  for (const Question& q : kQuestions) {
    const pid_t child = fork();  // before any CUDA call of this process
    if (child == 0) {
      execl("/proc/self/exe", "ask_bench", q.name, nullptr);
      _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) std::printf("ask %s: ended by signal %d\n", q.name, WTERMSIG(status));
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (code == 77) return 77;
    if (code > worst) worst = code;
  }
  return worst;
}
