// Encryption at rest: what reaches the file, what comes back, what fails, and where the key is
// stored.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/faulty_engine.h"
#include "store/cipher.h"
#include "store/cipher_engine.h"
#include "store_test_util.h"

namespace vmem::store::test {
namespace {

std::unique_ptr<Cipher> make_cipher() {
  std::unique_ptr<Cipher> cipher;
  const core::Status s = Cipher::make(2, &cipher);
  EXPECT_TRUE(s.ok() || s.code() == -ENOSYS) << s.text();
  return cipher;
}

#define NEEDS_LIBCRYPTO(cipher) \
  if ((cipher) == nullptr) GTEST_SKIP() << "libcrypto is not installed (scripts/setup.sh test)"

TEST(StoreCipher, WhatIsEncryptedIsOtherBytesAndComesBack) {
  const auto cipher = make_cipher();
  NEEDS_LIBCRYPTO(cipher);
  constexpr size_t kSize = 16 * core::kPage;
  std::vector<char> plain(kSize, 'p'), secret(kSize), back(kSize);
  ASSERT_TRUE(cipher->encrypt(3, 8 * core::kPage, plain.data(), kSize, secret.data()));
  // No sixteen bytes equal the plain ones, nor another sixteen: the place counts.
  std::set<std::string> units;
  for (size_t at = 0; at < kSize; at += 16) {
    EXPECT_NE(memcmp(secret.data() + at, plain.data(), 16), 0);
    EXPECT_TRUE(units.insert(std::string(secret.data() + at, 16)).second) << at;
  }
  ASSERT_TRUE(cipher->decrypt(3, 8 * core::kPage, secret.data(), kSize, back.data()));
  EXPECT_EQ(back, plain);
  // Only a part, and in place.
  memcpy(back.data(), secret.data(), kSize);
  ASSERT_TRUE(
      cipher->decrypt(3, 11 * core::kPage, back.data() + 3 * core::kPage, core::kPage, back.data() + 3 * core::kPage));
  EXPECT_EQ(memcmp(back.data() + 3 * core::kPage, plain.data(), core::kPage), 0);
  for (const auto& [file, offset] : {std::pair{4u, 8 * core::kPage}, {3u, 9 * core::kPage}}) {
    ASSERT_TRUE(cipher->decrypt(file, offset, secret.data(), kSize, back.data()));
    EXPECT_NE(back, plain) << "at another place";
  }
}

// IEEE 1619 defines AES-256-XTS; two ciphers of one process must differ.
TEST(StoreCipher, EveryCipherHasAKeyOfItsOwn) {
  const auto one = make_cipher(), other = make_cipher();
  NEEDS_LIBCRYPTO(one);
  const std::vector<char> plain(core::kPage, 'p');
  std::vector<char> a(core::kPage), b(core::kPage);
  ASSERT_TRUE(one->encrypt(0, 0, plain.data(), core::kPage, a.data()));
  ASSERT_TRUE(other->encrypt(0, 0, plain.data(), core::kPage, b.data()));
  EXPECT_NE(a, b);
}

// Returns a locked page that is neither dumped nor inherited, or nullptr. *count is set to the
// number of such pages.
const char* key_page(size_t* count = nullptr) {
  std::ifstream in("/proc/self/smaps");
  size_t at = 0, start = 0, end = 0, found = 0, pages = 0;
  for (std::string line; std::getline(in, line);) {
    if (sscanf(line.c_str(), "%zx-%zx ", &at, &end) == 2) start = at;
    if (line.rfind("VmFlags:", 0) == 0 && end - start == core::kPage && line.find(" lo") != std::string::npos &&
        line.find(" dd") != std::string::npos && line.find(" wf") != std::string::npos) {
      found = start;
      ++pages;
    }
  }
  if (count != nullptr) *count = pages;
  return reinterpret_cast<const char*>(found);
}

size_t key_pages() {
  size_t count = 0;
  key_page(&count);
  return count;
}

// The sanitizers' mlock does nothing and returns 0.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kLocks = false;
#else
constexpr bool kLocks = true;
#endif

TEST(StoreCipher, TheKeyIsLockedAndNeitherDumpedNorInherited) {
  if (!kLocks) GTEST_SKIP() << "a sanitizer's mlock locks nothing";
  const size_t before = key_pages();
  auto cipher = make_cipher();
  NEEDS_LIBCRYPTO(cipher);
  EXPECT_EQ(key_pages(), before + 1);
  cipher.reset();
  EXPECT_EQ(key_pages(), before);
}

// Elsewhere it could be dumped, swapped and inherited. Contexts that were never used count.
TEST(StoreCipher, NoPartOfTheKeyLiesAnywhereElse) {
  if (!kLocks) GTEST_SKIP() << "a sanitizer's mlock locks nothing";
  const auto cipher = make_cipher();
  NEEDS_LIBCRYPTO(cipher);
  const char* const key = key_page();
  ASSERT_NE(key, nullptr);
  const std::vector<char> plain(core::kPage, 'p');
  std::vector<char> secret(core::kPage), back(core::kPage);
  for (const char* when : {"before use", "after use"}) {
    for (size_t part = 0; part < 64; part += 16)
      EXPECT_EQ(mapping_that_holds(key + part, 16, "wf"), "") << when << ", bytes from " << part;
    ASSERT_TRUE(cipher->encrypt(3, 0, plain.data(), core::kPage, secret.data()));
    ASSERT_TRUE(cipher->decrypt(3, 0, secret.data(), core::kPage, back.data()));
  }
}

TEST(StoreCipher, WithoutAPageToLockThereIsNoCipher) {
  if (!kLocks) GTEST_SKIP() << "a sanitizer's mlock locks nothing";
  if (make_cipher() == nullptr) GTEST_SKIP() << "libcrypto is not installed (scripts/setup.sh test)";
  const pid_t child = fork();
  if (child == 0) {
    // An ordinary user who may lock no memory; root may lock whatever the limit.
    const rlimit none{0, 0};
    if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (geteuid() == 0 && setuid(61601) != 0)) _exit(2);
    std::unique_ptr<Cipher> cipher;
    _exit(Cipher::make(1, &cipher).code() == -EPERM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

bool all_good(Batch& batch) {
  batch.wait();
  return std::all_of(batch.ios().begin(), batch.ios().end(),
                     [](const Io& io) { return io.result == 0 && io.transferred == io.size; });
}

class StoreCipherEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    options_.depth = 4;
    options_.threads = 2;
    std::unique_ptr<Engine> inner;
    core::Status s = make_named_engine(GetParam(), options_.depth, options_.threads, &inner);
    if (s.code() == -EPERM || s.code() == -ENOSYS) GTEST_SKIP() << "io_uring is not permitted here";
    ASSERT_TRUE(s.ok()) << s.text();
    faulty_ = dynamic_cast<FaultyEngine*>(inner.get());
    s = make_cipher_engine(options_, std::move(inner), &engine_);
    if (s.code() == -ENOSYS) GTEST_SKIP() << s.text();
    ASSERT_TRUE(s.ok()) << s.text();
  }
  EngineOptions options_;
  std::unique_ptr<Engine> engine_;
  FaultyEngine* faulty_ = nullptr;
};

TEST_P(StoreCipherEngine, StoresAreEncryptedAndOtherFilesAreNot) {
  if (IsSkipped()) return;
  constexpr size_t kBytes = (size_t{20} << 20) + 3 * core::kPage;  // more than there are buffers for
  TempFile store(kBytes, true), plain(kBytes, true);
  FileId s = 0, p = 0;
  ASSERT_TRUE(engine_->add_store(store.fd(), &s).ok());
  ASSERT_TRUE(engine_->add_file(plain.fd(), &p).ok());
  Buffer written(kBytes), read(kBytes), on_disk(kBytes);
  std::mt19937_64 random(11);
  written.fill(random);
  const std::vector<char> before(written.data(), written.data() + kBytes);
  for (const FileId id : {s, p}) {
    for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
      char* base = op == Io::Op::write ? written.data() : read.data();
      memset(read.data(), 0, op == Io::Op::read ? kBytes : 0);
      Batch batch;
      for (size_t at = 0; at < kBytes;) {
        const size_t pages = random() % 5 == 0 ? 300 : 1 + random() % 20;  // of one piece and of several
        const size_t size = std::min(kBytes - at, pages * core::kPage);
        batch.add(op, id, at, base + at, size).urgency = static_cast<core::Urgency>(random() % core::kUrgencies);
        at += size;
      }
      batch.submit(*engine_);
      EXPECT_TRUE(all_good(batch));
    }
    EXPECT_EQ(memcmp(read.data(), before.data(), kBytes), 0);
    EXPECT_EQ(memcmp(written.data(), before.data(), kBytes), 0) << "the program's own bytes were changed";
  }
  for (const auto& [fd, same] : {std::pair{store.fd(), false}, {plain.fd(), true}}) {
    ASSERT_EQ(pread(fd, on_disk.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
    size_t alike = 0;
    for (size_t at = 0; at < kBytes; at += 16) alike += memcmp(on_disk.data() + at, before.data() + at, 16) == 0;
    EXPECT_EQ(alike, same ? kBytes / 16 : 0u);
  }
}

// The parts of a long read are decrypted when all have arrived: no progress is reported before.
TEST_P(StoreCipherEngine, OfALongReadNothingIsToldThatIsStillEncrypted) {
  if (IsSkipped()) return;
  constexpr size_t kBytes = size_t{9} << 20;
  TempFile store(kBytes, true), plain(kBytes, true);
  FileId s = 0, p = 0;
  ASSERT_TRUE(engine_->add_store(store.fd(), &s).ok());
  ASSERT_TRUE(engine_->add_file(plain.fd(), &p).ok());
  Buffer bytes(kBytes), read(kBytes);
  std::mt19937_64 random(12);
  bytes.fill(random);
  for (const FileId id : {s, p}) {
    Batch out;
    out.add(Io::Op::write, id, 0, bytes.data(), kBytes);
    out.submit(*engine_);
    ASSERT_TRUE(all_good(out));
    Batch in;
    Io& io = in.add(Io::Op::read, id, 0, read.data(), kBytes);
    static const char* expected;
    static std::atomic<int> wrong;
    expected = bytes.data();
    wrong = 0;
    const auto told = [](Io& at, size_t come) { wrong += memcmp(at.buffer, expected, come) != 0; };
    io.progress = told;
    in.submit(*engine_);
    ASSERT_TRUE(all_good(in));
    EXPECT_EQ(memcmp(read.data(), bytes.data(), kBytes), 0);
    EXPECT_EQ(wrong, 0);
    EXPECT_NE(io.progress, nullptr) << "the caller's";
  }
}

TEST_P(StoreCipherEngine, AByteThatSomebodyChangedSpoilsItsPageAlone) {
  if (IsSkipped()) return;
  constexpr size_t kBytes = 8 * core::kPage;
  TempFile store(kBytes, true);
  FileId id = 0;
  ASSERT_TRUE(engine_->add_store(store.fd(), &id).ok());
  Buffer bytes(kBytes), read(kBytes);
  memset(bytes.data(), 7, kBytes);
  Batch out, in;
  out.add(Io::Op::write, id, 0, bytes.data(), kBytes);
  out.submit(*engine_);
  ASSERT_TRUE(all_good(out));
  Buffer page(core::kPage);
  ASSERT_EQ(pread(store.fd(), page.data(), core::kPage, 5 * core::kPage), static_cast<ssize_t>(core::kPage));
  page.data()[100] = static_cast<char>(page.data()[100] ^ 1);
  ASSERT_EQ(pwrite(store.fd(), page.data(), core::kPage, 5 * core::kPage), static_cast<ssize_t>(core::kPage));
  in.add(Io::Op::read, id, 0, read.data(), kBytes);
  in.submit(*engine_);
  ASSERT_TRUE(all_good(in));
  for (size_t at = 0; at < kBytes; at += core::kPage)
    EXPECT_EQ(memcmp(read.data() + at, bytes.data() + at, core::kPage) == 0, at != 5 * core::kPage) << at;
}

TEST_P(StoreCipherEngine, AnErrorOfOnePartIsTheWholeWritesAndTheNextGoesOn) {
  if (IsSkipped()) return;
  if (faulty_ == nullptr) GTEST_SKIP() << "needs an engine that fails on demand";
  constexpr size_t kBytes = size_t{1} << 20;
  TempFile store(kBytes, true);
  FileId id = 0;
  ASSERT_TRUE(engine_->add_store(store.fd(), &id).ok());
  Fault fault;
  fault.op = Io::Op::write;
  fault.error = ENOSPC;
  fault.nth = 2;
  const auto rule = faulty_->add_rule(fault);
  Buffer bytes(kBytes), read(kBytes);
  memset(bytes.data(), 7, kBytes);
  Batch failed;
  failed.add(Io::Op::write, id, 0, bytes.data(), kBytes);
  failed.submit(*engine_);
  failed.wait();
  EXPECT_EQ(failed.ios()[0].result, -ENOSPC);
  EXPECT_EQ(faulty_->fired(rule), 1u);
  faulty_->clear_rules();
  for (const Io::Op op : {Io::Op::write, Io::Op::read}) {
    Batch batch;
    batch.add(op, id, 0, op == Io::Op::write ? bytes.data() : read.data(), kBytes);
    batch.submit(*engine_);
    EXPECT_TRUE(all_good(batch));
  }
  EXPECT_EQ(memcmp(read.data(), bytes.data(), kBytes), 0);
}

size_t bytes_left_to_nobody() {
  std::ifstream in("/proc/self/smaps");
  size_t kib = 0, bytes = 0;
  for (std::string line; std::getline(in, line);) {
    sscanf(line.c_str(), "Size: %zu kB", &kib);
    if (line.rfind("VmFlags:", 0) == 0 && line.find(" dd") != std::string::npos &&
        line.find(" dc") != std::string::npos)
      bytes += kib << 10;
  }
  return bytes;
}

// The buffers hold contents of regions in plain text for a moment.
TEST_P(StoreCipherEngine, ItsBuffersAreNeitherDumpedNorInherited) {
  if (IsSkipped()) return;
  const size_t with = bytes_left_to_nobody();
  engine_.reset();
  EXPECT_EQ(with - bytes_left_to_nobody(), cipher_engine_bytes(options_));
}

INSTANTIATE_TEST_SUITE_P(Backends, StoreCipherEngine, testing::ValuesIn(engine_names()),
                         [](const auto& body) { return std::string(body.param); });

}  // namespace
}  // namespace vmem::store::test
