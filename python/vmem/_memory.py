# SPDX-License-Identifier: Apache-2.0
"""The lifetime of regions: a region's handle and its exports (arrays, tensors, buffers) keep it
alive.

A region is freed on request if it has no exports, or when the last Region, Array, Lease and foreign
array over it is gone. No region is freed while the interpreter ends: the program may still read
arrays then, and libvmem itself writes the changes of shared files at exit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from . import _dlpack
from ._lib import Error, Owner, ResidencyStruct, answer, check, descriptor_of, failure, lib

generation = 0  # forks between the first process and this one: tells which objects belong to this process


def _after_fork() -> None:
    global generation
    generation += 1
    _inherited.extend((handle.ptr, handle.size, handle.label) for handle in regions() if not handle.freed)
    live.clear()
    owned.clear()
    gone.clear()


os.register_at_fork(after_in_child=_after_fork)


def check_fork(made: int, what: str) -> None:
    """Called before an address of a region is returned: a forked child has nothing at its parent's
    addresses."""
    if made != generation:
        raise Error(
            errno.ECHILD,
            f"{what} is of the process that this one was forked from, and regions are not inherited. Make or map one "
            "here, or start this process with the spawn method",
        )


class Owned(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to an object that owns a resource of libvmem's, with the call that ends the
    resource and its other arguments."""

    __slots__ = ("call", "given")


# Owned resources, NULL until they are made. The code that removes an entry ends the resource: the
# object, or sweep() once the reference is in `gone`. Only C code puts it there, so no exception of
# a signal handler can interrupt, as it could a __del__.
live: "Set[weakref.ref[Handle]]" = set()
owned: Dict[Any, ctypes.c_void_p] = {}
gone: Set[Owned] = set()


def own(owner: Any, made: ctypes.c_void_p, call: Any, *given: Any) -> Owned:
    ref = Owned(owner, gone.add)
    ref.call, ref.given = call, given
    owned[ref] = made
    return ref


def end(said: List[int], ref: Owned, call: Any, *given: Any) -> None:
    """answer() and check() for the call that ends an owned resource. The entry leaves the table
    with the call and returns if the call fails. Ending twice does nothing."""
    made: Any = owned.get(ref)
    try:
        answer(said, call, filter(None, map(owned.pop, [ref], [None])), *given)
        check(said[0] if said else 0)
    finally:
        if said and said[0] != 0 and (said[0] != -errno.EIO or call is not lib.vmem_discard):
            owned[ref] = made


def drop(ref: Owned) -> Optional[Error]:
    """end() for a garbage object. On EBUSY sweep() tries again, because a lease in the same garbage
    ends soon. Another failure leaves the resource for good and is returned. A value that the call
    cannot take was refused when the resource was to be made, too: there is nothing to end."""
    try:
        end([], ref, ref.call, *ref.given)
    except Error as e:
        if e.errno != errno.EBUSY:
            owned.pop(ref, None)
            return e
    except ValueError:
        owned.pop(ref, None)
    return None


def sweep(regions: bool = True) -> None:
    """Ends the resources of objects whose __del__ was interrupted, regions last. Releasing a lease
    skips regions: freeing a shared one takes a second while a page of it is pinned."""
    if regions:
        _dlpack.sweep()
    for ref in sorted(() if sys.is_finalizing() else gone, key=lambda ref: ref.call is lib.vmem_free):
        if ref in owned and (regions or ref.call is not lib.vmem_free):
            drop(ref)
        if ref not in owned:
            gone.discard(ref)


