# SPDX-License-Identifier: Apache-2.0
"""Models that do not fit into memory, on the host tier and on the simulated device, compared with
the plain model.
"""

import copy
import errno
import gc
import os
import threading
import time
import weakref

import pytest

import vmem
from conftest import MIB, PATIENCE, finish, no_device_lease, start

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from torch import nn  # noqa: E402

N = 1024  # a layer of N x N float32 has 4 MiB


class Chain(nn.Module):
    def __init__(self, layers=10, n=N):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(layers))
        self.norm = nn.LayerNorm(n)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def made(kind=Chain, seed=0, **arguments):
    torch.manual_seed(seed)
    return kind(**arguments).eval()


def inputs(rows=3, n=N, seed=9):
    torch.manual_seed(seed)
    return torch.randn(rows, n)


def weights_of(handle):
    """Returns the ranges of all offloaded weights."""
    return [(w.tensor, vmem.READ) for w in handle._plan.weights]


def nothing_leased(handle):
    return no_device_lease(*weights_of(handle)) and all(not s.running for s in handle._engine.scopes)


def test_a_model_four_times_the_budget_gives_the_same_bits_in_every_pass(tiers):
    plain, model = made(), made()
    x = inputs()
    with torch.no_grad():
        want = plain(x)
    with vt.offload(model, device_budget="12MiB", prefetch_bytes="4MiB") as handle, torch.no_grad():
        assert handle.location == (0 if tiers == "sim" else vmem.HOST) and handle.device == torch.device("cpu")
        assert handle.offloaded_bytes == 10 * N * N * 4
        for _ in range(4):
            assert torch.equal(model(x), want)
            if tiers == "sim":
                stats = vmem.device_stats(0)
                assert stats.used_bytes <= stats.budget == 12 * MIB
        assert nothing_leased(handle)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    del model, handle


def test_mapped_files_are_offloaded_without_a_copy(tiers, make_file):
    plain = made()
    path = make_file(b"", "model.safetensors")
    vt.save(plain.state_dict(), path)
    with vt.init_empty_weights():
        model = Chain()
    vt.assign(model, vt.load(path))
    x = inputs()
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        assert vmem.stats().regions == 1
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        assert nothing_leased(handle)
    assert vmem.stats().write_bytes == 0
    del model, handle


def test_the_order_is_learned_in_the_first_pass_and_prefetched_in_the_second(sim):
    model, x = made(), inputs()
    with vt.offload(model, device_budget="24MiB", prefetch_bytes="8MiB") as handle, torch.no_grad():
        model(x)
        names = [s.name for s in handle._engine.order]
        assert names[:9] == [f"layers.{i}" for i in range(9)]
        calls = []
        lib = vt._engine.lib
        real = lib.vmem_prefetch
        try:
            lib.vmem_prefetch = lambda *a: calls.append(a[:2]) or real(*a)
            model(x)
        finally:
            lib.vmem_prefetch = real
        # Each layer that is not pinned was prefetched before its use.
        pinned = sum(s.pinned for s in handle._engine.scopes)
        assert len(calls) >= 10 - pinned - 1
        assert nothing_leased(handle)
    del model, handle


def test_a_part_of_the_weights_is_pinned_when_all_do_not_fit_and_all_when_they_do(sim):
    model, x = made(), inputs()
    with vt.offload(model, device_budget="24MiB", prefetch_bytes="4MiB") as handle, torch.no_grad():
        model(x), model(x)
        assert 0 < handle.pinned_bytes <= 24 * MIB
        assert handle.pinned_bytes < handle.offloaded_bytes
        pinned = [s.use.ranges[0].ptr for s in handle._engine.scopes if s.pinned]
        for _ in range(3):
            model(x)
            for ptr in pinned:  # other layers came and went, the pinned ones stayed
                region = handle._engine.regions[0]
                part = vmem.Region(region)[ptr - region.ptr : ptr - region.ptr + 4 * MIB]
                assert part.query().device_bytes == 4 * MIB
                del part
    with vt.offload(model, device_budget="64MiB") as handle, torch.no_grad():
        model(x), model(x)
        assert handle.pinned_bytes >= handle.offloaded_bytes
        before = vmem.device_stats(0).in_bytes
        model(x)
        assert vmem.device_stats(0).in_bytes == before  # all of it stayed
    del model, handle


