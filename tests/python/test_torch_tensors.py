# SPDX-License-Identifier: Apache-2.0
import errno
import gc
import os

import numpy as np
import pytest

import vmem
from conftest import MIB, no_device_lease

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402


def test_a_tensor_is_the_region_and_keeps_it(host):
    region = vmem.alloc(MIB)
    t = vt.tensor(region, "float32", (512, 512))
    t[3, 4] = 1.5
    assert region.numpy("float32")[3 * 512 + 4] == 1.5 and t.data_ptr() == region.ptr
    part = t[100:200].t()
    del t
    with pytest.raises(vmem.Error):
        region.free()
    del part
    gc.collect()
    region.free()


TYPES = "bool uint8 int8 int16 float16 bfloat16 int32 float32 int64 float64 complex64".split()


@pytest.mark.parametrize("name", TYPES)
def test_every_type_has_its_tensor(host, name):
    with vmem.alloc(4096) as region:
        array = region.array(name, (3, 5), offset=64)
        t = vt.tensor(array)
        assert str(t.dtype) == "torch." + name and tuple(t.shape) == (3, 5) and t.data_ptr() == region.ptr + 64
        del t, array


def test_scalars_and_empty_tensors(host):
    with vmem.alloc(4096) as region:
        region.numpy("int32")[0] = 7
        assert vt.tensor(region.array("int32", ())).item() == 7
        assert tuple(vt.tensor(region.array("float32", (0, 3))).shape) == (0, 3)
        with pytest.raises(TypeError):
            vt.tensor(region.array("int32"), dtype="int32")
        with pytest.raises(TypeError, match="a Region or an Array, not Tensor"):
            vt.tensor(torch.ones(3))


def test_torch_takes_dlpack_from_an_array(host):
    with vmem.alloc(4096) as region:
        t = torch.utils.dlpack.from_dlpack(region.array("int64").__dlpack__())
        t[5] = 55
        assert region.numpy("int64")[5] == 55
        del t


def test_a_view_of_the_same_memory_keeps_strides(host):
    with vmem.alloc(MIB) as region:
        t = vt.tensor(region, "float32", (64, 128))
        again = vt.view(t[3:9, ::2].t(), "cpu")
        assert again.data_ptr() == t[3].data_ptr() and tuple(again.shape) == (64, 6) and again.stride() == (2, 128)
        t.copy_(torch.arange(64 * 128.0).view(64, 128))
        assert torch.equal(again, t[3:9, ::2].t())
        with pytest.raises(vmem.Error) as e:
            vt.view(torch.zeros(4), "cpu")
        assert e.value.errno == errno.EINVAL
        with pytest.raises(ValueError, match="meta"):
            vt.view(t, "meta")
        del t, again


def test_a_tensor_larger_than_the_budget_computes_right(host):
    with vmem.alloc(128 * MIB) as region:
        t = vt.tensor(region, "float32", (32 * MIB,))
        for i in range(0, 32 * MIB, MIB):
            t[i : i + MIB] = i // MIB
        want = torch.arange(32.0).repeat_interleave(MIB)
        for i in range(0, 32 * MIB, 4 * MIB):
            assert torch.equal(t[i : i + 4 * MIB], want[i : i + 4 * MIB])
        assert vmem.stats().host_bytes <= 64 * MIB
        del t


def test_leases_take_tensors(sim):
    with vmem.alloc(16 * MIB) as region:
        t = vt.tensor(region, "float32", (1024, 4096))
        with vmem.acquire(t[256:512], location=0):
            assert region.query().device_bytes == 4 * MIB
            t[256:512].sum()
        assert no_device_lease(region)
        with vt.leased(t, (t[:8], vmem.READ | vmem.WRITE)):
            assert region.query().host_bytes == 16 * MIB
        with vmem.acquire(t[:0]) as lease:
            assert not lease.held
        del t


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((16,), float(i))


def test_data_loaders_that_fork_run_beside_regions(host):
    with vmem.alloc(128 * MIB) as region:
        weights = vt.tensor(region, "float32", (32 * MIB,))
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2)
        for epoch in range(2):
            got = []
            for n, batch in enumerate(loader):
                weights[n * MIB : (n + 4) * MIB] = n + epoch  # blocks come and go while workers are forked
                got.append(batch)
                assert (weights[n * MIB : (n + 4) * MIB] == n + epoch).all()
            assert torch.equal(torch.cat(got)[:, 0], torch.arange(64.0))
        del weights


class Records(torch.utils.data.Dataset):
    """A data set over a mapped file, for spawned workers."""

    def __init__(self, region):
        self.region = region

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return vt.tensor(self.region.array("int32", 16, i * 64)).clone()


def test_data_loaders_that_spawn_map_the_file_again(host, make_file):
    path = make_file(np.arange(512, dtype="int32").tobytes())
    with vmem.map(path) as region:
        options = {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "spawn"}
        got = torch.cat(list(torch.utils.data.DataLoader(Records(region), **options)))
        assert torch.equal(got.flatten(), torch.arange(512, dtype=torch.int32))
    assert os.path.exists(path)
