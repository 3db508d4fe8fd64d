# SPDX-License-Identifier: Apache-2.0
"""Replacing weights of a model with hooks is refused, and the message says how to do it."""

import copy
import errno
import io
import pickle

import pytest

import vmem

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from torch import nn  # noqa: E402


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256)  # its bias is below `small`
        self.register_buffer("scale", torch.full((256,), 2.0))

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


def made():
    torch.manual_seed(4)
    return Small()


def state(model):
    return {n: (t.dtype, t.device, t.clone()) for n, t in model.state_dict().items()}


CALLS = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float16),
    "to a type": lambda m: m.to(torch.float16),
    "to a device": lambda m: m.to("cpu"),
    "to another layout": lambda m: m.to(memory_format=torch.channels_last),
    "cpu": lambda m: m.cpu(),
    "cuda": lambda m: m.cuda(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "half of a part": lambda m: m.down.half(),
    "half of what holds it": lambda m: nn.Sequential(m).half(),
    "load_state_dict": lambda m: m.load_state_dict(Small().state_dict()),
    "load_state_dict, assigned": lambda m: m.load_state_dict(Small().state_dict(), assign=True),
    "load_state_dict of a part": lambda m: m.up.load_state_dict(Small().up.state_dict()),
    "vt.assign": lambda m: vt.assign(m, Small().state_dict()),
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda m: copy.deepcopy([nn.Sequential(m)]),
    "pickle": pickle.dumps,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
}


def can_assign():
    return "assign" in nn.Module.load_state_dict.__code__.co_varnames


def test_calls_that_would_replace_or_copy_weights_are_refused_and_change_nothing(tiers):
    model, x = made(), torch.randn(3, 256)
    before = state(model)
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        want = model(x.to(handle.device))
        for name, call in CALLS.items():
            if "assigned" in name and not can_assign():
                continue
            with pytest.raises(vmem.Error, match="is offloaded.*remove") as e:
                call(model)
            assert e.value.errno == errno.EBUSY, name
        assert torch.equal(model(x.to(handle.device)), want)
    after = state(model)
    assert all(before[n][:2] == after[n][:2] and torch.equal(before[n][2], after[n][2]) for n in before)
    assert torch.equal(model(x), want.cpu())
    # the model is like any other again
    assert torch.equal(copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x))
    model.load_state_dict(Small().state_dict())
    model.half()
    assert {t.dtype for t in model.state_dict().values()} == {torch.float16}
    del model, e, after


REPLACED = {
    "a parameter": lambda m: setattr(m.up, "weight", nn.Parameter(torch.zeros(512, 256), requires_grad=False)),
    "its data": lambda m: setattr(m.up.weight, "data", torch.zeros(512, 256)),
    "its data, of another type": lambda m: setattr(m.up.weight, "data", m.up.weight.data.half()),
    "nothing in its place": lambda m: setattr(m.up, "weight", None),
    "by its dictionary": lambda m: m.up._parameters.update(weight=nn.Parameter(torch.zeros(512, 256))),
}


def test_a_weight_that_was_replaced_is_found_when_its_module_runs_and_stays_the_users(tiers):
    for how, replace in REPLACED.items():
        model, x = made(), torch.randn(3, 256)
        down = model.down.weight.detach().clone()
        with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
            model(x.to(handle.device))
            replace(model)
            given = model.up.weight
            address = None if given is None else given.data_ptr()
            with pytest.raises(vmem.Error, match="layer 'up' is offloaded, and its weight was replaced.*remove") as e:
                model(x.to(handle.device))
            assert e.value.errno == errno.EBUSY, how
        assert model.up.weight is given and (given is None or given.data_ptr() == address), how
        assert torch.equal(model.down.weight, down)
        del model, e


def test_data_that_a_small_weight_was_given_stays(tiers):
    model = made()
    with vt.offload(model, device_budget="16MiB"):
        model.down.bias.data = torch.ones(256)
    assert torch.equal(model.down.bias, torch.ones(256))


def test_training_mode_and_hooks_of_others_go_on(tiers):
    model, x = made(), torch.randn(3, 256)
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        seen = []
        hook = model.up.register_forward_hook(lambda *_: seen.append(1))
        model.eval().train(False).requires_grad_(False)
        model(x.to(handle.device))
        model.state_dict()
        hook.remove()
    assert seen == [1] and not [m for m in model.modules() if {"_apply", "forward"} & m.__dict__.keys()]
