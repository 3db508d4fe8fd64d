# SPDX-License-Identifier: Apache-2.0
"""Ranges open to GPU kernels that find out at run time which bytes they need."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any, Union

from . import _memory
from ._lib import READ, KernelViewStruct, Owner, check, lib, parse_size, stream_handle
from ._range import span_of

_OWN = object()  # the range's own stream


class KernelRange(Owner):
    """A range that is open to kernels of a device, from kernel() until end() or the end of a with
    statement."""

    __slots__ = ("_owned", "_view", "_keep", "_stream", "__weakref__")

    def __init__(self, what: Any, access: int, device: int, stream: Any, budget: int) -> None:
        _memory.sweep()
        made = ctypes.c_void_p()
        ptr, nbytes, access, self._keep = span_of(what, access)
        self._stream = stream_handle(stream)
        view = KernelViewStruct()
        self._owned = _memory.own(self, made, lib.vmem_kernel_end, self._stream)
        check(lib.vmem_kernel_begin(ctypes.byref(made), ptr, nbytes, access, device, budget, ctypes.byref(view)))
        self._view = bytes(view)

    @property
    def view(self) -> bytes:
        """The kernel's parameter, by value: the 128 bytes of a struct vmem_kernel_view, from which <vmem/device.cuh>
        makes a vmem::device_region."""
        return self._view

    @property
    def open(self) -> bool:
        """False once end() was called."""
        return bool(_memory.owned.get(self._owned))

    def end(self, stream: Any = _OWN) -> None:
        """Closes the range when the stream gets here (its own, or another one of the device, behind
        all kernels that were given the view). Waits for the kernels and serves them until they end.
        Ending twice does nothing."""
        if not self.open:
            return
        try:
            used = self._stream if stream is _OWN else stream_handle(stream)
            _memory.end([], self._owned, lib.vmem_kernel_end, used)
        finally:
            if not self.open:
                self._keep = None

    def __enter__(self) -> "KernelRange":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def __del__(self, owned: Any = _memory.owned) -> None:
        if owned.get(getattr(self, "_owned", None)):
            _memory.drop(self._owned)
            _memory.sweep()
            warnings.warn("a vmem.KernelRange was dropped without end()", ResourceWarning, stacklevel=2)


def kernel(
    what: Any, access: int = READ, device: int = 0, stream: Any = None, budget: Union[int, str, None] = None
) -> KernelRange:
    """Opens a range to kernels that request bytes while they run (docs/gpu-paging.md).

    with vmem.kernel(table, device=0, stream=stream, budget="1GiB") as open: launch kernels on the stream, with
    open.view as their parameter. The library leases the requested bytes, at most `budget` bytes at once (None: half of
    device_budget). Needs device=handles. The bytes are a Region, Array, NumPy array or tensor over one.
    """
    return KernelRange(what, access, device, stream, 0 if budget is None else parse_size(budget))