class Handle(Owner):
    """One region of libvmem. The object exists before the region, whose address vmem_create stores
    in `made`, and frees the region with itself: a signal's exception may come as soon as that call
    has returned."""

    freed = True  # for an incomplete object: __del__ has nothing to do

    def __init__(self, size: int, label: str, writable: bool, host_only: bool) -> None:
        self.made = ctypes.c_void_p()
        self.ptr = 0
        self.size = size
        self.label = label
        self.writable = writable
        self.host_only = host_only
        self.file: Optional[Tuple[int, int]] = None  # device and inode of the mapped file
        # Live exports. Their callback is C code, as that of `gone`: Python code there would take the
        # exception of a signal handler, and lose it. A WeakSet has such code.
        self.exports: "Dict[weakref.ref[Export], None]" = {}
        self.listed = weakref.ref(self, live.discard)
        hash(self.listed)  # the reference keeps the value, which discard() needs when this object has gone
        self.lock = threading.RLock()  # between exports and free; reentrant, for a garbage collection under it
        self.backend: Optional[int] = None  # the backend of its device tier, after the first query
        self._block = 0  # likewise
        self._generation = generation
        self.owned = own(self, self.made, lib.vmem_free)
        self.freed = False

    def begin(self) -> None:
        """Called once the region has been made."""
        assert self.made.value is not None
        self.ptr = self.made.value
        live.add(self.listed)

    @property
    def block(self) -> int:
        """The unit of movement in bytes."""
        if self._block == 0:
            out = ResidencyStruct()
            out.size = ctypes.sizeof(out)
            check(lib.vmem_query(self.ptr, 1, ctypes.byref(out)))
            self._block = out.block_size
        return self._block

    def export(self) -> "Export":
        check_fork(self._generation, self.label)
        with self.lock:
            if self.freed:
                raise Error(errno.EINVAL, f"{self.label} has been freed")
            made = Export(self)
            self.exports[weakref.ref(made, self.exports.pop)] = None
            return made

    def free(self, discard: bool = False) -> None:
        """Calls vmem_free or vmem_discard, unless exports of the region exist. Freeing twice does
        nothing."""
        check_fork(self._generation, self.label)  # another thread of the parent may hold the lock
        sweep()
        begun, said = False, []  # type: bool, List[int]
        try:
            with self.lock:
                if self.freed:
                    return
                over = len(self.exports)
                if over:
                    raise Error(
                        errno.EBUSY,
                        f"{self.label} has {over} arrays, tensors or leases over it; let go of them first (or leave it "
                        "to the last of them to free it)",
                    )
                self.freed = begun = True
            live.discard(self.listed)  # before the call: another region may get the address right after it
            end(said, self.owned, lib.vmem_discard if discard else lib.vmem_free)
        except BaseException as e:  # including a signal's, before the call or in it
            gone = said == [0] or (discard and said == [-errno.EIO])
            if begun and not gone:
                self.freed = False
                live.add(self.listed)
            if said and said[0] != 0 and not isinstance(e, Error):
                raise e from failure(said[0])  # reported once
            raise

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.freed or finalizing():
            return
        self.freed = True
        failed = drop(self.owned)
        if failed is not None and failed.errno != errno.ECHILD:  # Python prints it
            raise Error(failed.errno, f"{self.label}, freed as garbage: {failed.strerror}")


class Export(Owner):
    """An object that uses a region's memory during its life."""

    __slots__ = ("handle", "__weakref__")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle


_inherited: List[Tuple[int, int, str]] = []  # address, bytes and label of the parents' regions


def regions() -> List[Handle]:
    """Returns the live handles."""
    found = [ref() for ref in live.copy()]  # at once: other threads add and remove some
    return [handle for handle in found if handle is not None]


def find(ptr: int) -> Optional[Handle]:
    """Returns the region that contains an address. ECHILD: the region is a parent process's."""
    for handle in regions():
        if handle.ptr <= ptr < handle.ptr + handle.size and not handle.freed:
            return handle
    for start, size, label in _inherited:
        if start <= ptr < start + size:
            check_fork(-1, label)
    return None


def ranges() -> List[Tuple[int, int]]:
    """Returns begin and end addresses of all regions in order, including the parents': libvmem's
    calls report those."""
    mine = [(handle.ptr, handle.ptr + handle.size) for handle in regions() if not handle.freed]
    return sorted(mine + [(start, start + size) for start, size, _ in _inherited])


def check_unmapped(file: Any) -> None:
    """Raises EBUSY if a region maps this file (a path, a descriptor or a file object), which must
    not change under it."""
    try:
        fd = descriptor_of(file)
        named = isinstance(file, (str, bytes, os.PathLike))
        found = os.stat(file if named else file.fileno() if fd is None else fd)
    except (OSError, ValueError, TypeError, AttributeError):  # no file, or not the kernel's
        return
    name = os.fsdecode(file) if named else "the file"
    for handle in regions():
        if handle.file == (found.st_dev, found.st_ino) and stat.S_ISREG(found.st_mode) and not handle.freed:
            raise Error(
                errno.EBUSY,
                f"{name} is mapped by {handle.label}, and would change while it is read; write another file, and "
                "rename that",
            )


def buffer(export: Export, ptr: int, nbytes: int) -> Any:
    """Returns a writable ctypes array of bytes that keeps the export; memoryview() and
    torch.frombuffer() take it."""
    made: Any = (ctypes.c_ubyte * nbytes).from_address(ptr)
    made.vmem_export = export
    return made


def shutdown() -> None:
    """Stops libvmem's threads and returns its memory; the next call starts it again. Refused while
    regions made from Python are alive, because their arrays would lose their memory. Regions made
    by C or C++ code are freed."""
    sweep()
    left = [h.label for h in regions() if not h.freed]
    if left:
        raise Error(
            errno.EBUSY,
            f"{len(left)} regions are alive ({', '.join(left[:4])}{', ..' if len(left) > 4 else ''}); free them first",
        )
    for ref in list(gone):
        owned.pop(ref, None)  # shutdown frees them, too
    lib.vmem_shutdown()


def library_version() -> Tuple[int, int]:
    """Returns major and minor version of the running library, which may be later than this
    package."""
    return divmod(lib.vmem_version(), 1000)


def init() -> None:
    """Starts libvmem; optional. Its errors name a bad environment variable, or a feature that the
    kernel lacks."""
    check(lib.vmem_init())
