# SPDX-License-Identifier: Apache-2.0
"""Arrays over regions, and how other libraries see them."""

from __future__ import annotations

import builtins
import errno
import operator
import sys
from typing import Any, Dict, Optional, Tuple

from . import _dlpack, _memory
from ._dtypes import DType
from ._lib import BACKEND_HANDLES, HOST, Error, short
from ._range import Range
from ._status import device_stats


class _NumpyBase:
    """The object that NumPy keeps as an array's base."""

    def __init__(self, export: _memory.Export, interface: Dict[str, Any]) -> None:
        self._export = export
        self.__array_interface__ = interface


class Array(Range):
    """A contiguous array of one element type over a region. It holds no bytes; it keeps the region alive.

    NumPy: numpy(), numpy.asarray(). DLPack: any consumer, CPU or, after on(device), CUDA. PyTorch:
    vmem.torch.tensor(array).
    """

    __slots__ = ("_export", "_ptr", "_dtype", "_shape", "_nbytes", "_device")

    def __init__(
        self, export: _memory.Export, ptr: int, dtype: DType, shape: Tuple[int, ...], nbytes: int, device: int = HOST
    ) -> None:
        self._handle = export.handle
        self._export = export
        self._ptr = ptr
        self._dtype = dtype
        self._shape = shape
        self._nbytes = nbytes
        self._device = device

    @property
    def ptr(self) -> int:
        """The first element's address, the same on CPU and GPU."""
        return self._ptr

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self._nbytes

    @property
    def dtype(self) -> str:
        """The element type's name, such as "float32" or "bfloat16"."""
        return self._dtype.name

    @property
    def shape(self) -> Tuple[int, ...]:
        """Elements in each dimension; the last one is contiguous."""
        return self._shape

    @property
    def device(self) -> int:
        """HOST, or the CUDA ordinal that consumers get. query() tells where the bytes are."""
        return self._device

    def on(self, device: int) -> "Array":
        """Returns the same array as consumers on a device see it (HOST: on the CPU). Moves nothing:
        acquire() does that."""
        device = operator.index(device)
        if not -(1 << 31) <= device < 1 << 31:
            raise ValueError(f"{short(device)} is no device")
        if self._handle.host_only and device != HOST:
            raise Error(errno.EINVAL, f"{self._handle.label} has no device tier (host_only)")
        return Array(self._handle.export(), self._ptr, self._dtype, self._shape, self._nbytes, device)

    def __len__(self) -> int:
        """The length of the first dimension."""
        if not self._shape:
            raise TypeError("an array without dimensions has no length")
        return self._shape[0]

    def memoryview(self) -> builtins.memoryview:
        """Returns the bytes, read-only if the region is."""
        view = memoryview(_memory.buffer(self._handle.export(), self._ptr, self._nbytes)).cast("B")
        return view if self._handle.writable else view.toreadonly()

    def __buffer__(self, flags: int) -> builtins.memoryview:
        """The buffer protocol, from Python 3.12 on; before that, use memoryview(). Includes the
        element type and the shape, because numpy.asarray() tries this protocol first. BufferError:
        the protocol cannot express them."""
        letter = self._dtype.letter
        if letter is None or 0 in self._shape:
            raise BufferError(f"the buffer protocol cannot say {self!r}; memoryview() gives the bytes")
        return self.memoryview().cast(letter, self._shape)

    def _not_in_numpy(self, what: str) -> str:
        name = self._dtype.name
        if self._dtype.typestr is not None:
            return f"this NumPy cannot {what} {name}; take numpy() of the array, or numpy.asarray(array)"
        same = {1: "uint8", 2: "uint16"}[self._dtype.itemsize]
        return f"NumPy cannot {what} {name}: it has no such type; take the bytes as {same}, or vmem.torch.tensor()"

    def numpy(self) -> Any:
        """Returns a NumPy array over the same memory, read-only if the region is."""
        import numpy

        if self._dtype.typestr is None:
            raise TypeError(self._not_in_numpy("have"))
        interface = {
            "version": 3,
            "shape": self._shape,
            "typestr": self._dtype.typestr,
            "data": (self._ptr, not self._handle.writable),
        }
        return numpy.asarray(_NumpyBase(self._handle.export(), interface))

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """For numpy.asarray(): returns numpy(), or a copy if the caller asks for one or another
        type needs it."""
        made = self.numpy()
        if dtype is not None and made.dtype != dtype:
            if copy is False:
                raise ValueError(f"a conversion to {dtype} needs a copy")
            return made.astype(dtype)
        return made.copy() if copy else made

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        """For CuPy, Numba and others. Only for an array that on() made for a device."""
        if self._device < 0:
            raise AttributeError("this array is for the CPU; on(device) gives one for a GPU")
        if self._dtype.typestr is None:
            raise AttributeError(f"the CUDA array interface has no {self._dtype.name}")
        return {
            "version": 3,
            "shape": self._shape,
            "typestr": self._dtype.typestr,
            "data": (self._ptr, not self._handle.writable),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> Tuple[int, int]:
        """Returns DLPack's device type and number: the CPU, or the device given to on(). That is
        CUDA managed memory, or CUDA memory if the device uses physical handles."""
        if self._device < 0:
            return (_dlpack.CPU, 0)
        handle = self._handle
        if handle.backend is None:
            try:
                handle.backend = device_stats(self._device).backend
            except Error:  # there is no such device: a lease there reports it
                return (_dlpack.CUDA_MANAGED, self._device)
        return (_dlpack.CUDA if handle.backend == BACKEND_HANDLES else _dlpack.CUDA_MANAGED, self._device)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """Returns a capsule for another library: numpy.from_dlpack(array),
        torch.from_dlpack(array). The bytes stay where they are, and the region lives as long as the
        other library's object. BufferError: DLPack cannot express the request (a copy, another
        device, read-only before DLPack 1.0). TypeError: NumPy asks and has no such type."""
        if self._device < 0 and _dlpack.numpy_asks(sys._getframe(1)) and not _dlpack.numpy_reads(self._dtype):
            raise TypeError(self._not_in_numpy("take by DLPack"))
        if copy:
            raise BufferError("libvmem hands out its own memory, never a copy")
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"the array is on DLPack device {device}, not {tuple(dl_device)}; see on()")
        versioned = max_version is not None and tuple(max_version) >= (1, 0)
        if not self._handle.writable and not versioned:
            raise BufferError(
                f"{self._handle.label} is mapped for reading, which DLPack before 1.0 cannot say; map it with "
                "mode='private', or use numpy() or vmem.torch.tensor()"
            )
        return _dlpack.capsule(
            self._ptr,
            self._shape,
            self._dtype,
            device,
            self._handle.export(),
            versioned,
            not self._handle.writable,
        )

    def __repr__(self) -> str:
        where = "" if self._device < 0 else f" on device {self._device}"
        return f"<vmem.Array {self.dtype}{list(self._shape)}{where} of {self._handle.label!r}>"
