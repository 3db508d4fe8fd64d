// An engine that encrypts what goes to stores and decrypts what comes from there; other files pass through.
//
// A read is decrypted in place, before its done(). A write must not change the submitter's bytes, which may be the
// program's own pages: it goes out in pieces, each encrypted into a buffer of its own, as many at a time as there are
// buffers. What waits for a buffer waits in order of urgency, and goes on from the done() of a piece. Nothing is
// allocated after make_cipher_engine().
#pragma once

#include <memory>

#include "store/io.h"

namespace vmem::store {

// Bytes of buffers that it holds.
uint64_t cipher_engine_bytes(const EngineOptions& options);

// Takes `inner` over. -ENOSYS, -EPERM: Cipher::make().
core::Status make_cipher_engine(const EngineOptions& options, std::unique_ptr<Engine> inner,
                                std::unique_ptr<Engine>* out);

}  // namespace vmem::store
