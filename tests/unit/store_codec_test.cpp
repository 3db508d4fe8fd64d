// Digests are XXH3-128 on every processor; compression loses nothing, and damaged images are
// errors.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/codec.h"
#include "store/digest.h"
#include "store_test_util.h"

namespace vmem::store {
namespace {

using core::kPage;

std::vector<char> random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> out(size);
  for (char& byte : out) byte = static_cast<char>(random());
  return out;
}

// Compresses to about a third.
std::vector<char> text_like(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> out;
  while (out.size() < size) {
    const uint64_t word = random() % 40;
    for (int n = 0; n < 16 + static_cast<int>(word % 9); ++n)
      out.push_back(static_cast<char>('a' + (word * 7 + n) % 26));
  }
  out.resize(size);
  return out;
}

core::Digest reference(const void* bytes, size_t size) {
  const digest_kernel::Secret& secret = digest_kernel::secret();
  const XXH128_hash_t h = XXH3_128bits_withSecret(bytes, size, secret.data(), secret.size());
  return {h.low64, h.high64};
}

TEST(DigestTest, IsXxh3OfTheLibraryForEveryKernelAndLength) {
  const std::vector<char> bytes = random_bytes(300000, 1);
  for (const size_t size : {0ul, 1ul, 3ul, 4ul, 8ul, 9ul, 16ul, 17ul, 128ul, 129ul, 240ul, 241ul, 1023ul, 1024ul,
                            1025ul, 4096ul, 65536ul, 65537ul, 299990ul}) {
    const core::Digest right = reference(bytes.data() + 5, size);
    EXPECT_EQ(digest(bytes.data() + 5, size), right) << size;
    EXPECT_EQ(digest_kernel::kPortable.hash(bytes.data() + 5, size, digest_kernel::secret()), right) << size;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      EXPECT_EQ(digest_kernel::kAvx2.hash(bytes.data() + 5, size, digest_kernel::secret()), right) << size;
    }
#endif
  }
}

TEST(DigestTest, WhoDoesNotKnowTheSecretCannotTellADigest) {
  const std::vector<char> bytes = random_bytes(65536, 3), zeros(65536);
  for (const std::vector<char>& block : {bytes, zeros}) {
    const XXH128_hash_t guess = XXH3_128bits(block.data(), block.size());
    EXPECT_FALSE(digest(block.data(), block.size()) == (core::Digest{guess.low64, guess.high64}));
  }
  EXPECT_FALSE(zero_digest(65536) == zero_digest(131072));
  // Another process draws another seed.
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(fds[1], STDOUT_FILENO);
    execl("/proc/self/exe", "unit_tests", "--gtest_filter=DigestChild.DISABLED_Prints", "--gtest_brief=1",
          "--gtest_also_run_disabled_tests", nullptr);
    _exit(98);
  }
  close(fds[1]);
  std::string said;
  char some[512];
  for (ssize_t n; (n = read(fds[0], some, sizeof some)) > 0;) said.append(some, static_cast<size_t>(n));
  close(fds[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 0);
  const size_t at = said.find("digest ");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_NE(strtoull(said.c_str() + at + 7, nullptr, 16), zero_digest(4096).lo) << said;
}

// Run by the test above.
TEST(DigestChild, DISABLED_Prints) {
  printf("digest %016llx\n", static_cast<unsigned long long>(zero_digest(4096).lo));
}

TEST(DigestTest, PieceByPieceIsTheSame) {
  const std::vector<char> bytes = random_bytes(1 << 20, 2);
  std::mt19937_64 random(3);
  Digester digester;
  for (int round = 0; round < 8; ++round) {
    digester.reset();
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(bytes.size() - at, random() % (round < 4 ? 700 : 300000));
      digester.update(bytes.data() + at, n);
      at += n;
    }
    EXPECT_EQ(digester.finish(), reference(bytes.data(), bytes.size()));
  }
}

