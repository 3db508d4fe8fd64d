// AES-256-XTS over pages of a store, by OpenSSL's libcrypto (hardware instructions where the processor has them), which
// is loaded when the first cipher is made: who stores in plain text needs none.
//
// The key is drawn from the kernel, lives in one page that is locked into memory, left out of core dumps and wiped in
// forked children, and is gone with the cipher. Nobody ever writes it anywhere. What libcrypto derives from it lies in
// ordinary memory of a context while that works, and is overwritten before the call returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/mutex.h"
#include "core/status.h"

namespace vmem::store {

class Cipher {
 public:
  // workers: calls that go on at the same time without waiting for each other. -ENOSYS: there is no libcrypto. -EPERM:
  // no page can be locked.
  static core::Status make(unsigned workers, std::unique_ptr<Cipher>* out);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // Whole pages (4 KiB), the first of which lies at `offset` of file `file`: the same bytes look different at another
  // place. Any thread; allocates nothing. False: libcrypto refused, and what is in `out` means nothing. `in` may be
  // `out`.
  bool encrypt(uint32_t file, uint64_t offset, const void* in, size_t size, void* out) {
    return run(1, file, offset, in, size, out);
  }
  bool decrypt(uint32_t file, uint64_t offset, const void* in, size_t size, void* out) {
    return run(0, file, offset, in, size, out);
  }

 private:
  struct Library;
  struct Worker {
    core::Mutex mutex;
    void* context[2] VMEM_GUARDED_BY(mutex) = {nullptr, nullptr};  // decrypt, encrypt
  };

  Cipher() = default;
  bool run(int encrypting, uint32_t file, uint64_t offset, const void* in, size_t size, void* out);
  bool work(Worker& worker, int encrypting, uint32_t file, uint64_t offset, const void* in, size_t size, void* out)
      VMEM_REQUIRES(worker.mutex);

  static const Library* library(core::Status* why);
  const Library* library_ = nullptr;
  unsigned char* key_ = nullptr;  // a page: the key, and behind it what takes its place in a context that rests
  std::unique_ptr<Worker[]> workers_;
  unsigned count_ = 0;
};

}  // namespace vmem::store
