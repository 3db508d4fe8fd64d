# SPDX-License-Identifier: Apache-2.0
"""Replaces files as a whole: writes beside the old file, makes the new one durable, renames it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import IO, Any, Callable, Iterator, List, Optional

from ._lib import Error


def _as_before(fd: int, before: os.stat_result) -> None:
    """Gives the new file the permissions of the old one, and its owner if this process may."""
    for user, group in ((before.st_uid, -1), (-1, before.st_gid)):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, user, group)
    os.fchmod(fd, before.st_mode & 0o777)


def _sync_folder(folder: str) -> None:
    held: List[int] = []
    try:
        # No signal handler can run inside extend(), and lose the descriptor: see answer().
        held.extend(map(os.open, [folder], [os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC]))
        os.fsync(held[0])
    except OSError as e:
        allowed = (errno.EINVAL, errno.ENOTSUP) if held else (errno.EACCES, errno.EPERM)
        if e.errno not in allowed:  # the file system cannot fsync folders; the folder allows no reading
            raise
    finally:
        for fd in held:
            os.close(fd)


@contextlib.contextmanager
def replaced(path: Any, check: Optional[Callable[[str], None]] = None) -> Iterator[IO[bytes]]:
    """Yields a new file that replaces `path` at the end of the block, once check(its name) has
    passed. If either raises, the old file is unchanged and nothing is left beside it. A symbolic
    link stays: the file that it leads to is replaced."""
    target = os.path.realpath(os.fsdecode(path))
    before = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(target)
        if not stat.S_ISREG(before.st_mode):
            raise Error(errno.EINVAL, f"{target} is no regular file: it is not replaced")
    folder = os.path.dirname(target)
    part = os.path.join(folder, f".vmem-{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            if before is not None:
                _as_before(file.fileno(), before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(part)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync_folder(folder)
