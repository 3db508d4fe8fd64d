# SPDX-License-Identifier: Apache-2.0
import copy
import errno
import gc
import pickle
import sys
import threading
import weakref

import numpy as np
import pytest

import vmem
from conftest import MIB, python


def regions():
    return vmem.stats().regions


def test_the_last_array_frees_the_region(host):
    region = vmem.alloc(MIB)
    a = region.numpy("uint64")
    view = memoryview(a)[5:10]
    a[7] = 42
    del region, a
    gc.collect()
    assert regions() == 1 and view[2] == 42
    del view
    gc.collect()
    assert regions() == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_frees_a_region_or_keeps_it_cannot_be_copied(host, copied):
    region = vmem.alloc(MIB, name="r")
    array = region.array()
    for what in (region._handle, array._export):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(what)
    if copied is not copy.copy:
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(array)
    else:
        again = copied(array)  # the same memory, which it keeps alive
        del array
        with pytest.raises(vmem.Error):
            region.free()
        again.memoryview()[0] = 1
        del again
    gc.collect()
    assert regions() == 1


def test_free_is_refused_while_arrays_are_over_it(host):
    region = vmem.alloc(MIB, name="r")
    things = [region.array(), region.numpy(), region.memoryview(), region.numpy()[5:9].reshape(2, 2)]
    with pytest.raises(vmem.Error) as e:
        region.free()
    assert e.value.errno == errno.EBUSY and "arrays" in e.value.strerror
    things[3][:] = 1
    while things:
        with pytest.raises(vmem.Error):
            region.free()
        things.pop(0)
    region.free()
    assert regions() == 0 and region.closed
    region.free()  # does nothing


def test_a_freed_region_refuses_everything(host):
    region = vmem.alloc(MIB)
    region.free()
    for call in (region.query, region.sync, region.evict, region.prefetch, region.acquire, region.numpy, region.array):
        with pytest.raises(vmem.Error) as e:
            call()
        assert e.value.errno == errno.EINVAL and "freed" in e.value.strerror
    with pytest.raises(vmem.Error):
        region.name = "x"
    with pytest.raises(vmem.Error):
        vmem.acquire(region)
    with pytest.raises(vmem.Error):
        with region:
            pass
    assert "freed" in repr(region)


def test_a_with_statement_frees_or_leaves_it_to_what_is_over_it(host):
    with vmem.alloc(MIB) as region:
        pass
    assert regions() == 0
    with vmem.alloc(MIB) as region:
        kept = region.numpy()
    assert regions() == 1
    kept[:] = 3
    assert kept.sum() == 3 * MIB
    del region, kept
    assert regions() == 0


def test_a_lease_keeps_its_region_and_free_is_refused(host):
    region = vmem.alloc(MIB)
    lease = region.acquire()
    with pytest.raises(vmem.Error) as e:
        region.free()
    assert e.value.errno == errno.EBUSY
    del region, e  # a traceback keeps the objects of its frames
    assert regions() == 1
    lease.release()
    del lease
    assert regions() == 0


def test_a_cycle_with_a_live_lease_in_it_ends_well(host):
    for _ in range(20):
        region = vmem.alloc(MIB)
        lease = region.acquire()
        cycle = [region, lease]
        cycle.append(cycle)
        del region, lease, cycle
    with pytest.warns(ResourceWarning):
        gc.collect()
    region = vmem.alloc(MIB)
    with pytest.warns(ResourceWarning):
        lease = region.acquire()
        del lease
    region.free()
    assert regions() == 0


def test_shutdown_is_refused_while_a_region_is_alive(host):
    region = vmem.alloc(MIB, name="alive")
    with pytest.raises(vmem.Error) as e:
        vmem.shutdown()
    assert e.value.errno == errno.EBUSY and "alive" in e.value.strerror
    region.free()
    vmem.shutdown()
    vmem.shutdown()
    with vmem.alloc(MIB):
        pass


def test_a_region_mapped_for_reading_can_be_pickled(host, make_file):
    path = make_file(b"abcd" * 4096)
    with vmem.map(path, 8192, 4096, name="text") as region:
        again = pickle.loads(pickle.dumps(region))
    assert bytes(again.memoryview()[:4]) == b"abcd" and again.nbytes == 8192 and again.name == "text"
    again.free()
    with vmem.alloc(4096) as region:
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(region)


def test_many_regions_and_arrays_leave_nothing(host):
    for i in range(200):
        region = vmem.alloc(64 << 10, host_only=True)
        a = region.numpy("float32")
        a[i] = i
        kept = weakref.ref(region._handle)
        del region, a
        assert kept() is None
    assert regions() == 0


@pytest.mark.parametrize("device", ["none", "sim"])
def test_arrays_that_live_to_the_end_of_the_process_do_no_harm(device):
    code = f"""
import vmem, numpy, sys
vmem.configure(device="{device}", host_budget="64MiB")
region = vmem.alloc("16MiB")
kept = region.numpy(); kept[:] = 5
class Late:
    def __init__(self, a): self.a = a
    def __del__(self): assert self.a[1234] == 5; print("looked")
late = Late(kept)
sys.modules["late"] = late
lease = region.acquire(location=vmem.HOST if {device == "none"} else 0)
"""
    ended = python(code)
    assert ended.returncode == 0 and "looked" in ended.stdout, ended.stderr
    assert "Error" not in ended.stderr


def test_threads_that_free_and_look_at_one_region_get_an_array_or_an_error(host):
    wrong = []

    def look(region):
        for _ in range(50):
            try:
                a = region.numpy("uint64")
                a[5] += 1  # its memory exists as long as the array does
            except vmem.Error as e:
                if e.errno != errno.EINVAL:
                    wrong.append(e)

    def free(region):
        while not region.closed:
            try:
                region.free()
            except vmem.Error as e:
                if e.errno != errno.EBUSY:
                    wrong.append(e)

    for _ in range(20):
        region = vmem.alloc(64 << 10, host_only=True)
        threads = [threading.Thread(target=work, args=(region,)) for work in (look, look, look)]
        for t in threads:
            t.start()
        free(region)
        for t in threads:
            t.join()
        assert not wrong, wrong
    assert regions() == 0


def test_changes_of_a_shared_file_reach_it_at_exit(make_file):
    path = make_file(bytes(4 * MIB))
    code = f"""
import vmem
vmem.configure(device="none", host_budget="32MiB")
a = vmem.map({path!r}, mode="shared").numpy()
a[:] = 9
"""
    ended = python(code)
    assert ended.returncode == 0, ended.stderr
    assert np.fromfile(path, dtype="uint8").all()