TEST(DigestTest, ZeroDigestIsThatOfZeros) {
  for (const size_t size : {size_t{1}, kPage, size_t{65536}, size_t{65537}, core::kHugePage}) {
    const std::vector<char> zeros(size);
    EXPECT_EQ(zero_digest(size), reference(zeros.data(), size)) << size;
    EXPECT_EQ(zero_digest(size), zero_digest(size));
  }
  for (size_t size = 1; size < 200; ++size) EXPECT_EQ(zero_digest(size * 8), zero_digest(size * 8));
}

class CodecTest : public testing::TestWithParam<Codec> {};

TEST_P(CodecTest, WhatCompressesComesBackAndIsSmallerByWholePages) {
  for (const size_t size : {2 * kPage, 3 * kPage, size_t{65536}, core::kHugePage, size_t{5} << 20}) {
    const std::vector<char> block = text_like(size, size);
    std::vector<char> out(size + 64, '\x77'), back(size);
    size_t stored = 0;
    Codec codec = Codec::raw;
    encode(GetParam(), block.data(), size, out.data(), &stored, &codec);
    ASSERT_EQ(codec, GetParam()) << size;
    EXPECT_LT(stored, size);
    EXPECT_EQ(stored % kPage, 0u);
    for (size_t n = size; n < out.size(); ++n) EXPECT_EQ(out[n], '\x77') << "wrote beyond the block's size";
    ASSERT_TRUE(decode(codec, out.data(), stored, back.data(), size).ok());
    EXPECT_EQ(back, block);
    std::vector<char> second(size + 64, '\x11');
    size_t stored_again = 0;
    encode(GetParam(), block.data(), size, second.data(), &stored_again, &codec);
    ASSERT_EQ(stored_again, stored);
    EXPECT_EQ(memcmp(out.data(), second.data(), stored), 0) << "equal blocks make equal images";
  }
}

TEST_P(CodecTest, WhatDoesNotPayStaysRaw) {
  std::vector<char> almost = random_bytes(8 * kPage, 9);
  memset(almost.data(), 0, 200);  // gains bytes but no page
  for (const auto& block :
       {random_bytes(core::kHugePage, 8), almost, std::vector<char>(kPage), random_bytes(kPage, 4)}) {
    std::vector<char> out(block.size());
    size_t stored = 0;
    Codec codec = Codec::zstd;
    encode(GetParam(), block.data(), block.size(), out.data(), &stored, &codec);
    EXPECT_EQ(codec, Codec::raw);
    EXPECT_EQ(stored, block.size());
  }
}

TEST_P(CodecTest, ADamagedImageIsAnErrorOrDecodesToSomethingTheDigestSees) {
  const std::vector<char> block = text_like(16 * kPage, 5);
  std::vector<char> image(block.size());
  size_t stored = 0;
  Codec codec = Codec::raw;
  encode(GetParam(), block.data(), block.size(), image.data(), &stored, &codec);
  ASSERT_EQ(codec, GetParam());
  std::mt19937_64 random(6);
  int refused = 0;
  for (int n = 0; n < 3000; ++n) {
    // Exactly as long as stored, so that the sanitizers see a read beyond it.
    std::vector<char> bad(image.begin(), image.begin() + static_cast<ptrdiff_t>(stored));
    const int hits = 1 + static_cast<int>(random() % 8);
    for (int hit = 0; hit < hits; ++hit) {
      bad[random() % (n % 3 == 0 ? 32 : bad.size())] ^= static_cast<char>(1 + random() % 255);
    }
    std::vector<char> back(block.size());
    const core::Status status = decode(codec, bad.data(), bad.size(), back.data(), back.size());
    if (!status.ok()) {
      EXPECT_EQ(status.code(), -EIO);
      ++refused;
    }
  }
  EXPECT_GT(refused, 300);
}

