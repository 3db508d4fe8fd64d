# SPDX-License-Identifier: Apache-2.0
"""Memory of regions for calls of other libraries that hand it to the kernel.

write(2), read(2) and their kind fail ("Bad address") on blocks that are absent where userfaultfd is unprivileged, and
on blocks that are on a device.
"""

from __future__ import annotations

import collections.abc
import contextlib
import errno
import os
from typing import IO, Any, ContextManager, Dict, Iterator, List, Tuple, Union

from . import _memory, _status, _stream
from ._lib import HOST, READ, Error, human_bytes, short
from ._range import Lease, Range, leased_pieces, span_of
from ._replace import replaced

_INSTEAD = "lease and write it in parts, or use save_npy(), write_to() or vmem.torch.save(), which do"


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


def _spans(what: Any, inside: bool = False) -> Iterator[Tuple[int, int, Any]]:
    """Address, bytes and owner of everything in `what`; a tensor's is its storage: torch.save writes all of it."""
    if isinstance(what, Range):
        yield what.ptr, what.nbytes, span_of(what, READ)[3]
    elif hasattr(what, "data_ptr") and hasattr(what, "stride"):
        if str(what.layout) != "torch.strided":
            raise TypeError(f"a tensor of layout {what.layout} has several memories; give its indices and its values")
        if what.device.type != "cpu":
            if _memory.find(what.data_ptr()) is not None:
                raise TypeError(f"a tensor on {what.device} is leased there: vmem.torch.leased()")
            return  # the device's own memory, or none (meta)
        storage = what.untyped_storage() if hasattr(what, "untyped_storage") else what.storage().untyped()
        yield storage.data_ptr(), storage.nbytes(), what
    elif hasattr(what, "__array_interface__"):
        yield (*_numpy_extent(what.__array_interface__, what.itemsize), what)
    elif isinstance(what, (list, tuple, collections.abc.Mapping)):
        for value in what.values() if isinstance(what, collections.abc.Mapping) else what:
            yield from _spans(value, True)
    elif not inside:  # checkpoints hold numbers and words beside
        raise TypeError(f"{short(what)} has no memory; give Regions, Arrays, NumPy arrays, tensors, or lists of them")


def accessible(*what: Any, access: int = READ) -> Lease:
    """A lease on the host of all memory that calls of other libraries would use: Regions, Arrays, NumPy arrays, tensors
    (their whole storage), dictionaries and lists of them. Memory that is in no region needs none, and gets none.

    with vmem.accessible(state): torch.save(state, path)   # np.save, h5py, pickle, tofile, file.write; READ
    with vmem.accessible(a, access=vmem.WRITE): file.readinto(a)

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
