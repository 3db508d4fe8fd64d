// Separate rows, gathered by kernels that page in the blocks they need. Simulated devices, whose
// kernels are threads.
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernel_fixture.h"
#include "vmem/detail/paging_gather.h"

namespace systest {
namespace {

using vmem::paging::Gathered;
using vmem::paging::kNoRow;
using vmem::paging::Piece;

// Rows by number.
struct Rows {
  const std::vector<uint64_t>* ids;
  uint64_t row_bytes, size;

  uint64_t bytes(uint64_t) const { return row_bytes; }
  uint64_t offset(uint64_t which) const {
    const uint64_t id = (*ids)[which];
    return id < size / row_bytes ? id * row_bytes : kNoRow;
  }
};

// Lanes are threads, each a kernel on its own stream.
struct Lanes {
  explicit Lanes(uint32_t count) : together(count), words(count) {}
  std::barrier<> together;
  std::vector<uint64_t> words;
};
class Team {
 public:
  Team(Lanes* lanes, uint32_t threads, uint32_t first, uint32_t lane)
      : lanes_(lanes), threads_(threads), first_(first), lane_(lane) {}
  uint32_t threads() const { return threads_; }
  uint32_t first() const { return first_; }
  uint32_t lane() const { return lane_; }
  uint32_t lanes() const { return static_cast<uint32_t>(lanes_->words.size()); }
  uint32_t which(bool yes) const {
    say(yes ? 1 : 0);
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < lanes(); ++lane) mask |= static_cast<uint32_t>(lanes_->words[lane]) << lane;
    join();
    return mask;
  }
  uint64_t from(uint64_t word, uint32_t lane) const {
    say(word);
    const uint64_t told = lanes_->words[lane];
    join();
    return told;
  }
  void join() const { lanes_->together.arrive_and_wait(); }

