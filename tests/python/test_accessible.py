# SPDX-License-Identifier: Apache-2.0
"""Calls of other libraries on memory of regions: vmem.accessible() and vmem.save_npy(), also as an
ordinary user.
"""

import array
import collections
import copyreg
import ctypes
import dataclasses
import enum
import errno
import functools
import gc
import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
import types

import pytest

import vmem
from conftest import MIB, PATIENCE

np = pytest.importorskip("numpy", reason="NumPy is not installed")


def leased_bytes(region):
    """Returns the bytes of blocks that eviction leaves in memory."""
    region.evict()
    return region.query().host_bytes


def test_what_is_given_is_leased_and_nothing_else(host):
    with vmem.alloc(32 * MIB, host_only=True) as region:
        a = region.numpy("float32", (8, MIB))  # 4 MiB a row
        a[:] = 1
        for what, rows in (
            (a, 8),
            (a[2:4], 2),
            (a[::-1], 8),
            (a[6:2:-2], 3),
            (a.T[:, 1:3], 2),
            ({"a": a[0], "more": [a[7], (a[7], 3, "text", None)]}, 2),
            (region[: 4 * MIB], 1),
            (a[:0], 0),
            (np.ones(1000), 0),
            ([], 0),
        ):
            with vmem.accessible(what) as lease:
                assert leased_bytes(region) == rows * 4 * MIB, what
                assert lease.held == (rows > 0)
            assert leased_bytes(region) == 0
        with vmem.accessible(a[:1], access=vmem.WRITE):
            assert io.BytesIO(b"\1" * 4 * MIB).readinto(a[:1].view("uint8")) == 4 * MIB
        for what in (None, 5, "text", object()):
            with pytest.raises(TypeError, match="has no memory"):
                vmem.accessible(what)
        del a, what


@dataclasses.dataclass
class Slots:
    __slots__ = ("a",)
    a: object


class Reduced:
    """Its attribute is not part of its pickle."""

    def __init__(self, a):
        self.get = lambda: a

    def __reduce__(self):
        return Reduced, (self.get(),)


class Attribute(list):
    pass


class Color(enum.Enum):
    RED = 1


def holder(a, kind=types.SimpleNamespace):
    made = kind()
    made.a = a
    return made


def cycle(a):
    made = [a]
    made.append({"again": made})
    return made


def objects(*held):
    made = np.empty(len(held), dtype=object)
    made[:] = held
    return made


def fields(a):
    made = np.zeros(1, [("n", "i4"), ("o", object)])
    made["o"][0] = a
    return made


class Noted(np.ndarray):
    """An array with attributes, as in NumPy's own recipe."""

    def __reduce__(self):
        call, arguments, state = super().__reduce__()
        return call, arguments, (*state, self.a)


class NotedSlot(np.ndarray):
    __slots__ = ("a",)
    __reduce__ = Noted.__reduce__


class NotedMask(np.ma.MaskedArray):
    __reduce__ = Noted.__reduce__


class Registered(np.ndarray):
    pass


copyreg.pickle(Registered, lambda made: (list, ([made.a],)))


class Column(array.array):
    pass


class Buffer:
    def __buffer__(self, flags):  # a buffer from Python 3.12 on
        return memoryview(b"b")


class Picture:
    """An image like PIL's."""

    __array_interface__ = property(lambda self: {"version": 3, "shape": (1,), "typestr": "|u1", "data": b"p"})


class Foreign:
    """An array of another library."""

    def __init__(self, a):
        self.get = dict(a.__array_interface__)

    __array_interface__ = property(lambda self: self.get)


class Pointer:
    """A tensor-like class that is not torch's."""

    def data_ptr(self):
        return 7


def refuse(*_):
    raise RuntimeError("no")


class Renamed(np.ndarray):
    dtype = itemsize = __array_interface__ = property(refuse)


class Inventive(np.ndarray):
    def __getattr__(self, name):
        return 5


class Raising(np.ndarray):
    __getattr__ = refuse


class Proxy(Reduced):
    __class__ = property(lambda self: types.ModuleType)

    def __reduce__(self):
        return list, ([self.get()],)


