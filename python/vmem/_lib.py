# SPDX-License-Identifier: Apache-2.0
"""Finds libvmem.so, declares its calls and structs, and turns its failures into exceptions."""

from __future__ import annotations

import collections.abc
import contextlib
import ctypes
import errno
import io
import operator
import os
import re
import stat
import sys
import unicodedata
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

SONAME = "libvmem-tier.so.1"

_HERE = os.path.dirname(os.path.abspath(__file__))

HOST = -1  #: location: host memory
SSD = -2  #: location: the SSD
READ = 1  #: access of a lease
WRITE = 2  #: access of a lease
BACKEND_MANAGED = 1  #: device_stats().backend: unified memory
BACKEND_HANDLES = 2  #: device_stats().backend: physical handles

BLOCK_AUTO = 1
FLAG_HOST_ONLY = 0x1
FLAG_MAP_READ = 0x10
FLAG_MAP_SHARED = 0x20
FLAG_MAP_PRIVATE = 0x40
FLAG_NO_LOCK = 0x100


def printable(text: str) -> str:
    """Sanitizes text as libvmem's own messages are: characters that would steer a terminal
    (controls, direction marks, invisible ones) and bytes that are not text become question marks.
    The joiners that scripts need stay."""
    if text.isprintable():
        return text
    steers = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join("?" if unicodedata.category(c) in steers and c not in "\u200c\u200d" else c for c in text)


class Error(OSError):
    """A failed call. ``errno`` is libvmem's code, ``strerror`` its message, with what was wrong and
    the numbers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(a) if isinstance(a, str) else a for a in args))


class FormatError(Error, ValueError):
    """A file that violates its format; the message names file, tensor and numbers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args if len(args) > 1 else (errno.EINVAL, *args)))  # two arguments when it is unpickled


