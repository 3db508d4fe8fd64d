#include "store/codec.h"

#include <lz4.h>
#include <pthread.h>
#include <sys/mman.h>

#define ZSTD_STATIC_LINKING_ONLY  // for ZSTD_customMem
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "core/mutex.h"

namespace vmem::store {

namespace {

// Start of a compressed image. The rest, up to the page, is zero, so that equal blocks make equal
// images.
struct ImageHeader {
  uint32_t magic;   // kMagic
  uint32_t length;  // bytes of compressed data that follow
};
constexpr uint32_t kMagic = 0x315a4d56;  // "VMZ1"
constexpr int kZstdLevel = 1;

// Memory for zstd, which keeps pieces of recent blocks: no core dump has it. zstd frees without a
// size, so the size is stored in front.
constexpr size_t kInFront = 64;

void* undumped_memory(void*, size_t bytes) {
  const size_t size = core::round_up(bytes + kInFront, core::kPage);
  void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, size, MADV_DONTDUMP);
  memcpy(at, &size, sizeof size);
  return static_cast<std::byte*>(at) + kInFront;
}

void free_undumped(void*, void* bytes) {
  if (bytes == nullptr) return;
  std::byte* const at = static_cast<std::byte*>(bytes) - kInFront;
  size_t size = 0;
  memcpy(&size, at, sizeof size);
  munmap(at, size);
}

constexpr ZSTD_customMem kUndumped = {undumped_memory, free_undumped, nullptr};

// A thread's compression contexts, made at first use and freed when it ends. A thread_local
// destructor would not do: the main thread's would run when exit() begins, before the last blocks
// are compressed.
struct Contexts {
  ZSTD_CCtx* zstd_in = nullptr;
  ZSTD_DCtx* zstd_out = nullptr;
  LZ4_stream_t* lz4 = nullptr;
};
constinit thread_local Contexts contexts;

void free_contexts(void* mine) {
  auto* c = static_cast<Contexts*>(mine);
  ZSTD_freeCCtx(c->zstd_in);
  ZSTD_freeDCtx(c->zstd_out);
  LZ4_freeStream(c->lz4);
  *c = {};  // a later destructor of this thread may need one again
}

// A function-local static would have a guard, and a child could find it held by a thread that it
// does not have.
bool have_key(pthread_key_t* key) {
  static constinit std::atomic<int64_t> known{-1};
  int64_t one = known.load();
  if (one < 0) {
    pthread_key_t made{};
    if (pthread_key_create(&made, free_contexts) != 0) return false;
    if (known.compare_exchange_strong(one, made)) {
      one = made;
    } else {
      pthread_key_delete(made);
    }
  }
  *key = static_cast<pthread_key_t>(one);
  return true;
}

// Without a key, the contexts leak when their thread ends.
template <typename T>
T* keep(T*& slot, T* made) {
  pthread_key_t end_of_thread{};
  slot = made;
  if (made != nullptr && have_key(&end_of_thread)) pthread_setspecific(end_of_thread, &contexts);
  return made;
}

// Returns nullptr without memory.
ZSTD_CCtx* zstd_compressor() {
  return contexts.zstd_in != nullptr ? contexts.zstd_in : keep(contexts.zstd_in, ZSTD_createCCtx_advanced(kUndumped));
}

ZSTD_DCtx* zstd_decompressor() {
  return contexts.zstd_out != nullptr ? contexts.zstd_out
                                      : keep(contexts.zstd_out, ZSTD_createDCtx_advanced(kUndumped));
}

// For a thread without memory for its own: compressed blocks must always be readable.
constinit core::Mutex spare_mutex;                                       // held while the spare is in use
constinit ZSTD_DCtx* zstd_spare VMEM_GUARDED_BY(spare_mutex) = nullptr;  // never freed

LZ4_stream_t* lz4_state() {
  return contexts.lz4 != nullptr ? contexts.lz4 : keep(contexts.lz4, LZ4_createStream());
}

// Returns the bytes written to `out`, or 0 if they would not fit.
size_t compress(Codec codec, const void* block, size_t size, char* out, size_t capacity) {
  if (codec == Codec::lz4) {
    LZ4_stream_t* state = lz4_state();
    if (state == nullptr) return 0;
    const int n = LZ4_compress_fast_extState(state, static_cast<const char*>(block), out, static_cast<int>(size),
                                             static_cast<int>(capacity), 1);
    return n > 0 ? static_cast<size_t>(n) : 0;
  }
  ZSTD_CCtx* context = zstd_compressor();
  if (context == nullptr) return 0;
  const size_t n = ZSTD_compressCCtx(context, out, capacity, block, size, kZstdLevel);
  return ZSTD_isError(n) ? 0 : n;
}

}  // namespace

