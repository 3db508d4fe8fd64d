# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every place where Python runs a signal handler: the package's objects always agree with
libvmem's state.
"""

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import struct
import sys
import warnings

import pytest

import vmem
from conftest import MIB, finish, interrupted, python, start
from vmem import _lib, _memory, _replace, _safetensors

BOTH = vmem.READ | vmem.WRITE


def alive(lease):
    return _lib.lib.vmem_lease_poll(lease._lease) == 0


def regions():
    """Returns libvmem's count of regions; stats() would first end leftovers."""
    out = _lib.StatsStruct()
    out.size = ctypes.sizeof(out)
    _lib.check(_lib.lib.vmem_stats(ctypes.byref(out)))
    return out.regions


def test_a_release_that_is_interrupted_never_ends_another_lease(host):
    region = vmem.alloc(8 * MIB, host_only=True)
    for at in itertools.count(1):
        lease = region.acquire(BOTH)
        came = interrupted(lease.release, at)
        other = region.acquire(BOTH)  # usually at the address of the lease that has ended
        lease.release()
        assert not lease.held and alive(other), at
        del lease
        assert other.held and alive(other), at
        other.release()
        if came is None:
            break
    assert at > 2
    region.free()


def test_a_lease_on_its_way_that_is_interrupted_is_cancelled_once(host):
    region = vmem.alloc(8 * MIB, host_only=True)
    for at in itertools.count(1):
        pending = vmem.acquire_async(region)
        came = interrupted(pending.cancel, at)
        other = region.acquire()
        pending.cancel()
        with pytest.raises(vmem.Error) as e:
            pending.ready()
        assert e.value.errno == errno.ECANCELED and alive(other), at
        del pending, e
        assert alive(other), at
        other.release()
        if came is None:
            break
    assert at > 2
    region.free()


def test_the_end_of_a_range_for_kernels_that_is_interrupted_never_ends_another():
    start(device="sim-handles", host_budget=128 * MIB)
    region = vmem.alloc(8 * MIB)
    for at in itertools.count(1):
        opened = vmem.kernel(region, budget=2 * MIB)
        came = interrupted(opened.end, at)
        other = vmem.kernel(region, budget=2 * MIB)
        opened.end()
        assert not opened.open
        del opened
        other.end()  # EINVAL: it has ended already
        if came is None:
            break
    assert at > 2
    region.free()
    finish()


def test_no_python_code_runs_where_an_array_or_garbage_goes(host):
    """It would take the exception of a signal handler, which the interpreter then prints and drops."""
    np = pytest.importorskip("numpy")
    region = vmem.alloc(MIB)
    arrays = [region.numpy(), region.array("float32", 1000), np.asarray(region.array("float64"))]
    arrays.append(np.from_dlpack(region.array()))
    ran = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del arrays
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not ran
    region.free()


def test_a_free_that_is_interrupted_frees_or_leaves_the_region(host):
    for at in itertools.count(1):
        region = vmem.alloc(MIB)
        came = interrupted(region.free, at)
        assert vmem.stats().regions == (0 if region.closed else 1), at
        region.free()
        assert vmem.stats().regions == 0, at
        if came is None:
            break
    assert at > 2


def test_a_free_that_fails_and_is_interrupted_leaves_the_region_and_tells_why(host, monkeypatch):
    class Full:
        """vmem_free on a full disk."""

        limits = []

        @staticmethod
        def function(_):
            _lib.lib.vmem_create.function(None, 0, None)  # sets the thread's last error
            return -errno.ENOSPC

        def __call__(self, ptr):
            return self.function(ptr)

    region = vmem.alloc(MIB)
    told = 0
    monkeypatch.setattr(_lib.lib, "vmem_free", Full())
    for at in itertools.count(1):
        try:
            came = interrupted(region.free, at)
        except vmem.Error as e:
            assert e.errno == errno.ENOSPC
            came = None
        assert not region.closed and _memory.find(region.ptr) is region._handle, at
        if came is None:
            break
        told += getattr(came.__cause__, "errno", 0) == errno.ENOSPC
    monkeypatch.undo()
    assert told > 0
    del came
    region.free()


def test_a_region_that_is_made_when_the_interrupt_comes_is_freed(host, make_file):
    path = make_file(bytes(8192))
    for make in (lambda: vmem.alloc(MIB, name="r"), lambda: vmem.map(path)):
        for at in itertools.count(1):
            came = interrupted(make, at)
            gc.collect()
            assert vmem.stats().regions == 0, at
            if came is None:
                break
        assert at > 2


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def replace(path):
    with _replace.replaced(path) as file:
        file.write(bytes(8192))


