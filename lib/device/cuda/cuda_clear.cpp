#include "device/cuda/cuda_clear.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "core/types.h"

namespace vmem::device::cuda {

// vmem_clear(words, generation, parts, rows): a grid of thread blocks, each with a share of every
// part.
// - words[0] is the generation that is called off; each thread block has one of the next words.
// - rows[part] is where the part begins, and the size of a share in bytes.
// - A thread block stores 2 * generation in its word when it begins, and one more when it has
//   ended.
//
// The rows are parameters. Thread blocks access host memory one after the other, and the driver's
// own work on page tables waits meanwhile: reading rows there delayed it noticeably.
const char kClearKernel[] = R"(
.version 6.3
.target sm_70
.address_size 64
.visible .entry vmem_clear(.param .u64 p_words, .param .u32 p_generation, .param .u32 p_parts,
                           .param .align 8 .b8 p_rows[1024])
{
  .reg .pred %leader, %off, %more;
  .reg .b32 %thread, %block, %threads, %part, %parts, %index, %generation, %begun, %seen, %zero;
  .reg .b64 %at, %share, %end, %words, %word, %rows, %row, %offset, %stride;
  .shared .align 4 .b32 called_off;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %block, %ctaid.x;
  ld.param.u64 %words, [p_words];
  ld.param.u32 %generation, [p_generation];
  ld.param.u32 %parts, [p_parts];
  add.u32 %index, %block, 1;
  mul.wide.u32 %offset, %index, 4;
  add.u64 %word, %words, %offset;
  shl.b32 %begun, %generation, 1;
  setp.eq.u32 %leader, %thread, 0;
  @!%leader bra MAY;
  st.relaxed.sys.global.u32 [%word], %begun;
  fence.sc.sys;
  ld.relaxed.sys.global.u32 %seen, [%words];
  st.shared.u32 [called_off], %seen;
MAY:
  bar.sync 0;
  ld.shared.u32 %seen, [called_off];
  setp.eq.u32 %off, %seen, %generation;
  @%off bra ENDED;
  mov.b64 %rows, p_rows;
  mul.wide.u32 %stride, %threads, 16;
  mov.u32 %zero, 0;
  mov.u32 %part, 0;
PART:
  mul.wide.u32 %offset, %part, 16;
  add.u64 %row, %rows, %offset;
  ld.param.u64 %at, [%row];
  ld.param.u64 %share, [%row+8];
  cvt.u64.u32 %offset, %block;
  mad.lo.u64 %at, %offset, %share, %at;
  add.u64 %end, %at, %share;
  mul.wide.u32 %offset, %thread, 16;
  add.u64 %at, %at, %offset;
NEXT:
  st.global.v4.u32 [%at], {%zero, %zero, %zero, %zero};
  add.u64 %at, %at, %stride;
  setp.lt.u64 %more, %at, %end;
  @%more bra NEXT;
  add.u32 %part, %part, 1;
  setp.lt.u32 %more, %part, %parts;
  @%more bra PART;
  fence.acq_rel.sys;
ENDED:
  bar.sync 0;
  @!%leader bra LEFT;
  add.u32 %begun, %begun, 1;
  st.release.sys.global.u32 [%word], %begun;
LEFT:
  ret;
}
)";

namespace {

uint32_t load(const uint32_t* word) {
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_seq_cst);
}

}  // namespace

bool Clearing::start() {
  void* const memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return false;
  madvise(memory, kSize, MADV_DONTFORK);
  if (driver_.host_register(memory, kSize, 0) != CUDA_SUCCESS) {
    munmap(memory, kSize);
    return false;
  }
  memory_ = static_cast<std::byte*>(memory);
  int registers = 0, least = 0, greatest = 0;
  // Reading its register count loads the kernel, also if CUDA loads modules lazily.
  bool works = driver_.module_load(&module_, kClearKernel) == CUDA_SUCCESS &&
               driver_.module_function(&kernel_, module_, "vmem_clear") == CUDA_SUCCESS &&
               driver_.function_attribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel_) == CUDA_SUCCESS &&
               driver_.stream_priorities(&least, &greatest) == CUDA_SUCCESS;
  for (size_t i = 0; i < kSlots && works; ++i) {
    slots_[i].words = reinterpret_cast<uint32_t*>(memory_ + i * kSlotSize);
    works = driver_.stream_create(&slots_[i].stream, CU_STREAM_NON_BLOCKING, greatest) == CUDA_SUCCESS;
  }
  if (!works) end();
  return works;
}

