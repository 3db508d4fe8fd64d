// A vector four times larger than the memory it may use, through a plain pointer.
#include <cstdio>
#include <numeric>
#include <vmem/vmem.hpp>

int main() {
  vmem::set("host_budget", "64MiB");
  vmem::region region(256 << 20);  // 256 MiB of zeros, costs nothing yet
  auto numbers = region.view<unsigned long>();
  std::iota(numbers.begin(), numbers.end(), 0ul);  // blocks go to the SSD as memory runs out
  vmem_prefetch(region.data(), 32 << 20, VMEM_HOST, nullptr);
  const unsigned long sum = std::accumulate(numbers.begin(), numbers.end(), 0ul);
  const auto stats = vmem::stats();
  printf("sum %lu, %.0f MiB written to and %.0f MiB read from the SSD\n", sum,
         static_cast<double>(stats.write_bytes) / (1 << 20), static_cast<double>(stats.read_bytes) / (1 << 20));
  return sum == numbers.size() * (numbers.size() - 1) / 2 ? 0 : 1;
}
