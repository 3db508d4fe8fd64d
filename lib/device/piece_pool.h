// Physical memory of one device, in pieces. Thread-safe.
//
// - A piece is mapped for life in a window, through which it is copied. The pool does not know
//   which block it backs.
// - Idle pieces are kept for the next block, because making one takes much longer than mapping it.
//   They go when another size needs the memory.
// - A piece that was shared with another process never backs another block: it is destroyed when
//   its block has left it.
// - `mutex_` is a leaf, except that the backend's make and destroy are called under it, one at a
//   time.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "core/status.h"
#include "core/step.h"
#include "device/device.h"

namespace vmem::device {

struct Piece {
  uint64_t handle = 0;   // of the backend
  uintptr_t window = 0;  // 0: no memory
  bool shared = false;   // another process may have it, for any time
  uint64_t seen_by = 0;  // a bit for each device that may copy through the window, besides its own
};

// Pieces of one size.
class PiecePool {
 public:
  using Make = std::function<core::Status(uint32_t number, Piece* out)>;
  using Destroy = std::function<bool(const Piece& piece)>;  // false: nothing has changed

  explicit PiecePool(size_t piece_size) : size_(piece_size) {}  // bytes
  size_t size() const { return size_; }
  // Takes out.size() pieces, or none.
  core::Status take(std::span<uint32_t> out, const Make& make) try {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < out.size(); ++i) {
      core::Status s;
      if (idle_.empty()) s = add(make);
      if (!s.ok()) {
        for (size_t k = 0; k < i; ++k) idle_.push_back(out[k]);
        return s;
      }
      out[i] = idle_.back();
      idle_.pop_back();
    }
    return {};
  } catch (const std::bad_alloc&) {
    return core::error(ENOMEM, "no memory to record a piece of device memory");
  }
  // Takes an idle piece, if there is one.
  bool take_idle(uint32_t* out) {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) return false;
    *out = idle_.back();
    idle_.pop_back();
    return true;
  }
  // Gives a piece back; allocates nothing, whatever `destroy` is. Destroys a shared piece. If that
  // fails no block gets it, and trim() tries again, as does a caller that finds no other piece.
  template <typename DestroyIt>
  void give(uint32_t number, const DestroyIt& destroy) {
    std::lock_guard lock(mutex_);
    if (!pieces_[number].shared) {
      idle_.push_back(number);
      return;
    }
    if (!destroy(pieces_[number])) {
      left_.push_back(number);
      return;
    }
    pieces_[number] = {};
    empty_.push_back(number);
  }
  // Called before the piece is handed out of the process.
  void share(uint32_t number) {
    std::lock_guard lock(mutex_);
    pieces_[number].shared = true;
  }
  uintptr_t window(uint32_t number) const {
    std::lock_guard lock(mutex_);
    return pieces_[number].window;
  }
  bool seen_by(uint32_t number, int device) const {
    std::lock_guard lock(mutex_);
    return (pieces_[number].seen_by >> device & 1) != 0;
  }
  void set_seen_by(uint32_t number, int device) {
    std::lock_guard lock(mutex_);
    pieces_[number].seen_by |= uint64_t{1} << device;
  }
  uint64_t handle(uint32_t number) const {
    std::lock_guard lock(mutex_);
    return pieces_[number].handle;
  }
  uint64_t idle_bytes() const {
    std::lock_guard lock(mutex_);
    return idle_.size() * size_;
  }
  // Bytes of all pieces that have memory.
  uint64_t bytes() const {
    std::lock_guard lock(mutex_);
    return (pieces_.size() - empty_.size()) * size_;
  }
  // Destroys idle pieces that make up `bytes`, or all, until one cannot be destroyed, which stays
  // idle. Returns the bytes destroyed.
  uint64_t trim(uint64_t bytes, const Destroy& destroy) {
    std::lock_guard lock(mutex_);
    uint64_t gone = end_left(destroy);
    while (!idle_.empty() && gone < bytes) {
      const uint32_t number = idle_.back();
      if (!destroy(pieces_[number])) break;
      idle_.pop_back();
      pieces_[number] = {};
      empty_.push_back(number);
      gone += size_;
    }
    return gone;
  }

 private:
  core::Status add(const Make& make) {
    if (empty_.empty()) {
      if (pieces_.capacity() == pieces_.size()) pieces_.reserve(2 * pieces_.size() + 16);
      if (idle_.capacity() <= pieces_.size()) idle_.reserve(2 * pieces_.size() + 16);
      if (empty_.capacity() <= pieces_.size()) empty_.reserve(2 * pieces_.size() + 16);
      if (left_.capacity() <= pieces_.size()) left_.reserve(2 * pieces_.size() + 16);
    }
    const auto number = static_cast<uint32_t>(empty_.empty() ? pieces_.size() : empty_.back());
    Piece piece;
    if (core::Status s = make(number, &piece); !s.ok()) return s;
    if (empty_.empty()) {
      pieces_.push_back(piece);
    } else {
      pieces_[number] = piece;
      empty_.pop_back();
    }
    idle_.push_back(number);
    return {};
  }

  // Tries again to destroy the pieces of left_. Returns the bytes destroyed.
  template <typename DestroyIt>
  uint64_t end_left(const DestroyIt& destroy) {
    const auto gone = std::partition(left_.begin(), left_.end(), [&](uint32_t n) { return !destroy(pieces_[n]); });
    const auto bytes = static_cast<uint64_t>(left_.end() - gone) * size_;
    for (auto i = gone; i != left_.end(); ++i) {
      pieces_[*i] = {};
      empty_.push_back(*i);
    }
    left_.erase(gone, left_.end());
    return bytes;
  }

  const size_t size_;
  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;    // protected by mutex_; by number
  std::vector<uint32_t> idle_;   // protected by mutex_; idle pieces; capacity for all
  std::vector<uint32_t> empty_;  // protected by mutex_; numbers without memory; capacity for all
  std::vector<uint32_t> left_;   // protected by mutex_; shared pieces still to be destroyed; capacity for all
};

