# SPDX-License-Identifier: Apache-2.0
"""The target of an offloaded model (a CUDA device, the simulated one, the host), and how many bytes may be there."""

from __future__ import annotations

import contextlib
import errno
import weakref
from typing import Any, ContextManager, Iterable, Union

import torch

from .. import _status
from .._lib import HOST, Error, parse_size
from ._tensors import CPU

STAGING_SHARE, MODEL_SHARE = 50, 85  # percent of host_budget for the device tier: by default, and for offloaded models
CPU_REST = 256 << 20  # bytes of host_budget that models leave


LEAST_BLOCK = 2 << 20  # bytes
MOST_ROUNDING = 3  # percent of what is leased


def device_block() -> int:
    """Bytes: of which blocks of regions with a device tier are multiples."""
    size = _status.get("device_block_size")
    return LEAST_BLOCK if size == "auto" else parse_size(size)


def block_within(sizes: Iterable[int], block: int) -> int:
    """The largest block, at most this, of which rounding adds little to parts of so many bytes, wherever they begin."""
    parts = list(sizes)
    while block > LEAST_BLOCK and len(parts) * block * 100 > sum(parts) * MOST_ROUNDING:
        block //= 2
    return block


def block_beside(budget: int, block: int) -> int:
    """The largest block, at most this, of which the ends of a lease in use and of one under way add little to so much
    memory. Weights that lie side by side share the blocks at their ends, so each lease has two to lose."""
    while block > LEAST_BLOCK and 4 * block * 100 > budget * MOST_ROUNDING:
        block //= 2
    return block


def tier() -> str:
    """The device tier that libvmem has: "cuda", "sim" or "none". Starts libvmem."""
    wanted = _status.get("device")
    if wanted in ("sim", "sim-handles", "none"):
        return wanted.partition("-")[0]
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
        """The thread's current stream there, as cudaStream_t."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.on_gpu else 0

    def current(self) -> ContextManager[Any]:
        """The default stream belongs to the thread's current device: this one, inside."""
        if self._several and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def block(self) -> int:
        """Bytes that a lease is rounded to."""
        size = _status.get("block_size")
        if self.location != HOST or size == "auto":
            return device_block()
        return max(device_block(), parse_size(size))

    def budget_in_force(self) -> int:
        if self.location == HOST:
            # Leases leave room for faults and for the blocks of others.
            return _status.stats().host_budget // 2
        return _status.device_stats(self.location).budget


def resolve(device: Any) -> Target:
    """None: the current CUDA device where libvmem and torch have one, else the simulated one, else the host.
    A number or torch device: that one. "sim", "host" (or "cpu"): those."""
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
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type != "cuda":
        raise Error(errno.EINVAL, f"device {device!r} is not accepted; give a CUDA device, 'sim' or 'host'")
    if not torch.cuda.is_available():
        raise Error(errno.ENODEV, f"device {device!r}: torch {torch.__version__} sees no CUDA device")
    index = torch.cuda.current_device() if where.index is None else where.index
    if tier() != "cuda":
        setting = _status.get("device")
        raise Error(errno.ENODEV, f"device {device!r}: libvmem has no CUDA device (setting device: {setting})")
    _status.device_stats(index)  # says so when it is not there
    return Target(index, torch.device("cuda", index), f"CUDA device {index}")


# What live models asked for, by location. device_budget is one setting for all devices: it holds the most that the
# models of one location ask for together.
_asked: "weakref.WeakKeyDictionary[Any, tuple]" = weakref.WeakKeyDictionary()


def ask_budget(owner: Any, target: Target, budget: Union[int, str, None]) -> int:
    """The bytes that this model may have at its location. A budget that is given makes device_budget large enough for
    it and for those of other models."""
    if budget is None:
        return target.budget_in_force()
    wanted = parse_size(budget)
    wanted -= wanted % device_block()
    if wanted <= 0:
        raise Error(errno.EINVAL, f"device_budget {budget!r} is less than a block, {device_block() >> 20} MiB")
    if target.location != HOST:
        _asked[owner] = (target.location, wanted)
        try:
            _set_budget()
        except Error:
            give_budget(owner)
            raise
    return wanted


def use_host_memory(target: Target) -> None:
    """Weights on a device are most of what libvmem has: host memory is theirs, but for what the CPU may need, and
    unless staging_share has been changed."""
    if target.location == HOST or _status.get("staging_share") != str(STAGING_SHARE):
        return
    rest = -(-CPU_REST * 100 // max(1, _status.stats().host_budget))
    if min(MODEL_SHARE, 100 - rest) > STAGING_SHARE:
        _status.set("staging_share", min(MODEL_SHARE, 100 - rest))


def give_budget(owner: Any) -> None:
    """The model is gone: others keep what they asked for. The last budget stays as it is."""
    if _asked.pop(owner, None) is not None:
        with contextlib.suppress(Error):  # leases of others hold more at this moment; it is no worse than before
            _set_budget()


def _set_budget() -> None:
    sums: dict = {}
    for owner in [ref() for ref in _asked.keyrefs()]:  # other threads add and take away meanwhile
        location, bytes_ = _asked.get(owner, (HOST, 0)) if owner is not None else (HOST, 0)
        if bytes_:
            sums[location] = sums.get(location, 0) + bytes_
    if sums:
        _status.set("device_budget", max(sums.values()))
