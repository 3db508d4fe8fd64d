# SPDX-License-Identifier: Apache-2.0
"""Asynchronous leases, ranges of foreign arrays, and the log's callback."""

import asyncio
import errno
import select

import pytest

import vmem
from conftest import MIB, python

np = pytest.importorskip("numpy")


def on_ssd(blocks):
    region = vmem.alloc(blocks * 2 * MIB, host_only=True)
    region.numpy()[:] = 7
    region.evict()
    return region


def test_a_lease_is_awaited(host):
    region = on_ssd(4)

    async def use():
        lease = await vmem.acquire_async(region[: 2 * MIB], (region[4 * MIB :], vmem.READ | vmem.WRITE))
        assert lease.held and region[: 2 * MIB].query().host_bytes == 2 * MIB
        with pytest.raises(vmem.Error) as e:
            region._handle.free()
        assert e.value.errno == errno.EBUSY
        lease.release()
        assert not lease.held
        async with vmem.acquire_async(region) as all_of_it:
            assert all_of_it.held and (region.numpy() == 7).all()
        assert not all_of_it.held

    asyncio.run(use())
    region.free()


def test_many_are_awaited_at_once(host):
    region = on_ssd(8)

    async def one(i):
        async with vmem.acquire_async(region[i * 2 * MIB : (i + 1) * 2 * MIB]):
            return int(region.numpy()[i * 2 * MIB])

    async def all_of_them():
        return await asyncio.gather(*(one(i) for i in range(8)))

    assert asyncio.run(all_of_them()) == [7] * 8
    region.free()


def test_one_that_fails_raises_where_it_is_awaited(host):
    region = vmem.alloc("256MiB", host_only=True)  # above the budget

    async def use():
        with pytest.raises(vmem.Error) as e:
            await vmem.acquire_async(region)
        assert e.value.errno == errno.ENOMEM and "budget" in e.value.strerror
        pending = vmem.acquire_async(region)
        for _ in range(2):  # a failed lease stays failed
            with pytest.raises(vmem.Error) as e:
                while not pending.ready():
                    await asyncio.sleep(0)
            assert e.value.errno == errno.ENOMEM
        with pytest.raises(vmem.Error):
            async with pending:
                pytest.fail("the body of a lease that failed")

    asyncio.run(use())
    region.free()


def test_a_cancelled_task_leases_nothing(host, monkeypatch):
    region = on_ssd(1)

    async def use():
        with monkeypatch.context() as patched:
            # it waits, however fast the disk is
            patched.setattr(vmem.PendingLease, "ready", lambda self: False)
            pending = vmem.acquire_async(region)
            task = asyncio.ensure_future(pending._wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        again = vmem.acquire_async(region)
        again.cancel()
        for _ in range(2):  # ended, and it stays ended
            with pytest.raises(vmem.Error) as e:
                again.ready()
            assert e.value.errno == errno.ECANCELED
        with pytest.raises(vmem.Error):
            await again
        third = vmem.acquire_async(region)
        lease = await third
        with pytest.raises(RuntimeError):
            await third
        assert lease.held
        lease.release()

    asyncio.run(use())
    region.free()


def test_without_asyncio_a_descriptor_tells(host):
    region = on_ssd(1)
    pending = vmem.acquire_async(region)
    readable, _, _ = select.select([pending.fileno()], [], [], 600)
    assert readable and pending.ready()
    pending.cancel()
    region.free()


def test_an_empty_range_is_leased_at_once(host):
    region = vmem.alloc(4096, host_only=True)
    pending = vmem.acquire_async(region[:0])
    assert pending.ready()

    async def use():
        return await pending

    assert not asyncio.run(use()).held


def test_ranges_of_foreign_arrays(host):
    region = vmem.alloc(8 * MIB, host_only=True)
    half = region.numpy("uint32")[: MIB]
    half[:] = 9
    vmem.sync(half)
    vmem.advise(half, "cold")
    vmem.evict(half)
    assert vmem.query(half).ssd_bytes == 4 * MIB
    vmem.prefetch(half, region[4 * MIB :])
    assert (half == 9).all()
    vmem.sync(half[:0])
    assert vmem.query(half[:0])[:4] == (0, 0, 0, 0)
    with pytest.raises(vmem.Error):
        vmem.prefetch(np.zeros(4096, "uint8"))
    del half
    region.free()


def test_the_log_goes_to_a_callback_also_at_the_end():
    code = """
import vmem
lines = []
vmem.set_log_callback(lambda level, line: lines.append((level, line)))
vmem.configure(device="none", log="info")
vmem.alloc(4096).free()
vmem.set_log_callback(None)
assert lines and all(0 <= level <= 3 and isinstance(line, str) for level, line in lines), lines
def wrong(level, line):
    raise ValueError("of the callback")
vmem.set_log_callback(wrong)
vmem.shutdown()
vmem.set_log_callback(lambda level, line: print("line"))
region = vmem.alloc(4096)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