bool Clearing::end() {
  for (const Slot& slot : slots_)
    if (slot.stream != nullptr && driver_.stream_query(slot.stream) == CUDA_ERROR_NOT_READY) return false;
  for (Slot& slot : slots_)
    if (slot.stream != nullptr) driver_.stream_destroy(std::exchange(slot.stream, nullptr));
  kernel_ = nullptr;
  if (module_ != nullptr) driver_.module_unload(std::exchange(module_, nullptr));
  if (memory_ != nullptr) {
    driver_.host_unregister(memory_);
    munmap(std::exchange(memory_, nullptr), kSize);
  }
  return true;
}

bool Clearing::launch(Slot& slot, std::span<const Part> parts) {
  std::array<Row, kMostParts> rows = {};  // the driver copies them
  for (size_t i = 0; i < parts.size(); ++i) rows[i] = {parts[i].at, parts[i].size / kBlocks};
  // The words may still say that an earlier launch has ended.
  for (size_t i = 1; i <= kBlocks; ++i) std::atomic_ref(slot.words[i]).store(0, std::memory_order_relaxed);
  uint64_t words = reinterpret_cast<uintptr_t>(slot.words);
  auto count = static_cast<uint32_t>(parts.size());
  void* parameters[] = {&words, &slot.generation, &count, rows.data()};
  return driver_.launch_kernel(kernel_, kBlocks, 1, 1, kThreads, 1, 1, 0, slot.stream, parameters, nullptr) ==
         CUDA_SUCCESS;
}

// Returns when no thread block of the launch clears anything any more.
void Clearing::call_off(Slot& slot, const std::function<bool()>& alive) {
  std::atomic_ref(slot.words[0]).exchange(slot.generation, std::memory_order_seq_cst);  // also a fence
  slot.called_off = true;
  const auto later = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  for (size_t i = 1; i <= kBlocks; ++i) {
    while (load(&slot.words[i]) == 2 * slot.generation) {
      if (std::chrono::steady_clock::now() < later) continue;
      if (!alive()) return;
      usleep(100);
    }
  }
}

bool Clearing::clear(std::span<const Part> parts, const std::function<bool()>& alive, CUevent event,
                     const CUstream* then) {
  if (kernel_ == nullptr || parts.empty() || parts.size() > kMostParts) return false;
  for (const Part& part : parts)
    if (part.at % 16 != 0 || part.size % kGrain != 0) return false;
  if (std::chrono::steady_clock::now().time_since_epoch() < rests_until_.load(std::memory_order_relaxed)) return false;
  for (Slot& slot : slots_) {
    const std::unique_lock lock(slot.mutex, std::try_to_lock);
    if (!lock) continue;
    if (slot.called_off) {
      if (driver_.stream_query(slot.stream) != CUDA_SUCCESS) continue;
      std::atomic_ref(slot.words[0]).store(0, std::memory_order_relaxed);
      slot.called_off = false;
    }
    slot.generation = slot.generation % 0x7fff'fffe + 1;  // 0: none
    bool begun = launch(slot, parts);
    const auto until = std::chrono::steady_clock::now() + patience_;
    for (size_t i = 1; i <= kBlocks && begun;) {
      const bool late = std::chrono::steady_clock::now() > until;  // before the look: a delay here is not lateness
      if (load(&slot.words[i]) >> 1 == slot.generation) {
        ++i;
      } else {
        begun = !late;
      }
    }
    // Recorded under the lock: the next launch on this stream may wait for kernels.
    if (begun && driver_.event_record(event, slot.stream) == CUDA_SUCCESS &&
        (then == nullptr || driver_.stream_wait_event(*then, event, 0) == CUDA_SUCCESS))
      return true;
    rests_until_.store((std::chrono::steady_clock::now() + kRest).time_since_epoch(), std::memory_order_relaxed);
    call_off(slot, alive);
    return false;
  }
  return false;
}

}  // namespace vmem::device::cuda
