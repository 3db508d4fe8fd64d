// Physical memory of one device in pieces of one size. A piece is mapped for life in a window, through which it is
// copied; what block it stands behind at the moment is not the pool's business. Pieces that nobody has are kept for the
// next one, since to make one takes as long as to map it ten times. Thread-safe; `mutex_` is a leaf but for the body's
// make and destroy, which are called under it, one at a time.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "core/status.h"
#include "device/device.h"

namespace vmem::device {

struct Piece {
  uint64_t handle = 0;   // the body's
  uintptr_t window = 0;  // 0: no memory
};

class PiecePool {
 public:
  using Make = std::function<core::Status(uint32_t number, Piece* out)>;
  using Destroy = std::function<void(const Piece& piece)>;

  explicit PiecePool(size_t piece_size) : size_(piece_size) {}  // bytes
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
  // Needs no memory.
  void give(uint32_t number) {
    std::lock_guard lock(mutex_);
    idle_.push_back(number);
  }
  uintptr_t window(uint32_t number) const {
    std::lock_guard lock(mutex_);
    return pieces_[number].window;
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
  // Those that nobody has go, as long as there are more than `keep` bytes of pieces in all.
  void trim(uint64_t keep, const Destroy& destroy) {
    std::lock_guard lock(mutex_);
    while (!idle_.empty() && (pieces_.size() - empty_.size()) * size_ > keep) {
      const uint32_t number = idle_.back();
      idle_.pop_back();
      destroy(pieces_[number]);
      pieces_[number] = {};
      empty_.push_back(number);
    }
  }

 private:
  core::Status add(const Make& make) {
    if (empty_.empty()) {
      if (pieces_.capacity() == pieces_.size()) pieces_.reserve(2 * pieces_.size() + 16);
      if (idle_.capacity() <= pieces_.size()) idle_.reserve(2 * pieces_.size() + 16);
      if (empty_.capacity() <= pieces_.size()) empty_.reserve(2 * pieces_.size() + 16);
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

  const size_t size_;
  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;    // protected by mutex_; by number
  std::vector<uint32_t> idle_;   // .. nobody has them; room for all
  std::vector<uint32_t> empty_;  // .. numbers without memory; room for all
};

}  // namespace vmem::device
