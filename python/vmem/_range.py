# SPDX-License-Identifier: Apache-2.0
"""Ranges of regions: hints, queries, and leases."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import errno
import operator
import os
import warnings
from typing import IO, Any, Generator, Iterator, List, NamedTuple, Optional, Tuple, Union

from . import _memory, _stream
from ._lib import (
    HOST,
    READ,
    SSD,
    WRITE,
    Error,
    Owner,
    RangeStruct,
    ResidencyStruct,
    check,
    failure,
    lib,
    stream_handle,
    struct_values,
)


class Advice(enum.IntEnum):
    """How bytes will be used: for advise(), alloc(), map(). The first six apply to a location and
    mean what cudaMemAdvise's do; the others apply to the SSD tier and ignore the location."""

    SET_PREFERRED_LOCATION = 1
    UNSET_PREFERRED_LOCATION = 2
    SET_READ_MOSTLY = 3
    UNSET_READ_MOSTLY = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6
    NORMAL = 16  #: undo sequential, random, cold, hot, pin
    SEQUENTIAL = 17  #: the whole region: read far ahead, evict behind
    RANDOM = 18  #: the whole region: no read-ahead
    WILL_NEED = 19  #: as prefetch(), to where it is preferred
    DONT_NEED = 20  #: drop the contents of blocks wholly inside: zeros, or the file's bytes
    COLD = 21  #: evict first
    HOT = 22  #: keep while anything else can go
    PIN = 23  #: evict only when nothing else is left; no promise: a lease is one
    PRIORITY_LOW = 32  #: the whole region, against other regions
    PRIORITY_NORMAL = 33
    PRIORITY_HIGH = 34


def advice_of(advice: Union["Advice", str, int]) -> int:
    """Converts an Advice, its number, or its name in any case: "sequential", "dont_need",
    "dont-need"."""
    if isinstance(advice, str):
        found = Advice.__members__.get(advice.strip().upper().replace("-", "_").replace(" ", "_"))
        if found is None:
            raise ValueError(f"advice {advice!r} is not known; there are: {', '.join(Advice.__members__).lower()}")
        return int(found)
    return operator.index(advice)


# Bytes under one lease in read_from() and write_to(): a part of the smallest budget.
_PIECE = 2 << 20


class Residency(NamedTuple):
    """Bytes of a range in each tier, and the block size of its region (the unit of movement)."""

    zero_bytes: int
    ssd_bytes: int
    host_bytes: int
    device_bytes: int
    block_size: int


def _residency(ptr: int, nbytes: int) -> Residency:
    out = ResidencyStruct()
    out.size = ctypes.sizeof(out)
    if nbytes:
        check(lib.vmem_query(ptr, nbytes, ctypes.byref(out)))
    return Residency(*struct_values(out))


