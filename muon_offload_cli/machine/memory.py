"""How much host memory there is for this process: the machine's, and what its control groups leave of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muon_offload_cli.machine.cgroup import memory_groups
from muon_offload_cli.units import KIB

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory in bytes.

    Attributes:
        total_bytes: Memory of the machine.
        available_bytes: What the machine could give without swapping (``MemAvailable``).
        limit_bytes: The smallest limit of the control groups that this process is in; None: no limit.
        used_bytes: What counts against that limit now, page cache included; without a limit, what the
            machine has in use.
        headroom_bytes: What this process could still take and keep: the least over the machine and all its
            groups, dropping page cache where that helps.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    used_bytes: int
    headroom_bytes: int


def inspect(root: Path = _ROOT) -> HostMemory:
    """Read the memory figures of this machine and of this process's control groups.

    Args:
        root: Where ``proc`` and the mount points are looked for.

    Raises:
        OSError: There is no ``/proc/meminfo``.
    """
    figures = _meminfo(root)
    total = figures.get("MemTotal", 0)
    available = figures.get("MemAvailable", figures.get("MemFree", 0))
    limit: int | None = None
    used, headroom = total - available, available
    for group in memory_groups(root):
        own_limit = group.limit_bytes
        # A limit above the machine's memory limits nothing; some runtimes always set one.
        if own_limit is None or own_limit >= total:
            continue
        own_used = group.used_bytes or 0
        kept = max(0, own_used - group.reclaimable_bytes)
        headroom = min(headroom, max(0, own_limit - kept))
        if limit is None or own_limit < limit:
            limit, used = own_limit, own_used
    return HostMemory(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit,
        used_bytes=used,
        headroom_bytes=headroom,
    )


def of_size(total_bytes: int) -> HostMemory:
    """Return the figures of an idle machine of that size, without limits."""
    return HostMemory(
        total_bytes=total_bytes,
        available_bytes=total_bytes,
        limit_bytes=None,
        used_bytes=0,
        headroom_bytes=total_bytes,
    )


def peak_of_cgroup(root: Path = _ROOT) -> int | None:
    """Return the most bytes that this process's own control group ever used; None where that is not kept."""
    groups = memory_groups(root)
    return groups[0].peak_bytes if groups else None


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes of this control group were killed for want of memory; None if not known.

    Compare a figure from before the job with one from after it.
    """
    groups = memory_groups(root)
    return groups[0].oom_kills if groups else None


def _meminfo(root: Path) -> dict[str, int]:
    figures = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            figures[name] = int(words[0]) * (KIB if words[-1] == "kB" else 1)
    return figures
