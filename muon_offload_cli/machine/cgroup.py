"""This process's control groups, version 1 or 2, and what they say of its memory.

Files and meanings: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.machine.mounts import read_mounts

_NO_LIMIT_V1 = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size that a signed 64-bit number holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """One level of the control groups that this process is in.

    Attributes:
        directory: Where its files are.
        version: 1 or 2.
    """

    directory: Path
    version: int

    @property
    def limit_bytes(self) -> int | None:
        """What the group may use at most; None: no limit of its own."""
        if self.version == 2:
            return _number(self.directory / "memory.max")
        limit = _number(self.directory / "memory.limit_in_bytes")
        return None if limit is None or limit >= _NO_LIMIT_V1 else limit

    @property
    def used_bytes(self) -> int | None:
        """What it uses now, page cache included."""
        return _number(self.directory / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))

    @property
    def peak_bytes(self) -> int | None:
        """The most that it ever used; None where the kernel does not keep it."""
        return _number(self.directory / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"))

    @property
    def oom_kills(self) -> int | None:
        """Processes of the group (version 2: and of those below it) killed for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _fields(self.directory / name).get("oom_kill")

    @property
    def reclaimable_bytes(self) -> int:
        """Page cache that the kernel can drop; shared memory and pinned pages are not in these lists."""
        stat = _fields(self.directory / "memory.stat")
        prefix = "" if self.version == 2 else "total_"
        return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups whose memory limits bind this process, its own first; empty without control groups.

    Args:
        root: Where ``proc`` and the mount points are looked for.
    """
    for version, folders in own_folders("memory", root):
        groups = [
            MemoryGroup(directory=folder, version=version)
            for folder in folders
            if _has_memory_files(folder, version)
        ]
        if groups:
            return groups
    return []


def own_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, list[Path]]]:
    """Yield version and folders of each mounted hierarchy, from this process's own up to the mount's top.

    Version 1 comes first: where both are mounted, a controller belongs to one of them, and only a version 1
    mount names it. In a container, the path in ``/proc/self/cgroup`` may be the host's and not exist under
    the mount that the container sees, so a folder need not exist.

    Args:
        controller: Its name in version 1, such as ``memory`` or ``blkio``.
        root: Where ``proc`` and the mount points are looked for.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = read_mounts(root / "proc/self/mountinfo")
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    v1 = [
        (1, entry, controller) for entry in mounts if entry.kind == "cgroup" and controller in entry.options
    ]
    v2 = [(2, entry, "") for entry in mounts if entry.kind == "cgroup2"]
    for version, mount, name in v1 + v2:
        if name in paths:
            top = root / mount.mount_point.lstrip("/")
            yield version, _upwards(top, _below(paths[name], mount.root))


def _below(path: str, mount_root: str) -> str:
    """Return the path inside a mount that shows only `mount_root` of the hierarchy."""
    if mount_root != "/" and (path == mount_root or path.startswith(f"{mount_root}/")):
        return path[len(mount_root) :]
    return path


def _upwards(top: Path, inside: str) -> list[Path]:
    parts = [part for part in inside.split("/") if part and part != ".."]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _has_memory_files(directory: Path, version: int) -> bool:
    names = ("memory.current", "memory.max") if version == 2 else ("memory.limit_in_bytes",)
    return any((directory / name).exists() for name in names)


def _number(path: Path) -> int | None:
    """Read a file with one number; None for ``max`` and for a file that is not there or cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
