// Physical memory of one device in pieces. A piece is mapped for life in a window, through which it is copied; what
// block it stands behind at the moment is not the pool's business. Pieces that nobody has are kept for the next one,
// since to make one takes as long as to map it ten times; where another size needs the memory they go. One that was
// shared with somebody outside is never another block's: it goes once its block has left it. Thread-safe;
// `mutex_` is a leaf but for the backend's make and destroy, which are called under it, one at a time.
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
  uint64_t handle = 0;   // the backend's
  uintptr_t window = 0;  // 0: no memory
  bool shared = false;   // somebody outside of the process may have it, for as long as they like
  uint64_t seen_by = 0;  // devices that may copy through the window, a bit each; its own may in any case
};

// Those of one size.
class PiecePool {
 public:
  using Make = std::function<core::Status(uint32_t number, Piece* out)>;
  using Destroy = std::function<bool(const Piece& piece)>;  // false: it is as it was, memory and window

  explicit PiecePool(size_t piece_size) : size_(piece_size) {}  // bytes
  size_t size() const { return size_; }
  // All or none.
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
    return core::error(ENOMEM, "no memory to know a piece of device memory by");
  }
  // One that is idle, if there is one.
  bool take_idle(uint32_t* out) {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) return false;
    *out = idle_.back();
    idle_.pop_back();
    return true;
  }
  // Needs no memory, whatever `destroy` is. One that is shared is destroyed; where it cannot be, nobody has it, and
  // trim() tries again, and so does who finds no other.
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
  // Whoever has it is about to hand it out of the process.
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
  // Of all that have memory.
  uint64_t bytes() const {
    std::lock_guard lock(mutex_);
    return (pieces_.size() - empty_.size()) * size_;
  }
  // As many of those that nobody has as make up `bytes`, if there are so many, until one cannot be destroyed: that
  // stays, idle, for the next one or another try. How much that was.
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

  // How many bytes that was.
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
  std::vector<uint32_t> idle_;   // .. nobody has them; room for all
  std::vector<uint32_t> empty_;  // .. numbers without memory; room for all
  std::vector<uint32_t> left_;   // .. shared ones that blocks have left, and that could not be destroyed; room for all
};

// Those of every size a unit may have, numbered for each size.
//
//   a piece is made when no piece of its size is idle, and then idle ones of other sizes go first, as many as it is
//   large: in all there are never more bytes than units had at some time, but for those that cannot be destroyed
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
    own.trim(0,
             [&](const Piece& piece) { return destroy(size, piece); });  // what was shared and could not be destroyed
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
  // Those that nobody has go, as long as there are more than `keep` bytes of pieces in all.
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

  std::mutex making_;  // held while the pools' are taken
  std::array<PiecePool, kUnitSizes> pools_{PiecePool(kUnit),     PiecePool(2 * kUnit),  PiecePool(4 * kUnit),
                                           PiecePool(8 * kUnit), PiecePool(16 * kUnit), PiecePool(32 * kUnit)};
  static_assert(kUnitSizes == 6);
};

}  // namespace vmem::device