 private:
  void say(uint64_t word) const {
    lanes_->words[lane_] = word;
    join();
  }
  Lanes* lanes_;
  const uint32_t threads_, first_, lane_;
};

class KernelGather : public KernelPaging {
 protected:
  static uint64_t word_at(uint64_t at) { return at * 0x9e3779b97f4a7c15u ^ at >> 7; }
  static void fill(uint64_t* at, size_t words) {
    for (size_t w = 0; w < words; ++w) at[w] = word_at(w);
  }
  static auto copies(SimKernel& k, const View& view, uint64_t* out, uint64_t words, uint64_t lane = 0,
                     uint64_t lanes = 1) {
    return [=, &k](uint64_t row, const Piece& piece) {
      const auto* const from = bytes_of(k, view, piece);
      if (from == nullptr) return;
      auto* const to = reinterpret_cast<char*>(out + row * words) + piece.offset;
      for (uint64_t at = lane * 8; at < piece.bytes; at += 8 * lanes) memcpy(to + at, from + at, 8);
    };
  }
  static uint32_t pieces(const View& view, uint64_t bytes) { return vmem::paging::pieces_of(view, bytes, true); }
  // Launches a single-lane kernel that gathers rows of that many words.
  static void launch_gather(void* stream, const View& view, const std::vector<uint64_t>& ids, uint64_t words,
                            std::vector<uint64_t>* out, Gathered* got, uint64_t longest = UINT64_MAX) {
    out->assign(ids.size() * words, ~uint64_t{0});
    launch(stream, [=, &ids](SimKernel& k) {
      Group group(view.table, long_enough(), longest);
      const Rows rows{&ids, words * 8, view.size};
      *got = vmem::paging::gather(view, &group, vmem::paging::LoneTeam(), rows, ids.size(), pieces(view, words * 8),
                                  copies(k, view, out->data(), words));
    });
  }
  static uint64_t wrong_words(const std::vector<uint64_t>& ids, uint64_t words, const std::vector<uint64_t>& out) {
    uint64_t wrong = 0;
    for (size_t i = 0; i < out.size(); ++i) wrong += out[i] != word_at(ids[i / words] * words + i % words);
    return wrong;
  }
  static std::vector<uint64_t> some_rows(size_t count, uint64_t of, unsigned seed) {
    std::minstd_rand random(seed);
    std::vector<uint64_t> ids(count);
    for (uint64_t& id : ids) id = random() % of;
    return ids;
  }
};

// Four kernels gather four times what the range may hold at once; some rows cross block borders.
TEST_F(KernelGather, RowsThatLieApartComeWhole) {
  if (IsSkipped()) return;
  constexpr uint32_t kBlocks = 32, kKernels = 4;
  vmem::region r(kBlocks * kBlock);
  fill(words(r), kBlocks * kWords);
  Open open(words(r), kBlocks * kBlock, VMEM_READ, stream_, 8 * kBlock);
  for (const uint64_t row : {uint64_t{512}, uint64_t{1001}, kWords + 3}) {
    std::vector<std::vector<uint64_t>> ids, out(kKernels);
    std::vector<Gathered> got(kKernels, {Answer::io_error, 1});
    for (uint32_t k = 0; k < kKernels; ++k)
      ids.push_back(some_rows(row > kWords ? 9 : 150, kBlocks * kWords / row, k + 1));
    std::vector<void*> streams;
    for (uint32_t k = 0; k < kKernels; ++k) {
      streams.push_back(stream(0));
      launch_gather(streams.back(), open.view(), ids[k], row, &out[k], &got[k]);
    }
    for (void* s : streams) ASSERT_TRUE(sim().synchronize(s).ok());
    for (uint32_t k = 0; k < kKernels; ++k) {
      EXPECT_TRUE(got[k]) << static_cast<int>(got[k].answer) << " at row " << got[k].row;
      EXPECT_EQ(wrong_words(ids[k], row, out[k]), 0u) << "rows of " << row << " words";
    }
  }
}

// Two teams of three lanes each, with more rows than a team handles at a time.
TEST_F(KernelGather, TeamsShareTheRowsOfTheirGroup) {
  if (IsSkipped()) return;
  constexpr uint32_t kLanes = 3, kThreads = 2 * kLanes;
  constexpr uint64_t kRow = 300;
  vmem::region r(8 * kBlock);
  fill(words(r), 8 * kWords);
  Open open(words(r), 8 * kBlock, VMEM_READ, stream_, 4 * kBlock);
  const View view = open.view();
  const std::vector<uint64_t> ids = some_rows(450, 8 * kWords / kRow, 5);
  std::vector<uint64_t> out(ids.size() * kRow);
  std::vector<std::unique_ptr<Lanes>> teams;
  for (int t = 0; t < 2; ++t) teams.push_back(std::make_unique<Lanes>(kLanes));
  std::atomic<int> failed{0};
  std::vector<void*> streams;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    streams.push_back(stream(0));
    launch(streams.back(), [&, thread, view](SimKernel& k) {
      const Team team(teams[thread / kLanes].get(), kThreads, thread / kLanes * kLanes, thread % kLanes);
      Group group(view.table, long_enough());
      const Rows rows{&ids, kRow * 8, view.size};
      const Gathered got = vmem::paging::gather(view, &group, team, rows, ids.size(), pieces(view, kRow * 8),
                                                copies(k, view, out.data(), kRow, team.lane(), kLanes));
      failed += got ? 0 : 1;
    });
  }
  for (void* s : streams) ASSERT_TRUE(sim().synchronize(s).ok());
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(wrong_words(ids, kRow, out), 0u);
}

// Ranges of several lengths, some of them empty.
TEST_F(KernelGather, RangesOfSeveralLengthsAreVisitedWhole) {
  if (IsSkipped()) return;
  struct Ranges {
    const std::vector<std::pair<uint64_t, uint64_t>>* list;  // first, count
    uint64_t offset(uint64_t which) const { return (*list)[which].first * 8; }
    uint64_t bytes(uint64_t which) const { return (*list)[which].second * 8; }
  };
  constexpr uint64_t kMost = 2 * kWords + 1;
  vmem::region r(8 * kBlock);
  fill(words(r), 8 * kWords);
  Open open(words(r), 8 * kBlock, VMEM_READ, stream_, 2 * kBlock);
  const View view = open.view();
  std::vector<std::pair<uint64_t, uint64_t>> list{{7, 0}, {kWords - 1, kMost}, {8 * kWords - 1, 1}, {8 * kWords, 0}};
  std::minstd_rand random(11);
  while (list.size() < 200) list.emplace_back(random() % (7 * kWords), random() % 3000);
  std::vector<uint64_t> seen(list.size());
  uint64_t wrong = 0;
  Gathered got;
  launch(stream_, [&, view](SimKernel& k) {
    Group group(view.table, long_enough());
    const auto visit = [&](uint64_t which, const Piece& piece) {
      const auto* const at = bytes_of(k, view, piece);
      seen[which] += piece.bytes / 8;
      for (uint64_t w = 0; at != nullptr && w < piece.bytes / 8; w += 17) {
        uint64_t found;
        memcpy(&found, at + 8 * w, 8);
        wrong += found != word_at(list[which].first + piece.offset / 8 + w);
      }
    };
    got = vmem::paging::gather(view, &group, vmem::paging::LoneTeam(), Ranges{&list}, list.size(),
                               vmem::paging::pieces_of(view, kMost * 8, false), visit);
  });
  open.end();
  EXPECT_TRUE(got) << static_cast<int>(got.answer);
  EXPECT_EQ(wrong, 0u);
  for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(seen[i], list[i].second) << "range " << i;
}

