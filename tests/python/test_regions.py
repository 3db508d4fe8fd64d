# SPDX-License-Identifier: Apache-2.0
import errno
import os

import numpy as np
import pytest

import vmem
from conftest import MIB, finish, start


def numbers(count, seed=1):
    return np.random.default_rng(seed).integers(0, 2**63, count, dtype=np.uint64)


def test_a_region_four_times_the_budget_keeps_every_byte(host):
    with vmem.alloc(256 * MIB) as region:
        a = region.numpy("uint64")
        step = 64 * 1024 // 8
        want = numbers(len(a) // step)
        a[::step] = want
        assert (a[::step] == want).all()
        stats = vmem.stats()
        assert stats.write_bytes > 128 * MIB
        assert stats.host_bytes <= stats.host_budget == 64 * MIB
        del a
    assert region.closed


def test_a_new_region_reads_as_zeros_and_costs_no_memory(host):
    with vmem.alloc("1GiB") as region:
        assert region.query()[:4] == (1 << 30, 0, 0, 0)
        assert not region.numpy()[: 4 * MIB].any()


def test_block_size_and_advice_are_the_regions_own(host, tmp_path):
    for size in (4096, 65536):
        with vmem.alloc(8 * MIB, host_only=True, block_size=size, advice="random") as region:
            region.numpy()[5 * MIB] = 1
            assert region.query().host_bytes == size
    with vmem.alloc(8 * MIB, host_only=True, block_size="auto") as region:
        region.numpy()[5 * MIB] = 1
        assert region.query().host_bytes == 65536
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 4096)
    with vmem.map(path, host_only=True, block_size="64KiB", advice=vmem.Advice.SEQUENTIAL) as region:
        assert region.numpy()[65536 + 7] == 7
    with pytest.raises(vmem.Error) as e:
        vmem.alloc(MIB, host_only=True, block_size=5000)
    assert e.value.errno == errno.EINVAL and "block_size 5000" in str(e.value)
    with pytest.raises(ValueError):
        vmem.alloc(MIB, advice="soon")


def test_blocks_have_64_mib_at_most():
    start(device="sim-handles", host_budget=640 * MIB, device_budget=128 * MIB)
    with vmem.alloc(65 * MIB, block_size="64MiB") as region:
        a = region.numpy("uint64")
        a[[0, 8 * MIB - 1, 8 * MIB]] = 5, 6, 7
        with region.acquire(vmem.READ, 0):
            where = region.query()
            assert where.block_size == 64 * MIB and where.device_bytes == region.nbytes
        region.evict()
        assert list(a[[0, 8 * MIB - 1, 8 * MIB]]) == [5, 6, 7]
        del a
    with pytest.raises(vmem.Error) as e:
        vmem.alloc(MIB, block_size=128 * MIB)
    assert e.value.errno == errno.EINVAL and "from 4 KiB to 64 MiB" in str(e.value)
    finish()


def left_out_of_core_dumps(address):
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, last = (int(word, 16) for word in words[0].split("-"))
                inside = first <= address < last
            elif inside and words[0] == "VmFlags:":
                return "dd" in words
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_core_dump_is_the_regions_own(host):
    for wanted in (None, False, True):
        with vmem.alloc(8 * MIB, host_only=True, core_dump=wanted) as region:
            assert left_out_of_core_dumps(region.ptr) == (not wanted)


def test_codec_checksum_and_address_are_the_regions_own(host):
    used = {}
    for codec in ("none", "lz4"):
        with vmem.alloc(4 * MIB, host_only=True, block_size="64KiB", codec=codec, checksum=True) as region:
            region.numpy()[:] = 3
            before = vmem.stats().ssd_bytes
            region.evict()
            used[codec] = vmem.stats().ssd_bytes - before
            assert (region.numpy() == 3).all()
    assert used["lz4"] < used["none"] == 4 * MIB
    with vmem.alloc("1GiB", host_only=True) as large:
        ptr = large.ptr
    with vmem.alloc(MIB, host_only=True, address=ptr) as region:
        assert region.ptr == ptr
    for wrong, words in (({"codec": "zip"}, "zip"), ({"address": 4096}, "0x1000")):
        with pytest.raises(vmem.Error) as e:
            vmem.alloc(MIB, host_only=True, **wrong)
        assert e.value.errno == errno.EINVAL and words in str(e.value)


