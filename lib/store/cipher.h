// AES-256-XTS over pages of a store, by OpenSSL's libcrypto, with the processor's AES instructions
// if it has them. libcrypto is loaded when the first cipher is made; a program without encryption
// does not need it.
//
// - The key comes from the kernel and dies with the cipher. It is never written anywhere.
// - Its page is locked into memory, left out of core dumps and wiped in forked children.
// - State that libcrypto derives from the key lies in a context's ordinary memory during a call,
//   and is overwritten before the call returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/mutex.h"
#include "core/status.h"

namespace vmem::store {

class Cipher {
 public:
  // workers: calls that may run at the same time without waiting. Returns -ENOSYS without
  // libcrypto, or -EPERM if no page can be locked.
  static core::Status make(unsigned workers, std::unique_ptr<Cipher>* out);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // Encrypts or decrypts whole pages (4 KiB), the first of which lies at `offset` of file `file`.
  // The place is part of the encryption: equal pages differ in the store. Any thread; allocates
  // nothing. Returns false if libcrypto refuses; the contents of `out` are undefined then. `in` may
  // be `out`.
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
  unsigned char* key_ = nullptr;  // one page: the key, then the dummy key of idle contexts
  std::unique_ptr<Worker[]> workers_;
  unsigned count_ = 0;
};

}  // namespace vmem::store
