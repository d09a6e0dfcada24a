"""The filesystems of this machine that could hold state, and what was measured of them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muon_offload_cli.machine.filesystem import Mount, inspect
from muon_offload_cli.machine.mounts import read_mounts

# Kinds that lie on a drive of this machine; anything else is memory, network, or a view of the kernel.
_LOCAL_KINDS = frozenset({"ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRecord:
    """What `bench-disk` measured of one filesystem, reading and writing at once.

    Attributes:
        host: Name of the machine.
        mount_point: Root of the filesystem.
        read: Bytes a second.
        written: Bytes a second.
        request_bytes: Size of a request.
        threads: Threads that read, and as many that write.
        measured: Date and time, ISO 8601.
    """

    host: str
    mount_point: str
    read: float
    written: float
    request_bytes: int
    threads: int
    measured: str


def local_mounts() -> list[Mount]:
    """Return the local filesystems that this user may write to at their root."""
    found: dict[str, Mount] = {}
    for entry in read_mounts():
        if entry.kind in _LOCAL_KINDS and entry.mount_point not in found:
            try:
                mount = inspect(Path(entry.mount_point))
            except OSError:
                continue
            # A bind mount of a single file is no place for a folder.
            if mount.writable and mount.existing.is_dir():
                found[entry.mount_point] = mount
    return list(found.values())


def records_file() -> Path:
    """Return where measurements are kept: ``muon-offload/drives.json`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return root / "muon-offload" / "drives.json"


def remember(record: DriveRecord, file: Path | None = None) -> Path:
    """Keep a measurement, in place of an earlier one of the same filesystem; returns the file.

    Raises:
        OSError: The file cannot be written.
    """
    file = records_file() if file is None else file
    kept = [old for old in _read(file) if (old.host, old.mount_point) != (record.host, record.mount_point)]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(entry) for entry in (*kept, record)], indent=1) + "\n")
    temporary.replace(file)
    return file


def recall(mount_point: str, file: Path | None = None) -> DriveRecord | None:
    """Return what was measured of a filesystem of this machine; None if nothing was."""
    host = socket.gethostname()
    for record in _read(records_file() if file is None else file):
        if (record.host, record.mount_point) == (host, mount_point):
            return record
    return None


def _read(file: Path) -> list[DriveRecord]:
    """Read what is there; a damaged file counts as empty, since it only keeps what can be measured again."""
    try:
        data: Any = json.loads(file.read_text())
        return [DriveRecord(**entry) for entry in data]
    except (OSError, ValueError, TypeError):
        return []
