# SPDX-License-Identifier: Apache-2.0
"""Lifetime of regions: a region's handle and its exports (arrays, tensors, buffers) keep it alive.

A region is freed by a request when no export of it is left, or when the last Region, Array, Lease and foreign array
over it is gone. No region is freed while the interpreter ends: the program may still read arrays then, and libvmem
itself writes the changes of shared files at exit.
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
from ._lib import Error, Owner, ResidencyStruct, answer, check, failure, lib

generation = 0  # forks between the first process and this one: what an object has that is this process's own


def _after_fork() -> None:
    global generation
    generation += 1
    _inherited.extend((handle.ptr, handle.size, handle.label) for handle in regions() if not handle.freed)
    live.clear()
    owned.clear()
    gone.clear()


os.register_at_fork(after_in_child=_after_fork)


def check_fork(made: int, what: str) -> None:
    """Before an address of a region is handed out: a forked child has nothing at those of its parent."""
    if made != generation:
        raise Error(
            errno.ECHILD,
            f"{what} is of the process that this one was forked from, and regions are not inherited. Make or map one "
            "here, or start this process with the spawn method",
        )


class Owned(weakref.ref):  # type: ignore[type-arg]
    """To an object that owns something of libvmem's, with the call that ends it and what that is given beside it."""

    __slots__ = ("call", "given")


# What is owned: NULL until it is made. Who gets it out of here ends it: the object, or sweep() once the object is in
# `gone`. C code alone puts it there, so no exception of a signal's handler comes between, as it may in a __del__.
owned: Dict[Any, ctypes.c_void_p] = {}
gone: Set[Owned] = set()


def own(owner: Any, made: ctypes.c_void_p, call: Any, *given: Any) -> Owned:
    ref = Owned(owner, gone.add)
    ref.call, ref.given = call, given
    owned[ref] = made
    return ref


def end(said: List[int], ref: Owned, call: Any, *given: Any) -> None:
    """answer() and check() of the call that ends what is owned, which leaves the table with the call, and comes back
    where that fails. Ending twice does nothing."""
    made: Any = owned.get(ref)
    try:
        answer(said, call, filter(None, map(owned.pop, [ref], [None])), *given)
        check(said[0] if said else 0)
    finally:
        if said and said[0] != 0 and (said[0] != -errno.EIO or call is not lib.vmem_discard):
            owned[ref] = made


def drop(ref: Owned) -> Optional[Error]:
    """end() for an object that is garbage. EBUSY: sweep() tries again, as a lease in the same garbage ends in a
    moment; what fails otherwise stays for good, and is returned."""
    try:
        end([], ref, ref.call, *ref.given)
    except Error as e:
        if e.errno != errno.EBUSY:
            owned.pop(ref, None)
            return e
    return None


def sweep(regions: bool = True) -> None:
    """Ends what objects have left whose __del__ was interrupted; regions last. A lease leaves regions alone: to free a
    shared one takes a second while a page of it is pinned."""
    for ref in sorted(() if sys.is_finalizing() else gone, key=lambda ref: ref.call is lib.vmem_free):
        if ref in owned and (regions or ref.call is not lib.vmem_free):
            drop(ref)
        if ref not in owned:
            gone.discard(ref)


class Handle(Owner):
    """One region of libvmem. It is there before the region, whose address vmem_create puts into `made`, and frees it
    with itself: an exception of a signal may come as soon as that call has returned."""

    freed = True  # of one that is not complete: __del__ has nothing to do

    def __init__(self, size: int, label: str, writable: bool, host_only: bool) -> None:
        self.made = ctypes.c_void_p()
        self.ptr = 0
        self.size = size
        self.label = label
        self.writable = writable
        self.host_only = host_only
        self.file: Optional[Tuple[int, int]] = None  # that it maps: device and inode
        self.exports: "weakref.WeakSet[Export]" = weakref.WeakSet()
        self.lock = threading.RLock()  # exports against free; reentrant, for a garbage collection inside it
        self.backend: Optional[int] = None  # the backend of its device tier, after the first query
        self._block = 0  # likewise
        self._generation = generation
        self.owned = own(self, self.made, lib.vmem_free)
        self.freed = False

    def begin(self) -> None:
        """The region has been made."""
        assert self.made.value is not None
        self.ptr = self.made.value
        live[self.ptr] = self

    @property
    def block(self) -> int:
        """Bytes: what moves as one."""
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
            self.exports.add(made)
            return made

    def free(self, discard: bool = False) -> None:
        """vmem_free, or vmem_discard, unless something is left over the region. A region that was freed stays freed."""
        check_fork(self._generation, self.label)  # another thread of the parent may have the lock
        _dlpack.sweep()
        sweep()
        begun, said = False, []  # type: bool, List[int]
        try:
            with self.lock:
                if self.freed:
                    return
                over = sum(1 for _ in self.exports)  # len() counts those whose end an interrupt kept from being noted
                if over:
                    raise Error(
                        errno.EBUSY,
                        f"{self.label} has {over} arrays, tensors or leases over it; let go of them first (or leave it "
                        "to the last of them to free it)",
                    )
                self.freed = begun = True
            live.pop(self.ptr, None)  # before: the address may be another region's a moment later
            end(said, self.owned, lib.vmem_discard if discard else lib.vmem_free)
        except BaseException as e:  # a signal's, too: before the call, in it
            gone = said == [0] or (discard and said == [-errno.EIO])
            if begun and not gone:
                self.freed = False
                live[self.ptr] = self
            if said and said[0] != 0 and not isinstance(e, Error):
                raise e from failure(said[0])  # it is told once
            raise

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.freed or finalizing():
            return
        self.freed = True
        failed = drop(self.owned)
        if failed is not None and failed.errno != errno.ECHILD:  # Python prints it
            raise Error(failed.errno, f"{self.label}, freed as garbage: {failed.strerror}")


