# SPDX-License-Identifier: Apache-2.0
"""Kernels that gather rows of a table: needs a CUDA device. C++ tests use simulated devices."""

import errno
import gc

import numpy as np
import pytest

import vmem
from conftest import MIB, finish, start

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
import vmem.torch as vt  # noqa: E402

ROWS, WIDTH = 65536, 1024  # 256 MiB of float32, of which 32 MiB are on the device


@pytest.fixture
def rows_of():
    """Returns a function that makes the table: a tensor that pytest kept would keep the region from
    being freed.
    """
    start(device="handles", device_budget=64 * MIB, host_budget=1024 * MIB, device_block_size=2 * MIB)
    region = vmem.alloc(ROWS * WIDTH * 4)

    def rows():
        return vt.tensor(region, "float32", (ROWS, WIDTH))

    rows().copy_(torch.arange(ROWS, dtype=torch.float32)[:, None] + torch.arange(WIDTH, dtype=torch.float32) / WIDTH)
    yield rows
    gc.collect()
    region.free()
    finish()


def expected(ids):
    return ids.float()[:, None] + torch.arange(WIDTH, device=ids.device, dtype=torch.float32) / WIDTH


def test_rows_are_those_of_the_table(rows_of):
    table = rows_of()
    ids = torch.randint(ROWS, (5000,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    assert torch.equal(vt.gather(table, ids, budget=32 * MIB), expected(ids))
    with vt.open_table(table, budget=32 * MIB) as opened:
        for turn in range(4):
            some = (ids * (turn + 1)) % ROWS
            out = torch.empty(len(ids), WIDTH, device="cuda")
            assert opened.gather(some, out) is out
            assert torch.equal(out, expected(some))
        assert tuple(opened.gather(ids[:6].view(2, 3)).shape) == (2, 3, WIDTH)
        assert tuple(opened.gather(ids[:0]).shape) == (0, WIDTH)


def test_what_the_cpu_stores_is_what_the_next_table_has(rows_of):
    table = rows_of()
    ids = torch.tensor([3, 40000, 65535], device="cuda")
    assert torch.equal(vt.gather(table, ids, budget=32 * MIB), expected(ids))
    # while a table is open, a kernel would see this only after its block has left the device and
    # come back
    table[40000] = -1.0
    assert torch.equal(vt.gather(table, ids, budget=32 * MIB)[1], torch.full((WIDTH,), -1.0, device="cuda"))


def test_a_row_that_is_none_is_an_error_of_the_end(rows_of):
    table = rows_of()
    opened = vt.open_table(table, budget=32 * MIB)
    opened.gather(torch.tensor([1, ROWS], device="cuda"))
    with pytest.raises(vmem.Error) as e:
        opened.end()
    assert e.value.errno == errno.EINVAL
    opened.end()
    with pytest.raises(ValueError):
        opened.gather(torch.tensor([1], device="cuda"))


def test_what_is_refused(rows_of):
    table = rows_of()
    with pytest.raises(ValueError):
        vt.open_table(table.t())
    with pytest.raises(ValueError):
        vt.open_table(torch.zeros(4, 4, device="cuda"))
    with vt.open_table(table, budget=32 * MIB) as opened:
        with pytest.raises(ValueError):
            opened.gather(torch.tensor([1]))
        with pytest.raises(ValueError):
            opened.gather(torch.tensor([1], device="cuda", dtype=torch.int32))
        with pytest.raises(ValueError):
            opened.gather(torch.tensor([1], device="cuda"), torch.empty(1, 3, device="cuda"))
    with pytest.raises(vmem.Error):
        vt.open_table(torch.from_numpy(np.zeros((4, 4), np.float32)))
