# SPDX-License-Identifier: Apache-2.0
"""vt.save: what it writes, what it refuses, and that a failure keeps the old file."""

import contextlib
import errno
import itertools
import os
import random
import signal
import resource

import pytest

import vmem
from conftest import MIB, interrupted

torch = pytest.importorskip("torch", reason="torch is not installed")
import vmem.torch as vt  # noqa: E402
from vmem._dtypes import BY_NAME  # noqa: E402

DTYPES = [getattr(torch, name) for name in BY_NAME if hasattr(torch, name)]


@pytest.fixture
def path(make_file):
    """The path of a good file, which must survive in any case."""
    path = make_file(b"", "model.safetensors")
    vt.save({"old": torch.arange(5)}, path)
    yield path
    assert os.listdir(os.path.dirname(path)) == ["model.safetensors"], "something was left behind"


def is_old(path):
    return list(vt.load(path)) == ["old"]


def bits(t):
    dense = t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return dense.view(torch.uint8).tolist() if dense.numel() else []


def same(got, want):
    return got.dtype == want.dtype and got.shape == want.shape and bits(got) == bits(want)


def random_of(draw, dtype, shape):
    n = dtype_size(dtype)
    for size in shape:
        n *= size
    raw = torch.tensor([draw.randrange(256) for _ in range(n)], dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape) if n else torch.empty(shape, dtype=dtype)


def dtype_size(dtype):
    return torch.empty(0, dtype=dtype).element_size()


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1),
    "every second": lambda t: t[..., ::2],
    "a row": lambda t: t[-1:],
    "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: torch._neg_view(t),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()),
}


def cases():
    draw = random.Random(3)
    shapes = [(), (0,), (2,), (3,), (2, 3), (3, 0, 2), (64, 64), (1, 1, 1, 5)]
    for dtype, shape, layout in itertools.product(DTYPES, shapes, LAYOUTS):
        if layout == "negative" and not (dtype.is_floating_point and dtype_size(dtype) > 1):
            continue
        if 0 in (shape[:1] or (0,)) and layout in ("transposed", "every second", "a row", "expanded"):
            continue
        yield f"{dtype} {shape} {layout}", LAYOUTS[layout](random_of(draw, dtype, shape))


def test_every_type_shape_and_layout_is_written_as_the_library_reads_it(host, path):
    want = dict(cases())
    vt.save(want, path, metadata={"format": "pt", "": "é\0\n"})
    got = vt.load(path)
    assert set(got) == set(want) and not [n for n in want if not same(got[n], want[n])]
    del got
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "": "é\0\n"}
        assert not [n for n in want if not same(file.get_tensor(n), want[n])]
    dense = {n: t.resolve_conj().resolve_neg().contiguous().clone() for n, t in want.items()}
    safetensors.save_file(dense, path)
    assert not [n for n, t in vt.load(path).items() if not same(t, want[n])]


def test_views_of_a_region_that_change_signs_are_written_as_they_read(host, path):
    z = vt.tensor(vmem.alloc("2MiB"))[:64].view(torch.complex64).view(2, 4)
    z.copy_(torch.arange(8).view(2, 4) * (1 + 2j))
    for t in (z.conj(), z.conj().imag, torch._neg_view(z.real), z.mH):
        vt.save({"t": t}, path)
        assert same(vt.load(path)["t"], t) and same(vt.view(t, "cpu"), t)


