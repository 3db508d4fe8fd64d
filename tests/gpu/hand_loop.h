// The loop that an expert writes by hand to stream a file to a GPU, or from it. It has two pinned
// buffers on huge pages, two streams, and direct I/O through io_uring: one buffer is read or
// written while the other is copied. libvmem is compared with it.
#pragma once

#include <functional>

#include "common/gpu_memory.h"

namespace gpubench {

class HandLoop {
 public:
  // use(device_memory, offset, bytes, stream): queues on the stream the kernel that reads the part
  // (in) or makes it (out).
  using Use = std::function<void(char* part, uint64_t offset, size_t bytes, void* stream)>;

  HandLoop(gpuapp::App& app, const std::string& path, size_t part, bool writes)
      : app_(app),
        part_(part),
        host_{{app, part}, {app, part}},
        device_{{app, part}, {app, part}},
        streams_{gpuapp::Stream(app), gpuapp::Stream(app)} {
    const int flags = (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC;
    fd_ = open(path.c_str(), flags | O_DIRECT);
    if (fd_ < 0) fd_ = open(path.c_str(), flags);
    if (fd_ < 0) throw std::runtime_error("open " + path + ": " + strerror(errno));
    if (const int rc = io_uring_queue_init(static_cast<unsigned>(2 * part / kPiece + 2), &ring_, 0); rc != 0) {
      close(fd_);
      throw std::runtime_error(std::string("io_uring: ") + strerror(-rc));
    }
  }
  ~HandLoop() {
    io_uring_queue_exit(&ring_);
    close(fd_);
  }
  HandLoop(const HandLoop&) = delete;
  HandLoop& operator=(const HandLoop&) = delete;

  // File to device. bytes: a multiple of the part size. Returns when all parts are done.
  void in(uint64_t bytes, const Use& use) {
    const uint64_t parts = bytes / part_;
    for (uint64_t i = 0; i < std::min<uint64_t>(2, parts); ++i) submit(i, false);
    for (uint64_t i = 0; i < parts; ++i) {
      const size_t b = i % 2;
      finish(b);
      app_.copy(device_[b].data(), host_[b].data(), part_, streams_[b].get());
      const auto copied = app_.mark(streams_[b].get());
      use(device_[b].data(), i * part_, part_, streams_[b].get());
      copied->wait();
      if (i + 2 < parts) submit(i + 2, false);
    }
    for (const auto& s : streams_) s.synchronize();
  }

  // Device to file.
  void out(uint64_t bytes, const Use& use) {
    const uint64_t parts = bytes / part_;
    gpuapp::MarkPtr copied[2];
    const auto start = [&](uint64_t i) {
      const size_t b = i % 2;
      finish(b);  // the buffer's previous part is written
      use(device_[b].data(), i * part_, part_, streams_[b].get());
      app_.copy(host_[b].data(), device_[b].data(), part_, streams_[b].get());
      copied[b] = app_.mark(streams_[b].get());
    };
    for (uint64_t i = 0; i < std::min<uint64_t>(2, parts); ++i) start(i);
    for (uint64_t i = 0; i < parts; ++i) {
      copied[i % 2]->wait();
      submit(i, true);
      // Reuse the other buffer once part i - 1 is written. Parts 0 and 1 were started above.
      if (i >= 1 && i + 1 < parts) start(i + 1);
    }
    finish(0);
    finish(1);
  }

 private:
  static constexpr size_t kPiece = 2 << 20;

  void submit(uint64_t i, bool write) {
    const size_t b = i % 2;
    for (size_t at = 0; at < part_; at += kPiece) {
      const auto size = static_cast<unsigned>(std::min(kPiece, part_ - at));
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      const uint64_t offset = i * part_ + at;
      write ? io_uring_prep_write(sqe, fd_, host_[b].data() + at, size, offset)
            : io_uring_prep_read(sqe, fd_, host_[b].data() + at, size, offset);
      sqe->user_data = b << 32 | size;
      ++waiting_[b];
    }
    if (const int rc = io_uring_submit(&ring_); rc < 0) throw std::runtime_error(strerror(-rc));
  }

  // Waits until the requests of a buffer are done.
  void finish(size_t b) {
    while (waiting_[b] != 0) {
      io_uring_cqe* cqe = nullptr;
      if (const int rc = io_uring_wait_cqe(&ring_, &cqe); rc != 0) {
        if (rc == -EINTR) continue;
        throw std::runtime_error(strerror(-rc));
      }
      const uint64_t data = cqe->user_data;
      const int got = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      --waiting_[data >> 32];
      if (got != static_cast<int>(data & 0xffffffff))
        throw std::runtime_error(got < 0 ? strerror(-got) : "short transfer");
    }
  }

  gpuapp::App& app_;
  const size_t part_;
  gpuapp::Pinned host_[2];
  gpuapp::Plain device_[2];
  gpuapp::Stream streams_[2];
  io_uring ring_ = {};
  int fd_ = -1;
  size_t waiting_[2] = {0, 0};
};

}  // namespace gpubench
