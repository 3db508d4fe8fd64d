# SPDX-License-Identifier: Apache-2.0
import errno
import gc
import os
import sys
import traceback

import numpy as np
import pytest

import vmem
from conftest import MIB


def in_child(work):
    """Runs work() in a forked child; its exit status says whether it ended well."""
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


def test_a_forked_child_is_refused_with_words_and_the_parent_goes_on(host):
    region = vmem.alloc(8 * MIB)
    region.numpy()[:] = 3

    def child():
        for call in (region.query, region.numpy, region.acquire, region.array, lambda: vmem.alloc(MIB), vmem.stats):
            with pytest.raises(vmem.Error) as e:
                call()
            assert e.value.errno == errno.ECHILD and "forked" in e.value.strerror

    in_child(child)
    region.evict()
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
    region = vmem.alloc(128 * MIB)  # twice the budget: blocks come and go meanwhile
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
