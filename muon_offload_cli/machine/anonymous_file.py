"""Files without a name, and whether they take direct I/O.

A file without a name is gone with its last descriptor, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

PROBE_BYTES = 4096
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def open_anonymous(directory: Path, *, tmpfile: bool = True) -> int:
    """Open a new file in `directory` that has no name, for reading and writing by its owner alone (0600).

    Args:
        directory: An existing directory.
        tmpfile: Try O_TMPFILE first; without it (or where the filesystem refuses it) the file gets a random
            name for the moment between its creation and its unlinking.

    Returns:
        The descriptor, closed on exec; the caller owns it.

    Raises:
        OSError: The directory does not exist, may not be written, or has no room for a file.
    """
    if tmpfile:
        try:
            # O_EXCL with O_TMPFILE: nobody can give the file a name later (open(2)).
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    path = directory / f"{_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Missing: a process that sees other process numbers (a container) took it for stale.
        path.unlink(missing_ok=True)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_stale(directory: Path) -> None:
    """Remove files of this rank whose process was killed in the moment in which they had a name.

    Files of other ranks, and of processes that live, are left alone.
    """
    prefix = _prefix()
    for path in directory.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not Path("/proc", pid).exists():
                path.unlink(missing_ok=True)


def _prefix() -> str:
    return f".muon-offload-rank-{os.environ.get('RANK', '0')}-"


def enable_direct_io(fd: int) -> bool:
    """Switch O_DIRECT on for an open file if its filesystem really does it; say whether it is on now.

    Some filesystems accept the flag and fail at the first request, so one page is written, read and compared.
    The first page of the file is zero afterwards.

    Raises:
        OSError: The page could not be written or read for another reason than O_DIRECT (EIO, ENOSPC, ...).
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if _round_trip(fd):
            return True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


def _round_trip(fd: int) -> bool:
    with mmap.mmap(-1, PROBE_BYTES) as page:
        pattern = secrets.token_bytes(PROBE_BYTES)
        page[:] = pattern
        written = os.pwritev(fd, [page], 0)
        page[:] = bytes(PROBE_BYTES)
        read = os.preadv(fd, [page], 0)
        same = written == read == PROBE_BYTES and page[:] == pattern
        page[:] = bytes(PROBE_BYTES)
        os.pwritev(fd, [page], 0)
    return same