def test_a_descriptor_serves_in_place_of_a_path(host, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 256)
    with open(path, "r+b") as file:
        with vmem.map(file.fileno(), offset=4096, host_only=True) as region:
            assert region.nbytes == 61440 and region.numpy()[7] == 7 and region.name == f"fd {file.fileno()}"
            with pytest.raises(TypeError, match="pickled"):
                region.__reduce__()
        shared = vmem.map(file.fileno(), mode="shared", host_only=True)
    shared.numpy()[0] = 99
    shared.free()
    assert path.read_bytes()[:2] == b"\x63\x01"
    for wrong in (-1, 1 << 20):
        with pytest.raises((ValueError, OSError)):
            vmem.map(wrong, 4096)


def test_evicted_bytes_come_back_and_query_says_where_they_are(host):
    with vmem.alloc(8 * MIB) as region:
        region.numpy()[:] = 7
        assert region.query().host_bytes == 8 * MIB
        region.evict()
        assert region.query().ssd_bytes == 8 * MIB
        region.prefetch()
        region.advise(vmem.Advice.HOT)
        assert (region.numpy() == 7).all()


def test_advice_dont_need_drops_the_contents(host):
    with vmem.alloc(4 * MIB) as region:
        region.numpy()[:] = 1
        region[: 2 * MIB].advise(vmem.Advice.DONT_NEED)
        assert not region.numpy()[: 2 * MIB].any()
        assert region.numpy()[2 * MIB :].all()


def test_a_mapped_file_is_its_bytes_and_is_never_written(host, make_file):
    want = numbers(MIB)
    path = make_file(want.tobytes())
    with vmem.map(path) as region:
        a = region.numpy("uint64")
        assert (a == want).all()
        assert not a.flags.writeable
        with pytest.raises(ValueError):
            a[0] = 1
        assert region.memoryview().readonly
        assert region.name == "data.bin"
        del a


