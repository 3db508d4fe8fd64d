# SPDX-License-Identifier: Apache-2.0
"""Memory of regions for calls of other libraries that hand it to the kernel.

write(2), read(2) and their kind fail ("Bad address") on blocks that are absent where userfaultfd is unprivileged, and
on blocks that are on a device.
"""

from __future__ import annotations

import collections.abc
import contextlib
import ctypes
import errno
import os
import pickle
import types
from typing import IO, Any, ContextManager, Dict, List, Tuple, Union

from . import _memory, _status, _stream
from ._lib import HOST, READ, Error, human_bytes, short
from ._range import Lease, Range, leased_pieces, span_of
from ._replace import replaced

_INSTEAD = "lease and write it in parts, or use save_npy(), write_to() or vmem.torch.save(), which do"
_GIVE = "give Regions, Arrays, NumPy arrays, tensors, or lists of them"


def _numpy_extent(interface: Dict[str, Any], itemsize: int) -> Tuple[int, int]:
    first = last = interface["data"][0]
    if 0 in interface["shape"]:
        return first, 0
    strides = interface.get("strides")
    if strides is None:
        return first, itemsize * _count(interface["shape"])
    for n, stride in zip(interface["shape"], strides):
        first, last = first + min(0, (n - 1) * stride), last + max(0, (n - 1) * stride)
    return first, last + itemsize - first


