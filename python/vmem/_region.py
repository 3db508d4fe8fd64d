# SPDX-License-Identifier: Apache-2.0
"""Makes and names regions, shows them as arrays, and frees them."""

from __future__ import annotations

import builtins
import ctypes
import errno
import operator
import os
import stat
from typing import Any, NamedTuple, Optional, Sequence, SupportsIndex, Tuple, Union

from . import _dlpack, _memory
from ._array import Array
from ._dtypes import dtype_of
from ._lib import (
    BLOCK_AUTO,
    FLAG_HOST_ONLY,
    FLAG_MAP_PRIVATE,
    FLAG_MAP_READ,
    FLAG_MAP_SHARED,
    FLAG_NO_LOCK,
    MAX_DIMENSIONS,
    Error,
    RegionAttrStruct,
    check,
    descriptor_of,
    human_bytes,
    lib,
    open_at_once,
    parse_offset,
    parse_shape,
    parse_size,
    path_bytes,
    product,
    short,
    text_bytes,
)
from ._range import Advice, Range, advice_of

Shape = Union[SupportsIndex, Sequence[SupportsIndex]]


class _Identity(NamedTuple):
    """The identity and state of a file, by which another process verifies that it maps the same
    one."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int  # programs that copy a file restore its mtime

    def __str__(self) -> str:
        written, changed = (f"{ns // 10**9}.{ns % 10**9:09}" for ns in self[3:])
        where = f"device {self.device}, inode {self.inode}, {self.size} bytes"
        return f"{where}, written at {written}, changed at {changed}"


def _identity(file: Union[bytes, int]) -> Optional[_Identity]:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Region(Range):
    """One address range over GPU memory, host memory and SSD. Made by alloc() and map().

    Freed by free(), at the end of a with statement, or with the last object over it. A region that
    was mapped for reading can be pickled and is mapped again where it is unpickled. ESTALE: its
    path leads to another or a changed file there.
    """

    __slots__ = ("_again",)

    def __init__(self, handle: _memory.Handle, again: Optional[Tuple[Any, ...]] = None) -> None:
        self._handle = handle
        self._again = again

    @property
    def ptr(self) -> int:
        """The first byte's address, the same on CPU and GPU."""
        return self._handle.ptr

    @property
    def nbytes(self) -> int:
        """The size of the region."""
        return self._handle.size

    @property
    def name(self) -> str:
        """For messages and statistics; at most 63 bytes reach libvmem."""
        return self._handle.label

    @name.setter
    def name(self, name: str) -> None:
        self._check()
        check(lib.vmem_name(self.ptr, text_bytes(name)))
        self._handle.label = name

    @property
    def writable(self) -> bool:
        """False if a file is mapped for reading."""
        return self._handle.writable

    @property
    def closed(self) -> bool:
        """True once the region has been freed."""
        return self._handle.freed

    def free(self) -> None:
        """Frees the region now. EBUSY: arrays, tensors or leases over it are alive. Writes changes
        of a shared file first; if that fails, the region stays. Freeing twice does nothing."""
        self._handle.free()

    def discard(self) -> None:
        """Frees the region even if its file cannot be written: EIO says what the file lacks, which
        is lost with the region."""
        self._handle.free(discard=True)

    def __enter__(self) -> "Region":
        self._check()
        return self

    def __exit__(self, *_: Any) -> None:
        _dlpack.sweep()
        # Remaining exports keep the region alive: an error here would hide the exception that ends
        # the block.
        if not self._handle.exports:
            self.free()

    def __len__(self) -> int:
        """The size in bytes."""
        return self.nbytes

    def __getitem__(self, part: slice) -> "Array":
        """Bytes [start, stop) as an array of uint8."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("give a slice of bytes without a step, such as region[4096:8192]")
        start, stop, _ = part.indices(self.nbytes)
        return self.array("uint8", max(0, stop - start), start)

    def array(self, dtype: Any = "uint8", shape: Optional[Shape] = None, offset: SupportsIndex = 0) -> "Array":
        """Returns a contiguous array over the region from byte `offset`; without a shape, as many
        elements as fit."""
        self._check()
        kind = dtype_of(dtype)
        offset = parse_offset(offset)
        sizes = (max(0, self.nbytes - offset) // kind.itemsize,) if shape is None else parse_shape(shape)
        if any(n < 0 for n in sizes):
            raise ValueError(f"shape {short(sizes)} has a negative size")
        if len(sizes) > MAX_DIMENSIONS:  # NumPy 1 would copy them before it counts
            raise ValueError(f"a shape of {len(sizes)} dimensions; there can be {MAX_DIMENSIONS}")
        nbytes = product(sizes, kind.itemsize, self.nbytes)
        if offset > self.nbytes:
            raise ValueError(f"byte {offset} is past the end of {self.name}, which has {self.nbytes} bytes")
        if nbytes is None or offset + nbytes > self.nbytes:
            needs = f"more than {self.nbytes}" if nbytes is None else nbytes
            raise ValueError(
                f"an array of {short(sizes)} {kind.name} at byte {offset} needs {needs} bytes; {self.name} has "
                f"{self.nbytes}"
            )
        return Array(self._handle.export(), self._handle.ptr + offset, kind, sizes, nbytes)

    def memoryview(self) -> builtins.memoryview:
        """Returns the bytes, read-only if the region is."""
        return self.array().memoryview()

    def numpy(self, dtype: Any = "uint8", shape: Optional[Shape] = None, offset: SupportsIndex = 0) -> Any:
        """Returns a NumPy array over the region from byte `offset`, with the arguments of
        array()."""
        return self.array(dtype, shape, offset).numpy()

    def __buffer__(self, flags: int) -> builtins.memoryview:
        """The buffer protocol, from Python 3.12 on; before that, use memoryview()."""
        return self.memoryview()

    def __reduce__(self) -> Tuple[Any, ...]:
        if self._again is None:
            raise TypeError(
                f"{self.name} cannot be pickled: only the path of a file that was mapped for reading, and that did not "
                "change meanwhile, is the same in another process"
            )
        return (_map_again, self._again)

    def __repr__(self) -> str:
        if self.closed:
            return f"<vmem.Region {self.name!r}, freed>"
        return f"<vmem.Region {self.name!r}, {human_bytes(self.nbytes)} at {self.ptr:#x}>"


class _Attributes(NamedTuple):
    """The attributes for vmem_create besides a file. None: the setting decides."""

    block_size: Union[int, str, None] = None
    advice: Union[Advice, str, int, None] = None
    codec: Optional[str] = None
    checksum: Optional[bool] = None
    address: Optional[int] = None
    core_dump: Optional[bool] = None


def _block_size(wanted: Union[int, str, None]) -> int:
    if wanted is None:
        return 0
    if isinstance(wanted, str) and wanted.strip().lower() == "auto":
        return BLOCK_AUTO
    return parse_size(wanted)


def _create(
    handle: _memory.Handle,
    flags: int,
    wanted: _Attributes,
    path: Optional[bytes] = None,
    offset: int = 0,
    fd: int = -1,
) -> None:
    _memory.sweep()
    attr = RegionAttrStruct()
    attr.size = ctypes.sizeof(attr)
    attr.block_size = _block_size(wanted.block_size)
    attr.advice = 0 if wanted.advice is None else advice_of(wanted.advice)
    attr.codec = None if wanted.codec is None else text_bytes(wanted.codec)
    attr.checksum = 0 if wanted.checksum is None else 1 if wanted.checksum else -1
    attr.address = None if wanted.address is None else operator.index(wanted.address)
    attr.core_dump = 0 if wanted.core_dump is None else 1 if wanted.core_dump else -1
    attr.path, attr.offset, attr.fd, attr.flags = path, offset, fd, flags
    check(lib.vmem_create(ctypes.byref(handle.made), handle.size, ctypes.byref(attr)))
    handle.begin()


def alloc(
    size: Union[int, str],
    *,
    host_only: bool = False,
    name: Optional[str] = None,
    block_size: Union[int, str, None] = None,
    advice: Union[Advice, str, int, None] = None,
    codec: Optional[str] = None,
    checksum: Optional[bool] = None,
    address: Optional[int] = None,
    core_dump: Optional[bool] = None,
) -> Region:
    """Returns a region of zeros; it costs only address space. host_only: no device tier, any block
    size.

    These arguments override the settings for this region: block_size ("64KiB", "auto"); codec of
    its blocks on the SSD ("none", "lz4", "zstd"); checksum: whether bytes read back are verified.
    advice: applies to the whole region from the start. address: a hint for the region's address,
    used if it is free. core_dump: whether bytes in host memory go into core dumps.
    """
    nbytes = parse_size(size)
    wanted = _Attributes(block_size, advice, codec, checksum, address, core_dump)
    handle = _memory.Handle(nbytes, name or "region", True, host_only)
    _create(handle, FLAG_HOST_ONLY if host_only else 0, wanted)
    return _made(handle, name, None)


_MODES = {"read": FLAG_MAP_READ, "shared": FLAG_MAP_SHARED, "private": FLAG_MAP_PRIVATE}


def map(  # noqa: A001  (the name of the call in C)
    path: Union[str, bytes, int, "os.PathLike[Any]"],
    size: Union[int, str, None] = None,
    offset: int = 0,
    *,
    mode: str = "read",
    host_only: bool = False,
    name: Optional[str] = None,
    block_size: Union[int, str, None] = None,
    advice: Union[Advice, str, int, None] = None,
    codec: Optional[str] = None,
    checksum: Optional[bool] = None,
    address: Optional[int] = None,
    core_dump: Optional[bool] = None,
    lock: bool = True,
) -> Region:
    """Returns a region with the bytes of a file from `offset` (a multiple of 4096); without a size,
    up to the file's end.

    path: may be a descriptor, which is opened again with the access that the mode needs; the caller
    closes it. mode "read": the file is never written, and arrays are read-only. "shared": changes
    reach the file, which is locked unless lock is False. "private": changes stay in the region.
    Other arguments as for alloc().
    """
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} is not known; give read, shared or private")
    offset = parse_offset(offset)
    given = descriptor_of(path)
    if given is not None and given < 0:
        raise ValueError(f"{short(given)} is no file descriptor")
    fd = -1 if given is None else given
    where = path_bytes(path) if given is None else b"/proc/thread-self/fd/%d" % fd  # type: ignore[arg-type]
    if size is None:
        with open_at_once(os.fsdecode(where)) as file:
            kind = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISBLK(kind):
                raise Error(errno.EINVAL, f"{os.fsdecode(where)} is no regular file or block device")
            nbytes = file.seek(0, os.SEEK_END) - offset
        if nbytes <= 0:
            raise Error(errno.EINVAL, f"{os.fsdecode(where)} has no bytes from offset {offset}")
    else:
        nbytes = parse_size(size)
    flags = _MODES[mode] | (FLAG_HOST_ONLY if host_only else 0) | (0 if lock else FLAG_NO_LOCK)
    wanted = _Attributes(block_size, advice, codec, checksum, address, core_dump)
    identity = _identity(where)
    label = name or (f"fd {fd}" if fd >= 0 else os.path.basename(os.fsdecode(where)))
    handle = _memory.Handle(nbytes, label or "region", mode != "read", host_only)
    handle.file = identity and (identity.device, identity.inode)
    _create(handle, flags, wanted, None if fd >= 0 else where, offset, fd)
    again = None
    if mode == "read" and fd < 0 and identity is not None and identity == _identity(where):
        again = (os.path.abspath(where), nbytes, offset, host_only, name, wanted, identity)
    return _made(handle, label, again)


def map_open(
    file: Any, path: str, size: int, *, host_only: bool = False, block_size: Optional[int] = None
) -> Region:
    """map() for reading, for an open file; `path` is its name."""
    flags = FLAG_MAP_READ | (FLAG_HOST_ONLY if host_only else 0)
    wanted = _Attributes(block_size)
    label = os.path.basename(path)
    handle = _memory.Handle(size, label or "region", False, host_only)
    identity = _identity(file.fileno())
    handle.file = identity and (identity.device, identity.inode)
    _create(handle, flags, wanted, fd=file.fileno())
    return _made(handle, label, (os.path.abspath(path_bytes(path)), size, 0, host_only, None, wanted, identity))


def _map_again(
    path: bytes,
    size: int,
    offset: int,
    host_only: bool,
    name: Optional[str],
    wanted: _Attributes,
    identity: _Identity,
) -> Region:
    now = _identity(path)
    if now == identity:
        region = map(path, size, offset, host_only=host_only, name=name, **wanted._asdict())
        if region._again is not None and region._again[-1] == identity:
            return region
        region.free()
        now = _identity(path)
    raise Error(
        errno.ESTALE,
        f"{os.fsdecode(path)} is not what it was when it was mapped: it is {now or 'not there'}, and was {identity}; "
        "map it anew in this process",
    )


def _made(handle: _memory.Handle, name: Optional[str], again: Optional[Tuple[Any, ...]]) -> Region:
    if name:
        check(lib.vmem_name(handle.ptr, text_bytes(name)))
    return Region(handle, again)
