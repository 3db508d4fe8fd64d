# SPDX-License-Identifier: Apache-2.0
"""Who keeps a region alive: its handle, and the exports (arrays, tensors, buffers) that hold on to it.

A region is freed when it is told to and nothing is left over it, or when the last of Region, Array, Lease and foreign
array over it is gone. Nothing is freed while the interpreter ends: arrays may still be looked at then, and libvmem
itself writes what shared files need at exit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
import weakref
from typing import Any, Callable, List, Optional, Tuple

from . import _dlpack
from ._lib import Error, Owner, ResidencyStruct, answer, check, failure, lib

generation = 0  # forks between the first process and this one: what an object has that is this process's own


def _after_fork() -> None:
    global generation
    generation += 1
    _inherited.extend((handle.ptr, handle.size, handle.label) for handle in regions() if not handle.freed)
    live.clear()
    _orphans.clear()


os.register_at_fork(after_in_child=_after_fork)


def check_fork(made: int, what: str) -> None:
    """Before an address of a region is handed out: a forked child has nothing at those of its parent."""
    if made != generation:
        raise Error(
            errno.ECHILD,
            f"{what} is of the process that this one was forked from, and regions are not inherited. Make or map one "
            "here, or start this process with the spawn method",
        )


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
        self.backend: Optional[int] = None  # what its device tier stands on, once somebody has asked
        self._block = 0  # likewise
        self._generation = generation
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
            answer(said, lib.vmem_discard if discard else lib.vmem_free, self.ptr)
            check(said[0])
        except BaseException as e:  # a signal's, too: before the call, in it
            gone = said == [0] or (discard and said == [-errno.EIO])
            if begun and not gone:
                self.freed = False
                live[self.ptr] = self
            if said and said[0] != 0 and not isinstance(e, Error):
                raise e from failure(said[0])  # it is told once
            raise

    def __del__(
        self,
        finalizing: Callable[[], bool] = sys.is_finalizing,
        vmem_free: Any = lib.vmem_free,
    ) -> None:
        if self.freed or not self.made or finalizing() or self._generation != generation:
            return
        self.freed = True
        rc = vmem_free(self.made)
        if rc == -errno.EBUSY:  # garbage of one cycle: the lease in it ends in a moment
            _orphans.append(self.made.value or 0)
        elif rc not in (0, -errno.ECHILD):
            raise failure(rc, f"{self.label}, freed as garbage: ")  # Python prints it


class Export(Owner):
    """Something that uses a region's memory, for as long as this object lives."""

    __slots__ = ("handle", "__weakref__")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle


live: "weakref.WeakValueDictionary[int, Handle]" = weakref.WeakValueDictionary()
_orphans: List[int] = []
_inherited: List[Tuple[int, int, str]] = []  # address, bytes and label of the parents' regions; nothing else gets there


def free_orphans() -> None:
    for _ in range(len(_orphans)):
        try:
            ptr = _orphans.pop()
        except IndexError:
            return
        said: List[int] = []
        try:
            answer(said, lib.vmem_free, ptr)
        finally:
            if said in ([], [-errno.EBUSY]):
                _orphans.append(ptr)


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
    left = [h.label for h in regions() if not h.freed]
    if left:
        raise Error(
            errno.EBUSY,
            f"{len(left)} regions are alive ({', '.join(left[:4])}{', ..' if len(left) > 4 else ''}); free them first",
        )
    lib.vmem_shutdown()


def library_version() -> Tuple[int, int]:
    """Major and minor of the library that runs, which may be later than this package."""
    return divmod(lib.vmem_version(), 1000)


def init() -> None:
    """Starts libvmem; optional. Its errors name a bad environment variable, or what the kernel lacks."""
    check(lib.vmem_init())