// A pool for each size of unit; pieces are numbered per size. A piece is made when none of its size
// is idle. Before that, idle ones of other sizes are destroyed, as many bytes as it has. So there
// are never more bytes in all than units had at some time, except pieces that cannot be destroyed.
class PiecePools {
 public:
  using Make = std::function<core::Status(size_t size, uint32_t number, Piece* out)>;
  using Destroy = std::function<bool(size_t size, const Piece& piece)>;

  PiecePool& of(size_t size) { return pools_[unit_class(size)]; }
  core::Status take(size_t size, uint32_t* out, const Make& make, const Destroy& destroy) {
    PiecePool& own = of(size);
    if (own.take_idle(out)) return {};
    core::step("piece.none");
    std::lock_guard one_at_a_time(making_);
    if (own.take_idle(out)) return {};
    shrink(size, &own, destroy);
    own.trim(0, [&](const Piece& piece) { return destroy(size, piece); });  // shared ones that could not be destroyed
    return own.take({out, 1}, [&](uint32_t number, Piece* piece) { return make(size, number, piece); });
  }
  uint64_t idle_bytes() const {
    uint64_t sum = 0;
    for (const PiecePool& pool : pools_) sum += pool.idle_bytes();
    return sum;
  }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const PiecePool& pool : pools_) sum += pool.bytes();
    return sum;
  }
  // Destroys idle pieces while there are more than `keep` bytes of pieces in all.
  void trim(uint64_t keep, const Destroy& destroy) {
    const uint64_t all = bytes();
    if (all > keep) shrink(all - keep, nullptr, destroy);
  }

 private:
  void shrink(uint64_t bytes, const PiecePool* but, const Destroy& destroy) {
    for (PiecePool& pool : pools_) {
      if (bytes == 0) return;
      if (&pool == but) continue;
      const uint64_t gone = pool.trim(bytes, [&](const Piece& piece) { return destroy(pool.size(), piece); });
      bytes -= std::min(bytes, gone);
    }
  }

  std::mutex making_;  // held while the pools' mutexes are taken
  std::array<PiecePool, kUnitSizes> pools_{PiecePool(kUnit),     PiecePool(2 * kUnit),  PiecePool(4 * kUnit),
                                           PiecePool(8 * kUnit), PiecePool(16 * kUnit), PiecePool(32 * kUnit)};
  static_assert(kUnitSizes == 6);
};

}  // namespace vmem::device
