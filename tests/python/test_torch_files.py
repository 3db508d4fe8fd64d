# SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import struct
import threading

import pytest

import vmem
from conftest import MIB

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture
def folder(make_file):
    path = os.path.dirname(make_file(b"", "marker"))
    os.unlink(os.path.join(path, "marker"))
    return path


def weights(seed=0):
    torch.manual_seed(seed)
    return {
        "layer.0.weight": torch.randn(300, 512),
        "layer.0.bias": torch.randn(300),
        "half": torch.randn(64, 64).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_what_was_saved_is_loaded_without_a_copy(host, folder):
    want = weights()
    path = os.path.join(folder, "model.safetensors")
    vt.save(want, path, metadata={"format": "pt"})
    got = vt.load(path)
    assert vmem.stats().regions == 1 and vmem.stats().read_bytes == 0
    assert set(got) == set(want) and all(equal(got[n], want[n]) for n in want)
    assert got["layer.0.weight"].data_ptr() % 256 == 0
    kept = got["layer.0.bias"]
    del got
    assert vmem.stats().regions == 1 and torch.equal(kept, want["layer.0.bias"])
    del kept
    assert vmem.stats().regions == 0


def test_a_change_in_place_is_lost_and_one_of_a_clone_is_kept(host, folder):
    path = os.path.join(folder, "model.safetensors")
    vt.save({"x": torch.ones(MIB)}, path)
    x = vt.load(path)["x"]
    clone = x.clone()
    x.zero_()
    clone.zero_()
    assert x.sum() == 0
    vmem.evict(x)
    assert x.sum() == MIB and clone.sum() == 0 and vt.load(path)["x"].sum() == MIB
    assert "clone()" in vt.load.__doc__  # which has to say so


def test_a_file_from_elsewhere_is_loaded_whatever_its_alignment(host, folder):
    path = os.path.join(folder, "odd.safetensors")
    values = torch.arange(1000, dtype=torch.float32)
    for padding in range(8):
        header = json.dumps({"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
        header += b" " * padding
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + values.numpy().tobytes())
        assert torch.equal(vt.load(path)["x"], values)


def test_several_files_an_index_and_a_folder(host, folder):
    one, two = weights(1), {"other." + n: t for n, t in weights(2).items()}
    paths = [os.path.join(folder, f"model-0000{i}-of-00002.safetensors") for i in (1, 2)]
    vt.save(one, paths[0])
    vt.save(two, paths[1])
    both = {**one, **two}
    index = os.path.join(folder, "model.safetensors.index.json")
    with open(index, "w", encoding="utf-8") as f:
        json.dump({"weight_map": {n: os.path.basename(paths[n in two]) for n in both}}, f)
    for given in (paths, index, folder):
        got = vt.load(given)
        assert set(got) == set(both) and all(equal(got[n], both[n]) for n in both)
        del got


def test_a_file_that_is_refused_leaves_nothing_mapped(host, folder):
    good, bad = os.path.join(folder, "good.safetensors"), os.path.join(folder, "bad.safetensors")
    vt.save(weights(), good)
    with open(good, "rb") as f:
        content = f.read()
    with open(bad, "wb") as f:
        f.write(content[:-1])
    with pytest.raises(vmem.FormatError, match="bad.safetensors.*truncated"):
        vt.load([good, bad])
    assert vmem.stats().regions == 0


def test_a_model_larger_than_the_budget_is_loaded_in_pieces(host, folder):
    want = {f"w{i}": torch.full((MIB,), float(i)) for i in range(32)}
    path = os.path.join(folder, "large.safetensors")
    vt.save(want, path)
    got = vt.load(path)
    for n in want:
        assert torch.equal(got[n], want[n])
    assert vmem.stats().host_bytes <= 64 * MIB
    del got


def test_tied_tensors_are_saved_once_and_what_cannot_be_saved_is_named(host, folder):
    path = os.path.join(folder, "tied.safetensors")
    w = torch.randn(100, 100)
    vt.save({"a": w, "b": w, "c": w.t().clone()}, path, shared="once")
    got = vt.load(path)
    assert set(got) == {"a", "c"} and torch.equal(got["c"], w.t())
    del got
    with pytest.raises(TypeError, match="'m'.*meta"):
        vt.save({"m": torch.empty(3, device="meta")}, path)
    with pytest.raises(ValueError, match="align 3"):
        vt.save({}, path, align=3)
    with pytest.raises(OSError):
        vt.save({"a": w}, os.path.join(folder, "no", "such"))
    assert set(vt.load(path)) == {"a", "c"}  # the file was not damaged
    assert os.listdir(folder) == ["tied.safetensors"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.mid = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x):
        return self.head(self.mid(self.embed(x)) * self.scale)


def test_a_skeleton_costs_nothing_and_takes_mapped_weights(host, folder):
    torch.manual_seed(5)
    model = Tied()
    path = os.path.join(folder, "model.safetensors")
    vt.save(model.state_dict(), path, shared="once")
    with vt.init_empty_weights():
        bare = Tied()
    assert all(p.device.type == "meta" for p in bare.parameters()) and bare.scale.device.type == "cpu"
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    tensors = vt.load(path)
    assert "head.weight" not in tensors  # it was written once, as embed.weight
    assert vt.assign(bare, tensors) is bare
    assert bare.head.weight is bare.embed.weight and bare.mid.weight.data_ptr() == tensors["mid.weight"].data_ptr()
    x = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(bare(x), model(x))
    del bare, tensors


def test_empty_weights_are_for_one_thread_and_keep_ties_and_classes(host):
    class Own(nn.Parameter):
        pass

    inside, out = threading.Event(), threading.Event()

    def other():
        with vt.init_empty_weights():
            inside.set()
            out.wait()

    thread = threading.Thread(target=other)
    with vt.init_empty_weights():
        thread.start()
        inside.wait()
        model = nn.Module()
        model.a = model.b = nn.Parameter(torch.zeros(4), requires_grad=False)
        model.c = Own(torch.zeros(4))
        lazy = nn.LazyLinear(3)
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # while the other thread is inside
    out.set()
    thread.join()
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert model.a is model.b and model.a.device.type == "meta" and not model.a.requires_grad
    assert type(model.c) is Own and model.c.device.type == "meta"
    assert isinstance(lazy.weight, nn.parameter.UninitializedParameter)


def test_an_assignment_that_does_not_fit_is_refused_by_name(host):
    with vt.init_empty_weights():
        model = Tied()
    good = dict(Tied().state_dict())
    with pytest.raises(vmem.Error, match="'mid.weight'.*\\[3, 3\\].*\\[32, 32\\]"):
        vt.assign(model, {**good, "mid.weight": torch.zeros(3, 3)})
    with pytest.raises(vmem.Error, match="no place for 'stranger'"):
        vt.assign(model, {**good, "stranger": torch.zeros(1)})
    for missing in ("mid.bias", "scale"):
        with pytest.raises(vmem.Error, match=f"nothing was given for '{missing}'") as e:
            vt.assign(model, {n: t for n, t in good.items() if n != missing})
        assert e.value.errno == errno.EINVAL
    assert all(p.device.type == "meta" for p in model.parameters())
    vt.assign(model, {"mid.bias": torch.ones(32), "stranger": torch.zeros(1)}, strict=False)
    assert model.mid.bias.sum() == 32 and model.mid.weight.device.type == "meta"
