// The module's calls: handshake, every refusal with its own errno, and that a refusal changes nothing.
#include "kmod/context.h"

namespace kmod_test {

class KmodUapi : public Kmod {};

TEST_F(KmodUapi, HandshakeTellsVersionFeaturesAndLimits) {
  Context c(false);
  vmem_hello h{};
  h.version = VMEM_UAPI_VERSION;
  h.need = VMEM_FEATURE_TRAP | VMEM_FEATURE_PROTECT;
  ASSERT_EQ(call(c.fd, VMEM_IOC_HELLO, &h), 0);
  EXPECT_EQ(h.version, static_cast<uint32_t>(VMEM_UAPI_VERSION));
  EXPECT_EQ(h.event_size, sizeof(vmem_event));
  EXPECT_EQ(h.unit_min, kPage);
  EXPECT_EQ(h.unit_max, 32u << 20);
  EXPECT_GE(h.batch_max, 256u);
  EXPECT_NE(h.features & VMEM_FEATURE_TRAP, 0u);
  EXPECT_EQ(call(c.fd, VMEM_IOC_HELLO, &h), 0) << "a second handshake changes nothing";
}

TEST_F(KmodUapi, NothingWorksBeforeTheHandshake) {
  Context c(false);
  uint64_t offset = 0;
  vmem_event e;
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, kHuge, &offset), -EPROTO);
  EXPECT_EQ(call(c.fd, VMEM_IOC_SHUTDOWN), -EPROTO);
  EXPECT_EQ(read(c.fd, &e, sizeof e), -1);
  EXPECT_EQ(errno, EPROTO);
  EXPECT_EQ(c.map(kHuge, kHuge), nullptr);
  EXPECT_EQ(errno, EPROTO);
}

TEST_F(KmodUapi, RefusesAnotherVersionAndNamesItsOwn) {
  Context c(false);
  vmem_hello h{};
  h.version = VMEM_UAPI_VERSION + 1;
  EXPECT_EQ(call(c.fd, VMEM_IOC_HELLO, &h), -EPROTONOSUPPORT);
  EXPECT_EQ(h.version, static_cast<uint32_t>(VMEM_UAPI_VERSION));
  h = {};
  h.version = VMEM_UAPI_VERSION;
  h.need = 1ull << 63;
  EXPECT_EQ(call(c.fd, VMEM_IOC_HELLO, &h), -EOPNOTSUPP);
  uint64_t offset = 0;
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, kHuge, &offset), -EPROTO) << "a refused handshake is none";
}

TEST_F(KmodUapi, StructsMayGrowButOnlyWithZeros) {
  Context c;
  struct {
    vmem_create create;
    uint64_t more;
  } longer{};
  longer.create.kind = VMEM_KIND_POOL;
  longer.create.size = kHuge;
  longer.create.unit = kHuge;
  const unsigned long request = _IOC(_IOC_READ | _IOC_WRITE, VMEM_IOC_MAGIC, 1, sizeof longer);
  EXPECT_EQ(call(c.fd, request, &longer), 0);
  longer.more = 1;
  EXPECT_EQ(call(c.fd, request, &longer), -E2BIG);
  EXPECT_EQ(call(c.fd, _IOC(_IOC_READ | _IOC_WRITE, VMEM_IOC_MAGIC, 1, 8), &longer), -EMSGSIZE);
  EXPECT_EQ(call(c.fd, _IOC(_IOC_WRITE, VMEM_IOC_MAGIC, 99, 8), &longer), -ENOTTY);
  EXPECT_EQ(call(c.fd, _IOC(_IOC_WRITE, 'x', 1, sizeof(vmem_create)), &longer), -ENOTTY);
  EXPECT_EQ(call(c.fd, VMEM_IOC_CREATE, reinterpret_cast<void*>(8)), -EFAULT);
}

