// An engine that encrypts writes to stores and decrypts reads from them. Other files pass through.
//
// - A read is decrypted in place before its done().
// - A write must not change the submitter's bytes, which may be the program's own pages. It goes
//   out in pieces, each encrypted into its own buffer, as many at a time as there are buffers.
// - Writes wait for buffers in order of urgency, and continue from the done() of a piece.
// - Nothing is allocated after make_cipher_engine().
#pragma once

#include <memory>

#include "store/engine.h"

namespace vmem::store {

// Bytes of its buffers.
uint64_t cipher_engine_bytes(const EngineOptions& options);

// Takes over `inner`. Returns the errors of Cipher::make().
core::Status make_cipher_engine(const EngineOptions& options, std::unique_ptr<Engine> inner,
                                std::unique_ptr<Engine>* out);

}  // namespace vmem::store
