# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a layer of an offloaded model takes and gives back its weights."""

import itertools
import sys

import pytest

import vmem
from conftest import MIB, interrupted, no_device_lease

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402
from vmem.torch import _target  # noqa: E402
from vmem.torch._engine import Engine, Frame, Scope, Token  # noqa: E402


def test_a_layer_that_is_interrupted_leaves_nothing_leased(tiers):
    """Interrupts before a lease, in it, and in the release that follows."""
    region = vmem.alloc(4 * MIB)
    region.numpy()[:] = 1
    engine = Engine(_target.resolve(tiers), 32 * MIB, 0, False)
    engine.own(region._handle)
    scope = Scope("layer")
    scope.add({region.ptr}, engine)

    def layer():
        token = Token()
        frame = Frame(scope, engine.target.stream(), token)
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
            assert not engine.stack() and not scope.running, at
            if came is None:
                break
    assert at > 5
    engine.exports.clear()
    region.free()


WHERE = ("vmem/torch/_offload.py", "vmem/torch/_engine.py", "torch/utils/_python_dispatch.py")


def interrupted_at_line(work, at):
    """Runs work() and raises KeyboardInterrupt before the at-th line of the files WHERE. Returns
    whether there are so many."""
    lines = 0

    def in_file(frame, event, _):
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return in_file

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: in_file if frame.f_code.co_filename.endswith(WHERE) else None)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_model_works_after_an_interrupt_anywhere_in_its_first_call(host):
    x = torch.arange(64.0).reshape(2, 32)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 32)]
    with torch.no_grad():
        want = torch.nn.Sequential(*layers)(x)
        model = torch.nn.Sequential(*layers)
        with vt.offload(model, "8MiB", device="host", small=0):
            model(x)  # torch imports much in the first such call, which takes long while it is traced
        for at in itertools.count(1):
            model = torch.nn.Sequential(*layers)
            run = vt.offload(model, "8MiB", device="host", small=0)
            came = interrupted_at_line(lambda m=model: m(x), at)
            assert (torch.zeros(2) + 1).sum() == 2, at
            assert torch.equal(model(x), want), at
            assert _get_current_dispatch_mode() is None, at
            assert not run._engine.stack(), at
            for use in (scope.use for scope in run._engine.scopes):
                assert use.spans == tuple(run._engine.spans(use.blocks)) and (use.ranges is None) == (not use.spans), at
            run.remove()
            if not came:
                break
    assert at > 50


def test_the_weights_of_others_are_leased_after_an_interrupt_anywhere_in_the_first_call(host):
    """nn.MultiheadAttention uses weights of a child that it never calls."""
    x = torch.ones(1, 2, 64)
    attention = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()
    with torch.no_grad():
        with vt.offload(attention, "8MiB", device="host", small=0) as run:
            attention(x, x, x)
            whole = {scope.name: scope.use.blocks for scope in run._engine.scopes}
        for at in itertools.count(1, 3):
            with vt.offload(attention, "8MiB", device="host", small=0) as run:
                came = interrupted_at_line(lambda: attention(x, x, x), at)
                attention(x, x, x)
                assert {scope.name: scope.use.blocks for scope in run._engine.scopes} == whole, at
            if not came:
                break
    assert at > 50


def test_a_removal_that_is_interrupted_is_ended_by_the_next(tiers):
    for at in itertools.count(1):
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
        run = vt.offload(model, "32MiB", device=tiers, small=0)
        came = interrupted_at_line(run.remove, at)
        run.remove()
        assert all(p.requires_grad for p in model.parameters()), at
        assert not any("forward" in module.__dict__ for module in model.modules()), at
        model.half()
        if not came:
            break
    assert at > 20
    del run, model
    vmem.shutdown()