// A waiting group holds no blocks: otherwise one frame would not suffice for rows that lie in
// several blocks.
TEST_F(KernelGather, OneFrameIsEnoughForRowsOfSeveralBlocks) {
  if (IsSkipped()) return;
  constexpr uint64_t kRow = kWords + kWords / 2;
  vmem::region r(9 * kBlock);
  fill(words(r), 9 * kWords);
  Open open(words(r), 9 * kBlock, VMEM_READ, stream_, kBlock);
  ASSERT_EQ(open.view().table.frames, 1u);
  const std::vector<uint64_t> ids{5, 0, 3, 3, 1};
  std::vector<uint64_t> out[2];
  Gathered got[2];
  void* const streams[] = {stream(0), stream(0)};
  for (int k = 0; k < 2; ++k) launch_gather(streams[k], open.view(), ids, kRow, &out[k], &got[k]);
  for (void* s : streams) ASSERT_TRUE(sim().synchronize(s).ok());
  for (int k = 0; k < 2; ++k) {
    EXPECT_TRUE(got[k]) << static_cast<int>(got[k].answer);
    EXPECT_EQ(wrong_words(ids, kRow, out[k]), 0u);
  }
}

// A range that begins inside a block: rows are counted from there.
TEST_F(KernelGather, RowsOfARangeThatBeginsInsideABlock) {
  if (IsSkipped()) return;
  constexpr uint64_t kRow = 512, kBefore = 100;
  vmem::region r(3 * kBlock);
  fill(words(r) + kBefore, 3 * kWords - kBefore);
  Open open(words(r) + kBefore, 2 * kBlock, VMEM_READ, stream_, 4 * kBlock);
  std::vector<uint64_t> ids(2 * kWords / kRow), out;
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = ids.size() - 1 - i;
  Gathered got;
  launch_gather(stream_, open.view(), ids, kRow, &out, &got);
  open.end();
  EXPECT_TRUE(got) << static_cast<int>(got.answer);
  EXPECT_EQ(wrong_words(ids, kRow, out), 0u);
}

TEST_F(KernelGather, RowsThatCannotBeHadKeepNobodyFromTheOthers) {
  if (IsSkipped()) return;
  start_on_a_faulty_disk();
  if (IsSkipped()) return;
  TempFile file(4 * kBlock);
  vmem::region r(4 * kBlock, file.path(), 0, VMEM_MAP_READ);
  constexpr uint64_t kRow = 1000;  // one of the rows crosses the end of block 1
  const uint64_t broken_from = 2 * kWords / kRow, broken_to = 3 * kWords / kRow;
  std::vector<uint64_t> ids = some_rows(100, 4 * kWords / kRow, 3), out;
  ids[0] = 1, ids[30] = 4 * kWords / kRow, ids[99] = 0;
  // so that the first row that fails is not the first of the list
  for (size_t i = 0; i < 20; ++i) ids[i] %= broken_from;
  ids[21] = broken_from;
  size_t first = 0;
  const auto fails = [&](uint64_t id) { return id >= broken_from && id <= broken_to; };
  while (!fails(ids[first])) ++first;
  ASSERT_GE(first, 20u);
  vmem::store::Fault fault;
  fault.op = vmem::store::Io::Op::read;
  fault.begin = 2 * kBlock;
  fault.end = 3 * kBlock;
  disk_->add_rule(fault);
  Open open(words(r), 4 * kBlock, VMEM_READ, stream_);
  Gathered got;
  launch_gather(stream_, open.view(), ids, kRow, &out, &got);
  open.end();
  disk_->clear_rules();
  EXPECT_EQ(got.answer, Answer::io_error);
  EXPECT_EQ(got.row, first);
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint64_t last = out[i * kRow + kRow - 1];
    if (fails(ids[i]) || i == 30) {
      EXPECT_TRUE(last == ~uint64_t{0} || ids[i] == broken_to) << "row " << i << " was not to be had";
    } else {
      EXPECT_EQ(memcmp(&out[i * kRow], words(r) + ids[i] * kRow, kRow * 8), 0) << "row " << i;
    }
  }
}