class _Struct(ctypes.Structure):
    """A struct of libvmem's. ctypes silently truncates numbers that do not fit a field; this class
    refuses them."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, int) and (getattr(self, name) or 0) != value:
            raise ValueError(f"{name} {short(value)} is beyond what libvmem takes")


class RangeStruct(_Struct):
    _fields_ = [
        ("ptr", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("access", ctypes.c_uint),
        ("reserved", ctypes.c_uint),
    ]


class RegionAttrStruct(_Struct):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("block_size", ctypes.c_size_t),
        ("offset", ctypes.c_uint64),
        ("path", ctypes.c_char_p),
        ("codec", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("fd", ctypes.c_int),
        ("advice", ctypes.c_int),
        ("checksum", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
        ("core_dump", ctypes.c_int),
    ]


class KernelViewStruct(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _words(name: str, fields: str) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [(f, ctypes.c_uint64) for f in fields.split()]})


ResidencyStruct = _words("ResidencyStruct", "size zero_bytes ssd_bytes host_bytes device_bytes block_size")
StatsStruct = _words(
    "StatsStruct",
    "size faults fault_ns_total fault_ns_max read_bytes write_bytes host_bytes device_bytes ssd_bytes evictions"
    " clean_drops prefetched_blocks prefetch_hits host_to_device_bytes device_to_host_bytes io_errors checksum_errors"
    " regions soft_faults prefetch_wasted host_budget copied_bytes lost_blocks unknown_blocks"
    " fault_around_blocks dirty_bytes background_write_bytes",
)
DeviceStatsStruct = _words(
    "DeviceStatsStruct",
    "size budget used_bytes leased_bytes in_bytes out_bytes evictions clean_drops driver_host_bytes backend"
    " guest_bytes to_peers from_peers",
)


def _has_more_rights() -> bool:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(getauxval(23))  # AT_SECURE


def _candidates() -> List[str]:
    """Returns the paths at which the library is searched, in order. A path from the environment is
    the only one. A program that runs with more rights than the user who started it (AT_SECURE)
    ignores the environment."""
    given = os.environ.get("VMEM_LIBRARY")
    if given and not _has_more_rights():
        return [given]
    # Not libvmem.so from the system, which may be another project's: docs/decisions/0001-soname.md.
    return [os.path.join(_HERE, SONAME), SONAME]


def _open() -> ctypes.CDLL:
    tried = []
    for path in _candidates():
        if os.sep in path and not os.path.exists(path):
            tried.append(f"{path}: no such file")
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            tried.append(f"{path}: {e}")
            continue
        if hasattr(library, "vmem_flush_on"):
            return library
        tried.append(f"{path}: is not libvmem, or too old a one (it has no vmem_flush_on)")
    raise ImportError(
        "libvmem was not found. Tried "
        + printable("; ".join(tried))
        + ". Set VMEM_LIBRARY to the path of "
        + SONAME
        + "."
    )


def _checked(function: Any, limits: List[Tuple[int, int]], numbers: List[bool]) -> Any:
    """Wraps the call so that it accepts whole numbers of any type (NumPy's, too) for its numbers,
    and refuses those that ctypes would truncate."""

    def call(*given: Any) -> Any:
        values = [operator.index(value) if number else value for value, number in zip(given, numbers)]
        for value, (low, high) in zip(values, limits):
            if isinstance(value, int) and not low <= value <= high:
                raise ValueError(f"{short(value)} is not from {low} to {high}")
        return function(*values)

    made: Any = call
    made.function, made.limits = function, limits
    return made


def _declare(library: ctypes.CDLL) -> None:
    void, size, text, whole, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint
    pointer, ranges = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(RangeStruct)
    limits = {whole: (-(1 << 31), (1 << 31) - 1), flags: (0, (1 << 32) - 1)}
    calls = {
        "vmem_version": [],
        "vmem_init": [],
        "vmem_set": [text, text],
        "vmem_get": [text, void, size],
        "vmem_create": [pointer, size, ctypes.POINTER(RegionAttrStruct)],
        "vmem_free": [void],
        "vmem_discard": [void],
        "vmem_name": [void, text],
        "vmem_prefetch": [void, size, whole, void],
        "vmem_advise": [void, size, whole, whole],
        "vmem_lease": [pointer, ranges, size, whole, void],
        "vmem_lease_async": [pointer, ranges, size, whole, void, void, void],
        "vmem_lease_poll": [void],
        "vmem_lease_fd": [void],
        "vmem_lease_end": [void, void],
        "vmem_acquire_ranges": [ranges, size, whole, void],
        "vmem_release_ranges": [ranges, size, void],
        "vmem_kernel_begin": [
            pointer, void, size, flags, whole, size, ctypes.POINTER(KernelViewStruct)
        ],
        "vmem_kernel_end": [void, void],
        "vmem_export": [void, size, flags, ctypes.POINTER(ctypes.c_int)],
        "vmem_evict": [void, size, whole],
        "vmem_sync": [void, size],
        "vmem_flush": [],
        "vmem_flush_on": [ctypes.POINTER(whole), size],
        "vmem_query": [void, size, ctypes.POINTER(ResidencyStruct)],
        "vmem_stats": [ctypes.POINTER(StatsStruct)],
        "vmem_device_stats": [whole, ctypes.POINTER(DeviceStatsStruct)],
    }
    for name, arguments in calls.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
        within = [limits.get(kind, (0, (1 << 64) - 1)) for kind in arguments]
        setattr(library, name, _checked(function, within, [kind in (whole, flags, size) for kind in arguments]))
    library.vmem_shutdown.argtypes, library.vmem_shutdown.restype = [], None
    library.vmem_log.argtypes, library.vmem_log.restype = [LOG_CALLBACK, ctypes.c_void_p], None
    library.vmem_last_error.argtypes, library.vmem_last_error.restype = [], text
    library.vmem_strerror.argtypes, library.vmem_strerror.restype = [ctypes.c_int], text


if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
    raise ImportError("libvmem runs on 64-bit Linux")
lib = _open()
_declare(lib)


# The folders of the pages that libvmem's messages name: this package's, or those of the working
# tree it is imported from.
_PAGES = (os.path.join(_HERE, "docs"), os.path.join(os.path.dirname(os.path.dirname(_HERE)), "docs"))


def with_pages(words: str) -> str:
    """Replaces the pages that a message names ("docs/settings.md") by their paths here, or, if this
    installation lacks the page, by the manual page of the settings."""

    def path(found: "re.Match[str]") -> str:
        for folder in _PAGES:
            if os.path.exists(os.path.join(folder, found[1])):
                return os.path.join(folder, found[1])
        return "vmem-settings(7)" if found[1] == "settings.md" else found[0]

    return re.sub(r"(?<![\w/])docs/([a-z-]+\.md)", path, words)


def failure(rc: int, prefix: str = "") -> Error:
    """The exception for a call of this thread that returned rc; call it before the thread's next libvmem call."""
    words = lib.vmem_last_error() or lib.vmem_strerror(rc)
    return Error(-rc, prefix + with_pages(words.decode("utf-8", "replace")))


def check(rc: int) -> None:
    if rc != 0:
        raise failure(rc)


def answer(said: List[int], call: Any, *given: Any) -> None:
    """Makes a call of lib's and stores its answer in `said`. If this raises and `said` is empty,
    there was no answer.

    A signal that arrives during a call (Ctrl-C in one that waits) runs its handler after the call
    returns. If the handler raises, an ordinary call loses its answer. No handler can run between
    map() and the list, nor in a filter() passed as a value. Such a filter is asked for the value;
    if it has none, the call is not made.
    """
    for value, (low, high) in zip(given, call.limits):
        if isinstance(value, int) and not low <= value <= high:
            raise ValueError(f"{short(value)} is not from {low} to {high}")
    said.extend(map(call.function, *(value if isinstance(value, filter) else [value] for value in given)))


def stream_handle(stream: Any) -> int:
    """Returns a cudaStream_t as a number, from None (the default stream), an int, a torch stream,
    or an object with __cuda_stream__."""
    if stream is None:
        return 0
    number = None
    if hasattr(stream, "__index__"):
        number = operator.index(stream)
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        handle = getattr(stream, name, None)
        if number is None and isinstance(handle, int):
            number = handle
    if number is None and hasattr(stream, "__cuda_stream__"):
        number = int(stream.__cuda_stream__()[1])
    if number is None:
        raise TypeError(
            f"{type(stream).__name__} is no stream; give None, a cudaStream_t as int, or a torch.cuda.Stream"
        )
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{short(number)} is no stream: a cudaStream_t is from 0 to {(1 << 64) - 1}")
    return number


def text_bytes(text: str) -> bytes:
    """Returns the bytes of a name or value. Refuses a NUL, at which C would stop. Bytes of a path
    that are not text stay."""
    if not isinstance(text, str):
        raise TypeError(f"expected a str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{short(text)} holds a NUL character")
    return text.encode("utf-8", "surrogateescape")


def path_bytes(path: Union[str, bytes, "os.PathLike[Any]"]) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("the path holds a NUL character")
    return name


def open_at_once(path: str) -> io.FileIO:
    """Opens a file for reading without waiting for a pipe or device. If a signal handler raises, the
    descriptor is closed: no handler can run inside update() and FileIO() (see answer()), so one of
    `held` and the file always owns it."""
    held: Dict[str, int] = {}
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        held.update(zip([path], map(os.open, [path], [flags])))
        return io.FileIO(path, opener=held.pop)  # type: ignore[arg-type]  # called with the path and flags
    finally:
        for fd in held.values():
            os.close(fd)


def open_regular(path: str) -> Tuple[io.FileIO, int]:
    """Opens a file for reading and returns its size. Anything other than a file (a pipe, a device)
    is refused rather than waited for."""
    file = open_at_once(path)
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode):
        return file, found.st_size
    file.close()
    raise FormatError(f"{path}: is no regular file")


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


