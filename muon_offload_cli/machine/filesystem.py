"""What lies under a directory: which filesystem, how much room, whether it may be written."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.machine.anonymous_file import enable_direct_io, open_anonymous
from muon_offload_cli.machine.mounts import MountEntry, mount_of, read_mounts

MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_NETWORK_KINDS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    }
)


def is_network_kind(kind: str) -> bool:
    """Tell whether such a filesystem is reached over a network, or through FUSE, which does not say."""
    return kind in _NETWORK_KINDS or kind.startswith("fuse")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """The filesystem under a directory.

    Attributes:
        directory: The directory that was asked for, symlinks resolved; it need not exist.
        existing: The directory itself or its closest parent that exists.
        mount_point: Where its filesystem is mounted; empty if that cannot be found out.
        device: Number of its filesystem (``st_dev``), the same wherever that is mounted.
        kind: Type of the filesystem, such as ``xfs``; ``unknown`` if that cannot be found out.
        is_memory: Its files live in host memory.
        is_network: It is reached over a network, or through FUSE.
        total_bytes: Size of the filesystem.
        free_bytes: What an ordinary user may still write (``f_bavail``).
        writable: This user may create files in the directory, or create it in its nearest existing parent.
        read_only: The filesystem is mounted so that nobody may write.
    """

    directory: Path
    existing: Path
    mount_point: str
    device: int
    kind: str
    is_memory: bool
    is_network: bool
    total_bytes: int
    free_bytes: int
    writable: bool
    read_only: bool = False


def inspect(path: Path, *, mounts: list[MountEntry] | None = None) -> Mount:
    """Return the facts about the filesystem that `path` lies on, or would lie on once it is created.

    Args:
        path: Absolute path; it need not exist.
        mounts: Mount table to use instead of this process's own.

    Raises:
        OSError: The path cannot be looked at (no permission on a parent, a loop of symlinks, a stale mount).
    """
    directory = Path(os.path.realpath(path))
    existing, figures, device = _nearest_existing(directory)
    read_only = bool(figures.f_flag & os.ST_RDONLY)
    entry = mount_of(existing, read_mounts() if mounts is None else mounts)
    kind = entry.kind if entry else "unknown"
    return Mount(
        directory=directory,
        existing=existing,
        mount_point=entry.mount_point if entry else "",
        device=device,
        kind=kind,
        is_memory=kind in MEMORY_KINDS,
        is_network=is_network_kind(kind),
        total_bytes=figures.f_blocks * figures.f_frsize,
        free_bytes=figures.f_bavail * figures.f_frsize,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and not read_only,
        read_only=read_only,
    )


def _nearest_existing(path: Path) -> tuple[Path, os.statvfs_result, int]:
    """Return the path itself or its closest parent that exists, with figures and number of its filesystem.

    A directory shared with other ranks may vanish between any two calls; then it is its parent's turn.
    """
    for candidate in (path, *path.parents):
        try:
            return candidate, os.statvfs(candidate), candidate.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def dangling_link(path: Path) -> Path | None:
    """Return the link on the way to an absolute path whose target does not exist; None if there is none."""
    return next(
        (each for each in (*reversed(path.parents), path) if each.is_symlink() and not each.exists()), None
    )


def folder_fault(path: Path) -> str:
    """Return why `path` is no folder, in words that follow its name and a colon; empty if it is one."""
    try:
        if path.is_dir():
            return ""
        return "that is a file, not a folder" if path.exists() else "there is no such folder"
    except (OSError, ValueError) as error:  # no permission on a parent, a name too long, a NUL byte
        return f"it cannot be looked at: {error.strerror if isinstance(error, OSError) else error}"


def supports_direct_io(directory: Path) -> bool:
    """Say whether O_DIRECT works in an existing directory, by writing and reading one page of a file there.

    The file has no name and is gone when this returns. False also where no file can be written at all;
    `inspect` tells the difference.
    """
    try:
        fd = open_anonymous(directory)
    except OSError:
        return False
    try:
        return enable_direct_io(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
