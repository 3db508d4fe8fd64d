# SPDX-License-Identifier: Apache-2.0
"""The device memory of layers in whole blocks, compared with what was promised before anything
moved.
"""

import errno

import pytest

import vmem
from conftest import MIB, finish, start

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from test_torch_offload import N, inputs, made, nothing_leased  # noqa: E402
from torch import nn  # noqa: E402


class Uneven(nn.Module):
    """Layers of that many MiB; with `tied`, the second also uses the first one's weight."""

    def __init__(self, sizes, tied=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(N, size * MIB // (4 * N), bias=False) for size in sizes)
        if tied:
            self.layers[1].other = self.layers[0].weight

    def forward(self, x):
        return sum(layer(x).sum(dim=1) for layer in self.layers)


# A lease of the second layer needs its 63 MiB in whole blocks of 4 MiB: the whole budget, if it
# begins at a block. With the first one's weight it fits only in blocks of 2 MiB.
@pytest.mark.parametrize("sizes, tied, block", [((5, 63, 3), False, 4), ((5, 57, 9), True, 2)])
def test_layers_that_are_accepted_fit_in_the_blocks_that_they_get(monkeypatch, sizes, tied, block):
    from vmem.torch import _target

    monkeypatch.setattr(_target, "MOST_ROUNDING", 25)  # of a budget small enough for a test
    start(device="sim-handles", host_budget=256 * MIB, device_budget=64 * MIB, block_size="auto")
    model, x = made(Uneven, sizes=sizes, tied=tied), inputs()
    with torch.no_grad():
        want = model(x)
        with vt.offload(model, device_budget=64 * MIB) as handle:
            assert vmem.query(handle._plan.weights[0].tensor).block_size == block * MIB
            assert torch.equal(model(x), want)
            assert nothing_leased(handle)
    del model, handle
    finish()


def test_a_layer_that_does_not_fit_is_refused_before_anything_moves(tiers):
    model = made(Uneven, sizes=(5, 15))
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(vmem.Error, match="'layers.1'.*15.0 MiB of weights and needs 16.0 MiB") as e:
        vt.offload(model, device_budget="14MiB")
    assert e.value.errno == errno.ENOMEM
    assert [p.data_ptr() for p in model.parameters()] == before and vmem.stats().regions == 0
    del model
