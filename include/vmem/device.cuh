/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels that page data in by themselves: a warp or a thread block names the elements that it is
 * about to access, waits until they are on the device, and gives them up. CUDA C++17, header only;
 * nothing is linked to a kernel. NVRTC compiles it too: a kernel's vmem::device_region parameter
 * then gets the first bytes of the vmem_kernel_view. The host's part is vmem_kernel_begin and
 * vmem_kernel_end. docs/gpu-paging.md says what has run, and where.
 *
 *     __global__ void kernel(vmem::device_region<float> table, ..) {
 *       vmem::warp_group<float> group(table);           // one for each warp, for its whole life
 *       if (auto rows = group.acquire(first, count)) {  // all lanes, the same arguments
 *         float x = rows[lane()];                       // plain loads, by any lane
 *       }                                               // given up at the end of the scope
 *     }
 *
 * Units. Indexes and counts are elements of T, times are nanoseconds of the device. The region's
 * blocks come and go: an acquire takes all blocks that hold its elements. An acquire of present
 * blocks costs an atomic operation and a fence in the device's memory, per acquire and not per
 * access. So acquire much at a time, and hold it as long as it is used.
 *
 * Callers. thread_group: one thread. warp_group: all 32 lanes of a warp, converged. block_group:
 * all threads of a thread block. With the last two all of these threads make every call below
 * together with the same arguments, like __syncwarp and __syncthreads, and also end a pin's scope
 * together. All get the same answer.
 *
 * Memory order. After an acquire its threads see all that this device stored to these elements
 * under pins that were given up before. Their own stores are written back, and later acquires see
 * them. Between groups that have a block at the same time nothing is ordered: they share it like
 * any memory of the device.
 *
 * To avoid deadlocks:
 * - A group that holds a pin acquires no other, but acquires together what it needs together. (Such
 *   an acquire answers would_deadlock; try_acquire and prefetch are allowed.)
 * - A group that holds a pin waits for no group that may be acquiring: no barrier of the grid, no
 *   lock, no queue. In a warp of thread_groups no lane waits for another.
 * - Pins are short: a block can leave only when no group has it.
 * - Meanwhile no call of the program waits in the driver for its kernels: no launch into a stream
 *   that is full, no first launch of a kernel, no cudaFree. They hold locks that the library needs,
 *   and acquires end with no_progress.
 *
 * Every acquire ends: with no_progress if nothing was paged in or out for any group for `patience`,
 * and with timed_out after `longest`. So no kernel waits for a dead host.
 */
#ifndef VMEM_DEVICE_CUH
#define VMEM_DEVICE_CUH

#include "vmem/detail/gather_device.cuh"
#include "vmem/detail/paging_device.cuh"
#include "vmem/detail/paging_types.h"
#include "vmem/detail/paging_view.h"

#ifdef __CUDACC_RTC__
struct vmem_kernel_view;
#else
#include <cstring>

#include "vmem/vmem.h"
#endif

namespace vmem {

/*
 * The answer of an acquire. present: the elements may be accessed. not_yet (try_acquire): they have
 * been requested. The rest are errors, and nothing is held. io_error, no_memory: a block could not
 * be brought (the library's log says why). busy: it is leased elsewhere. ended: the range was
 * closed, or the library ends. no_progress, timed_out: see above. would_deadlock: the group holds a
 * pin. too_many: more blocks than the budget of the range has. out_of_range. read_only: for
 * writing, of a range that was opened with VMEM_READ.
 */
using paging::Answer;
/*
 * Purpose of a pin. A range that is only read is cheaper to evict if it is opened with VMEM_READ.
 */
using paging::Intent;
/* Answer of gather: {answer, row}; true if all rows are copied. */
using paging::Gathered;
/* Elements [first, first + count). */
struct elements {
  size_t first, count;
};

/*
 * A range that vmem_kernel_begin has opened, as elements of T. The host makes it of the view and
 * passes it to kernels by value. The range should begin at an element.
 */
template <typename T>
class device_region {
 public:
  using View = paging::View<paging::DeviceAtomics>;