class Range:
    """Bytes of one region: the base of Region and Array. Calls act on every block that the bytes
    touch, and do nothing for an empty array."""

    __slots__ = ("_handle", "__weakref__")
    _handle: _memory.Handle

    @property
    def ptr(self) -> int:
        """The first byte's address, the same on CPU and GPU."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        raise NotImplementedError

    def _check(self) -> None:
        if self._handle.freed:
            raise Error(errno.EINVAL, f"{self._handle.label} has been freed")

    def prefetch(self, location: int = HOST, stream: Any = None) -> None:
        """A hint: starts to move the bytes toward a location (HOST, SSD, a CUDA ordinal) and
        returns at once. With a stream it takes effect when the stream gets there."""
        self._check()
        if self.nbytes:
            check(lib.vmem_prefetch(self.ptr, self.nbytes, location, stream_handle(stream)))

    def advise(self, advice: Union[Advice, str, int], location: int = HOST) -> None:
        """Announces how the bytes will be used: an Advice, or its name ("sequential", "random",
        "cold", ..). Only the preferred location and accessed by use `location`."""
        self._check()
        if self.nbytes:
            check(lib.vmem_advise(self.ptr, self.nbytes, advice_of(advice), location))

    def evict(self, location: int = SSD) -> None:
        """Moves the bytes out to HOST or SSD and returns when that is done. Leased blocks are skipped."""
        self._check()
        if self.nbytes:
            check(lib.vmem_evict(self.ptr, self.nbytes, location))

    def sync(self) -> None:
        """Returns when the bytes have a copy on the SSD; for a shared file it is durable."""
        self._check()
        if self.nbytes:
            check(lib.vmem_sync(self.ptr, self.nbytes))

    def query(self) -> Residency:
        """How many of the bytes are in each tier now; all figures are 0 for an empty array."""
        self._check()
        return _residency(self.ptr, self.nbytes)

    def read_from(self, file: Union[str, bytes, int, "os.PathLike[Any]", IO[bytes]], offset: int = 0) -> int:
        """Fills the bytes from byte `offset` on from a file: a path, a descriptor, or a binary file
        object at its position. Returns the number of bytes read, which is smaller only at the end
        of the file. Waits for a pipe or socket that has no data, even if it is non-blocking. Works
        where system calls fail on absent blocks: it leases a few blocks at a time."""
        if not self._handle.writable:
            raise TypeError(f"{self._handle.label} is mapped for reading")
        opened = _stream.opened(file, "rb")
        if opened is not None:
            with opened as made:
                return self.read_from(made, offset)
        done = 0
        for piece in self._pieces(offset, READ | WRITE):
            n = _stream.fill(piece, file)
            done += n
            if n < len(piece):
                break
        return done

    def write_to(self, file: Union[str, bytes, int, "os.PathLike[Any]", IO[bytes]], offset: int = 0) -> int:
        """Writes the bytes from byte `offset` on to a file: a path, which is created or replaced, a
        descriptor, or a binary file object at its position. Returns the number of bytes written:
        all. Waits for a pipe or socket that is full, even if it is non-blocking. Works where system
        calls fail on absent blocks. EBUSY: a region maps the file."""
        _memory.check_unmapped(file)
        opened = _stream.opened(file, "wb")
        if opened is not None:
            with opened as made:
                return self.write_to(made, offset)
        done = 0
        for piece in self._pieces(offset, READ):
            _stream.drain(piece, file)
            done += len(piece)
        _stream.flush(file)
        return done

    def _pieces(self, offset: int, access: int) -> Iterator[memoryview]:
        self._check()
        offset = operator.index(offset)
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset {offset} is not in the {self.nbytes} bytes")
        return leased_pieces(self._handle.export(), self.ptr + offset, self.nbytes - offset, access)

    def acquire(self, access: int = READ, location: int = HOST, stream: Any = None) -> "Lease":
        """Leases these bytes: like the module's acquire(), for one range."""
        self._check()
        return Lease([(self.ptr, self.nbytes, access, self._handle.export())], location, stream)


def leased_pieces(export: _memory.Export, ptr: int, size: int, access: int) -> Iterator[memoryview]:
    """Yields views of a region's bytes, each leased during its turn of the loop."""
    for at in range(ptr, ptr + size, _PIECE):
        nbytes = min(_PIECE, ptr + size - at)
        with Lease([(at, nbytes, access, export)], HOST, None):
            view = memoryview(_memory.buffer(export, at, nbytes)).cast("B")
            yield view
            view.release()


_OWN = object()  # the lease's own stream
Span = Tuple[int, int, int, Any]  # address, bytes, access, the object that keeps the region


