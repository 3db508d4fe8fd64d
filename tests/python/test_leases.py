# SPDX-License-Identifier: Apache-2.0
import copy
import errno
import gc
import pickle

import numpy as np
import pytest

import vmem
from conftest import MIB, no_device_lease


def test_a_lease_brings_the_bytes_and_keeps_them(host):
    with vmem.alloc(16 * MIB) as region:
        region.numpy()[:] = 1
        region.evict()
        with region.acquire() as lease:
            assert lease.held
            assert region.query().host_bytes == 16 * MIB
            region.evict()
            assert region.query().host_bytes == 16 * MIB
        assert not lease.held
        lease.release()  # does nothing
        region.evict()
        assert region.query().ssd_bytes == 16 * MIB


def test_many_ranges_are_leased_all_or_none(host):
    with vmem.alloc(96 * MIB) as a, vmem.alloc(16 * MIB) as b:
        out = b.array("float32", 1000)
        with vmem.acquire(a[: 4 * MIB], (out, vmem.READ | vmem.WRITE), b.numpy()[MIB : 2 * MIB]):
            assert a[: 4 * MIB].query().host_bytes == 4 * MIB
        with pytest.raises(vmem.Error) as e:
            vmem.acquire(b, a)
        assert e.value.errno == errno.ENOMEM and "host_budget 64" in e.value.strerror
        del out
        b.evict()  # nothing of it is leased
        assert b.query().host_bytes == 0


def test_an_exception_in_the_block_ends_the_lease(host):
    with vmem.alloc(4 * MIB) as region:
        with pytest.raises(RuntimeError, match="inside"):
            with region.acquire():
                raise RuntimeError("inside")
        region.free()


# Ending the copy would end the original, which would not know.
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_cannot_be_copied(host, copied):
    with vmem.alloc(4 * MIB) as region:
        region.numpy()[:] = 1
        pending = vmem.acquire_async(region)
        with region.acquire() as lease:
            for one in (lease, pending):
                with pytest.raises(TypeError, match="cannot be copied"):
                    copied(one)
            gc.collect()
            region.evict()
            assert lease.held and region.query().host_bytes == 4 * MIB
        pending.cancel()


def test_what_cannot_be_leased_is_refused(host, make_file):
    path = make_file(bytes(4096))
    with vmem.alloc(MIB) as region, vmem.map(path) as file:
        with pytest.raises(TypeError, match="at least one"):
            vmem.acquire()
        with pytest.raises(TypeError, match="str"):
            vmem.acquire("region")
        with pytest.raises(TypeError, match="pair"):
            vmem.acquire((region, vmem.READ, 3))
        with pytest.raises(TypeError, match="contiguous"):
            vmem.acquire(region.numpy()[::2])
        with pytest.raises(TypeError, match="stream"):
            region.acquire(stream="main")
        for stream in (-2, 1 << 64):  # nothing that was refused stands in the way of later calls
            for call in (vmem.acquire, vmem.acquire_async, vmem.kernel):
                with pytest.raises(ValueError, match="no stream"):
                    call(region, stream=stream)
        assert vmem.stats().regions == 2
        with pytest.raises(vmem.Error) as e:
            vmem.acquire(np.zeros(10))
        assert e.value.errno == errno.EINVAL
        with pytest.raises(vmem.Error) as e:
            region.acquire(access=4)
        assert e.value.errno == errno.EINVAL and "VMEM_READ" in e.value.strerror
        with pytest.raises(vmem.Error) as e:
            file.acquire(vmem.WRITE)
        assert e.value.errno == errno.EACCES
        with pytest.raises(vmem.Error) as e:
            region.acquire(location=0)
        assert e.value.errno == errno.ENODEV


def test_an_empty_range_needs_no_lease(host):
    with vmem.alloc(MIB) as region:
        with vmem.acquire(region[0:0]) as lease:
            assert not lease.held


def test_a_device_lease_moves_the_bytes_there_and_the_cpu_still_sees_them(sims):
    with vmem.alloc(16 * MIB) as region:
        region.numpy()[:] = np.arange(16 * MIB, dtype="uint8")
        region.evict()
        with region.acquire(location=0):
            assert region.query().device_bytes == 16 * MIB
            assert vmem.device_stats(0).leased_bytes == 16 * MIB
            assert (region.numpy() == np.arange(16 * MIB, dtype="uint8")).all()
            with pytest.raises(vmem.Error) as e:
                region.acquire()
            assert e.value.errno == errno.EBUSY
        assert no_device_lease(region)
        assert (region.numpy() == np.arange(16 * MIB, dtype="uint8")).all()


def test_a_device_lease_beyond_the_budget_is_refused_with_the_numbers(sims):
    with vmem.alloc(64 * MIB, name="large") as region:
        with pytest.raises(vmem.Error) as e:
            region.acquire(location=0)
        assert e.value.errno == errno.ENOMEM and "device_budget 32" in e.value.strerror
        with region[: 24 * MIB].acquire(location=0):
            with pytest.raises(vmem.Error) as e:
                region[32 * MIB :].acquire(location=0)
            assert e.value.errno == errno.ENOMEM and "large" in e.value.strerror
        assert no_device_lease(region[: 24 * MIB])


def test_stores_under_a_device_lease_for_writing_are_kept(sim):
    with vmem.alloc(96 * MIB) as region:
        for at in range(0, 96, 8):
            part = region[at * MIB : (at + 8) * MIB]
            with part.acquire(vmem.READ | vmem.WRITE, location=0):
                part.numpy()[:] = at
        for at in range(0, 96, 8):
            assert (region.numpy()[at * MIB : (at + 8) * MIB] == at).all()


def test_a_region_without_device_tier_is_refused_at_a_device(sims):
    with vmem.alloc(MIB, host_only=True) as region:
        with pytest.raises(vmem.Error) as e:
            region.acquire(location=0)
        assert e.value.errno == errno.EINVAL and "HOST_ONLY" in e.value.strerror


def test_hints_to_a_device_and_its_statistics(sims):
    with vmem.alloc(8 * MIB) as region:
        region.numpy()[:] = 1
        region.prefetch(0)
        region.advise(vmem.Advice.SET_PREFERRED_LOCATION, 0)
        with region.acquire(location=0):
            stats = vmem.device_stats(0)
            assert stats.backend == (vmem.BACKEND_MANAGED if sims == "sim" else vmem.BACKEND_HANDLES)
            assert stats.budget == 32 * MIB and stats.used_bytes >= 8 * MIB and stats.in_bytes >= 8 * MIB
        with pytest.raises(vmem.Error) as e:
            vmem.device_stats(9)
        assert e.value.errno == errno.ENODEV
        with pytest.raises(vmem.Error) as e:
            region.prefetch(9)
        assert e.value.errno == errno.ENODEV
