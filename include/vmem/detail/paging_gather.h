// Copies scattered rows to one place: the group's part of gather() in <vmem/device.cuh>.
#pragma once

#include "vmem/detail/paging_group.h"
#include "vmem/detail/paging_types.h"
#include "vmem/detail/paging_view.h"

// A loop that must not be unrolled, because a device has few registers.
#ifdef __CUDACC__
#define VMEM_PAGING_LOOP _Pragma("unroll 1")
#else
#define VMEM_PAGING_LOOP
#endif

namespace vmem::paging {

// The result for a list of rows. present: all are copied. Otherwise the error of the first row that
// is not copied.
struct Gathered {
  Answer answer = Answer::present;
  uint64_t row = 0;

  VMEM_PAGING explicit operator bool() const { return answer == Answer::present; }
  VMEM_PAGING void note(uint64_t at, Answer why) {
    if (answer == Answer::present || at < row) *this = {why, at};
  }
};

constexpr uint64_t kNoRow = ~uint64_t{0};

// The part of a row in one block. A row that crosses a block's end is copied in pieces, so that it
// never needs two blocks.
struct Piece {
  uint32_t block = 0;
  uint64_t address = 0, offset = 0, bytes = 0;  // offset: in the row
};

// Number of pieces that a row of at most row_bytes can have. multiples: its offset is a multiple of
// row_bytes.
template <typename Atomics>
VMEM_PAGING uint32_t pieces_of(const View<Atomics>& view, uint64_t row_bytes, bool multiples) {
  const uint64_t block = uint64_t{1} << view.shift;
  if (multiples && block % row_bytes == 0 && (view.begin - view.first) % row_bytes == 0) return 1;
  return static_cast<uint32_t>((row_bytes - 1) >> view.shift) + 2;
}

// Finds a piece of a row. out_of_range: the row is not in the range. A piece of 0 bytes: the row
// has no such piece.
template <typename Atomics, typename Rows>
VMEM_PAGING Answer find_piece(const View<Atomics>& view, const Rows& rows, uint64_t row, uint32_t which, Piece* piece) {
  const uint64_t offset = rows.offset(row);
  if (offset == kNoRow) return Answer::out_of_range;
  const uint64_t from = view.begin + offset, to = from + rows.bytes(row);
  piece->block = view.block(from) + which;
  const uint64_t begin = view.first + (uint64_t{piece->block} << view.shift);
  const uint64_t end = begin + (uint64_t{1} << view.shift);
  piece->address = from > begin ? from : begin;
  piece->offset = piece->address - from;
  piece->bytes = piece->address < to ? (to < end ? to : end) - piece->address : 0;
  return Answer::present;
}

// A team is the threads that copy together, one of several teams of a group that do the same for
// other rows. Its threads make every call together. This one is a thread alone.
struct LoneTeam {
  VMEM_PAGING uint32_t threads() const { return 1; }  // of the group
  VMEM_PAGING uint32_t first() const { return 0; }    // of this team among them
  VMEM_PAGING uint32_t lane() const { return 0; }
  VMEM_PAGING uint32_t which(bool yes) const { return yes ? 1 : 0; }  // a bit for each lane
  VMEM_PAGING uint64_t from(uint64_t word, uint32_t) const { return word; }
  VMEM_PAGING void join() const {}
};

// Copies the rows of a list. Each thread looks for rows of its own, up to 64 at a time, with a
// group of its own that holds nothing.
// - It first requests all missing blocks. Then the whole team copies the rows that are there, in
//   any order, from the device or, if the block is in place, from there.
// - A pin lasts while the team copies one row of each of its threads, and nothing waits meanwhile.
//   So each block is released soon. Since all rows are looked for all the time, each block that has
//   come is used soon, and none stays for a group that looks for another block.
// - So requests are as urgent as those of a group that waits.
//
// rows: uint64_t offset(row), from the range's begin, or kNoRow; uint64_t bytes(row).
// copy(row, piece) is called by all lanes. Returns the result for this thread's rows.
template <typename Atomics, typename Team, typename Rows, typename Copy>
VMEM_PAGING Gathered gather(const View<Atomics>& view, Group<Atomics>* group, const Team& team, const Rows& rows,
                            uint64_t count, uint32_t pieces, const Copy& copy) {
  Gathered result;
  const uint64_t step = team.threads();
  for (uint64_t window = 0; window < pieces * count;) {
    // The first pieces of all rows, then the second ones: most rows have only one.
    const auto which = static_cast<uint32_t>(window / count);
    const uint64_t base = window - which * count, mine = base + team.first() + team.lane();
    window += count - base < 64 * step ? count - base : 64 * step;
    uint64_t left = 0;
    VMEM_PAGING_LOOP
    for (uint32_t k = 0; k < 64 && mine + k * step < count; ++k) {
      Piece piece;
      const Answer answer = find_piece(view, rows, mine + k * step, which, &piece);
      if (answer != Answer::present) {
        result.note(mine + k * step, answer);
      } else if (piece.bytes != 0) {
        left |= uint64_t{1} << k;
        group->request(piece.block);
      }
    }
    for (auto watch = group->watch(); team.which(left != 0) != 0;) {
      bool moved = false;
      VMEM_PAGING_LOOP
      for (uint32_t k = 0; k < 64; ++k) {
        const bool wanted = (left >> k & 1) != 0;
        if (team.which(wanted) == 0) continue;
        Piece piece;
        Answer answer = Answer::not_yet;
        if (wanted) {
          find_piece(view, rows, mine + k * step, which, &piece);
          uint64_t home = 0;
          answer = group->try_read(piece.block, &home);
          if (home != 0) piece.address += home - (view.first + (uint64_t{piece.block} << view.shift));
        }
        const uint32_t here = team.which(answer == Answer::present);
        if (here != 0) {
          team.join();  // all threads see what each has acquired
          VMEM_PAGING_LOOP
          for (uint32_t lane = 0; lane < 32 && here >> lane != 0; ++lane) {
            if ((here >> lane & 1) == 0) continue;
            const Piece its{0, team.from(piece.address, lane), team.from(piece.offset, lane),
                            team.from(piece.bytes, lane)};
            copy(base + team.first() + lane + k * step, its);
          }
          team.join();
        }
        if (answer == Answer::present) group->release(piece.block);
        if (answer != Answer::not_yet) {
          left &= ~(uint64_t{1} << k);
          moved = true;
          if (answer != Answer::present) result.note(mine + k * step, answer);
        }
      }
      if (team.which(moved) != 0) continue;
      const Answer answer = static_cast<Answer>(team.from(static_cast<uint64_t>(watch.check()), 0));
      if (answer == Answer::present) {
        Atomics::pause();
        continue;
      }
      VMEM_PAGING_LOOP
      for (uint32_t k = 0; k < 64; ++k) {
        if ((left >> k & 1) != 0) result.note(mine + k * step, answer);
      }
      left = 0;
    }
  }
  return result;
}

}  // namespace vmem::paging