TEST_P(CodecTest, WrongSizesAreErrors) {
  const std::vector<char> block = text_like(16 * kPage, 5);
  std::vector<char> image(block.size()), back(2 * block.size());
  size_t stored = 0;
  Codec codec = Codec::raw;
  encode(GetParam(), block.data(), block.size(), image.data(), &stored, &codec);
  EXPECT_EQ(decode(codec, image.data(), stored, back.data(), block.size() - kPage).code(), -EIO);
  EXPECT_EQ(decode(codec, image.data(), stored, back.data(), block.size() + kPage).code(), -EIO);
  EXPECT_EQ(decode(codec, image.data(), 4, back.data(), block.size()).code(), -EIO);
  EXPECT_EQ(decode(codec, image.data(), 0, back.data(), block.size()).code(), -EIO);
  const std::vector<char> zeros(stored);
  EXPECT_EQ(decode(codec, zeros.data(), stored, back.data(), block.size()).code(), -EIO);
}

TEST_P(CodecTest, ThreadsDoNotShareContexts) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&wrong, t] {
      for (uint64_t round = 0; round < 20; ++round) {
        const std::vector<char> block = text_like(65536, 100 * t + round);
        std::vector<char> image(block.size()), back(block.size());
        size_t stored = 0;
        Codec codec = Codec::raw;
        encode(GetParam(), block.data(), block.size(), image.data(), &stored, &codec);
        wrong += !decode(codec, image.data(), stored, back.data(), back.size()).ok() || back != block;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

// Regions are not in core dumps, so their bytes must not be elsewhere in memory.
TEST_P(CodecTest, NothingOfABlockStaysInMemoryThatIsDumped) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's memory is too large to be looked through, and keeps what was freed";
#endif
  constexpr size_t kSize = 256 << 10;
  void* const memory = mmap(nullptr, 3 * kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(madvise(memory, 3 * kSize, MADV_DONTDUMP), 0);
  auto *block = static_cast<char*>(memory), *image = block + kSize, *back = image + kSize;
  std::mt19937_64 random(5);
  for (size_t at = 0; at < kSize; at += 8) {
    const uint64_t word = at % 512 < 256 ? random() : 0;  // half compresses, the rest is kept literally
    memcpy(block + at, &word, sizeof word);
  }
  size_t stored = 0;
  Codec codec = Codec::raw;
  encode(GetParam(), block, kSize, image, &stored, &codec);
  ASSERT_EQ(codec, GetParam());
  ASSERT_TRUE(decode(codec, image, stored, back, kSize).ok());
  ASSERT_EQ(memcmp(back, block, kSize), 0);
  for (const size_t at : {size_t{0}, kSize / 2, kSize - 512}) {
    EXPECT_EQ(test::mapping_that_holds(block + at, 64, "dd"), "") << "byte " << at;
    EXPECT_NE(test::mapping_that_holds(block + at, 64, "xx"), "") << "it would have been found";
  }
  munmap(memory, 3 * kSize);
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecTest, testing::Values(Codec::lz4, Codec::zstd),
                         [](const auto& param) { return param.param == Codec::lz4 ? "lz4" : "zstd"; });

TEST(RawCodecTest, RawIsACopyOfTheSameLength) {
  const std::vector<char> block = random_bytes(2 * kPage, 1);
  std::vector<char> out(block.size()), back(block.size());
  size_t stored = 0;
  Codec codec = Codec::lz4;
  encode(Codec::raw, block.data(), block.size(), out.data(), &stored, &codec);
  EXPECT_EQ(codec, Codec::raw);
  ASSERT_EQ(stored, block.size());
  ASSERT_TRUE(decode(Codec::raw, block.data(), stored, back.data(), back.size()).ok());
  EXPECT_EQ(back, block);
  EXPECT_EQ(decode(Codec::raw, block.data(), kPage, back.data(), back.size()).code(), -EIO);
  EXPECT_EQ(decode(static_cast<Codec>(3), block.data(), stored, back.data(), back.size()).code(), -EIO);
}

}  // namespace
}  // namespace vmem::store