class Lease(Owner):
    """A live lease; ends with release(), at the end of a with statement, or with the object (which warns)."""

    __slots__ = ("_lease", "_owned", "_keep", "_stream", "_held", "_generation", "__weakref__")

    def __init__(self, spans: List[Span], location: int, stream: Any, wait: bool = True) -> None:
        _memory.sweep(regions=False)
        self._held = False
        self._lease = ctypes.c_void_p()
        self._generation = _memory.generation
        spans = [s for s in spans if s[1] != 0]
        ranges = (RangeStruct * max(1, len(spans)))()
        for struct, (ptr, nbytes, access, _) in zip(ranges, spans):
            struct.ptr, struct.size, struct.access = ptr, nbytes, operator.index(access)
        self._keep = [s[3] for s in spans]
        self._stream = stream_handle(stream)
        self._owned = _memory.own(self, self._lease, lib.vmem_lease_end, self._stream)
        if spans and wait:
            check(lib.vmem_lease(ctypes.byref(self._lease), ranges, len(spans), location, self._stream))
            self._held = True
        elif spans:
            made = ctypes.byref(self._lease)
            check(lib.vmem_lease_async(made, ranges, len(spans), location, self._stream, None, None))

    @property
    def _live(self) -> Optional[ctypes.c_void_p]:
        """Returns the handle; None or NULL if there is none, or no longer one."""
        _memory.check_fork(self._generation, "the lease")
        return _memory.owned.get(self._owned)

    def _end(self, stream: int) -> None:
        try:
            _memory.end([], self._owned, lib.vmem_lease_end, stream)
        finally:
            if self._owned not in _memory.owned:
                self._keep = []

    def release(self, stream: Any = _OWN) -> None:
        """Ends the lease: on the host now, at a device when the stream gets here (its own, or
        another of the device whose work comes after the last use). Releasing twice does nothing."""
        if self.held:
            self._end(self._stream if stream is _OWN else stream_handle(stream))

    @property
    def held(self) -> bool:
        """False once the lease was released."""
        return self._held and self._owned in _memory.owned

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def __del__(self, owned: Any = _memory.owned) -> None:
        if owned.get(getattr(self, "_owned", None)):
            _memory.drop(self._owned)
            _memory.sweep(regions=False)
            warnings.warn("a vmem.Lease was dropped without release()", ResourceWarning, stacklevel=2)


class PendingLease(Owner):
    """A pending lease from acquire_async(). Awaiting it, once, gives the Lease; so does `async
    with`, which releases it at its end. Cancelling a task that awaits it cancels the lease."""

    __slots__ = ("_lease", "_awaited", "_failure")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._awaited = False
        self._failure: Optional[Error] = None

    def ready(self) -> bool:
        """Returns False if it is not ready yet. Raises the reason if it failed or was cancelled, at
        each call; nothing is leased then."""
        if self._failure is not None:
            raise self._failure
        lease = self._lease
        if not lease._live:
            return True  # it has no bytes, or is over
        rc = lib.vmem_lease_poll(lease._live)
        if rc == -errno.EAGAIN:
            return False
        if rc != 0:
            self._failure = failure(rc)
            lease._end(lease._stream)
            raise self._failure
        lease._held = True
        return True

    def fileno(self) -> int:
        """Returns a descriptor that polls readable once the lease is ready or has failed. The lease
        closes it."""
        fd = lib.vmem_lease_fd(self._lease._live)
        if fd < 0:
            raise failure(fd)
        return int(fd)

    def cancel(self) -> None:
        """Cancels the lease, ready or not: nothing is leased afterwards. Waits for the lease's I/O
        in flight, and blocks an event loop during this time."""
        if self._lease._live:
            cancelled = Error(errno.ECANCELED, "the lease was cancelled")
            try:
                self._lease._end(self._lease._stream)
            finally:
                if self._lease._owned not in _memory.owned and self._failure is None:
                    self._failure = cancelled

    async def _wait(self) -> Lease:
        if self._awaited:
            raise RuntimeError("a pending lease can be awaited only once")
        self._awaited = True
        try:
            if not self.ready():
                loop = asyncio.get_running_loop()
                done, fd = asyncio.Event(), self.fileno()
                loop.add_reader(fd, done.set)
                try:
                    await done.wait()
                finally:
                    loop.remove_reader(fd)
                self.ready()
        except BaseException:
            self.cancel()
            raise
        return self._lease

    def __await__(self) -> Generator[Any, None, Lease]:
        """Waits for the lease and returns it."""
        return self._wait().__await__()

    async def __aenter__(self) -> Lease:
        """Waits for the lease and returns it."""
        return await self

    async def __aexit__(self, *_: Any) -> None:
        """Releases the lease."""
        self._lease.release()


def span_of(what: Any, access: int) -> Span:
    """Returns address, bytes and access of a Region, Array, NumPy array or torch tensor over one,
    or a pair with its own access."""
    if isinstance(what, tuple):
        if len(what) != 2:
            raise TypeError("a range with an access of its own is a pair: (array, vmem.READ | vmem.WRITE)")
        what, access = what
    if isinstance(what, Range):
        what._check()
        return what.ptr, what.nbytes, access, what._handle.export()
    if hasattr(what, "data_ptr") and hasattr(what, "stride"):  # a torch tensor, strided
        count = 1 + sum((n - 1) * s for n, s in zip(what.shape, what.stride()))
        return what.data_ptr(), count * what.element_size() if what.numel() else 0, access, what
    interface = getattr(what, "__array_interface__", None)
    if interface is not None:
        if interface.get("strides") is not None:
            raise TypeError("the NumPy array is not contiguous; lease the array it is a part of")
        return interface["data"][0], what.nbytes, access, what
    raise TypeError(
        f"{type(what).__name__} cannot be leased; give a Region, an Array, or a NumPy array or tensor over one"
    )


