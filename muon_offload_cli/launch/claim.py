"""One run at a time saves in a folder: its launcher holds a lock there, which ends with the run.

The lock is flock(2)'s on a small file, which the kernel releases however the launcher ends; nobody has to
remove anything after a crash. Several nodes save in one folder, so only the launcher of node 0 holds it.
Network filesystems forward such locks to their server (NFS since Linux 2.6.12), keep them on one machine
alone (Lustre mounted with ``localflock``), or refuse them: that last is told, and the run goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.checkpoints.names import LOCK, SAVING
from muon_offload_cli.config.schema import Config
from muon_offload_cli.errors import Level, Problem, UserError, command, does_not_fit, override, wrong

KEY = "checkpoint.directory"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a run holds of its checkpoint folder.

    Attributes:
        descriptors: Open files that hold the lock; a process that inherits them holds it too.
        remarks: What a person should know of it.
    """

    descriptors: tuple[int, ...] = ()
    remarks: tuple[Problem, ...] = ()


@contextlib.contextmanager
def sole_saver(config: Config) -> Iterator[Claim]:
    """Hold `checkpoint.directory` while the block runs; makes the folder, and removes it if it stays empty.

    Args:
        config: Resolved: the folder is an absolute path, or None.

    Raises:
        UserError: Another run holds it, or the folder cannot be made or written.
    """
    if config.checkpoint.directory is None or config.launcher.node_rank != 0:
        yield Claim()
        return
    folder = Path(config.checkpoint.directory)
    ours = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock, locked = _take(folder)
    except OSError as error:
        demand_names(folder)
        path = folder / LOCK
        if isinstance(error, PermissionError) and error.filename == str(path) and os.path.lexists(path):
            raise does_not_fit(
                f"{KEY}={folder} holds {LOCK}, which another user's run left there or holds still, and which "
                "cannot be opened.",
                command("rm", path),
                KEY,
            ) from error
        raise does_not_fit(
            f"{KEY}={folder} cannot be written: {error.strerror}: {error.filename or LOCK}.",
            f"{KEY}=/a/folder/that/you/may/write",
            KEY,
        ) from error
    try:
        yield Claim(descriptors=(lock,), remarks=() if locked else (_without_locks(folder),))
    finally:
        with contextlib.suppress(OSError):
            # While it is still held: `_take` looks for a name that went away in between.
            (folder / LOCK).unlink()
        os.close(lock)
        if ours:
            with contextlib.suppress(OSError):
                folder.rmdir()


def demand_names(folder: Path) -> None:
    """Refuse a checkpoint folder in which something else stands where a run locks a file or lets saves grow.

    Raises:
        UserError: With each such thing, and what removes it.
    """
    in_the_way = {
        LOCK: ("locks a file", stat.S_ISREG),
        SAVING: ("has a folder that its saves grow in", stat.S_ISDIR),
    }
    problems = [
        Problem(
            what=f"{KEY}={folder} holds {name}, where a run {use}, and that is none.",
            fix=command("rm", "-r", folder / name),
            keys=(KEY,),
            exit_code=3,
        )
        for name, (use, fits) in in_the_way.items()
        if (mode := _mode(folder / name)) is not None and not fits(mode)
    ]
    if problems:
        raise UserError(problems=problems)


def _mode(path: Path) -> int | None:
    """Return what stands at `path` as `lstat` has it, None if nothing: a link is neither file nor folder.

    One look, since a run may remove its lock or its saves at any time.
    """
    try:
        return path.lstat().st_mode
    except OSError:
        return None


def _take(folder: Path) -> tuple[int, bool]:
    """Return an open lock file, and whether it is locked: some filesystems cannot."""
    path = folder / LOCK
    while True:
        lock = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):
                # Whatever the umask: after a crash another user's run has to open what is left.
                os.fchmod(lock, 0o666)
            locked = _locks(lock, folder)
            if not locked or _is_still(path, lock):
                os.truncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return lock, locked
        except (OSError, UserError):
            os.close(lock)
            raise
        # The run before removed its lock file after this process had opened it.
        os.close(lock)


def _locks(lock: int, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(lock, 200).decode(errors="replace") or "another process"
        raise wrong(
            f"{KEY}={folder}: another run saves there now ({holder}), and two would replace each other's "
            "checkpoints.",
            f"wait until it has ended, or {override(KEY, f'{folder}-2')}",
            KEY,
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_still(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _without_locks(folder: Path) -> Problem:
    return Problem(
        what=f"{KEY}={folder} is on a filesystem without locks: nothing keeps a second run from saving there "
        "too.",
        fix=f"start no other run with this {KEY}",
        keys=(KEY,),
        level=Level.WARNING,
    )