class Export(Owner):
    """Something that uses a region's memory, for as long as this object lives."""

    __slots__ = ("handle", "__weakref__")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle


live: "weakref.WeakValueDictionary[int, Handle]" = weakref.WeakValueDictionary()
_inherited: List[Tuple[int, int, str]] = []  # address, bytes and label of the parents' regions; nothing else gets there


def regions() -> List[Handle]:
    """Those that are alive. Other threads make and free some meanwhile: live.values() would raise for that."""
    found = [ref() for ref in live.valuerefs()]
    return [handle for handle in found if handle is not None]


def find(ptr: int) -> Optional[Handle]:
    """The region that holds an address. ECHILD: it is one of a process that this one was forked from."""
    for handle in regions():
        if handle.ptr <= ptr < handle.ptr + handle.size and not handle.freed:
            return handle
    for start, size, label in _inherited:
        if start <= ptr < start + size:
            check_fork(-1, label)
    return None


def ranges() -> List[Tuple[int, int]]:
    """Addresses and ends of all regions in order, also of the parents': of those, libvmem's calls tell."""
    mine = [(handle.ptr, handle.ptr + handle.size) for handle in regions() if not handle.freed]
    return sorted(mine + [(start, start + size) for start, size, _ in _inherited])


def check_unmapped(file: Any) -> None:
    """EBUSY: a region maps this file (a path, a descriptor or a file object), which is not to change under it."""
    try:
        named = isinstance(file, (str, bytes, os.PathLike, int))
        found = os.stat(file if named else file.fileno())
    except (OSError, ValueError, TypeError, AttributeError):  # no file, or none of the kernel's
        return
    name = os.fsdecode(file) if named and not isinstance(file, int) else "the file"
    for handle in regions():
        if handle.file == (found.st_dev, found.st_ino) and stat.S_ISREG(found.st_mode) and not handle.freed:
            raise Error(
                errno.EBUSY,
                f"{name} is mapped by {handle.label}, and would change while it is read; write another file, and "
                "rename that",
            )


def buffer(export: Export, ptr: int, nbytes: int) -> Any:
    """A writable ctypes array of bytes that keeps the export; memoryview() and torch.frombuffer() take it."""
    made: Any = (ctypes.c_ubyte * nbytes).from_address(ptr)
    made.vmem_export = export
    return made


def shutdown() -> None:
    """Stops libvmem's threads and gives its memory back; the next call starts it again. Refused while regions made
    from Python are alive: their arrays would lose their memory. Regions that C or C++ code made are freed."""
    _dlpack.sweep()
    sweep()
    left = [h.label for h in regions() if not h.freed]
    if left:
        raise Error(
            errno.EBUSY,
            f"{len(left)} regions are alive ({', '.join(left[:4])}{', ..' if len(left) > 4 else ''}); free them first",
        )
    for ref in list(gone):
        owned.pop(ref, None)  # it frees them, too
    lib.vmem_shutdown()


def library_version() -> Tuple[int, int]:
    """Major and minor of the library that runs, which may be later than this package."""
    return divmod(lib.vmem_version(), 1000)


def init() -> None:
    """Starts libvmem; optional. Its errors name a bad environment variable, or what the kernel lacks."""
    check(lib.vmem_init())