def calm(handle):
    """Waits until every lease has ended and every prefetch has found room. Then the policy chooses
    what to evict, and not the order of threads.
    """

    def begun(ptr, nbytes):
        region = next(h for h in handle._engine.regions if h.ptr <= ptr < h.ptr + h.size)
        return vmem.Region(region)[ptr - region.ptr : ptr - region.ptr + nbytes].query().device_bytes == nbytes

    for _ in range(10000 * PATIENCE):
        spans = [s for scope in handle._engine.asked for s in scope.use.spans]
        if vmem.device_stats(0).leased_bytes == 0 and all(begun(*s) for s in spans):
            return
        time.sleep(0.001)
    raise AssertionError("a prefetch was not begun, or its blocks went before they were used")


def test_what_was_prefetched_stays_until_it_is_used(sim):
    model, x = made(layers=20), inputs()
    with vt.offload(model, device_budget="40MiB", prefetch_bytes="8MiB") as handle, torch.no_grad():
        # otherwise blocks that CPU code reads would count as the driver's host pages, and leave
        for region in handle._engine.regions:
            assert vt._engine.lib.vmem_advise(region.ptr, region.size, int(vmem.Advice.SET_READ_MOSTLY), 0) == 0
        model(x), model(x)
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: calm(handle))
        model(x)
        for _ in range(3):
            before, hits = vmem.device_stats(0).evictions, vmem.stats().prefetch_hits
            model(x)
            blocks = (handle.offloaded_bytes - handle.pinned_bytes) // (2 * MIB)
            assert vmem.device_stats(0).evictions - before == blocks  # once each
            assert vmem.stats().prefetch_hits - hits == blocks
        assert vmem.stats().prefetch_wasted == 0
    del model, handle


def test_a_budget_below_one_layer_names_the_layer_and_its_size(tiers):
    model = made()
    with pytest.raises(vmem.Error) as e:
        vt.offload(model, device_budget="2MiB")
    words = e.value.strerror
    assert e.value.errno == errno.ENOMEM and "'layers.0'" in words and "4.0 MiB" in words and "2.0 MiB" in words, words
    x = inputs()
    with torch.no_grad():
        assert torch.equal(model(x), made()(x))  # no weight was changed
    assert vmem.stats().regions == 0


class Failing(Chain):
    fail_at = None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.fail_at:
                raise RuntimeError("in the model")
        return x


def test_an_exception_inside_a_layer_releases_every_lease(tiers):
    model, x = made(Failing, layers=4), inputs()
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        for fail_at in (1, 3):  # in the first pass, which records the order, and in a later one
            model.fail_at = fail_at
            with pytest.raises(RuntimeError, match="in the model"):
                model(x)
            with pytest.raises(RuntimeError):
                model(x[:, :5])  # inside layer 0
            assert nothing_leased(handle)
            model.fail_at = None
            assert model(x).shape == x.shape
        assert nothing_leased(handle)
    del model, handle


def test_hooks_can_be_removed_and_the_model_goes_on(tiers):
    model, x = made(layers=4), inputs()
    assert all(p.requires_grad for p in model.parameters())
    handle = vt.offload(model, device_budget="16MiB")
    assert not any(p.requires_grad for p in model.parameters())
    assert "offload" in repr(handle).lower()
    with torch.no_grad():
        want = model(x)
    handle.remove()
    handle.remove()  # does nothing
    assert "removed" in repr(handle)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(x), want)
    model(x).sum().backward()  # an ordinary model again
    again = vt.offload(model, device_budget="16MiB")
    with torch.no_grad():
        assert torch.equal(model(x), want)
    again.remove()
    model.zero_grad(set_to_none=True)
    del model, handle, again


class Removing(Chain):
    handle = None

    def forward(self, x):
        if self.handle is not None:
            self.handle[0].remove()
        return super().forward(x)


def test_hooks_cannot_be_removed_from_inside(host):
    model, x = made(Removing, layers=2), inputs()
    with vt.offload(model, device="host", device_budget="16MiB") as handle, torch.no_grad():
        model.handle = [handle]
        with pytest.raises(vmem.Error) as e:
            model(x)
        assert e.value.errno == errno.EBUSY
        model.handle = None
        model(x)
    del model, handle


def test_two_models_share_the_device(tiers):
    one, two = made(seed=1), made(seed=2)
    x = inputs()
    with torch.no_grad():
        want = one(x), two(x)
    a = vt.offload(one, device_budget="10MiB", prefetch_bytes="4MiB")
    b = vt.offload(two, device_budget="12MiB", prefetch_bytes="4MiB")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(one(x), want[0])
            assert torch.equal(two(x), want[1])
        if tiers == "sim":
            assert vmem.device_stats(0).budget == 22 * MIB
        a.remove()
        if tiers == "sim":
            assert vmem.device_stats(0).budget == 12 * MIB
        assert torch.equal(two(x), want[1])
        assert nothing_leased(a) and nothing_leased(b)
    b.remove()
    del one, two, a, b