def test_a_mapping_may_begin_and_end_inside_the_file(host, make_file):
    want = numbers(MIB // 8)
    path = make_file(want.tobytes())
    with vmem.map(path, 5000, 4096) as region:
        assert region.nbytes == 5000
        assert bytes(region.memoryview()) == want.tobytes()[4096 : 4096 + 5000]
    with vmem.map(path, offset=4096) as region:
        assert region.nbytes == MIB - 4096


@pytest.mark.parametrize("direct", [True, False])
def test_files_of_every_length_are_read_to_their_end(make_file, direct):
    start(direct_io=direct)
    for size in (1, 100, 512, 2048, 4095, 4096, 4608, 10000, 2 * MIB + 1536):
        want = numbers(size // 8 + 1).tobytes()[:size]
        with vmem.map(make_file(want)) as region, region.acquire():
            assert bytes(region.memoryview()) == want
    finish()


def test_changes_of_a_shared_mapping_reach_the_file_and_of_a_private_one_do_not(host, make_file):
    path = make_file(bytes(2 * MIB))
    with vmem.map(path, mode="private") as region:
        region.numpy()[:] = 1
        region.sync()
    with vmem.map(path, mode="shared") as region:
        region.numpy()[:4096] = 2
        with pytest.raises(vmem.Error) as e:
            vmem.map(path, mode="shared")
        assert e.value.errno == errno.EBUSY
        region.sync()
    with open(path, "rb") as f:
        content = f.read()
    assert content[:4096] == b"\2" * 4096 and content[4096:] == bytes(2 * MIB - 4096)


def test_a_file_that_is_shorter_than_its_region_is_right_as_far_as_it_goes(host, make_file):
    path = make_file(bytes(range(250)) * 40)
    with vmem.map(path, 20000) as region:
        assert bytes(region[:10000].memoryview()) == bytes(range(250)) * 40
        assert bytes(region[10000:12288].memoryview()) == bytes(2288)


def test_refusals_say_what_was_wrong_with_the_numbers(host, make_file, tmp_path):
    path = make_file(bytes(10000))
    with pytest.raises(vmem.Error) as e:
        vmem.map(path, 4096, 100)
    assert e.value.errno == errno.EINVAL and "100" in e.value.strerror
    with pytest.raises(vmem.Error) as e:
        vmem.map(path, offset=12288)
    assert "12288" in e.value.strerror
    with pytest.raises(FileNotFoundError) as missing:
        vmem.map(str(tmp_path / "none"))
    assert missing.value.filename == str(tmp_path / "none")
    with pytest.raises(vmem.Error) as e:
        vmem.map(str(tmp_path / "none"), 4096)
    assert e.value.errno == errno.ENOENT
    with pytest.raises((vmem.Error, IsADirectoryError)):
        vmem.map(str(tmp_path))
    with pytest.raises(ValueError, match="mode 'rw'"):
        vmem.map(path, mode="rw")
    with pytest.raises(ValueError, match="-4096"):
        vmem.map(path, offset=-4096)
    with pytest.raises(ValueError, match="NUL"):
        vmem.map("a\0b")
    for size in (0, -1, "8 parsecs", "", True, None):
        with pytest.raises((ValueError, TypeError)):
            vmem.alloc(size)
    with pytest.raises(vmem.Error) as e:
        vmem.alloc(1 << 60)
    assert e.value.errno == errno.EINVAL


def test_ranges_and_shapes_outside_a_region_are_refused(host):
    with vmem.alloc(MIB) as region:
        with pytest.raises(ValueError, match="1048577"):
            region.array("uint8", MIB + 1)
        with pytest.raises(ValueError, match="at byte 8"):
            region.array("float32", (512, 512), offset=8)
        for shape in (None, 0, (4, 0), 5):
            with pytest.raises(ValueError, match="^byte 1048577 is past the end of region, which has 1048576 bytes$"):
                region.array("uint8", shape, offset=MIB + 1)
        assert region.array("uint8", offset=MIB).nbytes == 0
        with pytest.raises(ValueError, match="needs more than 1048576 bytes; region has 1048576$"):
            region.array("uint8", (1 << 62, 1 << 62))
        with pytest.raises(ValueError):
            region.array("uint8", 1, offset=-1)
        with pytest.raises(ValueError, match="negative"):
            region.array("uint8", (-1, 4))
        # NumPy 1 writes beyond the end of its array of dimensions
        with pytest.raises(ValueError, match="1000 dimensions"):
            region.array("uint8", (1,) * 1000)
        assert region.array("uint8", (1,) * 64).shape == (1,) * 64
        with pytest.raises(ValueError, match="4294967296 is no device"):  # C would truncate it to 0
            region.array("uint8").on(1 << 32)
        with pytest.raises(TypeError, match="float13"):
            region.array("float13")
        for other in (np.dtype(">f4"), np.dtype(">i8")):  # NumPy calls them float32 and int64
            with pytest.raises(TypeError, match=str(other)):
                region.array(other)
        assert region.array(np.dtype("<f4")).dtype == "float32" and region.array(np.dtype("|u1")).dtype == "uint8"
        with pytest.raises(TypeError):
            region[5]
        with pytest.raises(TypeError):
            region[::2]
        with pytest.raises(vmem.Error) as e:
            region.advise(99)
        assert e.value.errno == errno.EINVAL and "99" in e.value.strerror
        with pytest.raises(vmem.Error) as e:
            region.prefetch(location=3)
        assert e.value.errno == errno.ENODEV


def test_calls_for_an_empty_array_do_nothing(host):
    region = vmem.alloc(MIB, host_only=True)
    region.numpy()[:] = 1
    for empty in (region[5:5], region.array("float32", (3, 0), MIB), region[7:3]):
        empty.prefetch()
        empty.advise("dont_need")
        empty.evict()
        empty.sync()
        assert empty.query() == vmem.query(empty) == vmem.query(region.numpy()[0:0]) == (0, 0, 0, 0, 0)
        empty.acquire().release()
        assert empty.write_to(os.devnull) == empty.read_from("/dev/zero") == 0
    assert region.query().host_bytes == MIB and region.numpy().all()
    empty = None
    region.free()
    with pytest.raises(vmem.Error):
        region.evict()


def test_arrays_have_their_part_of_the_region(host):
    with vmem.alloc(MIB, name="grid") as region:
        region.numpy("int32")[:] = np.arange(MIB // 4, dtype="int32")
        part = region.array("int32", (4, 8), offset=4096)
        assert part.shape == (4, 8) and part.dtype == "int32" and part.nbytes == 128
        assert part.ptr == region.ptr + 4096 and len(part) == 4
        assert (part.numpy() == np.arange(1024, 1056).reshape(4, 8)).all()
        assert (np.asarray(part) == part.numpy()).all()
        assert np.asarray(part, dtype="float32").dtype == "float32"
        assert "grid" in repr(region) and "int32[4, 8]" in repr(part)
        assert region.array(np.dtype("float64")).dtype == "float64"
        scalar = region.array("int32", (), offset=16)
        assert scalar.numpy() == 4
        with pytest.raises(TypeError):
            len(scalar)
        del part, scalar


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.array])
def test_whole_numbers_of_any_type_are_numbers(host, make_file, kind):
    path = make_file(bytes(range(200)) * 41)
    with vmem.map(path, kind(100), kind(0), host_only=True) as region, open(path, "r+b") as file:
        for shape in (kind(4), (kind(4),), [2, kind(2)], np.array([2, kind(2)]), np.prod((2, kind(2)))):
            assert region.array("uint8", shape, kind(4)).nbytes == region.numpy("uint8", shape, kind(4)).size == 4
        assert region.numpy(shape=kind(2), offset=kind(4)).tolist() == [4, 5]
        assert region.array(offset=kind(4)).nbytes == 96
        region.prefetch(location=np.int64(vmem.HOST), stream=kind(0))
        region.advise(kind(vmem.Advice.COLD))
        region.acquire(kind(vmem.READ), stream=kind(0)).release(kind(0))
        with vmem.alloc(kind(100), host_only=True) as other:
            with pytest.raises(vmem.Error) as e:
                other.write_to(kind(file.fileno()))
            assert e.value.errno == errno.EBUSY  # the descriptor is that of the mapped file
            assert other.read_from(kind(file.fileno()), offset=kind(96)) == 4 and other.numpy()[99] == 3
        with vmem.map(kind(file.fileno()), 8) as again:
            assert again.numpy().tolist() == list(range(8))


def test_what_is_no_whole_number_is_no_number(host, make_file):
    path = make_file(bytes(8192))
    with vmem.map(path, host_only=True) as region:
        for bad in (2.7, 2.0, np.float64(2), np.array(2.0), "2", b"2", 2j):
            for shape in (bad, (bad,), [2, bad]):
                with pytest.raises(TypeError):
                    region.array("uint8", shape)
            for call in (
                lambda: region.array(offset=bad),
                lambda: region.acquire(access=bad),
                lambda: region.acquire(location=bad),
                lambda: region.prefetch(location=bad),
                lambda: region[:4].on(bad),
                lambda: region.write_to(os.devnull, offset=bad),
                lambda: vmem.alloc(4096, address=bad),
                lambda: vmem.device_stats(bad),
                lambda: vmem.flush_on(bad),
            ):
                with pytest.raises(TypeError):
                    call()
        for bad in (2.7, np.float64(2)):
            with pytest.raises(TypeError):
                region.advise(bad)
        for shape in (b"\1\2", {2: 3}, {2}, object(), np.array([2.0])):
            with pytest.raises(TypeError, match="shape"):
                region.array("uint8", shape)
        with pytest.raises(TypeError, match="None"):
            region.array(None)  # numpy.dtype(None) is float64
    for bad in (True, 2.7):
        with pytest.raises(TypeError):
            vmem.map(bad)  # no descriptor
    for bad in ("x", 5):
        with pytest.raises(TypeError, match="cannot be called"):
            vmem.set_log_callback(bad)


def test_a_name_stands_in_messages(host):
    with vmem.alloc(60 * MIB, name="my weights", host_only=True) as a, vmem.alloc(60 * MIB) as b:
        with vmem.acquire(a[: 40 * MIB]):
            with pytest.raises(vmem.Error) as e:
                b.acquire()
            assert e.value.errno == errno.ENOMEM and "my weights" in e.value.strerror
        a.name = "other"
        assert a.name == "other"


def test_a_block_that_cannot_be_read_is_an_error_of_the_lease(host, make_file):
    path = make_file(bytes(8 * MIB))
    with vmem.map(path) as region:
        os.truncate(path, 4096)
        with pytest.raises(vmem.Error) as e:
            region.acquire()
        assert e.value.errno == errno.EIO


@pytest.mark.parametrize("size", [2**64 + 4096, 2**64, 2**63, 10**400, "9" * 400 + "GiB", f"{2**63}", "9999999999T"])
def test_a_size_that_c_cannot_have_is_refused(size, make_file):
    with pytest.raises(ValueError):
        vmem.alloc(size)
    with pytest.raises(ValueError):
        vmem.map(make_file(bytes(8192)), size)


@pytest.mark.parametrize("offset", [2**64, 2**64 + 4096, 2**63, -1, -4096])
def test_an_offset_that_c_cannot_have_is_refused(offset, make_file):
    with pytest.raises(ValueError):
        vmem.map(make_file(bytes(8192)), 4096, offset)
    with vmem.alloc(8192) as region:
        with pytest.raises(ValueError):
            region.array("uint8", 16, offset)
        with pytest.raises(ValueError):
            region.array("float64", [2**62, 2**62])