TEST_F(KmodUapi, CreateRefusesWhatIsNotARange) {
  Context c;
  uint64_t offset = 0;
  EXPECT_EQ(c.create(3, kHuge, kHuge, &offset), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_REGION, kHuge, kHuge, &offset, 2), -EINVAL) << "unknown flag";
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, kHuge, &offset, VMEM_CREATE_LONGTERM), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_POOL, 0, kHuge, &offset), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge + kPage, kHuge, &offset), -EINVAL) << "not whole units";
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, 3 * kPage, &offset), -EINVAL) << "not a power of two";
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, 2048, &offset), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_POOL, 64 << 20, 64 << 20, &offset), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_REGION, (1ull << 46) + kHuge, kHuge, &offset), -EINVAL);
  EXPECT_EQ(c.create(VMEM_KIND_REGION, UINT64_MAX & ~(kHuge - 1), kHuge, &offset), -EINVAL);
  vmem_create padded{};
  padded.kind = VMEM_KIND_POOL;
  padded.size = kHuge;
  padded.unit = kHuge;
  padded.pad = 1;
  EXPECT_EQ(call(c.fd, VMEM_IOC_CREATE, &padded), -EINVAL);
}

TEST_F(KmodUapi, OffsetsAreAlignedAndNeverUsedAgain) {
  Context c;
  uint64_t a = 0, b = 0;
  ASSERT_EQ(c.create(VMEM_KIND_REGION, kPage, kPage, &a), 0);
  EXPECT_EQ(a % kHuge, 0u);
  EXPECT_NE(a, 0u);
  ASSERT_EQ(c.destroy(a), 0);
  EXPECT_EQ(c.destroy(a), -ENXIO);
  ASSERT_EQ(c.create(VMEM_KIND_REGION, kPage, kPage, &b), 0);
  EXPECT_NE(a, b);
  ASSERT_EQ(c.create(VMEM_KIND_REGION, 64 << 20, 32 << 20, &a), 0);
  EXPECT_EQ(a % (32 << 20), 0u);
  EXPECT_EQ(c.destroy(a + (32 << 20)), -ENXIO) << "only by its first offset";
}

// The kernel frees an index of ranges by reading it. Try each number of ranges: some layouts of a
// tree were once read wrongly and crashed the machine.
TEST_F(KmodUapi, ContextsOfAnyNumberOfRangesEnd) {
  const uint64_t before = knob("contexts");
  const uint32_t all = checked_kernel() ? 72 : 256;  // a node of the tree has 64 entries
  for (uint32_t ranges = 1; ranges <= 256; ranges += ranges < all ? 1 : 8) {
    Context c;
    uint64_t offset = 0;
    for (uint32_t i = 0; i < ranges; ++i) ASSERT_EQ(c.create(VMEM_KIND_POOL + i % 2, kPage, kPage, &offset), 0);
  }
  EXPECT_TRUE(eventually([&] { return knob("contexts") == before; }));
  usleep(200000);  // the kernel frees them a little later
}

