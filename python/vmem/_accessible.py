# SPDX-License-Identifier: Apache-2.0
"""Leases memory of regions for calls of other libraries that pass it to the kernel.

write(2), read(2) and similar calls fail with "Bad address" on two kinds of blocks: absent ones, if
userfaultfd is unprivileged, and blocks on a device.
"""

from __future__ import annotations

import bisect
import collections.abc
import contextlib
import copyreg
import ctypes
import errno
import os
import pickle
import sys
import types
from typing import IO, Any, ContextManager, Dict, List, Tuple, Union

from . import _memory, _status, _stream
from ._array import Array
from ._lib import HOST, READ, Error, human_bytes, short
from ._range import Lease, Range, leased_pieces, span_of
from ._region import Region
from ._replace import replaced

_PARTS = "lease and write it in parts (of a tensor, t[i:j].numpy(): t[i:j] is its whole storage)"
_INSTEAD = f"{_PARTS}, or use save_npy(), write_to() or vmem.torch.save(), which do"
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


def _loaded(module: str, *names: str) -> Tuple[Any, ...]:
    """Returns these classes of a module, if the program has loaded it."""
    found = [getattr(sys.modules.get(module), name, None) for name in names]
    return tuple(kind for kind in found if isinstance(kind, type))


def _storages() -> Tuple[Any, ...]:
    return _loaded("torch", "UntypedStorage", "TypedStorage")  # pickle reduces tensors to their storages


class _Walk(pickle.Pickler):
    """Walks objects as pickle does, writes nothing, and collects objects with memory in `found`
    without reading the memory. It decides by type: an object, or a subclass that overrides its
    base's names, may claim anything."""

    def __init__(self, what: Any) -> None:
        self.found: List[Any] = []
        self.at = what
        self.arrays, self.masked = _loaded("numpy", "ndarray", "generic"), _loaded("numpy.ma", "MaskedArray")
        self.known = (Region, Array, *_storages(), *self.masked, *self.arrays, object)
        self.itself = (Range, memoryview, *_storages(), *self.arrays[:1])
        super().__init__(types.SimpleNamespace(write=len), 5, buffer_callback=self.found.append)

    def reducer_override(self, what: Any) -> Any:
        """pickle calls this for every object except Python's own containers, strings and numbers.
        Returns a list of what the walk found in it."""
        self.at, kind = what, type(what)
        if what is list:
            return NotImplemented
        if issubclass(kind, (type, types.FunctionType, types.ModuleType)):  # pickle refuses some of these
            return list, ()
        if issubclass(kind, types.BuiltinFunctionType):
            return list, ([what.__self__],)
        if issubclass(kind, (types.MappingProxyType, collections.abc.MappingView)):  # pickle refuses these
            return list, ([*(what.items() if issubclass(kind, types.MappingProxyType) else what)],)
        memory = self._memory_of(what, kind)
        if memory is None:
            return NotImplemented
        self.found.append(memory)
        base = next(base for base in self.known if issubclass(kind, base))
        if base is object and (memory is not what or isinstance(getattr(kind, "__buffer__", None), types.FunctionType)):
            return NotImplemented  # a class in Python: pickle does not write the memory
        return list, (self._attributes(what, kind, base),)

    def _memory_of(self, what: Any, kind: type) -> Any:
        """Returns a Region, Array, torch storage, NumPy array or buffer as it is, another object's
        NumPy array, or None."""
        for array in self.arrays:
            if issubclass(kind, array) and array.dtype.__get__(what).hasobject:
                return None
        if issubclass(kind, self.itself):
            return what
        try:
            with memoryview(what):
                return None if issubclass(kind, (bytes, bytearray)) else what
        except Exception:  # pickle never asks for a buffer or an interface
            with contextlib.suppress(Exception):
                return sys.modules["numpy"].asarray(what) if hasattr(kind, "__array_interface__") else None
        return None

    def _attributes(self, what: Any, kind: Any, base: Any) -> List[Any]:
        """Returns the attributes that __reduce__ may write besides the memory. Does not call
        NumPy's own, which would copy the memory."""
        own = (kind.__reduce__, kind.__reduce_ex__) != (base.__reduce__, base.__reduce_ex__)
        if not own and kind not in copyreg.dispatch_table:  # then it writes no attribute except a mask
            return [what.__dict__.get("_mask")] if base in self.masked else []
        slots = set(copyreg._slotnames(kind)) - set(copyreg._slotnames(base))  # type: ignore[attr-defined]
        return [what.__dict__ if kind.__dictoffset__ else None, *(getattr(what, name, None) for name in slots)]