def _count(shape: Tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _has_memory(what: Any) -> bool:
    """Whether the walk ends at it: a Region, an Array, a torch storage (pickle reduces tensors to theirs), a buffer."""
    kind = type(what)
    if isinstance(what, Range) or (hasattr(kind, "data_ptr") and not hasattr(kind, "stride")):
        return True
    if hasattr(kind, "__array_interface__"):
        return not what.dtype.hasobject
    try:
        with memoryview(what):
            return not isinstance(what, (bytes, bytearray))  # a class of the program's, which may have attributes
    except (TypeError, BufferError):
        return False


class _Walk(pickle.Pickler):
    """Goes where pickle goes, writes nothing, and collects in `found` what has memory. It does not read the memory."""

    def __init__(self, what: Any) -> None:
        self.found: List[Any] = []
        self.at = what
        super().__init__(types.SimpleNamespace(write=len), 5, buffer_callback=self.found.append)

    def reducer_override(self, what: Any) -> Any:
        """pickle asks for all but Python's own containers, words and numbers. A list stands for what the walk found."""
        self.at = what
        if what is list:
            return NotImplemented
        if isinstance(what, (type, types.FunctionType, types.ModuleType)):  # pickle refuses some
            return list, ()
        if isinstance(what, types.BuiltinFunctionType):
            return list, ([what.__self__],)
        if isinstance(what, (types.MappingProxyType, collections.abc.MappingView)):  # pickle refuses them
            return list, ([*(what.items() if isinstance(what, types.MappingProxyType) else what)],)
        if not _has_memory(what):
            return NotImplemented
        self.found.append(what)
        attributes = getattr(what, "__dict__", {}).values()  # a masked array has its mask there
        return list, ([value for value in attributes if hasattr(type(value), "__array_interface__")],)


def _span(what: Any) -> Tuple[int, int, Any]:
    if isinstance(what, Range):
        return what.ptr, what.nbytes, span_of(what, READ)[3]
    if hasattr(what, "data_ptr"):
        storage = getattr(what, "_untyped_storage", what)
        if storage.device.type == "cpu":
            return storage.data_ptr(), storage.nbytes(), storage
        if storage.device.type != "meta" and _memory.find(storage.data_ptr()) is not None:
            raise TypeError(f"a tensor on {storage.device} is leased there: vmem.torch.leased()")
        return 0, 0, None  # the device's own memory, or none
    if hasattr(what, "__array_interface__"):
        return (*_numpy_extent(what.__array_interface__, what.itemsize), what)
    view, fields = memoryview(what), (ctypes.c_void_p * 10)()  # a Py_buffer, which begins with the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), fields, 0x11C)  # PyBUF_FULL_RO
    ctypes.pythonapi.PyBuffer_Release(fields)
    interface = {"data": (fields[0] or 0,), "shape": view.shape, "strides": view.strides}
    return (*_numpy_extent(interface, view.itemsize), view)


def _spans(what: Any) -> List[Tuple[int, int, Any]]:
    """Address, bytes and owner of everything in `what`."""
    walk = _Walk(what)
    try:
        walk.dump(what)
    except Exception as e:  # the object at which the walk is may raise any; RecursionError: containers are too deep
        at = what if isinstance(e, RecursionError) else walk.at
        raise TypeError(f"pickle cannot write a {type(at).__name__} ({e}); {_GIVE}") from e
    if not walk.found and (isinstance(what, (str, bytes, bytearray)) or not isinstance(what, collections.abc.Sized)):
        raise TypeError(f"{short(what)} has no memory; {_GIVE}")
    return [_span(owner) for owner in walk.found]


def accessible(*what: Any, access: int = READ) -> Lease:
    """A lease on the host of all memory that calls of other libraries would use: of Regions, Arrays, NumPy arrays,
    tensors and storages (the whole storage), memoryviews and other buffers, and of what holds them: containers, modules
    and whatever else pickle can write. Memory that is in no region needs none, and gets none.

    with vmem.accessible(state): torch.save(state, path)   # np.save, h5py, pickle, tofile, file.write; READ
    with vmem.accessible(a, access=vmem.WRITE): file.readinto(a)

    pickle does the walk: it runs __reduce__ and __getstate__ of objects, with all that they do. The walk itself reads
    no byte of arrays and tensors, and passes by functions, classes and Python's modules. TypeError: pickle cannot write
    one of the objects (a lock, a file), or containers are too deep.

    All of it is in memory meanwhile. ENOMEM: it is more than host_budget has left; the words say what to do instead.
    """
    found: List[List[Any]] = []  # address, end, owners
    spans = [span for w in what for span in _spans(w)]
    for ptr, nbytes, keep in sorted(spans, key=lambda span: span[:2]):
        if nbytes == 0 or _memory.find(ptr) is None:
            continue
        if found and ptr < found[-1][1]:
            found[-1][1] = max(found[-1][1], ptr + nbytes)
            found[-1][2].append(keep)
        else:
            found.append([ptr, ptr + nbytes, [keep]])
    size = sum(end - ptr for ptr, end, _ in found)
    words = f"{human_bytes(size)} ({size} bytes) have to be in host memory at once"
    budget = _status.stats().host_budget if found else 0
    if size > budget:
        raise Error(errno.ENOMEM, f"{words}, and host_budget is {human_bytes(budget)} ({budget}): {_INSTEAD}")
    try:
        return Lease([(ptr, end - ptr, access, keep) for ptr, end, keep in found], HOST, None)
    except Error as e:
        if e.errno != errno.ENOMEM:
            raise
        raise Error(errno.ENOMEM, f"{words}: {e.strerror}. Or {_INSTEAD}") from None


class _Writer:
    """A file for numpy.lib.format, which copies what it gives to an object that is no file of Python's own."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        _stream.drain(memoryview(data).cast("B"), self._file)
        return len(data)


def save_npy(file: Union[str, bytes, "os.PathLike[Any]", IO[bytes]], array: Any) -> None:
    """numpy.save() of a NumPy array, a Region (as uint8) or an Array, of any size and for ordinary users: the file is
    the same, and a few blocks are in memory at a time. A path gets the ending .npy, and a file that is there stays
    until the new one is complete."""
    import numpy

    made = array.numpy() if isinstance(array, Range) else numpy.asanyarray(array)  # type: ignore[attr-defined]
    if made.dtype.hasobject:
        raise TypeError(f"an array of {made.dtype} holds Python objects, which would be pickled: numpy.save() does it")
    place: ContextManager[Any]
    if isinstance(file, (str, bytes, os.PathLike)):
        name = os.fsdecode(file)
        place = replaced(name if name.endswith(".npy") else name + ".npy")
    else:
        place = contextlib.nullcontext(file)
    with place as opened:
        _write_npy(_Writer(opened), made)
        _stream.flush(opened)


def _write_npy(file: _Writer, array: Any) -> None:
    from numpy.lib import format as npy

    handle = _memory.find(array.__array_interface__["data"][0]) if array.nbytes else None
    dense = array.flags.c_contiguous or array.flags.f_contiguous
    if handle is None or not dense or array.dtype.names is not None:
        npy.write_array(file, array, allow_pickle=False)
        return
    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
    for piece in leased_pieces(handle.export(), array.__array_interface__["data"][0], array.nbytes, READ):
        file.write(piece)  # type: ignore[arg-type]
