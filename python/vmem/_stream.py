# SPDX-License-Identifier: Apache-2.0
"""Transfers all bytes of a view from or to a binary file object, in whatever portions it accepts.

Without data, a raw file on a non-blocking descriptor answers None and a buffered one raises
BlockingIOError. This module waits in both cases; Ctrl-C ends the wait.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from typing import Any, ContextManager, Optional, Union

from ._lib import descriptor_of, short


def opened(file: Any, mode: str) -> Optional[ContextManager[Any]]:
    """Opens a path, or wraps a descriptor, which stays open. Returns None if it is already a file
    object."""
    fd = descriptor_of(file)
    if fd is not None:
        return open(fd, mode, buffering=0, closefd=False)
    if isinstance(file, (str, bytes, os.PathLike)):
        return open(file, mode, buffering=0)
    if not callable(getattr(file, "readinto" if mode == "rb" else "write", None)):
        raise TypeError(f"{short(file)} is neither a path, nor a descriptor, nor a binary file object")
    return None


def _wait(file: Any, event: int) -> None:
    try:
        fd = file.fileno()
    except (AttributeError, OSError):
        fd = -1
    # For objects that are not from io, None may mean anything; a regular file never blocks.
    if fd < 0 or not isinstance(file, io.IOBase) or stat.S_ISREG(os.fstat(fd).st_mode):
        raise BlockingIOError(errno.EAGAIN, f"{short(file)} takes or gives nothing now, and cannot be waited for")
    poll = select.poll()
    poll.register(fd, event)
    poll.poll()


def _count(file: Any, n: Any, most: int) -> int:
    if not isinstance(n, int) or not 0 <= n <= most:
        raise OSError(errno.EIO, f"{short(file)} says {short(n)} bytes of {most} at most")
    return n


def fill(view: memoryview, file: Any) -> int:
    """Reads until the view is full. Returns fewer bytes only at the end of the file."""
    at = 0
    while at < len(view):
        try:
            n = file.readinto(view[at:])
        except BlockingIOError:
            n = None
        if n is None:
            _wait(file, select.POLLIN)
        elif _count(file, n, len(view) - at) == 0:
            break
        else:
            at += n
    return at


def drain(view: memoryview, file: Any) -> None:
    """Writes all bytes of the view."""
    at = 0
    while at < len(view):
        n: Union[int, None]
        try:
            n = file.write(view[at:])
        except BlockingIOError as e:
            at += _count(file, getattr(e, "characters_written", 0), len(view) - at)
            n = None
        if n is None:
            _wait(file, select.POLLOUT)
        elif _count(file, n, len(view) - at) == 0:
            raise OSError(errno.EIO, f"{short(file)} takes no bytes; {at} of {len(view)} were written")
        else:
            at += n


def flush(file: Any) -> None:
    """Writes the bytes that a buffered writer still holds: its descriptor may refuse them at
    close."""
    while isinstance(file, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
        try:
            file.flush()
            return
        except BlockingIOError:
            _wait(file, select.POLLOUT)
