"""Creating the file that a store's bytes lie in: no name, blocks reserved, readable by its owner alone."""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from muon_offload_cli.errors import UserError, command, does_not_fit, override, wrong
from muon_offload_cli.machine.anonymous_file import open_anonymous
from muon_offload_cli.machine.filesystem import Mount, inspect
from muon_offload_cli.storage.extent import ALIGNMENT
from muon_offload_cli.storage.store import StoreError, describe_errno
from muon_offload_cli.storage.system_calls import SYSTEM, SystemCalls
from muon_offload_cli.units import format_bytes, round_up

_logger = logging.getLogger(__name__)

_KEY = "offload.directory"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CREATE_ATTEMPTS = 100


@dataclass(kw_only=True, slots=True)
class ReservedFile:
    """An open file without a name whose blocks are reserved.

    Attributes:
        fd: Its descriptor; -1 once closed.
        directory: Where it lies.
        size: Bytes reserved, a multiple of 4096 and at least that.
        direct: O_DIRECT is on.
        created_directory: The directory did not exist before; it is removed with the file if it is empty.
    """

    fd: int
    directory: Path
    size: int
    direct: bool = False
    created_directory: bool = field(default=False)

    def close(self) -> None:
        """Close the file, which frees its blocks, and remove the directory if it was made for this file."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        os.close(fd)
        if self.created_directory:
            _remove_empty(self.directory)


def create_reserved(
    directory: Path,
    size: int,
    direct: bool,
    *,
    owner: str = "this rank",
    calls: SystemCalls = SYSTEM,
) -> ReservedFile:
    """Create a file of `size` zero bytes without a name, and reserve its blocks.

    A full disk is therefore an error now, and never a SIGBUS or ENOSPC in the middle of training. Several
    processes may do this in the same directory at once.

    Args:
        directory: Absolute; created with mode 0700 if only its last part is missing.
        size: Bytes to reserve; rounded up to 4096.
        direct: Switch O_DIRECT on if the filesystem does it, checked with one real page.
        owner: Whose file it is, for error texts (``rank 3``).
        calls: System calls to use.

    Returns:
        The open file; the caller closes it.

    Raises:
        UserError: The directory cannot be used (exit code 2), or has no room (exit code 3).
        StoreError: The drive reports an error.
    """
    mount = _usable(directory)
    needed = round_up(max(size, 1), ALIGNMENT)
    file = _create(directory, needed)
    if file.created_directory and mount.mount_point == "/":
        _logger.warning(
            "%s did not exist and was made on the root filesystem (%s): is its drive mounted?",
            directory,
            mount.kind,
        )
    try:
        # Reserved before O_DIRECT is on: where the C library has to write the blocks itself, it writes
        # single bytes, which direct I/O refuses.
        _reserve(file, calls)
        if direct:
            file.direct = calls.enable_direct_io(file.fd)
    except OSError as error:
        file.close()
        if error.errno in _NO_ROOM:
            raise _no_room(mount, needed, owner, error) from error
        raise StoreError(
            describe_errno(error),
            path=str(directory),
            operation="open",
            nbytes=needed,
            errno=error.errno or 0,
        ) from error
    except BaseException:
        file.close()
        raise
    return file


def _reserve(file: ReservedFile, calls: SystemCalls) -> None:
    while True:
        try:
            calls.posix_fallocate(file.fd, 0, file.size)
        except InterruptedError:
            continue
        return


def _usable(directory: Path) -> Mount:
    if not directory.is_absolute():
        raise wrong(f"{_KEY}={directory} is relative.", override(_KEY, Path.cwd() / directory), _KEY)
    try:
        mount = inspect(directory)
        kind = _kind(directory)
        parent = _kind(directory.parent)
    except OSError as error:
        raise wrong(
            f"{_KEY}={directory} cannot be looked at: {describe_errno(error)}.",
            f"set {_KEY} to a directory that you may use",
            _KEY,
        ) from error
    if kind not in (0, stat.S_IFDIR):
        raise wrong(f"{_KEY}={directory} is not a directory.", f"set {_KEY} to a directory", _KEY)
    if not kind and parent != stat.S_IFDIR:
        raise wrong(
            f"{_KEY}={directory} cannot be created: {directory.parent} does not exist or is a file.",
            command("mkdir", "-p", directory),
            _KEY,
        )
    if mount.is_memory:
        raise wrong(
            f"{_KEY}={directory} is on {mount.kind}, which is host memory: the state would not leave it.",
            f"set {_KEY} to a directory on a drive, or offload.engine=host",
            _KEY,
        )
    return mount


def _kind(path: Path) -> int:
    """Return the file type bits of a path, 0 if it does not exist; one call, since other ranks remove it."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _create(directory: Path, needed: int) -> ReservedFile:
    """Make the directory if needed and open the file in it.

    Another process that made the directory removes it when its own file closes, possibly between the two
    steps here; then both are done again. The second step then says ENOENT, or EPERM (ext4_new_inode for a
    directory without links).
    """
    created = False
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            created = _make(directory)
            fd = open_anonymous(directory)
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.EPERM) and attempt < _CREATE_ATTEMPTS - 1
            if gone:
                continue
            if created:
                _remove_empty(directory)
            raise _cannot_create(directory, error) from error
        break
    return ReservedFile(fd=fd, directory=directory, size=needed, created_directory=created)


def _make(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _cannot_create(directory: Path, error: OSError) -> UserError:
    what = f"{_KEY}={directory}: no file can be created there: {describe_errno(error)}."
    if error.errno in _NO_ROOM:
        return does_not_fit(what, f"free room on that disk, or set {_KEY} to another one", _KEY)
    if error.errno == errno.EROFS:
        return does_not_fit(what, f"set {_KEY} to a directory on a filesystem that may be written", _KEY)
    return wrong(what, f"set {_KEY} to a directory that you may write", _KEY)


def _no_room(mount: Mount, needed: int, owner: str, error: OSError) -> UserError:
    """Say how much is missing; called after the partly reserved file was closed, so that its blocks count."""
    need = f"{owner} needs {format_bytes(needed)} on {mount.directory} ({mount.kind})"
    elsewhere = f"set {_KEY} to a larger mount (of several, leave this one out), or raise data parallelism"
    if error.errno == errno.EFBIG:
        return does_not_fit(
            f"{need}, where a file of that size is not allowed: {describe_errno(error)}.",
            f"raise the limit on file sizes (ulimit -f), or {elsewhere}",
            _KEY,
        )
    if error.errno == errno.EDQUOT:
        return does_not_fit(
            f"{need}, which is more than your disk quota leaves: {describe_errno(error)}.",
            f"raise the quota, or {elsewhere}",
            _KEY,
        )
    free = inspect(mount.directory).free_bytes
    missing = needed - free
    first = f"free {format_bytes(missing)}" if missing > 0 else "free the room that all ranks need together"
    return does_not_fit(f"{need}, which has {format_bytes(free)} free.", f"{first}, {elsewhere}", _KEY)


def _remove_empty(directory: Path) -> None:
    # Another rank may use it, or may have removed it: both are fine.
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.EACCES):
            raise
