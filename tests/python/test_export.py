# SPDX-License-Identifier: Apache-2.0
"""Leased blocks exported to others. tests/system/export_test.cpp tests what the importers see."""

import errno
import mmap
import os
import struct

import pytest

import vmem
from conftest import MIB, finish, start

BLOCK = 2 * MIB


@pytest.fixture
def handles():
    start(device="sim-handles", host_budget=128 * MIB)
    yield
    finish()


def words_at(fd, size=BLOCK):
    """Returns the words at the block in the memory behind a simulated device's descriptor."""
    with mmap.mmap(fd, size, offset=os.lseek(fd, 0, os.SEEK_CUR)) as seen:
        return struct.unpack("2Q", seen[:16])


@pytest.mark.parametrize("dma_buf", [False, True])
def test_a_leased_block_becomes_a_descriptor(handles, dma_buf):
    with vmem.alloc(2 * BLOCK) as region:
        a = region.numpy("uint64")
        a[BLOCK // 8 :][:2] = 5, 6
        with region.acquire(vmem.READ, 0):
            fd = vmem.export(a[BLOCK // 8 :][:1], dma_buf=dma_buf)
            assert words_at(fd) == (5, 6)
            assert not os.get_inheritable(fd)
            os.close(fd)
        del a


def test_what_is_not_leased_is_refused(handles):
    with vmem.alloc(2 * BLOCK) as region:
        with pytest.raises(vmem.Error) as e:
            vmem.export(region)
        assert e.value.errno == errno.EINVAL
        with region.acquire(vmem.READ, 0), pytest.raises(vmem.Error) as e:
            vmem.export(region)
        assert e.value.errno == errno.EINVAL and "dma-buf" in e.value.strerror