TEST_F(KernelGather, ARowThatIsNoneIsNamed) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  fill(words(r), 2 * kWords);
  Open open(words(r), 2 * kBlock, VMEM_READ, stream_);
  std::vector<uint64_t> ids(80, 7), out;
  ids[70] = ids[33] = 2 * kWords / 512;
  ids[50] = ~uint64_t{0};
  Gathered got;
  launch_gather(stream_, open.view(), ids, 512, &out, &got);
  open.end();
  EXPECT_EQ(got.answer, Answer::out_of_range);
  EXPECT_EQ(got.row, 33u);
  for (const size_t i : {size_t{0}, size_t{32}, size_t{34}, size_t{69}, size_t{79}})
    EXPECT_EQ(out[i * 512 + 511], word_at(7 * 512 + 511)) << "row " << i;
}

TEST_F(KernelGather, AWaitEndsAfterTheLongestTimeAndTheRowsThatAreThereAreCopied) {
  if (IsSkipped()) return;
  vmem::region r(2 * kBlock);
  fill(words(r), 2 * kWords);
  Open open(words(r), 2 * kBlock, VMEM_READ, stream_);
  const std::vector<uint64_t> there{3}, both{3, kWords / 512 + 1, 4};
  std::vector<uint64_t> out;
  Gathered got;
  launch_gather(stream_, open.view(), there, 512, &out, &got);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  EXPECT_TRUE(got);
  static std::atomic<bool> goes_on;
  goes_on = false;
  sim().set_hook([](vmem::device::SimOp op, int, uintptr_t, size_t) {
    while (op == vmem::device::SimOp::copy_in && !goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return vmem::core::Status();
  });
  launch_gather(stream_, open.view(), both, 512, &out, &got, 20000000);
  ASSERT_TRUE(sim().synchronize(stream_).ok());
  goes_on = true;
  EXPECT_EQ(got.answer, Answer::timed_out);
  EXPECT_EQ(got.row, 1u);
  EXPECT_EQ(out[0], word_at(3 * 512));
  EXPECT_EQ(out[2 * 512], word_at(4 * 512)) << "it lies behind the one that does not come";
  open.end();
}

TEST_F(KernelGather, ShutdownEndsAWaitForRows) {
  if (IsSkipped()) return;
  void* at = nullptr;
  ASSERT_EQ(vmem_alloc(&at, 4 * kBlock, 0), 0) << vmem_last_error();
  struct vmem_kernel* kernel = nullptr;
  vmem_kernel_view opaque;
  ASSERT_EQ(vmem_kernel_begin(&kernel, at, 4 * kBlock, VMEM_READ, 0, kBlock, &opaque), 0) << vmem_last_error();
  View view;
  memcpy(&view, &opaque, sizeof view);
  static std::atomic<bool> has, over;
  has = over = false;
  launch(stream_, [view](SimKernel&) {
    Group group(view.table, long_enough());
    EXPECT_EQ(group.acquire(3, vmem::paging::Intent::read), Answer::present);
    has = true;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.release(3);
  });
  EXPECT_TRUE(until([] { return has.load(); }));
  // Another kernel has the one frame. The rows of its block can be gathered, except while it is
  // being recalled; no other rows can.
  const std::vector<uint64_t> ids{3 * kWords / 512, 3 * kWords / 512 + 9, 0};
  std::vector<uint64_t> out(ids.size() * 512);
  Gathered got;
  static std::atomic<int> copied;
  copied = 0;
  launch(stream(0), [&ids, &out, &got, view](SimKernel& k) {
    Group group(view.table, long_enough());
    const auto copy = copies(k, view, out.data(), 512);
    const auto count = [&copy](uint64_t row, const Piece& piece) {
      copy(row, piece);
      ++copied;
    };
    got =
        vmem::paging::gather(view, &group, vmem::paging::LoneTeam(), Rows{&ids, 4096, view.size}, ids.size(), 1, count);
    over = true;
  });
  EXPECT_TRUE(until([] { return copied == 2; })) << "it waits for the last row alone";
  vmem_shutdown();
  EXPECT_EQ(got.answer, Answer::ended);
  EXPECT_EQ(got.row, 2u);
  EXPECT_EQ(vmem_kernel_end(kernel, stream_), 0) << vmem_last_error();
}

}  // namespace
}  // namespace systest