TEST_F(KmodUapi, PopulateAndReleaseRefuse) {
  Context c;
  uint64_t pool = 0, region = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, 8 * kHuge, kHuge, &pool), 0);
  ASSERT_EQ(c.create(VMEM_KIND_REGION, 8 * kHuge, kHuge, &region), 0);
  EXPECT_EQ(c.populate(pool, 0), -EINVAL);
  EXPECT_EQ(c.populate(pool + kPage, 1), -EINVAL);
  EXPECT_EQ(c.populate(pool, 9), -ERANGE);
  EXPECT_EQ(c.populate(pool + 7 * kHuge, 2), -ERANGE);
  EXPECT_EQ(c.populate(pool, UINT32_MAX), -ERANGE);
  EXPECT_EQ(c.populate(region, 1), -ENXIO);
  EXPECT_EQ(c.populate(0, 1), -ENXIO);
  EXPECT_EQ(c.populate(UINT64_MAX & ~(kHuge - 1), 1), -ENXIO);
  EXPECT_EQ(c.populate(pool, 1, -2), -EINVAL);
  EXPECT_EQ(c.populate(pool, 1, 1023), -ENODEV);
  EXPECT_EQ(c.populate(pool, 1, 1 << 30), -ENODEV);
  EXPECT_EQ(c.populate(pool, 1, 0, 2), -EINVAL) << "unknown flag";
  EXPECT_EQ(c.populate(pool, 1, -1, VMEM_POPULATE_STRICT), -EINVAL) << "strict about no node";
  EXPECT_EQ(c.info().frame_bytes, 0u);
  ASSERT_EQ(c.populate(pool + kHuge, 1), 0);
  EXPECT_EQ(c.populate(pool + kHuge, 1), -EEXIST);
  vmem_populate out{};
  EXPECT_EQ(c.populate(pool, 3, -1, 0, &out), -EEXIST);
  EXPECT_EQ(out.done, 1u) << "what came before the error stays";
  EXPECT_EQ(c.info().frame_bytes, 2 * kHuge);
  EXPECT_EQ(c.destroy(pool), -EBUSY);
  EXPECT_EQ(c.release(pool + 2 * kHuge, 1), -ENOENT);
  EXPECT_EQ(c.release(pool, 0), -EINVAL);
  EXPECT_EQ(c.release(region, 1), -ENXIO);
  EXPECT_EQ(c.release(pool, 2), 0);
  EXPECT_EQ(c.info().frame_bytes, 0u);
  EXPECT_EQ(c.destroy(pool), 0);
}

TEST_F(KmodUapi, OperationsRefuse) {
  Context c;
  Pair p(c, 4);
  uint64_t small = 0;
  ASSERT_EQ(c.create(VMEM_KIND_POOL, kHuge, 64 << 10, &small), 0);
  ASSERT_EQ(c.populate(small, 1), 0);
  EXPECT_EQ(c.op(0, p.block(0)), -EINVAL);
  EXPECT_EQ(c.op(10, p.block(0)), -EINVAL);
  EXPECT_EQ(c.op(VMEM_OP_REMOVE, p.block(0), 0, 1), -EINVAL) << "unknown flag";
  EXPECT_EQ(c.install(p.block(0), p.frame(0), VMEM_OPF_CLEAN), -EINVAL);
  EXPECT_EQ(c.install(p.block(0) + kPage, p.frame(0)), -EINVAL);
  EXPECT_EQ(c.install(p.block(0), p.frame(0) + kPage), -EINVAL);
  EXPECT_EQ(c.install(p.block(0), small), -EINVAL) << "another size";
  EXPECT_EQ(c.install(p.frame(0), p.frame(0)), -ENXIO) << "not a block";
  EXPECT_EQ(c.install(p.block(0), p.block(1)), -ENXIO) << "not a frame";
  EXPECT_EQ(c.install(p.block(4), p.frame(0)), -ENXIO) << "past the end";
  EXPECT_EQ(c.install(UINT64_MAX & ~(kHuge - 1), p.frame(0)), -ENXIO);
  EXPECT_EQ(c.remove(p.block(0)), -ENOENT);
  EXPECT_EQ(c.op(VMEM_OP_PROTECT, p.block(0)), -ENOENT);
  EXPECT_EQ(c.op(VMEM_OP_UNPROTECT, p.block(0)), -ENOENT);
  EXPECT_EQ(c.op(VMEM_OP_WATCH, p.block(0)), -ENOENT);
  EXPECT_EQ(c.op(VMEM_OP_UNFAIL, p.block(0)), -ENODATA);
  EXPECT_EQ(c.op(VMEM_OP_WAKE, p.block(0)), 0);
  EXPECT_EQ(c.state(p.block(0)), 0u);

  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  EXPECT_EQ(c.install(p.block(0), p.frame(1)), -EEXIST);
  EXPECT_EQ(c.install(p.block(1), p.frame(0)), -EADDRINUSE);
  EXPECT_EQ(c.op(VMEM_OP_FAIL, p.block(0)), -EEXIST);
  EXPECT_EQ(c.release(p.frame(0), 1), -EBUSY);
  vmem_op out{};
  EXPECT_EQ(c.remove(p.block(0), &out), 0);
  EXPECT_EQ(out.frame, p.frame(0));
  EXPECT_EQ(c.remove(p.block(0)), -ENOENT) << "removed twice";
  ASSERT_EQ(c.release(p.frame(0), 1), 0);
  EXPECT_EQ(c.install(p.block(0), p.frame(0)), -ENOENT) << "empty slot";

  EXPECT_EQ(c.op(VMEM_OP_FAIL, p.block(2)), 0);
  EXPECT_EQ(c.op(VMEM_OP_FAIL, p.block(2)), -EALREADY);
  EXPECT_EQ(c.state(p.block(2)), VMEM_STATE_FAILED);
  EXPECT_EQ(c.op(VMEM_OP_UNFAIL, p.block(2)), 0);
  EXPECT_EQ(c.state(p.block(2)), 0u);
}