void renew_codec() VMEM_LOCKS(no_thread_safety_analysis) {
  new (&spare_mutex) core::Mutex;
  zstd_spare = nullptr;
}

core::Status prepare_codec(Codec codec) {
  if (codec != Codec::zstd) return {};
  const core::MutexLock lock(spare_mutex);
  if (zstd_spare == nullptr) zstd_spare = ZSTD_createDCtx_advanced(kUndumped);
  return zstd_spare != nullptr ? core::Status() : core::error(ENOMEM, "no memory to decompress blocks with (zstd)");
}

void encode(Codec wanted, const void* block, size_t size, void* out, size_t* stored, Codec* codec) {
  *stored = size;
  *codec = Codec::raw;
  if (wanted != Codec::lz4 && wanted != Codec::zstd) return;
  if (size <= core::kPage || size > LZ4_MAX_INPUT_SIZE) return;

  auto* bytes = static_cast<char*>(out);
  const size_t limit = core::round_down(size - 1, core::kPage);  // compression must save at least one page
  const size_t n = compress(wanted, block, size, bytes + sizeof(ImageHeader), limit - sizeof(ImageHeader));
  if (n == 0) return;
  const ImageHeader header{kMagic, static_cast<uint32_t>(n)};
  memcpy(bytes, &header, sizeof header);
  const size_t used = sizeof header + n;
  *stored = core::round_up(used, core::kPage);
  *codec = wanted;
  memset(bytes + used, 0, *stored - used);
}

core::Status decode(Codec codec, const void* in, size_t stored, void* block, size_t size) {
  if (codec == Codec::raw) {
    if (stored != size) {
      return core::error(EIO, "a raw block of %zu bytes has an image of %zu bytes: the store's index is damaged", size,
                         stored);
    }
    if (in != block) memmove(block, in, size);
    return {};
  }
  if (codec != Codec::lz4 && codec != Codec::zstd) {
    return core::error(EIO, "unknown compression %u of a stored block", static_cast<unsigned>(codec));
  }
  ImageHeader header{};
  if (stored >= sizeof header) memcpy(&header, in, sizeof header);
  if (header.magic != kMagic || header.length == 0 || header.length > stored - sizeof header) {
    return core::error(EIO, "a compressed image of %zu bytes has a damaged header (magic %08x, length %u)", stored,
                       header.magic, header.length);
  }
  const char* data = static_cast<const char*>(in) + sizeof header;
  size_t got = 0;
  if (codec == Codec::lz4) {
    const int n = LZ4_decompress_safe(data, static_cast<char*>(block), static_cast<int>(header.length),
                                      static_cast<int>(std::min<size_t>(size, LZ4_MAX_INPUT_SIZE)));
    got = n > 0 ? static_cast<size_t>(n) : 0;
  } else {
    ZSTD_DCtx* context = zstd_decompressor();
    size_t n = 0;
    if (context != nullptr) {
      n = ZSTD_decompressDCtx(context, block, size, data, header.length);
    } else {
      const core::MutexLock lock(spare_mutex);
      if (zstd_spare == nullptr) return core::error(ENOMEM, "no memory to decompress a block of %zu bytes", size);
      n = ZSTD_decompressDCtx(zstd_spare, block, size, data, header.length);
    }
    got = ZSTD_isError(n) ? 0 : n;
  }
  if (got != size) {
    return core::error(EIO, "a compressed image gave %zu bytes instead of %zu: it is damaged", got, size);
  }
  return {};
}

}  // namespace vmem::store
