# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules made by hand: dense, contiguous tensors over memory that another object keeps alive."""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from typing import Any, Dict, Tuple

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
    _fields_ = [
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("room", ctypes.c_char * 128),  # for a sigset_t; see _deleter
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
        ("room", ctypes.c_char * 128),
    ]


# _held: what a consumer keeps alive, by the address of its struct. That is the struct, the struct's
# arrays and the owner of the memory.
#
# _offered: capsules that no consumer is known to have taken, each with that address, by a unique
# number, because addresses are reused.
#
# Dictionary operations are atomic, so no lock is held when a garbage collection starts.
_held: Dict[int, Tuple[Any, ...]] = {}
_offered: Dict[int, Tuple[int, Any]] = {}
_numbers = itertools.count()


# A consumer may drop its tensor while an exception unwinds the stack. The interpreter would crash if
# Python code ran then, so the deleter is a function of the C library. sigemptyset() zeroes the first
# word of the struct, which is never 0 before, and sweep() finds it. (It may zero a whole sigset_t.)
_deleter = ctypes.cast(ctypes.CDLL(None).sigemptyset, ctypes.c_void_p).value

_api = ctypes.pythonapi
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_New.restype = ctypes.py_object
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"


def sweep(all_held: bool = True) -> None:
    """Releases the memory that consumers have given back, and the capsules that no consumer took.
    Calls of the package do it. A callback of the garbage collector could not: it would take the
    exception of a signal handler, and lose it.

    A consumer renames the capsules that it takes. all_held=False: takes no time for each tensor that
    consumers hold.

    Capsules have no destructor: a consumer that refuses a capsule drops it while its exception is
    active, and no Python code may run then. Each capsule therefore stays here until a consumer
    takes it or no other object refers to it. Other threads may take capsules during the sweep. The
    name of a capsule is stable only if no other object refers to it, so that is checked first. If
    several threads sweep, the one that removes the capsule from the dictionary releases its memory.
    """
    for number in list(_offered):
        found = _offered.get(number)
        if found is None:  # another thread released it
            continue
        alone = sys.getrefcount(found[1]) <= 2  # those of the tuple and of the argument
        taken = not _is_valid(found[1], _NAME) and not _is_valid(found[1], _NAME_VERSIONED)
        if (alone or taken) and _offered.pop(number, None) is not None and not taken:  # else its taker does
            _held.pop(found[0], None)
    if all_held:
        # The list keeps each struct, so no new one gets its address meanwhile.
        for address, held in list(_held.items()):
            if ctypes.c_uint64.from_buffer(held[0]).value == 0:
                _held.pop(address, None)


def numpy_asks(frame: types.FrameType) -> bool:
    """Returns True if numpy.from_dlpack called __dlpack__ from this frame. It is C code without a
    frame of its own: its caller's frame names from_dlpack and NumPy, and not __dlpack__. (Locals
    are not examined, because that would keep them alive.)"""
    code = frame.f_code
    numpy = sys.modules.get("numpy")
    if numpy is None or "from_dlpack" not in code.co_names + code.co_varnames or "__dlpack__" in code.co_names:
        return False
    if "numpy" in code.co_names:
        return True
    seen = [frame.f_globals.get(name) for name in code.co_names]
    return any(value is numpy or value is numpy.from_dlpack for value in seen)


def numpy_reads(dtype: DType) -> bool:
    """Returns True if this NumPy takes the type by DLPack: the first version with from_dlpack took
    no bool."""
    import numpy

    if dtype.typestr is None:
        return False
    try:
        numpy.zeros(1, dtype.typestr).__dlpack__()
    except Exception:
        return False
    return True


def capsule(
    ptr: int,
    shape: Tuple[int, ...],
    dtype: DType,
    device: Tuple[int, int],
    keep: Any,
    versioned: bool = False,
    read_only: bool = False,
) -> Any:
    """Returns a PyCapsule over `ptr`; `keep` lives until the consumer releases it."""
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))()
    step = 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(1, shape[i])
    managed = _Versioned() if versioned else _Managed()
    tensor = managed.tensor
    tensor.data = ptr or 1  # of no elements
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = dtype.dl_code, dtype.itemsize * 8, 1
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _deleter
    if versioned:
        managed.major, managed.minor = 1, 0
        managed.flags = READ_ONLY if read_only else 0
    address = ctypes.addressof(managed)
    sweep(all_held=False)
    _held[address] = (managed, sizes, strides, keep)
    try:
        made = _api.PyCapsule_New(address, _NAME_VERSIONED if versioned else _NAME, None)
        _offered[next(_numbers)] = (address, made)
    except BaseException:  # including a signal handler's
        _held.pop(address, None)
        raise
    return made