TEST_F(KmodUapi, AFrameOfAnotherContextHasNoName) {
  Context a, b;
  Pair p(a, 1), q(b, 1);
  uint64_t region = 0;
  ASSERT_EQ(a.create(VMEM_KIND_REGION, kHuge, kHuge, &region), 0);
  // Both contexts use the same numbers, for different memory.
  p.frame_word(0) = 11;
  q.frame_word(0) = 22;
  ASSERT_EQ(a.install(p.block(0), p.frame(0)), 0);
  EXPECT_EQ(p.word(0), 11u);
  EXPECT_EQ(b.install(region, q.frame(0)), -ENXIO);
}

TEST_F(KmodUapi, BatchesReportEachOperation) {
  Context c;
  Pair p(c, 4);
  std::vector<vmem_op> ops(4);
  for (uint32_t i = 0; i < 4; ++i) {
    ops[i].op = VMEM_OP_INSTALL;
    ops[i].block = p.block(i);
    ops[i].frame = p.frame(i == 2 ? 1 : i);
  }
  vmem_batch b{};
  b.ops = reinterpret_cast<uintptr_t>(ops.data());
  b.count = 4;
  ASSERT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), 0);
  EXPECT_EQ(b.done, 3u);
  EXPECT_EQ(ops[2].result, -EADDRINUSE);
  EXPECT_EQ(ops[3].result, 0);
  for (vmem_op& op : ops) op.op = VMEM_OP_REMOVE;
  ops[2].block = ops[1].block;  // twice in one batch
  ASSERT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), 0);
  EXPECT_EQ(b.done, 3u);
  EXPECT_EQ(ops[2].result, -EINPROGRESS);

  b.count = 0;
  EXPECT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), -EINVAL);
  b.count = 1 << 20;
  EXPECT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), -EINVAL);
  b.count = 4;
  b.flags = 1;
  EXPECT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), -EINVAL);
  b.flags = 0;
  b.ops = 4096;
  EXPECT_EQ(call(c.fd, VMEM_IOC_BATCH, &b), -EFAULT);
}

TEST_F(KmodUapi, MappingsStayInsideOneRange) {
  Context c;
  Pair p(c, 2);
  EXPECT_EQ(c.map(p.region, 3 * kHuge), nullptr);
  EXPECT_EQ(errno, ENXIO);
  EXPECT_EQ(c.map(0, kHuge), nullptr);
  EXPECT_EQ(errno, ENXIO);
  EXPECT_EQ(c.map(p.region + 2 * kHuge, kHuge), nullptr);
  EXPECT_EQ(mmap(nullptr, kHuge, PROT_READ, MAP_PRIVATE, c.fd, static_cast<off_t>(p.region)), MAP_FAILED);
  EXPECT_EQ(errno, EINVAL) << "a private copy would hide stores";
}

TEST_F(KmodUapi, OpensForReadingAndWritingOnly) {
  EXPECT_EQ(open(kDevice, O_RDONLY | O_CLOEXEC), -1);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ(open(kDevice, O_WRONLY | O_CLOEXEC), -1);
  EXPECT_EQ(errno, EACCES);
}