FILES = ["a file", "a folder", "a tensor file", "an index", "a file to fill", "a file to replace"]


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_opened_when_the_interrupt_comes_is_closed(host, make_file, what):
    path = make_file(struct.pack("<Q", 2) + b"{}" + bytes(8192))
    actions = {
        "a file": lambda: vmem.map(path),
        "a folder": lambda: vmem.map(os.path.dirname(path)),
        "a tensor file": lambda: _safetensors.read_header(path),
        "an index": lambda: _safetensors.read_index(path),
        "a file to fill": lambda: vmem.alloc(8192, host_only=True).write_to(path),
        "a file to replace": lambda: replace(path),
    }

    def work():
        with contextlib.suppress(OSError, vmem.Error):  # some refuse the file
            actions[what]()

    work()
    for at in itertools.count(1):
        before = descriptors()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # no caller got the file
            came = interrupted(work, at)
            gc.collect()
        assert descriptors() == before and os.listdir(os.path.dirname(path)) == [os.path.basename(path)], at
        if came is None:
            break
    assert at > 2


def test_a_lease_that_is_taken_when_the_interrupt_comes_is_ended(host):
    region = vmem.alloc(MIB, host_only=True)
    for at in itertools.count(1):
        kept = []
        came = interrupted(lambda: kept.append(region.acquire(BOTH)), at)
        for lease in kept:
            lease.release()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # no caller got the lease
            kept.clear()
            gc.collect()
        region.evict()
        assert region.query().host_bytes == 0, at
        if came is None:
            break
    assert at > 2
    region.free()


@pytest.fixture
def unraised(monkeypatch):
    """Does not print exceptions in a __del__, nor the warning about a dropped lease."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def interrupted_ends(make):
    """Drops an object that make() returns, each time with the interrupt at another point of its
    end.
    """
    for at in itertools.count(1):
        held = [make()]
        came = interrupted(held.clear, at, ends=True)
        yield at
        if came is None:
            break
    assert at > 2


@pytest.mark.parametrize("sweep", [vmem.stats, lambda: vmem.alloc(MIB).free(), vmem.shutdown])
def test_a_region_whose_end_is_interrupted_is_freed_by_the_next_call(host, unraised, sweep):
    for at in interrupted_ends(lambda: vmem.alloc(MIB).array()):
        sweep()
        assert regions() == 0, at
        with vmem.alloc(MIB) as other:  # usually at the address of the freed region
            vmem.stats()
            assert regions() == 1 and other.query().host_bytes == 0, at


def test_a_lease_whose_end_is_interrupted_is_ended_by_the_next_call(host, unraised):
    region = vmem.alloc(MIB, host_only=True)
    for at in interrupted_ends(lambda: region.acquire(BOTH)):
        other = region.acquire(BOTH)  # usually at the address of the lease that has ended
        vmem.stats()
        assert other.held and alive(other), at
        other.release()
        region.evict()
        assert region.query().host_bytes == 0, at
    for _ in interrupted_ends(lambda: region.acquire(BOTH)):
        region.free()
        region = vmem.alloc(MIB, host_only=True)
    region.free()


def test_a_region_and_its_lease_whose_ends_are_interrupted_are_gone(host, unraised):
    for at in interrupted_ends(lambda: vmem.alloc(MIB).acquire()):  # only the lease keeps the region
        vmem.stats()
        assert regions() == 0, at


def test_what_an_interrupt_left_stays_known_until_it_is_ended(host, unraised):
    for at in itertools.count(1):
        held = [vmem.alloc(MIB).acquire()]
        assert interrupted(held.clear, 1, ends=True) is not None
        came = interrupted(vmem.stats, at)
        vmem.stats()
        assert regions() == 0, at
        if came is None:
            break
    assert at > 5


def test_a_child_ends_nothing_that_an_interrupt_left(host, unraised):
    held = [vmem.alloc(MIB).acquire()]
    assert interrupted(held.clear, 1, ends=True) is not None
    assert _memory.owned and _memory.gone
    child = os.fork()
    if child == 0:
        os._exit(0 if not _memory.owned and not _memory.gone and vmem.stats().regions == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert vmem.stats().regions == 0


def test_no_entry_stays_of_what_has_ended(host):
    for _ in range(100):
        with vmem.alloc(MIB) as region, region.acquire():
            pass
    del region
    with pytest.raises(vmem.Error):
        vmem.alloc(MIB, block_size=5)
    gc.collect()
    vmem.stats()
    assert not _memory.owned and not _memory.gone


def test_a_log_callback_whose_installation_is_interrupted_lives_as_long_as_it_is_called():
    code = f"""
import sys, gc, itertools
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import vmem
from conftest import interrupted
from vmem import _lib
for at in itertools.count(1):
    lines = []
    came = interrupted(lambda: vmem.set_log_callback(lambda level, line: lines.append(line)), at)
    gc.collect()
    others = [_lib.LOG_CALLBACK(lambda *_: None) for _ in range(50)]
    del others
    vmem.configure(device="none", log="info")
    vmem.alloc(4096).free()
    vmem.shutdown()
    vmem.set_log_callback(None)
    if came is None:
        break
assert at > 2 and lines
"""
    done = python(code)
    assert done.returncode == 0, (done.returncode, done.stderr)
