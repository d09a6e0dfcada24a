"""The mount table of this process, as the kernel writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class MountEntry:
    """One line of ``/proc/self/mountinfo``.

    Attributes:
        root: Folder of the filesystem that is mounted (``/`` but for bind mounts and cgroups).
        mount_point: Where it is mounted.
        kind: Type of the filesystem, such as ``ext4``.
        options: Mount options and super options together.
    """

    root: str
    mount_point: str
    kind: str
    options: frozenset[str]


def read_mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """Return the mounts in the order of the kernel, the oldest first (format: proc_pid_mountinfo(5)).

    Raises:
        OSError: The table cannot be read.
    """
    entries = []
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():
        own, _, filesystem = line.partition(" - ")
        fields, kind_fields = own.split(" "), filesystem.split(" ")
        if len(fields) < 6 or len(kind_fields) < 3:
            continue
        options = {*fields[5].split(","), *kind_fields[2].split(",")}
        entries.append(
            MountEntry(
                root=_unescape(fields[3]),
                mount_point=_unescape(fields[4]),
                kind=kind_fields[0],
                options=frozenset(options),
            )
        )
    return entries


def mount_of(path: Path, mounts: list[MountEntry]) -> MountEntry | None:
    """Return the mount under an absolute path without symlinks: the longest prefix, the newest of equals."""
    best: MountEntry | None = None
    for entry in mounts:
        covers = path == Path(entry.mount_point) or Path(entry.mount_point) in path.parents
        if covers and (best is None or len(entry.mount_point) >= len(best.mount_point)):
            best = entry
    return best


def _unescape(text: str) -> str:
    """Undo the octal escapes with which the kernel writes blanks, tabs, newlines and backslashes."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)