TEST_F(KmodUapi, AnotherUserCannotOpenTheDevice) {
  if (getuid() != 0) GTEST_SKIP() << "needs root to become somebody else";
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    _exit(open(kDevice, O_RDWR) == -1 && errno == EACCES ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(KmodUapi, ADeadContextRefusesEverything) {
  Context c;
  Pair p(c, 1);
  ASSERT_EQ(c.install(p.block(0), p.frame(0)), 0);
  p.frame_word(0) = 7;
  ASSERT_EQ(call(c.fd, VMEM_IOC_SHUTDOWN), 0);
  uint64_t offset = 0;
  vmem_event e;
  EXPECT_EQ(c.create(VMEM_KIND_POOL, kHuge, kHuge, &offset), -ESHUTDOWN);
  EXPECT_EQ(c.remove(p.block(0)), -ESHUTDOWN);
  EXPECT_EQ(read(c.fd, &e, sizeof e), -1);
  EXPECT_EQ(errno, ESHUTDOWN);
  EXPECT_EQ(c.map(p.region, kHuge), nullptr);
  EXPECT_EQ(errno, ESHUTDOWN);
  EXPECT_EQ(p.word(0), 7u) << "what is present stays readable";
}

TEST_F(KmodUapi, PinsAreCountedAndEnd) {
  Context c;
  const size_t size = 64 * kPage;
  char* buffer = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(buffer, MAP_FAILED);
  vmem_pin pin{};
  pin.address = reinterpret_cast<uintptr_t>(buffer);
  pin.size = size;
  pin.flags = VMEM_PIN_WRITE;
  ASSERT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), 0);
  EXPECT_GE(pin.runs, 1u);
  EXPECT_LE(pin.runs, 64u);
  EXPECT_EQ(c.info().pinned_bytes, size);
  vmem_unpin unpin{pin.id + 1, 0};
  EXPECT_EQ(call(c.fd, VMEM_IOC_UNPIN, &unpin), -ENOENT);
  unpin.id = pin.id;
  EXPECT_EQ(call(c.fd, VMEM_IOC_UNPIN, &unpin), 0);
  EXPECT_EQ(call(c.fd, VMEM_IOC_UNPIN, &unpin), -ENOENT);
  EXPECT_EQ(c.info().pinned_bytes, 0u);

  pin.flags = 2;
  EXPECT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), -EINVAL);
  pin.flags = 0;
  pin.size = kPage + 1;
  EXPECT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), -EINVAL);
  pin.size = 2ull << 30;
  EXPECT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), -EINVAL);
  pin.address = UINT64_MAX - kPage + 1;
  pin.size = 2 * kPage;
  EXPECT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), -ERANGE);
  pin.address = reinterpret_cast<uintptr_t>(buffer);
  pin.size = 4 * size;
  munmap(buffer, size);
  EXPECT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), -EFAULT);
  EXPECT_EQ(c.info().pinned_bytes, 0u);
  const uint64_t before = knob("pinned_bytes");
  buffer = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  pin.address = reinterpret_cast<uintptr_t>(buffer);
  pin.size = size;
  ASSERT_EQ(call(c.fd, VMEM_IOC_PIN, &pin), 0);
  c.shut();
  EXPECT_TRUE(eventually([&] { return knob("pinned_bytes") == before; })) << "close ends pins";
  munmap(buffer, size);
}

TEST_F(KmodUapi, EventfdRefusesWhatIsNone) {
  Context c;
  vmem_eventfd e{-2, 0};
  EXPECT_EQ(call(c.fd, VMEM_IOC_EVENTFD, &e), -EINVAL);
  e.fd = 99;
  EXPECT_EQ(call(c.fd, VMEM_IOC_EVENTFD, &e), -EBADF);
  e.fd = c.fd;
  EXPECT_EQ(call(c.fd, VMEM_IOC_EVENTFD, &e), -EINVAL);
  e.fd = -1;
  EXPECT_EQ(call(c.fd, VMEM_IOC_EVENTFD, &e), 0);
}

}  // namespace kmod_test
