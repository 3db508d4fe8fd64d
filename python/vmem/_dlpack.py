# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules made by hand: dense, contiguous tensors over memory that somebody else keeps alive."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Optional, Tuple

from ._dtypes import DType

CPU, CUDA, CUDA_MANAGED = 1, 2, 13

READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# What a consumer holds: its struct, the struct's arrays and whatever keeps the memory alive, by the struct's address.
# Dictionary operations are atomic, so no lock is held where a garbage collection could come in.
_held: Dict[int, Tuple[Any, ...]] = {}


def _drop(address: Optional[int], held: Dict[int, Tuple[Any, ...]] = _held) -> None:
    if address is not None:
        held.pop(address, None)


# CFUNCTYPE takes the GIL: a consumer may let go on any thread, without it.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop)

_api = ctypes.pythonapi
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_New.restype = ctypes.py_object
# The capsule is passed as a number: in its destructor it is no object any more.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"


def _forget(capsule: int) -> None:
    """A capsule that nobody took: a consumer renames those it takes."""
    for name in (_NAME, _NAME_VERSIONED):
        if _is_valid(capsule, name):
            _drop(_get_pointer(capsule, name))


_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget)

# Tensors may outlive this module's names at exit: the callbacks they end in are never freed.
for _callback in (_deleter, _destructor):
    _api.Py_IncRef(ctypes.py_object(_callback))


def capsule(
    ptr: int,
    shape: Tuple[int, ...],
    dtype: DType,
    device: Tuple[int, int],
    keep: Any,
    versioned: bool = False,
    read_only: bool = False,
) -> Any:
    """A PyCapsule over `ptr`; `keep` lives until the consumer lets go."""
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))()
    step = 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(1, shape[i])
    managed = _Versioned() if versioned else _Managed()
    tensor = managed.tensor
    tensor.data = ptr
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = dtype.dl_code, dtype.itemsize * 8, 1
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    if versioned:
        managed.major, managed.minor = 1, 0
        managed.flags = READ_ONLY if read_only else 0
    address = ctypes.addressof(managed)
    _held[address] = (managed, sizes, strides, keep)
    name = _NAME_VERSIONED if versioned else _NAME
    return _api.PyCapsule_New(address, name, ctypes.cast(_destructor, ctypes.c_void_p))