KINDS = {  # of arrays
    "object": holder,
    "slots": Slots,
    "reduced": Reduced,
    "attribute of a list": lambda a: holder(a, Attribute),
    "exception": lambda a: ValueError("no", a),
    "deque": lambda a: collections.deque([a]),
    "set": lambda a: {Reduced(a)},
    "frozenset": lambda a: frozenset([Reduced(a)]),
    "key": lambda a: {Reduced(a): 1},
    "values": lambda a: {"a": a}.values(),
    "iterator": lambda a: iter([a]),
    "partial": lambda a: functools.partial(print, a),
    "method": lambda a: a.sum,
    "object array": lambda a: objects(None, a),
    "object field": fields,
    "mask": lambda a: np.ma.array(np.zeros(len(a) * 4, "u1"), mask=a.view("?")),
    "memoryview": memoryview,
    "read-only memoryview": lambda a: memoryview(a).toreadonly(),
    "memoryview backwards": lambda a: memoryview(a)[::-1],
    "PickleBuffer": pickle.PickleBuffer,
    "ctypes": lambda a: (ctypes.c_char * a.nbytes).from_buffer(a),
    "cycle": cycle,
    "cycle of objects": lambda a: holder([a, cycle(a)]),
    "attribute of an array": lambda a: holder({"a": [a]}, lambda: np.zeros(4).view(Noted)),
    "slot of an array": lambda a: holder([a], lambda: np.zeros(4).view(NotedSlot)),
    "attribute of a masked array": lambda a: holder([a], lambda: np.zeros(4).view(NotedMask)),
    "attribute for copyreg": lambda a: holder([a], lambda: np.zeros(4).view(Registered)),
    "attribute of an array.array": lambda a: holder([a], lambda: Column("i", [1])),
    "attribute of a ctypes array": lambda a: holder([a], ctypes.c_char * 8),
    "attribute of a buffer": lambda a: holder([a], Buffer),
    "picture": lambda a: holder(a, Picture),
    "foreign array": Foreign,
    "data_ptr": lambda a: holder(a, Pointer),
    "field data_ptr": lambda a: a.view([("data_ptr", "f4")]).view(np.recarray),
    "other meanings of names": lambda a: a.view(Renamed),
    "invented names": lambda a: a.view(Inventive),
    "names that raise": lambda a: a.view(Raising),
    "proxy": Proxy,
}


def module(torch, t):
    made = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.GELU())
    made[0].weight = torch.nn.Parameter(t.view(1, -1))
    made[0].act, made[0].then = torch.nn.functional.gelu, lambda x: x
    made.register_forward_hook(lambda *_: None)
    return made


def buffered(torch, t):
    made = torch.nn.Module()
    made.register_buffer("b", t)
    return made


def attributed(torch, t):
    made = torch.zeros(1)
    made.of = t
    return made


TENSORS = {  # of tensors
    "module": module,
    "module of a buffer": buffered,
    "optimizer": lambda torch, t: torch.optim.SGD([torch.nn.Parameter(t)], lr=1),
    "storage": lambda torch, t: t.untyped_storage(),
    "typed storage": lambda torch, t: t._typed_storage(),
    "attribute of a tensor": attributed,
    "sparse": lambda torch, t: torch.sparse_coo_tensor(
        torch.arange(len(t))[None], t, check_invariants=False, is_coalesced=True
    ),
    "compressed": lambda torch, t: torch.sparse_csr_tensor(
        torch.tensor([0, len(t)]), torch.arange(len(t)), t, size=(1, len(t)), check_invariants=False
    ),
    "nested": lambda torch, t: torch.nested.nested_tensor_from_jagged(t, torch.tensor([0, 2, len(t)])),
    "shared": lambda torch, t: holder([module(torch, t), module(torch, t[5:]), t.untyped_storage(), t.numpy()]),
}


