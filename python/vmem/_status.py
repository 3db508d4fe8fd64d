# SPDX-License-Identifier: Apache-2.0
"""Settings and statistics."""

from __future__ import annotations

import atexit
import ctypes
import errno
import itertools
import operator
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Union

from . import _memory
from ._lib import LOG_CALLBACK, DeviceStatsStruct, StatsStruct, check, lib, short, struct_values, text_bytes

Value = Union[str, int, bool]


def _text(value: Value) -> bytes:
    if isinstance(value, bool):
        return b"on" if value else b"off"
    return text_bytes(str(value))


def set(name: str, value: Value) -> None:  # noqa: A001  (the name of the call in C)
    """Changes a setting: set("host_budget", "8GiB"). Numbers are bytes, True and False mean on and
    off. settings.md, in the folder docs of this package, lists all settings. ENOENT: there is no
    such setting. EINVAL: the message gives the accepted form. EBUSY: not while regions exist."""
    check(lib.vmem_set(text_bytes(name), _text(value)))


def get(name: str) -> str:
    """Returns a setting as text; "" if it is not set and its default is determined at start."""
    size = 256
    while True:
        value = ctypes.create_string_buffer(size)
        rc = lib.vmem_get(text_bytes(name), value, size)
        if rc != -errno.ERANGE:
            check(rc)
            return value.value.decode("utf-8", "replace")
        size *= 4


def configure(**settings: Value) -> None:
    """Sets several settings: configure(host_budget="8GiB", ssd_path="/mnt/nvme"). Stops at the
    first error."""
    for name, value in settings.items():
        set(name, value)


# The callbacks that libvmem may call. Each must live until another has replaced it. The flag says
# whether the call that set it has returned: a callback whose call was interrupted may be installed
# or not, so it stays.
_log_callbacks: Dict[int, List[Any]] = {}
_numbers = itertools.count()


def set_log_callback(callback: Optional[Callable[[int, str], None]]) -> None:
    """Delivers libvmem's log lines to callback(level, line): level 0 is an error, 1 a warning, 2
    info, 3 debug. None restores stderr; the end of the interpreter does the same. The callback runs
    on any thread, and may use regions and make any call. Its exceptions are printed. When this
    returns, no thread is in the old callback, unless the old callback made this call."""
    if callback is not None and not callable(callback):
        raise TypeError(f"{short(callback)} cannot be called; give a function of a level and a line, or None")
    made = LOG_CALLBACK()
    if callback is not None:
        deliver = callback
        made = LOG_CALLBACK(lambda level, line, _: deliver(level, line.decode("utf-8", "replace")))
    before = [number for number, (_, given) in list(_log_callbacks.items()) if given]
    entry = _log_callbacks[next(_numbers)] = [made, False]
    lib.vmem_log(made, None)
    entry[1] = True
    for number in before:
        _log_callbacks.pop(number, None)


@atexit.register
def _end_log() -> None:
    if any(made for made, _ in list(_log_callbacks.values())):  # while an interpreter can run it
        set_log_callback(None)


def flush() -> None:
    """Writes the stores to shared files, as the end of the program does. Call it before os._exit
    and os.exec*, which would lose them. The files then have the stores however the process ends;
    Region.sync() makes them durable."""
    check(lib.vmem_flush())


def flush_on(*signals: int) -> None:
    """Makes each of these signals write shared files before it ends the process:
    flush_on(signal.SIGTERM). Other threads continue during the write, and later stores may be lost.
    EBUSY: Python has a handler for the signal, as for SIGINT; an uncaught exception also writes the
    files. EINVAL: not a signal of that kind."""
    numbers = [operator.index(s) for s in signals]
    check(lib.vmem_flush_on((ctypes.c_int * len(numbers))(*numbers), len(numbers)))


# After an unhandled KeyboardInterrupt the interpreter ends by SIGINT, which runs no handler of the
# C library.
@atexit.register
def _flush() -> None:
    lib.vmem_flush()  # the log reports what was not written


@dataclass(frozen=True)
class Stats:
    """Figures of this process since libvmem started in it: stats().

    faults                accesses that trapped; soft_faults of them without I/O
    fault_ns_total, _max  nanoseconds from the report of a fault until the block is in place
    read_bytes            read from the SSD; write_bytes written to it
    host_bytes            in host memory now; device_bytes on devices, ssd_bytes on the SSD
    evictions             blocks that left host memory; clean_drops of them without a write
    prefetched_blocks     read, or moved to a device, before they were requested; prefetch_hits of them
                          were used, prefetch_wasted were evicted without use
    host_to_device_bytes  moved to devices; device_to_host_bytes from them
    io_errors             of the SSD; checksum_errors: blocks read back with other bytes than written
    regions               now
    host_budget           in force, bytes
    copied_bytes          bytes that a CPU copied to put blocks in place
    lost_blocks           blocks whose only copy was lost, since the start
    unknown_blocks        blocks whose last write failed, now
    fault_around_blocks   read with a requested block (block size auto); their use is not observed
    dirty_bytes           in host memory now that shared files may lack
    background_write_bytes  of them written in the background (setting writeback_interval)
    """

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
    fault_around_blocks: int
    dirty_bytes: int
    background_write_bytes: int


@dataclass(frozen=True)
class DeviceStats:
    """Figures of one device since libvmem started in this process: device_stats().

    budget             bytes of the device's memory that libvmem may take
    used_bytes         taken; a block moving between devices counts on both; leased_bytes of them are leased
    in_bytes           moved to the device; out_bytes from it
    evictions          blocks that left the device; clean_drops of them without a copy
    driver_host_bytes  host memory that the driver holds for blocks of this device
    backend            BACKEND_MANAGED: unified memory; BACKEND_HANDLES: physical handles, the device has
                       its own page tables. A simulated device reports the backend that it imitates
    guest_bytes        of used_bytes: blocks for which another device had no room (peer_spill_percent)
    to_peers           of out_bytes: to such a place on another device; from_peers of in_bytes: from there
    """

    budget: int
    used_bytes: int
    leased_bytes: int
    in_bytes: int
    out_bytes: int
    evictions: int
    clean_drops: int
    driver_host_bytes: int
    backend: int
    guest_bytes: int
    to_peers: int
    from_peers: int


def stats() -> Stats:
    """Returns the work of libvmem in this process so far, and the bytes that it holds now."""
    _memory.sweep()
    out = StatsStruct()
    out.size = ctypes.sizeof(out)
    check(lib.vmem_stats(ctypes.byref(out)))
    return Stats(*struct_values(out))


def device_stats(device: int = 0) -> DeviceStats:
    """Returns the work of libvmem at one device, and the bytes that it holds there now. ENODEV:
    there is no such device."""
    out = DeviceStatsStruct()
    out.size = ctypes.sizeof(out)
    check(lib.vmem_device_stats(device, ctypes.byref(out)))
    return DeviceStats(*struct_values(out))