MAX_DIMENSIONS = 64  # the limit of numpy and torch
LARGEST = (1 << 63) - 1  # of a size or an offset in bytes: C would take a larger one for another number


class Owner:
    """An object that ends a resource of libvmem's. It cannot be copied: a copy would end the
    resource a second time, or at the same time."""

    __slots__ = ()

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError(f"a vmem.{type(self).__name__} cannot be copied or pickled: one object ends it")


def descriptor_of(file: Any) -> Optional[int]:
    """Returns a file descriptor, which is any whole number except a bool, or None for anything else:
    a path, a file object."""
    if isinstance(file, (bool, str, bytes, os.PathLike)) or not hasattr(file, "__index__"):
        return None
    return operator.index(file)


def parse_shape(shape: Any) -> Tuple[int, ...]:
    """The sizes of an array, from a whole number or a sequence of them."""
    if hasattr(shape, "__index__") and not getattr(shape, "shape", ()):  # not a NumPy array of sizes
        return (operator.index(shape),)
    if not isinstance(shape, (str, bytes, bytearray, collections.abc.Mapping, collections.abc.Set)):
        with contextlib.suppress(TypeError):
            return tuple(operator.index(n) for n in shape)
    raise TypeError(f"shape {short(shape)} is neither a whole number nor a sequence of them")


def parse_offset(offset: Any) -> int:
    """Bytes from the start of a file: a whole number."""
    number = operator.index(offset)
    if not 0 <= number <= LARGEST:
        raise ValueError(f"offset {short(number)} is {'negative' if number < 0 else f'above {LARGEST}'}")
    return number


def short(value: Any) -> str:
    """repr() for messages, shortened: text from a file may be long."""
    if isinstance(value, int) and abs(value) >> 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def product(sizes: Sequence[int], itemsize: int, most: int) -> Optional[int]:
    """Returns the bytes of this many elements, or None if above `most`, without computing a larger
    number on the way."""
    if any(n > most for n in sizes):
        return None
    if 0 in sizes:
        return 0
    nbytes = itemsize
    for n in sizes:
        nbytes *= n
        if nbytes > most:
            return None
    return nbytes


def parse_size(size: Union[int, str]) -> int:
    """Bytes: a whole number, or text such as "512MiB", "8G" or "1.5GiB" (powers of 1024, as libvmem's settings)."""
    if hasattr(size, "__index__") and not isinstance(size, bool):
        number: Optional[int] = operator.index(size)
    else:
        found = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([kmgt]?)(?:i?b)?\s*", str(size), re.IGNORECASE)
        whole = found is not None and ("." not in found[1] or found[2] != "")  # no fractions of a byte
        number = int(float(found[1]) * _UNITS[found[2].lower()]) if found is not None and whole else None
    if number is None or number <= 0:
        raise ValueError(f"{short(size)} is not a size; give bytes, or text such as 512MiB or 8G")
    if number > LARGEST:
        raise ValueError(f"size {short(size)} is above {LARGEST} bytes")
    return number


def human_bytes(size: Union[int, float]) -> str:
    """Formats a size for readers: "1.5 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{int(size)} bytes"


def struct_values(struct: Any) -> Tuple[int, ...]:
    """The fields after `size`, in order."""
    return tuple(getattr(struct, name) for name, _ in struct._fields_[1:])
