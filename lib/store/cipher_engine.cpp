#include "store/cipher_engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "core/fault_server.h"
#include "core/mutex.h"
#include "core/process/guarded_read.h"
#include "core/types.h"
#include "store/cipher.h"

namespace vmem::store {

namespace {

constexpr size_t kPieceBytes = size_t{256} << 10;
constexpr FileId kNoFile = UINT32_MAX;
constexpr size_t kBatch = 8;  // pieces submitted together: neighbours become one transfer

unsigned pieces_for(const EngineOptions& options) {
  return std::clamp(options.depth, 16u, 64u);
}

class CipherEngine final : public Engine {
 public:
  CipherEngine(std::unique_ptr<Engine> inner, std::unique_ptr<Cipher> cipher, unsigned pieces)
      : owned_(std::move(inner)), inner_(*owned_), cipher_(std::move(cipher)), pieces_(pieces) {}
  ~CipherEngine() override {
    owned_.reset();  // waits for everything in flight, and for what done() submits
    if (buffers_ != MAP_FAILED) munmap(buffers_, pieces_.size() * kPieceBytes);
  }
  core::Status start() {
    buffers_ = mmap(nullptr, pieces_.size() * kPieceBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffers_ == MAP_FAILED) return core::system_error(errno, "no memory for buffers of encrypted blocks");
    // The buffers also hold plain text: bytes of a region are copied here first.
    madvise(buffers_, pieces_.size() * kPieceBytes, MADV_DONTDUMP);
    madvise(buffers_, pieces_.size() * kPieceBytes, MADV_DONTFORK);
    pump_.run = run_pump;
    pump_.engine = this;
    const core::MutexLock lock(mutex_);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      Piece& p = pieces_[i];
      p.engine = this;
      p.buffer = static_cast<char*>(buffers_) + i * kPieceBytes;
      p.next = std::exchange(free_, &p);
    }
    return {};
  }

  const char* name() const override { return inner_.name(); }
  EngineStats stats() const override { return inner_.stats(); }
  bool watch(int fd, void (*ready)(void*), void* user) override { return inner_.watch(fd, ready, user); }
  void unwatch() override { inner_.unwatch(); }
  void run_errand(Errand& errand) override { inner_.run_errand(errand); }
  core::Status add_file(int fd, FileId* id) override { return inner_.add_file(fd, id); }
  core::Status add_store(int fd, FileId* id) override {
    if (core::Status s = inner_.add_store(fd, id); !s.ok()) return s;
    const core::MutexLock lock(mutex_);
    if (std::find(stores_.begin(), stores_.end(), *id) == stores_.end()) stores_.push_back(*id);
    return {};
  }
  void remove_file(FileId id) override {
    {
      const core::MutexLock lock(mutex_);
      std::erase(stores_, id);
    }
    inner_.remove_file(id);
  }

  void submit(std::span<Io* const> batch) override {
    std::array<Io*, 64> onward;
    size_t count = 0;
    bool writes = false;
    for (Io* io : batch) {
      if (io->op != Io::Op::flush && is_store(io->file)) {
        if (io->op == Io::Op::write && io->size != 0) {
          queue(io);
          writes = true;
          continue;
        }
        io->layer.done = io->done;
        io->layer.engine = this;
        // Bytes that have arrived are still encrypted.
        io->layer.progress = std::exchange(io->progress, nullptr);
        io->done = read_done;
      }
      onward[count++] = io;
      if (count == onward.size()) inner_.submit({onward.data(), std::exchange(count, 0)});
    }
    if (count != 0) inner_.submit({onward.data(), count});
    if (writes) pump();
  }

 private:
  // An encrypted part of a write, in flight.
  struct Piece {
    Io io;
    CipherEngine* engine = nullptr;
    Io* of = nullptr;
    size_t from = 0;  // position in the write
    void* buffer = nullptr;
    bool unread = false;    // a page of the region is unreadable or a guard page
    Piece* next = nullptr;  // in the free list
  };

  bool is_store(FileId id) {
    const core::MutexLock lock(mutex_);
    return std::find(stores_.begin(), stores_.end(), id) != stores_.end();
  }

  static void read_done(Io& io) {
    auto* const self = static_cast<CipherEngine*>(io.layer.engine);
    io.done = io.layer.done;
    io.progress = io.layer.progress;
    // Bytes behind the end of the file were zeroed, not read: do not decrypt them.
    if (io.result == 0 && io.op == Io::Op::read &&
        (io.transferred % core::kPage != 0 || io.offset % core::kPage != 0 ||
         !self->cipher_->decrypt(io.file, io.offset, io.buffer, io.transferred, io.buffer))) {
      io.result = -EIO;
    }
    if (io.done != nullptr) io.done(io);
  }

  static size_t lane(const Io& io) { return std::min(static_cast<size_t>(io.urgency), core::kUrgencies - 1); }

  void queue(Io* io) {
    io->result = 0;
    io->transferred = 0;
    io->layer = {.done = io->done, .engine = this};
    io->next = nullptr;
    const core::MutexLock lock(mutex_);
    Waiting& list = waiting_[lane(*io)];
    (list.head == nullptr ? list.head : list.tail->next) = io;
    list.tail = io;
  }

