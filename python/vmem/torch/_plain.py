# SPDX-License-Identifier: Apache-2.0
"""Finds tensors whose elements are really bytes in memory."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from .. import _safetensors
from .._dtypes import dtype_of
from .._lib import short
from ._tensors import CPU, region_of, view


def extent(t: torch.Tensor) -> Tuple[int, int]:
    """Returns the addresses that a strided tensor with elements uses: the first, and the one after
    the last."""
    count = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + count * t.element_size()


def _unfit(t: Any) -> str:
    """Returns why a tensor's bytes cannot be written as they are, or "" if they can."""
    if not isinstance(t, torch.Tensor):
        return f"is a {type(t).__name__}, no tensor"
    if isinstance(t, torch.nn.parameter.UninitializedTensorMixin):
        return "is not initialized yet"
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(t).__name__}, which keeps its elements in a way of its own"
    if t.layout != torch.strided or t.is_nested:
        return f"is {'nested' if t.is_nested else t.layout}; only dense tensors can be saved"
    if t.is_quantized:
        return "is quantized; save its int_repr() and its scales"
    if t.device.type == "meta":
        return "is on the meta device: it has no elements"
    return ""


def plain(name: Any, t: Any) -> torch.Tensor:
    """Returns the elements as an ordinary tensor; for a region, as the CPU sees them. TypeError or
    ValueError: a file cannot hold it, or not under this name."""
    _safetensors.check_name(name)
    with torch._C.DisableTorchFunction():  # its own method, for a subclass
        why = _unfit(t)
        if why:
            raise TypeError(f"tensor {short(name)} {why}")
        try:
            return _bare(t)
        except (TypeError, ValueError, RuntimeError) as e:
            raise TypeError(f"tensor {short(name)} of type {t.dtype}: {e}") from e


def _bare(t: torch.Tensor) -> torch.Tensor:
    dtype_of(t.dtype)
    made = t.detach().as_subclass(torch.Tensor)
    storage = made.untyped_storage() if hasattr(made, "untyped_storage") else made.storage().untyped()
    if made.numel() and extent(made)[1] - storage.data_ptr() > storage.nbytes():
        raise TypeError(f"its storage has {storage.nbytes()} bytes: its elements were given back")
    return made if region_of(made) is None else view(made, CPU)