def _span(what: Any) -> Tuple[int, int, Any]:
    if isinstance(what, Range):
        return what.ptr, what.nbytes, span_of(what, READ)[3]
    if issubclass(type(what), _storages()):
        storage = getattr(what, "_untyped_storage", what)
        if storage.device.type == "cpu":
            return storage.data_ptr(), storage.nbytes(), storage
        if storage.device.type != "meta" and _memory.find(storage.data_ptr()) is not None:
            raise TypeError(f"a tensor on {storage.device} is leased there: vmem.torch.leased()")
        return 0, 0, None  # memory of the device only, or none
    for array in _loaded("numpy", "ndarray"):
        if issubclass(type(what), array):
            plain = array.view(what, array)  # a subclass may redefine the names of ndarray
            return (*_numpy_extent(plain.__array_interface__, plain.itemsize), plain)
    view, fields = memoryview(what), (ctypes.c_void_p * 10)()  # a Py_buffer, which begins with the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), fields, 0x11C)  # PyBUF_FULL_RO
    ctypes.pythonapi.PyBuffer_Release(fields)
    interface = {"data": (fields[0] or 0,), "shape": view.shape, "strides": view.strides}
    return (*_numpy_extent(interface, view.itemsize), view)


def _spans(what: Any) -> List[Tuple[int, int, Any]]:
    """Address, bytes and owner of everything in `what` that is in regions."""
    walk = _Walk(what)
    try:
        walk.dump(what)
    except (TypeError, pickle.PicklingError, RecursionError) as e:  # pickle's errors; the program's pass through
        at = what if isinstance(e, RecursionError) else walk.at
        raise TypeError(f"pickle cannot write a {type(at).__name__} ({e}); {_GIVE}") from e
    finally:
        walk.clear_memo()  # old Pythons' garbage collector does not look into it, and a traceback keeps the walk
    if not walk.found and (isinstance(what, (str, bytes, bytearray)) or not isinstance(what, collections.abc.Sized)):
        raise TypeError(f"{short(what)} has no memory; {_GIVE}")
    ranges = _memory.ranges()
    return [span for span in map(_span, walk.found) if _is_in(ranges, *span[:2])]  # views of others end now


def _is_in(ranges: List[Tuple[int, int]], ptr: int, nbytes: int) -> bool:
    at = bisect.bisect(ranges, (ptr, sys.maxsize)) - 1
    return nbytes > 0 and at >= 0 and ptr < ranges[at][1]


def accessible(*what: Any, access: int = READ) -> Lease:
    """Leases on the host all memory that calls of other libraries would use. That is the memory of
    Regions, Arrays, NumPy arrays, tensors and storages (each whole), memoryviews and other buffers.
    Objects that hold these also work: containers, modules and anything that pickle can write.
    Memory outside regions needs no lease and is skipped.

        with vmem.accessible(state): torch.save(state, path)   # np.save, h5py, pickle, tofile, file.write; READ
        with vmem.accessible(a, access=vmem.WRITE): file.readinto(a)

    pickle does the walk: it runs __reduce__ and __getstate__ of objects, with their side effects,
    and their exceptions pass through. The walk itself reads no byte of arrays and tensors and skips
    functions, classes and Python's modules. For arrays whose class has its own __reduce__ it takes
    the attributes instead. TypeError: pickle cannot write one of the objects (a lock, a file), or
    containers are nested too deeply.

    All the memory is resident during the lease. ENOMEM: it exceeds the rest of host_budget; the
    message says what to do instead.
    """
    found: List[List[Any]] = []  # address, end, owners
    spans = [span for w in what for span in _spans(w)]
    for ptr, nbytes, keep in sorted(spans, key=lambda span: span[:2]):
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
    """A file for numpy.lib.format, which copies its data when it writes to an object that is not
    one of Python's own files."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        _stream.drain(memoryview(data).cast("B"), self._file)
        return len(data)


def save_npy(file: Union[str, bytes, int, "os.PathLike[Any]", IO[bytes]], array: Any) -> None:
    """numpy.save() for a NumPy array, a Region (as uint8) or an Array, of any size and for ordinary
    users. The file is the same, but only a few blocks are in memory at a time. A path gets the
    ending .npy. An existing file stays until the new one is complete."""
    import numpy

    made = array.numpy() if isinstance(array, Range) else numpy.asanyarray(array)  # type: ignore[attr-defined]
    if made.dtype.hasobject:
        raise TypeError(f"an array of {made.dtype} holds Python objects, which would be pickled: numpy.save() does it")
    place: ContextManager[Any]
    if isinstance(file, (str, bytes, os.PathLike)):
        name = os.fsdecode(file)
        place = replaced(name if name.endswith(".npy") else name + ".npy")
    else:
        _memory.check_unmapped(file)
        place = _stream.opened(file, "wb") or contextlib.nullcontext(file)
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
