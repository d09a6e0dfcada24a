"""The folder that a rehearsal works in: locked while any of its processes lives, so that the next one knows.

The lock is flock(2)'s, which the kernel releases however its holders end. It is taken under another name than
the one that is looked for, so that nobody finds a lock that is not held yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.checkpoints.names import LOCK

PREFIX = "rehearsal-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """A folder in use.

    Attributes:
        path: Absolute if its parent is.
        held: Open files that hold the lock; a process that inherits them holds it too.
    """

    path: Path
    held: Sequence[int]


@contextlib.contextmanager
def scratch_folder(directory: Path) -> Iterator[Scratch]:
    """Make a folder in `directory`, made too if it is missing; what is in it stays when the block ends.

    Raises:
        OSError: It cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
    taken = path / f"{LOCK}.taken"
    lock = os.open(taken, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Without locks there, or room for a name, a folder that is left over stays.
        with contextlib.suppress(OSError):
            os.write(lock, socket.gethostname().encode())
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken.rename(path / LOCK)
        yield Scratch(path=path, held=(lock,))
    finally:
        # Who has it open already must not take what stays here for a folder that was left over.
        os.ftruncate(lock, 0)
        for name in (taken, path / LOCK):
            with contextlib.suppress(OSError):
                name.unlink()
        os.close(lock)


def remove_left_over(directory: Path) -> list[Path]:
    """Remove the folders in `directory` of rehearsals of this machine that were killed; returns their paths.

    One that was kept for looking at has no lock file, and one of another machine may hold a lock that this
    one does not see: both stay.
    """
    removed = []
    for folder in sorted(directory.glob(f"{PREFIX}*")):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, 1024) != socket.gethostname().encode():
                continue
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                removed.append(folder)
        finally:
            os.close(lock)
    return removed
