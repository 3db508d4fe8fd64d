#include "store/cipher.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/types.h"

namespace vmem::store {

namespace {

constexpr size_t kKeyBytes = 64;  // two keys of 256 bits
constexpr size_t kPageBytes = core::kPage;
constexpr size_t kPlaceBytes = 16;

bool random_bytes(unsigned char* to, size_t size) {
  for (size_t have = 0; have < size;) {
    const ssize_t n = getrandom(to + have, size - have, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    have += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

// The calls of libcrypto in use; the same in 1.1 and 3.
struct Cipher::Library {
  void* (*new_context)();
  void (*free_context)(void*);
  const void* (*aes_256_xts)();
  int (*init)(void* context, const void* cipher, void* engine, const unsigned char* key, const unsigned char* iv,
              int encrypting);
  int (*update)(void* context, unsigned char* out, int* out_size, const unsigned char* in, int in_size);
};

// The library is never closed: threads may be in it while the process exits.
const Cipher::Library* Cipher::library(core::Status* why) {
  static constinit std::atomic<const Library*> loaded{nullptr};
  if (const Library* const known = loaded.load(); known != nullptr) return known;
  void* handle = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    *why =
        core::error(ENOSYS, "encryption=on needs OpenSSL's libcrypto.so.3, which is not installed (package libssl3)");
    return nullptr;
  }
  Library found{};
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(handle, name));
    return call != nullptr;
  };
  if (!find(found.new_context, "EVP_CIPHER_CTX_new") || !find(found.free_context, "EVP_CIPHER_CTX_free") ||
      !find(found.aes_256_xts, "EVP_aes_256_xts") || !find(found.init, "EVP_CipherInit_ex") ||
      !find(found.update, "EVP_CipherUpdate")) {
    *why = core::error(ENOSYS, "encryption=on: the libcrypto that is installed has no AES-256-XTS");
    return nullptr;
  }
  const Library* known = nullptr;
  auto mine = std::make_unique<const Library>(found);
  return loaded.compare_exchange_strong(known, mine.get()) ? mine.release() : known;
}

core::Status Cipher::make(unsigned workers, std::unique_ptr<Cipher>* out) {
  std::unique_ptr<Cipher> self(new Cipher);
  core::Status why;
  self->library_ = library(&why);
  if (self->library_ == nullptr) return why;
  void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return core::system_error(errno, "no memory for a key");
  self->key_ = static_cast<unsigned char*>(page);
  if (mlock(page, kPageBytes) != 0 || madvise(page, kPageBytes, MADV_DONTDUMP) != 0) {
    return core::error(EPERM, "encryption=on: a page for the key cannot be locked into memory (%s); raise `ulimit -l`",
                       strerrordesc_np(errno));
  }
  (void)madvise(page, kPageBytes, MADV_WIPEONFORK);  // a child has no regions
  if (!random_bytes(self->key_, 2 * kKeyBytes)) return core::system_error(errno, "the kernel gives no key");
  // A context keeps its initial tweak in plain memory until it is first used.
  constexpr unsigned char kNowhere[kPlaceBytes] = {};
  workers = std::max(workers, 1u);
  self->workers_ = std::make_unique<Worker[]>(workers);
  self->count_ = workers;
  const Library& lib = *self->library_;
  for (unsigned i = 0; i < self->count_; ++i) {
    Worker& worker = self->workers_[i];
    const core::MutexLock lock(worker.mutex);
    for (int way = 0; way < 2; ++way) {
      void*& context = worker.context[way];
      context = lib.new_context();
      if (context == nullptr ||
          lib.init(context, lib.aes_256_xts(), nullptr, self->key_ + kKeyBytes, kNowhere, way) != 1)
        return core::error(ENOSYS, "encryption=on: libcrypto cannot be used for AES-256-XTS (is it restricted?)");
    }
  }
  *out = std::move(self);
  return {};
}

Cipher::~Cipher() {
  for (unsigned i = 0; i < count_; ++i) {
    for (void* context : workers_[i].context) {
      if (context != nullptr) library_->free_context(context);
    }
  }
  if (key_ == nullptr) return;
  explicit_bzero(key_, kPageBytes);
  munmap(key_, kPageBytes);
}

bool Cipher::run(int encrypting, uint32_t file, uint64_t offset, const void* in, size_t size, void* out) {
  for (unsigned i = 0; i < count_; ++i) {
    Worker& worker = workers_[i];
    if (!worker.mutex.try_lock()) continue;
    const bool good = work(worker, encrypting, file, offset, in, size, out);
    worker.mutex.unlock();
    return good;
  }
  Worker& first = workers_[0];
  const core::MutexLock lock(first.mutex);
  return work(first, encrypting, file, offset, in, size, out);
}

bool Cipher::work(Worker& worker, int encrypting, uint32_t file, uint64_t offset, const void* in, size_t size,
                  void* out) {
  void* const context = worker.context[encrypting];
  const auto* from = static_cast<const unsigned char*>(in);
  auto* to = static_cast<unsigned char*>(out);
  bool good = library_->init(context, nullptr, nullptr, key_, nullptr, encrypting) == 1;
  for (size_t at = 0; at < size && good; at += kPageBytes) {
    unsigned char place[kPlaceBytes] = {};
    const uint64_t page = (offset + at) / kPageBytes;
    memcpy(place, &page, sizeof page);
    memcpy(place + 8, &file, sizeof file);
    int done = 0;
    good = library_->init(context, nullptr, nullptr, nullptr, place, encrypting) == 1 &&
           library_->update(context, to + at, &done, from + at, kPageBytes) == 1 &&
           done == static_cast<int>(kPageBytes);
  }
  // Overwrite the state that was derived from the key.
  return library_->init(context, nullptr, nullptr, key_ + kKeyBytes, nullptr, encrypting) == 1 && good;
}

}  // namespace vmem::store
