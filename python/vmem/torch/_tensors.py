# SPDX-License-Identifier: Apache-2.0
"""torch tensors over regions: on the CPU and on a GPU, at one address."""

from __future__ import annotations

import errno
import operator
from typing import Any, Optional, Tuple, Union

import torch

from .. import _dlpack, _memory
from .._dtypes import BY_NAME, dtype_of
from .._lib import HOST, READ, Error
from .._array import Array
from .._range import Lease, span_of
from .._region import Region

Device = Union[None, int, str, "torch.device"]

CPU = torch.device("cpu")


def torch_dtype(name: str) -> "torch.dtype":
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no {name}")
    return found


def torch_device(device: Device) -> "torch.device":
    """Returns the CPU for None, or the CUDA device of this number."""
    if device is None:
        return CPU
    found = torch.device("cuda", operator.index(device)) if hasattr(device, "__index__") else torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither the CPU nor a CUDA device")
    return found


def flat(handle: _memory.Handle, ptr: int, nbytes: int, device: "torch.device") -> torch.Tensor:
    """Bytes of a region as a tensor of uint8 that keeps the region."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    export = handle.export()
    if device.type == "cpu":
        return torch.frombuffer(_memory.buffer(export, ptr, nbytes), dtype=torch.uint8)
    if handle.host_only:
        raise Error(errno.EINVAL, f"{handle.label} has no device tier (host_only)")
    # torch accepts no managed device type, and its kernels use managed memory like device memory.
    capsule = _dlpack.capsule(ptr, (nbytes,), BY_NAME["uint8"], (_dlpack.CUDA, device.index or 0), export)
    return torch.utils.dlpack.from_dlpack(capsule)


def shaped(bytes_: torch.Tensor, dtype: "torch.dtype", shape: Tuple[int, ...]) -> torch.Tensor:
    return bytes_.view(dtype).view(shape)


def tensor(
    what: Union[Region, Array], dtype: Any = None, shape: Optional[Tuple[int, ...]] = None, device: Device = None
) -> torch.Tensor:
    """Returns a tensor over a Region or Array, which it keeps alive. No byte is copied.

    device None or "cpu": an ordinary tensor; an access waits until the bytes are there. A CUDA
    device: kernels may use it only under a lease (vmem.acquire, leased()); otherwise they hit an
    illegal address. The program must not store into a region that was mapped for reading, on either
    side: the stores are lost, without a message, when their blocks leave memory.
    """
    if isinstance(what, Region):
        what = what.array("uint8" if dtype is None else dtype, shape)
    elif not isinstance(what, Array):
        raise TypeError(f"expected a Region or an Array, not {type(what).__name__}")
    elif dtype is not None or shape is not None:
        raise TypeError("an Array has its dtype and shape already")
    bytes_ = flat(what._handle, what.ptr, what.nbytes, torch_device(device))
    return shaped(bytes_, torch_dtype(what.dtype), what.shape)


def region_of(t: torch.Tensor) -> Optional[_memory.Handle]:
    """Returns the region of a tensor's memory, or None. Touches no byte."""
    if t.layout != torch.strided or t.device.type not in ("cpu", "cuda") or t.numel() == 0:
        return None
    return _memory.find(t.data_ptr())


def view(t: torch.Tensor, device: Device) -> torch.Tensor:
    """Returns the same memory as a tensor on another device: like tensor(), for a tensor over a
    region, with strides kept."""
    where = torch_device(device)
    handle = region_of(t)
    if handle is None:
        if t.numel() == 0:
            return torch.empty_like(t, device=where)
        raise Error(errno.EINVAL, f"the tensor at {t.data_ptr():#x} is in no region of libvmem")
    ptr, nbytes, _, _ = span_of(t, READ)
    made = flat(handle, ptr, nbytes, where).view(t.dtype).as_strided(tuple(t.shape), t.stride())
    if t.is_conj():  # the flag is in the tensor, not in its bytes
        made = made.conj()
    return torch._neg_view(made) if t.is_neg() else made


def leased(
    *what: Any, access: int = READ, device: Device = None, stream: Optional["torch.cuda.Stream"] = None
) -> Lease:
    """vmem.acquire() for a torch device and the thread's current stream there (device None: the CPU).

    with vmem.torch.leased(weights, device="cuda"): y = x @ weights
    """
    where = torch_device(device)
    if where.type == "cpu":
        return Lease([span_of(w, access) for w in what], HOST, None)
    with torch.cuda.device(where):  # the default stream is the current device's
        used = torch.cuda.current_stream(where) if stream is None else stream
        return Lease([span_of(w, access) for w in what], where.index, used)


__all__ = ["dtype_of", "leased", "region_of", "tensor", "view"]