class Plain(torch.Tensor):
    """A subclass with normal elements, whose functions must not be called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the subclass was asked")


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the wrapper was asked")


def given_back():
    t = torch.ones(8)
    (t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage().untyped()).resize_(0)
    return t


UNFIT = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex128": lambda: torch.ones(3, dtype=torch.complex128),
    "a wrapper": Wrapper,
    "lazy": lambda: torch.nn.parameter.UninitializedParameter(),
    "without its storage": given_back,
    "a list": lambda: [1, 2],
    "nothing": lambda: None,
    "a number": lambda: 3.5,
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_has_no_bytes_of_its_own_is_refused_by_name(host, path, kind):
    try:
        unfit = UNFIT[kind]()
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"this torch cannot make it: {e}")
    with pytest.raises(TypeError, match="tensor 'odd one'"):
        vt.save({"good": torch.ones(3), "odd one": unfit}, path)
    assert is_old(path)


def test_a_fake_tensor_is_refused(host, path):
    fake = pytest.importorskip("torch._subclasses.fake_tensor", reason="this torch has no fake tensors")
    with fake.FakeTensorMode():
        made = torch.ones(3)
    with pytest.raises(TypeError, match="'fake'"):
        vt.save({"fake": made}, path)
    assert is_old(path)


def test_a_subclass_is_written_without_its_functions(host, path):
    vt.save({"w": torch.arange(6.0).reshape(2, 3).as_subclass(Plain)}, path)
    assert same(vt.load(path)["w"], torch.arange(6.0).reshape(2, 3))


ONES = {"a": torch.ones(3)}
WRONG = [
    ({"tensors": ONES, "metadata": {"epoch": 3}}, TypeError, "'epoch' is 3"),
    ({"tensors": ONES, "metadata": {"epoch": None}}, TypeError, "'epoch' is None"),
    ({"tensors": ONES, "metadata": {3: "x"}}, TypeError, "key of the metadata is 3"),
    ({"tensors": ONES, "metadata": [("a", "b")]}, TypeError, "metadata is a list"),
    ({"tensors": ONES, "metadata": {"a": "\ud800"}}, ValueError, "surrogate"),
    ({"tensors": ONES, "metadata": {"a": b"x"}}, TypeError, "bytes"),
    ({"tensors": {3: torch.ones(3)}}, TypeError, "name of a tensor is 3"),
    ({"tensors": {b"a": torch.ones(3)}}, TypeError, "name of a tensor"),
    ({"tensors": {"__metadata__": torch.ones(3)}}, ValueError, "__metadata__"),
    ({"tensors": {"\udc80": torch.ones(3)}}, ValueError, "surrogate"),
    ({"tensors": [("a", torch.ones(3))]}, TypeError, "list is no dictionary"),
    ({"tensors": ONES, "align": 1 << 40}, ValueError, "align"),
    ({"tensors": ONES, "align": 8192.0}, TypeError, "'float' object cannot be interpreted as an integer"),
    ({"tensors": ONES, "shared": "copy"}, ValueError, "'copy' is not known"),
]


@pytest.mark.parametrize("given, kind, words", WRONG, ids=[w[2].replace(" ", "-") for w in WRONG])
def test_what_the_format_cannot_say_is_refused_and_the_old_file_stays(host, path, given, kind, words):
    with pytest.raises(kind, match=words):
        vt.save(path=path, **given)
    assert is_old(path)


def test_names_and_metadata_of_every_kind_of_text_come_back(host, path):
    names = ["", "a\n\0\"\\", "é漢\U0001f469", "\u202e", " ", "metadata", "x" * 70000]
    vt.save({n: torch.tensor(i) for i, n in enumerate(names)}, path, metadata={n: n for n in names})
    got = vt.load(path)
    assert [int(got[n]) for n in names] == list(range(len(names)))


def test_memory_in_common_is_refused_unless_it_is_the_same_tensor_and_that_is_asked_for(host, path):
    z, c = torch.arange(10.0), torch.tensor([1 + 2j, 3 - 4j])
    for pair in ({"x": z, "y": z[4:]}, {"x": z[:6], "y": z[5:]}, {"x": z, "y": z.view(2, 5)}, {"x": c, "y": c.conj()},
                 {"x": z, "y": torch._neg_view(z)}, {"x": z, "y": z.view(torch.int32)}):
        for shared in ("refuse", "once"):
            with pytest.raises(TypeError, match="'x' and 'y' have memory in common|'y' and 'x' have memory in common"):
                vt.save(pair, path, shared=shared)
    with pytest.raises(TypeError, match="'x' and 'y'.*shared='once'"):
        vt.save({"x": z, "y": z}, path)
    assert is_old(path)
    vt.save({"y": z[:5], "x": z[5:], "e": z[:0], "f": z[:0]}, path)  # parts that share no elements
    got = vt.load(path)
    assert same(got["y"], z[:5]) and same(got["x"], z[5:]) and got["e"].numel() == got["f"].numel() == 0
    del got
    vt.save({"y": z, "x": z, "n": z[:0]}, path, shared="once")
    assert set(vt.load(path)) == {"y", "n"}


def test_the_file_keeps_its_permissions_and_a_link_stays_one(host, path):
    folder = os.path.dirname(path)
    link = os.path.join(folder, "link")
    os.symlink("model.safetensors", link)
    os.chmod(path, 0o640)
    vt.save(ONES, os.fsencode(link))
    assert os.readlink(link) == "model.safetensors" and os.stat(path).st_mode & 0o777 == 0o640
    os.unlink(link)
    assert list(vt.load(path)) == ["a"]
    before = os.umask(0o027)
    try:
        new = os.path.join(folder, "n" * 255)
        vt.save(ONES, new)
    finally:
        os.umask(before)
    assert os.stat(new).st_mode & 0o777 == 0o640
    os.unlink(new)


def test_what_is_no_file_is_not_replaced(host, path):
    folder = os.path.dirname(path)
    pipe, loop = os.path.join(folder, "pipe"), os.path.join(folder, "loop")
    os.mkfifo(pipe)
    os.symlink("loop", loop)
    try:
        for what in (pipe, folder, loop):
            with pytest.raises(OSError):
                vt.save(ONES, what)
    finally:
        os.unlink(pipe)
        os.unlink(loop)
    assert is_old(path)


@contextlib.contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_leaves_the_old_file(host, path):
    with files_of_at_most(MIB), pytest.raises(OSError) as e:
        vt.save({"large": torch.zeros(4 * MIB)}, path)
    assert e.value.errno == errno.EFBIG and is_old(path)


def test_a_header_that_is_read_back_otherwise_leaves_the_old_file(host, path, monkeypatch):
    from vmem import _safetensors

    make = _safetensors.make_header
    for old, new in ((b'"new"', b'"now"'), (b"F32", b"I32"), (b"[6]", b"[5]"), (b'"k":"v"', b'"k":"w"')):
        monkeypatch.setattr(_safetensors, "make_header", lambda *a: make(*a).replace(old, new))
        with pytest.raises(vmem.FormatError):
            vt.save({"new": torch.zeros(6)}, path, metadata={"k": "v"})
        assert is_old(path)


def test_an_interrupt_anywhere_leaves_a_whole_file_and_nothing_beside(host, path):
    new = {"new": torch.arange(3)}
    at, came = 1, True
    while came is not None:
        came = interrupted(lambda: vt.save(new, path), at)
        assert list(vt.load(path)) in (["old"], ["new"]), at
        assert os.listdir(os.path.dirname(path)) == ["model.safetensors"], at
        at += 1
    assert at > 20


def test_tensors_of_regions_are_written_while_they_are_evicted(host, path):
    region = vmem.alloc(6 * MIB + 4096, host_only=True)
    t = vt.tensor(region, "uint8")
    t[:] = torch.arange(t.numel(), dtype=torch.int64).remainder(251).to(torch.uint8)
    region.evict()
    vt.save({"t": t}, path)
    assert torch.equal(vt.load(path)["t"], t)
    del t, region