def acquire(*what: Any, access: int = READ, location: int = HOST, stream: Any = None) -> Lease:
    """Leases ranges of one or several regions, all or nothing: their bytes come to `location` and
    stay until release.

        with vmem.acquire(weights, (out, vmem.READ | vmem.WRITE), location=0, stream=stream): ...

    At a device, kernels on the stream may use the bytes. At location=HOST the CPU, system calls and
    DMA may. Waits for the disk, and for streams that have not reached the release of a conflicting
    lease. ENOMEM: the ranges and the live leases exceed the budget. EBUSY: a live lease at another
    location. EIO: a block could not be read.
    """
    if not what:
        raise TypeError("acquire() needs at least one range")
    return Lease([span_of(w, access) for w in what], location, stream)


def acquire_async(*what: Any, access: int = READ, location: int = HOST, stream: Any = None) -> PendingLease:
    """Starts acquire() and returns at once: `lease = await vmem.acquire_async(..)`, `async with
    vmem.acquire_async(..)`.

    Without asyncio use ready(), or fileno() for an event loop. At a device, work put on the stream
    after the lease is ready finds the bytes. EAGAIN: 64 leases are pending.
    """
    if not what:
        raise TypeError("acquire_async() needs at least one range")
    return PendingLease(Lease([span_of(w, access) for w in what], location, stream, wait=False))


def prefetch(*what: Any, location: int = HOST, stream: Any = None) -> None:
    """Calls Range.prefetch() for each argument: a Region, an Array, or a NumPy array or tensor over
    one."""
    for ptr, nbytes, _, _keep in [span_of(w, READ) for w in what]:
        if nbytes:
            check(lib.vmem_prefetch(ptr, nbytes, location, stream_handle(stream)))


def advise(what: Any, advice: Union[Advice, str, int], location: int = HOST) -> None:
    """Calls Range.advise() for a Region, an Array, or a NumPy array or tensor over one."""
    ptr, nbytes, _, _keep = span_of(what, READ)
    if nbytes:
        check(lib.vmem_advise(ptr, nbytes, advice_of(advice), location))


def export(what: Any, dma_buf: bool = False) -> int:
    """Returns a descriptor of leased memory at a device; close it with os.close(). It covers the
    one block that contains the range, for another process (cuMemImportFromShareableHandle), or is a
    dma-buf of all its blocks, for another driver. The lease must last as long as others use it;
    vmem.h says what happens otherwise."""
    ptr, nbytes, _, _keep = span_of(what, READ)
    fd = ctypes.c_int(-1)
    try:
        check(lib.vmem_export(ptr, nbytes, int(dma_buf), ctypes.byref(fd)))
        return fd.value
    except BaseException:  # a signal's, too, once there is a descriptor
        if fd.value >= 0:
            os.close(fd.value)
        raise


def evict(*what: Any, location: int = SSD) -> None:
    """Calls Range.evict() for each argument: a Region, an Array, or a NumPy array or tensor over
    one."""
    for ptr, nbytes, _, _keep in [span_of(w, READ) for w in what]:
        if nbytes:
            check(lib.vmem_evict(ptr, nbytes, location))


def sync(*what: Any) -> None:
    """Calls Range.sync() for each argument: a Region, an Array, or a NumPy array or tensor over
    one. Without arguments it syncs every region, including those not made from Python: it tries all
    and raises the first error."""
    if not what:
        check(lib.vmem_sync(None, 0))
    for ptr, nbytes, _, _keep in [span_of(w, READ) for w in what]:
        if nbytes:
            check(lib.vmem_sync(ptr, nbytes))


def query(what: Any) -> Residency:
    """Calls Range.query() for a Region, an Array, or a NumPy array or tensor over one."""
    ptr, nbytes, _, _keep = span_of(what, READ)
    return _residency(ptr, nbytes)
