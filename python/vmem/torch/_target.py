# SPDX-License-Identifier: Apache-2.0
"""The target of an offloaded model (a CUDA device, the simulated one, the host), and its budget in
bytes."""

from __future__ import annotations

import contextlib
import errno
import operator
import weakref
from typing import Any, ContextManager, Dict, Iterable, Union

import torch

from .. import _status
from .._lib import HOST, Error, parse_size
from ._tensors import CPU

STAGING_SHARE, MODEL_SHARE = 50, 85  # percent of host_budget for the device tier: by default, and for offloaded models
CPU_REST = 256 << 20  # bytes of host_budget that models leave


LEAST_BLOCK = 2 << 20  # bytes
MOST_ROUNDING = 3  # percent of what is leased


def device_block() -> int:
    """Returns the bytes of which blocks of regions with a device tier are multiples."""
    size = _status.get("device_block_size")
    return LEAST_BLOCK if size == "auto" else parse_size(size)


def block_within(sizes: Iterable[int], block: int) -> int:
    """Returns the largest block, at most `block`, whose rounding adds little to parts of these
    sizes, wherever they begin."""
    parts = list(sizes)
    while block > LEAST_BLOCK and len(parts) * block * 100 > sum(parts) * MOST_ROUNDING:
        block //= 2
    return block


def block_beside(budget: int, block: int) -> int:
    """Returns the largest block, at most `block`, for which rounding at the ends of two leases, one
    in use and one pending, wastes little of the budget. Weights side by side share the blocks at
    their ends, so each lease wastes up to two."""
    while block > LEAST_BLOCK and 4 * block * 100 > budget * MOST_ROUNDING:
        block //= 2
    return block


def tier() -> str:
    """Returns the device tier of libvmem: "cuda", "sim" or "none". Starts libvmem."""
    wanted = _status.get("device")
    kind = wanted.partition("-")[0]  # each simulated device is sim, or sim-SOMETHING
    if kind in ("sim", "none"):
        return kind
    try:
        _status.device_stats(0)
    except Error as e:
        if e.errno != errno.ENODEV:
            raise
        return "none"
    return "cuda"


class Target:
    """A location of libvmem and the torch device whose kernels (or CPU loops) use it."""

    def __init__(self, location: int, device: "torch.device", words: str) -> None:
        self.location = location
        self.device = device
        self.words = words
        self.on_gpu = device.type == "cuda"
        self._several = self.on_gpu and torch.cuda.device_count() > 1

    def stream(self) -> int:
        """Returns the thread's current stream there, as cudaStream_t."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.on_gpu else 0

    def current(self) -> ContextManager[Any]:
        """Makes this device the thread's current one: the default stream belongs to the current
        device."""
        if self._several and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def block(self) -> int:
        """Returns the unit in bytes to which leases are rounded."""
        size = _status.get("block_size")
        if self.location != HOST or size == "auto":
            return device_block()
        return max(device_block(), parse_size(size))

    def budget_in_force(self) -> int:
        if self.location == HOST:
            # Leave memory for faults and for other blocks.
            return _status.stats().host_budget // 2
        return _status.device_stats(self.location).budget


def resolve(device: Any) -> Target:
    """Resolves None to the current CUDA device if libvmem and torch have one, else the simulated
    one, else the host. A number or torch device: that one. "sim", "host" (or "cpu"): those."""
    if device is None:
        there = tier()
        if there == "cuda" and torch.cuda.is_available():
            return resolve(torch.device("cuda", torch.cuda.current_device()))
        return resolve("sim" if there == "sim" else "host")
    if device == "host" or str(device) == "cpu":
        return Target(HOST, CPU, "host memory")
    if device == "sim":
        if tier() != "sim":
            raise Error(
                errno.ENODEV,
                "device='sim' is libvmem's simulated device; set VMEM_DEVICE=sim, or vmem.set('device', 'sim') before "
                "the first region",
            )
        return Target(0, CPU, "simulated device 0")
    where = torch.device("cuda", operator.index(device)) if hasattr(device, "__index__") else torch.device(device)
    if where.type != "cuda":
        raise Error(errno.EINVAL, f"device {device!r} is not accepted; give a CUDA device, 'sim' or 'host'")
    if not torch.cuda.is_available():
        raise Error(errno.ENODEV, f"device {device!r}: torch {torch.__version__} sees no CUDA device")
    index = torch.cuda.current_device() if where.index is None else where.index
    if tier() != "cuda":
        setting = _status.get("device")
        raise Error(errno.ENODEV, f"device {device!r}: libvmem has no CUDA device (setting device: {setting})")
    _status.device_stats(index)  # raises if there is no such device
    return Target(index, torch.device("cuda", index), f"CUDA device {index}")


# Budgets requested by live models, by location. device_budget is one setting for all devices: it is
# set to the largest sum over the models of one location.
_asked: Dict["weakref.ref[Any]", tuple] = {}


def ask_budget(owner: Any, target: Target, budget: Union[int, str, None]) -> int:
    """Returns the bytes for this model at its location. An explicit budget makes device_budget
    large enough for it and for those of other models."""
    if budget is None:
        return target.budget_in_force()
    wanted = parse_size(budget)
    wanted -= wanted % device_block()
    if wanted <= 0:
        raise Error(errno.EINVAL, f"device_budget {budget!r} is less than a block, {device_block() >> 20} MiB")
    if target.location != HOST:
        _asked[weakref.ref(owner, _asked.pop)] = (target.location, wanted)
        try:
            _set_budget()
        except Error:
            give_budget(owner)
            raise
    return wanted


def use_host_memory(target: Target) -> None:
    """Gives host memory to weights of offloaded models, except for a rest for the CPU, and only if
    staging_share is unchanged."""
    if target.location == HOST or _status.get("staging_share") != str(STAGING_SHARE):
        return
    rest = -(-CPU_REST * 100 // max(1, _status.stats().host_budget))
    if min(MODEL_SHARE, 100 - rest) > STAGING_SHARE:
        _status.set("staging_share", min(MODEL_SHARE, 100 - rest))


def give_budget(owner: Any) -> None:
    """Withdraws the budget of a model that is gone; others keep theirs. The last budget stays as it
    is."""
    if _asked.pop(weakref.ref(owner), None) is not None:
        with contextlib.suppress(Error):  # other leases may hold more at this moment; that is no worse than before
            _set_budget()


def _set_budget() -> None:
    sums: dict = {}
    for location, bytes_ in list(_asked.values()):  # other threads may add and remove owners
        sums[location] = sums.get(location, 0) + bytes_
    if sums:
        _status.set("device_budget", max(sums.values()))
