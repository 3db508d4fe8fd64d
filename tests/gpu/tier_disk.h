// Rows of tier_bench: between a disk and the device.
#pragma once

#include <numeric>
#include <tuple>

#include "hand_loop.h"
#include "tier_rows.h"

namespace gpubench {

class DiskRows : public Rows {
 public:
  using Rows::Rows;

 protected:
  // As many buffers as libvmem has frames for reading. Transfers to memory that is in no CPU cache
  // cost more, above all on a virtual disk.
  rawdisk::Plan many_buffers(rawdisk::Plan p) const {
    p.buffers = static_cast<unsigned>(std::min(s_.host_budget / 2, s_.bytes) / kBlock);
    return p;
  }

  // ---- disk to device
  // -------------------------------------------------------------------------------------------------

  Sample stream_in(const std::string& path, uint64_t ahead) {
    vmem::region r(s_.bytes, path, 0, VMEM_MAP_READ);
    r.advise(VMEM_ADVISE_SEQUENTIAL);
    Meter m;
    uint64_t asked = 0;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      for (; asked < s_.bytes && asked <= offset + ahead * s_.part && ahead != 0; asked += s_.part)
        vmem::check(vmem_prefetch(at(r, asked), std::min(s_.part, s_.bytes - asked), 0, nullptr));
      acquire(at(r, offset), n, VMEM_READ);
      kernels_.check(stream_.get(), at(r, offset), n, offset, 1, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    m.stop();
    return m.rate(s_.bytes);
  }
  Sample hand_in(const std::string& path) {
    HandLoop loop(app_, path, s_.part, false);
    Meter m;
    loop.in(s_.bytes,
            [&](char* p, uint64_t offset, size_t n, void* stream) { kernels_.check(stream, p, n, offset, 1, true); });
    m.stop();
    return m.rate(s_.bytes);
  }
  void from_disk() {
    for (const auto& [path, name, direct] :
         {std::tuple{file_, "disk", true}, std::tuple{fast_, "a file in memory (tmpfs)", false}}) {
      const std::string key = direct ? "in" : "fast";
      if (!table_.wanted(key, true)) continue;
      if (!direct && access(s_.fast.c_str(), W_OK) != 0) continue;
      need_file(path);
      rawdisk::Plan p = plan();
      p.direct = direct;
      const auto limit = [&, p, path = path] { return raw(path, p); };
      const auto many = [&, path = path, m = many_buffers(p)] { return raw(path, m); };
      const auto hand = [&, path = path] { return hand_in(path); };
      const std::string what = std::string(name) + " -> device, in order, ";
      for (const uint64_t ahead : {1, 2, 0}) {
        table_.row(key + "-ahead-" + std::to_string(ahead),
                   what + std::to_string(ahead) + " parts ahead (other: raw into many buffers)", "GB/s",
                   {{"raw", limit}, {"other", many}, {"hand", hand}, {"vmem", [&, path = path] {
                                                                        return stream_in(path, ahead);
                                                                      }}});
      }
      if (!direct) unlink(path.c_str());
    }
  }

  // ---- device to disk
  // -------------------------------------------------------------------------------------------------

  Sample stream_out() {
    vmem::region r(s_.bytes);
    ++mark_;
    Meter m;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      acquire(at(r, offset), n, VMEM_WRITE);
      kernels_.set(stream_.get(), at(r, offset), n, offset, mark_, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    r.sync();
    m.stop();
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {  // the data that came back is correct
      acquire(at(r, offset), n, VMEM_READ);
      kernels_.check(stream_.get(), at(r, offset), n, offset, mark_, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    return m.rate(s_.bytes);
  }
  Sample hand_out() {
    HandLoop loop(app_, file_, s_.part, true);
    Meter m;
    loop.out(s_.bytes,
             [&](char* p, uint64_t offset, size_t n, void* stream) { kernels_.set(stream, p, n, offset, 1, true); });
    m.stop();
    return m.rate(s_.bytes);
  }
  // Changes data in place: it is read, changed by a kernel, and written; durable at the end.
  Sample change() {
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_SHARED);
    Meter m;
    uint64_t asked = 0;
    parts(s_.bytes, s_.part, [&](uint64_t offset, uint64_t n) {
      for (; asked < s_.bytes && asked <= offset + s_.part; asked += s_.part)
        vmem::check(vmem_prefetch(at(r, asked), std::min(s_.part, s_.bytes - asked), 0, nullptr));
      acquire(at(r, offset), n, VMEM_READ | VMEM_WRITE);
      kernels_.check(stream_.get(), at(r, offset), n, offset, file_mark_, false);
      kernels_.set(stream_.get(), at(r, offset), n, offset, file_mark_ + 1, false);
      release(at(r, offset), n);
    });
    stream_.synchronize();
    r.sync();
    m.stop();
    ++file_mark_;
    r.free();
    return m.rate(s_.bytes);
  }
  void to_disk() {
    if (table_.wanted("out")) {
      need_file(file_);
      rawdisk::Plan writes = plan();
      writes.write = true;
      table_.row("out", "device -> SSD, new data, until all of it has a copy there (other: raw from many buffers)",
                 "GB/s",
                 {{"raw", [&, writes] { return raw(file_, writes); }},
                  {"other", [&, m = many_buffers(writes)] { return raw(file_, m); }},
                  {"hand", [&] { return hand_out(); }},
                  {"vmem", [&] { return stream_out(); }}});
      unlink(file_.c_str());  // the raw writes had no stamps
    }
    if (table_.wanted("change")) {
      need_file(file_);
      file_mark_ = 1;
      rawdisk::Plan mixed = plan();
      mixed.write_back = true;
      table_.row("change", "file -> device, changed there, -> file, durable (bytes read; as many are written)", "GB/s",
                 {{"raw", [&, mixed] { return raw(file_, mixed, true); }}, {"vmem", [&] { return change(); }}});
      unlink(file_.c_str());
    }
  }

  // ---- blocks at random
  // -----------------------------------------------------------------------------------------------

  std::vector<uint64_t> shuffled() {
    std::vector<uint64_t> order(s_.bytes / kBlock);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }
  Sample random_acquire(size_t ahead) {
    const auto order = shuffled();
    vmem::region r(s_.bytes, file_, 0, VMEM_MAP_READ);
    r.advise(VMEM_ADVISE_RANDOM);
    std::vector<double> us;
    Meter m;
    size_t asked = 0;
    const size_t count = ahead != 0 ? order.size() : std::min<size_t>(order.size(), 400);
    for (size_t i = 0; i < count; ++i) {
      for (; ahead != 0 && asked < count && asked <= i + ahead; ++asked)
        vmem::check(vmem_prefetch(at(r, order[asked] * kBlock), kBlock, 0, nullptr));
      const double start = rawdisk::now();
      acquire(at(r, order[i] * kBlock), kBlock, VMEM_READ);
      kernels_.check(stream_.get(), at(r, order[i] * kBlock), kBlock, order[i] * kBlock, 1, false);
      release(at(r, order[i] * kBlock), kBlock);
      if (ahead == 0) {
        stream_.synchronize();
        us.push_back((rawdisk::now() - start) * 1e6);
      }
    }
    stream_.synchronize();
    m.stop();
    return ahead != 0 ? m.rate(count * kBlock) : latency(us);
  }
  // A direct read into a pinned buffer, a copy, and a kernel, one after the other.
  Sample random_by_hand() {
    const auto order = shuffled();
    int fd = open(file_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) fd = open(file_.c_str(), O_RDONLY | O_CLOEXEC);
    gpuapp::Pinned host(app_, kBlock);
    gpuapp::Plain device(app_, kBlock);
    std::vector<double> us;
    std::string failed;
    for (size_t i = 0; i < std::min<size_t>(order.size(), 400) && failed.empty(); ++i) {
      const uint64_t offset = order[i] * kBlock;
      const double start = rawdisk::now();
      if (pread(fd, host.data(), kBlock, static_cast<off_t>(offset)) != static_cast<ssize_t>(kBlock))
        failed = "read: " + std::string(strerror(errno));
      app_.copy(device.data(), host.data(), kBlock, stream_.get());
      kernels_.check(stream_.get(), device.data(), kBlock, offset, 1, true);
      stream_.synchronize();
      us.push_back((rawdisk::now() - start) * 1e6);
    }
    close(fd);
    return failed.empty() ? latency(us) : Sample{0, 0, 0, failed};
  }
  void random_blocks() {
    if (!table_.wanted("random", true)) return;
    need_file(file_);
    rawdisk::Plan p = plan();
    p.random = true;
    const auto deep = [&, p]() mutable {
      p.seed = random_();
      return raw(file_, p);
    };
    p.depth = 1;
    p.total = std::min<uint64_t>(s_.bytes, 400 * kBlock);
    const auto one = [&](rawdisk::Plan single) {
      single.seed = random_();
      const auto r = rawdisk::run(file_, single);
      return Sample{r.p50_us, 0, r.p99_us, r.error};
    };
    table_.row("random-stream", "blocks of 2 MiB at random, SSD -> device, 16 ahead", "GB/s",
               {{"raw", deep}, {"vmem", [&] { return random_acquire(16); }}});
    table_.row(
        "random-one",
        "one block of 2 MiB at random, SSD -> device -> kernel done (raw: the read alone; other: into many buffers)",
        "us",
        {{"raw", [&, p] { return one(p); }},
         {"other", [&, m = many_buffers(p)] { return one(m); }},
         {"hand", [&] { return random_by_hand(); }},
         {"vmem", [&] { return random_acquire(0); }}},
        true);
  }

  uint64_t mark_ = 10, file_mark_ = 1;  // stamps of the next new data; of the file that is changed
};

}  // namespace gpubench