  device_region() = default;
  VMEM_PAGING explicit device_region(const vmem_kernel_view& view) { memcpy(&view_, &view, sizeof view_); }

  /* Number of elements that are whole in the range. */
  VMEM_PAGING size_t size() const { return view_.size / sizeof(T); }
  /* Address of the elements, for groups that have acquired them. */
  VMEM_PAGING T* data() const { return reinterpret_cast<T*>(view_.begin); }
  VMEM_PAGING bool writable() const { return view_.writable != 0; }
  VMEM_PAGING const View& view() const { return view_; }

 private:
  View view_;
};

namespace paging {

struct ThreadScope {
  using Team = ThreadTeam;
  static __device__ Team team() { return {}; }
  static __device__ uint64_t least(uint64_t word) { return word; }
  static __device__ bool leads() { return true; }
  static __device__ uint32_t share(uint32_t word) { return word; }
  static __device__ void join() {}
};

struct WarpScope {
  using Team = WarpTeam;
  static __device__ Team team() { return {lane(), 32}; }
  static __device__ uint64_t least(uint64_t word) {
    for (int far = 16; far > 0; far /= 2) {
      const uint64_t other = __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(word), far);
      word = other < word ? other : word;
    }
    return word;
  }
  static __device__ uint32_t lane() {
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  static __device__ bool leads() { return lane() == 0; }
  static __device__ uint32_t share(uint32_t word) {
    word = __shfl_sync(0xffffffffu, word, 0);
    __syncwarp();  // a shuffle orders no memory: this shows all lanes what the leader has acquired
    return word;
  }
  static __device__ void join() { __syncwarp(); }
};

struct BlockScope {
  using Team = WarpTeam;
  static __device__ Team team() {
    const uint32_t rank = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    return {rank, blockDim.x * blockDim.y * blockDim.z};
  }
  static __device__ uint64_t least(uint64_t word) {
    __shared__ unsigned long long shared;
    __syncthreads();
    if (leads()) shared = word;
    __syncthreads();
    atomicMin(&shared, static_cast<unsigned long long>(word));
    __syncthreads();
    return shared;
  }
  static __device__ bool leads() { return threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0; }
  static __device__ uint32_t share(uint32_t word) {
    __shared__ uint32_t shared;
    __syncthreads();  // no thread reads the last one any more
    if (leads()) shared = word;
    __syncthreads();
    return shared;
  }
  static __device__ void join() { __syncthreads(); }
};

// The blocks of a range of bytes, as a list.
struct Run {
  uint32_t first;
  __device__ uint32_t operator[](uint32_t i) const { return first + i; }
};

}  // namespace paging

template <typename T, typename Scope>
class device_group;

/*
 * Elements that its group may access until release() or the end of its life. True if they were
 * acquired. Cannot be copied, and must not outlive its group.
 */
template <typename T, typename Scope>
class device_pin {
 public:
  __device__ device_pin(device_pin&& other)
      : group_(other.group_), data_(other.data_), run_(other.run_), count_(other.count_), answer_(other.answer_) {
    other.group_ = nullptr;
  }
  /* Gives up first what this pin had. */
  __device__ device_pin& operator=(device_pin&& other) {
    if (this == &other) return *this;
    release();
    group_ = other.group_;
    data_ = other.data_;
    run_ = other.run_;
    count_ = other.count_;
    answer_ = other.answer_;
    other.group_ = nullptr;
    return *this;
  }
  device_pin(const device_pin&) = delete;
  device_pin& operator=(const device_pin&) = delete;
  __device__ ~device_pin() { release(); }

  __device__ explicit operator bool() const { return answer_ == Answer::present; }
  __device__ Answer answer() const { return answer_; }
  /* The first of the named elements; [0, count) may be accessed. */
  __device__ T* data() const { return data_; }
  __device__ T& operator[](size_t i) const { return data_[i]; }
  /* Gives the elements up. All threads of the group are done with them. */
  __device__ void release() {
    if (group_ == nullptr || answer_ != Answer::present) return;
    group_->give_up(run_, count_);
    group_ = nullptr;
  }