def test_two_threads_run_one_model(sim):
    plain, model = made(layers=6), made(layers=6)
    xs = [inputs(seed=s) for s in range(2)]
    wrong = []

    def run(x):
        with torch.no_grad():
            want = plain(x)
            for _ in range(5):
                if not torch.equal(model(x), want):
                    wrong.append(x)

    with vt.offload(model, device_budget="16MiB", prefetch_bytes="4MiB") as handle:
        with torch.no_grad():
            model(xs[0])
        threads = [threading.Thread(target=run, args=(x,)) for x in xs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong and nothing_leased(handle)
    del model, handle


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2048, N)
        self.mid = nn.Linear(N, N)
        self.again = self.mid  # one module under two names
        self.head = nn.Linear(N, 2048, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((N,), 2.0))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.head(self.again(self.mid(self.embed(x)) * self.scale))


def test_tied_weights_lie_once_and_stay_tied_and_buffers_are_written(tiers):
    plain, model = made(Tied), made(Tied)
    x = torch.tensor([[1, 5, 2047]])
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        assert handle.offloaded_bytes == (2048 * N + N * N) * 4
        assert model.head.weight is model.embed.weight
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        assert model.calls.item() == 3
    assert model.head.weight is model.embed.weight and model.calls.item() == 3
    del model, handle


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24 * 1024, N // 4, padding_idx=0)  # 24 MiB
        self.body = nn.Linear(N // 4, 16)

    def forward(self, x):
        return self.body(self.embed(x))


def test_a_few_rows_of_a_large_table_are_leased_and_not_all_of_it(tiers):
    plain, model = made(Lookup), made(Lookup)
    few = torch.tensor([[0, 1], [24 * 1024 - 1, 1]])
    with vt.offload(model, device_budget="12MiB") as handle, torch.no_grad():
        assert torch.equal(model(few), plain(few))
        if tiers == "sim":
            assert vmem.device_stats(0).in_bytes <= 10 * MIB
        assert torch.equal(model(few), plain(few))
        with pytest.raises(IndexError):
            model(torch.tensor([24 * 1024]))
        with pytest.raises(IndexError):
            model(torch.tensor([-1]))
        many = torch.arange(24 * 1024)
        if tiers == "sim":  # not all of the table fits
            with pytest.raises(vmem.Error, match="layer 'embed'") as e:
                model(many)
            assert e.value.errno == errno.ENOMEM
        assert nothing_leased(handle)
    with vt.offload(model, device_budget="32MiB") as handle, torch.no_grad():
        assert torch.equal(model(many), plain(many))
        assert nothing_leased(handle)
    del model, handle


@pytest.mark.parametrize("align", [1, 256, 1 << 30])
def test_weights_at_odd_addresses_are_copied_for_their_layer_and_given_back(sim, align):
    plain, model = made(layers=4), made(layers=4)
    x = inputs()
    with vt.offload(model, device_budget="16MiB", align=align) as handle, torch.no_grad():
        at = [p.data_ptr() for p in model.parameters()]
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            assert [p.data_ptr() for p in model.parameters()] == at
        with pytest.raises(RuntimeError):
            model(x[:, :5])
        assert [p.data_ptr() for p in model.parameters()] == at
        copied = sum(len(s.unaligned) for s in handle._engine.scopes)
        assert copied == (4 if align > 1 << 22 else 0)
        assert nothing_leased(handle)
    del model, handle


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """A layer of a language model: keyword arguments, several results, a cache that it writes."""

    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = Norm(n), Norm(n)
        self.q, self.k, self.v, self.o = (nn.Linear(n, n, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, hidden, *, cache, layer):
        x = self.norm_in(hidden)
        q, k, v = (m(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        if layer in cache:
            k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
        cache[layer] = k, v
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(k.shape[2] - q.shape[2] + 1)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + self.o(x)
        x = self.norm_out(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(x)) * self.up(x)), cache


class Language(nn.Module):
    def __init__(self, n=512, layers=3):
        super().__init__()
        self.embed = nn.Embedding(1000, n)
        self.blocks = nn.ModuleList(Block(n, 8) for _ in range(layers))
        self.norm = Norm(n)
        self.head = nn.Linear(n, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, cache):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x, cache = block(x, cache=cache, layer=i)
        return {"logits": self.head(self.norm(x)), "cache": cache}


def generate(model, tokens=4):
    torch.manual_seed(2)
    step, cache, logits = torch.randint(0, 1000, (2, 12)), {}, []
    with torch.no_grad():
        for _ in range(tokens):
            out = model(step, cache)
            step, cache = out["logits"][:, -1:].argmax(-1), out["cache"]
            logits.append(out["logits"])
    return logits


def test_a_language_model_generates_the_same_bits_from_mapped_files(tiers, make_file):
    plain = made(Language)
    want = generate(plain)
    path = make_file(b"", "model.safetensors")
    vt.save(plain.state_dict(), path, shared="once")
    with vt.init_empty_weights():
        model = Language()
    vt.assign(model, vt.load(path))
    with vt.offload(model, device_budget=os.path.getsize(path) // 4) as handle:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(generate(model), want))
        assert nothing_leased(handle)
    assert all(torch.equal(a, b) for a, b in zip(generate(model), want))
    del model, handle


class Attention(nn.Module):
    """nn.MultiheadAttention uses the weight of out_proj without calling it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(N, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(N, 8, dim_feedforward=N, batch_first=True)

    def forward(self, x):
        return self.encoder(self.attention(x, x, x, need_weights=False)[0])


def test_weights_that_a_module_takes_from_another_are_leased_with_it(tiers):
    plain, model = made(Attention), made(Attention)
    x = inputs().view(1, 3, N)
    with vt.offload(model, device_budget="48MiB") as handle, torch.no_grad():
        want = plain(x)
        assert torch.equal(model(x), want) and torch.equal(model(x), want)
        scope = next(s for s in handle._engine.scopes if s.name == "attention")
        out = handle._engine.blocks(model.attention.out_proj.weight)
        assert out <= scope.use.blocks
        assert nothing_leased(handle)
    del model, handle


class Branching(nn.Module):
    """Sometimes uses a weight of another module."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(N, N)
        self.two = nn.Linear(N, N)
        self.direct = False

    def forward(self, x):
        return nn.functional.linear(self.one(x), self.two.weight) if self.direct else self.two(self.one(x))


class Borrowing(nn.Module):
    """Uses a weight of another module in its own forward, and records whether it is leased then."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(N, N)
        self.leased = []

    def forward(self, x):
        y = nn.functional.linear(x, self.other.weight)
        self.leased.append(not no_device_lease((self.other.weight, vmem.READ)))
        return y


def test_a_borrowed_weight_is_leased_from_its_first_use_to_the_end_of_the_call(sim):
    model = made(Borrowing)
    with vt.offload(model, device_budget="24MiB") as handle, torch.no_grad():
        for _ in range(3):
            model(inputs())
            assert nothing_leased(handle)
        assert model.leased == [True, True, True]
    del model, handle


def test_watch_always_leases_what_the_first_call_did_not_use(sim):
    plain, model = made(Branching), made(Branching)
    x = inputs()
    with vt.offload(model, device_budget="24MiB", watch="always") as handle, torch.no_grad():
        assert torch.equal(model(x), plain(x))
        model.direct = plain.direct = True
        assert torch.equal(model(x), plain(x))
        assert any(s.name == "Branching" for s in handle._engine.scopes)
        assert nothing_leased(handle)
    with pytest.raises(ValueError, match="watch"):
        vt.offload(model, watch="never")
    del model, handle


def test_recurrent_modules_and_modules_that_call_themselves(tiers):
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(N, N) / N)
            self.rnn = nn.GRU(N, 256)

        def forward(self, x, depth=3):
            x = x @ self.weight
            return self(x, depth - 1) if depth else self.rnn(x)[0]

    plain, model = made(Looped), made(Looped)
    x = inputs()
    with vt.offload(model, device_budget="32MiB") as handle, torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
        assert nothing_leased(handle)
    del model, handle


def test_running_with_gradients_is_refused_with_what_to_do(host):
    model = made(layers=2)
    with vt.offload(model, device_budget="16MiB") as handle:
        with pytest.raises(vmem.Error, match="layers.0.*no_grad"):
            model(inputs())
        with torch.inference_mode():
            model(inputs())
        assert nothing_leased(handle)
    del model, handle


def test_what_cannot_be_offloaded_is_refused_by_name(host):
    with vt.init_empty_weights():
        bare = Chain(layers=2)
    with pytest.raises(vmem.Error, match="'layers.0.weight'.*meta"):
        vt.offload(bare)
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(vmem.Error, match="ScriptModule"):
        vt.offload(scripted)
    sparse = nn.Linear(4, 4)
    sparse.weight = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(vmem.Error, match="'weight'.*sparse"):
        vt.offload(sparse)
    model = made(layers=2)
    for device, code in (("sim", errno.ENODEV), ("meta", errno.EINVAL)):
        with pytest.raises(vmem.Error) as e:
            vt.offload(model, device=device)
        assert e.value.errno == code
    if not torch.cuda.is_available():
        with pytest.raises(vmem.Error) as e:
            vt.offload(model, device="cuda:0")
        assert e.value.errno == errno.ENODEV
    with pytest.raises(ValueError, match="align"):
        vt.offload(model, align=0)
    with pytest.raises(ValueError):
        vt.offload(model, device_budget="some")
    handle = vt.offload(model, device_budget="16MiB")
    with pytest.raises(vmem.Error) as e:
        vt.offload(model)
    assert e.value.errno == errno.EBUSY
    handle.remove()
    del model, handle


@pytest.mark.parametrize("host_budget, before, after", [(128, 50, 50), (1024, 50, 75), (4096, 50, 85), (4096, 60, 60)])
def test_weights_get_the_host_memory_that_the_cpu_can_spare(host_budget, before, after):
    start(device="sim", host_budget=host_budget * MIB, staging_share=before)
    model = made(layers=1)
    with vt.offload(model, device_budget="16MiB"):
        assert vmem.get("staging_share") == str(after)
    del model
    finish()


def test_a_budget_above_the_device_is_refused(sim):
    model = made(layers=2)
    with pytest.raises(vmem.Error) as e:
        vt.offload(model, device_budget="64GiB")
        with torch.no_grad():
            model(inputs())
    assert e.value.errno == errno.ENOMEM
    del model
    gc.collect()


def test_a_model_that_is_let_go_of_leaves_nothing(tiers):
    gc.disable()
    try:
        model = made(layers=3)
        kept = weakref.ref(model)
        handle = vt.offload(model, device_budget="16MiB")
        with torch.no_grad():
            model(inputs())
            model(inputs())
        assert vmem.stats().regions == 1
        del model
        assert kept() is None  # no reference cycle keeps it
        del handle
        assert vmem.stats().regions == 0
    finally:
        gc.enable()


def test_a_block_that_cannot_be_read_is_an_error_that_names_the_layer(tiers, make_file):
    path = make_file(b"", "model.safetensors")
    vt.save(made(layers=4).state_dict(), path)
    with vt.init_empty_weights():
        model = Chain(layers=4)
    vt.assign(model, vt.load(path))
    with vt.offload(model, device_budget="16MiB") as handle, torch.no_grad():
        os.truncate(path, 10 * MIB)
        with pytest.raises(vmem.Error) as e:
            model(inputs())
        assert e.value.errno == errno.EIO and "layers." in e.value.strerror, e.value
        assert nothing_leased_of(handle, "layers.0")
    del model, handle


def nothing_leased_of(handle, name):
    weight = next(w for w in handle._plan.weights if w.name.startswith(name))
    return no_device_lease((weight.tensor[:8], vmem.READ))


def test_another_forward_put_over_ours_goes_on_working(host):
    model, x = made(layers=2), inputs()
    with torch.no_grad():
        want = model(x)
    handle = vt.offload(model, device_budget="16MiB")
    ours = model.layers[0].forward
    model.layers[0].forward = lambda x: ours(x)
    with torch.no_grad():
        assert torch.equal(model(x), want)
        handle.remove()
        assert torch.equal(model(x), want)
    del model.layers[0].__dict__["forward"]
    under = copy.copy(type(model.layers[1]).forward)
    model.layers[1].forward = lambda x: under(model.layers[1], x) + 1
    with torch.no_grad():
        changed = model(x)
        with vt.offload(model, device_budget="16MiB"):
            assert torch.equal(model(x), changed)
        assert torch.equal(model(x), changed)
    del model.layers[1].__dict__["forward"]
    del model, handle, ours, under


@pytest.mark.parametrize("budget, block", [(1600, 8), (1067, 8), (1066, 4), (533, 2), (64, 2)])
def test_placed_weights_have_the_largest_blocks_that_waste_little_of_the_budget(budget, block):
    from vmem.torch._target import block_beside

    assert block_beside(budget * MIB, 8 * MIB) == block * MIB
    assert block_beside(budget * MIB, 2 * MIB) == 2 * MIB
