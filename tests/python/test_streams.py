# SPDX-License-Identifier: Apache-2.0
"""read_from and write_to on objects that read and write in parts, or block for a while."""

import errno
import fcntl
import gc
import io
import os
import signal
import socket
import threading

import pytest

import vmem
from conftest import MIB

SIZE = 5 * MIB + 123
WANT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]


@pytest.fixture
def region(host):
    region = vmem.alloc(SIZE, host_only=True)
    yield region
    gc.collect()  # exceptions kept by a test, with their frames
    region.free()


def filled(region):
    region.memoryview()[:] = WANT
    return region


def pipe_pair():
    read, write = os.pipe()
    return open(read, "rb", buffering=0), open(write, "wb", buffering=0)


def socket_pair():
    one, two = socket.socketpair()
    pair = one.makefile("rb", buffering=0), two.makefile("wb", buffering=0)
    one.close()
    two.close()
    return pair


def not_blocking(file):
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_NONBLOCK)
    return file


PAIRS = {"pipe": pipe_pair, "socket": socket_pair}
FORMS = {
    "raw": lambda file, mode: file,
    "buffered": lambda file, mode: (io.BufferedReader if mode == "rb" else io.BufferedWriter)(file),
    "descriptor": lambda file, mode: file.fileno(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_reader_that_does_not_block_is_waited_for_until_the_end(region, kind, form):
    read, write = PAIRS[kind]()
    began = threading.Event()

    def give():
        began.wait(60)
        for at in range(0, SIZE, 70001):
            write.write(WANT[at : at + 70001])  # blocks: the pipe is full until the reader takes more
        write.close()

    thread = threading.Thread(target=give)
    thread.start()
    with not_blocking(read):
        began.set()
        assert region.read_from(FORMS[form](read, "rb")) == SIZE
    thread.join()
    assert bytes(region.memoryview()) == WANT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_writer_that_does_not_block_is_waited_for_until_all_is_written(region, kind, form):
    read, write = PAIRS[kind]()
    came = []
    thread = threading.Thread(target=lambda: came.append(read.readall()))
    thread.start()
    with not_blocking(write):
        assert filled(region).write_to(FORMS[form](write, "wb")) == SIZE
    thread.join()
    read.close()
    assert came == [WANT]


def test_an_end_in_the_middle_is_said(region):
    read, write = pipe_pair()
    thread = threading.Thread(target=lambda: (write.write(b"abc"), write.close()))
    thread.start()
    with not_blocking(read):
        assert region.read_from(read) == 3
    thread.join()
    assert bytes(region[:4].memoryview()) == b"abc\0"


def test_a_reader_that_goes_away_is_an_error(region):
    read, write = pipe_pair()
    read.close()
    with not_blocking(write), pytest.raises(BrokenPipeError):
        region.write_to(write)


@pytest.mark.parametrize("how", ["read_from", "write_to"])
def test_an_interrupt_ends_the_wait_and_the_lease(region, how):
    read, write = pipe_pair()
    filled(region)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with not_blocking(read), not_blocking(write):
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # repeated, in case it comes before the wait
            with pytest.raises(KeyboardInterrupt):
                getattr(region, how)(read if how == "read_from" else write)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    region.evict()
    assert region.query().host_bytes == 0  # no lease is left


class Bits(io.RawIOBase):
    """Reads and writes 1 to 4,096 bytes at a time."""

    def __init__(self, data=b""):
        self.data, self.at, self.step = bytearray(data), 0, 1

    def _next(self, most):
        self.step = self.step * 7 % 4099
        return min(self.step, most)

    def readinto(self, view):
        n = self._next(min(len(view), len(self.data) - self.at))
        view[:n] = self.data[self.at : self.at + n]
        self.at += n
        return n

    def write(self, view):
        n = self._next(len(view))
        self.data += view[:n]
        return n


def test_short_reads_and_writes_go_on(region):
    assert region.read_from(Bits(WANT)) == SIZE
    sink = Bits()
    assert region.write_to(sink) == SIZE and bytes(sink.data) == WANT


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def readinto(self, view):
        return self.answer

    write = readinto


@pytest.mark.parametrize("answer", [None, -1, 1 << 40, "x", 1.5])
def test_an_answer_that_is_no_number_of_bytes_is_an_error(region, answer):
    for call in (region.read_from, region.write_to):
        with pytest.raises(OSError) as e:
            call(Answers(answer))
        assert e.value.errno == (errno.EAGAIN if answer is None else errno.EIO)
    with pytest.raises(OSError, match="takes no bytes; 0 of"):
        region.write_to(Answers(0))


def test_a_regular_file_that_says_none_is_not_waited_for(region, tmp_path):
    class Says(io.FileIO):
        def write(self, view):
            super().write(view)

    with Says(str(tmp_path / "x"), "w") as file, pytest.raises(BlockingIOError):
        region.write_to(file)


@pytest.mark.parametrize("what", [None, 1.5, object(), True, "text file"])
def test_what_is_no_file_is_refused(region, what, tmp_path):
    given = open(os.devnull, encoding="utf-8") if what == "text file" else what
    with pytest.raises(TypeError):
        region.read_from(given)
    if what == "text file":
        given.close()


def test_descriptors_are_used_from_where_they_are_and_stay_open(region, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    fd = os.open(path, os.O_RDWR)
    try:
        os.lseek(fd, 4, os.SEEK_SET)
        assert region[:3].read_from(fd) == 3 and bytes(region[:3].memoryview()) == b"456"
        assert region[:2].write_to(fd) == 2 and os.lseek(fd, 0, os.SEEK_CUR) == 9
    finally:
        os.close(fd)
    assert path.read_bytes() == b"0123456459"


@pytest.mark.parametrize("mode", ["read", "shared", "private"])
@pytest.mark.parametrize("name", ["the path", "a link", "a descriptor's"])
def test_the_file_that_a_region_maps_is_not_emptied(host, make_file, mode, name):
    path = make_file(WANT[:10000])
    other = path + ".other"
    os.symlink(path, path + ".link")
    with open(path, "r+b") as file, vmem.map(file.fileno() if "desc" in name else path, mode=mode) as region:
        with pytest.raises(vmem.Error, match="rename") as e:
            region[:5000].write_to(path + ".link" if "link" in name else path)
        assert e.value.errno == errno.EBUSY and os.path.getsize(path) == 10000
        for same in (file, file.fileno()):
            with pytest.raises(vmem.Error, match="mapped by"):
                region[:5000].write_to(same)
        assert region.write_to(other) == 10000
        os.rename(other, path)  # as the message says
        assert region[:5000].write_to(path) == 5000 and os.path.getsize(path) == 5000