 private:
  friend class device_group<T, Scope>;
  __device__ device_pin(device_group<T, Scope>* group, T* data, paging::Run run, uint32_t count, Answer answer)
      : group_(group), data_(data), run_(run), count_(count), answer_(answer) {}

  device_group<T, Scope>* group_;
  T* data_;
  paging::Run run_;
  uint32_t count_;  // blocks
  Answer answer_;
};

/*
 * One object for each thread, warp or thread block, for all its acquires of a region. It counts
 * what it holds.
 */
template <typename T, typename Scope>
class device_group {
 public:
  using Pin = device_pin<T, Scope>;

  __device__ explicit device_group(const device_region<T>& region, uint64_t patience_ns = 10000000000u,
                                   uint64_t longest_ns = 60000000000u)
      : region_(region),
        group_(region.view().table, patience_ns, longest_ns),
        patience_(patience_ns),
        longest_(longest_ns) {}
  device_group(const device_group&) = delete;
  device_group& operator=(const device_group&) = delete;

  /*
   * Waits until elements [first, first + count) are all on the device, or answers why not.
   * Intent::write: they may be stored to; stores under a pin for reading are lost.
   */
  __device__ Pin acquire(size_t first, size_t count = 1, Intent intent = Intent::read) {
    paging::Run run{};
    uint32_t blocks = 0;
    Answer answer = find(first, count, intent, &run, &blocks);
    if (answer == Answer::present) {
      if (Scope::leads()) answer = group_.acquire_all(run, blocks, intent);
      answer = share(answer);
    }
    return Pin(this, region_.data() + first, run, blocks, answer);
  }

  /* As acquire, but does not wait: requests what is missing, and answers not_yet. */
  __device__ Pin try_acquire(size_t first, size_t count = 1, Intent intent = Intent::read) {
    paging::Run run{};
    uint32_t blocks = 0;
    Answer answer = find(first, count, intent, &run, &blocks);
    if (answer == Answer::present) {
      if (Scope::leads()) answer = try_all(run, blocks, intent);
      answer = share(answer);
    }
    return Pin(this, region_.data() + first, run, blocks, answer);
  }

  /*
   * Requests the elements and never waits. A hint, which may be lost when many groups request at
   * once.
   */
  __device__ void prefetch(size_t first, size_t count = 1) {
    paging::Run run{};
    uint32_t blocks = 0;
    if (find(first, count, Intent::read, &run, &blocks) != Answer::present || !Scope::leads()) return;
    for (uint32_t i = 0; i < blocks; ++i) group_.prefetch(run[i]);
  }

  /*
   * Copies `count` rows of `row` elements each, from anywhere in the region, to to[0], to[row],
   * to[2 * row] and so on. `to` is any memory of the device except the region's. rows[i] is the
   * number of row i, of any integer type (its elements begin at rows[i] * row), or its address
   * (const T*).
   *
   * It requests all missing blocks first, and copies rows as they come. If a block is in host
   * memory that the device reaches, its rows are copied from there, over the link. Give a group
   * many rows, up to 64 for each of its threads. A thread needs one block at a time at most, and
   * waits with none; the group may hold no pin (would_deadlock).
   *
   * A row that fails does not keep others from being copied. The answer is that of the first failed
   * row (the lowest i), with its number i in `row`; failed rows may be copied in part. Each 64 rows
   * of a thread end with no_progress or timed_out as one acquire does. Rows are copied 16 bytes at
   * a time if source, size and destination are multiples of 16 bytes.
   */
  template <typename Index>
  __device__ Gathered gather(const Index* rows, size_t count, size_t row, T* to) {
    const auto& view = region_.view();
    const uint64_t bytes = row * sizeof(T);
    if (bytes == 0) return {};
    const typename Scope::Team team = Scope::team();
    const paging::RowList<Index> list{rows, view.begin, view.size, bytes};
    const paging::CopyRow<typename Scope::Team> copy{reinterpret_cast<uint64_t>(to), bytes, team};
    return gather_each(list, count, paging::pieces_of(view, bytes, list.multiples()), team, copy);
  }

