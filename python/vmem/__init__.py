# SPDX-License-Identifier: Apache-2.0
"""libvmem: one address range over GPU memory, host memory and NVMe.

    import vmem
    vmem.configure(host_budget="4GiB")
    with vmem.alloc("16GiB") as region:            # or vmem.map("data.bin")
        numbers = region.numpy("float32")          # an ordinary NumPy array, four times larger than the memory
        with vmem.acquire(region[: 1 << 30], location=0, stream=stream):
            ...                                    # kernels on the stream use it at the same address

An array without a lease is for the CPU: a load or store waits until the right bytes are there. A GPU needs a lease.
Failures are vmem.Error with libvmem's message. Models: vmem.torch.

An access to bytes that libvmem cannot provide (the disk fails, memory cannot be freed) ends the process with SIGBUS, as
with mmap. A lease raises an exception instead. Forked children do not inherit regions: start workers that need them
with the spawn method. A region that was mapped for reading can be pickled to them. libvmem's log goes to stderr
(setting log), or to set_log_callback()'s function.
"""

from ._accessible import accessible, save_npy
from ._array import Array
from ._kernel import KernelRange, kernel
from ._lib import BACKEND_HANDLES, BACKEND_MANAGED, HOST, READ, SSD, WRITE, Error, FormatError, human_bytes, parse_size
from ._memory import init, library_version, shutdown
from ._range import (
    Advice,
    Lease,
    PendingLease,
    Residency,
    acquire,
    acquire_async,
    advise,
    evict,
    export,
    prefetch,
    query,
    sync,
)
from ._region import Region, alloc, map
from ._status import (
    DeviceStats,
    Stats,
    configure,
    device_stats,
    flush,
    flush_on,
    get,
    set,
    set_log_callback,
    stats,
)
from ._version import __version__

__all__ = [
    "BACKEND_HANDLES",
    "BACKEND_MANAGED",
    "HOST",
    "READ",
    "SSD",
    "WRITE",
    "Advice",
    "Array",
    "DeviceStats",
    "Error",
    "FormatError",
    "KernelRange",
    "Lease",
    "PendingLease",
    "Region",
    "Residency",
    "Stats",
    "accessible",
    "acquire",
    "acquire_async",
    "advise",
    "alloc",
    "configure",
    "device_stats",
    "evict",
    "export",
    "flush",
    "flush_on",
    "get",
    "human_bytes",
    "init",
    "kernel",
    "library_version",
    "map",
    "parse_size",
    "prefetch",
    "query",
    "save_npy",
    "set",
    "set_log_callback",
    "shutdown",
    "stats",
    "sync",
    "__version__",
]
