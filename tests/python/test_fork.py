# SPDX-License-Identifier: Apache-2.0
import errno
import gc
import io
import os
import pickle
import shutil
import sys
import traceback

import numpy as np
import pytest

import vmem
from conftest import MIB


def in_child(work):
    """Runs work() in a forked child, which must exit with success."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def test_a_forked_child_has_no_region_of_its_parent_and_that_goes_on(host):
    region = vmem.alloc(8 * MIB)
    region.numpy()[:] = 3

    def child():
        for call in (region.query, region.numpy, region.acquire, region.array, region.free, region.evict):
            with pytest.raises(vmem.Error) as e:
                call()
            assert e.value.errno == errno.ECHILD and "forked" in e.value.strerror

    in_child(child)
    region.evict()
    assert (region.numpy() == 3).all()


def test_a_forked_child_is_told_of_arrays_of_its_parent(host):
    region = vmem.alloc(8 * MIB)
    a = region.numpy()

    def child():
        for call in (vmem.accessible, lambda a: vmem.save_npy(io.BytesIO(), a)):
            for what in (a, a[4096:]):
                with pytest.raises(vmem.Error, match="forked") as e:
                    call(what)
                assert e.value.errno == errno.ECHILD

    in_child(child)
    with vmem.accessible(a):
        pass


def use_regions(size=96 * MIB):
    """Uses more than the budget inherited from the parent."""
    with vmem.alloc(size) as region:
        a = region.numpy("uint64")
        a[:: 4096 // 8] = 5
        region.evict()
        total = int(a[:: 4096 // 8].sum())
        del a
    return total


def test_a_forked_child_has_regions_of_its_own(host):
    region = vmem.alloc(8 * MIB)
    region.numpy()[:] = 3
    lease = region.acquire()

    def child():
        nonlocal region, lease
        assert vmem.get("host_budget") == str(64 * MIB)
        assert use_regions() == 5 * 96 * MIB // 4096
        mine = vmem.alloc(4 * MIB)
        with mine.acquire():
            pass
        addresses = mine.numpy()
        del region, lease  # drops the parent's objects, beside the child's own
        gc.collect()
        addresses[:] = 1
        assert vmem.stats().regions == 1
        in_child(lambda: use_regions(8 * MIB))
        assert (addresses == 1).all()

    in_child(child)
    lease.release()
    region.evict()
    assert (region.numpy() == 3).all()


def test_a_pool_of_forked_workers_uses_regions(host):
    import multiprocessing

    region = vmem.alloc(8 * MIB)
    region.numpy()[:] = 3
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(use_regions, [8 * MIB] * 9) == [5 * 8 * MIB // 4096] * 9
    assert (region.numpy() == 3).all()


def test_objects_that_die_in_a_child_leave_the_parents_alone(host):
    held = {"region": vmem.alloc(4 * MIB)}
    held["array"] = held["region"].numpy()
    held["lease"] = held["region"].acquire()

    def child():
        complaints = []
        sys.unraisablehook = complaints.append
        held.clear()
        gc.collect()
        assert not complaints

    in_child(child)
    held["array"][:] = 1
    held["lease"].release()
    assert vmem.stats().regions == 1
    held.clear()


def test_children_that_compute_on_their_own_memory_do_not_disturb(host):
    region = vmem.alloc(128 * MIB)  # twice the budget, so that blocks come and go
    a = region.numpy("uint64")
    for round_ in range(3):
        a[:: 4096 // 8] = round_
        in_child(lambda: np.arange(MIB).sum())
        assert (a[:: 4096 // 8] == round_).all()
    del a


def test_a_spawned_worker_maps_a_pickled_region_again(host, make_file):
    import multiprocessing

    path = make_file(bytes(range(256)) * 4096)
    with vmem.map(path) as region:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(total, (region,)) == sum(range(256)) * 4096


def total(region):
    return int(region.numpy().sum(dtype="int64"))


def changed(path, how):
    if how == "grown":
        with open(path, "ab") as file:
            file.write(b"x")
    elif how == "written":
        with open(path, "r+b") as file:
            file.write(b"x")
        before = os.stat(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif how == "written, its time put back":
        before = os.stat(path)
        with open(path, "r+b") as file:
            file.write(b"x")
        while os.stat(path).st_ctime_ns == before.st_ctime_ns:  # a tick of the kernel
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replaced":
        before = os.stat(path)
        shutil.copyfile(path, path + ".new")
        os.utime(path + ".new", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(path + ".new", path)
    elif how == "removed":
        os.unlink(path)


@pytest.mark.parametrize("how", ["grown", "written", "written, its time put back", "replaced", "removed"])
def test_a_pickled_region_is_not_mapped_again_once_its_file_has_changed(host, make_file, how):
    path = make_file(bytes(8192))
    before = os.stat(path)
    with vmem.map(path) as region:
        with pickle.loads(pickle.dumps(region)) as again:
            assert again.nbytes == 8192
            twice = pickle.dumps(again)
        pickled = pickle.dumps(region)
        changed(path, how)
        for text in (pickled, twice):
            with pytest.raises(vmem.Error, match=f"inode {before.st_ino}, 8192 bytes") as e:
                pickle.loads(text)
            assert e.value.errno == errno.ESTALE and path in e.value.strerror
            assert how == "removed" or f"{os.stat(path).st_size} bytes" in e.value.strerror
    assert vmem.stats().regions == 0


def test_a_file_that_is_replaced_while_it_is_mapped_again_is_not_taken(host, make_file, monkeypatch):
    from vmem import _region

    path = make_file(bytes(8192))
    with vmem.map(path) as region:
        pickled = pickle.dumps(region)
        create = _region._create
        monkeypatch.setattr(_region, "_create", lambda *a: (changed(path, "replaced"), create(*a)))
        with pytest.raises(vmem.Error) as e:
            pickle.loads(pickled)
        assert e.value.errno == errno.ESTALE
    assert vmem.stats().regions == 0
