# SPDX-License-Identifier: Apache-2.0
"""Settings and statistics."""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from typing import Union

from ._lib import DeviceStatsStruct, StatsStruct, check, lib, struct_values

Value = Union[str, int, bool]


def _text(value: Value) -> bytes:
    if isinstance(value, bool):
        return b"on" if value else b"off"
    return str(value).encode()


def set(name: str, value: Value) -> None:  # noqa: A001  (the name of the call in C)
    """Changes a setting (docs/settings.md): set("host_budget", "8GiB"). Numbers are bytes, True and False on and off.
    ENOENT: there is no such setting; EINVAL: the words give the accepted form; EBUSY: not while regions exist."""
    check(lib.vmem_set(name.encode(), _text(value)))


def get(name: str) -> str:
    """A setting as text; "" where nothing was set and the default is found at start."""
    size = 256
    while True:
        value = ctypes.create_string_buffer(size)
        rc = lib.vmem_get(name.encode(), value, size)
        if rc != -errno.ERANGE:
            check(rc)
            return value.value.decode("utf-8", "replace")
        size *= 4


def configure(**settings: Value) -> None:
    """Several settings at once: configure(host_budget="8GiB", ssd_path="/mnt/nvme"). Stops at the first refusal."""
    for name, value in settings.items():
        set(name, value)


@dataclass(frozen=True)
class Stats:
    """Of this process; struct vmem_stats in <vmem/vmem.h> explains each."""

    faults: int
    fault_ns_total: int
    fault_ns_max: int
    read_bytes: int
    write_bytes: int
    host_bytes: int
    device_bytes: int
    ssd_bytes: int
    evictions: int
    clean_drops: int
    prefetched_blocks: int
    prefetch_hits: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    io_errors: int
    checksum_errors: int
    regions: int
    soft_faults: int
    prefetch_wasted: int
    host_budget: int
    copied_bytes: int
    lost_blocks: int
    unknown_blocks: int


@dataclass(frozen=True)
class DeviceStats:
    """Of one device; struct vmem_device_stats in <vmem/vmem.h> explains each."""

    budget: int
    used_bytes: int
    leased_bytes: int
    in_bytes: int
    out_bytes: int
    evictions: int
    clean_drops: int
    driver_host_bytes: int


def stats() -> Stats:
    """What libvmem has done in this process so far, and holds now."""
    out = StatsStruct()
    out.size = ctypes.sizeof(out)
    check(lib.vmem_stats(ctypes.byref(out)))
    return Stats(*struct_values(out))


def device_stats(device: int = 0) -> DeviceStats:
    """What libvmem has done at one device, and holds there now. ENODEV: there is no such device."""
    out = DeviceStatsStruct()
    out.size = ctypes.sizeof(out)
    check(lib.vmem_device_stats(device, ctypes.byref(out)))
    return DeviceStats(*struct_values(out))