def refused(region, what):
    """Checks that the refusal counts the region's bytes exactly once, and that looking for them has
    read nothing.
    """
    region.evict()
    with pytest.raises(vmem.Error, match=f"^.*80.0 MiB .{80 * MIB} bytes. have to be in host memory") as e:
        vmem.accessible(what)
    assert e.value.errno == errno.ENOMEM and region.query().host_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_found_where_pickle_finds_it(host, kind):
    with vmem.alloc("80MiB", host_only=True) as region:
        a = region.numpy("float32")
        what = KINDS[kind](a)
        refused(region, {"epoch": 3, "m": what})
        refused(region, what)
        a[:1].copy()
        assert region.query().host_bytes > 0  # check that it was in memory before
        del a, what


@pytest.mark.parametrize("kind", TENSORS)
def test_memory_of_tensors_is_found_where_pickle_finds_it(host, kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import vmem.torch as vt

    region = vmem.alloc("80MiB", host_only=True)
    what = TENSORS[kind](torch, vt.tensor(region, "float32"))
    refused(region, {"epoch": 3, "m": what})
    refused(region, what)
    del what, region


def test_what_has_no_memory_refuses_nothing(host):
    class Local:
        pass

    none = [3, "text", None, 1j, b"b", bytearray(9), Local, Local(), lambda: 0, len, os, Color.RED, pathlib.Path("p")]
    none += [np.float32(1), np.dtype("f4"), np.zeros(0), np.array("2020-01-01", "M8[D]"), range(3), Slots(None)]
    none += [collections.defaultdict(lambda: 0), collections.OrderedDict(a=1), types.MappingProxyType({"a": 1})]
    with vmem.accessible(none) as lease:
        assert not lease.held
    with vmem.alloc(4 * MIB, host_only=True) as region:
        with vmem.accessible(holder([none, types.MappingProxyType({"a": region})])):
            assert leased_bytes(region) == 4 * MIB
    for what in (lambda: 0, Local, os, Local(), bytearray(9)):
        with pytest.raises(TypeError, match="has no memory"):
            vmem.accessible(what)
    with pytest.raises(vmem.Error, match="freed"):
        vmem.accessible(holder(region))


def test_what_pickle_cannot_write_is_named(host):
    deep = []
    for _ in range(200000):
        deep = [deep]
    with open(os.devnull, "rb") as file:
        for what, name in (
            (threading.Lock(), "a lock "),
            (file, "a BufferedReader "),
            ((x for x in ()), "a generator "),
            (deep, "a (list|SimpleNamespace) .maximum recursion depth"),
        ):
            for given in (what, [what], holder({"m": what})):
                with pytest.raises(TypeError, match=f"cannot write {name}.*give Regions"):
                    vmem.accessible(given)


class Raises:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        self.call()
        return list, ()


@pytest.mark.parametrize("kind", [MemoryError, vmem.Error, RuntimeError, ValueError, AttributeError, StopIteration])
def test_what_an_object_raises_comes_out(host, kind):
    error = kind(errno.ENOMEM, "mine")

    def call():
        raise error

    with pytest.raises(kind) as e:
        vmem.accessible([1, Raises(call)])
    assert e.value is error


def test_a_dictionary_that_changes_is_named(host):
    made = {1: Raises(lambda: made.update({3: 3})), 2: 2}
    with pytest.raises(RuntimeError, match="dictionary changed"):
        vmem.accessible([made])


def test_buffers_that_are_in_no_region_can_grow_meanwhile(host):
    column = array.array("i", [1])
    with vmem.alloc(4 * MIB, host_only=True) as region:
        lease = vmem._accessible.Lease

        def grown(*arguments):
            column.append(2)
            return lease(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vmem._accessible, "Lease", grown)
            with vmem.accessible([region, column]):
                assert len(column) == 2


def test_a_kept_exception_keeps_no_region(host):
    with vmem.alloc(4 * MIB, host_only=True) as region:
        what = holder([region.memoryview(), threading.Lock()])
        with pytest.raises(TypeError) as e:
            vmem.accessible(what)
        what.error = e.value
        del what, e
        gc.collect()
        region.free()


def test_more_than_the_budget_is_refused_with_the_numbers_and_what_to_do(host):
    with vmem.alloc("80MiB", host_only=True) as region:
        a = region.numpy()
        with pytest.raises(vmem.Error, match=r"80.0 MiB.*host_budget is 64.0 MiB.*of a tensor, t.*save_npy") as e:
            vmem.accessible(a)
        assert e.value.errno == errno.ENOMEM
        with region[: 40 * MIB].acquire(), pytest.raises(vmem.Error, match="40.0 MiB.*save_npy") as e:
            vmem.accessible(a[40 * MIB :])
        assert e.value.errno == errno.ENOMEM
        del a, e


def test_npy_files_are_those_of_numpy(host, tmp_path):
    with vmem.alloc(24 * MIB, host_only=True) as region:
        base = region.numpy("float32", (3, 1024, 2048))
        base[:] = np.arange(2048)
        other = np.arange(24).reshape(2, 3, 4)
        fields = np.zeros(5, [("x" * 30000, "i4"), ("y" * 30000, "f8")])  # a header of version 2
        cases = [base, base[1], base.T, base[:, ::3], base[::-1], base[:0], base[0, 0, 5:6].reshape(()), other, fields]
        cases += [other.astype(">i2"), np.array(3.5), region.numpy("complex64"), region.numpy("bool")]
        for case in cases:
            region.evict()
            np.save(tmp_path / "want.npy", np.array(case, order="K" if case.flags.f_contiguous else "C"))
            vmem.save_npy(tmp_path / "got", case)
            assert (tmp_path / "got.npy").read_bytes() == (tmp_path / "want.npy").read_bytes(), case.shape
            file = io.BytesIO(b"before")
            file.seek(6)
            vmem.save_npy(file, case)
            assert file.getvalue() == b"before" + (tmp_path / "want.npy").read_bytes()
        vmem.save_npy(os.fsencode(tmp_path / "region.npy"), region)
        vmem.save_npy(tmp_path / "array.npy", region.array("int16", (3, 4)))
        assert np.load(tmp_path / "region.npy").nbytes == 24 * MIB
        assert np.load(tmp_path / "array.npy").shape == (3, 4)
        with open(tmp_path / "descriptor.npy", "wb") as file:
            vmem.save_npy(file.fileno(), region)
            os.fstat(file.fileno())  # the file stays open
        assert (tmp_path / "descriptor.npy").read_bytes() == (tmp_path / "region.npy").read_bytes()
        os.unlink(tmp_path / "descriptor.npy")
        with pytest.raises(TypeError, match="None is neither a path, nor"):
            vmem.save_npy(None, region)
        with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
            region.read_from(io.BytesIO(), "5")
        with pytest.raises(TypeError, match="bfloat16"):
            vmem.save_npy(tmp_path / "array.npy", region.array("bfloat16"))
        with pytest.raises(TypeError, match="Python objects"):
            vmem.save_npy(tmp_path / "array.npy", np.array([None]))
        assert sorted(os.listdir(tmp_path)) == ["array.npy", "got.npy", "region.npy", "want.npy"]
        del base, case, cases


def test_a_file_that_fails_leaves_the_old_array(host, tmp_path, monkeypatch):
    from vmem import _stream

    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    with vmem.alloc("8MiB", host_only=True) as region:
        def full(view, file, drain=_stream.drain):
            drain(view[:1000], file)
            if len(view) > 1000:
                raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(_stream, "drain", full)
        with pytest.raises(OSError):
            vmem.save_npy(path, region)
    assert os.listdir(tmp_path) == ["a.npy"] and list(np.load(path)) == [0, 1, 2]


USER = """
import collections, errno, io, os, pickle, sys
import numpy as np, vmem
folder, what = sys.argv[1:]
vmem.configure(host_budget="16MiB", device="none", ssd_path=folder)
region = vmem.alloc("24MiB", host_only=True)
whole = region.numpy("int32")
whole[:] = np.arange(len(whole))
a = whole[: 2 << 20]  # 8 MiB
path = os.path.join(folder, what)
given = collections.deque([a]) if what == "deque" else a

def by_numpy():
    np.save(path, a)
    return np.load(path + ".npy")

def by_pickle():
    with open(path, "wb") as file:
        pickle.dump(a, file, protocol=5)
    with open(path, "rb") as file:
        return pickle.load(file)

def by_deque():
    with open(path, "wb") as file:
        pickle.dump(given, file, protocol=5)
    with open(path, "rb") as file:
        return pickle.load(file)[0]

def by_tofile():
    a.tofile(path)
    return np.fromfile(path, "int32")

def by_torch():
    import torch, vmem.torch as vt
    t = vt.tensor(region.array("int32", a.shape))
    torch.save({"t": t}, path)
    return torch.load(path)["t"].numpy()

def by_h5py():
    import h5py
    with h5py.File(path, "w") as file:
        file["a"] = a
    with h5py.File(path) as file:
        return file["a"][:]

write = globals()["by_" + what]
region.evict()
try:
    write()
    print("present without a lease")
except (OSError, RuntimeError) as e:
    print("fails without a lease:", getattr(e, "errno", e))
region.evict()
with vmem.accessible(given):
    got = write()
assert np.array_equal(got, np.arange(2 << 20, dtype="int32"))
region.evict()
vmem.save_npy(path + "-whole", whole)
assert np.array_equal(np.load(path + "-whole.npy"), np.arange(6 << 20, dtype="int32"))
try:
    vmem.accessible(whole)
    raise AssertionError("24 MiB were leased in 16")
except vmem.Error as e:
    assert e.errno == errno.ENOMEM, e
print("done")
"""


def served_by_the_kernel():
    """Returns whether an ordinary user has a userfaultfd that serves system calls too."""
    try:
        with open("/proc/sys/vm/unprivileged_userfaultfd", encoding="ascii") as file:
            return file.read().strip() != "0" or os.stat("/dev/userfaultfd").st_mode & 0o006 != 0
    except OSError:
        return False


@pytest.mark.parametrize("what", ["numpy", "pickle", "deque", "tofile", "torch", "h5py"])
def test_an_ordinary_user_saves_memory_of_regions(tmp_path, what):
    if what in ("torch", "h5py"):
        pytest.importorskip(what, reason=f"{what} is not installed")
    command = [sys.executable, "-c", USER, str(tmp_path), what]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed")
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
        os.chmod(tmp_path, 0o777)
        for base in tmp_path.parents:
            if base.name.startswith("pytest-"):
                os.chmod(base, 0o711)
        needs = f"import numpy, vmem, {what if what in ('torch', 'h5py') else 'os'}"
        probe = [*as_user, sys.executable, "-c", needs]
        if subprocess.run(probe, capture_output=True, cwd="/").returncode != 0:
            pytest.skip("an ordinary user cannot read the interpreter, its packages or the library here")
        command = as_user + command
    ran = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120 * PATIENCE)
    assert ran.returncode == 0 and ran.stdout.endswith("done\n"), ran.stdout + ran.stderr
    # Check that the test can tell. torch.save first reads everything for a checksum, so it is in
    # memory unless memory is short.
    if os.geteuid() == 0 and not served_by_the_kernel() and what != "torch":
        assert "fails without a lease" in ran.stdout, ran.stdout


def test_torch_writes_the_whole_storage_of_a_part(host, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import vmem.torch as vt

    region = vmem.alloc(8 * MIB, host_only=True)
    t = vt.tensor(region, "float32")
    t[:] = 1
    with vmem.accessible([t[5:7]]):
        assert leased_bytes(region) == 8 * MIB

    class OnDevice(torch.UntypedStorage):
        device = torch.device("cuda:0")
        data_ptr = staticmethod(t.data_ptr)

    gpu = OnDevice(0)
    for what in (gpu, {"m": gpu}):
        with pytest.raises(TypeError, match="leased"):
            vmem.accessible(what)
    OnDevice.data_ptr = staticmethod(lambda: 4096)  # a device's own memory, which torch copies itself
    nowhere = torch.empty(3, device="meta")
    state = {"a": t[:3], "on a device": [gpu], "nowhere": [nowhere, nowhere.untyped_storage()], "epoch": 3}
    with vmem.accessible(state, torch.eye(3).to_sparse(), nowhere):
        assert leased_bytes(region) == 8 * MIB
    del t, region, gpu, what, state