  /*
   * Calls visit for `count` ranges of elements anywhere in the region, each when it is there, in
   * any order. Requests and waits as gather does, with the same answer.
   * - ranges(i) returns range i, as vmem::elements, of at most `most` elements. Any thread calls
   *   it, any number of times.
   * - visit(i, at, offset, n, lane, lanes) is called by the `lanes` threads of a warp together (by
   *   a thread_group's thread alone), each with its own `lane`. at[0, n) are the elements from
   *   `offset` on of range i, readable until it returns. They are on the device, or in host memory
   *   that it reaches: each load of those goes over the link.
   * - A range that crosses the end of a block comes in two calls or more, not one after the other.
   * - In visit a thread may not acquire, and may wait only for threads of the same call.
   */
  template <typename Ranges, typename Visit>
  __device__ Gathered visit(const Ranges& ranges, size_t count, size_t most, const Visit& visit) {
    if (most == 0) return {};
    const typename Scope::Team team = Scope::team();
    const paging::RangeList<T, Ranges> list{ranges, region_.size(), most};
    const paging::VisitRange<T, typename Scope::Team, Visit> each{visit, team};
    return gather_each(list, count, paging::pieces_of(region_.view(), most * sizeof(T), false), team, each);
  }

 private:
  friend class device_pin<T, Scope>;

  template <typename List, typename Each>
  __device__ Gathered gather_each(const List& list, size_t count, uint32_t pieces, const typename Scope::Team& team,
                                  const Each& each) {
    if (Scope::share(Scope::leads() ? group_.held() : 0) != 0) return {Answer::would_deadlock, 0};
    paging::Group<paging::DeviceAtomics> mine(region_.view().table, patience_, longest_);
    const Gathered got = paging::gather(region_.view(), &mine, team, list, count, pieces, each);
    Scope::join();  // all threads see what the others have done
    const uint64_t first = Scope::least(got ? paging::kNoRow : got.row << 8 | static_cast<uint64_t>(got.answer));
    if (first == paging::kNoRow) return {};
    return {static_cast<Answer>(first & 0xff), first >> 8};
  }
  __device__ Answer share(Answer answer) { return static_cast<Answer>(Scope::share(static_cast<uint32_t>(answer))); }
  __device__ Answer find(size_t first, size_t count, Intent intent, paging::Run* run, uint32_t* blocks) const {
    if (count == 0 || first >= region_.size() || count > region_.size() - first) return Answer::out_of_range;
    if (intent == Intent::write && !region_.writable()) return Answer::read_only;
    const auto& view = region_.view();
    const uint64_t begin = view.begin + first * sizeof(T);
    run->first = view.block(begin);
    *blocks = view.block(begin + count * sizeof(T) - 1) - run->first + 1;
    return Answer::present;
  }
  __device__ Answer try_all(const paging::Run& run, uint32_t blocks, Intent intent) {
    if (blocks > region_.view().table.frames) return Answer::too_many;
    Answer worst = Answer::present;
    uint32_t held = 0;
    for (uint32_t i = 0; i < blocks; ++i) {
      const Answer answer = group_.try_acquire(run[i], intent);
      if (answer == Answer::present && worst == Answer::present) {
        ++held;
        continue;
      }
      if (answer == Answer::present) group_.release(run[i]);
      if (worst == Answer::present || worst == Answer::not_yet) worst = answer == Answer::present ? worst : answer;
    }
    if (worst != Answer::present) group_.release_all(run, held);
    return worst;
  }
  __device__ void give_up(const paging::Run& run, uint32_t blocks) {
    Scope::join();  // after what its threads did
    if (Scope::leads()) group_.release_all(run, blocks);
  }

  const device_region<T> region_;
  paging::Group<paging::DeviceAtomics> group_;  // of the leader
  const uint64_t patience_, longest_;
};

template <typename T>
using thread_group = device_group<T, paging::ThreadScope>;
template <typename T>
using warp_group = device_group<T, paging::WarpScope>;
template <typename T>
using block_group = device_group<T, paging::BlockScope>;

}  // namespace vmem

#endif /* VMEM_DEVICE_CUH */