  // Returns the next part of the most urgent waiting write, with a buffer. Returns nullptr if no
  // write waits or no buffer is free.
  Piece* next_piece() VMEM_REQUIRES(mutex_) {
    if (free_ == nullptr) return nullptr;
    for (Waiting& list : waiting_) {
      Io* const io = list.head;
      if (io == nullptr) continue;
      Piece* const p = free_;
      free_ = p->next;
      const size_t bytes = std::min(kPieceBytes, io->size - io->layer.begun);
      p->of = io;
      p->from = io->layer.begun;
      p->io = Io{};
      p->io.op = Io::Op::write;
      p->io.urgency = io->urgency;
      p->io.file = io->file;
      p->io.offset = io->offset + p->from;
      p->io.buffer = p->buffer;
      p->io.size = bytes;
      p->io.done = piece_done;
      p->io.user = p;
      io->layer.begun += bytes;
      if (io->layer.begun == io->size) list.head = io->next;
      return p;
    }
    return nullptr;
  }

  // Submits as many pieces as there are buffers. Any thread, without a lock. The bytes may lie in a
  // region: if this thread serves faults, another thread reads them.
  void pump() {
    if (!core::serves_faults) return pump_here();
    {
      const core::MutexLock lock(mutex_);
      if (std::exchange(pump_.asked, true)) return;
    }
    inner_.run_errand(pump_);
  }

  static void run_pump(Errand& errand) {
    CipherEngine* const self = static_cast<Pump&>(errand).engine;
    {
      const core::MutexLock lock(self->mutex_);
      self->pump_.asked = false;
    }
    self->pump_here();
  }

  void pump_here() {
    for (;;) {
      std::array<Io*, kBatch> batch;
      size_t count = 0;
      while (count < batch.size()) {
        Piece* piece = nullptr;
        {
          const core::MutexLock lock(mutex_);
          piece = next_piece();
        }
        if (piece == nullptr) break;
        const Io& io = piece->io;
        const char* from = static_cast<const char*>(piece->of->buffer) + piece->from;
        // Bytes that cannot be encrypted must not be written. Submit them for a file that does not
        // exist, so that done() is called where it must be. A guard page is refused, not read as
        // zeros: the digest may have been taken of other bytes.
        piece->unread = piece->of->in_region &&
                        core::read_guarded(piece->buffer, from, io.size, piece->of->absent, core::Guards::refused) != 0;
        if (io.size % core::kPage != 0 || io.offset % core::kPage != 0 || piece->unread ||
            !cipher_->encrypt(io.file, io.offset, piece->of->in_region ? piece->buffer : from, io.size, piece->buffer))
          piece->io.file = kNoFile;
        batch[count++] = &piece->io;
      }
      if (count == 0) return;
      inner_.submit({batch.data(), count});
    }
  }

  static void piece_done(Io& io) {
    auto* const piece = static_cast<Piece*>(io.user);
    CipherEngine* const self = piece->engine;
    self->settle(piece, piece->unread ? -EFAULT : io.result, io.transferred);
    self->pump();
  }

  // Ends the piece, and with the last piece the write. The write's done() may free it.
  void settle(Piece* piece, int result, size_t transferred) {
    Io* const io = piece->of;
    bool over = false;
    {
      const core::MutexLock lock(mutex_);
      io->layer.settled += piece->io.size;
      if (result != 0 && io->layer.error == 0) io->layer.error = result;
      io->transferred += transferred;
      over = io->layer.settled == io->size;
      piece->next = std::exchange(free_, piece);
    }
    if (!over) return;
    io->result = io->layer.error;
    io->done = io->layer.done;
    io->next = nullptr;
    if (io->done != nullptr) io->done(*io);
  }

  struct Pump : Errand {
    CipherEngine* engine = nullptr;
    bool asked = false;  // it will run
  };
  struct Waiting {
    Io* head = nullptr;
    Io* tail = nullptr;
  };

  std::unique_ptr<Engine> owned_;
  Engine& inner_;
  const std::unique_ptr<Cipher> cipher_;
  void* buffers_ = MAP_FAILED;

  std::vector<Piece> pieces_;  // each used by one piece at a time
  // A leaf. Also protects `layer` of the writes that wait or are in flight, and pump_.
  core::Mutex mutex_;
  Pump pump_;
  Piece* free_ VMEM_GUARDED_BY(mutex_) = nullptr;
  std::array<Waiting, core::kUrgencies> waiting_ VMEM_GUARDED_BY(mutex_);
  std::vector<FileId> stores_ VMEM_GUARDED_BY(mutex_);
};

}  // namespace

uint64_t cipher_engine_bytes(const EngineOptions& options) {
  return pieces_for(options) * kPieceBytes;
}

core::Status make_cipher_engine(const EngineOptions& options, std::unique_ptr<Engine> inner,
                                std::unique_ptr<Engine>* out) {
  std::unique_ptr<Cipher> cipher;
  if (core::Status s = Cipher::make(options.threads + 4, &cipher); !s.ok()) return s;
  auto engine = std::make_unique<CipherEngine>(std::move(inner), std::move(cipher), pieces_for(options));
  if (core::Status s = engine->start(); !s.ok()) return s;
  *out = std::move(engine);
  return {};
}

}  // namespace vmem::store
