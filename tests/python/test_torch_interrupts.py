# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a layer of an offloaded model takes and gives back its weights."""

import itertools

import pytest

import vmem
from conftest import MIB, interrupted, no_device_lease

torch = pytest.importorskip("torch", reason="torch is not installed")
from vmem.torch import _target  # noqa: E402
from vmem.torch._engine import Engine, Frame, Scope  # noqa: E402


def test_a_layer_that_is_interrupted_leaves_nothing_leased(tiers):
    """Interrupts before a lease, in it, and in the release that follows."""
    region = vmem.alloc(4 * MIB)
    region.numpy()[:] = 1
    engine = Engine(_target.resolve(tiers), 32 * MIB, 0, False)
    engine.own(region._handle)
    scope = Scope("layer")
    scope.add({region.ptr}, engine)

    def layer():
        frame = Frame(scope, engine.target.stream())
        try:
            engine.enter(frame)
        finally:
            engine.leave(frame)

    with torch.no_grad():
        for at in itertools.count(1):
            came = interrupted(layer, at)
            if tiers == "host":
                region.evict()
                assert region.query().host_bytes == 0, at
            else:
                assert no_device_lease(region), at
            assert not engine.local.stack and scope.depth == 0, at
            if came is None:
                break
    assert at > 5
    engine.exports.clear()
    region.free()
