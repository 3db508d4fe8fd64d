# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every place where Python lets a signal's handler run: what libvmem did is not forgotten, and what is
forgotten was not done."""

import errno
import gc
import itertools
import os
import warnings

import pytest

import vmem
from conftest import MIB, finish, interrupted, python, start
from vmem import _lib, _memory

BOTH = vmem.READ | vmem.WRITE


def alive(lease):
    return _lib.lib.vmem_lease_poll(lease._lease) == 0


def test_a_release_that_is_interrupted_never_ends_another_lease(host):
    region = vmem.alloc(8 * MIB, host_only=True)
    for at in itertools.count(1):
        lease = region.acquire(BOTH)
        came = interrupted(lease.release, at)
        other = region.acquire(BOTH)  # as a rule at the address of the one that has ended
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
        other.end()  # EINVAL: it was ended
        if came is None:
            break
    assert at > 2
    region.free()
    finish()


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
        """vmem_free, where the disk is full."""

        limits = []

        @staticmethod
        def function(_):
            _lib.lib.vmem_create.function(None, 0, None)  # the thread's last failure
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


def test_a_lease_that_is_taken_when_the_interrupt_comes_is_ended(host):
    region = vmem.alloc(MIB, host_only=True)
    for at in itertools.count(1):
        kept = []
        came = interrupted(lambda: kept.append(region.acquire(BOTH)), at)
        for lease in kept:
            lease.release()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # nobody was given it
            kept.clear()
            gc.collect()
        region.evict()
        assert region.query().host_bytes == 0, at
        if came is None:
            break
    assert at > 2
    region.free()


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
